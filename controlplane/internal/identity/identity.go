// Package identity knows who is calling: workspaces, users, groups, what they
// may, API keys and the principal that a bearer stands for.
package identity

import "time"

// Role says what a principal may do.
type Role string

// The roles, from most to least.
const (
	InstanceAdmin Role = "instance_admin" // workspaces and runners, and every workspace's admin routes
	Admin         Role = "admin"          // /admin of its own workspace
	Member        Role = "member"         // sessions, and tools that it may read
)

// DefaultWorkspace is the workspace of the bootstrap admin.
const DefaultWorkspace = "default"

// Principal is the authenticated caller of one request.
type Principal struct {
	Workspace string
	UserID    string
	KeyID     string // empty for the bootstrap admin
	Role      Role
}

// IsAdmin reports whether p may use /admin of its workspace.
func (p Principal) IsAdmin() bool { return p.Role == Admin || p.Role == InstanceAdmin }

// IsInstanceAdmin reports whether p may manage workspaces and runners.
func (p Principal) IsInstanceAdmin() bool { return p.Role == InstanceAdmin }

// Workspace is a tenant.
type Workspace struct {
	ID        string // chosen by the admin: ^[a-z0-9][a-z0-9_-]{0,62}$
	Name      string
	CreatedAt time.Time
}

// User is a person or a program of one workspace.
type User struct {
	ID        string
	Workspace string
	Name      string
	Role      Role
	Disabled  bool
	CreatedAt time.Time
}

// APIKey stands for a user. The secret itself is shown once and never kept.
type APIKey struct {
	ID        string
	Workspace string
	UserID    string
	Name      string
	Hint      string // the first characters of the secret, to tell keys apart
	CreatedAt time.Time
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: live
}

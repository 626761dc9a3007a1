package httpapi

import (
	"context"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
)

// Identity knows who is calling, and keeps workspaces, users, keys and groups. It
// checks the workspace of each; the route table checked the role.
type Identity interface {
	Authenticate(ctx context.Context, bearer string) (identity.Principal, error)
	workspaces
	users
	keys
	groups
	permissions
}

type workspaces interface {
	Workspaces(ctx context.Context, p identity.Principal, pg page.Page) ([]identity.Workspace, string, error)
	CreateWorkspace(ctx context.Context, p identity.Principal, w identity.Workspace) (identity.Workspace, error)
	Workspace(ctx context.Context, p identity.Principal, id string) (identity.Workspace, error)
	DeleteWorkspace(ctx context.Context, p identity.Principal, id string) error
}

type users interface {
	Users(ctx context.Context, p identity.Principal, workspace string, pg page.Page) ([]identity.User, string, error)
	CreateUser(ctx context.Context, p identity.Principal, u identity.User) (identity.User, error)
	User(ctx context.Context, p identity.Principal, id string) (identity.User, error)
	UpdateUser(ctx context.Context, p identity.Principal, id string, change identity.Change) (identity.User, error)
	DeleteUser(ctx context.Context, p identity.Principal, id string) error
}

type keys interface {
	Keys(ctx context.Context, p identity.Principal, workspace string, pg page.Page) ([]identity.APIKey, string, error)
	CreateKey(ctx context.Context, p identity.Principal, k identity.APIKey) (identity.APIKey, string, error)
	RevokeKey(ctx context.Context, p identity.Principal, id string) error
}

type groups interface {
	Groups(ctx context.Context, p identity.Principal, workspace string, pg page.Page) ([]identity.Group, string, error)
	CreateGroup(ctx context.Context, p identity.Principal, g identity.Group) (identity.Group, error)
	Group(ctx context.Context, p identity.Principal, id string) (identity.Group, error)
	RenameGroup(ctx context.Context, p identity.Principal, id, name string) (identity.Group, error)
	DeleteGroup(ctx context.Context, p identity.Principal, id string) error
	Members(ctx context.Context, p identity.Principal, group string, pg page.Page) ([]identity.User, string, error)
	AddMember(ctx context.Context, p identity.Principal, group, user string) (identity.User, error)
	RemoveMember(ctx context.Context, p identity.Principal, group, user string) error
}

type permissions interface {
	Permissions(ctx context.Context, p identity.Principal, workspace string) (identity.PermissionSet, error)
	PutPermissions(ctx context.Context, p identity.Principal, workspace string, set identity.PermissionSet) (identity.PermissionSet, error)
}

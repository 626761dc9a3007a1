package identity

import (
	"context"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/shared/fault"
)

// Group is some users of one workspace, to grant things to at once.
type Group struct {
	ID        string
	Workspace string
	Name      string
	CreatedAt time.Time
}

// Permissions is what members may do beyond running tools. The zero
// Permissions allow nothing; admins have all.
type Permissions struct {
	Tools       bool // make and change Python tools
	ToolsImport bool // make and change them, as an import does
	ToolsExport bool // export them
	PublicTools bool // share them with everybody in the workspace
}

// allPermissions is what admins have.
var allPermissions = Permissions{Tools: true, ToolsImport: true, ToolsExport: true, PublicTools: true}

// Or is what either of two allows.
func (p Permissions) Or(q Permissions) Permissions {
	return Permissions{
		Tools: p.Tools || q.Tools, ToolsImport: p.ToolsImport || q.ToolsImport,
		ToolsExport: p.ToolsExport || q.ToolsExport, PublicTools: p.PublicTools || q.PublicTools,
	}
}

// PermissionSet is the permissions of a workspace: of every member, and what
// groups add to that, by group.
type PermissionSet struct {
	Defaults Permissions
	Groups   map[string]Permissions
}

// Groups keeps groups, their members and what they may. It says NotFound and
// Conflict as Store does.
type Groups interface {
	Groups(ctx context.Context, workspace string, p page.Page) ([]Group, string, error)
	Group(ctx context.Context, workspace, id string) (Group, error)
	InsertGroup(ctx context.Context, g Group, e audit.Event) error
	RenameGroup(ctx context.Context, workspace, id, name string, e audit.Event) (Group, error)
	DeleteGroup(ctx context.Context, workspace, id string, e audit.Event) error

	Members(ctx context.Context, group string, p page.Page) ([]User, string, error)
	AddMember(ctx context.Context, g Group, user string, e audit.Event) (User, error) // again: changes nothing
	RemoveMember(ctx context.Context, g Group, user string, e audit.Event) error
	GroupsOf(ctx context.Context, workspace, user string) ([]string, error)

	Permissions(ctx context.Context, workspace string) (PermissionSet, error)                     // every group is there
	PutPermissions(ctx context.Context, workspace string, set PermissionSet, e audit.Event) error // Groups nil: those stay
	PermissionsOf(ctx context.Context, workspace, user string) (Permissions, error)               // defaults and groups, together
}

// Groups lists the groups of a workspace by id; "" is the principal's own.
func (s *Service) Groups(ctx context.Context, p Principal, workspace string, pg page.Page) ([]Group, string, error) {
	workspace, err := s.workspace(ctx, p, workspace)
	if err != nil {
		return nil, "", err
	}
	return s.Store.Groups(ctx, workspace, pg)
}

// CreateGroup makes a group in g.Workspace ("": the principal's own) with a
// name that is new there.
func (s *Service) CreateGroup(ctx context.Context, p Principal, g Group) (Group, error) {
	workspace, err := s.workspace(ctx, p, g.Workspace)
	if err != nil {
		return Group{}, err
	}
	if err := checkName(g.Name); err != nil {
		return Group{}, err
	}
	g.ID, g.Workspace, g.CreatedAt = "grp_"+s.NewID(), workspace, s.now()
	return g, s.Store.InsertGroup(ctx, g, s.event(p, workspace, audit.GroupCreate, g.ID))
}

// Group returns one group.
func (s *Service) Group(ctx context.Context, p Principal, id string) (Group, error) {
	return s.Store.Group(ctx, scope(p), id)
}

// RenameGroup gives a group another name.
func (s *Service) RenameGroup(ctx context.Context, p Principal, id, name string) (Group, error) {
	g, err := s.Group(ctx, p, id)
	if err != nil {
		return Group{}, err
	}
	if err := checkName(name); err != nil {
		return Group{}, err
	}
	return s.Store.RenameGroup(ctx, g.Workspace, id, name, s.event(p, g.Workspace, audit.GroupUpdate, id))
}

// DeleteGroup removes a group with its permissions; its members stay users.
func (s *Service) DeleteGroup(ctx context.Context, p Principal, id string) error {
	g, err := s.Group(ctx, p, id)
	if err != nil {
		return err
	}
	return s.Store.DeleteGroup(ctx, g.Workspace, id, s.event(p, g.Workspace, audit.GroupDelete, id))
}

// Members lists the users of a group by id.
func (s *Service) Members(ctx context.Context, p Principal, group string, pg page.Page) ([]User, string, error) {
	g, err := s.Group(ctx, p, group)
	if err != nil {
		return nil, "", err
	}
	return s.Store.Members(ctx, g.ID, pg)
}

// AddMember puts a user of the group's workspace into it.
func (s *Service) AddMember(ctx context.Context, p Principal, group, user string) (User, error) {
	g, err := s.Group(ctx, p, group)
	if err != nil {
		return User{}, err
	}
	return s.Store.AddMember(ctx, g, user, s.memberEvent(p, g, audit.GroupMemberAdd, user))
}

// RemoveMember takes a user out of a group.
func (s *Service) RemoveMember(ctx context.Context, p Principal, group, user string) error {
	g, err := s.Group(ctx, p, group)
	if err != nil {
		return err
	}
	return s.Store.RemoveMember(ctx, g, user, s.memberEvent(p, g, audit.GroupMemberRemove, user))
}

func (s *Service) memberEvent(p Principal, g Group, action, user string) audit.Event {
	e := s.event(p, g.Workspace, action, g.ID)
	e.Detail = user
	return e
}

// Permissions returns those of a workspace with all its groups; "" is the
// principal's own.
func (s *Service) Permissions(ctx context.Context, p Principal, workspace string) (PermissionSet, error) {
	workspace, err := s.workspace(ctx, p, workspace)
	if err != nil {
		return PermissionSet{}, err
	}
	return s.Store.Permissions(ctx, workspace)
}

// PutPermissions replaces the permissions of a workspace: groups that set
// does not name lose theirs, unless it names none at all (nil).
func (s *Service) PutPermissions(ctx context.Context, p Principal, workspace string, set PermissionSet) (PermissionSet, error) {
	workspace, err := s.workspace(ctx, p, workspace)
	if err != nil {
		return PermissionSet{}, err
	}
	if len(set.Groups) > maxPermissionGroups {
		return PermissionSet{}, fault.New(fault.Invalid, "groups may name at most %d groups", maxPermissionGroups).On("groups")
	}
	if err := s.Store.PutPermissions(ctx, workspace, set, s.event(p, workspace, audit.PermissionsPut, workspace)); err != nil {
		return PermissionSet{}, err
	}
	return s.Store.Permissions(ctx, workspace)
}

const maxPermissionGroups = 10_000

// Allowed is what p itself may do: what its workspace gives every member and
// what its groups add.
func (s *Service) Allowed(ctx context.Context, p Principal) (Permissions, error) {
	if p.IsAdmin() {
		return allPermissions, nil
	}
	return s.Store.PermissionsOf(ctx, p.Workspace, p.UserID)
}

// GroupsOf lists the ids of the groups that p is in.
func (s *Service) GroupsOf(ctx context.Context, p Principal) ([]string, error) {
	return s.Store.GroupsOf(ctx, p.Workspace, p.UserID)
}

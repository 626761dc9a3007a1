package httpapi

import (
	"context"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
)

// Identity knows who is calling, and keeps workspaces, users and keys. It
// checks the workspace of each; the route table checked the role.
type Identity interface {
	Authenticate(ctx context.Context, bearer string) (identity.Principal, error)
	workspaces
	users
	keys
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

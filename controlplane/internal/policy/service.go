package policy

import (
	"context"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

// Store keeps the policies that workspaces have set.
type Store interface {
	// Policy returns the workspace's own policy, or a fault of kind NotFound.
	Policy(ctx context.Context, workspace string) (Policy, error)
	// PutPolicy replaces it and records e in the same transaction.
	PutPolicy(ctx context.Context, p Policy, e audit.Event) error
	// DeletePolicy drops it, if there is one, and records e likewise.
	DeletePolicy(ctx context.Context, workspace string, e audit.Event) error
}

// Service answers which policy a workspace has. Its methods may be called
// from several goroutines.
type Service struct {
	Store    Store
	Default  Policy // of every workspace without its own
	Ceilings Ceilings
	Enabled  bool // whether this control plane offers sandboxes at all
	Now      func() time.Time
	NewID    func() string
}

// Get returns the policy of the caller's workspace: its own or the default.
func (s *Service) Get(ctx context.Context, p identity.Principal) (Policy, error) {
	return s.Resolve(ctx, p.Workspace)
}

// Resolve returns the policy that a sandbox of workspace starts with now.
func (s *Service) Resolve(ctx context.Context, workspace string) (Policy, error) {
	if err := s.ready(); err != nil {
		return Policy{}, err
	}
	own, err := s.Store.Policy(ctx, workspace)
	if fault.Is(err, fault.NotFound) {
		own = s.Default
		own.WorkspaceID = workspace
		return own, nil
	}
	return own, err
}

// Put replaces the policy of the caller's workspace and returns it as kept.
func (s *Service) Put(ctx context.Context, p identity.Principal, next Policy) (Policy, error) {
	if err := s.ready(); err != nil {
		return Policy{}, err
	}
	if next.WorkspaceID != p.Workspace {
		return Policy{}, fault.New(fault.Forbidden, "workspace_id must be your own workspace").On("workspace_id")
	}
	next, err := Normalise(next, s.Ceilings)
	if err != nil {
		return Policy{}, err
	}
	e := s.event(p, audit.PolicyPut)
	e.PolicyDigest = next.Digest()
	return next, s.Store.PutPolicy(ctx, next, e)
}

// Delete drops the policy of the caller's workspace, so that the default
// holds again. It succeeds as well when there is none.
func (s *Service) Delete(ctx context.Context, p identity.Principal) error {
	if err := s.ready(); err != nil {
		return err
	}
	return s.Store.DeletePolicy(ctx, p.Workspace, s.event(p, audit.PolicyDelete))
}

func (s *Service) ready() error {
	if s.Enabled {
		return nil
	}
	return fault.New(fault.Unavailable, "sandbox_policy_registry not initialised")
}

func (s *Service) event(p identity.Principal, action string) audit.Event {
	return audit.Event{
		ID: audit.ID(s.NewID()), At: s.Now(), Workspace: p.Workspace, Actor: p.UserID,
		Action: action, Object: p.Workspace, Outcome: audit.OK,
	}
}

package session

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/shared/fault"
)

// internalPrefix is what the ids of internal sessions start with.
const internalPrefix = "own_"

// What an internal session may do.
const (
	internalTTL  = 3 * time.Minute // when nobody closes it before
	internalWall = 10              // seconds for its call, at most
)

// Internal reports whether a session is the platform's own: a throw-away
// sandbox of a workspace, in which one thing is found out. Nobody sees it.
func Internal(id string) bool { return strings.HasPrefix(id, internalPrefix) }

// Platform is who owns the internal sessions of a workspace.
func Platform(workspace string) identity.Principal {
	return identity.Principal{Workspace: workspace, UserID: audit.ControlPlane, Role: identity.Member}
}

// CreateInternal makes an internal session. Its sandbox has the workspace's
// policy but no network, no shared files and 10 s.
func (s *Service) CreateInternal(ctx context.Context, workspace string) (Session, error) {
	now := s.Now()
	c := Session{
		ID: internalPrefix + s.NewID(), Workspace: workspace, Owner: audit.ControlPlane, Status: New,
		IdleTTL: internalTTL, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(internalTTL),
	}
	return c, s.Store.InsertSession(ctx, c, s.event(c, audit.ControlPlane, audit.SessionCreated, audit.OK, "internal"))
}

// CloseInternal ends an internal session. When it can't, the session's TTL
// does.
func (s *Service) CloseInternal(ctx context.Context, c Session) {
	err := s.close(context.WithoutCancel(ctx), c, audit.ControlPlane, ClosedByClient, Ending{})
	if err != nil && !fault.Is(err, fault.Conflict) {
		s.Log.WarnContext(ctx, "close an internal session", "session", c.ID, "error", err)
	}
}

// bare is p for a sandbox that needs nothing but a processor.
func bare(p policy.Policy) policy.Policy {
	p.FSAllowlist = slices.DeleteFunc(slices.Clone(p.FSAllowlist), func(path string) bool { return path != "/workspace" })
	p.NetworkAllowlist = []string{}
	p.WallClockSeconds = min(p.WallClockSeconds, internalWall)
	return p
}

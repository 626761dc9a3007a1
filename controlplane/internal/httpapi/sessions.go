package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// Sessions opens and ends agent sessions; another's are not found.
type Sessions interface {
	Create(ctx context.Context, p identity.Principal, n session.NewSession) (session.Session, error)
	Get(ctx context.Context, p identity.Principal, id string) (session.Session, error)
	List(ctx context.Context, p identity.Principal, pg page.Page) ([]session.Session, string, error)
	Close(ctx context.Context, p identity.Principal, id string) error
}

type createSessionRequest struct {
	IdleTTL given[int64] `json:"idle_ttl_seconds"`
	TTL     given[int64] `json:"ttl_seconds"`
}

type sessionResponse struct {
	ID           string            `json:"id"`
	WorkspaceID  string            `json:"workspace_id"`
	Status       string            `json:"status"`
	Reason       string            `json:"reason,omitempty"`
	Epoch        int64             `json:"epoch"`
	CreatedAt    *time.Time        `json:"created_at"`
	LastUsedAt   *time.Time        `json:"last_used_at"`
	ExpiresAt    *time.Time        `json:"expires_at"`
	IdleTTL      int64             `json:"idle_ttl_seconds"`
	RunnerID     string            `json:"runner_id,omitempty"`
	Backend      string            `json:"backend,omitempty"`
	Isolation    string            `json:"isolation,omitempty"`
	ImageDigest  string            `json:"image_digest,omitempty"`
	PolicyDigest string            `json:"policy_digest,omitempty"`
	Enforced     map[string]string `json:"enforced,omitempty"`
}

func newSessionResponse(s session.Session) sessionResponse {
	return sessionResponse{
		ID: s.ID, WorkspaceID: s.Workspace, Status: string(s.Status), Reason: s.Reason, Epoch: s.Epoch,
		CreatedAt: instant(s.CreatedAt), LastUsedAt: instant(s.LastUsedAt), ExpiresAt: instant(s.ExpiresAt),
		IdleTTL: int64(s.IdleTTL / time.Second), RunnerID: s.Runner, Backend: s.Backend, Isolation: s.Isolation,
		ImageDigest: s.ImageDigest, PolicyDigest: s.PolicyDigest, Enforced: s.Enforced,
	}
}

func (in createSessionRequest) session() (session.NewSession, error) {
	idle, err := seconds("idle_ttl_seconds", in.IdleTTL)
	if err != nil {
		return session.NewSession{}, err
	}
	ttl, err := seconds("ttl_seconds", in.TTL)
	return session.NewSession{IdleTTL: idle, TTL: ttl}, err
}

func seconds(name string, g given[int64]) (time.Duration, error) {
	if !g.Set {
		return 0, nil
	}
	if g.Value < 1 || g.Value > int64(session.MaxTTL/time.Second) {
		return 0, fault.New(fault.Invalid, "%s must be from 1 to %d", name, int64(session.MaxTTL/time.Second)).On(name)
	}
	return time.Duration(g.Value) * time.Second, nil
}

func (s *Server) createSession(c echo.Context) error {
	var in createSessionRequest
	if err := decodeOptional(c, maxBody, &in); err != nil {
		return err
	}
	n, err := in.session()
	if err != nil {
		return err
	}
	made, err := s.Sessions.Create(c.Request().Context(), principal(c), n)
	if err != nil {
		return err
	}
	c.Response().Header().Set("Location", "/v1/agent-sessions/"+made.ID)
	return write(c, http.StatusCreated, newSessionResponse(made))
}

func (s *Server) listSessions(c echo.Context) error {
	pg, err := pageOf(c)
	if err != nil {
		return err
	}
	found, next, err := s.Sessions.List(c.Request().Context(), principal(c), pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newSessionResponse))
}

func (s *Server) getSession(c echo.Context) error {
	found, err := s.Sessions.Get(c.Request().Context(), principal(c), c.Param("session"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newSessionResponse(found))
}

func (s *Server) closeSession(c echo.Context) error {
	// Closing ends what is open in the session; a client that goes away must
	// not leave it half done.
	ctx := context.WithoutCancel(c.Request().Context())
	if err := s.Sessions.Close(ctx, principal(c), c.Param("session")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

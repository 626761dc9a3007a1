package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
)

// AuditLog is the record of one workspace, newest first.
type AuditLog interface {
	AuditEvents(ctx context.Context, workspace string, pg page.Page) ([]audit.Event, string, error)
}

type auditResponse struct {
	ID           string     `json:"id"`
	At           *time.Time `json:"at"`
	Actor        string     `json:"actor"`
	Action       string     `json:"action"`
	Object       string     `json:"object"`
	Outcome      string     `json:"outcome"`
	PolicyDigest string     `json:"policy_digest,omitempty"`
	Detail       string     `json:"detail,omitempty"`
}

func newAuditResponse(e audit.Event) auditResponse {
	return auditResponse{
		ID: e.ID, At: instant(e.At), Actor: e.Actor, Action: e.Action, Object: e.Object,
		Outcome: e.Outcome, PolicyDigest: e.PolicyDigest, Detail: e.Detail,
	}
}

func (s *Server) listAuditEvents(c echo.Context) error {
	pg, err := pageOf(c)
	if err != nil {
		return err
	}
	found, next, err := s.Audit.AuditEvents(c.Request().Context(), principal(c).Workspace, pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newAuditResponse))
}

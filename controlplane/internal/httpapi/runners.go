package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
)

// Fleet tells which runners were seen.
type Fleet interface {
	Runners(ctx context.Context) ([]fleet.Runner, error)
}

type runnerResponse struct {
	ID            string            `json:"id"`
	Incarnation   string            `json:"incarnation"`
	Pool          string            `json:"pool"`
	State         string            `json:"state"`
	Backend       string            `json:"backend"`
	Version       string            `json:"version"`
	Labels        map[string]string `json:"labels"`
	Enforces      map[string]string `json:"enforces"`
	Slots         int               `json:"slots"`
	Used          int               `json:"used"`
	StartFailures int               `json:"start_failures"`
	StartFailure  string            `json:"start_failure"`
	FirstSeen     *time.Time        `json:"first_seen"`
	LastBeat      *time.Time        `json:"last_beat"`
}

func newRunnerResponse(r fleet.Runner) runnerResponse {
	return runnerResponse{
		ID: r.ID, Incarnation: r.Incarnation, Pool: r.Pool, State: string(r.State), Backend: r.Backend,
		Version: r.Version, Labels: r.Labels, Enforces: r.Enforces, Slots: r.Slots, Used: r.Used,
		StartFailures: r.StartFailures, StartFailure: r.StartFailure, FirstSeen: instant(r.FirstSeen), LastBeat: instant(r.LastBeat),
	}
}

func (s *Server) listRunners(c echo.Context) error {
	found, err := s.Fleet.Runners(c.Request().Context())
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, "", newRunnerResponse))
}

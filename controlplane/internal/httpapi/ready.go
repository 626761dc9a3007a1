package httpapi

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/shared/fault"
)

// readyTimeout bounds a look at all parts.
const readyTimeout = 3 * time.Second

type readyResponse struct {
	Status string            `json:"status"` // "ready" or "not ready"
	Parts  map[string]string `json:"parts"`  // "ok" or a sentence, by part
}

// ready is 200 when every part that requests need is there, else 503 with
// what is missing. Causes go to the log: a stranger may ask.
func (s *Server) ready(c echo.Context) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), readyTimeout)
	defer cancel()
	out := readyResponse{Status: "ready", Parts: map[string]string{}}
	code := http.StatusOK
	parts := s.Ready(ctx)
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		out.Parts[name] = "ok"
		if err := parts[name]; err != nil {
			out.Parts[name] = sentence(err)
			out.Status, code = "not ready", http.StatusServiceUnavailable
			s.Log.WarnContext(ctx, "part not ready", "part", name, "error", err)
		}
	}
	if code != http.StatusOK {
		c.Response().Header().Set("Retry-After", retryAfter[code])
	}
	return write(c, code, out)
}

// sentence is the public half of an error.
func sentence(err error) string {
	if f := fault.From(err); f.Kind != fault.Internal {
		return f.Message
	}
	return "not reachable"
}

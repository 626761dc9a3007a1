package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// problem is an RFC 9457 problem document.
type problem struct {
	Type      string `json:"type"`
	Title     string `json:"title"`
	Status    int    `json:"status"`
	Detail    string `json:"detail"`
	Code      string `json:"code"`
	Field     string `json:"field,omitempty"`
	RequestID string `json:"request_id"`
}

// statuses is the only place where a fault becomes an HTTP status.
var statuses = map[fault.Kind]int{
	fault.Invalid:            http.StatusBadRequest,
	fault.Unauthenticated:    http.StatusUnauthorized,
	fault.Forbidden:          http.StatusForbidden,
	fault.NotFound:           http.StatusNotFound,
	fault.Timeout:            http.StatusRequestTimeout,
	fault.Conflict:           http.StatusConflict,
	fault.Gone:               http.StatusGone,
	fault.PreconditionFailed: http.StatusPreconditionFailed,
	fault.TooLarge:           http.StatusRequestEntityTooLarge,
	fault.Unsupported:        http.StatusUnsupportedMediaType,
	fault.Busy:               http.StatusTooManyRequests,
	fault.Unavailable:        http.StatusServiceUnavailable,
	fault.Internal:           http.StatusInternalServerError,
}

// retryAfter is how long, in seconds, a client should stay away.
var retryAfter = map[int]string{
	http.StatusTooManyRequests:    "1",
	http.StatusServiceUnavailable: "2",
}

// newProblem turns any error into what the caller may see of it.
func newProblem(err error, requestID string) problem {
	if he, ok := errors.AsType[*echo.HTTPError](err); ok {
		return routerProblem(he, requestID)
	}
	if u, ok := errors.AsType[*pytool.Upstream](err); ok {
		return problem{
			Type: "about:blank", Title: http.StatusText(u.Status), Status: u.Status,
			Detail: u.Message, Code: "upstream", RequestID: requestID,
		}
	}
	f := fault.From(err)
	status, ok := statuses[f.Kind]
	if !ok {
		status = http.StatusInternalServerError
	}
	return problem{
		Type: "about:blank", Title: http.StatusText(status), Status: status,
		Detail: f.Message, Code: f.PublicCode(), Field: f.Field, RequestID: requestID,
	}
}

// routerProblem speaks for the router, which knows only these.
func routerProblem(he *echo.HTTPError, requestID string) problem {
	p := problem{Type: "about:blank", Status: he.Code, Title: http.StatusText(he.Code), RequestID: requestID}
	switch he.Code {
	case http.StatusNotFound:
		p.Code, p.Detail = string(fault.NotFound), "there is no such route"
	case http.StatusMethodNotAllowed:
		p.Code, p.Detail = "method_not_allowed", "the route does not take this method; see the Allow header"
	default:
		return newProblem(fault.Wrap(he, fault.Internal, "something went wrong on our side"), requestID)
	}
	return p
}

// writeError writes the one answer to a handler's error; what it hides goes
// to the log under the same request id.
func (s *Server) writeError(err error, c echo.Context) {
	// A request that the server ended failed for its reason.
	if cause, ok := errors.AsType[*fault.Error](context.Cause(c.Request().Context())); ok && errors.Is(err, context.Canceled) {
		err = cause
	}
	p := newProblem(err, requestID(c))
	s.logFailure(c.Request().Context(), p, err)
	res := c.Response()
	if res.Committed {
		return
	}
	h := res.Header()
	for _, name := range []string{"ETag", "Location"} {
		h.Del(name)
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if after, ok := retryAfter[p.Status]; ok {
		h.Set("Retry-After", after)
	}
	if p.Status == http.StatusRequestTimeout || p.Status == http.StatusRequestEntityTooLarge {
		h.Set("Connection", "close")
	}
	if err := writeAs(c, p.Status, "application/problem+json", p); err != nil {
		s.Log.WarnContext(c.Request().Context(), "problem not written", "request_id", p.RequestID, "error", err)
	}
}

func (s *Server) logFailure(ctx context.Context, p problem, err error) {
	if p.Status < http.StatusInternalServerError || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	level := slog.LevelError
	if p.Status == http.StatusServiceUnavailable {
		level = slog.LevelWarn
	}
	s.Log.Log(ctx, level, "request failed", "request_id", p.RequestID, "code", p.Code, "error", err)
}

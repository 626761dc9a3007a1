package httpapi

import (
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/shared/fault"
)

const keyRequestID = "request_id"

func requestID(c echo.Context) string {
	id, _ := c.Get(keyRequestID).(string)
	return id
}

// observe is outermost: it names the request, bounds its body in time, turns
// a panic into an error, writes the error, and counts and logs what came out.
func (s *Server) observe(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		began := s.Now()
		id := "req_" + rand.Text()
		c.Set(keyRequestID, id)
		h := c.Response().Header()
		h.Set("X-Request-Id", id)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		if c.Request().ContentLength != 0 {
			_ = http.NewResponseController(c.Response()).SetReadDeadline(time.Now().Add(s.BodyTimeout))
		}
		if err := caught(next, c); err != nil {
			s.writeError(err, c)
		}
		took := s.Now().Sub(began)
		s.observer.request(c, took)
		s.logRequest(c, took)
		return nil
	}
}

// caught runs next and returns a panic as the error it is.
func caught(next echo.HandlerFunc, c echo.Context) (err error) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler:
			panic(p)
		default:
			err = fault.Wrap(fmt.Errorf("panic: %v\n%s", p, debug.Stack()), fault.Internal, "something went wrong on our side")
		}
	}()
	return next(c)
}

// logRequest writes the access log: no query strings, no headers, no bodies.
func (s *Server) logRequest(c echo.Context, took time.Duration) {
	level := slog.LevelInfo
	if route := c.Path(); route == "/healthz" || route == "/readyz" || route == "/metrics" {
		level = slog.LevelDebug
	}
	path := c.Request().URL.Path
	if len(path) > 200 {
		path = path[:200]
	}
	s.Log.LogAttrs(c.Request().Context(), level, "request",
		slog.String("request_id", requestID(c)),
		slog.String("method", c.Request().Method),
		slog.String("path", path),
		slog.Int("status", c.Response().Status),
		slog.Int64("bytes", c.Response().Size),
		slog.String("user", principal(c).UserID),
		slog.Duration("took", took))
}

func status(c echo.Context) string { return strconv.Itoa(c.Response().Status) }

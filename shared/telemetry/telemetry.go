// Package telemetry sets up logging for both daemons.
package telemetry

import (
	"io"
	"log/slog"
)

// Logger writes structured lines to w: "json", or "text" for people. The
// level is one of debug, info, warn, error; anything else means info.
func Logger(w io.Writer, format, level string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

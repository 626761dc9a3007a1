package httpapi

import (
	"net/url"
	"strings"
	"unicode"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/shared/fault"
)

// cleanPath lets a path reach the router only when decoding it, once, can't
// change which route it means. (The router would take the raw path whenever
// there is one, and a decoded %2F would split a segment.)
func cleanPath(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		u := c.Request().URL
		for i, raw := range strings.Split(u.EscapedPath(), "/") {
			if i == 0 {
				continue
			}
			seg, err := url.PathUnescape(raw)
			if err != nil || !cleanSegment(seg) {
				return fault.New(fault.Invalid, "the path holds a segment that no name can have").On("path")
			}
			if seg == "" {
				return echo.ErrNotFound
			}
		}
		u.RawPath = ""
		return next(c)
	}
}

func cleanSegment(s string) bool {
	if s == "." || s == ".." || strings.ContainsAny(s, `/\`) {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar }) < 0
}

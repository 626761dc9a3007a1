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
		toolPath(u)
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

// toolPath gives a path of the Python tools' routes its one form: clients use
// two prefixes, and end the list's with a slash.
func toolPath(u *url.URL) {
	path := u.EscapedPath()
	if rest, ok := strings.CutPrefix(path, "/api/v1/tools"); ok && (rest == "" || rest[0] == '/') {
		path = "/api/tools" + rest
	}
	if strings.HasPrefix(path, "/api/tools/") {
		path = strings.TrimSuffix(path, "/")
	}
	if plain, err := url.PathUnescape(path); err == nil {
		u.Path, u.RawPath = plain, path
	}
}

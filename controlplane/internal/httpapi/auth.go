package httpapi

import (
	"net/http"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// maxBearer bounds what is hashed for a stranger.
const maxBearer = 8 << 10

const (
	keyPrincipal = "principal"
	keyBearer    = "bearer"
)

const bearerRequired = "a valid bearer token is required"

// authenticate lets only known bearers past, before the router has looked at
// the path: without a bearer nobody learns which routes exist.
func (s *Server) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	open := map[string]bool{}
	for _, r := range routes {
		if r.Access == Open {
			open[r.Path] = true
		}
	}
	return func(c echo.Context) error {
		if open[c.Request().URL.Path] {
			return next(c)
		}
		token, ok := bearer(c.Request().Header)
		none, unknown := bearerRequired, bearerRequired
		if strings.HasPrefix(c.Request().URL.Path, "/api/") { // whether or not there is such a route
			none, unknown = pytool.NotAuthenticated, pytool.SignInAgain
		}
		if !ok {
			return fault.New(fault.Unauthenticated, "%s", none)
		}
		p, err := s.Identity.Authenticate(c.Request().Context(), token)
		if fault.Is(err, fault.Unauthenticated) {
			return fault.Wrap(err, fault.Unauthenticated, "%s", unknown)
		}
		if err != nil {
			return err
		}
		c.Set(keyPrincipal, p)
		c.Set(keyBearer, token)
		return next(c)
	}
}

// bearer reads the one carrier that we know: exactly one Authorization header
// of the Bearer scheme.
func bearer(h http.Header) (string, bool) {
	values := h["Authorization"]
	if len(values) != 1 || len(values[0]) > maxBearer {
		return "", false
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	token = strings.TrimLeft(token, " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" || strings.ContainsAny(token, " ,\t") {
		return "", false
	}
	return token, true
}

// principal is the caller of a route that is not open.
func principal(c echo.Context) identity.Principal {
	p, _ := c.Get(keyPrincipal).(identity.Principal)
	return p
}

// allow refuses callers whose role is too low for the route.
func allow(a Access) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			p := principal(c)
			switch {
			case a == Open,
				a == Member && p.Workspace != "",
				a == Admin && p.IsAdmin(),
				a == InstanceAdmin && p.IsInstanceAdmin():
				return next(c)
			}
			return fault.New(fault.Forbidden, "this needs the role %s", strings.ReplaceAll(string(a), "_", " "))
		}
	}
}

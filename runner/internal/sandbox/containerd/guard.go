package containerd

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// guard keeps credentials and tokens to the registries that the settings name.
// A registry may send us elsewhere, for a token or for the content itself;
// there we go as nobody, and never with a password.
type guard struct {
	next              http.RoundTripper
	registries, plain []string
}

// astrayError is a request that would have taken a password elsewhere.
type astrayError struct{ to string }

func (e *astrayError) Error() string {
	return fmt.Sprintf("it wants its password sent to %s, which this runner's settings don't name as a registry that may be spoken to like that", e.to)
}

// RoundTrip implements http.RoundTripper. What is posted is a password: nothing
// else is when images are pulled.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if g.trusts(r.URL) {
		return g.next.RoundTrip(r)
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, &astrayError{r.URL.Host}
	}
	if r.Header.Get("Authorization") != "" {
		r = r.Clone(r.Context())
		r.Header.Del("Authorization")
	}
	return g.next.RoundTrip(r)
}

// trusts says whether a host may have what the settings have for it, over the
// wire that it is spoken to.
func (g *guard) trusts(to *url.URL) bool {
	if to.User != nil {
		return false
	}
	host := to.Host
	if to.Scheme == "https" {
		host = strings.TrimSuffix(host, ":443")
	} else if !slices.Contains(g.plain, host) {
		return false
	}
	if host == "registry-1.docker.io" || host == "auth.docker.io" {
		host = "docker.io"
	}
	return slices.Contains(g.registries, host)
}

// Package toolurl fetches the source of a tool from a URL that a person
// pasted, from the servers that the operator allows and nowhere else.
package toolurl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// The servers whose links are known.
const (
	GitHub = "https://github.com"
	Raw    = "https://raw.githubusercontent.com"
)

// Loader fetches over HTTPS, following redirects only among its hosts. It
// connects to public addresses alone. Load may be called from several
// goroutines.
type Loader struct {
	Hosts  []string // that may be fetched from; GitHub's two when there are none
	GitHub string   // base URL at which GitHub is reached; empty: GitHub itself
	Raw    string   // base URL at which its files are; empty: GitHub's own

	Timeout  time.Duration                                                        // for everything; 0: 15 s
	MaxBytes int64                                                                // of a source; 0: 1 MiB
	Resolve  func(ctx context.Context, network, host string) ([]net.IP, error)    // nil: the system's
	Dial     func(ctx context.Context, network, address string) (net.Conn, error) // nil: a net.Dialer; address is one that was checked
}

const maxRedirects = 5

// Load returns what is behind a URL, which may be the page of a file or a
// folder on GitHub, and the name that it suggests.
func (l *Loader) Load(ctx context.Context, link string) (name, content string, err error) {
	u, err := l.parse(link)
	if err != nil {
		return "", "", err
	}
	if u, err = l.parse(raw(u).String()); err != nil {
		return "", "", err
	}
	name = suggested(u)
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(l.Timeout, 15*time.Second))
	defer cancel()
	client := l.client()
	defer client.CloseIdleConnections()
	for range maxRedirects + 1 {
		res, err := l.get(ctx, client, u)
		if err != nil {
			return "", "", err
		}
		if !redirects(res.StatusCode) {
			content, err := l.source(res)
			return name, content, err
		}
		res.Body.Close()
		if u, err = l.parse(target(u, res.Header.Get("Location"))); err != nil {
			return "", "", err
		}
	}
	return "", "", notAllowed("it redirects more than %d times", maxRedirects)
}

// parse reads a link that the loader may follow: HTTPS, to one of its hosts,
// and nothing that another parser could take for a different host.
func (l *Loader) parse(link string) (*url.URL, error) {
	u, err := url.Parse(link)
	switch {
	case err != nil || strings.ContainsAny(link, "\\\t\r\n") || u.Opaque != "" || !utf8.ValidString(link):
		return nil, notAllowed("it is no URL")
	case !strings.EqualFold(u.Scheme, "https"):
		return nil, notAllowed("it must start with https://")
	case u.User != nil:
		return nil, notAllowed("it may hold no user name")
	case dotted(u.Path): // a mirror may have other things beside what it mirrors
		return nil, notAllowed("its path may hold no . and ..")
	}
	u.Scheme, u.Host, u.Fragment = "https", strings.ToLower(u.Host), ""
	if u.Path == "" {
		u.Path = "/"
	}
	if host := strings.TrimSuffix(u.Host, ":443"); slices.Contains(l.hosts(), host) {
		u.Host = host
		return u, nil
	}
	return nil, notAllowed("tools are loaded from %s only", strings.Join(l.hosts(), " and "))
}

func (l *Loader) hosts() []string {
	if len(l.Hosts) > 0 {
		return l.Hosts
	}
	return []string{host(GitHub), host(Raw)}
}

func notAllowed(why string, args ...any) error {
	return fault.New(fault.Invalid, "the URL can't be loaded: "+why, args...).WithCode("url_not_allowed").On("url")
}

func host(base string) string {
	_, rest, _ := strings.Cut(base, "://")
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// dotted reports whether a path leads elsewhere once it is tidied.
func dotted(path string) bool {
	return slices.ContainsFunc(strings.FieldsFunc(path, func(r rune) bool { return r == '/' || r == '\\' }), func(part string) bool {
		return part == "." || part == ".."
	})
}

func redirects(status int) bool {
	return slices.Contains([]int{http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect}, status)
}

// target is where a redirect leads; what can't be read leads nowhere allowed.
func target(from *url.URL, location string) string {
	to, err := from.Parse(location)
	if err != nil {
		return ""
	}
	return to.String()
}

// get asks for u at the base URL that stands for its host.
func (l *Loader) get(ctx context.Context, client *http.Client, u *url.URL) (*http.Response, error) {
	at := u.String()
	for known, base := range map[string]string{GitHub: l.GitHub, Raw: l.Raw} {
		if rest, ok := strings.CutPrefix(at, known+"/"); ok && base != "" {
			at = strings.TrimSuffix(base, "/") + "/" + rest
			break
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, notAllowed("it is no URL")
	}
	req.Header.Set("User-Agent", "bigwave")
	req.Header.Set("Accept", "text/plain, */*;q=0.1")
	res, err := client.Do(req)
	if err != nil {
		return nil, unreachable(err)
	}
	return res, nil
}

// unreachable leaves the URL out of err, which is logged: a link may hold a
// token.
func unreachable(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return &pytool.Upstream{Status: http.StatusInternalServerError, Message: "[ERROR: Error fetching tool]", Cause: err}
}

// source reads the answer, which must be text of a bounded size.
func (l *Loader) source(res *http.Response) (string, error) {
	defer res.Body.Close()
	if res.StatusCode >= 400 && res.StatusCode < 600 {
		return "", &pytool.Upstream{Status: res.StatusCode, Message: "Failed to fetch the tool"}
	}
	if res.StatusCode != http.StatusOK {
		return "", unreachable(fmt.Errorf("status %d", res.StatusCode))
	}
	limit := cmp.Or(l.MaxBytes, 1<<20)
	data, err := io.ReadAll(io.LimitReader(res.Body, limit+1))
	switch {
	case err != nil:
		return "", unreachable(err)
	case int64(len(data)) > limit:
		return "", fault.New(fault.Invalid, "what is behind the URL is larger than %d bytes", limit).On("url")
	case len(data) == 0:
		return "", fault.New(fault.Invalid, "No data received from the URL").On("url")
	case !utf8.Valid(data):
		return "", fault.New(fault.Invalid, "what is behind the URL is no text").On("url")
	}
	return string(data), nil
}

// client has no proxy, no cookies and no redirects, and connects as connect
// allows.
func (l *Loader) client() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext: l.connect, TLSHandshakeTimeout: 10 * time.Second, DisableCompression: true,
			MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

var errPrivate = errors.New("its address is not a public one")

// connect resolves the name itself and connects to the first of its addresses
// that answers; one that is not public ends it, since a name that has such an
// address is not the server that it claims to be.
func (l *Loader) connect(ctx context.Context, network, address string) (net.Conn, error) {
	name, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	resolve := l.Resolve
	if resolve == nil {
		resolve = net.DefaultResolver.LookupIP
	}
	found, err := resolve(ctx, "ip", name)
	if err != nil {
		return nil, err
	}
	for _, ip := range found {
		if !l.own(address) && !public(ip) {
			return nil, fmt.Errorf("%s is %s: %w", name, ip, errPrivate)
		}
	}
	var errs []error
	for _, ip := range found {
		conn, err := l.dial(address)(ctx, network, net.JoinHostPort(ip.String(), port))
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(append(errs, fmt.Errorf("no address of %s answers", name))...)
}

// own reports whether the operator named address as the one of a base URL:
// then it is where it was put, also on a private network.
func (l *Loader) own(address string) bool {
	return slices.ContainsFunc([]string{l.GitHub, l.Raw}, func(base string) bool {
		u, err := url.Parse(base)
		if base == "" || base == GitHub || base == Raw || err != nil {
			return false
		}
		port := cmp.Or(u.Port(), map[string]string{"https": "443", "http": "80"}[u.Scheme])
		return net.JoinHostPort(u.Hostname(), port) == address
	})
}

// dial looks at the address once more when the socket is about to use it.
func (l *Loader) dial(asked string) func(context.Context, string, string) (net.Conn, error) {
	if l.Dial != nil {
		return l.Dial
	}
	d := &net.Dialer{Timeout: 10 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		at, _, err := net.SplitHostPort(address)
		if err == nil && !l.own(asked) && !public(net.ParseIP(at)) {
			err = errPrivate
		}
		return err
	}}
	return d.DialContext
}

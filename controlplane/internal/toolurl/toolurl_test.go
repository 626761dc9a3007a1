package toolurl

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

const source = "class Tools: pass\n"

// server is one that counts who comes.
type server struct {
	*httptest.Server
	hits atomic.Int64
}

func serve(t *testing.T, answer http.HandlerFunc) *server {
	t.Helper()
	s := &server{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.hits.Add(1)
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestPagesOfGitHubAreRewritten(t *testing.T) {
	for link, want := range map[string][2]string{
		"https://github.com/o/r/blob/main/tools/my_tool.py":           {Raw + "/o/r/refs/heads/main/tools/my_tool.py", "my_tool"},
		"https://github.com/o/r/tree/main/tools/my_tool/":             {Raw + "/o/r/refs/heads/main/tools/my_tool/main.py", "my_tool"},
		"https://github.com/o/r/tree/main/tools/my_tool":              {Raw + "/o/r/refs/heads/main/tools/my_tool/main.py", "my_tool"},
		"https://github.com/o/r/blob/main/main.py":                    {Raw + "/o/r/refs/heads/main/main.py", "main"},
		"https://github.com/o/r/blob/main/x/__init__.py":              {Raw + "/o/r/refs/heads/main/x/__init__.py", "x"},
		"https://github.com/o/r/blob/main/x/index.py":                 {Raw + "/o/r/refs/heads/main/x/index.py", "x"},
		"https://github.com/o/r/blob/main/t.py?raw=true":              {Raw + "/o/r/refs/heads/main/t.py?raw=true", "t"},
		"https://github.com/o/r/blob/feat/x/t.py":                     {Raw + "/o/r/refs/heads/feat/x/t.py", "t"},
		"https://github.com/o/r/blob/main/a b.py":                     {Raw + "/o/r/refs/heads/main/a%20b.py", "a b"},
		"HTTPS://GitHub.com:443/o/r/blob/main/t.py#L3":                {Raw + "/o/r/refs/heads/main/t.py", "t"},
		"https://github.com/o/r/tree/main":                            {"https://github.com/o/r/tree/main", "tree"},
		"https://github.com/o/r/raw/main/t.py":                        {"https://github.com/o/r/raw/main/t.py", "t"},
		"https://raw.githubusercontent.com/o/r/refs/heads/main/t.txt": {Raw + "/o/r/refs/heads/main/t.txt", "main"},
		"https://raw.githubusercontent.com":                           {Raw + "/", ""},
	} {
		u, err := new(Loader).parse(link)
		if err != nil {
			t.Errorf("%s: %v", link, err)
			continue
		}
		if u = raw(u); u.String() != want[0] || suggested(u) != want[1] {
			t.Errorf("%s: got %s named %q, want %s named %q", link, u, suggested(u), want[0], want[1])
		}
	}
}

func TestOnlyListedServersOverHTTPS(t *testing.T) {
	canary := serve(t, func(http.ResponseWriter, *http.Request) {})
	dialed := 0
	l := &Loader{Dial: func(context.Context, string, string) (net.Conn, error) { dialed++; return nil, errors.New("no") }}
	for _, link := range []string{
		canary.URL, "http://github.com/o/r/blob/main/t.py", "http://[::ffff:127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://0/", "http://localtest.me/",
		"file:///etc/passwd", "gopher://github.com/", "https://github.com@evil.example/", "https://github.com:x@evil.example/", "https://user@github.com/o",
		"https://github.com.evil.example/", `https://github.com\@evil.example/`, `https:\\github.com/`, "https://github.com:443:80/", "https://github.com:444/",
		"https://git\thub.com/", "https://github.com/\r\nHost: evil", "\nhttps://github.com/", "https://evil.example/https://github.com/", "https://www.github.com/o/r",
		"https://gist.github.com/x", "https:github.com/o", "//github.com/o", "github.com/o", "", "https://", "https:///o", "https://[::1]/", "https://127.0.0.1/",
		"https://github.com./o", "https://ｇithub.com/", "https://github.com%2eevil.example/", "https://github.com%00/", "https://\xff/",
		"https://raw.githubusercontent.com/../admin", "https://raw.githubusercontent.com/o/%2e%2e/%2E%2e/x", "https://github.com/o/r/blob/main/..%2f..%2fx", `https://github.com/o/..%5cx`,
	} {
		_, _, err := l.Load(t.Context(), link)
		if f := fault.From(err); err == nil || f.Kind != fault.Invalid || f.Code != "url_not_allowed" || f.Field != "url" {
			t.Errorf("%q: got %v", link, err)
		}
	}
	only := &Loader{Hosts: []string{"github.com"}, Dial: l.Dial}
	if _, _, err := only.Load(t.Context(), "https://github.com/o/r/blob/main/t.py"); fault.From(err).Code != "url_not_allowed" {
		t.Errorf("rewritten to a server that is not listed: %v", err)
	}
	if dialed != 0 || canary.hits.Load() != 0 {
		t.Errorf("%d connections were tried", dialed)
	}
}

func TestAMirrorStandsForTheServer(t *testing.T) {
	mirror := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
			t.Error("credentials were sent")
		}
		if r.URL.Path != "/raw/o/r/refs/heads/main/t.py" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, source)
	})
	l := &Loader{Raw: mirror.URL + "/raw/"}
	name, content, err := l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
	if name != "t" || content != source || err != nil {
		t.Errorf("got %q, %q, %v", name, content, err)
	}
	_, _, err = l.Load(t.Context(), "https://github.com/o/r/blob/main/none.py")
	if u, ok := errors.AsType[*pytool.Upstream](err); !ok || u.Status != 404 || u.Message != "Failed to fetch the tool" {
		t.Errorf("got %v", err)
	}
}

func TestWhatCannotBeASource(t *testing.T) {
	status := http.StatusOK
	body := func(w http.ResponseWriter) {}
	mirror := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		body(w)
	})
	l := &Loader{Raw: mirror.URL, Timeout: time.Second, MaxBytes: 1000}
	for name, c := range map[string]struct {
		status int
		body   func(http.ResponseWriter)
		want   int // of upstream; 0: a fault
		says   string
	}{
		"empty":     {200, func(http.ResponseWriter) {}, 0, "No data received from the URL"},
		"too large": {200, func(w http.ResponseWriter) { fmt.Fprint(w, strings.Repeat("x", 1001)) }, 0, "what is behind the URL is larger than 1000 bytes"},
		"endless": {200, func(w http.ResponseWriter) {
			for err := error(nil); err == nil; {
				_, err = fmt.Fprint(w, strings.Repeat("x", 4096))
			}
		}, 0, "what is behind the URL is larger than 1000 bytes"},
		"binary":  {200, func(w http.ResponseWriter) { _, _ = w.Write([]byte{0xff, 0xfe}) }, 0, "what is behind the URL is no text"},
		"refused": {403, func(http.ResponseWriter) {}, 403, "Failed to fetch the tool"},
		"down":    {502, func(http.ResponseWriter) {}, 502, "Failed to fetch the tool"},
		"nothing": {204, func(http.ResponseWriter) {}, 500, "[ERROR: Error fetching tool]"},
		"too slow": {200, func(w http.ResponseWriter) {
			fmt.Fprint(w, "x")
			w.(http.Flusher).Flush()
			time.Sleep(1500 * time.Millisecond)
		}, 500, "[ERROR: Error fetching tool]"},
	} {
		status, body = c.status, c.body
		_, _, err := l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
		if u, ok := errors.AsType[*pytool.Upstream](err); ok != (c.want != 0) || ok && (u.Status != c.want || u.Message != c.says) {
			t.Errorf("%s: got %v", name, err)
		} else if !ok && (!fault.Is(err, fault.Invalid) || fault.From(err).Message != c.says) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	mirror.Close()
	began := time.Now()
	_, _, err := l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
	if u, ok := errors.AsType[*pytool.Upstream](err); !ok || u.Status != 500 || u.Message != "[ERROR: Error fetching tool]" || time.Since(began) > 2*time.Second {
		t.Errorf("a server that is not there: %v", err)
	}
}

func TestRedirectsStayOnTheList(t *testing.T) {
	canary := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, source) })
	github := serve(t, func(w http.ResponseWriter, r *http.Request) {
		to, _ := url.QueryUnescape(r.URL.RawQuery)
		http.Redirect(w, r, to, http.StatusFound)
	})
	files := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, source) })
	l := &Loader{GitHub: github.URL, Raw: files.URL}
	from := func(to string) error {
		_, _, err := l.Load(t.Context(), "https://github.com/o/r?"+url.QueryEscape(to))
		return err
	}
	if err := from(Raw + "/o/r/main/t.py"); err != nil || files.hits.Load() != 1 {
		t.Errorf("a redirect on the list: %v", err)
	}
	for _, to := range []string{
		canary.URL, "http://169.254.169.254/latest/meta-data", "https://evil.example/", "http://raw.githubusercontent.com/o", "https://raw.githubusercontent.com@evil.example/",
		"//evil.example/", "file:///etc/passwd", "https://127.0.0.1:443/",
	} {
		if err := from(to); err == nil || fault.From(err).Code != "url_not_allowed" {
			t.Errorf("to %s: %v", to, err)
		}
	}
	before := github.hits.Load()
	if err := from("https://github.com/o/r?" + url.QueryEscape("https://github.com/o/r")); err == nil || fault.From(err).Code != "url_not_allowed" {
		t.Errorf("in circles: %v", err)
	}
	if n := github.hits.Load() - before; n > maxRedirects+1 {
		t.Errorf("went round %d times", n)
	}
	if canary.hits.Load() != 0 {
		t.Error("the canary was visited")
	}
}

func TestOnlyPublicAddressesAreDialed(t *testing.T) {
	var dialed []string
	l := &Loader{Dial: func(_ context.Context, _, address string) (net.Conn, error) {
		dialed = append(dialed, address)
		return nil, errors.New("far away")
	}}
	for _, addresses := range [][]string{
		{"127.0.0.1"}, {"10.0.0.7"}, {"169.254.169.254"}, {"::1"}, {"::ffff:127.0.0.1"}, {"64:ff9b::7f00:1"}, {"fd00:ec2::254"}, {"fe80::1"}, {"0.0.0.0"}, {"::"},
		{"192.168.1.1"}, {"172.31.0.1"}, {"100.64.0.1"}, {"224.0.0.1"}, {"255.255.255.255"}, {"2002:7f00:1::"}, {"2001::1"}, {"2001:db8::1"}, {"168.63.129.16"},
		{"140.82.121.4", "127.0.0.1"}, {"2606:50c0:8000::153", "::1"},
	} {
		l.Resolve = func(context.Context, string, string) ([]net.IP, error) {
			var out []net.IP
			for _, a := range addresses {
				out = append(out, net.ParseIP(a))
			}
			return out, nil
		}
		_, _, err := l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
		if !errors.Is(err, errPrivate) {
			t.Errorf("%v: got %v", addresses, err)
		}
		if u, ok := errors.AsType[*pytool.Upstream](err); !ok || strings.Contains(u.Message, addresses[0]) {
			t.Errorf("%v: the caller is told %v", addresses, err)
		}
	}
	if len(dialed) != 0 {
		t.Errorf("dialed %v", dialed)
	}
	l.Resolve = func(context.Context, string, string) ([]net.IP, error) {
		return []net.IP{net.ParseIP("140.82.121.4"), net.ParseIP("2606:50c0:8000::153")}, nil
	}
	_, _, _ = l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
	if len(dialed) != 2 || dialed[0] != "140.82.121.4:443" || dialed[1] != "[2606:50c0:8000::153]:443" {
		t.Errorf("dialed %v", dialed)
	}
}

// Links to private files hold a token.
func TestErrorsDoNotRepeatTheLink(t *testing.T) {
	l := &Loader{
		Resolve: func(context.Context, string, string) ([]net.IP, error) {
			return []net.IP{net.ParseIP("140.82.121.4")}, nil
		},
		Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("far away") },
	}
	_, _, err := l.Load(t.Context(), "https://raw.githubusercontent.com/o/r/main/t.py?token=hunter2")
	if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "far away") {
		t.Errorf("got %v", err)
	}
}

// The dialer's own check comes after every resolver: what it is handed at last.
func TestTheSocketIsCheckedAsWell(t *testing.T) {
	canary := serve(t, func(http.ResponseWriter, *http.Request) {})
	_, err := new(Loader).dial("github.com:443")(t.Context(), "tcp", canary.Listener.Addr().String())
	if !errors.Is(err, errPrivate) || canary.hits.Load() != 0 {
		t.Errorf("got %v", err)
	}
}

func TestCertificatesAreChecked(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, source) }))
	defer s.Close()
	l := &Loader{Raw: s.URL}
	_, _, err := l.Load(t.Context(), "https://github.com/o/r/blob/main/t.py")
	var unknown x509.UnknownAuthorityError
	var broken *tls.CertificateVerificationError
	if !errors.As(err, &unknown) && !errors.As(err, &broken) {
		t.Errorf("got %v", err)
	}
}

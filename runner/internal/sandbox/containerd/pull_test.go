package containerd

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

const (
	user     = "puller"
	password = "correct-horse-battery-staple"
	issued   = "a-token-that-nobody-may-see"
)

// hub is a registry that asks who is there, and what it was asked.
type hub struct {
	t      testing.TB
	store  http.Handler // without any questions
	server *httptest.Server
	host   string

	mu    sync.Mutex
	asked []string // method and path

	realm  string                                            // asks for a token of there; empty: for a password
	before func(w http.ResponseWriter, r *http.Request) bool // may answer instead
}

func newHub(t testing.TB) *hub {
	h := &hub{t: t, store: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	h.server = httptest.NewServer(h)
	h.host = h.server.Listener.Addr().String()
	t.Cleanup(h.server.Close)
	t.Cleanup(func() { forgetImages(t, h.host) })
	return h
}

// forgetImages removes what was pulled from a host.
func forgetImages(t testing.TB, host string) {
	ctx, c := client(t)
	all, err := c.ImageService().List(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, image := range all {
		if strings.HasPrefix(image.Name, host+"/") {
			_ = c.ImageService().Delete(ctx, image.Name)
		}
	}
}

func (h *hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	h.asked = append(h.asked, r.Method+" "+r.URL.Path)
	before := h.before
	h.mu.Unlock()
	name, secret, _ := r.BasicAuth()
	switch {
	case r.URL.Path == "/token":
		if r.FormValue("password") != password && secret != password {
			http.Error(w, `{"errors":[{"code":"DENIED","message":"who are you?"}]}`, http.StatusUnauthorized)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"token": issued, "access_token": issued})
		return
	case h.realm != "" && r.Header.Get("Authorization") != "Bearer "+issued:
		w.Header().Set("WWW-Authenticate", `Bearer realm="`+h.realm+`",service="hub"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	case h.realm == "" && (name != user || secret != password):
		w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if before == nil || !before(w, r) {
		h.store.ServeHTTP(w, r)
	}
}

// count is how often something was asked for, by the start of its path.
func (h *hub) count(request string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, a := range h.asked {
		if strings.HasPrefix(a, request) {
			n++
		}
	}
	return n
}

func (h *hub) instead(f func(w http.ResponseWriter, r *http.Request) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.before = f
}

// push puts an image in; name is repository:tag.
func (h *hub) push(i *smallImage, name string) digest.Digest {
	h.t.Helper()
	put := func(method, path, kind string, blob []byte) {
		r := httptest.NewRequest(method, path, bytes.NewReader(blob))
		r.Header.Set("Content-Type", kind)
		w := httptest.NewRecorder()
		if h.store.ServeHTTP(w, r); w.Code >= 300 {
			h.t.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
	}
	repository, tag, _ := strings.Cut(name, ":")
	for _, blob := range [][]byte{i.layer, i.config} {
		put(http.MethodPost, "/v2/"+repository+"/blobs/uploads/?digest="+digest.FromBytes(blob).String(), "application/octet-stream", blob)
	}
	manifest := encode(i.manifest)
	put(http.MethodPut, "/v2/"+repository+"/manifests/"+tag, imagespec.MediaTypeImageManifest, manifest)
	return digest.FromBytes(manifest)
}

// credentials is a file as docker login writes it.
func credentials(t testing.TB, secrets map[string]string) string {
	t.Helper()
	auths := map[string]any{}
	for host, secret := range secrets {
		auths[host] = map[string]string{"auth": base64.StdEncoding.EncodeToString([]byte(user + ":" + secret))}
	}
	path := filepath.Join(t.TempDir(), "auth.json")
	must(os.WriteFile(path, encode(map[string]any{"auths": auths}), 0o600))
	return path
}

// journal is the runner's log.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// puller makes a backend that may pull from the hosts with what the file has.
func puller(t *testing.T, file string, hosts ...string) (*box.Backend, box.Config, *journal) {
	t.Helper()
	j := &journal{}
	b, cfg := plain(t, func(c *Config) {
		c.Registries, c.PlainHTTP, c.AuthFile = hosts, hosts, file
		c.Log = slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	return b, cfg, j
}

// mustBeSecret looks for what nobody may read.
func mustBeSecret(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		for _, secret := range []string{password, issued, "wrong-one", base64.StdEncoding.EncodeToString([]byte(user + ":" + password)), base64.StdEncoding.EncodeToString([]byte(user + ":wrong-one"))} {
			if strings.Contains(text, secret) {
				t.Errorf("%q shows %s", text, secret)
			}
		}
	}
}

func startOf(t *testing.T, b *box.Backend, image string) (string, error) {
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "pull", Policy: of(image)})
	if err != nil {
		return "", err
	}
	return s.Info().ImageDigest, s.Close(t.Context())
}

func TestPull(t *testing.T) {
	for name, token := range map[string]bool{"with a password": false, "with a token for it": true} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			if token {
				h.realm = "http://" + h.host + "/token"
			}
			want := h.push(small(map[string]string{"etc/motd": name}), "team/base:1")
			image := h.host + "/team/base:1"
			t.Run("not allowed", func(t *testing.T) {
				b, _, _ := puller(t, credentials(t, map[string]string{h.host: password}), "127.0.0.1:1")
				_, err := startOf(t, b, image)
				mustBeNamed(t, err, "image_unavailable", "allow no pull from "+h.host)
				if n := h.count(""); n != 0 {
					t.Errorf("it was asked %d times", n)
				}
			})
			t.Run("nobody's", func(t *testing.T) {
				b, _, j := puller(t, "", h.host)
				_, err := startOf(t, b, image)
				t.Log(err)
				mustBeNamed(t, err, "image_unavailable", "can't be pulled from "+h.host)
				mustBeSecret(t, err.Error(), j.String())
			})
			t.Run("the wrong one", func(t *testing.T) {
				b, _, j := puller(t, credentials(t, map[string]string{h.host: "wrong-one"}), h.host)
				_, err := startOf(t, b, image)
				t.Log(err)
				mustBeNamed(t, err, "image_unavailable", "can't be pulled from "+h.host)
				mustBeSecret(t, err.Error(), j.String())
				if !strings.Contains(j.String(), "image was not pulled") {
					t.Errorf("the log has %q", j)
				}
			})
			t.Run("a file that is none", func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "auth.json")
				must(os.WriteFile(path, []byte(`{"auths": "`+password), 0o600))
				b, _, j := puller(t, path, h.host)
				_, err := startOf(t, b, image)
				t.Log(err)
				mustBeNamed(t, err, "image_unavailable", "credentials")
				mustBeSecret(t, err.Error(), j.String())
			})
			t.Run("the right one", func(t *testing.T) {
				b, cfg, j := puller(t, credentials(t, map[string]string{h.host: password}), h.host)
				var wait sync.WaitGroup
				for range 5 {
					wait.Go(func() {
						if got, err := startOf(t, b, image); err != nil || got != want.String() {
							t.Errorf("got %s, %v, want %s", got, err, want)
						}
					})
				}
				wait.Wait()
				if n := h.count("GET /v2/team/base/blobs/"); n != 2 {
					t.Errorf("%d blobs were fetched, want its two: %v", n, h.asked)
				}
				mustBeSecret(t, j.String())
				if got, err := startOf(t, b, h.host+"/team/base@"+want.String()); err != nil || got != want.String() {
					t.Errorf("by its digest: %s, %v", got, err)
				}
				mustLeaveNothing(t, cfg)
			})
		})
	}
}

func TestPullsThatFail(t *testing.T) {
	h := newHub(t)
	b, cfg, j := puller(t, credentials(t, map[string]string{h.host: password}), h.host, "127.0.0.1:1", "nowhere.invalid")
	h.push(small(map[string]string{"a": "b"}), "team/base:1")
	huge := small(map[string]string{"a": "huge"})
	huge.manifest.Layers[0].Size = 20 << 30
	h.push(huge, "team/huge:1")
	negative := small(map[string]string{"a": "negative"})
	negative.manifest.Layers = append(negative.manifest.Layers, huge.manifest.Layers[0])
	negative.manifest.Layers[0].Size = -20 << 30
	h.push(negative, "team/negative:1")
	lies := small(map[string]string{"a": "lies"})
	h.push(lies, "team/lies:1")
	h.push(small(map[string]string{"a": "odd"}), "team/odd:1")
	cut := small(map[string]string{"a": "cut"})
	cut.layer = cut.layer[:len(cut.layer)-10]
	h.push(cut.link(), "team/cut:1")
	h.instead(func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.HasPrefix(r.URL.Path, "/v2/team/error/"):
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write([]byte(`{"errors":[{"code":"UNKNOWN","message":"our disks are on fire"}]}`))
		case strings.HasPrefix(r.URL.Path, "/v2/team/hangs-up/"):
			panic(http.ErrAbortHandler)
		case strings.HasPrefix(r.URL.Path, "/v2/team/lies/blobs/") && strings.HasSuffix(r.URL.Path, lies.manifest.Layers[0].Digest.Encoded()):
			_, _ = w.Write(bytes.Repeat([]byte{'x'}, len(lies.layer)))
		case strings.HasPrefix(r.URL.Path, "/v2/team/odd/manifests/"):
			w.Header().Set("Content-Type", "text/html")
			w.Header().Set("Docker-Content-Digest", digest.FromString("<html>").String())
			w.Header().Set("Content-Length", "6")
			_, _ = w.Write([]byte("<html>"))
		case strings.HasPrefix(r.URL.Path, "/v2/team/signed/"):
			http.Redirect(w, r, "http://127.0.0.1:1/blob?signature="+issued, http.StatusTemporaryRedirect)
		default:
			return false
		}
		return true
	})
	for name, c := range map[string]struct{ image, says string }{
		"no such tag":              {h.host + "/team/base:2", "no such image"},
		"no such repository":       {h.host + "/team/none:1", "no such image"},
		"no such digest":           {h.host + "/team/base@" + digest.FromString("x").String(), "no such image"},
		"too large":                {h.host + "/team/huge:1", "more than the 10240 MiB"},
		"a size below nothing":     {h.host + "/team/negative:1", "more than the 10240 MiB"},
		"an error of the registry": {h.host + "/team/error:1", "500"},
		"it hangs up":              {h.host + "/team/hangs-up:1", "EOF"},
		"other content":            {h.host + "/team/lies:1", "not what the image says"},
		"a page":                   {h.host + "/team/odd:1", ""},
		"a layer cut short":        {h.host + "/team/cut:1", "can't be unpacked"},
		"a signed address":         {h.host + "/team/signed:1", "connection refused"},
		"nobody there":             {"127.0.0.1:1/team/base:1", "connection refused"},
		"no such host":             {"nowhere.invalid/team/base:1", "is not known"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // as it says the first time, it says again
				_, err := startOf(t, b, c.image)
				t.Log(err)
				mustBeNamed(t, err, "image_unavailable", c.says)
				if err != nil {
					mustBeSecret(t, err.Error())
				}
			}
		})
	}
	mustBeSecret(t, j.String())
	mustLeaveNothing(t, cfg)
	mustWork(t, b)
	if _, err := startOf(t, b, h.host+"/team/base:1"); err != nil {
		t.Errorf("the next pull: %v", err)
	}
}

// TestPullThatHangs holds up nobody but those who want that image.
func TestPullThatHangs(t *testing.T) {
	h := newHub(t)
	b, cfg, _ := puller(t, credentials(t, map[string]string{h.host: password}), h.host)
	want := h.push(small(map[string]string{"etc/motd": "slow"}), "team/slow:1")
	release := make(chan struct{})
	open := sync.OnceFunc(func() { close(release) })
	t.Cleanup(open)
	h.instead(func(http.ResponseWriter, *http.Request) bool { <-release; return false })
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		begun := time.Now()
		_, err := b.Start(ctx, sandbox.Spec{ID: "slow", Policy: of(h.host + "/team/slow:1")})
		cancel()
		mustBeNamed(t, err, "image_unavailable", "is still being pulled")
		if took := time.Since(begun); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		mustWork(t, b)
	}
	waits := make(chan error, 1)
	go func() {
		got, err := startOf(t, b, h.host+"/team/slow:1")
		if err == nil && got != want.String() {
			err = errors.New(got)
		}
		waits <- err
	}()
	time.Sleep(100 * time.Millisecond)
	open()
	if err := <-waits; err != nil {
		t.Errorf("once it came: %v", err)
	}
	if n := h.count("GET /v2/team/slow/blobs/"); n != 2 {
		t.Errorf("%d blobs were fetched, want its two", n)
	}
	mustLeaveNothing(t, cfg)
}

// TestCloseEndsPulls does not wait for a registry.
func TestCloseEndsPulls(t *testing.T) {
	h := newHub(t)
	b, _, _ := puller(t, credentials(t, map[string]string{h.host: password}), h.host)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	h.instead(func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return true
	})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := b.Start(ctx, sandbox.Spec{ID: "slow", Policy: of(h.host + "/team/slow:1")})
	mustBeNamed(t, err, "image_unavailable", "is still being pulled")
	begun := time.Now()
	if err := b.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took > 3*time.Second {
		t.Errorf("it took %v", took)
	}
}

// listener takes whatever comes, and keeps it.
type listener struct {
	server *httptest.Server
	host   string
	mu     sync.Mutex
	heard  []string
}

func newListener(t *testing.T, answer http.HandlerFunc) *listener {
	l := &listener{}
	l.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		l.mu.Lock()
		l.heard = append(l.heard, fmt.Sprintf("%s %s %v %s", r.Method, r.URL, r.Header, body))
		l.mu.Unlock()
		answer(w, r)
	}))
	l.host = l.server.Listener.Addr().String()
	t.Cleanup(l.server.Close)
	return l
}

func (l *listener) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.heard)
}

// TestCredentialsStayAtTheirRegistry follows a registry to hosts that are not
// in the settings.
func TestCredentialsStayAtTheirRegistry(t *testing.T) {
	token := func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"token": issued, "access_token": issued})
	}
	t.Run("a token from elsewhere", func(t *testing.T) {
		h := newHub(t)
		h.push(small(map[string]string{"a": "b"}), "team/base:1")
		elsewhere := newListener(t, token)
		h.realm = elsewhere.server.URL + "/token"
		b, _, j := puller(t, credentials(t, map[string]string{h.host: password}), h.host)
		_, err := startOf(t, b, h.host+"/team/base:1")
		t.Log(err)
		mustBeNamed(t, err, "image_unavailable", elsewhere.host)
		mustBeSecret(t, append(elsewhere.all(), err.Error(), j.String())...)
	})
	t.Run("a token from elsewhere that is in the settings", func(t *testing.T) {
		h := newHub(t)
		want := h.push(small(map[string]string{"a": "b"}), "team/base:1")
		elsewhere := newListener(t, token)
		h.realm = elsewhere.server.URL + "/token"
		b, _, j := puller(t, credentials(t, map[string]string{h.host: password}), h.host, elsewhere.host)
		if got, err := startOf(t, b, h.host+"/team/base:1"); err != nil || got != want.String() {
			t.Errorf("got %s, %v", got, err)
		}
		if len(elsewhere.all()) == 0 {
			t.Error("nobody asked there")
		}
		mustBeSecret(t, j.String())
	})
	t.Run("content from elsewhere", func(t *testing.T) {
		h := newHub(t)
		want := h.push(small(map[string]string{"a": "from elsewhere"}), "team/base:1")
		elsewhere := newListener(t, h.store.ServeHTTP)
		h.instead(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, r, elsewhere.server.URL+r.URL.Path, http.StatusTemporaryRedirect)
			return true
		})
		b, _, j := puller(t, credentials(t, map[string]string{h.host: password}), h.host)
		if got, err := startOf(t, b, h.host+"/team/base:1"); err != nil || got != want.String() {
			t.Errorf("got %s, %v", got, err)
		}
		if len(elsewhere.all()) == 0 {
			t.Error("nobody asked there")
		}
		for _, heard := range elsewhere.all() {
			if strings.Contains(heard, "Authorization") {
				t.Errorf("it got %s", heard)
			}
		}
		mustBeSecret(t, append(elsewhere.all(), j.String())...)
	})
}

func TestWhomTheGuardTrusts(t *testing.T) {
	g := &guard{registries: []string{"hub.test", "plain.test:5000", "docker.io"}, plain: []string{"plain.test:5000", "other.test"}}
	for address, want := range map[string]bool{
		"https://hub.test/v2/":             true,
		"https://hub.test:443/v2/":         true,
		"https://hub.test:444/v2/":         false,
		"http://hub.test/v2/":              false,
		"http://hub.test:443/v2/":          false,
		"https://a.hub.test/v2/":           false,
		"https://hub.test.evil.test/v2/":   false,
		"https://hub.test@evil.test/v2/":   false,
		"https://evil.test@hub.test/v2/":   false,
		"http://plain.test:5000/v2/":       true,
		"http://plain.test:5001/v2/":       false,
		"http://other.test/v2/":            false,
		"https://registry-1.docker.io/v2/": true,
		"https://auth.docker.io/token":     true,
		"http://auth.docker.io/token":      false,
		"https://index.docker.io/v2/":      false,
	} {
		u, err := url.Parse(address)
		must(err)
		if got := g.trusts(u); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

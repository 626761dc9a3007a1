package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/config"
)

const token = "a-token-that-only-tests-know"

// daemon is a control plane in this process.
type daemon struct {
	t    *testing.T
	cfg  config.Config
	log  *logBuffer
	stop context.CancelFunc
	err  chan error
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func settings(t *testing.T, dir string, more ...string) config.Config {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg, err := config.Load(append([]string{
		"BIGWAVE_DATA_DIR=" + dir, "BIGWAVE_LISTEN=" + l.Addr().String(), "BIGWAVE_ADMIN_TOKEN=" + token, "BIGWAVE_SHUTDOWN_GRACE=1s",
	}, more...))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func start(t *testing.T, cfg config.Config) *daemon {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &daemon{t: t, cfg: cfg, log: &logBuffer{}, stop: cancel, err: make(chan error, 1)}
	go func() { d.err <- run(ctx, cfg, slog.New(slog.NewTextHandler(d.log, nil))) }()
	t.Cleanup(cancel)
	return d
}

func (d *daemon) get(path string) (int, string) { return d.do(http.MethodGet, path, "") }

func (d *daemon) post(path, body string) (int, string) { return d.do(http.MethodPost, path, body) }

func (d *daemon) do(method, path, sent string) (int, string) {
	req, _ := http.NewRequestWithContext(d.t.Context(), method, "http://"+d.cfg.Listen+path, strings.NewReader(sent))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

func (d *daemon) eventually(path string, want int) string {
	d.t.Helper()
	code, body := 0, ""
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if code, body = d.get(path); code == want {
			return body
		}
	}
	d.t.Fatalf("GET %s: %d %s; want %d\n%s", path, code, body, want, d.log)
	return ""
}

func (d *daemon) stopped() error {
	d.t.Helper()
	d.stop()
	select {
	case err := <-d.err:
		return err
	case <-time.After(20 * time.Second):
		d.t.Fatalf("does not stop\n%s", d.log)
		return nil
	}
}

func TestItServesAndStopsAndComesBack(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		d := start(t, settings(t, dir))
		d.eventually("/readyz", http.StatusOK)
		if code, body := d.get("/v1/tools"); code != http.StatusOK || !strings.Contains(body, "shell_exec") {
			t.Errorf("tools: %d %s", code, body)
		}
		if err := d.stopped(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if strings.Contains(d.log.String(), token) {
			t.Error("the token is in the log")
		}
	}
	for _, name := range []string{"keys/controlplane.key", "nats/runner.json", "nats/controlplane.json", "secret-key"} {
		st, err := os.Stat(dir + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %04o", name, st.Mode().Perm())
		}
	}
}

// Who waits when the control plane stops is told how far it is, before the
// connection goes.
func TestWhoWaitsIsAnsweredWhenItStops(t *testing.T) {
	d := start(t, settings(t, t.TempDir()))
	d.eventually("/readyz", http.StatusOK)
	var session struct {
		ID string `json:"id"`
	}
	if code, body := d.post("/v1/agent-sessions", "{}"); code != http.StatusCreated || json.Unmarshal([]byte(body), &session) != nil {
		t.Fatalf("session: %d %s", code, body)
	}
	type answer struct {
		code int
		body string
	}
	runs := "/v1/agent-sessions/" + session.ID + "/runs"
	waits := make(chan answer, 1)
	go func() { // there is no runner
		code, body := d.post(strings.TrimSuffix(runs, "s"), `{"tool_calls": [{"id": "1", "name": "shell_exec", "arguments": {"command": "true"}}]}`)
		waits <- answer{code, body}
	}()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(d.eventually(runs, http.StatusOK), `"run_`); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the run does not begin")
		}
	}
	if err := d.stopped(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if a := <-waits; a.code != http.StatusAccepted || !strings.Contains(a.body, `"status":"queued"`) {
		t.Errorf("%d %s", a.code, a.body)
	}
}

func TestTwoOnOneDataDirectoryAreRefused(t *testing.T) {
	dir := t.TempDir()
	d := start(t, settings(t, dir))
	d.eventually("/readyz", http.StatusOK)
	err := run(t.Context(), settings(t, dir), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "another control plane") {
		t.Errorf("the second one: %v", err)
	}
	if code, _ := d.get("/readyz"); code != http.StatusOK {
		t.Errorf("the first one is harmed: %d", code)
	}
}

func TestItAnswersWhileItsPartsAreAway(t *testing.T) {
	for name, c := range map[string]struct{ setting, part string }{
		"database": {"BIGWAVE_DATABASE_URL=postgres://who:hidden-password@127.0.0.1:1/x", "database"},
		"bus":      {"BIGWAVE_NATS_URL=nats://who:hidden-password@127.0.0.1:1", "bus"},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, settings(t, t.TempDir(), c.setting))
			d.eventually("/healthz", http.StatusOK)
			body := d.eventually("/readyz", http.StatusServiceUnavailable)
			if !strings.Contains(body, c.part) {
				t.Errorf("readyz: %s", body)
			}
			if err := d.stopped(); err != nil {
				t.Errorf("stop: %v", err)
			}
			if all := d.log.String() + body; strings.Contains(all, "hidden-password") {
				t.Errorf("a password is shown:\n%s", all)
			}
		})
	}
}

func TestSourcesAreLoadedFromWhereTheSettingsSay(t *testing.T) {
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/o/r/refs/heads/main/weather.py" {
			_, _ = io.WriteString(w, "class Tools: pass")
			return
		}
		http.NotFound(w, r)
	}))
	defer mirror.Close()
	d := start(t, settings(t, t.TempDir(), "BIGWAVE_TOOL_URL_RAW="+mirror.URL))
	d.eventually("/readyz", http.StatusOK)
	for url, want := range map[string]struct {
		code int
		body string
	}{
		"https://github.com/o/r/blob/main/weather.py":  {http.StatusOK, `{"name":"weather","content":"class Tools: pass"}`},
		"https://github.com/o/r/blob/main/none.py":     {http.StatusNotFound, "Failed to fetch the tool"},
		mirror.URL + "/o/r/refs/heads/main/weather.py": {http.StatusBadRequest, "url_not_allowed"},
	} {
		if code, body := d.post("/api/v1/tools/load/url", `{"url":"`+url+`"}`); code != want.code || !strings.Contains(body, want.body) {
			t.Errorf("%s: %d %s", url, code, body)
		}
	}
}

func TestAPortThatIsTakenIsSaid(t *testing.T) {
	cfg := settings(t, t.TempDir())
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := run(t.Context(), cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("got %v", err)
	}
}

func TestVersionAndWrongSettings(t *testing.T) {
	c := command()
	var out bytes.Buffer
	c.SetOut(&out)
	c.SetArgs([]string{"version"})
	if err := c.Execute(); err != nil || out.String() != version+"\n" {
		t.Errorf("version: %q, %v", out.String(), err)
	}
	t.Setenv("BIGWAVE_START_WAIT", "soon")
	c.SetArgs([]string{"serve"})
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), "BIGWAVE_START_WAIT") {
		t.Errorf("a wrong setting: %v", err)
	}
}

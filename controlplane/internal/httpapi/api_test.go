package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/pytool/pytooltest"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
)

const adminToken = "bootstrap-token-for-tests"

// api is a served API over a real store, with sessions and runs that a test
// scripts.
type api struct {
	t           *testing.T
	url         string
	client      *http.Client
	log         *syncBuffer
	ids         *identity.Service
	runs        *fakeRuns
	ready       map[string]error
	fleet       fakeFleet
	spec        routers.Router
	file        string // of the database
	python      *pytooltest.Describer
	pythonTools *pytool.Service
	loader      *fakeLoader
	end         func(error) // the context of every request
}

type option func(*httpapi.Server)

func newAPI(t *testing.T, options ...option) *api {
	t.Helper()
	file := filepath.Join(t.TempDir(), "t.db")
	db, err := store.Open(t.Context(), store.Config{URL: "sqlite://" + file, MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	standard, err := policy.Default("")
	if err != nil {
		t.Fatal(err)
	}
	ids := &identity.Service{Store: db, AdminToken: identity.Digest(adminToken), Now: time.Now, NewID: newID}
	builtins := builtin.New()
	tools := &tool.Service{Store: db, Now: time.Now, NewID: newID}
	a := &api{t: t, log: &syncBuffer{}, ids: ids, runs: newFakeRuns(), python: &pytooltest.Describer{}, loader: &fakeLoader{}, ready: map[string]error{"database": nil}, spec: spec(t)}
	vault, err := pytool.NewVault("a secret key that only tests know")
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(a.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	python := &pytool.Service{
		Store: db, People: ids, Describer: a.python, Loader: a.loader, Vault: vault, Now: time.Now, NewID: newID, NewUUID: uuid.NewString, Log: log,
	}
	a.file, a.pythonTools = file, python
	s := httpapi.Server{
		Identity: ids, Tools: tools, PythonTools: python,
		Policies: &policy.Service{Store: db, Default: standard, Ceilings: policy.DefaultCeilings(), Enabled: true, Now: time.Now, NewID: newID},
		Registry: func(ctx context.Context, p identity.Principal, ids []string) (tool.Registry, error) {
			merged, err := tool.Merge(ctx, p.Workspace, builtins, tools)
			if err != nil {
				return merged, err
			}
			_, functions, err := python.Pin(ctx, p, ids)
			return merged.With(functions), err
		},
		Sessions: a.runs.sessions(), Runs: a.runs, Events: a.runs.watch, Fleet: &a.fleet, Audit: db, Counts: db.Counts,
		Ready: func(context.Context) map[string]error { return a.ready },
		Log:   log, Metrics: prometheus.NewRegistry(),
	}
	for _, o := range options {
		o(&s)
	}
	requests, end := context.WithCancelCause(t.Context())
	srv := httptest.NewUnstartedServer(httpapi.New(s))
	srv.Config.BaseContext = func(net.Listener) context.Context { return requests }
	srv.Start()
	a.end = end
	a.url, a.client = srv.URL, srv.Client()
	t.Cleanup(func() {
		a.runs.stop()
		srv.Close()
	})
	return a
}

// in is a with the failures going to t: for subtests.
func (a *api) in(t *testing.T) *api {
	b := *a
	b.t = t
	return &b
}

func newID() string { return strings.ReplaceAll(uuid.Must(uuid.NewV7()).String(), "-", "") }

// answer is what came back, its body read.
type answer struct {
	t      *testing.T
	status int
	header http.Header
	body   []byte
}

// do sends a request as whoever holds token ("" sends no bearer) and checks
// the answer against the API's own description.
func (a *api) do(method, path, token, body string, edit ...func(*http.Request)) *answer {
	a.t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(a.t.Context(), method, a.url+path, r)
	if err != nil {
		a.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, f := range edit {
		f(req)
	}
	return a.send(req)
}

func (a *api) send(req *http.Request) *answer {
	a.t.Helper()
	res, err := a.client.Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	out := &answer{t: a.t, status: res.StatusCode, header: res.Header, body: data}
	a.validate(req, out)
	return out
}

func (a *api) admin(method, path, body string, edit ...func(*http.Request)) *answer {
	a.t.Helper()
	return a.do(method, path, adminToken, body, edit...)
}

// validate holds an answer against openapi.yaml, when its route is there.
func (a *api) validate(req *http.Request, got *answer) {
	a.t.Helper()
	plain := req.Clone(context.Background())
	plain.URL = &url.URL{Path: req.URL.Path, RawQuery: req.URL.RawQuery}
	route, params, err := a.spec.FindRoute(plain)
	if err != nil {
		return
	}
	in := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: plain, PathParams: params, Route: route},
		Status:                 got.status, Header: got.header,
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}
	in.SetBodyBytes(got.body)
	if err := openapi3filter.ValidateResponse(context.Background(), in); err != nil {
		a.t.Errorf("%s %s answers %d not as openapi.yaml says: %v\n%s", req.Method, req.URL.Path, got.status, err, clip(got.body))
	}
}

func clip(b []byte) []byte { return b[:min(len(b), 600)] }

func (r *answer) want(status int) *answer {
	r.t.Helper()
	if r.status != status {
		r.t.Fatalf("got %d, want %d: %s", r.status, status, clip(r.body))
	}
	return r
}

// problem wants an error answer with that field (empty: any).
func (r *answer) problem(status int, code, field string) {
	r.t.Helper()
	r.want(status)
	if got := r.header.Get("Content-Type"); got != "application/problem+json" {
		r.t.Errorf("got content type %q", got)
	}
	p := r.object()
	if p["status"] != float64(status) || p["detail"] == "" || p["request_id"] == "" || p["type"] != "about:blank" {
		r.t.Errorf("got problem %v", p)
	}
	if code != "" && p["code"] != code {
		r.t.Errorf("got code %v, want %q: %v", p["code"], code, p["detail"])
	}
	if field != "" && p["field"] != field {
		r.t.Errorf("got field %v, want %q: %v", p["field"], field, p["detail"])
	}
}

func (r *answer) object() map[string]any {
	r.t.Helper()
	var out map[string]any
	if err := json.Unmarshal(r.body, &out); err != nil {
		r.t.Fatalf("%v in %s", err, clip(r.body))
	}
	return out
}

func (r *answer) str(name string) string {
	r.t.Helper()
	s, _ := r.object()[name].(string)
	return s
}

// tenant makes a workspace with a user of that role and returns a key of it.
func (a *api) tenant(workspace string, role identity.Role) (token, user string) {
	a.t.Helper()
	p := identity.Principal{Workspace: identity.DefaultWorkspace, UserID: "bootstrap", Role: identity.InstanceAdmin}
	if workspace != identity.DefaultWorkspace {
		a.do("POST", "/admin/workspaces", adminToken, fmt.Sprintf(`{"id":%q}`, workspace))
	}
	u, err := a.ids.CreateUser(a.t.Context(), p, identity.User{Workspace: workspace, Name: "u" + newID(), Role: role})
	if err != nil {
		a.t.Fatal(err)
	}
	_, secret, err := a.ids.CreateKey(a.t.Context(), p, identity.APIKey{Workspace: workspace, UserID: u.ID, Name: "k"})
	if err != nil {
		a.t.Fatal(err)
	}
	return secret, u.ID
}

// session opens a session as whoever holds token.
func (a *api) session(token string) string {
	a.t.Helper()
	return a.do("POST", "/v1/agent-sessions", token, "").want(201).str("id")
}

var specOnce = sync.OnceValues(func() (routers.Router, error) {
	doc, err := loadSpec()
	if err != nil {
		return nil, err
	}
	return gorillamux.NewRouter(doc)
})

func loadSpec() (*openapi3.T, error) {
	openapi3filter.RegisterBodyDecoder("text/event-stream", func(b io.Reader, _ http.Header, _ *openapi3.SchemaRef, _ openapi3filter.EncodingFn) (any, error) {
		data, err := io.ReadAll(b)
		return string(data), err
	})
	doc, err := openapi3.NewLoader().LoadFromFile("openapi.yaml")
	if err != nil {
		return nil, err
	}
	return doc, doc.Validate(context.Background())
}

func spec(t *testing.T) routers.Router {
	t.Helper()
	r, err := specOnce()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

type fakeFleet struct{ runners []fleet.Runner }

func (f *fakeFleet) Runners(context.Context) ([]fleet.Runner, error) { return f.runners, nil }

// fakeLoader answers with what a test says.
type fakeLoader struct {
	asked         []string
	name, content string
	err           error
}

func (f *fakeLoader) Load(_ context.Context, url string) (string, string, error) {
	f.asked = append(f.asked, url)
	return f.name, f.content, f.err
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

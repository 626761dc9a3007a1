package httpapi_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// taking lists the routes that read a body strictly, each with one that it
// takes. Those under /api have rules of their own.
func taking(t *testing.T, a *api) map[string]string {
	_, user := a.tenant(identity.DefaultWorkspace, identity.Member)
	ses := a.session(adminToken)
	group := a.admin("POST", "/admin/groups", `{"name":"those"}`).want(201).str("id")
	out := map[string]string{
		"POST /admin/workspaces":                   `{"id":"w1","name":"W"}`,
		"POST /admin/users":                        `{"name":"ada","role":"member"}`,
		"PATCH /admin/users/" + user:               `{"disabled":true}`,
		"POST /admin/api-keys":                     fmt.Sprintf(`{"user_id":%q,"name":"k","expires_at":"2099-01-01T00:00:00Z"}`, user),
		"POST /admin/groups":                       `{"name":"analysts"}`,
		"PATCH /admin/groups/" + group:             `{"name":"others"}`,
		"POST /admin/groups/" + group + "/members": fmt.Sprintf(`{"user_id":%q}`, user),
		"PUT /admin/permissions":                   `{"defaults":` + noPermissions + `,"groups":{}}`,
		"PUT /admin/workspace-tools/grep":          `{"name":"x","description":"d","parameters":{"type":"object"},"handler_kind":"shell_template","handler_payload":{"command":"true"}}`,
		"PUT /admin/sandbox/policy":                policyBody(nil),
		"POST /v1/agent-sessions":                  `{"idle_ttl_seconds":60,"ttl_seconds":600}`,
		"POST /v1/agent-sessions/" + ses + "/run":  `{"tool_calls":[{"id":"a","name":"shell_exec","arguments":{"command":"true"}}],"parallel":false,"stream":false}`,
	}
	known := 0
	for _, r := range httpapi.Routes() {
		if r.Method != "GET" && r.Method != "DELETE" && !strings.HasSuffix(r.Path, "/cancel") && !strings.HasPrefix(r.Path, "/api/") {
			known++
		}
	}
	if known != len(out) {
		t.Fatalf("%d routes take a body, the test knows %d", known, len(out))
	}
	return out
}

func TestOnlyPlainJSONIsRead(t *testing.T) {
	a := newAPI(t)
	for route, body := range taking(t, a) {
		method, path, _ := strings.Cut(route, " ")
		t.Run(method+" "+path, func(t *testing.T) {
			a := a.in(t)
			header := func(name, value string) func(*http.Request) {
				return func(r *http.Request) { r.Header.Set(name, value) }
			}
			for _, media := range []string{"", "text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", "application/json; charset=utf-16", "application/json; charset"} {
				a.admin(method, path, body, header("Content-Type", media)).problem(415, "unsupported", "Content-Type")
			}
			a.admin(method, path, body, header("Content-Encoding", "gzip")).problem(415, "unsupported", "Content-Encoding")
			first, rest := body[:1], body[1:]
			for name, bad := range map[string]string{
				"array":     "[" + body + "]",
				"string":    `"x"`,
				"null":      "null",
				"number":    "1",
				"trailing":  body + "{}",
				"cut":       body[:len(body)-1],
				"bom":       "\ufeff" + body,
				"comment":   "/* */" + body,
				"unknown":   first + `"nmae":1,` + rest,
				"fold":      first + strings.ToUpper(rest[:strings.Index(rest, ":")]) + ":1," + rest,
				"duplicate": first + rest[:len(rest)-1] + "," + rest[:len(rest)-1] + "}",
				"nan":       first + `"x":NaN}`,
				"deep":      first + `"x":` + strings.Repeat("[", 10001) + strings.Repeat("]", 10001) + "}",
			} {
				res := a.admin(method, path, bad)
				if res.status != 400 {
					t.Errorf("%s: got %d %s", name, res.status, clip(res.body))
				}
				if strings.Contains(string(res.body), "json:") || strings.Contains(string(res.body), "httpapi") {
					t.Errorf("%s: speaks of our own types: %s", name, res.body)
				}
			}
			a.admin(method, path, first+`"nmae":1,`+rest).problem(400, "invalid", "nmae")
			nulls(t, a, method, path, body)
			a.admin(method, path, body, header("Content-Type", "application/json; charset=UTF-8"))
			if res := a.admin(method, path, body); res.status >= 300 && res.status != 409 {
				t.Errorf("the good body: got %d %s", res.status, clip(res.body))
			}
		})
	}
}

// nulls sends null for each member in turn.
func nulls(t *testing.T, a *api, method, path, body string) {
	for _, name := range members(t, body) {
		with := replaceMember(t, body, name, "null")
		res := a.admin(method, path, with)
		res.problem(400, "invalid", name)
	}
}

func TestBodiesHaveACap(t *testing.T) {
	a := newAPI(t)
	for route, body := range taking(t, a) {
		method, path, _ := strings.Cut(route, " ")
		limit := 1 << 20
		if strings.HasSuffix(path, "/run") {
			limit = 16 << 20
		}
		pad := strings.Repeat(" ", limit+1-len(body))
		a.admin(method, path, body+pad).problem(413, "too_large", "")
		// The same without a length given first.
		req, err := http.NewRequestWithContext(t.Context(), method, a.url+path, io.MultiReader(strings.NewReader(body), strings.NewReader(pad)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+adminToken)
		req.Header.Set("Content-Type", "application/json")
		a.send(req).problem(413, "too_large", "")
		if res := a.admin(method, path, body+pad[1:]); res.status >= 300 {
			t.Errorf("%s with exactly the cap: got %d %s", route, res.status, clip(res.body))
		}
	}
	// Hundreds of megabytes that never end are cut off without being kept.
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	req, _ := http.NewRequestWithContext(t.Context(), "PUT", a.url+"/admin/sandbox/policy", io.LimitReader(spaces{}, 1<<30))
	req.Header.Set("Authorization", "Bearer "+adminToken)
	req.Header.Set("Content-Type", "application/json")
	if res, err := a.client.Do(req); err == nil {
		if res.StatusCode != 413 {
			t.Errorf("got %d", res.StatusCode)
		}
		res.Body.Close()
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.TotalAlloc) - int64(before.TotalAlloc); grown > 64<<20 {
		t.Errorf("allocated %d bytes for it", grown)
	}
}

type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestHostileJSONIsAnsweredFast(t *testing.T) {
	a := newAPI(t)
	ses := a.session(adminToken)
	run := func(args string) string { return `{"tool_calls":[{"id":"a","name":"x","arguments":` + args + `}]}` }
	var keys, same strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&keys, `"k%d":1,`, i)
	}
	for range 200_000 {
		same.WriteString(`"k":1,`)
	}
	for name, tc := range map[string]struct {
		body   string
		status int
	}{
		"deep objects":       {run(strings.Repeat(`{"a":`, 500_000)), 400},
		"deep lists":         {run(`{"a":` + strings.Repeat("[", 10_000_000) + "}"), 400},
		"many keys":          {run("{" + strings.TrimSuffix(keys.String(), ",") + "}"), 200},
		"one key many times": {run("{" + strings.TrimSuffix(same.String(), ",") + "}"), 400},
		"many elements":      {run(`{"a":[` + strings.Repeat("1,", 1_000_000) + "1]}"), 200},
		"long string":        {run(`{"a":"` + strings.Repeat("a", 10<<20) + `"}`), 200},
		"many calls":         {`{"tool_calls":[` + strings.Repeat(`{"id":"a","name":"x","arguments":{}},`, 200_000) + `{}]}`, 400},
		"escapes":            {run(`{"a":"` + strings.Repeat(`\u0041`, 1<<20) + `"}`), 200},
		"surrogate":          {run(`{"a":"\ud800"}`), 400},
	} {
		t.Run(name, func(t *testing.T) {
			a := a.in(t)
			res := a.admin("POST", "/v1/agent-sessions/"+ses+"/run?wait=0", tc.body)
			took := a.lastTook()
			if res.status != tc.status && !(tc.status == 200 && res.status == 202) {
				t.Errorf("got %d, want %d: %s", res.status, tc.status, clip(res.body))
			}
			if took > 20*time.Second { // what is quadratic takes minutes, also on a busy machine
				t.Errorf("took %v", took)
			}
			t.Logf("%d bytes, %v", len(tc.body), took)
		})
	}
}

// lastTook is how long the last logged request took to be answered.
func (a *api) lastTook() time.Duration {
	log := strings.TrimSpace(a.log.String())
	d, _ := time.ParseDuration(log[strings.LastIndex(log, "took=")+len("took="):])
	return d
}

func TestASlowBodyIsGivenUp(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.BodyTimeout = 300 * time.Millisecond })
	for name, auth := range map[string]string{"408": adminToken, "401": "nobody"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n", auth)
		stop := make(chan struct{})
		go func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
					if _, err := conn.Write([]byte(" ")); err != nil {
						return
					}
				}
			}
		}()
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		got, err := io.ReadAll(conn) // until the server closes
		close(stop)
		if !bytes.Contains(got, []byte("HTTP/1.1 "+name)) || (err != nil && strings.Contains(err.Error(), "timeout")) {
			t.Errorf("got %q, %v; want %s and an end", got, err, name)
		}
	}
}

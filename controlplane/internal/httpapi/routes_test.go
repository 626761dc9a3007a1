package httpapi_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

var param = regexp.MustCompile(`:(\w+)`)

// concrete fills a template's parameters.
func concrete(path string) string { return param.ReplaceAllString(path, "x") }

// closed lists the routes that need a bearer.
func closed() []httpapi.Route {
	return slices.DeleteFunc(httpapi.Routes(), func(r httpapi.Route) bool { return r.Access == httpapi.Open })
}

func TestDescriptionMatchesTheRoutes(t *testing.T) {
	doc, err := loadSpec()
	if err != nil {
		t.Fatal(err)
	}
	described := map[string]bool{}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			described[method+" "+path] = op.Security != nil && len(*op.Security) == 0
		}
	}
	running := map[string]bool{}
	for _, r := range httpapi.Routes() {
		running[r.Method+" "+param.ReplaceAllString(r.Path, "{$1}")] = r.Access == httpapi.Open
	}
	if !maps.Equal(described, running) {
		t.Errorf("described (and open):\n%v\nrunning:\n%v", described, running)
	}
	served := newAPI(t).do("GET", "/openapi.json", "", "").want(200).object()
	if n := len(served["paths"].(map[string]any)); n != doc.Paths.Len() {
		t.Errorf("served %d paths, want %d", n, doc.Paths.Len())
	}
}

func TestEveryErrorCodeIsDescribed(t *testing.T) {
	doc, err := loadSpec()
	if err != nil {
		t.Fatal(err)
	}
	schema := doc.Components.Schemas["CallErrorCode"].Value
	if len(schema.Enum) != len(fault.Codes) {
		t.Errorf("%d codes are described, there are %d", len(schema.Enum), len(fault.Codes))
	}
	for code, advice := range fault.Codes {
		if !slices.Contains(schema.Enum, any(string(code))) || !strings.Contains(schema.Description, "* `"+string(code)+"`: "+advice.Meaning) {
			t.Errorf("%s is not described as %q", code, advice.Meaning)
		}
	}
}

func TestNothingWithoutABearer(t *testing.T) {
	a := newAPI(t)
	type sender func(*http.Request)
	carriers := map[string]sender{
		"none":        func(*http.Request) {},
		"unknown":     func(r *http.Request) { r.Header.Set("Authorization", "bearer nobody") },
		"basic":       func(r *http.Request) { r.SetBasicAuth("admin", adminToken) },
		"empty":       func(r *http.Request) { r.Header.Set("Authorization", "") },
		"scheme only": func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") },
		"bare token":  func(r *http.Request) { r.Header.Set("Authorization", adminToken) },
		"two tokens":  func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+adminToken+" x") },
		"list":        func(r *http.Request) { r.Header.Set("Authorization", "Bearer x, Bearer "+adminToken) },
		"two headers": func(r *http.Request) {
			r.Header["Authorization"] = []string{"Bearer " + adminToken, "Bearer " + adminToken}
		},
		"long":         func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+strings.Repeat("x", 9000)) },
		"query":        func(r *http.Request) { r.URL.RawQuery = "access_token=" + adminToken + "&token=" + adminToken },
		"cookie":       func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "token", Value: adminToken}) },
		"x-api-key":    func(r *http.Request) { r.Header.Set("X-Api-Key", adminToken) },
		"proxy header": func(r *http.Request) { r.Header.Set("Proxy-Authorization", "Bearer "+adminToken) },
	}
	first := map[bool]map[string]any{} // by whether the sentence is Open WebUI's
	check := func(name, method, path string, s sender) {
		t.Helper()
		res := a.do(method, path, "", "", s)
		res.problem(401, "unauthenticated", "")
		if res.header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%s %s %s: no WWW-Authenticate", name, method, path)
		}
		got := res.object()
		delete(got, "request_id")
		theirs := strings.HasPrefix(path, "/api/")
		if theirs {
			want := "Not authenticated"
			if name == "unknown" {
				want = "Your session has expired or the token is invalid. Please sign in again."
			}
			res.says(401, want)
			delete(got, "detail")
		}
		if first[theirs] == nil {
			first[theirs] = got
		}
		if !maps.Equal(got, first[theirs]) {
			t.Errorf("%s %s %s: got %v, elsewhere %v", name, method, path, got, first[theirs])
		}
	}
	for _, r := range closed() {
		for name, s := range carriers {
			check(name, r.Method, concrete(r.Path), s)
		}
	}
	for _, path := range []string{"/", "/nothing", "/api/nothing", "/api/v1/tools/id/", "/admin", "/v1/agent-sessions/x/y/z", "/admin/workspace-tools/..%2fx", "/metrics/"} {
		check("unknown route", "GET", path, carriers["none"])
	}
	check("wrong method", "POST", "/v1/tools", carriers["none"])
	a.admin("GET", "/v1/tools", "", func(r *http.Request) { r.Header.Set("Authorization", "BEARER  "+adminToken) }).want(200)
}

func TestEachRouteHasItsRole(t *testing.T) {
	a := newAPI(t)
	member, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
	admin, _ := a.tenant(identity.DefaultWorkspace, identity.Admin)
	for _, r := range closed() {
		path := concrete(r.Path)
		got := a.do(r.Method, path, member, "").status
		if refused := got == 403; refused != (r.Access != httpapi.Member) {
			t.Errorf("%s %s answers a member with %d", r.Method, path, got)
		}
		got = a.do(r.Method, path, admin, "").status
		if refused := got == 403; refused != (r.Access == httpapi.InstanceAdmin) {
			t.Errorf("%s %s answers a workspace admin with %d", r.Method, path, got)
		}
		if strings.HasPrefix(r.Path, "/admin/") && r.Access == httpapi.Member {
			t.Errorf("%s is open to members", r.Path)
		}
	}
}

func TestUnknownRoutesAndMethods(t *testing.T) {
	a := newAPI(t)
	for _, path := range []string{"/", "/nothing", "/admin/", "/admin/users/", "/admin//users", "/v1/agent-sessions/x/run/", "/healthz/x", "/ADMIN/users"} {
		a.admin("GET", path, "").problem(404, "not_found", "")
	}
	for _, r := range httpapi.Routes() {
		res := a.admin("TRACE", concrete(r.Path), "")
		res.problem(405, "method_not_allowed", "")
		if !strings.Contains(res.header.Get("Allow"), r.Method) {
			t.Errorf("%s: Allow is %q, want %s in it", r.Path, res.header.Get("Allow"), r.Method)
		}
	}
}

// raw sends a request line as it is: clients tidy paths up.
func raw(t *testing.T, a *api, method, path, body string) (int, map[string]any) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		method, path, adminToken, len(body), body)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var out map[string]any
	_ = json.NewDecoder(res.Body).Decode(&out)
	return res.StatusCode, out
}

func TestPathsMeanOneRoute(t *testing.T) {
	a := newAPI(t)
	body := `{"handler_kind":"shell_template","handler_payload":{"command":"true"}}`
	long := strings.Repeat("a", 256)
	for _, name := range []string{
		"../../etc/passwd", "..%2f..%2f", "..%2Fworkspaces", "%2e%2e", "%2E%2E", ".", "..", "", "a/b", "a%2fb", "a%5cb", "a%00b", "a%0d%0ab", "%", "%zz",
		long, "-x", "CON.txt", "%F0%9F%92%A9", "%E2%80%AEgrep", "%EF%BD%87rep", "grep%E2%80%8B", "gr%D0%B5p", "%2541", "a%20b", "a;b", "a%3fb", "%ff",
		"../sandbox/policy", "..%2fsandbox%2fpolicy", "x/../y",
	} {
		status, got := raw(t, a, "PUT", "/admin/workspace-tools/"+name, body)
		if status != 400 && status != 404 {
			t.Errorf("%q: got %d %v", name, status, got)
		}
		if status, got := raw(t, a, "GET", "/admin/workspace-tools/"+name, ""); name != "" && status != 400 && status != 404 {
			t.Errorf("GET %q: got %d %v", name, status, got)
		}
	}
	if got := string(a.admin("GET", "/admin/workspace-tools", "").want(200).body); got != "[]\n" {
		t.Errorf("something was stored: %s", got)
	}
	// A name that was needlessly escaped is still that name, decoded once.
	if status, got := raw(t, a, "PUT", "/admin/workspace-tools/%67rep", body); status != 200 || got["name"] != "grep" {
		t.Errorf("got %d %v", status, got)
	}
}

// A request that ended because the server does is told so, not that something
// went wrong.
func TestARequestThatTheServerEndsIsToldWhy(t *testing.T) {
	a := newAPI(t)
	a.end(fault.New(fault.Unavailable, "the control plane is stopping; ask again"))
	a.admin("GET", "/api/tools", "").says(503, "the control plane is stopping; ask again")
	a.admin("GET", "/admin/groups", "").says(503, "the control plane is stopping; ask again")
}

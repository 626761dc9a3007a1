package httpapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

// policyBody is a policy with some members replaced; a nil value leaves the
// member out.
func policyBody(edit map[string]any) string {
	p := map[string]any{
		"workspace_id": "default", "fs_allowlist": []string{"/workspace"}, "network_allowlist": []string{},
		"cpu_shares": 2048, "memory_mb": 2048, "pids_limit": 512, "wall_clock_seconds": 600,
		"output_bytes_limit": 4194304, "base_image": "bigwave/sandbox-base:latest",
	}
	for k, v := range edit {
		if p[k] = v; v == nil {
			delete(p, k)
		}
	}
	data, _ := json.Marshal(p)
	return string(data)
}

func members(t *testing.T, body string) []string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(m))
}

func replaceMember(t *testing.T, body, name, value string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatal(err)
	}
	m[name] = json.RawMessage(value)
	data, _ := json.Marshal(m)
	return string(data)
}

func TestPolicyDocument(t *testing.T) {
	a := newAPI(t)
	const path = "/admin/sandbox/policy"
	standard := a.admin("GET", path, "").want(200).object()
	if standard["workspace_id"] != "default" || len(standard) != 9 {
		t.Errorf("got %v", standard)
	}
	for name, value := range map[string]string{"wall_clock_seconds": `"600"`, "memory_mb": "1.5", "cpu_shares": "1e3", "pids_limit": "true", "output_bytes_limit": "9223372036854775808", "fs_allowlist": `"/workspace"`, "network_allowlist": `{}`, "base_image": "1", "workspace_id": "[]"} {
		a.admin("PUT", path, replaceMember(t, policyBody(nil), name, value)).problem(400, "invalid", name)
	}
	for _, name := range members(t, policyBody(nil)) {
		a.admin("PUT", path, policyBody(map[string]any{name: nil})).problem(400, "invalid", name)
	}
	a.admin("PUT", path, replaceMember(t, policyBody(nil), "fs_allowlist", `["/workspace",null]`)).problem(400, "invalid", "fs_allowlist[1]")
	a.admin("PUT", path, replaceMember(t, policyBody(nil), "network_allowlist", `[1]`)).problem(400, "invalid", "network_allowlist[0]")
	for name, bad := range map[string][]int64{
		"cpu_shares": {0, 1, -1, 262145}, "memory_mb": {0, -1, 15, 1 << 31, 1<<53 + 1, 1<<63 - 1}, "pids_limit": {0, 3, -1, 1 << 31},
		"wall_clock_seconds": {0, -1, 1_000_000_000}, "output_bytes_limit": {0, -1, 1023, 1 << 53},
	} {
		for _, v := range bad {
			a.admin("PUT", path, policyBody(map[string]any{name: v})).problem(400, "", name)
		}
	}
	for _, v := range []any{[]string{"/workspace", "/etc"}, []string{}, []string{"/workspace", "/workspace/../etc"}} {
		a.admin("PUT", path, policyBody(map[string]any{"fs_allowlist": v})).want(400)
	}
	a.admin("PUT", path, policyBody(map[string]any{"workspace_id": "other"})).problem(403, "", "")
	if got := a.admin("GET", path, "").object(); fmt.Sprint(got) != fmt.Sprint(standard) {
		t.Errorf("a refused policy changed something: %v", got)
	}

	want := a.admin("PUT", path, policyBody(nil)).want(200)
	if got := a.admin("GET", path, "").want(200); string(got.body) != string(want.body) {
		t.Errorf("got %s, want %s", got.body, want.body)
	}
	a.admin("PUT", path, string(want.body)).want(200) // what GET gives PUT takes
	a.admin("DELETE", path, "").want(204)
	a.admin("DELETE", path, "").want(204)
	if got := a.admin("GET", path, "").object(); fmt.Sprint(got) != fmt.Sprint(standard) {
		t.Errorf("after DELETE: got %v", got)
	}
}

const grepTool = `{"name":"grep_repo","description":"Search the repo for a regex pattern.","parameters":{"type":"object","properties":{"pattern":{"type":"string"}},"required":["pattern"]},"handler_kind":"shell_template","handler_payload":{"command":"grep -rn {pattern} /workspace"}}`

func TestWorkspaceTools(t *testing.T) {
	a := newAPI(t)
	const path = "/admin/workspace-tools/grep_repo"
	if got := string(a.admin("GET", "/admin/workspace-tools", "").want(200).body); got != "[]\n" {
		t.Errorf("got %s", got)
	}
	a.admin("GET", path, "").problem(404, "not_found", "")
	a.admin("DELETE", path, "").problem(404, "not_found", "")
	put := a.admin("PUT", path, grepTool).want(200)
	if len(put.object()) != 5 || string(put.body) != grepTool+"\n" {
		t.Errorf("got %s", put.body)
	}
	etag := put.header.Get("ETag")
	got := a.admin("GET", path, "").want(200)
	if got.header.Get("ETag") != etag || string(got.body) != string(put.body) {
		t.Errorf("got %s with ETag %q, want %q", got.body, got.header.Get("ETag"), etag)
	}
	match := func(tag string) func(*http.Request) { return func(r *http.Request) { r.Header.Set("If-Match", tag) } }
	next := a.admin("PUT", path, string(got.body), match(etag)).want(200).header.Get("ETag")
	if next == etag || next == "" {
		t.Errorf("the ETag stayed %q", next)
	}
	a.admin("PUT", path, grepTool, match(etag)).problem(412, "", "")
	a.admin("DELETE", path, "", match(etag)).problem(412, "", "")

	// The name of the path wins, and nothing else is touched.
	other := a.admin("PUT", "/admin/workspace-tools/grep", `{"name":"python_exec","handler_kind":"python_template"}`).want(200).object()
	if other["name"] != "grep" || fmt.Sprint(other["parameters"]) != "map[]" || fmt.Sprint(other["handler_payload"]) != "map[]" || other["description"] != "" {
		t.Errorf("got %v", other)
	}
	var list []map[string]any
	if err := json.Unmarshal(a.admin("GET", "/admin/workspace-tools", "").want(200).body, &list); err != nil || len(list) != 2 || list[0]["name"] != "grep" {
		t.Errorf("got %v, %v", list, err)
	}
	for field, body := range map[string]string{
		"handler_kind":            `{"handler_payload":{"command":"true"}}`,
		"parameters":              `{"handler_kind":"shell_template","parameters":[]}`,
		"handler_payload":         `{"handler_kind":"shell_template","handler_payload":"true"}`,
		"handler_payload.command": `{"handler_kind":"shell_template","handler_payload":{"command":"echo '{x}'"}}`,
		"description":             `{"handler_kind":"shell_template","description":7}`,
	} {
		a.admin("PUT", path, body).problem(400, "", field)
	}
	a.admin("PUT", path, `{"handler_kind":"bash","handler_payload":{"command":"true"}}`).problem(400, "", "handler_kind")
	if got := a.admin("GET", path, "").header.Get("ETag"); got != next {
		t.Errorf("a refused tool changed something: %q", got)
	}
	a.admin("DELETE", path, "", match(next)).want(204)
	a.admin("GET", path, "").want(404)
}

func TestRegistry(t *testing.T) {
	a := newAPI(t)
	other, _ := a.tenant("b", identity.Admin)
	list := func(token string) map[string]string {
		t.Helper()
		var out struct {
			Tools []struct {
				Type     string
				Source   string
				Function struct{ Name string }
				Over     bool `json:"overrides_builtin"`
			}
		}
		if err := json.Unmarshal(a.do("GET", "/v1/tools", token, "").want(200).body, &out); err != nil {
			t.Fatal(err)
		}
		names := map[string]string{}
		for _, x := range out.Tools {
			names[x.Function.Name] = fmt.Sprint(x.Source, " ", x.Over)
		}
		return names
	}
	plain := map[string]string{"python_exec": "builtin false", "shell_exec": "builtin false", "file_read": "builtin false", "file_write": "builtin false"}
	if got := list(adminToken); !maps.Equal(got, plain) {
		t.Errorf("got %v", got)
	}
	a.admin("PUT", "/admin/workspace-tools/shell_exec", `{"handler_kind":"shell_template","handler_payload":{"command":"true"}}`).want(200)
	if got := list(adminToken)["shell_exec"]; got != "workspace true" {
		t.Errorf("got %q", got)
	}
	if got := list(other); !maps.Equal(got, plain) {
		t.Errorf("another workspace sees %v", got)
	}
	a.admin("DELETE", "/admin/workspace-tools/shell_exec", "").want(204)
	if got := list(adminToken); !maps.Equal(got, plain) {
		t.Errorf("got %v", got)
	}
}

func TestWorkspacesUsersAndKeys(t *testing.T) {
	a := newAPI(t)
	a.admin("POST", "/admin/workspaces", `{"id":"research","name":"Research"}`).want(201)
	a.admin("POST", "/admin/workspaces", `{"id":"research"}`).problem(409, "", "")
	a.admin("POST", "/admin/workspaces", `{"id":"No Good"}`).problem(400, "", "id")
	a.admin("POST", "/admin/workspaces", `{"name":"x"}`).problem(400, "", "id")
	a.admin("GET", "/admin/workspaces/research", "").want(200)
	a.admin("GET", "/admin/workspaces/nope", "").problem(404, "not_found", "")
	if n := len(a.admin("GET", "/admin/workspaces", "").want(200).object()["items"].([]any)); n != 2 {
		t.Errorf("got %d workspaces", n)
	}

	user := a.admin("POST", "/admin/users", `{"workspace_id":"research","name":"ada","role":"admin"}`).want(201)
	a.admin("POST", "/admin/users", `{"workspace_id":"nope","name":"ada"}`).problem(404, "", "")
	a.admin("POST", "/admin/users", `{"name":"ada","role":"root"}`).problem(400, "", "role")
	id := user.str("id")
	if user.str("workspace_id") != "research" {
		t.Errorf("got %s", user.body)
	}
	if got := a.admin("POST", "/admin/users", `{"name":"eve"}`).want(201); got.str("role") != "member" || got.str("workspace_id") != "default" {
		t.Errorf("got %s", got.body)
	}
	made := a.admin("POST", "/admin/api-keys", fmt.Sprintf(`{"workspace_id":"research","user_id":%q,"name":"laptop"}`, id)).want(201)
	secret := made.str("secret")
	if len(secret) < 32 || !strings.HasPrefix(secret, made.str("hint")) {
		t.Errorf("got %s", made.body)
	}
	listed := a.admin("GET", "/admin/api-keys?workspace_id=research", "").want(200)
	if strings.Contains(string(listed.body), secret) || !strings.Contains(string(listed.body), made.str("id")) {
		t.Errorf("got %s", listed.body)
	}
	a.do("GET", "/admin/sandbox/policy", secret, "").want(200)

	a.admin("PATCH", "/admin/users/"+id, `{"disabled":true}`).want(200)
	a.do("GET", "/v1/tools", secret, "").problem(401, "unauthenticated", "")
	a.admin("PATCH", "/admin/users/"+id, `{"disabled":false,"name":"Ada","role":"member"}`).want(200)
	a.do("GET", "/v1/tools", secret, "").want(200)
	a.do("GET", "/admin/sandbox/policy", secret, "").problem(403, "forbidden", "")
	a.admin("DELETE", "/admin/api-keys/"+made.str("id"), "").want(204)
	a.do("GET", "/v1/tools", secret, "").problem(401, "unauthenticated", "")

	expired := fmt.Sprintf(`{"workspace_id":"research","user_id":%q,"name":"k","expires_at":%q}`, id, "not a time")
	a.admin("POST", "/admin/api-keys", expired).problem(400, "invalid", "expires_at")
	brief := a.admin("POST", "/admin/api-keys", fmt.Sprintf(`{"workspace_id":"research","user_id":%q,"name":"k","expires_at":%q}`, id, time.Now().Add(1500*time.Millisecond).Format(time.RFC3339Nano))).want(201).str("secret")
	a.do("GET", "/v1/tools", brief, "").want(200)
	time.Sleep(1600 * time.Millisecond)
	a.do("GET", "/v1/tools", brief, "").problem(401, "unauthenticated", "")

	a.admin("DELETE", "/admin/users/"+id, "").want(204)
	a.admin("GET", "/admin/users/"+id, "").want(404)
	a.admin("DELETE", "/admin/workspaces/research", "").want(204)
	a.admin("DELETE", "/admin/workspaces/default", "").problem(409, "", "")
	if strings.Contains(a.log.String(), secret) || strings.Contains(a.log.String(), adminToken) {
		t.Error("the log holds a secret")
	}
	if got := a.admin("GET", "/admin/audit-events?limit=1", "").want(200).object(); len(got["items"].([]any)) != 1 {
		t.Errorf("got %v", got)
	}
}

func TestAnotherWorkspaceSeesNothing(t *testing.T) {
	a := newAPI(t)
	ann, annID := a.tenant("a", identity.Admin)
	bob, _ := a.tenant("b", identity.Admin)
	carl, _ := a.tenant("a", identity.Member)
	a.do("PUT", "/admin/workspace-tools/mine", ann, grepTool).want(200)
	ses := a.session(ann)
	run := a.do("POST", "/v1/agent-sessions/"+ses+"/run", ann, `{"tool_calls":[{"id":"c","name":"shell_exec","arguments":{"command":"true"}}]}`).want(200).str("id")
	var keys struct{ Items []struct{ ID string } }
	if err := json.Unmarshal(a.do("GET", "/admin/api-keys", ann, "").want(200).body, &keys); err != nil || len(keys.Items) == 0 {
		t.Fatal(err, keys)
	}
	grp := a.do("POST", "/admin/groups", ann, `{"name":"g"}`).want(201).str("id")
	run1 := `{"tool_calls":[{"id":"c","name":"x","arguments":{}}]}`
	routes := []struct{ method, path, other, body string }{
		{"GET", "/admin/users/" + annID, "/admin/users/usr_1", ""},
		{"PATCH", "/admin/users/" + annID, "/admin/users/usr_1", `{"disabled":true}`},
		{"DELETE", "/admin/users/" + annID, "/admin/users/usr_1", ""},
		{"DELETE", "/admin/api-keys/" + keys.Items[0].ID, "/admin/api-keys/key_1", ""},
		{"GET", "/admin/groups/" + grp, "/admin/groups/grp_1", ""},
		{"PATCH", "/admin/groups/" + grp, "/admin/groups/grp_1", `{"name":"x"}`},
		{"DELETE", "/admin/groups/" + grp, "/admin/groups/grp_1", ""},
		{"GET", "/admin/groups/" + grp + "/members", "/admin/groups/grp_1/members", ""},
		{"POST", "/admin/groups/" + grp + "/members", "/admin/groups/grp_1/members", `{"user_id":"usr_1"}`},
		{"DELETE", "/admin/groups/" + grp + "/members/" + annID, "/admin/groups/grp_1/members/usr_1", ""},
		{"GET", "/admin/groups?workspace_id=a", "/admin/groups?workspace_id=zz", ""},
		{"GET", "/admin/permissions?workspace_id=a", "/admin/permissions?workspace_id=zz", ""},
		{"PUT", "/admin/permissions", "/admin/permissions", `{"defaults":` + noPermissions + `,"groups":{"` + grp + `":` + noPermissions + `}}`},
		{"GET", "/admin/workspace-tools/mine", "/admin/workspace-tools/none", ""},
		{"DELETE", "/admin/workspace-tools/mine", "/admin/workspace-tools/none", ""},
		{"GET", "/admin/users?workspace_id=a", "/admin/users?workspace_id=zz", ""},
		{"GET", "/admin/api-keys?workspace_id=a", "/admin/api-keys?workspace_id=zz", ""},
		{"POST", "/admin/users", "/admin/users", `{"workspace_id":"a","name":"x"}`},
		{"POST", "/admin/api-keys", "/admin/api-keys", fmt.Sprintf(`{"user_id":%q,"name":"x"}`, annID)},
		{"GET", "/v1/agent-sessions/" + ses, "/v1/agent-sessions/ses_1", ""},
		{"DELETE", "/v1/agent-sessions/" + ses, "/v1/agent-sessions/ses_1", ""},
		{"POST", "/v1/agent-sessions/" + ses + "/run", "/v1/agent-sessions/ses_1/run", run1},
		{"GET", "/v1/agent-sessions/" + ses + "/runs", "/v1/agent-sessions/ses_1/runs", ""},
		{"GET", "/v1/agent-sessions/" + ses + "/runs/" + run, "/v1/agent-sessions/" + ses + "/runs/run_1", ""},
		{"GET", "/v1/agent-sessions/" + ses + "/runs/" + run + "/events", "/v1/agent-sessions/" + ses + "/runs/run_1/events", ""},
		{"POST", "/v1/agent-sessions/" + ses + "/runs/" + run + "/cancel", "/v1/agent-sessions/" + ses + "/runs/run_1/cancel", ""},
	}
	shape := func(token, method, path, body string) string {
		res := a.do(method, path, token, body)
		res.problem(404, "not_found", "")
		got := res.object()
		delete(got, "request_id")
		s := fmt.Sprint(got)
		for _, id := range []string{annID, grp, "grp_1", keys.Items[0].ID, ses, run, "usr_1", "key_1", "ses_1", "run_1", `"mine"`, `"none"`, `"a"`, `"zz"`} {
			s = strings.ReplaceAll(s, id, "ID")
		}
		return s
	}
	for _, r := range routes {
		got, want := shape(bob, r.method, r.path, r.body), shape(bob, r.method, r.other, r.body)
		if got != want {
			t.Errorf("%s %s: %s, for an unknown id %s", r.method, r.path, got, want)
		}
		if strings.HasPrefix(r.path, "/v1/") {
			shape(carl, r.method, r.path, r.body)
		}
	}
	for _, path := range []string{"/admin/users", "/admin/api-keys", "/admin/workspace-tools", "/v1/agent-sessions", "/admin/audit-events"} {
		if got := string(a.do("GET", path, bob, "").want(200).body); strings.Contains(got, annID) || strings.Contains(got, ses) || strings.Contains(got, "mine") {
			t.Errorf("%s shows %s", path, got)
		}
	}
	a.do("GET", "/admin/users/"+annID, ann, "").want(200)
	a.do("GET", "/admin/workspace-tools/mine", ann, "").want(200)
	if got := a.do("GET", "/v1/agent-sessions/"+ses, ann, "").want(200); got.str("status") != "new" {
		t.Errorf("got %s", got.body)
	}
}

func TestPages(t *testing.T) {
	a := newAPI(t)
	for i := range 5 {
		a.admin("POST", "/admin/users", fmt.Sprintf(`{"name":"u%d"}`, i)).want(201)
	}
	seen := map[string]bool{}
	cursor, pages := "", 0
	for {
		got := a.admin("GET", "/admin/users?limit=2&cursor="+cursor, "").want(200).object()
		for _, u := range got["items"].([]any) {
			seen[u.(map[string]any)["id"].(string)] = true
		}
		pages++
		if cursor, _ = got["next_cursor"].(string); cursor == "" {
			break
		}
	}
	if len(seen) != 5 || pages != 3 {
		t.Errorf("got %d users on %d pages", len(seen), pages)
	}
	for _, q := range []string{"limit=0", "limit=201", "limit=-1", "limit=x", "limit=1&limit=2", "limit=1e1", "limit=99999999999999999999"} {
		a.admin("GET", "/admin/users?"+q, "").problem(400, "invalid", "limit")
	}
	a.admin("GET", "/admin/users?cursor=%21%21", "").problem(400, "invalid", "cursor")
	a.admin("GET", "/admin/users?cursor=%zz", "").problem(400, "invalid", "")
	a.admin("GET", "/admin/users?cursor=%27%20OR%201%3D1--", "").problem(400, "invalid", "cursor")
}

func TestSQLInNamesIsText(t *testing.T) {
	a := newAPI(t)
	for _, name := range []string{`'; DROP TABLE users; --`, `%_\`, `" OR ""="`, `$1`, `?`} {
		body, _ := json.Marshal(map[string]string{"name": name})
		if got := a.admin("POST", "/admin/users", string(body)).want(201).str("name"); got != name {
			t.Errorf("got %q, want %q", got, name)
		}
		a.admin("GET", "/admin/users?workspace_id="+url.QueryEscape(name), "").problem(404, "not_found", "")
	}
}

func TestSessions(t *testing.T) {
	a := newAPI(t)
	made := a.admin("POST", "/v1/agent-sessions", `{"idle_ttl_seconds":60,"ttl_seconds":600}`).want(201)
	if made.header.Get("Location") != "/v1/agent-sessions/"+made.str("id") || made.object()["idle_ttl_seconds"] != 60.0 {
		t.Errorf("got %v %s", made.header, made.body)
	}
	a.admin("POST", "/v1/agent-sessions", "{}").want(201)
	a.admin("POST", "/v1/agent-sessions", "").want(201)
	for _, v := range []string{"0", "-1", "1.5", "9223372036854775807", `"60"`} {
		a.admin("POST", "/v1/agent-sessions", `{"ttl_seconds":`+v+`}`).problem(400, "invalid", "ttl_seconds")
		a.admin("POST", "/v1/agent-sessions", `{"idle_ttl_seconds":`+v+`}`).problem(400, "invalid", "idle_ttl_seconds")
	}
	if n := len(a.admin("GET", "/v1/agent-sessions", "").want(200).object()["items"].([]any)); n != 3 {
		t.Errorf("got %d sessions", n)
	}
	a.admin("DELETE", "/v1/agent-sessions/"+made.str("id"), "").want(204)
	a.admin("DELETE", "/v1/agent-sessions/"+made.str("id"), "").want(204)
	if got := a.admin("GET", "/v1/agent-sessions/"+made.str("id"), "").want(200); got.str("status") != "closed" || got.str("reason") != "client" {
		t.Errorf("got %s", got.body)
	}
}

func TestFailuresHideTheirCause(t *testing.T) {
	boom := errors.New(`pq: relation "secret_table" does not exist at postgres://bw:hunter2@db/x`)
	for name, tc := range map[string]struct {
		start  error
		status int
		code   string
	}{
		"unknown":     {boom, 500, "internal"},
		"wrapped":     {fmt.Errorf("insert run: %w", boom), 500, "internal"},
		"unavailable": {fault.Wrap(boom, fault.Unavailable, "the database is not reachable"), 503, "unavailable"},
		"busy":        {fault.New(fault.Busy, "the session has 8 open runs").WithCode("session_busy"), 429, "session_busy"},
		"conflict":    {fault.New(fault.Conflict, "the session is lost").WithCode("session_lost"), 409, "session_lost"},
		"made up":     {&fault.Error{Kind: "nonsense", Message: "m"}, 500, "nonsense"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			ses := a.session(adminToken)
			a.runs.err = tc.start
			res := a.admin("POST", "/v1/agent-sessions/"+ses+"/run", `{"tool_calls":[{"id":"c","name":"x","arguments":{}}]}`)
			res.problem(tc.status, tc.code, "")
			for _, secret := range []string{"pq:", "secret_table", "hunter2", "insert run", ".go:"} {
				if strings.Contains(string(res.body), secret) {
					t.Errorf("the body tells %q: %s", secret, res.body)
				}
			}
			if after := res.header.Get("Retry-After"); (after != "") != (tc.status == 429 || tc.status == 503) {
				t.Errorf("Retry-After is %q", after)
			}
			if tc.status >= 500 && !strings.Contains(a.log.String(), res.str("request_id")) {
				t.Errorf("the log does not know %s", res.str("request_id"))
			}
		})
	}
}

func TestAPanicIsA500(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) {
		s.Fleet = panicFleet{}
	})
	res := a.admin("GET", "/admin/runners", "")
	res.problem(500, "internal", "")
	if strings.Contains(string(res.body), "kaboom") || !strings.Contains(a.log.String(), "kaboom") {
		t.Errorf("got %s; log %s", res.body, a.log)
	}
	a.admin("GET", "/v1/tools", "").want(200)
}

type panicFleet struct{ fakeFleet }

func (panicFleet) Runners(context.Context) ([]fleet.Runner, error) { panic("kaboom hunter2") }

func TestReadinessAndHealth(t *testing.T) {
	a := newAPI(t)
	a.do("GET", "/healthz", "", "").want(200)
	a.do("GET", "/readyz", "", "").want(200)
	a.ready["database"] = fault.Wrap(errors.New("dial tcp 10.0.0.7:5432"), fault.Unavailable, "the database is not reachable")
	a.ready["bus"] = errors.New("nats: secret")
	res := a.do("GET", "/readyz", "", "").want(503)
	parts, _ := res.object()["parts"].(map[string]any)
	if parts["database"] != "the database is not reachable" || parts["bus"] != "not reachable" || strings.Contains(string(res.body), "10.0.0.7") {
		t.Errorf("got %s", res.body)
	}
	a.do("GET", "/healthz", "", "").want(200)
}

func TestRunnersAreListed(t *testing.T) {
	a := newAPI(t)
	a.fleet.runners = []fleet.Runner{{ID: "r1", Incarnation: "i", Pool: "default", State: fleet.Ready, Slots: 4, FirstSeen: time.Now(), LastBeat: time.Now()}}
	items := a.admin("GET", "/admin/runners", "").want(200).object()["items"].([]any)
	if len(items) != 1 || items[0].(map[string]any)["state"] != "ready" {
		t.Errorf("got %v", items)
	}
}

func TestMetricsNameRoutesNotIDs(t *testing.T) {
	a := newAPI(t)
	ses := a.session(adminToken)
	a.admin("GET", "/v1/agent-sessions/"+ses, "").want(200)
	a.admin("GET", "/nothing/at/all", "")
	a.do("GET", "/v1/agent-sessions/"+ses, "", "")
	a.admin("POST", "/v1/agent-sessions/"+ses+"/run", oneCall).want(200)
	a.admin("POST", "/v1/agent-sessions/"+ses+"/run", twoCalls).want(200)
	got := string(a.admin("GET", "/metrics", "").want(200).body)
	for _, want := range []string{
		`bigwave_http_requests_total{method="GET",route="/v1/agent-sessions/:session",status="200"} 1`,
		`bigwave_http_requests_total{method="any",route="unmatched",status="404"} 1`,
		`bigwave_http_requests_total{method="any",route="unmatched",status="401"} 1`,
		`bigwave_run_seconds_count{status="finished"} 2`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(got, ses) || strings.Contains(got, "nothing") {
		t.Errorf("labels hold ids:\n%s", got)
	}
}

func TestTheLogHasNoQueryStrings(t *testing.T) {
	a := newAPI(t)
	a.admin("GET", "/v1/tools?token=hunter2", "").want(200)
	if log := a.log.String(); strings.Contains(log, "hunter2") || !strings.Contains(log, "path=/v1/tools") {
		t.Errorf("got %s", log)
	}
}

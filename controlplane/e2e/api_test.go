package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// route is one operation of the served OpenAPI document with its ids filled in.
type route struct{ method, path string }

// routes lists the operations that the running control plane documents; ids
// says what stands for each path parameter.
func routes(t *testing.T, s *stack, id func(template, param string) string) []route {
	t.Helper()
	doc := s.get("/openapi.json").want(200)
	var out []route
	for template, ops := range doc.obj("paths") {
		for method := range ops.(map[string]any) {
			if method == "parameters" {
				continue
			}
			path := template
			for {
				open, shut := strings.IndexByte(path, '{'), strings.IndexByte(path, '}')
				if open < 0 {
					break
				}
				path = path[:open] + id(template, path[open+1:shut]) + path[shut+1:]
			}
			out = append(out, route{strings.ToUpper(method), path})
		}
	}
	if len(out) < 20 {
		t.Fatalf("only %d operations are documented", len(out))
	}
	return out
}

func TestNothingWithoutABearer(t *testing.T) {
	s := start(t, options{})
	open := map[string]bool{"/healthz": true, "/readyz": true, "/openapi.json": true}
	for _, r := range append(routes(t, s, func(_, _ string) string { return "x" }), route{"GET", "/nowhere"}) {
		for name, c := range map[string]*client{"none": s.as(""), "wrong": s.as("wrong"), "empty": s.as(" ")} {
			a := c.do(r.method, r.path, nil)
			if open[r.path] {
				continue
			}
			if a.status != http.StatusUnauthorized || a.str("code") != "unauthenticated" ||
				!strings.HasPrefix(a.header.Get("Content-Type"), "application/problem+json") {
				t.Errorf("%s %s with bearer %s: %d %s", r.method, r.path, name, a.status, a.body)
			}
		}
	}
}

// tenant makes a workspace with an admin and a member and returns their clients.
func (s *stack) tenant(id string) (admin, member *client) {
	s.t.Helper()
	s.post("/admin/workspaces", object{"id": id, "name": id}).want(201)
	key := func(role string) *client {
		user := s.post("/admin/users", object{"workspace_id": id, "name": role, "role": role}).want(201)
		k := s.post("/admin/api-keys", object{"workspace_id": id, "user_id": user.str("id"), "name": role}).want(201)
		return s.as(k.str("secret"))
	}
	return key("admin"), key("member")
}

func TestTwoWorkspaces(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		a, member := s.tenant("a")
		b, _ := s.tenant("b")
		a.put("/admin/sandbox/policy", policy(object{"workspace_id": "a", "memory_mb": 99})).want(200)
		a.tool("secret_tool", "echo {x}", "x")
		ses := a.session()
		run := a.run(ses, object{"id": "c", "name": "secret_tool", "arguments": object{"x": "hello"}})
		key := a.get("/admin/api-keys").list("items")[0].str("id")
		user := a.get("/admin/users").list("items")[0].str("id")
		group := a.post("/admin/groups", object{"name": "those"}).want(201).str("id")

		ids := func(template, param string) string {
			switch {
			case strings.Contains(template, "workspace-tools"):
				return "secret_tool"
			case strings.Contains(template, "api-keys"):
				return key
			case param == "group":
				return group
			case param == "user":
				return user
			case strings.Contains(template, "workspaces"):
				return "a"
			case param == "run":
				return run.str("id")
			}
			return ses
		}
		random := func(template, param string) string {
			real := ids(template, param)
			return real[:len(real)-1] + "z"
		}
		theirs, nobodys := routes(t, s, ids), routes(t, s, random)
		byKey := map[string]route{}
		for _, r := range nobodys {
			byKey[r.method+strings.NewReplacer("z/", "/").Replace(r.path+"/")] = r
		}
		checked := 0
		for _, r := range theirs {
			if !strings.Contains(r.path, "secret_tool") && !strings.Contains(r.path, key) && !strings.Contains(r.path, user) &&
				!strings.Contains(r.path, group) && !strings.Contains(r.path, ses) {
				continue
			}
			if r.method == "PUT" {
				continue // creates B's own
			}
			var body any
			switch {
			case strings.HasPrefix(r.path, "/api/tools/") && strings.HasSuffix(r.path, "/run"):
				body = object{"name": "f", "arguments": object{}}
			case strings.HasSuffix(r.path, "/run"):
				body = object{"tool_calls": []object{{"id": "c", "name": "shell_exec", "arguments": object{"command": "true"}}}}
			case strings.HasSuffix(r.path, group):
				body = object{"name": "mine"}
			case r.method == "PATCH":
				body = object{"disabled": true}
			case strings.HasSuffix(r.path, "/members"):
				body = object{"user_id": user}
			case strings.HasSuffix(r.path, "/update"):
				body = object{"id": "x", "name": "x", "content": "x", "meta": object{}, "access_grants": []object{}}
			}
			got := b.do(r.method, r.path, body)
			if got.status != 404 {
				t.Errorf("%s %s as another workspace: %d %s", r.method, r.path, got.status, got.body)
			}
			checked++
		}
		if checked < 8 {
			t.Errorf("only %d routes take an id", checked)
		}
		for _, list := range []string{"/admin/workspace-tools", "/v1/agent-sessions", "/admin/users", "/admin/groups", "/admin/api-keys", "/v1/tools"} {
			body := string(b.get(list).want(200).body)
			for _, leak := range []string{"secret_tool", ses, `"workspace_id":"a"`} {
				if strings.Contains(body, leak) {
					t.Errorf("%s tells of %s: %s", list, leak, body)
				}
			}
		}
		if got := b.get("/admin/sandbox/policy").want(200); got.str("workspace_id") != "b" || got.num("memory_mb") == 99 {
			t.Errorf("b sees %s", got.body)
		}
		b.put("/admin/sandbox/policy", policy(object{"workspace_id": "a"})).want(403)
		if got := a.get("/admin/sandbox/policy").want(200); got.num("memory_mb") != 99 {
			t.Errorf("a's policy is %s", got.body)
		}
		// A member runs but does not administer, and does not see others' sessions.
		member.get("/admin/workspace-tools").want(403)
		member.get("/v1/agent-sessions/" + ses).want(404)
		wantStatus(t, member.call(member.session(), "secret_tool", object{"x": "y"}), "ok")
		// A revoked key is refused at once.
		a.delete("/admin/api-keys/" + key)
		c := a.get("/admin/sandbox/policy")
		d := member.get("/v1/tools")
		if c.status != 401 && d.status != 401 {
			t.Errorf("a revoked key still works: %d, %d", c.status, d.status)
		}
	})
}

func TestBadInputIsNamedAndChangesNothing(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(nil)
	before := string(s.get("/admin/sandbox/policy").body)
	full := func(field string, value any) object { return policy(object{field: value}) }
	for _, tc := range []struct {
		field string
		body  any
	}{
		{"memory_mb", full("memory_mb", "1024")}, {"memory_mb", full("memory_mb", nil)}, {"memory_mb", full("memory_mb", 1.5)},
		{"memory_mb", full("memory_mb", 8)}, {"memory_mb", full("memory_mb", 1<<53+1)}, {"memory_mb", full("memory_mb", true)},
		{"pids_limit", full("pids_limit", 0)}, {"pids_limit", full("pids_limit", -1)}, {"cpu_shares", full("cpu_shares", 1)},
		{"cpu_shares", full("cpu_shares", 262145)}, {"wall_clock_seconds", full("wall_clock_seconds", 1_000_000_000)},
		{"output_bytes_limit", full("output_bytes_limit", 0)}, {"base_image", full("base_image", "a b")},
		{"fs_allowlist", full("fs_allowlist", nil)}, {"fs_allowlist", full("fs_allowlist", []string{"/workspace", "/etc"})},
		{"fs_allowlist", full("fs_allowlist", []string{"/data"})}, {"network_allowlist", full("network_allowlist", []string{"*"})},
		{"network_allowlist", full("network_allowlist", []string{"169.254.169.254:80"})}, {"network_allowlist", full("network_allowlist", nil)},
		{"memroy_mb", full("memroy_mb", 5)},
	} {
		a := s.put("/admin/sandbox/policy", tc.body)
		if a.status != 400 || !strings.HasPrefix(a.str("field"), tc.field) || a.str("detail") == "" {
			t.Errorf("%s: %d %s", tc.field, a.status, a.body)
		}
	}
	for _, body := range []string{``, `{}{}`, `[]`, `null`, "\ufeff{}", `{"memory_mb":1,"memory_mb":2}`, `{/**/}`, `{"memory_mb":NaN}`, strings.Repeat(`{"a":`, 10001), `{"memory_mb":1e999999}`} {
		began := time.Now()
		if a := s.put("/admin/sandbox/policy", body); a.status != 400 || time.Since(began) > time.Second {
			t.Errorf("%.40q: %d %s", body, a.status, a.body)
		}
	}
	p := policy(nil)
	delete(p, "pids_limit")
	if a := s.put("/admin/sandbox/policy", p); a.status != 400 || a.str("field") != "pids_limit" {
		t.Errorf("a missing field: %d %s", a.status, a.body)
	}
	if got := string(s.get("/admin/sandbox/policy").body); got != before {
		t.Errorf("the policy became %s", got)
	}

	for _, name := range []string{"..%2f..%2fetc%2fpasswd", "%2e%2e", "a%2fb", "a%00b", "a%0d%0ab", "-a", "%F0%9F%98%80", "%EF%BD%87rep", strings.Repeat("a", 65), "a%20b", "1a"} {
		a := s.put("/admin/workspace-tools/"+name, object{"handler_kind": "shell_template", "handler_payload": object{"command": "true"}})
		if a.status != 400 && a.status != 404 {
			t.Errorf("name %s: %d %s", name, a.status, a.body)
		}
	}
	for _, tc := range []struct{ command, hint string }{
		{`echo "{x}"`, "quote"}, {`echo '{x}'`, "quote"}, {"cat <<E\n{x}\nE", ""}, {`echo $(( {x} ))`, ""}, {`eval {x}`, ""},
		{`bash -c {x}`, ""}, {`[[ {x} -eq 1 ]]`, ""}, {`n={x}`, ""}, {`{x} a`, ""}, {`echo {x!r}`, ""}, {`echo {}`, ""}, {`echo {x`, ""}, {`echo {x.a}`, ""},
		{`test -v {x}`, ""}, {`printf -v {x} a`, ""}, {`read {x}`, ""}, {`find . -exec {x} \;`, ""}, {`xargs {x}`, ""}, {`env -S {x}`, ""},
	} {
		a := s.put("/admin/workspace-tools/bad", object{"handler_kind": "shell_template", "handler_payload": object{"command": tc.command},
			"parameters": object{"type": "object", "properties": object{"x": object{"type": "string"}}}})
		if a.status != 400 || !strings.HasPrefix(a.str("field"), "handler_payload") || !strings.Contains(a.str("detail"), tc.hint) {
			t.Errorf("%s: %d %s", tc.command, a.status, a.body)
		}
	}
	s.get("/admin/workspace-tools/bad").want(404)

	big := strings.Repeat(" ", 1<<20) + "{}"
	s.put("/admin/sandbox/policy", big).want(413)
	s.do("PUT", "/admin/sandbox/policy", "{}", "Content-Type", "application/xml").want(415)
	s.do("PUT", "/admin/sandbox/policy", "{}", "Content-Encoding", "gzip").want(415)
	s.do("POST", "/admin/sandbox/policy", "{}").want(405)

	ses := s.session()
	for _, calls := range []any{
		nil, []object{}, []object{{"id": "a", "name": "x"}, {"id": "a", "name": "x"}}, []object{{"id": "", "name": "x", "arguments": object{}}},
		[]object{{"id": "a", "name": "shell_exec", "arguments": []int{1}}}, "x",
	} {
		if a := s.post("/v1/agent-sessions/"+ses+"/run", object{"tool_calls": calls}); a.status != 400 || a.str("field") == "" {
			t.Errorf("%v: %d %s", calls, a.status, a.body)
		}
	}
	c := s.call(ses, "shell_exec", object{"comand": "true"})
	wantStatus(t, c, "invalid_arguments")
	if !strings.Contains(c.obj("error").str("message")+c.obj("error").str("field"), "command") {
		t.Errorf("got %v", c.obj("error"))
	}
	wantStatus(t, s.call(ses, "nowhere", object{}), "invalid_arguments")
}

func TestHostileValuesAreData(t *testing.T) {
	s := start(t, options{})
	s.tool("show", "printf %s {x}", "x")
	s.tool("show_opt", "printf %s --glob={x}", "x")
	ses := s.session()
	for _, v := range []string{
		"$(touch /workspace/w)", "`touch /workspace/w`", "; touch /workspace/w", "&& touch /workspace/w", "| touch /workspace/w", "> /workspace/w",
		"\n touch /workspace/w", "'; touch /workspace/w; '", `"; touch /workspace/w; "`, "a[$(touch /workspace/w)]", "{y}", "%s", "$&", "-rf", "~", "*", "é日本", "\u202e", "a'b", `a\b`, "!!", "",
	} {
		if got := s.call(ses, "show", object{"x": v}); got.str("stdout") != v {
			t.Errorf("%q became %q (%s %s)", v, got.str("stdout"), got.str("status"), got.str("stderr"))
		}
		if got := s.call(ses, "show_opt", object{"x": v}); got.str("stdout") != "--glob="+v {
			t.Errorf("%q became %q", v, got.str("stdout"))
		}
	}
	if got := s.sh(ses, "ls w").str("stdout"); got != "" {
		t.Error("a value was run")
	}
	c := s.call(ses, "show", object{"x": "a\x00b"})
	wantStatus(t, c, "invalid_arguments")
	if c.obj("error").str("code") != "nul_byte" {
		t.Errorf("got %v", c.obj("error"))
	}
	long := strings.Repeat("a", 131_071-len("printf %s "))
	if got := s.call(ses, "show", object{"x": long}); got.str("stdout") != long {
		t.Errorf("the longest value: %s %v", got.str("status"), got.obj("error"))
	}
	c = s.call(ses, "show", object{"x": long + "a"})
	wantStatus(t, c, "invalid_arguments")
	if c.obj("error").str("code") != "argument_too_large" {
		t.Errorf("got %v", c.obj("error"))
	}
}

func TestAToolMayOverrideABuiltin(t *testing.T) {
	s := start(t, options{})
	s.tool("shell_exec", "echo mine {command}", "command")
	ses := s.session()
	if got := s.sh(ses, "x").str("stdout"); got != "mine x\n" {
		t.Errorf("got %q", got)
	}
	overrides := func() any {
		for _, tl := range s.get("/v1/tools").list("tools") {
			if tl.obj("function").str("name") == "shell_exec" {
				return tl["overrides_builtin"]
			}
		}
		return nil
	}
	if overrides() != true {
		t.Error("the list does not say so")
	}
	s.delete("/admin/workspace-tools/shell_exec").want(204)
	s.delete("/admin/workspace-tools/shell_exec").want(404)
	if overrides() == true {
		t.Error("it still overrides")
	}
	if got := s.sh(ses, "echo x").str("stdout"); got != "x\n" {
		t.Errorf("got %q", got)
	}
}

func TestSlowClientsAreClosed(t *testing.T) {
	s := start(t, options{})
	conn, err := net.Dial("tcp", s.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{", adminToken)
	_ = conn.SetReadDeadline(time.Now().Add(60 * time.Second))
	data, err := io.ReadAll(conn)
	if err != nil {
		t.Fatalf("it was not closed: %v", err)
	}
	if !bytes.Contains(data, []byte(" 408 ")) {
		t.Errorf("got %q", data)
	}
}

func TestNoSecretAnywhere(t *testing.T) {
	s := start(t, options{})
	admin, _ := s.tenant("a")
	admin.tool("show", "printf %s {x}", "x")
	ses := admin.session()
	run := admin.begin(ses, "sleep 3")
	psOut, err := exec.Command("ps", "-eo", "args").Output()
	if err != nil {
		t.Fatal(err)
	}
	admin.final(ses, run, 10*time.Second)
	secrets := map[string]string{"admin token": adminToken, "API key": admin.token}
	for _, f := range []string{"nats/controlplane.json", "nats/runner.json"} {
		data, err := os.ReadFile(filepath.Join(s.data, f))
		if err != nil {
			t.Fatal(err)
		}
		if st, _ := os.Stat(filepath.Join(s.data, f)); st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", f, st.Mode().Perm())
		}
		_, rest, _ := strings.Cut(string(data), `"password":"`)
		password, _, _ := strings.Cut(rest, `"`)
		if len(password) < 16 {
			t.Fatalf("no password in %s", f)
		}
		secrets[f] = password
	}
	for what, secret := range secrets {
		for where, text := range map[string]string{"the control plane's log": s.cp.log.String(), "the runner's log": s.runner.log.String(), "ps": string(psOut)} {
			if strings.Contains(text, secret) {
				t.Errorf("%s is in %s", what, where)
			}
		}
		if what == "API key" {
			db, _ := os.ReadFile(filepath.Join(s.data, "bigwave.db"))
			wal, _ := os.ReadFile(filepath.Join(s.data, "bigwave.db-wal"))
			if bytes.Contains(db, []byte(secret)) || bytes.Contains(wal, []byte(secret)) {
				t.Error("the API key is in the database")
			}
		}
	}
}

func TestEveryCodeIsDocumented(t *testing.T) {
	s := start(t, options{})
	doc := string(s.get("/openapi.json").want(200).body)
	for _, code := range codes() {
		if !strings.Contains(doc, `"`+code+`"`) {
			t.Errorf("the document does not list the code %s", code)
		}
	}
}

// TestAWorkspaceOfTheSameNameHasNothingOfTheOld: an id may come again.
func TestAWorkspaceOfTheSameNameHasNothingOfTheOld(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		admin, _ := s.tenant("again")
		admin.tool("old_tool", "echo {x}", "x")
		ses := admin.session()
		wantStatus(t, admin.call(ses, "old_tool", object{"x": "old"}), "ok")
		admin.delete("/v1/agent-sessions/" + ses).want(204)
		s.delete("/admin/workspaces/again").want(204)

		admin, _ = s.tenant("again")
		call := admin.call(admin.session(), "old_tool", object{"x": "old"})
		if wantStatus(t, call, "invalid_arguments"); call.obj("error").str("code") != "unknown_tool" {
			t.Errorf("got %v", call)
		}
		if found := admin.get("/v1/tools").list("tools"); len(found) != 4 {
			t.Errorf("%d tools, want the built-ins", len(found))
		}
	})
}

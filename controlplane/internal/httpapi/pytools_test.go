package httpapi_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

const valvesTool = `"""
title: Weather
version: 1.2
"""
class Tools:
    class Valves(BaseModel):
        api_key: str = ""
        retries: int = 3
        loud: bool = False
    class UserValves(BaseModel):
        colour: str = "red"
    def forecast(self, city: str, days: int)
    def now(self)
`

// The sentences that clients know.
const (
	unauthorized = "401 Unauthorized"
	prohibited   = "You do not have permission to access this resource. Please contact your administrator for assistance."
	notThere     = "We could not find what you're looking for :/"
	idTaken      = "Uh-oh! This id is already registered. Please choose another id string."
	badID        = "Only alphanumeric characters and underscores are allowed in the id"
)

// form is the body that makes or changes a tool.
func form(id, name, content string, more ...string) string {
	extra := ""
	if len(more) > 0 {
		extra = "," + strings.Join(more, ",")
	}
	text := func(s string) []byte { raw, _ := json.Marshal(s); return raw }
	return fmt.Sprintf(`{"id":%s,"name":%s,"content":%s,"meta":{"description":"d"}%s}`, text(id), text(name), text(content), extra)
}

func grantTo(kind, id, permission string) string {
	return fmt.Sprintf(`{"principal_type":%q,"principal_id":%q,"permission":%q}`, kind, id, permission)
}

// says wants an error whose detail is text.
func (r *answer) says(status int, text string) {
	r.t.Helper()
	r.problem(status, "", "")
	if got := r.str("detail"); got != text {
		r.t.Errorf("got %q, want %q", got, text)
	}
}

// cast is a workspace full of people, by what they are to the tool "t".
type cast struct {
	*api
	token, id map[string]string
	groups    map[string]string
}

func newCast(t *testing.T) *cast {
	a := newAPI(t)
	c := &cast{api: a, token: map[string]string{}, id: map[string]string{}, groups: map[string]string{}}
	for _, name := range []string{"owner", "reader", "writer", "group reader", "group writer", "stranger"} {
		c.token[name], c.id[name] = a.tenant(identity.DefaultWorkspace, identity.Member)
	}
	c.token["admin"], c.id["admin"] = a.tenant(identity.DefaultWorkspace, identity.Admin)
	c.token["foreign"], c.id["foreign"] = a.tenant("b", identity.Admin)
	for name, member := range map[string]string{"authors": "owner", "readers": "group reader", "writers": "group writer"} {
		c.groups[name] = a.admin("POST", "/admin/groups", fmt.Sprintf(`{"name":%q}`, name)).want(201).str("id")
		a.admin("POST", "/admin/groups/"+c.groups[name]+"/members", fmt.Sprintf(`{"user_id":%q}`, c.id[member])).want(201)
	}
	a.admin("PUT", "/admin/permissions", `{"defaults":`+noPermissions+`,"groups":{"`+c.groups["authors"]+`":`+permissionsOf("workspace.tools")+`}}`).want(200)
	return c
}

// share is the grants of "t".
func (c *cast) share() string {
	return `"access_grants":[` + strings.Join([]string{
		grantTo("user", c.id["reader"], "read"), grantTo("user", c.id["writer"], "write"),
		grantTo("group", c.groups["readers"], "read"), grantTo("group", c.groups["writers"], "write"),
	}, ",") + `]`
}

// tool makes "t" anew.
func (c *cast) tool() {
	c.t.Helper()
	c.admin("DELETE", "/api/tools/id/t/delete", "")
	c.do("POST", "/api/tools/create", c.token["owner"], form("t", "T", valvesTool, c.share())).want(200)
}

func TestWhoMayDoWhatWithAPythonTool(t *testing.T) {
	c := newCast(t)
	ok := func(names ...string) map[string]string {
		out := map[string]string{}
		for _, n := range append(names, "admin", "owner") {
			out[n] = ""
		}
		return out
	}
	readers, writers := ok("reader", "writer", "group reader", "group writer"), ok("writer", "group writer")
	same := form("ignored", "N", valvesTool)
	for name, r := range map[string]struct {
		method, path, body, refusal string
		may                         map[string]string
	}{
		"read":               {"GET", "", "", prohibited, readers},
		"rename":             {"POST", "/update", same, unauthorized, writers},
		"replace the source": {"POST", "/update", form("t", "T", valvesTool+"\n# new\n"), unauthorized, ok()},
		"share":              {"POST", "/access/update", `{"access_grants":[]}`, unauthorized, writers},
		"delete":             {"DELETE", "/delete", "", unauthorized, writers},
		"valves":             {"GET", "/valves", "", prohibited, writers},
		"valves schema":      {"GET", "/valves/spec", "", prohibited, writers},
		"set valves":         {"POST", "/valves/update", `{"retries":"7"}`, prohibited, writers},
		"user valves":        {"GET", "/valves/user", "", prohibited, readers},
		"user valves schema": {"GET", "/valves/user/spec", "", prohibited, readers},
		"set user valves":    {"POST", "/valves/user/update", `{"colour":"blue"}`, prohibited, readers},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cast{api: c.in(t), token: c.token, id: c.id, groups: c.groups}
			for who, token := range c.token {
				c.tool()
				before := string(c.admin("GET", "/api/tools/id/t", "").want(200).body)
				ran := len(c.python.Seen())
				res := c.do(r.method, "/api/tools/id/t"+r.path, token, r.body)
				_, may := r.may[who]
				switch {
				case who == "foreign":
					res.says(404, notThere)
					c.do(r.method, "/api/tools/id/none"+r.path, token, r.body).says(404, notThere)
				case !may:
					res.says(401, r.refusal)
				default:
					if res.status != 200 {
						t.Errorf("%s: got %d %s", who, res.status, clip(res.body))
					}
					continue
				}
				if after := string(c.admin("GET", "/api/tools/id/t", "").want(200).body); after != before {
					t.Errorf("%s changed it:\n%s\n%s", who, before, after)
				}
				if len(c.python.Seen()) != ran {
					t.Errorf("%s had a source run", who)
				}
			}
		})
	}
}

func TestListsShowWhatTheCallerMayUse(t *testing.T) {
	c := newCast(t)
	c.tool()
	c.permit(identity.DefaultWorkspace, "workspace.tools_export") // takes the authors' away
	seen := func(path, token string) []map[string]any {
		t.Helper()
		var out []map[string]any
		if err := json.Unmarshal(c.do("GET", path, token, "").want(200).body, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	writes := map[string]bool{"admin": true, "owner": true, "writer": true, "group writer": true, "reader": false, "group reader": false}
	for who, token := range c.token {
		write, sees := writes[who]
		for _, path := range []string{"/api/tools", "/api/tools/", "/api/v1/tools", "/api/v1/tools/", "/api/tools/list", "/api/v1/tools/list/", "/api/v1/tools/export"} {
			if who == "foreign" && strings.HasSuffix(path, "export") {
				c.permit("b", "workspace.tools_export")
			}
			list := seen(path, token)
			if len(list) == 1 != sees {
				t.Errorf("%s sees %v at %s", who, list, path)
				continue
			}
			if !sees {
				continue
			}
			got, ok := list[0]["content"].(string)
			if export := strings.HasSuffix(path, "export"); ok != (export && write) || ok && got != valvesTool {
				t.Errorf("%s at %s: content %v", who, path, list[0]["content"])
			}
			if strings.Contains(path, "list") && list[0]["write_access"] != write {
				t.Errorf("%s at %s: write_access %v", who, path, list[0]["write_access"])
			}
			if len(list[0]["specs"].([]any)) != 2 {
				t.Errorf("%s at %s: specs %v", who, path, list[0]["specs"])
			}
		}
		if !sees {
			continue
		}
		got := c.do("GET", "/api/v1/tools/id/t/", token, "").want(200).object()
		if _, has := got["content"]; has != write || got["write_access"] != write {
			t.Errorf("%s reads %v", who, got)
		}
	}
	c.permit(identity.DefaultWorkspace)
	c.do("GET", "/api/tools/export", c.token["owner"], "").says(401, unauthorized)
	c.do("GET", "/api/tools/export", c.token["admin"], "").want(200)
}

func keysOf(t *testing.T, raw []byte) []string {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	var keys []string
	depth := 0
	for {
		tok, err := dec.Token()
		if err != nil {
			return keys
		}
		switch d := tok.(type) {
		case json.Delim:
			if d == '{' || d == '[' {
				depth++
			} else {
				depth--
			}
		case string:
			if depth == 1 {
				keys = append(keys, d)
				var skip json.RawMessage
				if err := dec.Decode(&skip); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestTheShapesOfPythonTools(t *testing.T) {
	a := newAPI(t)
	made := a.admin("POST", "/api/v1/tools/create", form("My_Tool", "My tool", valvesTool, `"access_grants":[`+grantTo("group", "g1", "read")+`]`)).want(200)
	short := []string{"id", "user_id", "name", "specs", "meta", "access_grants", "updated_at", "created_at"}
	whole := slices.Insert(slices.Clone(short), 3, "content")
	if got := keysOf(t, made.body); !slices.Equal(got, short) {
		t.Errorf("create: %v", got)
	}
	o := made.object()
	if o["id"] != "my_tool" || o["user_id"] != "bootstrap" || o["created_at"] != o["updated_at"] || o["created_at"].(float64) < 1e9 || o["created_at"].(float64) > 1e11 {
		t.Errorf("got %v", o)
	}
	if got := fmt.Sprint(o["meta"]); got != "map[description:d has_user_valves:true manifest:map[title:Weather version:1.2]]" {
		t.Errorf("meta: %s", got)
	}
	grant := o["access_grants"].([]any)[0].(map[string]any)
	if got := slices.Sorted(maps.Keys(grant)); !slices.Equal(got, []string{"created_at", "id", "permission", "principal_id", "principal_type", "resource_id", "resource_type"}) ||
		grant["resource_type"] != "tool" || grant["resource_id"] != "my_tool" || len(grant["id"].(string)) != 36 {
		t.Errorf("grant: %v", grant)
	}
	if got := fmt.Sprint(o["specs"].([]any)[0]); got != "map[description:about forecast name:forecast parameters:map[properties:map[city:map[type:string] days:map[type:integer]] required:[city days] type:object]]" {
		t.Errorf("specs: %s", got)
	}
	if got := keysOf(t, a.admin("POST", "/api/tools/id/my_tool/update", form("x", "N", valvesTool)).want(200).body); !slices.Equal(got, whole) {
		t.Errorf("update: %v", got)
	}
	if got := keysOf(t, a.admin("POST", "/api/tools/id/my_tool/access/update", `{"access_grants":[]}`).want(200).body); !slices.Equal(got, whole) {
		t.Errorf("access/update: %v", got)
	}
	get := a.admin("GET", "/api/tools/id/my_tool", "").want(200)
	if got := keysOf(t, get.body); !slices.Equal(got, append(slices.Clone(whole), "user", "has_user_valves", "write_access")) || get.object()["user"] != nil {
		t.Errorf("get: %v", got)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(a.admin("GET", "/api/tools/list", "").body, &list); err != nil || len(list) != 1 {
		t.Fatal(err, list)
	}
	if got := keysOf(t, list[0]); !slices.Equal(got, append(slices.Clone(whole), "user", "has_user_valves", "write_access")) {
		t.Errorf("list: %v", got)
	}
	if !strings.Contains(string(list[0]), `"content":null`) || !strings.Contains(string(list[0]), `"user":{"id":"bootstrap","name":"bootstrap","role":"admin","email":""}`) {
		t.Errorf("list: %s", list[0])
	}
	if got := string(a.admin("DELETE", "/api/tools/id/my_tool/delete", "").want(200).body); got != "true\n" {
		t.Errorf("delete: %q", got)
	}
	if got := string(a.admin("GET", "/api/tools", "").want(200).body); got != "[]\n" {
		t.Errorf("after: %s", got)
	}
}

func TestMakingAPythonTool(t *testing.T) {
	a := newAPI(t)
	member, memberID := a.tenant(identity.DefaultWorkspace, identity.Member)
	const path = "/api/tools/create"
	good := form("t", "T", "class Tools:\n    def f(self)\n")
	a.do("POST", path, member, good).says(401, unauthorized)
	for _, p := range []string{"workspace.tools", "workspace.tools_import"} {
		a.permit(identity.DefaultWorkspace, p)
		a.do("POST", path, member, form(strings.ReplaceAll(p, ".", "_"), "T", "class Tools: pass")).want(200)
	}
	for _, id := range []string{"my-tool", "1a", "a b", "x.y", "", "🎨x", "a+b", "a/b", "../x", "a\u0000", "x\u200b", "ª²"} {
		a.do("POST", path, member, form(id, "T", "class Tools: pass")).says(400, badID)
	}
	for id, kept := range map[string]string{"My_Tool": "my_tool", "工具": "工具", "É": "é", "class": "class", "_": "_"} {
		got := a.do("POST", path, member, form(id, "", "class Tools: pass")).want(200)
		if got.str("id") != kept || got.str("user_id") != memberID {
			t.Errorf("%q became %s", id, got.body)
		}
		if got := a.do("GET", "/api/tools/id/"+kept, member, "").want(200).str("id"); got != kept {
			t.Errorf("%q is read as %q", kept, got)
		}
	}
	a.do("POST", path, member, form("MY_TOOL", "T", "class Tools: pass")).says(400, idTaken)
	a.do("GET", "/api/tools/id/My_Tool", member, "").says(404, notThere) // a path is taken as it is
	a.do("POST", path, member, form(strings.Repeat("a", 200), "T", "class Tools: pass")).problem(400, "", "id")

	before := string(a.admin("GET", "/api/tools/export", "").body)
	for content, text := range map[string]string{
		"x = 1":                "[ERROR: No Tools class found in the module]",
		"":                     "[ERROR: No Tools class found in the module]",
		"import missing_thing": "[ERROR: No module named 'missing_thing']",
		"class Tools: pass\nraise Boom(\"a 100%d\")": "[ERROR: a 100%d]",
		"class Tools: pass\x00":                      "[ERROR: content can't hold null bytes]",
	} {
		a.admin("POST", path, form("broken", "T", content)).says(400, text)
	}
	a.admin("POST", path, form("broken", "T", "class Tools: pass #"+strings.Repeat("x", 1<<20))).problem(400, "", "content")
	a.python.Err = fault.New(fault.Unavailable, "no runner of the pool is connected").WithCode("no_runner")
	a.admin("POST", path, form("broken", "T", "class Tools: pass")).problem(503, "no_runner", "")
	a.admin("POST", "/api/tools/id/my_tool/update", form("x", "X", "class Tools: pass")).problem(503, "no_runner", "")
	if after := string(a.admin("GET", "/api/tools/export", "").want(200).body); after != before {
		t.Errorf("a failure stored something: %s", after)
	}
	a.admin("GET", "/api/tools/id/my_tool/valves/spec", "").want(200) // needs no runner
	if ran := len(a.python.Seen()); ran != 7+4+2 {
		t.Errorf("%d sources were run", ran)
	}
}

func TestTheBodiesOfPythonTools(t *testing.T) {
	a := newAPI(t)
	good := map[string]string{
		"POST /api/tools/create":                  form("t", "T", valvesTool, `"access_grants":[]`),
		"POST /api/tools/id/t/update":             form("t", "T", valvesTool, `"access_grants":[]`),
		"POST /api/tools/id/t/access/update":      `{"access_grants":[]}`,
		"POST /api/tools/load/url":                `{"url":"https://github.com/a/b/blob/main/t.py"}`,
		"POST /api/tools/id/t/valves/update":      `{"retries":1}`,
		"POST /api/tools/id/t/valves/user/update": `{"colour":"x"}`,
	}
	a.admin("POST", "/api/tools/create", good["POST /api/tools/create"]).want(200)
	for route, body := range good {
		method, path, _ := strings.Cut(route, " ")
		first, rest := body[:1], body[1:]
		for name, bad := range map[string]string{
			"array": "[" + body + "]", "string": `"x"`, "null": "null", "trailing": body + "{}", "cut": body[:len(body)-1], "empty": " ",
			"bom": "\ufeff" + body, "duplicate": first + rest[:len(rest)-1] + "," + rest, "nan": first + `"x":NaN}`,
			"deep": first + `"x":` + strings.Repeat("[", 10001) + strings.Repeat("]", 10001) + "}",
		} {
			if res := a.admin(method, path, bad); res.status != 400 || res.str("detail") == "" {
				t.Errorf("%s with %s: got %d %s", route, name, res.status, clip(res.body))
			}
		}
		text := func(r *http.Request) { r.Header.Set("Content-Type", "text/plain") }
		a.admin(method, path, body, text).problem(415, "unsupported", "")
		a.admin(method, path, body+strings.Repeat(" ", 8<<20)).problem(413, "too_large", "")
		if path != "/api/tools/create" { // keys of others are skipped
			a.admin(method, path, first+`"nmae":{"a":[1]},`+rest).want(200)
		}
	}
	for field, edit := range map[string]string{
		"id": `1`, "name": `null`, "content": `["x"]`, "meta": `"x"`, "access_grants": `{}`,
	} {
		a.admin("POST", "/api/tools/create", replaceMember(t, good["POST /api/tools/create"], field, edit)).problem(400, "invalid", field)
	}
	for _, field := range []string{"id", "name", "content", "meta"} {
		var m map[string]json.RawMessage
		_ = json.Unmarshal([]byte(good["POST /api/tools/create"]), &m)
		delete(m, field)
		body, _ := json.Marshal(m)
		a.admin("POST", "/api/tools/id/t/update", string(body)).problem(400, "invalid", field)
	}
	for field, meta := range map[string]string{
		"meta.description": `{"description":1}`, "meta.manifest": `{"manifest":[]}`, "meta.has_user_valves": `{"has_user_valves":"yes"}`,
	} {
		a.admin("POST", "/api/tools/create", replaceMember(t, good["POST /api/tools/create"], "meta", meta)).problem(400, "invalid", field)
	}
	a.admin("POST", "/api/tools/id/t/access/update", `{}`).problem(400, "invalid", "access_grants")
	a.admin("POST", "/api/tools/id/t/access/update", `{"access_grants":null}`).problem(400, "invalid", "access_grants")
	a.admin("POST", "/api/tools/id/t/update", `{"id":"t","ID":"u","name":"T","content":"class Tools: pass","meta":{},"access_grants":null}`).want(200)
	if got := a.admin("GET", "/api/tools/id/t", "").object()["meta"].(map[string]any); got["description"] != nil {
		t.Errorf("got %v", got)
	}
}

func TestChangingAPythonTool(t *testing.T) {
	a := newAPI(t)
	made := a.admin("POST", "/api/tools/create", form("t", "T", valvesTool, `"access_grants":[`+grantTo("user", "u1", "read")+`]`)).want(200).object()
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"hunter2hunter2"}`).want(200)
	before := string(a.admin("GET", "/api/tools/id/t", "").body)
	a.admin("POST", "/api/tools/id/t/update", form("t", "N", "import missing_thing", `"access_grants":[]`)).says(400, "[ERROR: No module named 'missing_thing']")
	if got := string(a.admin("GET", "/api/tools/id/t", "").body); got != before {
		t.Errorf("an update that failed changed it: %s", got)
	}
	got := a.admin("POST", "/api/tools/id/t/update", form("other", "N", "class Tools:\n    def g(self)\n    def _hidden(self)\n")).want(200).object()
	if got["id"] != "t" || got["name"] != "N" || got["created_at"] != made["created_at"] || got["user_id"] != made["user_id"] ||
		fmt.Sprint(got["access_grants"]) != fmt.Sprint(made["access_grants"]) || fmt.Sprint(got["meta"]) != "map[description:d has_user_valves:false manifest:map[]]" {
		t.Errorf("got %v", got)
	}
	if specs := fmt.Sprint(got["specs"]); specs != "[map[description:about g name:g parameters:map[properties:map[] type:object]]]" {
		t.Errorf("specs: %s", specs)
	}
	a.admin("POST", "/api/tools/id/t/valves/update", `{}`).says(404, notThere) // the class is gone
	if valves := string(a.admin("GET", "/api/tools/id/t/valves", "").want(200).body); valves != `{"api_key":"hunter2hunter2"}`+"\n" {
		t.Errorf("the valves did not stay: %s", valves)
	}
	ids := func(o map[string]any) (out []string) {
		for _, g := range o["access_grants"].([]any) {
			out = append(out, g.(map[string]any)["principal_id"].(string))
		}
		return out
	}
	got = a.admin("POST", "/api/tools/id/t/update", form("t", "N", "class Tools: pass", `"access_grants":[`+grantTo("user", "u2", "write")+`]`)).want(200).object()
	if !slices.Equal(ids(got), []string{"u2"}) {
		t.Errorf("got %v", got["access_grants"])
	}
	updated := got["updated_at"]
	got = a.admin("POST", "/api/tools/id/t/access/update", `{"access_grants":[`+grantTo("user", "u3", "read")+`]}`).want(200).object()
	if !slices.Equal(ids(got), []string{"u3"}) || got["updated_at"] != updated || got["content"] != "class Tools: pass" {
		t.Errorf("got %v", got)
	}
	got = a.admin("POST", "/api/tools/id/t/update", form("t", "N", "class Tools: pass", `"access_grants":[]`)).want(200).object()
	if len(ids(got)) != 0 {
		t.Errorf("got %v", got["access_grants"])
	}
	a.admin("DELETE", "/api/tools/id/t/delete", "").want(200)
	a.admin("POST", "/api/tools/create", form("t", "T", valvesTool)).want(200)
	if valves := string(a.admin("GET", "/api/tools/id/t/valves", "").want(200).body); valves != "{}\n" {
		t.Errorf("valves came back: %s", valves)
	}
}

func TestWhatIsNoGrantIsDropped(t *testing.T) {
	a := newAPI(t)
	member, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
	a.permit(identity.DefaultWorkspace, "workspace.tools")
	everything := `[null,7,"x",[],{},{"principal_type":"anyone","principal_id":"*","permission":"read"},` +
		`{"principal_type":"user","principal_id":7,"permission":"read"},{"principal_type":"user","principal_id":"","permission":"read"},` +
		`{"principal_type":"user","principal_id":"u\u0000","permission":"read"},` + grantTo("user", "u1", "own") + `,` +
		`{"id":"mine","resource_id":"other","principal_type":"user","principal_id":"u1","permission":"read","created_at":1},` +
		grantTo("user", "u1", "read") + `,` + grantTo("user", "u1", "write") + `,` + grantTo("group", "g1", "read") + `,` +
		grantTo("user", "*", "read") + `,` + grantTo("user", "*", "write") + `,` + grantTo("group", "*", "read") + `]`
	kept := func(res *answer) []string {
		t.Helper()
		var out []string
		for _, g := range res.want(200).object()["access_grants"].([]any) {
			g := g.(map[string]any)
			if g["id"] == "mine" || g["resource_id"] != "t" {
				t.Errorf("taken over: %v", g)
			}
			out = append(out, fmt.Sprint(g["principal_type"], " ", g["principal_id"], " ", g["permission"]))
		}
		slices.Sort(out)
		return out
	}
	private := []string{"group * read", "group g1 read", "user u1 read", "user u1 write"}
	public := slices.Sorted(slices.Values(append([]string{"user * read", "user * write"}, private...)))
	ways := func(token string, want []string) {
		t.Helper()
		a.admin("DELETE", "/api/tools/id/t/delete", "")
		body := form("t", "T", valvesTool, `"access_grants":`+everything)
		if got := kept(a.do("POST", "/api/tools/create", token, body)); !slices.Equal(got, want) {
			t.Errorf("create: %v", got)
		}
		if got := kept(a.do("POST", "/api/tools/id/t/update", token, body)); !slices.Equal(got, want) {
			t.Errorf("update: %v", got)
		}
		if got := kept(a.do("POST", "/api/tools/id/t/access/update", token, `{"access_grants":`+everything+`}`)); !slices.Equal(got, want) {
			t.Errorf("access/update: %v", got)
		}
	}
	ways(member, private)
	ways(adminToken, public)
	a.permit(identity.DefaultWorkspace, "workspace.tools", "sharing.public_tools")
	ways(member, public)
	stranger, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
	if got := a.do("GET", "/api/tools/id/t", stranger, "").want(200).object(); got["write_access"] != true {
		t.Errorf("everybody may write: %v", got)
	}
	foreign, _ := a.tenant("b", identity.Member)
	a.do("GET", "/api/tools/id/t", foreign, "").says(404, notThere)
}

func TestAnExportCanBeImportedAsItIs(t *testing.T) {
	a := newAPI(t)
	a.admin("POST", "/api/tools/create", form("one", "One", valvesTool)).want(200)
	a.admin("POST", "/api/tools/create", form("two", "Two", "class Tools: pass")).want(200)
	a.admin("POST", "/api/tools/id/one/valves/update", `{"api_key":"hunter2hunter2"}`).want(200)
	var export []map[string]any
	raw := a.admin("GET", "/api/tools/export", "").want(200).body
	if err := json.Unmarshal(raw, &export); err != nil || len(export) != 2 {
		t.Fatal(err, export)
	}
	if strings.Contains(string(raw), "hunter2") {
		t.Error("the export holds valves")
	}
	b, _ := a.tenant("b", identity.Admin)
	for i, item := range export {
		item["write_access"], item["access_control"], item["user"] = true, nil, map[string]any{"id": "x", "name": "y"}
		item["access_grants"] = nil
		body, _ := json.Marshal(item)
		if i == 0 {
			body, _ = json.Marshal(map[string]any{"id": "download", "userId": "u", "tool": item})
		}
		a.do("POST", "/api/v1/tools/create", b, string(body)).want(200)
		got := a.do("GET", "/api/tools/id/"+item["id"].(string), b, "").want(200).object()
		for _, key := range []string{"name", "content", "specs", "meta"} {
			if fmt.Sprint(got[key]) != fmt.Sprint(item[key]) {
				t.Errorf("%s: got %v, want %v", key, got[key], item[key])
			}
		}
	}
	a.do("POST", "/api/tools/create", b, `{"tool":{"id":"x"}}`).problem(400, "invalid", "name")
	a.do("POST", "/api/tools/create", b, `{"tool":7}`).problem(400, "invalid", "id")
}

func TestASourceThatLiesOfItselfIsRefused(t *testing.T) {
	a := newAPI(t)
	for name, edit := range map[string]func(*pytool.Description){
		"no specs":         func(d *pytool.Description) { d.Specs = nil },
		"specs not a list": func(d *pytool.Description) { d.Specs = json.RawMessage(`{}`) },
		"not JSON":         func(d *pytool.Description) { d.Specs = json.RawMessage(`[`) },
		"a nameless one": func(d *pytool.Description) {
			d.Specs = json.RawMessage(`[{"name":"","description":"","parameters":{}}]`)
		},
		"properties that are a list": func(d *pytool.Description) {
			d.Specs = json.RawMessage(`[{"name":"f","description":"","parameters":{"properties":[1]}}]`)
		},
		"no parameters": func(d *pytool.Description) { d.Specs = json.RawMessage(`[{"name":"f","description":""}]`) },
		"another type": func(d *pytool.Description) {
			d.Specs = json.RawMessage(`[{"name":"f","description":7,"parameters":{}}]`)
		},
		"more": func(d *pytool.Description) {
			d.Specs = json.RawMessage(`[{"name":"f","description":"","parameters":{},"x":1}]`)
		},
		"twice": func(d *pytool.Description) {
			d.Specs = json.RawMessage(`[{"name":"f","name":"g","description":"","parameters":{}}]`)
		},
		"huge": func(d *pytool.Description) { d.Specs = json.RawMessage(`["` + strings.Repeat("x", 2<<20) + `"]`) },
		"many": func(d *pytool.Description) {
			d.Specs = json.RawMessage("[" + strings.Repeat(`{"name":"f","parameters":{}},`, 600) + `{"name":"f","parameters":{}}]`)
		},
		"deep": func(d *pytool.Description) {
			d.Specs = json.RawMessage(strings.Repeat("[", 20000) + strings.Repeat("]", 20000))
		},
		"manifest":        func(d *pytool.Description) { d.Manifest = json.RawMessage(`{"a":1}`) },
		"manifest a list": func(d *pytool.Description) { d.Manifest = json.RawMessage(`[]`) },
		"schema":          func(d *pytool.Description) { d.Valves = json.RawMessage(`true`) },
		"user schema":     func(d *pytool.Description) { d.UserValves = json.RawMessage(`"x"`) },
		"not UTF-8": func(d *pytool.Description) {
			d.Specs = json.RawMessage("[{\"name\":\"f\",\"description\":\"\xff\",\"parameters\":{}}]")
		},
	} {
		a.python.Description = edit
		res := a.admin("POST", "/api/tools/create", form("t", "T", valvesTool))
		if res.status != 400 || !strings.HasPrefix(res.str("detail"), "[ERROR: the tool's ") {
			t.Errorf("%s: got %d %s", name, res.status, clip(res.body))
		}
	}
	a.python.Description = nil
	a.python.Err = fault.New(fault.Invalid, "%s", strings.Repeat("é", 1<<20)+"\x00\xff")
	if got := a.admin("POST", "/api/tools/create", form("t", "T", valvesTool)).want(400).str("detail"); len(got) > 5000 {
		t.Errorf("the sentence has %d bytes", len(got))
	}
	if got := string(a.admin("GET", "/api/tools", "").want(200).body); got != "[]\n" {
		t.Errorf("something was stored: %s", got)
	}
}

func TestLoadingFromAURL(t *testing.T) {
	a := newAPI(t)
	member, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
	a.permit(identity.DefaultWorkspace, "workspace.tools", "workspace.tools_import")
	const path = "/api/v1/tools/load/url"
	body := `{"url":"https://github.com/a/b/blob/main/t.py"}`
	a.do("POST", path, member, body).says(401, prohibited)
	if len(a.loader.asked) != 0 {
		t.Errorf("a member had %v fetched", a.loader.asked)
	}
	a.loader.name, a.loader.content = "t", "class Tools: pass"
	if got := string(a.admin("POST", path, body).want(200).body); got != `{"name":"t","content":"class Tools: pass"}`+"\n" {
		t.Errorf("got %s", got)
	}
	a.admin("POST", path, `{}`).problem(400, "invalid", "url")
	a.admin("POST", path, `{"url":7}`).problem(400, "invalid", "url")
	a.loader.err = &pytool.Upstream{Status: 404, Message: "Failed to fetch the tool"}
	a.admin("POST", path, body).says(404, "Failed to fetch the tool")
	a.loader.err = &pytool.Upstream{Status: 500, Message: "[ERROR: Error fetching tool]", Cause: fmt.Errorf("dial tcp 10.0.0.7:443")}
	a.admin("POST", path, body).says(500, "[ERROR: Error fetching tool]")
	a.loader.err = fault.New(fault.Invalid, "no").WithCode("url_not_allowed").On("url")
	a.admin("POST", path, body).problem(400, "url_not_allowed", "url")
	if got := string(a.admin("GET", "/api/tools", "").want(200).body); got != "[]\n" || len(a.python.Seen()) != 0 {
		t.Errorf("something was stored or run: %s", got)
	}
}

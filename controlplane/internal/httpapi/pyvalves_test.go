package httpapi_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

func (r *answer) is(body string) {
	r.t.Helper()
	if got := strings.TrimSpace(string(r.want(200).body)); got != body {
		r.t.Errorf("got %s, want %s", got, body)
	}
}

func TestValves(t *testing.T) {
	a := newAPI(t)
	a.admin("POST", "/api/tools/create", form("t", "T", valvesTool)).want(200)
	a.admin("POST", "/api/tools/create", form("plain", "P", "class Tools: pass")).want(200)
	const path = "/api/tools/id/t/valves"
	a.admin("GET", path, "").is(`{}`)
	if got := a.admin("GET", path+"/spec", "").want(200).object(); got["title"] != "Valves" || len(got["properties"].(map[string]any)) != 3 {
		t.Errorf("got %v", got)
	}
	a.admin("POST", path+"/update", `{"retries":"7","loud":"yes","api_key":null,"unknown":[1]}`).is(`{"loud":true,"retries":7}`)
	a.admin("GET", path, "").is(`{"loud":true,"retries":7}`)
	a.admin("POST", path+"/update", `{"api_key":"k"}`).is(`{"api_key":"k"}`) // what is not sent goes back to its default
	a.admin("GET", path, "").is(`{"api_key":"k"}`)
	a.admin("POST", path+"/update", `{"retries":"many"}`).says(400, "[ERROR: 1 validation error for Valves\nretries\n  Input should be a valid integer [type=int_type, input_type=str]]")
	a.admin("GET", path, "").is(`{"api_key":"k"}`)
	for _, bad := range []string{`[]`, `"x"`, `null`, `{"a":1,"a":2}`} {
		a.admin("POST", path+"/update", bad).problem(400, "", "")
	}
	a.admin("POST", path+"/update", `{"api_key":"`+strings.Repeat("x", 300<<10)+`"}`).problem(400, "", "")

	a.admin("GET", "/api/tools/id/plain/valves", "").is(`{}`)
	a.admin("GET", "/api/tools/id/plain/valves/spec", "").is(`null`)
	a.admin("GET", "/api/tools/id/plain/valves/user/spec", "").is(`null`)
	a.admin("GET", "/api/tools/id/plain/valves/user", "").is(`{}`)
	a.admin("POST", "/api/tools/id/plain/valves/update", `{}`).says(404, notThere)
	a.admin("POST", "/api/tools/id/plain/valves/user/update", `{}`).says(404, notThere)

	empty := "class Tools:\n    class Valves(BaseModel):\n        pass\n"
	a.admin("POST", "/api/tools/create", form("empty", "E", empty)).want(200)
	if got := a.admin("GET", "/api/tools/id/empty/valves/spec", "").want(200).object(); len(got["properties"].(map[string]any)) != 0 {
		t.Errorf("a class without fields: %v", got)
	}
	needs := "class Tools:\n    class Valves(BaseModel):\n        api_key: str\n        other: int = 1\n"
	a.admin("POST", "/api/tools/create", form("needs", "N", needs)).want(200)
	a.admin("POST", "/api/tools/id/needs/valves/update", `{"other":2}`).says(400, "[ERROR: 1 validation error for Valves\napi_key\n  Field required [type=missing, input_type=dict]]")
	for _, lie := range []string{`[]`, `"x"`, `{`, `{"a":1,"a":2}`, ``} {
		a.python.Values = func(string) json.RawMessage { return json.RawMessage(lie) }
		a.admin("POST", path+"/update", `{"retries":1}`).says(400, "[ERROR: the tool's valves can't be read]")
	}
	a.python.Values = nil
	a.python.Err = fault.New(fault.Unavailable, "no runner").WithCode("no_runner")
	a.admin("POST", path+"/update", `{"retries":1}`).problem(503, "no_runner", "")
	a.admin("GET", path, "").is(`{"api_key":"k"}`)
}

func TestValuesOfValvesStayWhereTheyBelong(t *testing.T) {
	c := newCast(t)
	c.tool()
	const secret, mine = "hunter2hunter2", "my-own-colour"
	path := "/api/tools/id/t/valves"
	c.do("POST", path+"/update", c.token["writer"], `{"api_key":"`+secret+`"}`).is(`{"api_key":"` + secret + `"}`)
	c.do("POST", path+"/user/update", c.token["reader"], `{"colour":"`+mine+`"}`).is(`{"colour":"` + mine + `"}`)
	c.do("GET", path, c.token["owner"], "").is(`{"api_key":"` + secret + `"}`)
	c.do("GET", path+"/user", c.token["reader"], "").is(`{"colour":"` + mine + `"}`)
	for _, who := range []string{"owner", "admin", "writer", "group reader"} {
		c.do("GET", path+"/user", c.token[who], "").is(`{}`)
	}

	// Errors that quote them, and everything else that is answered.
	c.permit(identity.DefaultWorkspace, "workspace.tools", "workspace.tools_export")
	var said strings.Builder
	c.python.Err = fault.New(fault.Invalid, "%s", "bad key "+secret+" [type=x, input_value='"+secret[:6]+"...', input_type=str]")
	said.Write(c.do("POST", path+"/update", c.token["writer"], `{"api_key":"`+secret+`"}`).want(400).body)
	said.Write(c.do("POST", path+"/user/update", c.token["reader"], `{"colour":{"x":["`+secret+`"]}}`).want(400).body)
	c.python.Err = nil
	for _, token := range c.token {
		for _, route := range []string{"/api/tools", "/api/tools/list", "/api/tools/export", "/api/tools/id/t", path + "/spec", path + "/user/spec", "/v1/tools?tool_ids=t"} {
			said.Write(c.do("GET", route, token, "").body)
		}
	}
	said.Write(c.admin("GET", "/admin/audit-events?limit=200", "").want(200).body)
	said.WriteString(c.log.String())
	for _, s := range []string{secret, secret[:6], mine} {
		if strings.Contains(said.String(), s) {
			t.Errorf("%q shows up", s)
		}
	}

	c.admin("DELETE", "/api/tools/id/t/delete", "").want(200)
	c.tool()
	c.do("GET", path, c.token["owner"], "").is(`{}`)
	c.do("GET", path+"/user", c.token["reader"], "").is(`{}`)
}

func TestUserValvesOfSeveralToolsAndUsersAreApart(t *testing.T) {
	a := newAPI(t)
	users := map[string]string{}
	for _, u := range []string{"ann", "bob"} {
		users[u], _ = a.tenant(identity.DefaultWorkspace, identity.Member)
	}
	for _, id := range []string{"a", "b"} {
		a.admin("POST", "/api/tools/create", form(id, id, valvesTool, `"access_grants":[`+grantTo("user", "*", "read")+`]`)).want(200)
	}
	var wg sync.WaitGroup
	for u, token := range users {
		for _, id := range []string{"a", "b"} {
			wg.Go(func() {
				a.do("POST", "/api/tools/id/"+id+"/valves/user/update", token, fmt.Sprintf(`{"colour":"%s of %s"}`, id, u)).want(200)
			})
		}
	}
	wg.Wait()
	for u, token := range users {
		for _, id := range []string{"a", "b"} {
			a.do("GET", "/api/tools/id/"+id+"/valves/user", token, "").is(fmt.Sprintf(`{"colour":"%s of %s"}`, id, u))
		}
	}
}

func TestFunctionsOfPythonToolsInTheRegistry(t *testing.T) {
	c := newCast(t)
	two := "class Tools:\n    def forecast(self, city: str)\n    def shell_exec(self)\n"
	c.tool()
	c.admin("POST", "/api/tools/create", form("other", "O", two, `"access_grants":[`+grantTo("user", c.id["reader"], "read")+`]`)).want(200)
	names := func(token, ids string) map[string]string {
		t.Helper()
		var out struct {
			Tools []struct {
				Source   string
				Function struct {
					Name        string
					Description string
					Parameters  json.RawMessage
				}
				Over bool `json:"overrides_builtin"`
			}
		}
		if err := json.Unmarshal(c.do("GET", "/v1/tools?tool_ids="+ids, token, "").want(200).body, &out); err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for _, x := range out.Tools {
			if x.Source != "builtin" {
				all[x.Function.Name] = fmt.Sprint(x.Source, " ", x.Function.Description, " ", x.Over)
			}
		}
		return all
	}
	if got := fmt.Sprint(names(c.token["reader"], "t,other,t")); got != "map[forecast:python:t about forecast false now:python:t about now false "+
		"other_forecast:python:other about forecast false other_shell_exec:python:other about shell_exec false]" {
		t.Errorf("got %s", got)
	}
	if got := names(c.token["reader"], "other,t"); got["forecast"] != "python:other about forecast false" || got["t_forecast"] != "python:t about forecast false" {
		t.Errorf("got %v", got)
	}
	if got := names(c.token["reader"], ""); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	for who, token := range c.token {
		if who == "reader" || who == "admin" {
			continue
		}
		res := c.do("GET", "/v1/tools?tool_ids=other", token, "")
		res.problem(404, "not_found", "tool_ids")
		if got := res.str("detail"); got != `no Python tool "other"` {
			t.Errorf("%s: got %q", who, got)
		}
	}
	c.do("GET", "/v1/tools?tool_ids=t,none", c.token["owner"], "").says(404, `no Python tool "none"`)
	c.do("GET", "/v1/tools?tool_ids=t&tool_ids=other", c.token["owner"], "").problem(400, "invalid", "tool_ids")
	c.do("GET", "/v1/tools?tool_ids="+strings.Repeat("t,", 64)+"t", c.token["owner"], "").problem(400, "invalid", "tool_ids")
}

func TestWhatModelsAreToldFollowsTheValves(t *testing.T) {
	a := newAPI(t)
	source := valvesTool + "# says forecast: asks {api_key}\n"
	a.admin("POST", "/api/tools/create", form("t", "T", source)).want(200)
	told := func() string {
		t.Helper()
		for _, x := range a.admin("GET", "/v1/tools?tool_ids=t", "").want(200).object()["tools"].([]any) {
			if f := x.(map[string]any)["function"].(map[string]any); f["name"] == "forecast" {
				return f["description"].(string)
			}
		}
		return ""
	}
	if got := told(); got != "asks {api_key}" {
		t.Errorf("at first %q", got)
	}
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"them"}`).want(200)
	if got := told(); got != "asks them" {
		t.Errorf("once set %q", got)
	}
	if got := fmt.Sprint(a.admin("GET", "/api/tools/id/t", "").object()["specs"]); !strings.Contains(got, "about forecast") {
		t.Errorf("the specs follow as well: %s", got)
	}
	a.admin("POST", "/api/tools/id/t/update", form("t", "T", strings.Replace(source, "asks", "begs", 1))).want(200)
	if got := told(); got != "begs them" {
		t.Errorf("with another source %q", got)
	}
	a.admin("POST", "/api/tools/id/t/valves/update", `{}`).want(200)
	if got := told(); got != "begs {api_key}" {
		t.Errorf("once nothing is set %q", got)
	}

	// What was true with other valves is not told when the source does not load
	// with these.
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"them"}`).want(200)
	a.python.Fails = func(valves json.RawMessage) error {
		if strings.Contains(string(valves), "nobody") {
			return fault.New(fault.Invalid, "it does not load with these valves")
		}
		return nil
	}
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"nobody"}`).want(200)
	if got := told(); got != "begs {api_key}" {
		t.Errorf("with valves that it does not load with %q", got)
	}

	// When nobody could find out what is to be told, nothing is set.
	a.python.Fails = func(valves json.RawMessage) error {
		if valves == nil {
			return nil
		}
		return fault.New(fault.Unavailable, "no runner").WithCode("no_runner")
	}
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"us"}`).problem(503, "no_runner", "")
	a.admin("POST", "/api/tools/id/t/update", form("t", "T", source)).problem(503, "no_runner", "")
	a.admin("GET", "/api/tools/id/t/valves", "").is(`{"api_key":"nobody"}`)
	if got := told(); got != "begs {api_key}" {
		t.Errorf("without a runner %q", got)
	}

	// What was sealed with another key was never said.
	a.python.Fails = nil
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"them"}`).want(200)
	other, err := pytool.NewVault("another secret key that is as long")
	if err != nil {
		t.Fatal(err)
	}
	for name, vault := range map[string]*pytool.Vault{"another": other, "none": nil} {
		a.pythonTools.Vault = vault
		if got := told(); got != "begs {api_key}" {
			t.Errorf("with %s key %q", name, got)
		}
	}
}

// A source that tells models what it is set to tells everybody who may use it,
// but for what its author marked as secret; in the database it is sealed.
func TestWhatModelsAreToldHoldsNoPassword(t *testing.T) {
	a := newAPI(t)
	source := strings.Replace(valvesTool, "api_key: str", "api_key: SecretStr", 1) + "# says forecast: key {api_key}, {retries} times\n"
	a.admin("POST", "/api/tools/create", form("t", "T", source)).want(200)
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"hunter2hunter2","retries":717171}`).want(200)
	if got := string(a.admin("GET", "/v1/tools?tool_ids=t", "").want(200).body); !strings.Contains(got, "key ***, 717171 times") {
		t.Errorf("got %s", got)
	}
	if a.inDatabase("717171") {
		t.Error("the database holds the value in clear")
	}
}

func TestABrokenToolBreaksNoList(t *testing.T) {
	a := newAPI(t)
	member, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
	share := `"access_grants":[` + grantTo("user", "*", "read") + `]`
	a.admin("POST", "/api/tools/create", form("good", "G", valvesTool, share)).want(200)
	a.admin("POST", "/api/tools/create", form("bad", "B", valvesTool, share)).want(200)
	a.python.Err = fault.New(fault.Invalid, "No module named 'gone'") // since a change of the sandbox
	for _, token := range []string{adminToken, member} {
		for _, path := range []string{"/api/tools", "/api/tools/list", "/v1/tools?tool_ids=good,bad", "/api/tools/id/bad", "/api/tools/id/bad/valves/user", "/api/tools/id/bad/valves/user/spec"} {
			a.do("GET", path, token, "").want(200)
		}
	}
}

// With the setting off, an admin is listed what it owns and was granted, and
// may still look at and change the rest.
func TestAnAdminMayBeListedOnlyItsOwn(t *testing.T) {
	for _, asked := range []bool{false, true} {
		a := newAPI(t)
		a.pythonTools.AdminsAsked = asked
		owner, _ := a.tenant(identity.DefaultWorkspace, identity.Member)
		admin, adminID := a.tenant(identity.DefaultWorkspace, identity.Admin)
		a.permit(identity.DefaultWorkspace, "workspace.tools")
		a.do("POST", "/api/tools/create", owner, form("theirs", "T", valvesTool)).want(200)
		a.do("POST", "/api/tools/create", admin, form("own", "O", valvesTool)).want(200)
		want := map[bool]int{false: 2, true: 1}[asked]
		var list []map[string]any
		if err := json.Unmarshal(a.do("GET", "/api/tools/list", admin, "").want(200).body, &list); err != nil || len(list) != want {
			t.Errorf("asked %v: %d tools, %v", asked, len(list), err)
		}
		got := a.do("GET", "/api/tools/id/theirs", admin, "").want(200).object()
		if _, has := got["content"]; has == asked || got["write_access"] == asked {
			t.Errorf("asked %v: got %v", asked, got)
		}
		a.do("POST", "/api/tools/id/theirs/access/update", owner, `{"access_grants":[`+grantTo("user", adminID, "read")+`]}`).want(200)
		if err := json.Unmarshal(a.do("GET", "/api/tools/list", admin, "").want(200).body, &list); err != nil || len(list) != 2 {
			t.Errorf("asked %v, with a grant: %d tools, %v", asked, len(list), err)
		}
		a.do("POST", "/api/tools/id/theirs/update", admin, form("theirs", "N", valvesTool)).want(200)
		a.do("DELETE", "/api/tools/id/theirs/delete", admin, "").want(200)
	}
}

func TestAnotherSecretKey(t *testing.T) {
	a := newAPI(t)
	a.admin("POST", "/api/tools/create", form("t", "T", valvesTool)).want(200)
	const path = "/api/tools/id/t/valves"
	a.admin("POST", path+"/update", `{"api_key":"hunter2hunter2"}`).want(200)
	a.admin("POST", path+"/user/update", `{"colour":"blue-as-the-sea"}`).want(200)
	first := a.pythonTools.Vault
	other, err := pytool.NewVault("another secret key that is as long")
	if err != nil {
		t.Fatal(err)
	}
	for name, vault := range map[string]*pytool.Vault{"another": other, "none": nil} {
		a.pythonTools.Vault = vault
		a.admin("GET", path, "").is(`{}`)
		a.admin("GET", path+"/user", "").is(`{}`)
		if !strings.Contains(a.log.String(), "BIGWAVE_SECRET_KEY") {
			t.Errorf("%s: the log does not name the setting", name)
		}
		for _, update := range []string{path + "/update", path + "/user/update"} {
			res := a.admin("POST", update, `{}`)
			if want := map[string]int{"another": 409, "none": 503}[name]; res.status != want || !strings.Contains(res.str("detail"), "BIGWAVE_SECRET_KEY") {
				t.Errorf("%s: %s answers %d %s", name, update, res.status, res.body)
			}
		}
		if strings.Contains(a.log.String(), "hunter2") || strings.Contains(a.log.String(), "blue-as") {
			t.Error("the log holds values")
		}
	}
	a.pythonTools.Vault = first // nothing was overwritten
	a.admin("GET", path, "").is(`{"api_key":"hunter2hunter2"}`)
	a.admin("GET", path+"/user", "").is(`{"colour":"blue-as-the-sea"}`)
}

func TestNoValueIsInTheDatabaseFile(t *testing.T) {
	a := newAPI(t)
	a.admin("POST", "/api/tools/create", form("t", "T", valvesTool)).want(200)
	a.admin("POST", "/api/tools/id/t/valves/update", `{"api_key":"hunter2hunter2"}`).want(200)
	a.admin("POST", "/api/tools/id/t/valves/user/update", `{"colour":"blue-as-the-sea"}`).want(200)
	for _, secret := range []string{"hunter2hunter2", "blue-as-the-sea"} {
		if a.inDatabase(secret) {
			t.Errorf("the files hold %q", secret)
		}
	}
}

// inDatabase tells whether the database's files hold a text in clear. They
// must hold what the tool's specs say: else the answer would mean nothing.
func (a *api) inDatabase(text string) bool {
	a.t.Helper()
	files, err := filepath.Glob(a.file + "*")
	if err != nil {
		a.t.Fatal(err)
	}
	var all []byte
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			a.t.Fatal(err)
		}
		all = append(all, data...)
	}
	if !strings.Contains(string(all), "about forecast") {
		a.t.Fatal("the files do not hold the tool")
	}
	return strings.Contains(string(all), text)
}

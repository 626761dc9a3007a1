package httpapi_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

const noPermissions = `{"workspace.tools":false,"workspace.tools_import":false,"workspace.tools_export":false,"sharing.public_tools":false}`

// permit gives every member of a workspace the named permissions and no other.
func (a *api) permit(workspace string, names ...string) {
	a.t.Helper()
	a.admin("PUT", "/admin/permissions?workspace_id="+workspace, `{"defaults":`+permissionsOf(names...)+`}`).want(200)
}

func permissionsOf(names ...string) string {
	doc := noPermissions
	for _, n := range names {
		doc = strings.Replace(doc, `"`+n+`":false`, `"`+n+`":true`, 1)
	}
	return doc
}

func TestGroupsAndTheirMembers(t *testing.T) {
	a := newAPI(t)
	_, mia := a.tenant(identity.DefaultWorkspace, identity.Member)
	_, stranger := a.tenant("b", identity.Member)
	made := a.admin("POST", "/admin/groups", `{"name":"analysts"}`).want(201)
	path := "/admin/groups/" + made.str("id")
	if !strings.HasPrefix(made.str("id"), "grp_") || made.str("workspace_id") != "default" {
		t.Errorf("got %s", made.body)
	}
	a.admin("POST", "/admin/groups", `{"name":"analysts"}`).problem(409, "conflict", "name")
	a.admin("POST", "/admin/groups", `{"name":" "}`).problem(400, "invalid", "name")
	a.admin("POST", "/admin/groups", `{}`).problem(400, "invalid", "name")
	a.admin("POST", "/admin/groups", `{"name":"analysts","workspace_id":"b"}`).want(201)
	a.admin("PATCH", path, `{"name":"Analysts"}`).want(200)
	if got := a.admin("GET", path, "").want(200); got.str("name") != "Analysts" {
		t.Errorf("got %s", got.body)
	}

	count := func() int {
		return len(a.admin("GET", path+"/members", "").want(200).object()["items"].([]any))
	}
	for range 2 { // a second time changes nothing
		if got := a.admin("POST", path+"/members", fmt.Sprintf(`{"user_id":%q}`, mia)).want(201); got.str("id") != mia {
			t.Errorf("got %s", got.body)
		}
	}
	a.admin("POST", path+"/members", fmt.Sprintf(`{"user_id":%q}`, stranger)).problem(404, "not_found", "")
	a.admin("POST", path+"/members", `{"user_id":"usr_none"}`).problem(404, "not_found", "")
	if count() != 1 {
		t.Errorf("got %d members", count())
	}
	a.admin("DELETE", path+"/members/"+mia, "").want(204)
	a.admin("DELETE", path+"/members/"+mia, "").problem(404, "not_found", "")
	a.admin("POST", path+"/members", fmt.Sprintf(`{"user_id":%q}`, mia)).want(201)
	a.admin("DELETE", "/admin/users/"+mia, "").want(204)
	if count() != 0 {
		t.Errorf("a user who is gone is still a member")
	}
	for range 3 {
		a.admin("POST", "/admin/groups", `{"name":"g`+newID()+`"}`).want(201)
	}
	first := a.admin("GET", "/admin/groups?limit=2", "").want(200).object()
	second := a.admin("GET", "/admin/groups?limit=2&cursor="+first["next_cursor"].(string), "").want(200).object()
	if len(first["items"].([]any)) != 2 || len(second["items"].([]any)) != 2 || second["next_cursor"] != "" {
		t.Errorf("got %v, then %v", first, second)
	}
	a.admin("DELETE", path, "").want(204)
	a.admin("GET", path, "").problem(404, "not_found", "")

	actions := map[string]int{}
	for _, e := range a.admin("GET", "/admin/audit-events?limit=200", "").object()["items"].([]any) {
		actions[e.(map[string]any)["action"].(string)]++
	}
	for action, n := range map[string]int{"group.create": 4, "group.update": 1, "group.delete": 1, "group.member.add": 2, "group.member.remove": 1} {
		if actions[action] != n {
			t.Errorf("%s was recorded %d times, want %d", action, actions[action], n)
		}
	}
}

func TestPermissions(t *testing.T) {
	a := newAPI(t)
	const path = "/admin/permissions"
	if got := string(a.admin("GET", path, "").want(200).body); got != `{"defaults":`+noPermissions+`,"groups":{}}`+"\n" {
		t.Errorf("at first: %s", got)
	}
	one := a.admin("POST", "/admin/groups", `{"name":"one"}`).want(201).str("id")
	two := a.admin("POST", "/admin/groups", `{"name":"two"}`).want(201).str("id")
	groups := func(body string) string { return `{"defaults":` + noPermissions + `,"groups":` + body + `}` }
	put := a.admin("PUT", path, groups(`{"`+one+`":`+permissionsOf("workspace.tools")+`}`)).want(200)
	got := a.admin("GET", path, "").want(200)
	if string(got.body) != string(put.body) || !strings.Contains(string(got.body), `"`+two+`":`+noPermissions) {
		t.Errorf("got %s, put %s", got.body, put.body)
	}
	a.admin("PUT", path, string(got.body)).want(200) // what GET gives PUT takes
	a.admin("PUT", path, `{"defaults":`+permissionsOf("sharing.public_tools")+`}`).want(200)
	if got := a.admin("GET", path, "").object()["groups"].(map[string]any)[one].(map[string]any); got["workspace.tools"] != true {
		t.Errorf("a change of the defaults changed a group: %v", got)
	}
	a.admin("PUT", path, groups(`{"grp_none":`+noPermissions+`}`)).problem(404, "not_found", "")
	a.admin("PUT", path, groups(`{"":`+noPermissions+`}`)).problem(404, "not_found", "")
	a.admin("PUT", path, `{"groups":{}}`).problem(400, "invalid", "defaults")
	a.admin("PUT", path, `{"defaults":{"workspace.tools":true}}`).problem(400, "invalid", "defaults.workspace.tools_import")
	a.admin("PUT", path, groups(`{"`+one+`":{}}`)).problem(400, "invalid", "")
	a.admin("PUT", path, groups(`{"`+one+`":null}`)).problem(400, "invalid", "groups."+one)
	a.admin("PUT", path, strings.Replace(groups(`{}`), "false", `"yes"`, 1)).problem(400, "invalid", "defaults.workspace.tools")
	if got := a.admin("GET", path, "").object()["groups"].(map[string]any)[one].(map[string]any); got["workspace.tools"] != true {
		t.Errorf("a refused document changed something: %v", got)
	}
	a.admin("PUT", path, groups(`{}`)).want(200)
	if got := a.admin("GET", path, "").object()["groups"].(map[string]any)[one].(map[string]any); got["workspace.tools"] != false {
		t.Errorf("a group that is not named kept its permissions: %v", got)
	}
}

func TestPermissionsAreThoseOfAllAndOfTheGroups(t *testing.T) {
	a := newAPI(t)
	ctx := t.Context()
	_, id := a.tenant(identity.DefaultWorkspace, identity.Member)
	mia := identity.Principal{Workspace: identity.DefaultWorkspace, UserID: id, Role: identity.Member}
	allowed := func(p identity.Principal) identity.Permissions {
		t.Helper()
		got, err := a.ids.Allowed(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := allowed(mia); got != (identity.Permissions{}) {
		t.Errorf("at first: %+v", got)
	}
	one := a.admin("POST", "/admin/groups", `{"name":"one"}`).want(201).str("id")
	two := a.admin("POST", "/admin/groups", `{"name":"two"}`).want(201).str("id")
	doc := map[string]string{one: permissionsOf("workspace.tools"), two: permissionsOf("workspace.tools_export")}
	body := `{"defaults":` + permissionsOf("sharing.public_tools") + `,"groups":{`
	for id := range maps.Keys(doc) {
		body += `"` + id + `":` + doc[id] + `,`
	}
	a.admin("PUT", "/admin/permissions", strings.TrimSuffix(body, ",")+`}}`).want(200)
	if got := allowed(mia); got != (identity.Permissions{PublicTools: true}) {
		t.Errorf("in no group: %+v", got)
	}
	a.admin("POST", "/admin/groups/"+one+"/members", fmt.Sprintf(`{"user_id":%q}`, id)).want(201)
	if got := allowed(mia); got != (identity.Permissions{Tools: true, PublicTools: true}) {
		t.Errorf("in one: %+v", got)
	}
	a.admin("POST", "/admin/groups/"+two+"/members", fmt.Sprintf(`{"user_id":%q}`, id)).want(201)
	if got := allowed(mia); got != (identity.Permissions{Tools: true, ToolsExport: true, PublicTools: true}) {
		t.Errorf("in both: %+v", got)
	}
	a.admin("DELETE", "/admin/groups/"+one, "").want(204)
	if got := allowed(mia); got != (identity.Permissions{ToolsExport: true, PublicTools: true}) {
		t.Errorf("after one is gone: %+v", got)
	}
	admin := mia
	admin.Role = identity.Admin
	if got := allowed(admin); got != (identity.Permissions{Tools: true, ToolsImport: true, ToolsExport: true, PublicTools: true}) {
		t.Errorf("an admin: %+v", got)
	}
	other := mia
	other.Workspace = "b"
	if got := allowed(other); got != (identity.Permissions{}) {
		t.Errorf("in another workspace: %+v", got)
	}
}

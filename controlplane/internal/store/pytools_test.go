package store_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/pytool/pytooltest"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

const pythonSource = "class Tools:\n    class Valves(BaseModel):\n        key: str = \"\"\n    class UserValves(BaseModel):\n        name: str = \"\"\n    def f(self, a: int)\n"

func pythonTools(t *testing.T, db *store.DB) (*pytool.Service, *identity.Service, *clock) {
	t.Helper()
	people, clock := people(db)
	vault, err := pytool.NewVault("a secret key that only tests know")
	if err != nil {
		t.Fatal(err)
	}
	return &pytool.Service{
		Store: db, People: people, Describer: &pytooltest.Describer{}, Vault: vault,
		Now: clock.Now, NewID: newID, NewUUID: uuid.NewString, Log: slog.New(slog.DiscardHandler),
	}, people, clock
}

func TestPythonToolsComeBackAsTheyWere(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, clock := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		owner, _ := join(t, people, "", "olga", identity.Admin)
		text := "zażółć 🎨 'quoted' \"and\" \\n %_"
		made, err := s.Create(ctx, owner, pytool.Form{
			ID: "Tool_A", Name: text, Content: pythonSource + "# says f: zażółć\n# " + text, Description: &text,
			Grants: []pytool.Grant{{PrincipalType: "user", PrincipalID: text, Permission: "read"}, {PrincipalType: "group", PrincipalID: "g", Permission: "write"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := db.PythonTool(ctx, "default", "tool_a")
		if err != nil || got.OwnedBy == nil || *got.OwnedBy != (pytool.User{ID: owner.UserID, Name: "olga", Admin: true}) {
			t.Fatalf("got %+v, %v", got, err)
		}
		got.OwnedBy = nil
		if fmt.Sprintf("%+v", sorted(plain(got))) != fmt.Sprintf("%+v", sorted(plain(made))) {
			t.Errorf("got\n%+v, made\n%+v", plain(got), plain(made))
		}
		if _, err := s.Create(ctx, owner, pytool.Form{ID: "tool_b", Content: "class Tools: pass"}); err != nil {
			t.Fatal(err)
		}
		order := func() (ids []string) {
			list, err := db.PythonTools(ctx, "default")
			if err != nil {
				t.Fatal(err)
			}
			for _, one := range list {
				if one.Content != "" {
					t.Error("a list holds content")
				}
				ids = append(ids, one.ID)
			}
			return ids
		}
		clock.Pass(time.Second)
		b, err := db.PythonTool(ctx, "default", "tool_b")
		if err != nil || b.Description != nil || b.Valves != nil || b.UserValves != nil || len(b.Grants) != 0 {
			t.Errorf("got %+v, %v", b, err)
		}
		if _, err := s.SetValves(ctx, admin, "tool_a", pytool.Values{"key": json.RawMessage(`"k"`)}); err != nil {
			t.Fatal(err)
		}
		if got := order(); !slices.Equal(got, []string{"tool_a", "tool_b"}) {
			t.Errorf("got %v", got)
		}
		clock.Pass(time.Second)
		if _, err := s.Update(ctx, admin, "tool_b", pytool.Form{ID: "x", Content: "class Tools:\n    pass"}); err != nil {
			t.Fatal(err)
		}
		if got := order(); !slices.Equal(got, []string{"tool_b", "tool_a"}) {
			t.Errorf("got %v", got)
		}
		if err := people.DeleteUser(ctx, admin, owner.UserID); err != nil {
			t.Fatal(err)
		}
		if got, err := db.PythonTool(ctx, "default", "tool_a"); err != nil || got.OwnedBy != nil || got.Owner != owner.UserID {
			t.Errorf("after its owner went: %+v, %v", got, err)
		}
	})
}

// plain is a tool without pointers, so that two can be compared.
func plain(t pytool.Tool) map[string]any {
	return map[string]any{
		"id": t.ID, "owner": t.Owner, "name": t.Name, "content": t.Content, "specs": string(t.Specs), "description": fmt.Sprint(*t.Description),
		"manifest": string(t.Manifest), "spoken": t.Spoken["f"], "valves": string(t.Valves), "user": string(t.UserValves), "grants": t.Grants, "revision": t.Revision,
		"created": t.CreatedAt, "updated": t.UpdatedAt,
	}
}

func sorted(m map[string]any) map[string]any {
	grants := m["grants"].([]pytool.Grant)
	slices.SortFunc(grants, func(a, b pytool.Grant) int { return strings.Compare(a.ID, b.ID) })
	return m
}

func TestAPythonToolIsChangedByOneAtATime(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, _ := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		var wg sync.WaitGroup
		var mu sync.Mutex
		made, taken := 0, 0
		for i := range 8 {
			wg.Go(func() {
				_, err := s.Create(ctx, admin, pytool.Form{ID: "t", Content: pythonSource, Name: fmt.Sprint(i)})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					made++
				case fault.Is(err, fault.Invalid) && fault.From(err).Message == pytool.IDTaken:
					taken++
				default:
					t.Errorf("got %v", err)
				}
			})
		}
		wg.Wait()
		if made != 1 || taken != 7 {
			t.Errorf("made %d times, taken %d times", made, taken)
		}
		before, err := db.PythonTool(ctx, "default", "t")
		if err != nil {
			t.Fatal(err)
		}
		after, err := s.Update(ctx, admin, "t", pytool.Form{ID: "t", Content: pythonSource})
		if err != nil || after.Revision <= before.Revision {
			t.Errorf("revision %d after %d, %v", after.Revision, before.Revision, err)
		}
		stale := before
		stale.Name = "stale"
		stale.Sealed.Valves = []byte("x")
		if _, err := db.UpdatePythonTool(ctx, stale, before, event("default", "x")); !wants(err, fault.Conflict) {
			t.Errorf("got %v", err)
		}
		if err := db.PutValves(ctx, stale, event("default", "x")); !wants(err, fault.Conflict) {
			t.Errorf("the valves of another source: got %v", err)
		}
		if kept, err := db.Valves(ctx, "default", "t"); err != nil || kept.Sealed != nil {
			t.Errorf("they were stored: %q, %v", kept.Sealed, err)
		}
		if err := db.PutUserValves(ctx, stale, "u", []byte("x"), event("default", "x")); !wants(err, fault.Conflict) {
			t.Errorf("a user's valves of another source: got %v", err)
		}
		if kept, err := db.UserValves(ctx, "default", "t", "u"); err != nil || kept.Sealed != nil {
			t.Errorf("a user's were stored: %q, %v", kept.Sealed, err)
		}
		set := after
		set.Sealed = pytool.Sealed{Valves: []byte("v"), Spoken: []byte("s")}
		if err := db.PutValves(ctx, set, event("default", "x")); err != nil {
			t.Fatal(err)
		}
		if got, err := db.PythonTool(ctx, "default", "t"); err != nil || string(got.Sealed.Valves) != "v" || string(got.Sealed.Spoken) != "s" {
			t.Errorf("set it is %+v, %v", got.Sealed, err)
		}
		if _, err := db.UpdatePythonTool(ctx, after, after, event("default", "x")); !wants(err, fault.Conflict) {
			t.Errorf("an update that knew other valves: got %v", err)
		}
		set.Sealed.Spoken = []byte("other")
		if after, err = db.UpdatePythonTool(ctx, set, set, event("default", "x")); err != nil {
			t.Fatal(err)
		}
		if got, err := db.PythonTool(ctx, "default", "t"); err != nil || string(got.Sealed.Valves) != "v" || string(got.Sealed.Spoken) != "other" {
			t.Errorf("updated it is %+v, %v", got.Sealed, err)
		}
		if err := s.Delete(ctx, admin, "t"); err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{
			"update":      second(db.UpdatePythonTool(ctx, stale, before, event("default", "x"))),
			"grants":      db.PutGrants(ctx, "default", "t", nil, event("default", "x")),
			"valves":      db.PutValves(ctx, stale, event("default", "x")),
			"user valves": db.PutUserValves(ctx, stale, "u", []byte("x"), event("default", "x")),
			"delete":      db.DeletePythonTool(ctx, "default", "t", event("default", "x")),
			"read":        second(db.PythonTool(ctx, "default", "t")),
			"read valves": second(db.Valves(ctx, "default", "t")),
		} {
			if !wants(err, fault.NotFound) {
				t.Errorf("%s of a tool that is gone: %v", name, err)
			}
		}
		again, err := s.Create(ctx, admin, pytool.Form{ID: "t", Content: pythonSource})
		if err != nil || again.Revision <= after.Revision {
			t.Errorf("made again it has revision %d, %v", again.Revision, err)
		}
	})
}

func TestAWorkspaceHasSoManyPythonToolsAtMost(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, _ := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		workspace(t, people, "acme")
		for i := range 1000 {
			one := pytool.Tool{Workspace: "default", ID: fmt.Sprint("t", i), Owner: "u", Specs: json.RawMessage(`[]`), Manifest: json.RawMessage(`{}`)}
			if _, err := db.InsertPythonTool(ctx, one, event("default", "x")); err != nil {
				t.Fatal(err)
			}
		}
		describer := &pytooltest.Describer{}
		s.Describer = describer
		if _, err := s.Create(ctx, admin, pytool.Form{ID: "more", Content: pythonSource}); !wants(err, fault.Invalid) || len(describer.Seen()) != 0 {
			t.Errorf("one more: %v; sources that ran: %d", err, len(describer.Seen()))
		}
		admin.Workspace = "acme"
		if _, err := s.Create(ctx, admin, pytool.Form{ID: "more", Content: pythonSource}); err != nil {
			t.Errorf("in another workspace: %v", err)
		}
		admin.Workspace = "default"
		if err := s.Delete(ctx, admin, "t0"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Create(ctx, admin, pytool.Form{ID: "more", Content: pythonSource}); err != nil {
			t.Errorf("in place of another: %v", err)
		}
	})
}

func TestAPythonToolThatGoesIsGivenNoGrants(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, _ := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		for range 20 {
			if _, err := s.Create(ctx, admin, pytool.Form{ID: "t", Content: pythonSource}); err != nil {
				t.Fatal(err)
			}
			var grants []pytool.Grant
			for i := range 50 {
				grants = append(grants, pytool.Grant{ID: newID(), PrincipalType: pytool.ToUser, PrincipalID: fmt.Sprint(i), Permission: pytool.Read})
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := db.PutGrants(ctx, "default", "t", grants, event("default", "x")); err != nil && !wants(err, fault.NotFound) {
					t.Errorf("grants of a tool that goes: %v", err)
				}
			})
			wg.Go(func() {
				if err := db.DeletePythonTool(ctx, "default", "t", event("default", "x")); err != nil {
					t.Errorf("delete: %v", err)
				}
			})
			wg.Wait()
		}
	})
}

func TestValvesGoWithTheirToolUserAndWorkspace(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, _ := pythonTools(t, db)
		ctx, boss := t.Context(), root(t, people)
		workspace(t, people, "acme")
		admin, _ := join(t, people, "acme", "ann", identity.Admin)
		user, _ := join(t, people, "acme", "uli", identity.Member)
		everybody := []pytool.Grant{{PrincipalType: "user", PrincipalID: "*", Permission: "read"}}
		set := func(id string) {
			t.Helper()
			if _, err := s.Create(ctx, admin, pytool.Form{ID: id, Content: pythonSource, Grants: everybody}); err != nil {
				t.Fatal(err)
			}
			_, err := s.SetValves(ctx, admin, id, pytool.Values{"key": json.RawMessage(`"k"`)})
			_, uerr := s.SetUserValves(ctx, user, id, pytool.Values{"name": json.RawMessage(`"n"`)})
			if err != nil || uerr != nil {
				t.Fatal(err, uerr)
			}
		}
		pin := func(id string) tool.Pin {
			t.Helper()
			got, err := db.PythonTool(ctx, "acme", id)
			if err != nil {
				t.Fatal(err)
			}
			return tool.Pin{ID: id, Revision: got.Revision}
		}
		has := func(id string) bool {
			t.Helper()
			kept, err := db.UserValves(ctx, "acme", id, user.UserID)
			if err != nil {
				t.Fatal(err)
			}
			return kept.Sealed != nil
		}
		set("one")
		set("two")
		got, err := s.SettingsOf(ctx, "acme", user.UserID, pin("one"))
		if err != nil || string(got.Valves) != `{"key":"k"}` || string(got.UserValves) != `{"name":"n"}` || got.User != (pytool.User{ID: user.UserID, Name: "uli"}) {
			t.Errorf("got %+v, %v", got, err)
		}
		if got, err := s.SettingsOf(ctx, "acme", admin.UserID, pin("one")); err != nil || string(got.UserValves) != `{}` || !got.User.Admin {
			t.Errorf("another user's: %+v, %v", got, err)
		}
		// What is sealed for one place opens in no other.
		kept, err := db.UserValves(ctx, "acme", "one", user.UserID)
		two, terr := db.PythonTool(ctx, "acme", "two")
		if err != nil || terr != nil || db.PutUserValves(ctx, two, user.UserID, kept.Sealed, event("default", "x")) != nil {
			t.Fatal(err, terr)
		}
		if got, err := s.SettingsOf(ctx, "acme", user.UserID, pin("two")); err != nil || string(got.UserValves) != `{}` {
			t.Errorf("moved to another tool: %+v, %v", got, err)
		}
		if err := s.Delete(ctx, admin, "one"); err != nil || has("one") {
			t.Errorf("valves outlive their tool (%v)", err)
		}
		if err := people.DeleteUser(ctx, boss, user.UserID); err != nil || has("two") {
			t.Errorf("valves outlive their user (%v)", err)
		}
		if err := people.DeleteWorkspace(ctx, boss, "acme"); err != nil {
			t.Errorf("a workspace with Python tools: %v", err)
		}
		if list, err := db.PythonToolsWhole(ctx, "acme"); err != nil || len(list) != 0 {
			t.Errorf("tools outlive their workspace: %v, %v", list, err)
		}
		events, _, err := db.AuditEvents(ctx, "acme", page.Page{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		count := map[string]int{}
		for _, e := range events {
			count[e.Action]++
		}
		for action, n := range map[string]int{"python_tool.create": 2, "python_tool.valves": 2, "python_tool.user_valves": 2, "python_tool.delete": 1} {
			if count[action] != n {
				t.Errorf("%s was recorded %d times, want %d", action, count[action], n)
			}
		}
	})
}

// A source runs as long as it likes, and whoever sent it may lose its right
// meanwhile: nothing of it is stored then.
func TestARightThatIsWithdrawnWhileASourceRuns(t *testing.T) {
	changed := pytool.Form{ID: "t", Content: pythonSource + "# changed\n", Name: "evil", GrantsGiven: true}
	acts := map[string]func(s *pytool.Service, p identity.Principal) error{
		"create": func(s *pytool.Service, p identity.Principal) error {
			return second(s.Create(t.Context(), p, pytool.Form{ID: "new", Content: pythonSource}))
		},
		"update": func(s *pytool.Service, p identity.Principal) error {
			form := changed
			form.Grants = []pytool.Grant{{PrincipalType: "user", PrincipalID: p.UserID, Permission: "write"}}
			return second(s.Update(t.Context(), p, "t", form))
		},
		"set": func(s *pytool.Service, p identity.Principal) error {
			return second(s.SetValves(t.Context(), p, "t", pytool.Values{"key": json.RawMessage(`"evil"`)}))
		},
		"set for oneself": func(s *pytool.Service, p identity.Principal) error {
			return second(s.SetUserValves(t.Context(), p, "t", pytool.Values{"name": json.RawMessage(`"evil"`)}))
		},
	}
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		for act, do := range acts {
			for _, how := range []string{"grant", "permission", "disabled", "deleted", "demoted"} {
				withdrawn := map[string]bool{
					"create": how != "grant", "update": true, "set": how != "permission", "set for oneself": how != "permission",
				}[act]
				t.Run(act+"/"+how, func(t *testing.T) {
					s, people, _ := pythonTools(t, db)
					ctx, boss := t.Context(), root(t, people)
					name := "w" + uuid.NewString()[:8]
					workspace(t, people, name)
					admin, _ := join(t, people, name, "ann", identity.Admin)
					role := identity.Member
					if how == "demoted" {
						role = identity.Admin
					}
					eve, _ := join(t, people, name, "eve", role)
					permit := func(may bool) {
						set := identity.PermissionSet{Defaults: identity.Permissions{Tools: may}}
						if _, err := people.PutPermissions(ctx, admin, "", set); err != nil {
							t.Error(err)
						}
					}
					permit(how != "demoted")
					grants := []pytool.Grant{{PrincipalType: "user", PrincipalID: eve.UserID, Permission: "write"}}
					if how == "demoted" {
						grants = nil
					}
					before, err := s.Create(ctx, admin, pytool.Form{ID: "t", Name: "t", Content: pythonSource, Grants: grants})
					if err != nil {
						t.Fatal(err)
					}
					once := sync.OnceFunc(func() {
						var err error
						switch how {
						case "grant":
							_, err = s.SetAccess(ctx, admin, "t", nil)
						case "permission":
							permit(false)
						case "disabled":
							_, err = people.UpdateUser(ctx, admin, eve.UserID, identity.Change{Disabled: new(true)})
						case "deleted":
							err = people.DeleteUser(ctx, boss, eve.UserID)
						case "demoted":
							_, err = people.UpdateUser(ctx, admin, eve.UserID, identity.Change{Role: new(identity.Member)})
						}
						if err != nil {
							t.Error(err)
						}
					})
					own := *s
					own.Describer = &pytooltest.Describer{
						Description: func(*pytool.Description) { once() },
						Values:      func(raw string) json.RawMessage { once(); return json.RawMessage(raw) },
					}
					if err := do(&own, eve); withdrawn != fault.Is(err, fault.Forbidden) {
						t.Errorf("got %v", err)
					}
					if !withdrawn {
						return
					}
					after, err := db.PythonTool(ctx, name, "t")
					if err != nil || after.Revision != before.Revision || after.Name != "t" || after.Sealed.Valves != nil {
						t.Errorf("it was changed: %+v, %v", after, err)
					}
					if kept, err := db.UserValves(ctx, name, "t", eve.UserID); err != nil || kept.Sealed != nil {
						t.Errorf("a user's were set: %v", err)
					}
					if _, err := db.PythonTool(ctx, name, "new"); !fault.Is(err, fault.NotFound) {
						t.Errorf("one was made: %v", err)
					}
				})
			}
		}
	})
}

// A run goes on with the source that it began with: what is set after the tool
// had another, or was made anew by somebody else, is not for that one.
func TestWhatIsSetLaterIsNotForAnOlderSource(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, _ := pythonTools(t, db)
		ctx, boss := t.Context(), root(t, people)
		form := func(change string) pytool.Form {
			return pytool.Form{ID: "t", Content: pythonSource + change}
		}
		set := func(value string) {
			t.Helper()
			_, err := s.SetValves(ctx, boss, "t", pytool.Values{"key": json.RawMessage(value)})
			_, uerr := s.SetUserValves(ctx, boss, "t", pytool.Values{"name": json.RawMessage(value)})
			if err != nil || uerr != nil {
				t.Fatal(err, uerr)
			}
		}
		pin := func(made pytool.Tool, err error) tool.Pin {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			return tool.Pin{ID: made.ID, Revision: made.Revision}
		}
		gets := func(p tool.Pin, want string) {
			t.Helper()
			got, err := s.SettingsOf(ctx, boss.Workspace, boss.UserID, p)
			switch {
			case want == "" && (!fault.Is(err, fault.Conflict) || got.Valves != nil || got.UserValves != nil):
				t.Errorf("revision %d is given %s and %s, %v", p.Revision, got.Valves, got.UserValves, err)
			case want != "" && (err != nil || string(got.Valves) != `{"key":`+want+`}` || string(got.UserValves) != `{"name":`+want+`}`):
				t.Errorf("revision %d is given %s and %s, %v; want %s", p.Revision, got.Valves, got.UserValves, err, want)
			}
		}
		first := pin(s.Create(ctx, boss, form("")))
		set(`"a"`)
		gets(first, `"a"`)
		second := pin(s.Update(ctx, boss, "t", form("# changed\n")))
		gets(first, `"a"`) // it had that before
		gets(second, `"a"`)
		set(`"b"`)
		gets(first, "")
		gets(second, `"b"`)
		if err := s.Delete(ctx, boss, "t"); err != nil {
			t.Fatal(err)
		}
		third := pin(s.Create(ctx, boss, form("")))
		if _, err := s.SettingsOf(ctx, boss.Workspace, boss.UserID, second); err != nil {
			t.Errorf("nothing is set, and a run of before gets %v", err)
		}
		set(`"c"`)
		gets(second, "")
		gets(third, `"c"`)
		// What the user alone has set is kept from it as well.
		if err := s.Delete(ctx, boss, "t"); err != nil {
			t.Fatal(err)
		}
		fourth := pin(s.Create(ctx, boss, form("")))
		if _, err := s.SetUserValves(ctx, boss, "t", pytool.Values{"name": json.RawMessage(`"d"`)}); err != nil {
			t.Fatal(err)
		}
		gets(third, "")
		if got, err := s.SettingsOf(ctx, boss.Workspace, boss.UserID, fourth); err != nil || string(got.UserValves) != `{"name":"d"}` {
			t.Errorf("got %s, %v", got.UserValves, err)
		}
	})
}

// Tools that an older platform described, whose descriptions hold what a newer
// one would leave out.
func TestToolsAreDescribedAgainByANewerPlatform(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, clock := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		workspace(t, people, "acme")
		other, _ := join(t, people, "acme", "ann", identity.Admin)
		old := func(who identity.Principal, id, content string) pytool.Tool {
			t.Helper()
			s.Describer = &pytooltest.Describer{Description: func(d *pytool.Description) {
				d.Specs = json.RawMessage(`[{"name":"_helper","description":"","parameters":{}}]`)
			}}
			made, err := s.Create(ctx, who, pytool.Form{ID: id, Content: content, Name: id})
			if err != nil {
				t.Fatal(err)
			}
			return made
		}
		old(admin, "a", pythonSource)
		old(admin, "breaks", "class Tools:\n    pass")
		old(admin, "spoken", pythonSource+"# says f: {key}")
		old(other, "a", pythonSource)
		if _, err := s.SetValves(ctx, admin, "spoken", pytool.Values{"key": json.RawMessage(`"told"`)}); err != nil {
			t.Fatal(err)
		}
		clock.Pass(time.Second)
		python := &pytooltest.Describer{}
		s.Describer, s.Format = python, 2
		renewal := &pytool.Renewal{Tools: s, Log: slog.New(slog.DiscardHandler)}
		get := func(workspace, id string) pytool.Tool {
			t.Helper()
			got, err := db.PythonTool(ctx, workspace, id)
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		stale := func(x pytool.Tool) bool { return strings.Contains(string(x.Specs), "_helper") }
		sweep := func(wantErr bool) {
			t.Helper()
			if err := renewal.Sweep(ctx); (err != nil) != wantErr {
				t.Fatalf("got %v", err)
			}
		}

		// Without a runner everything stays as it is.
		before := get("default", "a")
		python.Err = fault.New(fault.Unavailable, "no runner").WithCode(string(fault.NoRunner))
		sweep(false)
		if got := get("default", "a"); !stale(got) || len(python.Seen()) != 1 {
			t.Errorf("got %s after %d descriptions", got.Specs, len(python.Seen()))
		}
		// One that fails for now is not in the way of the next.
		python.Err = fault.New(fault.Unavailable, "the sandbox ended first")
		seen := len(python.Seen())
		sweep(true)
		sweep(true)
		if got := python.Seen()[seen:]; len(got) != 2 || got[0] == got[1] {
			t.Errorf("got %q", got)
		}
		python.Err = nil
		source := python.Description
		python.Description = func(d *pytool.Description) {
			if string(d.Specs) == "[]" { // the one without a function
				d.Specs = json.RawMessage(`{}`)
			}
		}
		sweep(false)
		sweep(false)
		python.Description = source
		after := get("default", "a")
		if stale(after) || after.Format != 2 || after.Revision != before.Revision || after.Content != before.Content || !after.UpdatedAt.Equal(before.UpdatedAt) {
			t.Errorf("got %+v, before %+v", after, before)
		}
		if stale(get("acme", "a")) || stale(get("default", "spoken")) {
			t.Error("not all were described again")
		}
		if _, offered, err := s.Pin(ctx, admin, []string{"spoken"}); err != nil || len(offered) != 1 || offered[0].Description != "told" {
			t.Errorf("what it is set to was left out: %v, %v", offered, err)
		}
		// What can't be described keeps what it said, and is left alone until the
		// next start.
		if got := get("default", "breaks"); !stale(got) || got.Format != 0 {
			t.Errorf("got %+v", got)
		}
		seen = len(python.Seen())
		sweep(false)
		if got := len(python.Seen()); got != seen {
			t.Errorf("%d were described once more", got-seen)
		}
		renewal = &pytool.Renewal{Tools: s, Log: renewal.Log}
		sweep(false)
		if got := get("default", "breaks"); stale(got) || len(python.Seen()) != seen+1 {
			t.Errorf("after a start: %+v", got)
		}
		count := 0
		events, _, err := db.AuditEvents(ctx, "default", page.Page{Limit: 100})
		for _, e := range events {
			if e.Action == "python_tool.describe" && e.Actor == "controlplane" && e.Outcome == "ok" {
				count++
			}
		}
		if err != nil || count != 3 {
			t.Errorf("recorded %d times, %v", count, err)
		}
	})
}

// Whoever changes a tool while it is described again wins.
func TestADescriptionThatComesLateIsNotStored(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, people, clock := pythonTools(t, db)
		ctx, admin := t.Context(), root(t, people)
		for name, meanwhile := range map[string]func(id string) error{
			"updated": func(id string) error {
				_, err := s.Update(ctx, admin, id, pytool.Form{Content: pythonSource + "    def newer(self)\n"})
				return err
			},
			"set": func(id string) error {
				return second(s.SetValves(ctx, admin, id, pytool.Values{"key": json.RawMessage(`"new"`)}))
			},
			"deleted": func(id string) error { return s.Delete(ctx, admin, id) },
		} {
			s.Format = 1
			if _, err := s.Create(ctx, admin, pytool.Form{ID: name, Content: pythonSource + "# says f: {key}"}); err != nil {
				t.Fatal(err)
			}
			clock.Pass(time.Second)
			late := *s
			late.Format = 2
			late.Describer = &pytooltest.Describer{Description: func(d *pytool.Description) {
				d.Specs = json.RawMessage(`[{"name":"late","description":"","parameters":{}}]`)
				if err := meanwhile(name); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				meanwhile = func(string) error { return nil }
			}}
			renewal := &pytool.Renewal{Tools: &late, Log: slog.New(slog.DiscardHandler)}
			if err := renewal.Sweep(ctx); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			got, err := db.PythonTool(ctx, "default", name)
			switch {
			case name == "deleted":
				if !wants(err, fault.NotFound) {
					t.Errorf("got %v", err)
				}
				continue
			case err != nil || strings.Contains(string(got.Specs), "late"):
				t.Errorf("%s meanwhile: got %s, %v", name, got.Specs, err)
			case name == "set":
				if _, offered, err := s.Pin(ctx, admin, []string{name}); err != nil || len(offered) != 1 || offered[0].Description != "new" {
					t.Errorf("models are told %v, %v", offered, err)
				}
			}
			if err := renewal.Sweep(ctx); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if got, err := db.PythonTool(ctx, "default", name); err != nil || !strings.Contains(string(got.Specs), "late") {
				t.Errorf("%s, the next round: got %s, %v", name, got.Specs, err)
			}
			if err := s.Delete(ctx, admin, name); err != nil {
				t.Fatal(err)
			}
		}
	})
}

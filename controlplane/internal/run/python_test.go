package run_test

import (
	"encoding/json"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/pytool/pytooltest"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

const weather = "class Tools:\n    def forecast(self, city: str)\n    def shell_exec(self)\n"

// author is who made the tools: whoever holds the bootstrap token.
var author = identity.Principal{Workspace: "default", UserID: identity.BootstrapUser, Role: identity.InstanceAdmin}

// python gives the world Python tools, with "weather" for everybody.
func (w *world) python() *pytool.Service {
	w.t.Helper()
	people := &identity.Service{Store: w.db, Now: time.Now, NewID: newID}
	s := &pytool.Service{
		Store: w.db, People: people, Describer: &pytooltest.Describer{}, Now: time.Now, NewID: newID, NewUUID: uuid.NewString,
		Log: slog.New(slog.DiscardHandler),
	}
	_, err := s.Create(w.t.Context(), author, pytool.Form{ID: "weather", Content: weather, Grants: []pytool.Grant{{PrincipalType: "user", PrincipalID: "*", Permission: "read"}}})
	if err == nil {
		_, err = s.Create(w.t.Context(), author, pytool.Form{ID: "hidden", Content: weather})
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func forecast(name string, ids ...string) run.Request {
	return run.Request{ToolIDs: ids, Calls: []run.ToolCall{{ID: "c1", Name: name, Arguments: json.RawMessage(`{"city":"Łódź","__user__":{"id":"root"}}`)}}}
}

func TestARunCallsFunctionsOfThePythonToolsThatItNames(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		python := w.python()
		w.replica("replica-2", false, func(s *run.Service) { s.Python = python })
		s := w.session()
		for name, c := range map[string]struct {
			q    run.Request
			want string
		}{
			"named":             {forecast("forecast", "weather"), "ok"},
			"not named":         {forecast("forecast"), "invalid_arguments/unknown_tool"},
			"as it is known":    {forecast("weather_shell_exec", "weather"), "ok"},
			"by its other name": {forecast("weather_forecast", "weather"), "invalid_arguments/unknown_tool"},
		} {
			if got := w.finish(s, c.q); !slices.Equal(statuses(got), []string{c.want}) {
				t.Errorf("%s: got %v", name, statuses(got))
			}
		}
		for _, id := range []string{"hidden", "none", ""} {
			_, err := w.runs.Start(t.Context(), alice, s.ID, forecast("forecast", "weather", id))
			if !fault.Is(err, fault.NotFound) || !strings.Contains(err.Error(), `"`+id+`"`) || fault.From(err).Field != "tool_ids" {
				t.Errorf("%q: got %v", id, err)
			}
		}
		inv := w.runner.invocation()
		if f := inv.Function; inv.Program != tool.PythonTool || f == nil || f.ID != "weather" || f.Content != weather || string(f.Arguments) == "" ||
			strings.Contains(string(f.Arguments), "__user__") || !strings.HasPrefix(f.Digest, "sha256:") {
			t.Errorf("got %+v with %+v", inv, inv.Function)
		}
		tl, err := w.db.PythonTool(t.Context(), "default", "weather")
		if err != nil {
			t.Fatal(err)
		}
		events, _, err := w.db.AuditEvents(t.Context(), "default", page.Page{Limit: 200})
		if err != nil || !slices.ContainsFunc(events, func(e audit.Event) bool {
			return e.Action == "run.started" && strings.Contains(e.Detail, " weather@"+strconv.FormatInt(tl.Revision, 10))
		}) {
			t.Errorf("the record does not name the revision (%v)", err)
		}
	})
}

func TestARunIsBoundToTheSourceThatItBeganWith(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		python := w.python()
		use := func(s *run.Service) { s.Python = python }
		w.replica("replica-2", false, use)
		s := w.live()
		w.runner.set(func(r *runner) { r.hold = true })
		two := forecast("forecast", "weather")
		two.Calls = append(two.Calls, run.ToolCall{ID: "c2", Name: "forecast", Arguments: json.RawMessage(`{"city":"Rome"}`)})
		r := w.begin(s, two)
		w.until("the first runs", w.runner.holds(1))
		changed := pytool.Form{ID: "weather", Content: weather + "# new\n"}
		if _, err := python.Update(t.Context(), author, "weather", changed); err != nil {
			t.Fatal(err)
		}
		w.runner.set(func(r *runner) { r.hold = false })
		w.runs.Apply(t.Context(), w.runner.release(r.Calls[0].ID))
		if r = w.wait(r); !slices.Equal(statuses(r), []string{"ok", "ok"}) {
			t.Fatalf("got %v", statuses(r))
		}
		if got := w.runner.invocation().Function; got.Content != weather || string(got.Arguments) != `{"city":"Rome"}` {
			t.Errorf("the second call ran %q with %s", got.Content, got.Arguments)
		}

		// A replica that takes a run over has the source only while it is the same.
		for _, change := range []bool{false, true} {
			w.runner.set(func(r *runner) { r.ignore = true })
			waiting := w.begin(w.session(), forecast("forecast", "weather"))
			if change {
				if _, err := python.Update(t.Context(), author, "weather", pytool.Form{ID: "weather", Content: weather + "# newer\n"}); err != nil {
					t.Fatal(err)
				}
			}
			w.stop()
			w.runner.set(func(r *runner) { r.ignore = false })
			w.replica("replica-3"+map[bool]string{true: "b"}[change], false, use)
			want := map[bool]string{false: "ok", true: "invalid_arguments/unknown_tool"}[change]
			if waiting = w.wait(waiting); !slices.Equal(statuses(waiting), []string{want}) {
				t.Errorf("taken over, changed %v: got %v", change, statuses(waiting))
			}
		}
	})
}

func TestRunsWithoutPythonToolsNameNone(t *testing.T) {
	w := lite(t)
	_, err := w.runs.Start(t.Context(), alice, w.session().ID, forecast("forecast", "weather"))
	if !fault.Is(err, fault.NotFound) {
		t.Errorf("got %v", err)
	}
}

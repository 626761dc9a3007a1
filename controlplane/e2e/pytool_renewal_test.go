package e2e

import (
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Tools that an older platform described are described again by the next one,
// as soon as there is a runner; until then they are what they were.
func TestToolsOfAnOlderPlatformAreDescribedAgain(t *testing.T) {
	s := pythonStack(t)
	const source = "class Tools:\n    def f(self, a: int):\n        \"\"\"Does it.\"\"\"\n        return self._helper(a)\n\n    def _helper(self, a: int):\n        return a + 1\n"
	s.makeTool("old", source).want(200)
	s.makeTool("broken", source).want(200)
	s.makeTool("new", source).want(200)
	s.runner.stop(syscall.SIGTERM)
	s.cp.stop(syscall.SIGTERM)
	edit(t, s, `UPDATE tools SET described_by = 0, updated_at = 1000000, specs = '[{"name":"_helper","description":"","parameters":{"properties":{"a":{"type":"integer"}},"type":"object"}}]' WHERE id <> 'new'`)
	edit(t, s, `UPDATE tools SET content = 'raise ValueError("not on this one")' WHERE id = 'broken'`)
	edit(t, s, `UPDATE tools SET content = 'raise ValueError("never run")' WHERE id = 'new'`)

	names := func(id string) []string {
		t.Helper()
		var out []string
		for _, spec := range s.get("/api/tools/id/" + id).want(200).list("specs") {
			out = append(out, spec.str("name"))
		}
		return out
	}
	s.startControlPlane()
	if got := s.get("/api/tools/").want(200); strings.Count(string(got.body), `"_helper"`) != 2 {
		t.Errorf("without a runner: %s", got.body)
	}
	before := s.get("/api/tools/id/old").want(200)
	s.startRunner()
	eventually(t, 60*time.Second, "the old tool is described again", func() error {
		if got := names("old"); !slices.Equal(got, []string{"f"}) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
	after := s.get("/api/tools/id/old").want(200)
	if after.str("content") != before.str("content") || after.num("updated_at") != 1 {
		t.Errorf("got %s, before %s", after.body, before.body)
	}
	eventually(t, 60*time.Second, "the broken tool was tried", func() error {
		if !strings.Contains(s.cp.log.String(), "not on this one") {
			return errors.New("nobody says why it can't be described")
		}
		return nil
	})
	if got := names("broken"); !slices.Equal(got, []string{"_helper"}) {
		t.Errorf("what can't be described again says %v", got)
	}
	if got := names("new"); !slices.Equal(got, []string{"f"}) || strings.Contains(s.cp.log.String(), "never run") {
		t.Errorf("what is described by this platform was described again: %v", got)
	}
	wantStatus(t, s.post("/api/tools/id/old/run", object{"name": "f", "arguments": object{"a": 1}}).want(200).object, "ok")
	if got := s.get("/admin/audit-events?limit=200").want(200); strings.Count(string(got.body), `"python_tool.describe"`) != 1 {
		t.Errorf("got %s", got.body)
	}
}

// edit changes the database while the control plane is stopped.
func edit(t *testing.T, s *stack, statement string) {
	t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(s.data, "bigwave.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), statement); err != nil {
		t.Fatal(err)
	}
}

// After an update no runner answers with the old source, however warm its
// sessions are.
func TestAnUpdateReachesEveryRunner(t *testing.T) {
	s := pythonStack(t)
	second := spawn(t, "bigwave-runner", slices.Concat([]string{
		"BIGWAVE_DATA_DIR=" + s.data, "BIGWAVE_RUNNER_ID=r2", "BIGWAVE_RUNNER_DATA_DIR=" + filepath.Join(s.data, "runner2"),
	}, s.opt.env, s.opt.runEnv))
	eventually(t, 30*time.Second, "two runners are ready", func() error {
		if err := second.dead(); err != nil {
			return err
		}
		ready := 0
		for _, r := range s.get("/admin/runners").list("items") {
			if r.str("state") == "ready" {
				ready++
			}
		}
		if ready != 2 {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	source := func(version int) string {
		return fmt.Sprintf("class Tools:\n    def version(self):\n        \"\"\"Says which it is.\"\"\"\n        return %d\n", version)
	}
	s.makeTool("t", source(1)).want(200)
	answer := func(session string) (version float64, runner string) {
		t.Helper()
		call := s.post("/v1/agent-sessions/"+session+"/run?wait=120", object{"tool_ids": []string{"t"}, "tool_calls": []object{
			{"id": "1", "name": "version", "arguments": object{}}}}).want(200).list("calls")[0]
		wantStatus(t, call, "ok")
		return call.obj("returned").num("value"), call.str("runner_id")
	}
	warm := map[string]string{} // a session of each runner
	for range 20 {
		if len(warm) == 2 {
			break
		}
		session := s.session()
		version, runner := answer(session)
		if version != 1 {
			t.Fatalf("version %v answers", version)
		}
		warm[runner] = session
	}
	if len(warm) != 2 {
		t.Fatalf("all sessions are on %v", warm)
	}
	s.post("/api/tools/id/t/update", object{"id": "t", "name": "t", "content": source(2), "meta": object{}}).want(200)
	for i := range 20 {
		for runner, session := range warm {
			if version, by := answer(session); version != 2 || by != runner {
				t.Fatalf("call %d: version %v answers on %s, want 2 on %s", i, version, by, runner)
			}
		}
	}
}

// What an admin set holds in the calls of others, and what a user set in its
// own: after a restart, and whatever else of the user changes.
func TestStoredValvesHoldAfterARestart(t *testing.T) {
	s := pythonStack(t)
	admin, member := s.tenant("a")
	everybody := object{"access_grants": []object{{"principal_type": "user", "principal_id": "*", "permission": "read"}}}
	admin.makeTool("one", shows, everybody).want(200)
	admin.makeTool("two", shows, everybody).want(200)
	admin.post("/api/tools/id/one/valves/update", object{"secret": "set by the admin"}).want(200)
	var failed [2]error
	done := make(chan struct{})
	for i, id := range []string{"one", "two"} {
		go func() {
			defer func() { done <- struct{}{} }()
			got, err := member.send(t.Context(), "POST", "/api/tools/id/"+id+"/valves/user/update", object{"mine": "for " + id})
			if err == nil && got.status != 200 {
				err = fmt.Errorf("got %d %s", got.status, got.body)
			}
			failed[i] = err
		}()
	}
	<-done
	<-done
	if err := errors.Join(failed[:]...); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		for id, secret := range map[string]string{"one": "set by the admin", "two": ""} {
			call := member.post("/api/tools/id/"+id+"/run", object{"name": "check", "arguments": object{"theirs": "for " + id}}).want(200).object
			wantStatus(t, call, "ok")
			if got := call.obj("returned").obj("value"); got.str("secret") != backwards(secret) || got["same"] != true {
				t.Errorf("%s, tool %s: got %v", when, id, got)
			}
		}
		// At once in one session, each has its own.
		run := member.post("/v1/agent-sessions/"+member.session()+"/run?wait=60", object{"tool_ids": []string{"one", "two"}, "parallel": true, "tool_calls": []object{
			{"id": "1", "name": "check", "arguments": object{"theirs": "for one"}}, {"id": "2", "name": "two_check", "arguments": object{"theirs": "for two"}},
			{"id": "3", "name": "check", "arguments": object{"theirs": "for one"}}, {"id": "4", "name": "two_check", "arguments": object{"theirs": "for two"}},
		}}).want(200)
		for _, call := range run.list("calls") {
			wantStatus(t, call, "ok")
			if call.obj("returned").obj("value")["same"] != true {
				t.Errorf("%s, at once: got %v", when, call)
			}
		}
	}
	check("at first")
	var user string
	for _, u := range admin.get("/admin/users").want(200).list("items") {
		if u.str("name") == "member" {
			user = u.str("id")
		}
	}
	admin.do("PATCH", "/admin/users/"+user, object{"name": "renamed"}).want(200)
	group := admin.post("/admin/groups", object{"name": "those"}).want(201).str("id")
	admin.post("/admin/groups/"+group+"/members", object{"user_id": user}).want(201)
	admin.post("/admin/api-keys", object{"workspace_id": "a", "user_id": user, "name": "another"}).want(201)
	check("after other changes of the user")
	s.restartControlPlane(syscall.SIGTERM)
	check("after a restart of the control plane")
	s.restartRunner(syscall.SIGKILL)
	check("after a restart of the runner")
}

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What is not there is named, and never an empty result.
func TestAFunctionThatIsNotThereIsNamed(t *testing.T) {
	s := pythonStack(t)
	s.makeTool("t", "class Tools:\n    def f(self):\n        \"\"\"Is there.\"\"\"\n        return 'here'\n\n    def _helper(self):\n        return 'never'\n").want(200)
	s.makeTool("other", "class Tools:\n    def g(self):\n        \"\"\"Is elsewhere.\"\"\"\n        return 'there'\n").want(200)
	for _, name := range []string{"nope", "_helper", "__init__", "g", "F", "t.f", "f ", ""} {
		got := s.post("/api/tools/id/t/run", object{"name": name, "arguments": object{}}).want(400)
		if got.str("code") != "unknown_tool" || !strings.Contains(got.str("detail"), fmt.Sprintf("no function %q", name)) {
			t.Errorf("%q: got %s", name, got.body)
		}
	}
	s.post("/api/tools/id/nope/run", object{"name": "f"}).want(404)

	// In a run the others go on.
	run := s.post("/v1/agent-sessions/"+s.session()+"/run?wait=120", object{"tool_ids": []string{"t"}, "tool_calls": []object{
		{"id": "1", "name": "nope", "arguments": object{}}, {"id": "2", "name": "_helper", "arguments": object{}},
		{"id": "3", "name": "g", "arguments": object{}}, {"id": "4", "name": "f", "arguments": object{}},
	}}).want(200)
	calls := run.list("calls")
	for i, name := range []string{"nope", "_helper", "g"} {
		failed := calls[i].obj("error")
		if calls[i].str("status") == "ok" || failed.str("code") != "unknown_tool" || failed.str("message") != fmt.Sprintf("there is no tool named %q", name) {
			t.Errorf("got %v", calls[i])
		}
	}
	wantStatus(t, calls[3], "ok")
	s.post("/v1/agent-sessions/"+s.session()+"/run", object{"tool_ids": []string{"t", "gone"}, "tool_calls": []object{
		{"id": "1", "name": "f", "arguments": object{}}}}).want(404)
}

// stuck has functions that never come back, each a process that is named
// after it: NAME and the function.
const stuck = `
import asyncio, ctypes, subprocess, time


def named(name):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


class Tools:
    def spin(self):
        """Works for ever."""
        named("NAMEspin")
        while True:
            pass

    def sleep(self):
        """Sleeps for ever, and does not want to be woken."""
        named("NAMEsleep")
        while True:
            try:
                time.sleep(1e6)
            except BaseException:
                pass

    async def wait(self):
        """Waits for ever."""
        named("NAMEwait")
        await asyncio.Event().wait()

    def child(self):
        """Waits for another that never ends."""
        named("NAMEchild")
        subprocess.run(["sleep", "86417PID"], start_new_session=True)

    def quick(self):
        """Comes back."""
        return "back"
`

// named counts the processes of this machine whose own name is word.
func named(word string) int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range files {
		if name, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(name)) == word {
			n++
		}
	}
	return n
}

// A call that hangs holds its session's only place; cancelled, it is gone and
// the place is free at once.
func TestCancelEndsAPythonCallThatHangs(t *testing.T) {
	s := start(t, options{runEnv: onContainers(t), cpEnv: []string{"BIGWAVE_MAX_RUNS_PER_SESSION=1"}})
	s.setPolicy(object{"wall_clock_seconds": 300})
	word, seconds := fmt.Sprintf("bw%d", os.Getpid()), fmt.Sprintf("86417%d", os.Getpid())
	s.makeTool("stuck", strings.NewReplacer("NAME", word, "86417PID", seconds).Replace(stuck)).want(200)
	ses := s.session()
	run := func(name, wait string) answer {
		t.Helper()
		return s.post("/v1/agent-sessions/"+ses+"/run?wait="+wait, object{"tool_ids": []string{"stuck"}, "tool_calls": []object{
			{"id": "1", "name": name, "arguments": object{}}}})
	}
	wantStatus(t, run("quick", "60").want(200).list("calls")[0], "ok")
	for _, name := range []string{"spin", "sleep", "wait", "child"} {
		id := run(name, "0").want(202).str("id")
		eventually(t, 20*time.Second, name+" runs", func() error {
			if n := named(word + name); n != 1 {
				return fmt.Errorf("%d processes have its name", n)
			}
			return nil
		})
		run("quick", "0").want(429)
		began := time.Now()
		s.post("/v1/agent-sessions/"+ses+"/runs/"+id+"/cancel", nil)
		final := s.final(ses, id, 10*time.Second)
		if final.str("status") != "cancelled" {
			t.Errorf("%s: got %v", name, final)
		}
		wantStatus(t, final.list("calls")[0], "cancelled")
		wantStatus(t, run("quick", "20").want(200).list("calls")[0], "ok")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("after %s the place was free after %v", name, took)
		}
		if n := named(word + name); n != 0 {
			t.Errorf("%d processes of %s are left", n, name)
		}
		if err := noProcess("sleep " + seconds); err != nil {
			t.Errorf("after %s: %v", name, err)
		}
	}

	// The same for a call without a session of the caller's.
	began := s.post("/api/tools/id/stuck/run?wait=0", object{"name": "spin"}).want(202)
	at := began.header.Get("Location")
	eventually(t, 20*time.Second, "it runs", func() error {
		if n := named(word + "spin"); n != 1 {
			return fmt.Errorf("%d processes have its name", n)
		}
		return nil
	})
	s.post(at+"/cancel", nil)
	eventually(t, 10*time.Second, "it is gone", func() error {
		got, err := s.send(context.Background(), "GET", at, nil)
		if err != nil || got.str("status") != "cancelled" || named(word+"spin") != 0 {
			return fmt.Errorf("%d processes, %s, %v", named(word+"spin"), got.body, err)
		}
		return nil
	})
}

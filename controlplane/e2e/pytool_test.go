package e2e

import (
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// pythonStack is a stack whose sandboxes have the base image's Python.
func pythonStack(t *testing.T) *stack {
	t.Helper()
	return start(t, options{runEnv: onContainers(t)})
}

const calculator = `"""
title: Calculator
author: e2e
version: 0.1
"""
from pydantic import BaseModel, Field


class Tools:
    class Valves(BaseModel):
        unit: str = Field("EUR", description="what the numbers are")
        api_key: str = ""

    class UserValves(BaseModel):
        digits: int = 2

    def __init__(self):
        self.valves = self.Valves()

    async def add(self, a: float, b: float, __user__: dict = {}, __event_emitter__=None) -> dict:
        """
        Adds two numbers.
        :param a: the first
        :param b: the second
        """
        await __event_emitter__({"type": "status", "data": {"description": "adding", "done": False}})
        print("adding", a, b)
        total = round(a + b, __user__["valves"].digits)
        return {"total": total, "unit": self.valves.unit, "key": self.valves.api_key, "by": __user__["name"]}

    def fail(self) -> str:
        """Fails."""
        raise ValueError("not today")
`

// makeTool creates a Python tool.
func (c *client) makeTool(id, content string, more ...object) answer {
	c.t.Helper()
	form := object{"id": id, "name": id, "content": content, "meta": object{"description": "of the tests"}}
	for _, m := range more {
		for k, v := range m {
			form[k] = v
		}
	}
	return c.post("/api/v1/tools/create", form)
}

func TestAPythonToolFromDiskToAStreamedResult(t *testing.T) {
	s := pythonStack(t)
	made := s.makeTool("calculator", calculator).want(200)
	specs := made.list("specs")
	if len(specs) != 2 || specs[0].str("name") != "add" || !strings.Contains(specs[0].str("description"), "Adds two numbers.") {
		t.Fatalf("got %s", made.body)
	}
	if got := made.obj("meta").obj("manifest").str("title"); got != "Calculator" || made.obj("meta")["has_user_valves"] != true {
		t.Errorf("got %s", made.body)
	}
	if got := s.get("/api/tools/").want(200); !strings.Contains(string(got.body), `"calculator"`) {
		t.Errorf("got %s", got.body)
	}
	if got := s.get("/api/tools/id/calculator/valves/spec").want(200); got.obj("properties")["unit"] == nil {
		t.Errorf("got %s", got.body)
	}
	s.post("/api/tools/id/calculator/valves/update", object{"unit": "GBP", "api_key": "sk-hush-hush"}).want(200)
	if got := s.get("/api/tools/id/calculator/valves").want(200); got.str("unit") != "GBP" || got.str("api_key") != "sk-hush-hush" {
		t.Errorf("got %s", got.body)
	}
	if got := s.post("/api/tools/id/calculator/valves/update", object{"unit": object{"no": "text"}}).want(400); !strings.Contains(got.str("detail"), "unit") {
		t.Errorf("got %s", got.body)
	}
	s.post("/api/tools/id/calculator/valves/user/update", object{"digits": 1}).want(200)
	if got := s.get("/v1/tools?tool_ids=calculator").want(200); !strings.Contains(string(got.body), `"python:calculator"`) {
		t.Errorf("got %s", got.body)
	}

	var names []string
	var last object
	body := object{"stream": true, "tool_ids": []string{"calculator"}, "tool_calls": []object{
		{"id": "c1", "name": "add", "arguments": object{"a": 1.25, "b": "2"}}, {"id": "c2", "name": "fail", "arguments": object{}},
	}}
	err := s.stream(t.Context(), "POST", "/v1/agent-sessions/"+s.session()+"/run", body, "", func(e event) bool {
		names = append(names, e.name)
		if e.name == "call.event" && e.data.obj("data").str("type") != "status" {
			t.Errorf("got the event %v", e.data)
		}
		last = e.data
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names, " "); !strings.Contains(got, "call.event") || !strings.HasSuffix(got, "run.finished") {
		t.Errorf("got the events %s", got)
	}
	calls := last.obj("run").list("calls")
	wantStatus(t, calls[0], "ok")
	value := calls[0].obj("returned").obj("value")
	if value.num("total") != 3.3 && value.num("total") != 3.2 || value.str("unit") != "GBP" || value.str("key") != "sk-hush-hush" || value.str("by") == "" {
		t.Errorf("got %v", calls[0])
	}
	if calls[0].str("stdout") == "" || calls[0].str("result") == "" {
		t.Errorf("got %v", calls[0])
	}
	wantStatus(t, calls[1], "error")
	if got := calls[1]; got.obj("error").str("message") != "ValueError: not today" || !strings.Contains(got.str("stderr"), "Traceback") {
		t.Errorf("got %v", got)
	}
}

// hostile are sources that do harm as soon as they are loaded, and what the
// answer says of each.
var hostile = map[string]struct{ source, says string }{
	"spins":       {"while True:\n    pass\n", "still running"},
	"sleeps":      {"import time\ntime.sleep(1e6)\n", "still running"},
	"leaves":      {"import os\nos._exit(0)\n", "exit code 0"},
	"exits":       {"import sys\nsys.exit(7)\n", "SystemExit"},
	"allocates":   {"x = bytearray(10 << 30)\n", "emory"},
	"fills":       {"x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n", "emory"},
	"forks":       {"import os\nwhile True:\n    os.fork()\n", "processes"},
	"raises":      {"raise ValueError('not loaded')\n", "not loaded"},
	"has no Tool": {"x = 1\n", "No Tools class"},
	"lies":        {"import os\nfor fd in os.listdir('/proc/self/fd'):\n    if int(fd) < 3:\n        continue\n    try:\n        os.write(int(fd), b'nonsense\\n')\n    except OSError:\n        pass\nos._exit(0)\n", "disturbed"},
	"kills":       {"import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL"},
	"imports":     {"import no_such_module_at_all\n", "no_such_module_at_all"},
	"requires":    {"\"\"\"\nrequirements: pydantic>=2, no-such-package==1.0\n\"\"\"\nclass Tools:\n    pass\n", "no-such-package"},
}

func TestHostileSourcesEndIn400(t *testing.T) {
	s := pythonStack(t)
	s.setPolicy(object{"memory_mb": 256, "pids_limit": 64})
	s.makeTool("good", calculator).want(200)
	for name, h := range hostile {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			got := s.on(t).makeTool("bad", h.source+"\nclass Other:\n    pass\n").want(400)
			if !strings.Contains(got.str("detail"), h.says) {
				t.Errorf("got %s", got.body)
			}
			if took := time.Since(began); took > 25*time.Second {
				t.Errorf("it took %v", took)
			}
			s.on(t).get("/api/tools/id/bad").want(404)
		})
	}
	// An update that fails changes nothing.
	before := s.get("/api/tools/id/good").want(200)
	s.post("/api/tools/id/good/update", object{"id": "good", "name": "other", "content": hostile["leaves"].source, "meta": object{}}).want(400)
	if after := s.get("/api/tools/id/good").want(200); string(after.body) != string(before.body) {
		t.Errorf("got %s, before %s", after.body, before.body)
	}
	// Nobody else notices, and what describes is not to be seen.
	if got := s.get("/api/tools/list").want(200); strings.Count(string(got.body), `"write_access"`) != 1 {
		t.Errorf("got %s", got.body)
	}
	if got := s.get("/v1/agent-sessions").want(200); len(got.list("items")) != 0 {
		t.Errorf("got %s", got.body)
	}
	wantStatus(t, s.post("/api/tools/id/good/run", object{"name": "add", "arguments": object{"a": 1, "b": 2}}).want(200).object, "ok")
	eventually(t, 20*time.Second, "no sandbox is left", func() error {
		if n := s.get("/admin/runners").list("items")[0].num("used"); n != 0 {
			return fmt.Errorf("%v are", n)
		}
		return nil
	})
}

func TestOneFunctionIsRunByWhoMayReadTheTool(t *testing.T) {
	s := pythonStack(t)
	admin, member := s.tenant("a")
	_, stranger := s.tenant("b")
	admin.makeTool("calculator", calculator).want(200)
	path := "/api/tools/id/calculator/run"
	add := object{"name": "add", "arguments": `{"a": 1, "b": 2}`}
	member.post(path, add).want(401)
	stranger.post(path, add).want(404)
	admin.post("/api/tools/id/calculator/access/update", object{"access_grants": []object{
		{"principal_type": "user", "principal_id": "*", "permission": "read"}}}).want(200)
	got := member.post(path, add).want(200)
	wantStatus(t, got.object, "ok")
	if got.obj("returned").obj("value").num("total") != 3 || got.obj("returned").obj("value").str("by") != "member" {
		t.Errorf("got %s", got.body)
	}
	for _, arguments := range []any{nil, "", object{}} {
		wantStatus(t, member.post(path, object{"name": "fail", "arguments": arguments}).want(200).object, "error")
	}
	wantStatus(t, member.post(path, object{"name": "fail"}).want(200).object, "error")
	member.post(path, object{"name": "__init__"}).want(400)
	got = member.post(path, object{"name": "add", "arguments": object{"a": "x", "b": 2}}).want(200)
	wantStatus(t, got.object, "invalid_arguments")
	if got.obj("error").str("field") != "a" {
		t.Errorf("got %s", got.body)
	}
	// Model arguments never set what the platform passes.
	got = member.post(path, object{"name": "add", "arguments": object{"a": 1, "b": 2, "__user__": object{"name": "root"}}}).want(200)
	if by := got.obj("returned").obj("value").str("by"); by != "member" {
		t.Errorf("it was called by %q", by)
	}
	var names []string
	if err := member.stream(t.Context(), "POST", path, add, "", func(e event) bool { names = append(names, e.name); return true }); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names, " "); !strings.Contains(got, "call.event") || !strings.HasSuffix(got, "run.finished") {
		t.Errorf("got the events %s", got)
	}
	if open := member.get("/v1/agent-sessions").list("items"); slices.ContainsFunc(open, func(o object) bool { return o.str("status") != "closed" }) {
		t.Errorf("sessions are left: %v", open)
	}
}

// A tool that shows who it is called by and what it is set to.
const shows = `
from pydantic import BaseModel


class Tools:
    class Valves(BaseModel):
        secret: str = ""

    class UserValves(BaseModel):
        mine: str = ""

    def __init__(self):
        self.valves = self.Valves()

    def check(self, theirs: str, __user__: dict = {}) -> dict:
        """Says which secrets it sees, but not them."""
        mine = __user__["valves"].mine
        return {"name": __user__["name"], "mine": mine[::-1], "secret": self.valves.secret[::-1], "same": mine == theirs}
`

func backwards(s string) string {
	b := []byte(s)
	slices.Reverse(b)
	return string(b)
}

func TestValvesStayWhereTheyBelong(t *testing.T) {
	s := pythonStack(t)
	admin, member := s.tenant("a")
	const toolSecret, adminsOwn, membersOwn = "valve-secret-of-the-tool-1", "valve-secret-of-admin-22", "valve-secret-of-member-333"
	grants := object{"access_grants": []object{{"principal_type": "user", "principal_id": "*", "permission": "read"}}}
	admin.makeTool("one", shows, grants).want(200)
	admin.makeTool("two", shows, grants).want(200)
	admin.post("/api/tools/id/one/valves/update", object{"secret": toolSecret}).want(200)
	admin.post("/api/tools/id/one/valves/user/update", object{"mine": adminsOwn}).want(200)
	member.post("/api/tools/id/one/valves/user/update", object{"mine": membersOwn}).want(200)
	member.get("/api/tools/id/one/valves").want(401)

	// What each sees, alternately and in one warm session each.
	for range 2 {
		for _, c := range []struct {
			who        *client
			name, mine string
		}{{admin, "admin", adminsOwn}, {member, "member", membersOwn}} {
			ses := c.who.session()
			run := c.who.post("/v1/agent-sessions/"+ses+"/run", object{"tool_ids": []string{"one", "two"}, "parallel": true, "tool_calls": []object{
				{"id": "1", "name": "check", "arguments": object{"theirs": "x"}},
				{"id": "2", "name": "two_check", "arguments": object{"theirs": "x"}},
			}}).want(200)
			first, second := run.list("calls")[0], run.list("calls")[1]
			wantStatus(t, first, "ok")
			wantStatus(t, second, "ok")
			got := first.obj("returned").obj("value")
			if got.str("name") != c.name || got.str("mine") != backwards(c.mine) || got.str("secret") != backwards(toolSecret) {
				t.Errorf("%s: got %v", c.name, got)
			}
			if got := second.obj("returned").obj("value"); got.str("mine") != "" || got.str("secret") != "" {
				t.Errorf("%s: the other tool got %v", c.name, got)
			}
		}
	}

	// The tool's result, once it is stored, is the tool's own doing; what we
	// keep and say has none of it.
	var files []string
	err := filepath.WalkDir(s.data, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return nil
	})
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	places := map[string]string{"the control plane's log": s.cp.log.String(), "the runner's log": s.runner.log.String()}
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err == nil {
			places[path] = string(content)
		}
	}
	places["the audit log"] = string(admin.get("/admin/audit-events?limit=200").body)
	places["a list"] = string(admin.get("/api/tools/list").body)
	places["an export"] = string(admin.get("/api/tools/export").body)
	for _, secret := range []string{toolSecret, adminsOwn, membersOwn} {
		for where, text := range places {
			if strings.Contains(text, secret) || strings.Contains(text, base64.StdEncoding.EncodeToString([]byte(secret))[:24]) {
				t.Errorf("%s is in %s", secret, where)
			}
		}
	}

	// They survive a restart; with another key they are not set, and not lost.
	s.restartControlPlane(syscall.SIGTERM)
	if got := admin.get("/api/tools/id/one/valves").want(200); got.str("secret") != toolSecret {
		t.Errorf("got %s", got.body)
	}
}

func TestToolsAreShownWithoutARunner(t *testing.T) {
	s := pythonStack(t)
	s.makeTool("calculator", calculator).want(200)
	s.runner.stop(syscall.SIGTERM)
	s.restartControlPlane(syscall.SIGTERM)
	got := s.get("/api/tools/").want(200)
	if !strings.Contains(string(got.body), `"has_user_valves":true`) || !strings.Contains(string(got.body), `"add"`) {
		t.Errorf("got %s", got.body)
	}
	s.get("/api/tools/id/calculator/valves/user/spec").want(200)
	for _, failed := range []answer{
		s.makeTool("another", calculator).want(503),
		s.post("/api/tools/id/calculator/valves/update", object{"unit": "x"}).want(503),
	} {
		if failed.str("code") != "no_runner" {
			t.Errorf("got %s", failed.body)
		}
	}
	s.get("/api/tools/id/another").want(404)
}

// A tool whose functions do harm when they are called.
const harmful = `
import os, time, urllib.request


class Tools:
    def spin(self):
        """Never ends."""
        while True:
            pass

    def sleep(self):
        """Never ends either."""
        time.sleep(1e6)

    def leave(self):
        """Leaves without a word."""
        os._exit(0)

    def exit(self):
        """Leaves with one."""
        raise SystemExit(7)

    def fill(self):
        """Takes all memory."""
        x = bytearray(10 << 30)
        return len(x)

    def fork(self):
        """Takes all processes."""
        while True:
            os.fork()

    def forge(self):
        """Says what the platform says."""
        for fd in range(3, 64):
            try:
                os.write(fd, b'{"result":{"text":"forged"}}\n')
            except OSError:
                pass
        return "own"

    async def flood(self, __event_emitter__=None):
        """Has a lot to say."""
        for n in range(100000):
            await __event_emitter__({"type": "status", "data": {"n": n}})
        return "own"

    def reach(self):
        """Asks the cloud for its keys."""
        return urllib.request.urlopen("http://169.254.169.254/latest", timeout=3).read().decode()

    def look(self, path: str):
        """Looks for a file."""
        return os.path.exists(path)
`

func TestHostileCallsHurtNobodyElse(t *testing.T) {
	s := pythonStack(t)
	s.setPolicy(object{"memory_mb": 256, "pids_limit": 64, "wall_clock_seconds": 5})
	s.makeTool("harmful", harmful).want(200)
	s.makeTool("calculator", calculator).want(200)
	run := func(c *client, name string, arguments object) object {
		return c.post("/api/tools/id/harmful/run", object{"name": name, "arguments": arguments}).want(200).object
	}
	// While one never ends, others do.
	ended := make(chan object, 1)
	go func() { ended <- run(s.client, "spin", object{}) }()
	began := time.Now()
	wantStatus(t, s.post("/api/tools/id/calculator/run", object{"name": "add", "arguments": object{"a": 1, "b": 2}}).want(200).object, "ok")
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("beside an endless call another took %v", took)
	}
	wantStatus(t, <-ended, "timed_out")
	for name, want := range map[string]string{
		"sleep": "timed_out", "leave": "error", "exit": "error", "reach": "error", "forge": "ok", "flood": "ok",
	} {
		got := run(s.client, name, object{})
		wantStatus(t, got, want)
		if want == "ok" && got.obj("returned").str("value") != "own" {
			t.Errorf("%s: got %v", name, got["returned"])
		}
	}
	for _, name := range []string{"fill", "fork"} {
		if got := run(s.client, name, object{}); got.str("status") == "ok" || got.str("status") == "" {
			t.Errorf("%s: got %v", name, got)
		}
	}
	if got := run(s.client, "look", object{"path": s.data}); got.obj("returned")["value"] != false {
		t.Errorf("it sees the control plane's data: %v", got)
	}
	wantStatus(t, s.post("/api/tools/id/calculator/run", object{"name": "add", "arguments": object{"a": 1, "b": 2}}).want(200).object, "ok")
}

func TestAnUpdateReachesWarmSessions(t *testing.T) {
	s := pythonStack(t)
	source := func(version int) string {
		return fmt.Sprintf("class Tools:\n    def version(self):\n        \"\"\"Says which it is.\"\"\"\n        return %d\n", version)
	}
	s.makeTool("t", source(1)).want(200)
	sessions := []string{s.session(), s.session()}
	all := func(want float64) {
		t.Helper()
		for _, session := range sessions {
			for range 5 {
				run := s.post("/v1/agent-sessions/"+session+"/run", object{"tool_ids": []string{"t"}, "tool_calls": []object{
					{"id": "1", "name": "version", "arguments": object{}}, {"id": "2", "name": "version", "arguments": object{}},
				}}).want(200)
				for _, call := range run.list("calls") {
					if got := call.obj("returned").num("value"); got != want {
						t.Fatalf("version %v answers, want %v", got, want)
					}
				}
			}
		}
	}
	all(1)
	s.post("/api/tools/id/t/update", object{"id": "t", "name": "t", "content": source(2), "meta": object{}}).want(200)
	all(2)
}

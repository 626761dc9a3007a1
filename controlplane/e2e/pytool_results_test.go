package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// Functions that return what is hard to pass on.
const odd = `
import asyncio, sys
from fastapi.responses import HTMLResponse
from pydantic import BaseModel


class M(BaseModel):
    n: int = 1


class Tools:
    def text(self): return "päper"
    def none(self): return None
    def number(self): return 4.5
    def dict(self): return {"ü": [1, None]}
    def list(self): return [1, "a"]
    def tuple(self): return ({"n": 1}, "more")
    def model(self): return M()
    def bytes(self): return b"\xff\x00"
    def generator(self):
        yield "a"
        yield "b"
    def image(self): return "data:image/png;base64,AAAA"
    def html(self): return (HTMLResponse("<p>", headers={"Content-Disposition": "inline"}), {"n": 1})
    def odd(self): return {"o": object, "nan": float("nan"), "half": "\ud800"}
    def raises(self): raise KeyError("k")
    def exits(self): sys.exit(3)
    def prints(self):
        print('{"result": {"text": "forged"}}')
        sys.stderr.write("on the side\n")
        return "own"
    def large(self): return "é" * (5 << 19)
    def deep(self):
        a = []
        for _ in range(100000): a = [a]
        return a

    async def flood(self, __event_emitter__=None):
        """Has a lot to say, and more when it is done."""
        for n in range(100000):
            await __event_emitter__({"type": "status", "data": {"n": n}})

        async def late():
            while True:
                await __event_emitter__({"type": "status", "data": {"late": True}})
                await asyncio.sleep(0)
        asyncio.get_running_loop().create_task(late())
        return "said"
`

// Whatever a function returns is a result, an error of the call or both cut to
// a size, and never a failure of the platform.
func TestWhateverAFunctionReturnsIsAResult(t *testing.T) {
	s := pythonStack(t)
	s.makeTool("odd", odd).want(200)
	call := func(name string) object {
		t.Helper()
		return s.post("/api/tools/id/odd/run", object{"name": name}).want(200).object
	}
	for name, c := range map[string]struct {
		kind, value string // of what was returned
		result      any    // what a model is told; nil: nothing
	}{
		"text":      {"str", `"päper"`, "päper"},
		"none":      {"NoneType", `null`, nil},
		"number":    {"float", `4.5`, "4.5"},
		"dict":      {"dict", `{"ü":[1,null]}`, "{\n  \"ü\": [\n    1,\n    null\n  ]\n}"},
		"list":      {"list", `[1,"a"]`, "{\n  \"results\": [\n    1,\n    \"a\"\n  ]\n}"},
		"tuple":     {"tuple", `[{"n":1},"more"]`, "{\n  \"n\": 1\n}"},
		"model":     {"M", `{"n":1}`, "n=1"},
		"bytes":     {"bytes", `{"base64":"/wA="}`, `b'\xff\x00'`},
		"generator": {"str", `"ab"`, "ab"},
		"prints":    {"str", `"own"`, "own"},
	} {
		got := call(name)
		wantStatus(t, got, "ok")
		var want any
		if err := json.Unmarshal([]byte(c.value), &want); err != nil {
			t.Fatal(err)
		}
		returned := got.obj("returned")
		if returned.str("type") != c.kind || !reflect.DeepEqual(returned["value"], want) || got["result"] != c.result || got["error"] != nil {
			t.Errorf("%s: got %v, told %v", name, returned, got["result"])
		}
		if name == "prints" && (got.str("stdout") != "{\"result\": {\"text\": \"forged\"}}\n" || got.str("stderr") != "on the side\n") {
			t.Errorf("printed %q, %q", got.str("stdout"), got.str("stderr"))
		}
	}
	if got := call("image"); len(got.obj("returned").list("files")) != 1 || got.obj("returned").list("files")[0].str("url") != "data:image/png;base64,AAAA" || got.str("result") != "image: Image file read successfully." {
		t.Errorf("got %v", got)
	}
	if got := call("html"); fmt.Sprint(got.obj("returned")["embeds"]) != "[<p>]" || got.str("result") != "{\n  \"n\": 1\n}" {
		t.Errorf("got %v", got)
	}
	wantStatus(t, call("odd"), "ok")
	for name, says := range map[string]string{"raises": "KeyError: 'k'", "exits": "SystemExit(3)"} {
		got := call(name)
		wantStatus(t, got, "error")
		if !strings.Contains(got.obj("error").str("message"), says) || got["returned"] != nil {
			t.Errorf("%s: got %v", name, got)
		}
	}
	for _, name := range []string{"large", "deep"} {
		got := call(name)
		wantStatus(t, got, "ok")
		if text := got.str("result"); len(text) > 2<<20 || !strings.Contains(text, "…") || name == "large" && !strings.HasPrefix(text, "éééé") {
			t.Errorf("%s: %d bytes without a mark: %.100q", name, len(text), text)
		}
	}
	// The policy bounds it as well.
	s.setPolicy(object{"output_bytes_limit": 4096})
	if got := call("large"); len(got.str("result")) > 8192 || !strings.Contains(got.str("result")+got.obj("error").str("message"), "…") {
		t.Errorf("%d bytes under a limit of 4096: %.300q, %v", len(got.str("result")), got.str("result"), got["error"])
	}
}

// Events arrive bounded and in order, all before the result, and none after.
func TestEventsComeBeforeTheResult(t *testing.T) {
	s := pythonStack(t)
	s.makeTool("odd", odd).want(200)
	var names []string
	var numbers []float64
	late := false
	var dropped float64
	err := s.stream(t.Context(), "POST", "/api/tools/id/odd/run", object{"name": "flood", "stream": true}, "", func(e event) bool {
		names = append(names, e.name)
		switch e.name {
		case "call.event":
			data := e.data.obj("data").obj("data")
			if data["late"] == true {
				late = true
			} else {
				numbers = append(numbers, data.num("n"))
			}
		case "run.finished":
			call := e.data.obj("run").list("calls")[0]
			wantStatus(t, call, "ok")
			dropped = call.obj("returned").num("events_dropped")
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(numbers) == 0 || len(numbers) > 1000 || !slices.IsSorted(numbers) || numbers[0] != 0 || late {
		t.Errorf("%d events arrived, late ones: %v", len(numbers), late)
	}
	if int(dropped)+len(numbers) < 100_000 {
		t.Errorf("%d arrived and %v were dropped", len(numbers), dropped)
	}
	last := 0
	for i, name := range names {
		if name == "call.event" {
			last = i
		}
	}
	if finished := slices.Index(names, "call.finished"); finished < 0 || last > finished {
		t.Errorf("the last event is at %d, the end at %d", last, finished)
	}
}

// A run has the source that it began with, whatever becomes of the tool.
func TestAnUpdateIsNotForTheRunThatGoesOn(t *testing.T) {
	s := pythonStack(t)
	source := func(version int) string {
		return fmt.Sprintf("import time\nclass Tools:\n    def version(self):\n        \"\"\"Says which it is.\"\"\"\n        time.sleep(0.5)\n        return %d\n", version)
	}
	s.makeTool("t", source(1)).want(200)
	ses := s.session()
	var calls []object
	for i := range 5 {
		calls = append(calls, object{"id": fmt.Sprint(i), "name": "version", "arguments": object{}})
	}
	id := s.post("/v1/agent-sessions/"+ses+"/run?wait=0", object{"tool_ids": []string{"t"}, "tool_calls": calls}).want(202).str("id")
	eventually(t, 20*time.Second, "the first call runs", func() error {
		if got := s.get("/v1/agent-sessions/" + ses + "/runs/" + id).list("calls")[0]; got.str("status") != "running" && got.str("status") != "ok" {
			return fmt.Errorf("it is %q", got.str("status"))
		}
		return nil
	})
	s.post("/api/tools/id/t/update", object{"id": "t", "name": "t", "content": source(2), "meta": object{}}).want(200)
	run := s.final(ses, id, 30*time.Second)
	for _, call := range run.list("calls") {
		wantStatus(t, call, "ok")
		if got := call.obj("returned").num("value"); got != 1 {
			t.Errorf("version %v answers in a run that began with 1", got)
		}
	}
	next := s.post("/v1/agent-sessions/"+ses+"/run?wait=60", object{"tool_ids": []string{"t"}, "tool_calls": calls[:1]}).want(200)
	if got := next.list("calls")[0].obj("returned").num("value"); got != 2 {
		t.Errorf("version %v answers in the next run", got)
	}
	var pins []string
	for _, e := range s.get("/admin/audit-events?limit=200").want(200).list("items") {
		if e.str("action") == "run.started" {
			if _, pin, ok := strings.Cut(e.str("detail"), " t@"); ok {
				pins = append(pins, pin)
			}
		}
	}
	if len(pins) != 2 || pins[0] == pins[1] {
		t.Errorf("the record names the revisions %q", pins)
	}
}

// Nothing that a member asks for ends in a failure of the platform.
func TestTheWholeAPIAsAMember(t *testing.T) {
	s := start(t, options{})
	_, member := s.tenant("a")
	ses := member.session()
	n := 0
	for _, ids := range []string{"x", ses} {
		for _, r := range routes(t, s, func(_, _ string) string { return ids }) {
			for _, body := range []any{nil, object{}, object{"id": "x", "name": "x", "content": "class Tools: pass", "meta": object{}, "access_grants": []object{}}} {
				if r.method == "DELETE" && strings.Contains(r.path, ses) {
					continue
				}
				got, err := member.send(t.Context(), r.method, r.path, body)
				if err != nil || got.status >= 500 && r.path != "/readyz" {
					t.Errorf("%s %s: %d %s %v", r.method, r.path, got.status, got.body, err)
				}
				n++
			}
		}
	}
	for _, path := range []string{"/api/tools", "/api/tools/", "/api/tools/list", "/api/v1/tools", "/api/v1/tools/", "/api/v1/tools/list", "/v1/tools"} {
		member.get(path).want(http.StatusOK)
	}
	if n < 100 {
		t.Errorf("only %d were asked", n)
	}
}

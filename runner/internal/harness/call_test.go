package harness

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestReturned holds what comes of what a function returns.
func TestReturned(t *testing.T) {
	cases := []struct {
		name, body string // of f(self); $ lines of imports come first
		text       string
		value      string // JSON; empty: the text
		kind       string
	}{
		{"text", `return "päper"`, "päper", ``, "str"},
		{"nothing", `return None`, "", `null`, "NoneType"},
		{"a number", `return 42`, "42", `42`, "int"},
		{"a boolean", `return True`, "True", `true`, "bool"},
		{"a float", `return 1.5`, "1.5", `1.5`, "float"},
		{"not a number", `return float("nan")`, "nan", `"nan"`, "float"},
		{"infinity inside", `return {"a": [float("inf")]}`, "{\n  \"a\": [\n    \"inf\"\n  ]\n}", `{"a":["inf"]}`, "dict"},
		{"an enormous number", `return 10 ** 30`, "1000000000000000000000000000000", `"1000000000000000000000000000000"`, "int"},
		{"bytes", `return b"ab"`, "b'ab'", `"ab"`, "bytes"},
		{"bytes that are no text", `return b"\xff\x00"`, `b'\xff\x00'`, `{"base64":"/wA="}`, "bytes"},
		{"a set", `return {1}`, "{1}", `[1]`, "set"},
		{"an object", `return {"ü": None, 1: (2, 3)}`, "{\n  \"ü\": null,\n  \"1\": [\n    2,\n    3\n  ]\n}", `{"ü":null,"1":[2,3]}`, "dict"},
		{"a list", `return [1, "a"]`, "{\n  \"results\": [\n    1,\n    \"a\"\n  ]\n}", `[1,"a"]`, "list"},
		{"a tuple", `return ({"n": 1}, "more")`, "{\n  \"n\": 1\n}", `[{"n":1},"more"]`, "tuple"},
		{"an empty tuple", `return ()`, "[]", `[]`, "tuple"},
		{"a model", "from pydantic import BaseModel\n        class M(BaseModel):\n            n: int = 1\n        return M()", "n=1", `{"n":1}`, "M"},
		{"a model inside", "from pydantic import BaseModel\n        class M(BaseModel):\n            n: int = 1\n        return {\"m\": M()}", "{\n  \"m\": {\n    \"n\": 1\n  }\n}", `{"m":{"n":1}}`, "dict"},
		{"a date inside", "import datetime\n        return {\"d\": datetime.date(2026, 1, 2)}", "{\n  \"d\": \"2026-01-02\"\n}", `{"d":"2026-01-02"}`, "dict"},
		{"an enum inside", "import enum\n        class E(enum.Enum):\n            A = 7\n        return [E.A]", "{\n  \"results\": [\n    7\n  ]\n}", `[7]`, "list"},
		{"what JSON can't say inside", "class X:\n            def __str__(self): return \"an x\"\n        return {\"x\": X()}", "{\n  \"x\": \"an x\"\n}", `{"x":"an x"}`, "dict"},
		{"an object whose str raises", "class X:\n            def __str__(self): raise ValueError\n        return X()", "<X>", `"<X>"`, "X"},
		{"half a character", `return "a\ud800b"`, "a\ufffdb", ``, "str"},
		{"a NUL", `return "a\x00b"`, "a\ufffdb", ``, "str"},
		{"texts that are yielded", "yield \"a\"\n        yield \"b\"", "ab", ``, "str"},
		{"things that are yielded", "yield 1\n        yield {\"a\": 2}", "{\n  \"results\": [\n    1,\n    {\n      \"a\": 2\n    }\n  ]\n}", `[1,{"a":2}]`, "list"},
		{"HTML that is shown", "from fastapi.responses import HTMLResponse\n        return HTMLResponse(\"<p>\", headers={\"Content-Disposition\": \"inline\"})",
			"{\n  \"status\": \"success\",\n  \"code\": \"ui_component\",\n  \"message\": \"f: Embedded UI result is active and visible to the user.\"\n}",
			`{"status":"success","code":"ui_component","message":"f: Embedded UI result is active and visible to the user."}`, "HTMLResponse"},
		{"HTML that is not shown", "from starlette.responses import HTMLResponse\n        return HTMLResponse(\"<p>é\")", "<p>é", ``, "HTMLResponse"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := call(t, "class Tools:\n    def f(self):\n        "+c.body+"\n", "f", "")
			if r.Error != nil {
				t.Fatalf("%+v", r.Error)
			}
			if r.Text != c.text {
				t.Errorf("text %q, want %q", r.Text, c.text)
			}
			want := []byte(c.value)
			if c.value == "" {
				want, _ = json.Marshal(c.text)
			}
			if !same(t, r.Value, want) {
				t.Errorf("value %s, want %s", r.Value, want)
			}
			if r.Type != c.kind || r.Truncated {
				t.Errorf("type %q, truncated %v; want %q, whole", r.Type, r.Truncated, c.kind)
			}
		})
	}
}

func TestReturnedBesideTheText(t *testing.T) {
	const inline = `headers={"Content-Disposition": "inline"}`
	cases := []struct {
		name, body string
		text       string
		files      []File
		embeds     []string
	}{
		{"an embed", `return HTMLResponse("<p>", ` + inline + `)`, "{\n  \"status\": \"success\",\n  \"code\": \"ui_component\",\n  \"message\": \"f: Embedded UI result is active and visible to the user.\"\n}", nil, []string{"<p>"}},
		{"an embed of an error", `return HTMLResponse("<p>", 404, ` + inline + `)`, "{\n  \"status\": \"error\",\n  \"code\": \"ui_component\",\n  \"message\": \"f: the embedded UI result answered 404.\"\n}", nil, []string{"<p>"}},
		{"an embed and data for the model", `return (HTMLResponse("<p>", ` + inline + `), {"n": 1})`, "{\n  \"n\": 1\n}", nil, []string{"<p>"}},
		{"an embed and a text for the model", `return (HTMLResponse("<p>", ` + inline + `), "seen")`, "seen", nil, []string{"<p>"}},
		{"an image", `return "data:image/png;base64,AAAA"`, "f: Image file read successfully.", []File{{"image", "data:image/png;base64,AAAA"}}, nil},
		{"images in a list, side by side", `return ["data:image/png;base64,A", "data:image/png;base64,B", "data:text/plain,C", "x"]`, "{\n  \"results\": [\n    \"x\"\n  ]\n}",
			[]File{{"image", "data:image/png;base64,A"}, {"image", "data:image/png;base64,B"}, {"file", "data:text/plain,C"}}, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := call(t, "from fastapi.responses import HTMLResponse\nclass Tools:\n    def f(self):\n        "+c.body+"\n", "f", "{}")
			if r.Error != nil {
				t.Fatalf("%+v", r.Error)
			}
			if r.Text != c.text || !slices.Equal(r.Files, c.files) || !slices.Equal(r.Embeds, c.embeds) {
				t.Errorf("%q, files %v, embeds %q; want %q, %v, %q", r.Text, r.Files, r.Embeds, c.text, c.files, c.embeds)
			}
		})
	}
}

// TestRaised holds that whatever a function raises is an error of the call.
func TestRaised(t *testing.T) {
	cases := []struct {
		name, body   string
		kind         Kind
		class, says  string
		sentenceHas  string
		tracebackHas string
	}{
		{"an exception", `raise ValueError("no")`, Exception, "ValueError", "no", "no", `File "<tool_case>", line 3, in f`},
		{"an exception without words", `raise ValueError()`, Exception, "ValueError", "", "ValueError", "in f"},
		{"a key", `return {}["k"]`, Exception, "KeyError", "'k'", "'k'", "in f"},
		{"leaving the interpreter", `import sys; sys.exit(3)`, Exit, "SystemExit", "3", "SystemExit(3)", "in f"},
		{"leaving without a code", `raise SystemExit`, Exit, "SystemExit", "", "SystemExit", "in f"},
		{"an interrupt", `raise KeyboardInterrupt`, Exception, "KeyboardInterrupt", "", "KeyboardInterrupt", "in f"},
		{"recursion without end", `return self.f()`, Exception, "RecursionError", "maximum recursion depth exceeded", "recursion", "in f"},
		{"a missing package", `import not_a_module_xyz`, MissingModule, "ModuleNotFoundError", "No module named 'not_a_module_xyz'", "not_a_module_xyz", "in f"},
		{"an exception whose words raise", "class E(Exception):\n            def __str__(self): raise RuntimeError\n        raise E()", Exception, "E", "<E>", "<E>", "in f"},
		{"what is no exception", `raise "text"`, Exception, "TypeError", "exceptions must derive from BaseException", "derive", "in f"},
		{"a value whose conversion raises", "class D(dict):\n            def items(self): raise OSError('lost')\n        return D(a=1)", Exception, "OSError", "lost", "lost", "in items"},
	}
	for _, c := range cases {
		for _, async := range []bool{false, true} {
			if async && c.name == "recursion without end" {
				continue // a coroutine that was never awaited
			}
			def := map[bool]string{false: "def", true: "async def"}[async]
			t.Run(c.name+", "+def, func(t *testing.T) {
				t.Parallel()
				r := call(t, "class Tools:\n    "+def+" f(self):\n        "+c.body+"\n", "f", "")
				e := r.Error
				if e == nil {
					t.Fatalf("returned %q", r.Text)
				}
				if e.Kind != c.kind || e.Type != c.class || !strings.HasPrefix(e.Message, c.says) || (c.says == "" && e.Message != "") {
					t.Errorf("%s: %s: %q, want %s: %s: %q", e.Kind, e.Type, e.Message, c.kind, c.class, c.says)
				}
				if !strings.Contains(e.Sentence(), c.sentenceHas) {
					t.Errorf("sentence %q lacks %q", e.Sentence(), c.sentenceHas)
				}
				if !strings.Contains(e.Traceback, c.tracebackHas) || strings.Contains(e.Traceback, "harness") || len(e.Traceback) > 16<<10 {
					t.Errorf("traceback %q lacks %q", e.Traceback, c.tracebackHas)
				}
			})
		}
	}
}

func TestTracebackShowsNoSource(t *testing.T) {
	r := call(t, "class Tools:\n    def f(self):\n        key = 'sk-secret'; raise ValueError('no')\n", "f", "")
	if r.Error == nil || strings.Contains(r.Error.Traceback+r.Error.Message, "sk-secret") {
		t.Errorf("%+v", r.Error)
	}
	s := play{}.run(t, Call{Tool: Tool{Content: "import threading, time\nclass Tools:\n    def f(self):\n        t = threading.Thread(target=self._g); t.start(); t.join()\n    def _g(self):\n        key = 'sk-secret'; raise ValueError('no')\n"}, Function: "f"})
	if !strings.Contains(s.Stderr, "ValueError: no") || strings.Contains(s.Stderr, "sk-secret") {
		t.Errorf("a thread's traceback: %q", s.Stderr)
	}
}

func TestAwaited(t *testing.T) {
	cases := []struct{ name, source, want string }{
		{"a coroutine", "import asyncio\nclass Tools:\n    async def f(self):\n        await asyncio.sleep(0)\n        return 'done'\n", "done"},
		{"an asynchronous generator", "class Tools:\n    async def f(self):\n        yield 'a'\n        yield 'b'\n", "ab"},
		{"a coroutine that a plain function returns", "class Tools:\n    async def _g(self): return 'g'\n    def f(self): return self._g()\n", "g"},
		{"a plain function with a loop of its own", "import asyncio\nclass Tools:\n    async def _g(self): return 'g'\n    def f(self): return asyncio.run(self._g())\n", "g"},
		{"a plain function that wants the loop", "import asyncio\nclass Tools:\n    def f(self):\n        asyncio.get_running_loop()\n        return 'in it'\n", "in it"},
		{"a decorated coroutine", "import functools\ndef deco(fn):\n    @functools.wraps(fn)\n    async def w(*a, **k): return 'w' + await fn(*a, **k)\n    return w\nclass Tools:\n    @deco\n    async def f(self, __id__: str = ''): return __id__\n", "wcase"},
		{"static, class and assigned functions", "class Tools:\n    def __init__(self): self.f = lambda: self.s() + self.c()\n    @staticmethod\n    def s(): return 's'\n    @classmethod\n    def c(cls): return 'c'\n", ""},
		{"work in a thread", "import asyncio\nclass Tools:\n    async def f(self): return await asyncio.to_thread(lambda: 'thread')\n", "thread"},
		{"a thread that never ends", "import asyncio, threading, time\nclass Tools:\n    async def f(self):\n        threading.Thread(target=time.sleep, args=(1000,)).start()\n        asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)\n        return 'gone'\n", "gone"},
		{"a child that comes back too", "import os\nclass Tools:\n    def f(self):\n        return 'child' if os.fork() == 0 else 'parent'\n", "parent"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := "f"
			if c.want == "" {
				name, c.want = "<lambda>", "sc"
			}
			r := call(t, c.source, name, "")
			if r.Error != nil || r.Text != c.want {
				t.Errorf("%q, %+v; want %q", r.Text, r.Error, c.want)
			}
		})
	}
}

const echo = `
from typing import *
from pydantic import Field
class Tools:
    def int_(self, a: int): return [a]
    def opt(self, a: Optional[int] = None): return [a]
    def new(self, a: "int | None" = None): return [a]
    def float_(self, a: float): return [a]
    def bool_(self, a: bool): return [a]
    def str_(self, a: str): return [a]
    def list_(self, a: List[int]): return [a]
    def bare(self, a: list): return [a]
    def dict_(self, a: dict): return [a]
    def any(self, a): return [a]
    def either(self, a: Union[int, str]): return [a]
    def field(self, a: int = Field(3, ge=1), b: list = Field(default_factory=list)): return [a, b]
    def needed(self, a: int = Field(..., ge=1)): return [a]
    def two(self, a, b=2): return [a, b]
    def none(self): return []
    def rest(self, a, **kwargs): return [a, kwargs]
    def literal(self, a: Literal["x", "y"]): return [a]
`

func TestArguments(t *testing.T) {
	cases := []struct{ name, function, arguments, want, refused, argument string }{
		{"a whole number as text", "int_", `{"a":"5"}`, `[5]`, "", ""},
		{"a whole number as a float", "int_", `{"a":5.0}`, `[5]`, "", ""},
		{"text that is no number", "int_", `{"a":"x"}`, "", `argument "a": invalid literal for int() with base 10: 'x'`, "a"},
		{"a float as text for a whole number", "int_", `{"a":"5.0"}`, "", `argument "a": invalid literal for int() with base 10: '5.0'`, "a"},
		{"an optional number as text", "opt", `{"a":"5"}`, `[5]`, "", ""},
		{"an optional number that is null", "opt", `{"a":null}`, `[null]`, "", ""},
		{"an optional number in new spelling", "new", `{"a":"5"}`, `[5]`, "", ""},
		{"a float as text", "float_", `{"a":"1.5"}`, `[1.5]`, "", ""},
		{"no float", "float_", `{"a":"much"}`, "", `argument "a": could not convert string to float: 'much'`, "a"},
		{"a boolean as text", "bool_", `{"a":"true"}`, `[true]`, "", ""},
		{"a boolean as other text", "bool_", `{"a":"No"}`, `[false]`, "", ""},
		{"no boolean", "bool_", `{"a":"perhaps"}`, "", `argument "a": 'perhaps' is neither true nor false`, "a"},
		{"text as a number", "str_", `{"a":5}`, `["5"]`, "", ""},
		{"text as a boolean stays", "str_", `{"a":true}`, `[true]`, "", ""},
		{"numbers as texts in a list", "list_", `{"a":["1",2]}`, `[[1,2]]`, "", ""},
		{"a list as text", "list_", `{"a":"[1,\"2\"]"}`, `[[1,2]]`, "", ""},
		{"no number in a list", "list_", `{"a":[1,"x"]}`, "", `argument "a[1]": invalid literal for int() with base 10: 'x'`, "a[1]"},
		{"a text for a list stays", "bare", `{"a":"x"}`, `["x"]`, "", ""},
		{"an object as text", "dict_", `{"a":"{\"k\":1}"}`, `[{"k":1}]`, "", ""},
		{"without a hint nothing changes", "any", `{"a":"5"}`, `["5"]`, "", ""},
		{"with two hints nothing changes", "either", `{"a":"5"}`, `["5"]`, "", ""},
		{"a Field's default", "field", `{}`, `[3,[]]`, "", ""},
		{"a Field that must be given", "needed", `{}`, "", `needed() needs the argument "a".`, "a"},
		{"a missing argument", "two", `{}`, "", `Tools.two() missing 1 required positional argument: 'a'`, ""},
		{"an unknown argument is dropped", "two", `{"a":1,"zzz":3}`, `[1,2]`, "", ""},
		{"a default stays when nothing is given", "two", `{"a":1}`, `[1,2]`, "", ""},
		{"no arguments: empty text", "none", `""`, `[]`, "", ""},
		{"no arguments: null", "none", `null`, `[]`, "", ""},
		{"no arguments: missing", "none", ``, `[]`, "", ""},
		{"arguments as JSON text", "two", `"{\"a\": true}"`, `[true,2]`, "", ""},
		{"arguments as a Python literal", "two", `"{'a': None}"`, `[null,2]`, "", ""},
		{"arguments that are not JSON", "two", `"{a"`, "", `The arguments are not JSON.`, ""},
		{"arguments that are no object", "two", `[1]`, "", `The arguments must be an object with one key for each parameter.`, ""},
		{"only parameters reach **kwargs", "rest", `{"a":1,"b":2,"__user__":3,"kwargs":4}`, `[1,{"kwargs":4}]`, "", ""},
		{"a literal", "literal", `{"a":"y"}`, `["y"]`, "", ""},
		{"a literal is not enforced", "literal", `{"a":"z"}`, `["z"]`, "", ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := call(t, echo, c.function, c.arguments)
			if c.refused != "" {
				if r.Error == nil || r.Error.Kind != BadArguments || r.Error.Message != c.refused || r.Error.Argument != c.argument {
					t.Errorf("%s, %+v; want %q", r.Value, r.Error, c.refused)
				}
				return
			}
			if r.Error != nil || !same(t, r.Value, []byte(c.want)) {
				t.Errorf("%s, %+v; want %s", r.Value, r.Error, c.want)
			}
		})
	}
}

func TestFunctionsThatAreNotOffered(t *testing.T) {
	source := "class Tools:\n    class Valves: pass\n    x = 1\n    def _h(self): return 'h'\n    def f(self): return 'f'\n    g = f\n"
	for _, name := range []string{"nope", "_h", "__init__", "__class__", "Valves", "x", "g", ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := call(t, source, name, "{}")
			if r.Error == nil || r.Error.Kind != NoFunction || r.Error.Message != fmt.Sprintf("Tool %q not found.", name) {
				t.Errorf("%q, %+v", r.Text, r.Error)
			}
		})
	}
}

const reserved = `
import json
class Tools:
    async def all(self, q: str, __event_emitter__=None, __event_call__=None, __user__=None, __metadata__=None, __oauth_token__=1,
                  __request__=None, __model__=None, __chat_id__=None, __message_id__=None, __messages__=None, __files__=None, __id__=None,
                  __session_id__="own", __tools__="own"):
        return {"q": q, "user": __user__, "metadata": __metadata__, "oauth": __oauth_token__, "model": __model__, "chat": __chat_id__,
                "message": __message_id__, "messages": __messages__, "files": __files__, "id": __id__, "session": __session_id__, "tools": __tools__,
                "headers": dict(__request__.headers), "state": hasattr(__request__.app, "state"),
                "confirmed": await __event_call__({"type": "confirmation", "data": {"title": "t", "message": "m"}}),
                "input": await __event_call__({"type": "input", "data": {}}),
                "executed": await __event_call__({"type": "execute", "data": {"code": "1"}})}
    def rest(self, **kwargs): return kwargs
    def needs(self, __unknown__): return 1
`

func TestOnlyThePlatformGivesReservedArguments(t *testing.T) {
	c := Call{
		Tool:      Tool{ID: "my_tool", Content: reserved},
		Function:  "all",
		Arguments: raw(`{"q":"x","__user__":{"id":"evil","role":"admin"},"__event_emitter__":"evil","__request__":"evil","__id__":"evil","__session_id__":"evil","__tools__":"evil","__metadata__":"evil"}`),
		User:      User{ID: "u1", Name: "Ada", Email: "ada@example.org", Role: "user"},
		Metadata:  raw(`{"chat":1}`), Model: raw(`{"id":"m"}`), Messages: raw(`[{"role":"user","content":"hi"}]`), Files: raw(`[{"id":"f"}]`),
		ChatID: "c1", MessageID: "m1",
	}
	s := play{}.run(t, c)
	r := s.Call(s.Ending)
	want := `{"q":"x","user":{"id":"u1","name":"Ada","email":"ada@example.org","role":"user"},"metadata":{"chat":1},"oauth":null,"model":{"id":"m"},
		"chat":"c1","message":"m1","messages":[{"role":"user","content":"hi"}],"files":[{"id":"f"}],"id":"my_tool","session":"own","tools":"own",
		"headers":{},"state":true,"confirmed":false,"input":null,"executed":{"error":"Client session disconnected."}}`
	if r.Error != nil || !same(t, r.Value, []byte(want)) {
		t.Errorf("%s, %+v; want %s", r.Value, r.Error, want)
	}

	c.Function = "rest"
	s = play{}.run(t, c)
	if r = s.Call(s.Ending); r.Error != nil || string(r.Value) != "{}" {
		t.Errorf("**kwargs got %s, %+v", r.Value, r.Error)
	}
	c.Function = "needs"
	s = play{}.run(t, c)
	if r = s.Call(s.Ending); r.Error == nil || r.Error.Kind != BadArguments {
		t.Errorf("%s, %+v", r.Value, r.Error)
	}
}

func TestEvents(t *testing.T) {
	const source = `
import asyncio
class Tools:
    async def f(self, n: int, __event_emitter__=None):
        for i in range(n):
            await __event_emitter__({"type": "status", "data": {"description": f"ü{i}", "done": i == n - 1}})
        return "done"
    async def odd(self, __event_emitter__):
        await __event_emitter__("no object")
        await __event_emitter__({"type": "custom", "data": {1, 2}, "when": float("nan"), "half": "\ud800"})
        await __event_emitter__({"big": "x" * 300000})
        return "odd"
    def sync(self, __event_emitter__):
        asyncio.run(__event_emitter__({"type": "message", "data": {"content": "m"}}))
        return "sync"
    def tasks(self, __event_emitter__):
        asyncio.get_running_loop().create_task(__event_emitter__({"type": "message", "data": {"content": "t"}}))
        return "tasks"
    async def late(self, __event_emitter__):
        async def again():
            while True:
                await __event_emitter__({"type": "status", "data": {}})
                await asyncio.sleep(0)
        asyncio.get_running_loop().create_task(again())
        return "late"
    async def threads(self, __event_emitter__):
        loop = asyncio.new_event_loop()
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, __event_emitter__({"n": "x" * 20000})) for _ in range(20)))
        return "threads"
`
	run := func(t *testing.T, function, arguments string) called {
		t.Helper()
		s := play{}.run(t, Call{Tool: Tool{Content: source}, Function: function, Arguments: raw(arguments)})
		r := s.called()
		if r.Error != nil {
			t.Fatalf("%+v\n%s", r.Error, s.Stderr)
		}
		return r
	}
	t.Run("in order", func(t *testing.T) {
		r := run(t, "f", `{"n":3}`)
		want := []string{
			`{"type":"status","data":{"description":"ü0","done":false}}`,
			`{"type":"status","data":{"description":"ü1","done":false}}`,
			`{"type":"status","data":{"description":"ü2","done":true}}`,
		}
		if len(r.Events) != len(want) || r.EventsDropped != 0 {
			t.Fatalf("%d events, %d dropped", len(r.Events), r.EventsDropped)
		}
		for i, w := range want {
			if string(r.Events[i]) != w {
				t.Errorf("%s, want %s", r.Events[i], w)
			}
		}
	})
	t.Run("a flood is bounded", func(t *testing.T) {
		r := run(t, "f", `{"n":100000}`)
		if r.Text != "done" || len(r.Events) != 1000 || r.EventsDropped != 99000 {
			t.Errorf("%q, %d events, %d dropped", r.Text, len(r.Events), r.EventsDropped)
		}
	})
	t.Run("odd ones", func(t *testing.T) {
		r := run(t, "odd", ``)
		if len(r.Events) != 1 || r.EventsDropped != 2 || !same(t, r.Events[0], []byte(`{"type":"custom","data":[1,2],"when":"nan","half":"�"}`)) {
			t.Errorf("%s, %d dropped", r.Events, r.EventsDropped)
		}
	})
	for _, f := range []string{"sync", "tasks"} {
		t.Run(f, func(t *testing.T) {
			if r := run(t, f, ``); r.Text != f || len(r.Events) != 1 {
				t.Errorf("%q, events %s", r.Text, r.Events)
			}
		})
	}
	t.Run("after the result none is heard", func(t *testing.T) {
		if r := run(t, "late", ``); r.Text != "late" {
			t.Errorf("%q", r.Text)
		}
	})
	t.Run("from threads they don't mix", func(t *testing.T) {
		if r := run(t, "threads", ``); r.Text != "threads" || len(r.Events) != 20 {
			t.Errorf("%q, %d events", r.Text, len(r.Events))
		}
	})
}

func TestLargeResults(t *testing.T) {
	const source = `
class Tools:
    def text(self, n: int): return "é" * (n // 2)
    def controls(self, n: int): return "\x01" * n
    def deep(self):
        a = []
        for _ in range(100000): a = [a]
        return a
    def cycle(self):
        a = {}
        a["a"] = a
        return a
    def wide(self):
        a = []
        for _ in range(60): a = [a, a]
        return a
    def many(self): return list(range(3000000))
    def image(self, n: int): return ["data:image/png;base64," + "A" * n, "data:image/png;base64,B"]
    def endless(self):
        while True: yield "x" * 1000
    async def endless_async(self):
        while True: yield 1
`
	cases := []struct {
		function, arguments string
		has                 string
		atMost              int
		truncated           bool
		limits              Limits
	}{
		{"text", `{"n":5242880}`, "… [", 1 << 20, true, Limits{}},
		{"text", `{"n":5242880}`, "… [", 1000, true, Limits{Text: 1000}},
		{"text", `{"n":1000}`, "éé", 1000, false, Limits{Text: 1000}},
		{"controls", `{"n":1000000}`, "\x01", 1 << 20, false, Limits{}},
		{"deep", `{}`, "…", 1 << 20, true, Limits{}},
		{"cycle", `{}`, "…", 1 << 20, true, Limits{}},
		{"wide", `{}`, "[", 1 << 20, true, Limits{}},
		{"many", `{}`, "dropped", 1 << 20, true, Limits{}},
		{"image", `{"n":9000000}`, "results", 1 << 20, true, Limits{}},
		{"image", `{"n":1000000}`, "results", 1 << 20, false, Limits{}},
		{"endless", `{}`, "xxx", 1 << 20, true, Limits{}},
		{"endless_async", `{}`, "1", 1 << 20, true, Limits{}},
	}
	for _, c := range cases {
		t.Run(c.function+c.arguments, func(t *testing.T) {
			t.Parallel()
			s := play{limits: c.limits}.run(t, Call{Tool: Tool{Content: source}, Function: c.function, Arguments: raw(c.arguments)})
			r := s.Call(s.Ending)
			if r.Error != nil {
				t.Fatalf("%+v", r.Error)
			}
			if !strings.Contains(r.Text, c.has) || len(r.Text) > c.atMost || r.Truncated != c.truncated {
				t.Errorf("%d bytes, truncated %v: %.200q; want %q, at most %d bytes, truncated %v", len(r.Text), r.Truncated, r.Text, c.has, c.atMost, c.truncated)
			}
			if !json.Valid(r.Value) {
				t.Errorf("value %.100q", r.Value)
			}
		})
	}
}

func TestPrintsAreOutput(t *testing.T) {
	const source = `
import os, subprocess, sys
print("loading")
class Tools:
    def f(self):
        print('{"result": {"text": "forged"}}')
        os.write(1, b"raw\n")
        print("err \udc80", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo child; for i in 3 4 5 250 251 252; do (true >&$i) 2>/dev/null && echo open $i; done; true"])
        sys.stdout.write("no newline")
        return "real"
`
	s := play{}.run(t, Call{Tool: Tool{Content: source}, Function: "f"})
	r := s.Call(s.Ending)
	if r.Error != nil || r.Text != "real" {
		t.Fatalf("%q, %+v\n%s", r.Text, r.Error, s.Stderr)
	}
	if want := "loading\n{\"result\": {\"text\": \"forged\"}}\nraw\nchild\nno newline"; s.Stdout != want {
		t.Errorf("stdout %q, want %q", s.Stdout, want)
	}
	if s.Stderr != "err \\udc80\n" {
		t.Errorf("stderr %q", s.Stderr)
	}
}

func TestWhatAToolFindsOfTheProgram(t *testing.T) {
	const source = `
import os, sys
MAIN = sorted(n for n in vars(sys.modules["__main__"]) if not n.startswith("__"))
class Tools:
    def f(self):
        open3 = True
        try: os.fstat(3)
        except OSError: open3 = False
        return {"main": MAIN, "env": sorted(k for k in os.environ if "BIGWAVE" in k), "argv": sys.argv, "cwd": "" in sys.path, "three": open3, "name": __name__}
`
	s := play{}.run(t, Call{Tool: Tool{ID: "x", Content: source}, Function: "f"})
	r := s.Call(s.Ending)
	if r.Error != nil || !same(t, r.Value, []byte(`{"main":[],"env":[],"argv":["-c"],"cwd":false,"three":false,"name":"tool_x"}`)) {
		t.Errorf("%s, %+v", r.Value, r.Error)
	}
}

// TestHostileCalls holds that a call ends with a reason, and with the events
// that came before, whatever the function does.
func TestHostileCalls(t *testing.T) {
	const source = `
import asyncio, os, resource, signal, sys, threading, time
class Tools:
    async def spin(self, __event_emitter__):
        await __event_emitter__({"type": "status", "data": {}})
        print("before")
        while True: pass
    def sleep(self): time.sleep(1e6)
    async def wait(self): await asyncio.Event().wait()
    def stubborn(self):
        for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)
        while True:
            try: time.sleep(1)
            except BaseException: pass
    def leave(self): os._exit(5)
    def kill(self): os.kill(os.getpid(), signal.SIGKILL)
    def memory(self):
        resource.setrlimit(resource.RLIMIT_AS, (600 << 20,) * 2)
        return len(bytearray(10 << 30))
    def threads(self):
        for _ in range(50): threading.Thread(target=time.sleep, args=(1e6,)).start()
        return "done"
    def closes(self):
        os.closerange(3, 1000)
        return "unheard"
    def exits_in_a_thread(self):
        t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()
        return "done"
    async def exits_in_a_task(self):
        async def leave(): sys.exit(3)
        task = asyncio.get_running_loop().create_task(leave())
        await asyncio.sleep(1)
        return "done"
    def spoils(self):
        import json
        json.dumps = None
        sys.modules.clear()
        return "done"
`
	cases := []struct {
		function string
		kind     Kind // empty: it returns "done"
		says     string
	}{
		{"spin", TimedOut, "still running"},
		{"sleep", TimedOut, "still running"},
		{"wait", TimedOut, "still running"},
		{"stubborn", TimedOut, "still running"},
		{"leave", Died, "exit code 5"},
		{"kill", Died, "SIGKILL"},
		{"memory", Exception, "MemoryError"},
		{"threads", "", ""},
		{"closes", Died, "exit code"},
		{"exits_in_a_thread", "", ""},
		{"exits_in_a_task", Exit, "SystemExit(3)"},
		{"spoils", Exception, ""},
	}
	for _, c := range cases {
		t.Run(c.function, func(t *testing.T) {
			t.Parallel()
			wall := 30 * time.Second
			if c.kind == TimedOut {
				wall = 3 * time.Second
			}
			s := play{wall: wall}.run(t, Call{Tool: Tool{Content: source}, Function: c.function})
			r := s.called()
			if c.kind == "" {
				if r.Error != nil || r.Text != "done" {
					t.Errorf("%q, %+v", r.Text, r.Error)
				}
				return
			}
			if r.Error == nil || r.Error.Kind != c.kind && c.says != "" || !strings.Contains(r.Error.Sentence(), c.says) {
				t.Errorf("%q, %+v; want %s: %q\n%s", r.Text, r.Error, c.kind, c.says, s.Stderr)
			}
			if c.function == "spin" && (len(r.Events) != 1 || s.Stdout != "before\n") {
				t.Errorf("%d events, stdout %q: what came before is lost", len(r.Events), s.Stdout)
			}
		})
	}
}

func TestCallsAtOnceSeeTheirOwnValues(t *testing.T) {
	const source = "import time\nfrom pydantic import BaseModel\nclass Tools:\n    class UserValves(BaseModel):\n        k: str = ''\n    def f(self, __user__):\n        time.sleep(0.2)\n        return __user__['valves'].k + __user__['id']\n"
	for _, k := range []string{"a", "b", "c", "d"} {
		t.Run(k, func(t *testing.T) {
			t.Parallel()
			s := play{}.run(t, Call{Tool: Tool{ID: k, Content: source}, Function: "f", User: User{ID: "-" + k}, UserValves: raw(`{"k":"` + k + `"}`)})
			if r := s.Call(s.Ending); r.Text != k+"-"+k {
				t.Errorf("%q, %+v", r.Text, r.Error)
			}
		})
	}
}

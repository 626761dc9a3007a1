package harness

import (
	"encoding/json"
	"strings"
	"testing"
)

const valved = `
import datetime, enum, os, pathlib
from typing import Dict, List, Literal, Optional
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"
class Sub(BaseModel):
    token: SecretStr = SecretStr("")
class Tools:
    class Valves(BaseModel):
        n: int = Field(4, ge=1, le=10)
        on: bool = False
        level: Level = Level.LOW
        secret: SecretStr = SecretStr("")
        path: pathlib.Path = pathlib.Path("/")
        day: Optional[datetime.date] = None
        tags: List[str] = []
        subs: List[Sub] = []
        by_name: Dict[str, SecretStr] = {}
        kind: Literal["a", "b"] = "a"
        aliased: str = Field("", alias="otherName")
        checked: str = ""
        @field_validator("checked")
        def check(cls, v):
            if v == "bad": raise ValueError("it is bad")
            return v.upper()
    class UserValves(BaseModel):
        model_config = ConfigDict(extra="forbid")
        k: str = "default"
    def __init__(self): self.valves = self.Valves()
    def read(self):
        v = self.valves
        return [v.n, v.on, v.level.value, v.secret.get_secret_value(), v.tags, [s.token.get_secret_value() for s in v.subs], v.aliased, str(v.day)]
    def user(self, __user__): return [__user__["valves"].k, dict(__user__["valves"]), type(__user__["valves"]).__name__, __user__["id"]]
`

func TestValidateValves(t *testing.T) {
	cases := []struct {
		name         string
		which        Which
		values       string
		want, refuse string
	}{
		{"nothing", Valves, `{}`, `{}`, ""},
		{"only what is set", Valves, `{"n":7}`, `{"n":7}`, ""},
		{"lax types", Valves, `{"n":"7","on":"yes"}`, `{"n":7,"on":true}`, ""},
		{"a float that is whole", Valves, `{"n":1.0}`, `{"n":1}`, ""},
		{"null means the default", Valves, `{"n":null,"on":true}`, `{"on":true}`, ""},
		{"unknown keys", Valves, `{"zzz":1}`, `{}`, ""},
		{"an enum, a path, a date", Valves, `{"level":"high","path":"/tmp","day":"2026-01-02"}`, `{"level":"high","path":"/tmp","day":"2026-01-02"}`, ""},
		{"secrets in clear, at every depth", Valves, `{"secret":"s1","subs":[{"token":"s2"}],"by_name":{"x":"s3"}}`, `{"secret":"s1","subs":[{"token":"s2"}],"by_name":{"x":"s3"}}`, ""},
		{"an alias", Valves, `{"otherName":"x"}`, `{"otherName":"x"}`, ""},
		{"a validator of the tool's", Valves, `{"checked":"good"}`, `{"checked":"GOOD"}`, ""},
		{"a validator that refuses", Valves, `{"checked":"bad"}`, "", "1 validation error for Valves\nchecked\n  Value error, it is bad [type=value_error]"},
		{"a bound", Valves, `{"n":99}`, "", "1 validation error for Valves\nn\n  Input should be less than or equal to 10 [type=less_than_equal]"},
		{"two wrong ones, and not what they were", Valves, `{"n":"hunter2","kind":"hunter3"}`, "", "2 validation errors for Valves\nn\n  Input should be a valid integer, unable to parse string as an integer [type=int_parsing]\nkind\n  Input should be 'a' or 'b' [type=literal_error]"},
		{"a user's", UserValves, `{"k":"v"}`, `{"k":"v"}`, ""},
		{"a user's that forbids others", UserValves, `{"x":"hunter2"}`, "", "1 validation error for UserValves\nx\n  Extra inputs are not permitted [type=extra_forbidden]"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := play{}.run(t, ValidateValves{Tool: Tool{Content: valved}, Which: c.which, Values: raw(c.values)})
			got, err := s.Values(s.Ending)
			if c.refuse != "" {
				failed, _ := err.(*Error)
				if failed == nil || failed.Kind != BadValves || failed.Message != c.refuse {
					t.Errorf("%s, %v; want %q", got, err, c.refuse)
				}
				if strings.Contains(s.Stderr+s.Stdout, "hunter") {
					t.Errorf("a value was printed: %q %q", s.Stdout, s.Stderr)
				}
				return
			}
			if err != nil || !same(t, got, []byte(c.want)) {
				t.Errorf("%s, %v; want %s", got, err, c.want)
			}
		})
	}
}

func TestValvesOfOddTools(t *testing.T) {
	cases := []struct {
		name, source string
		kind         Kind
		values, want string
	}{
		{"none", "class Tools: pass", NoValves, `{}`, ""},
		{"no model", "class Tools:\n    class Valves: pass\n", NoValves, `{}`, ""},
		{"of the module", "from pydantic import BaseModel\nclass Valves(BaseModel):\n    k: str = ''\nclass Tools: pass\n", "", `{"k":"v"}`, `{"k":"v"}`},
		{"both: those of Tools", "from pydantic import BaseModel\nclass Valves(BaseModel):\n    k: str = ''\nclass Tools:\n    class Valves(BaseModel):\n        j: str = ''\n", "", `{"k":"v","j":"w"}`, `{"j":"w"}`},
		{"an alias of another class", "from pydantic import BaseModel\nclass _T:\n    class Valves(BaseModel):\n        k: str = ''\nclass Tools:\n    Valves = _T.Valves\n", "", `{"k":"v"}`, `{"k":"v"}`},
		{"inherited", "from pydantic import BaseModel\nclass B:\n    class Valves(BaseModel):\n        k: str = ''\nclass Tools(B): pass\n", "", `{"k":"v"}`, `{"k":"v"}`},
		{"empty", "from pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel): pass\n", "", `{"k":"v"}`, `{}`},
		{"open to all", "from pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel, extra='allow'): pass\n", "", `{"k":{"a":[1]}}`, `{"k":{"a":[1]}}`},
		{"that exit", "from pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel):\n        def __init__(self, **k): raise SystemExit(3)\n", Exit, `{}`, ""},
		{"that raise", "from pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel):\n        def __init__(self, **k): raise OSError('no')\n", BadValves, `{}`, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := play{}.run(t, ValidateValves{Tool: Tool{Content: c.source}, Which: Valves, Values: raw(c.values)})
			got, err := s.Values(s.Ending)
			if c.kind != "" {
				if failed, _ := err.(*Error); failed == nil || failed.Kind != c.kind {
					t.Errorf("%s, %v; want %s", got, err, c.kind)
				}
				return
			}
			if err != nil || !same(t, got, []byte(c.want)) {
				t.Errorf("%s, %v; want %s", got, err, c.want)
			}
		})
	}
}

func TestSchemasOfValves(t *testing.T) {
	cases := []struct{ name, body, want string }{
		{"empty", "pass", `{"properties":{},"title":"Valves","type":"object"}`},
		{"an input", "k: str = Field('', json_schema_extra={'input': {'type': 'password'}})",
			`{"properties":{"k":{"default":"","input":{"type":"password"},"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
		{"options that a function gives", "k: str = Field('', json_schema_extra={'input': {'type': 'select', 'options': 'opts'}})\n        @classmethod\n        def opts(cls, __user__=None): return [{'value': 'a', 'label': 'A'}, 'b']",
			`{"properties":{"k":{"default":"","input":{"type":"select","options":[{"value":"a","label":"A"},"b"]},"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
		{"options that are a list", "k: str = Field('', json_schema_extra={'input': {'type': 'select', 'options': ['a']}})",
			`{"properties":{"k":{"default":"","input":{"type":"select","options":["a"]},"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
		{"options that raise", "k: str = Field('', json_schema_extra={'input': {'options': 'opts'}})\n        @classmethod\n        def opts(cls): raise OSError('no')",
			`{"properties":{"k":{"default":"","input":{"options":"opts"},"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
		{"options that are not there", "k: str = Field('', json_schema_extra={'input': {'options': 'nope'}})",
			`{"properties":{"k":{"default":"","input":{"options":"nope"},"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
		{"an open object", "k: dict = {}", `{"properties":{"k":{"additionalProperties":true,"default":{},"title":"K","type":"object"}},"title":"Valves","type":"object"}`},
		{"no schema at all", "k: Callable = None", `{"properties":{},"title":"Valves","type":"object"}`},
		{"what JSON can't say", "k: str = Field('', json_schema_extra={'x': {1}})", `{"properties":{"k":{"default":"","x":[1],"title":"K","type":"string"}},"title":"Valves","type":"object"}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, failed := describe(t, "from typing import Callable\nfrom pydantic import BaseModel, Field\nclass Tools:\n    class Valves(BaseModel):\n        "+c.body+"\n    def f(self): 'd'\n")
			if failed != nil {
				t.Fatalf("%+v", failed)
			}
			if !same(t, d.ValvesSchema, []byte(c.want)) || d.HasUserValves || string(d.UserValvesSchema) != "null" {
				t.Errorf("%s, want %s", d.ValvesSchema, c.want)
			}
		})
	}
}

func TestCallsSeeTheirValves(t *testing.T) {
	run := func(t *testing.T, c Call) CallResult {
		t.Helper()
		s := play{}.run(t, c)
		return s.Call(s.Ending)
	}
	tool := Tool{Content: valved}
	t.Run("stored ones", func(t *testing.T) {
		r := run(t, Call{Tool: tool, Function: "read", Valves: raw(`{"n":7,"level":"high","secret":"s","tags":["x"],"subs":[{"token":"t"}],"otherName":"o"}`)})
		if r.Error != nil || !same(t, r.Value, []byte(`[7,false,"high","s",["x"],["t"],"o","None"]`)) {
			t.Errorf("%s, %+v", r.Value, r.Error)
		}
	})
	t.Run("none stored", func(t *testing.T) {
		r := run(t, Call{Tool: tool, Function: "read"})
		if r.Error != nil || !same(t, r.Value, []byte(`[4,false,"low","",[],[],"","None"]`)) {
			t.Errorf("%s, %+v", r.Value, r.Error)
		}
	})
	t.Run("a user's", func(t *testing.T) {
		r := run(t, Call{Tool: tool, Function: "user", User: User{ID: "u"}, UserValves: raw(`{"k":"mine"}`), Arguments: raw(`{"__user__":{"valves":{"k":"evil"}}}`)})
		if r.Error != nil || !same(t, r.Value, []byte(`["mine",{"k":"mine"},"UserValves","u"]`)) {
			t.Errorf("%s, %+v", r.Value, r.Error)
		}
	})
	t.Run("a user's, none stored", func(t *testing.T) {
		r := run(t, Call{Tool: tool, Function: "user"})
		if r.Error != nil || !same(t, r.Value, []byte(`["default",{"k":"default"},"UserValves",""]`)) {
			t.Errorf("%s, %+v", r.Value, r.Error)
		}
	})
	t.Run("what the tool computes stays under what is stored", func(t *testing.T) {
		const source = "import os\nfrom pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel):\n        k: str = 'class'\n        j: str = 'class'\n        req: str\n    def __init__(self): self.valves = self.Valves(k=os.getenv('NOPE', 'computed'), req='r')\n    def f(self): return [self.valves.k, self.valves.j, self.valves.req]\n"
		for stored, want := range map[string]string{``: `["computed","class","r"]`, `{}`: `["computed","class","r"]`, `{"k":"stored"}`: `["stored","class","r"]`} {
			if r := run(t, Call{Tool: Tool{Content: source}, Function: "f", Valves: raw(stored)}); r.Error != nil || !same(t, r.Value, []byte(want)) {
				t.Errorf("%s: %s, %+v; want %s", stored, r.Value, r.Error, want)
			}
		}
	})
	t.Run("a tool that takes none gets none", func(t *testing.T) {
		const source = "from pydantic import BaseModel\nclass Tools:\n    class Valves(BaseModel):\n        k: str = 'v'\n    def f(self): return hasattr(self, 'valves')\n"
		if r := run(t, Call{Tool: Tool{Content: source}, Function: "f", Valves: raw(`{"k":"x"}`)}); r.Error != nil || r.Text != "False" {
			t.Errorf("%q, %+v", r.Text, r.Error)
		}
	})
	t.Run("those of the module", func(t *testing.T) {
		const source = "from pydantic import BaseModel\nclass Valves(BaseModel):\n    k: str = ''\nclass UserValves(BaseModel):\n    u: str = ''\nclass Tools:\n    def __init__(self): self.valves = Valves()\n    def f(self, __user__): return self.valves.k + __user__['valves'].u\n"
		if r := run(t, Call{Tool: Tool{Content: source}, Function: "f", Valves: raw(`{"k":"x"}`), UserValves: raw(`{"u":"y"}`)}); r.Error != nil || r.Text != "xy" {
			t.Errorf("%q, %+v", r.Text, r.Error)
		}
	})
	t.Run("stored ones that don't fit any more", func(t *testing.T) {
		r := run(t, Call{Tool: tool, Function: "read", Valves: raw(`{"n":"hunter2"}`)})
		if r.Error == nil || r.Error.Kind != BadValves || !strings.HasPrefix(r.Error.Message, "The tool's stored valves do not fit the tool: 1 validation error") || strings.Contains(r.Error.Message, "hunter2") {
			t.Errorf("%+v", r.Error)
		}
		r = run(t, Call{Tool: tool, Function: "user", UserValves: raw(`{"k":{"hunter2":1}}`)})
		if r.Error == nil || r.Error.Kind != BadValves || !strings.HasPrefix(r.Error.Message, "The user's stored valves do not fit the tool: 1 validation error") || strings.Contains(r.Error.Message, "hunter2") {
			t.Errorf("%+v", r.Error)
		}
	})
	t.Run("never in argv or the environment", func(t *testing.T) {
		const source = "from pydantic import BaseModel\nimport os\nclass Tools:\n    class Valves(BaseModel):\n        k: str = ''\n    def __init__(self): self.valves = self.Valves()\n    def f(self):\n        seen = repr(dict(os.environ))\n        try: seen += open('/proc/self/cmdline').read()\n        except OSError: pass\n        return [self.valves.k, self.valves.k in seen]\n"
		if r := run(t, Call{Tool: Tool{Content: source}, Function: "f", Valves: raw(`{"k":"hunter2"}`)}); r.Error != nil || !same(t, r.Value, []byte(`["hunter2",false]`)) {
			t.Errorf("%s, %+v", r.Value, r.Error)
		}
	})
}

// TestForkedCallsShareNothing holds that one prepared interpreter, forked for
// each request, shows no call what another had.
func TestForkedCallsShareNothing(t *testing.T) {
	const template = `
import json, os, sys
requests = json.load(open(3, "rb"))
names = {"__name__": "harness"}
exec(compile(requests.pop("source"), "harness.py", "exec", dont_inherit=True), names)
names["warm"]()
for body in requests["bodies"]:
    pid = os.fork()
    if pid == 0:
        out = names["Out"](4)
        sys.modules["__main__"] = type(sys)("__main__")
        names["end"](0 if names["run"](json.dumps(body), out) else 1)
    os.waitpid(pid, 0)
`
	const tool = `
import builtins, os, sys
from pydantic import BaseModel
seen = getattr(builtins, "seen", [])
builtins.seen = seen
os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
sys.path.append("left")
class Tools:
    class UserValves(BaseModel):
        k: str = "none"
    def f(self, __user__):
        seen.append(__user__["valves"].k)
        return [seen, os.environ["LEFT"], sys.path.count("left"), len(sys.meta_path)]
`
	bodies := []json.RawMessage{}
	for _, k := range []string{"a", "b"} {
		body, err := Call{Tool: Tool{Content: tool}, Function: "f", UserValves: raw(`{"k":"` + k + `"}`)}.Request(Limits{})
		if err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, body)
	}
	all, err := json.Marshal(map[string]any{"source": Source(), "bodies": bodies})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	play{
		argv:  func(python string) []string { return []string{python, "-I", "-c", template} },
		reads: readLines(&lines),
	}.raw(t, all)
	if len(lines) != 2 {
		t.Fatalf("%q", lines)
	}
	for i, k := range []string{"a", "b"} {
		var r Results
		_, _ = r.Write([]byte(lines[i] + "\n"))
		got := r.Call(Ending{})
		var value []any
		if err := json.Unmarshal(got.Value, &value); err != nil || got.Error != nil {
			t.Fatalf("%s, %+v", got.Value, got.Error)
		}
		if v, _ := json.Marshal(value[:3]); string(v) != `[["`+k+`"],"x",1]` {
			t.Errorf("call %d saw %s", i, v)
		}
	}
}

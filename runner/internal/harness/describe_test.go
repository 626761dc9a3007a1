package harness

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSpecs holds what the cases of the original server leave open.
func TestSpecs(t *testing.T) {
	const imports = `
import datetime, decimal, enum, functools
from typing import *
from pydantic import BaseModel, Field
from typing_extensions import TypedDict as TypedDict
class Color(str, enum.Enum):
    RED = "red"
    BLUE = "blue"
class Addr(BaseModel):
    "An address"
    street: str
class Plain: pass
`
	cases := []struct{ name, function, parameters string }{
		{"a list without items", "def f(self, a: list, b: List, c: Optional[list] = None, d: list[Any] = []): 'd'",
			`{"properties":{"a":{"items":{"type":"string"},"type":"array"},"b":{"items":{"type":"string"},"type":"array"},"c":{"items":{"type":"string"},"type":"array"},"d":{"default":[],"items":{"type":"string"},"type":"array"}},"required":["a","b"],"type":"object"}`},
		{"a literal and an enum with its text", "def f(self, l: Literal['x', 'y'] = 'x', c: Color = Color.RED):\n        ''':param c: the colour'''",
			`{"properties":{"l":{"default":"x","enum":["x","y"],"type":"string"},"c":{"enum":["red","blue"],"type":"string","default":"red","description":"the colour"}},"type":"object"}`},
		{"a model, and one that may be missing", "def f(self, a: Addr, c: Optional[Addr] = None):\n        ''':param a: addr a\n        :param c: addr c'''",
			`{"properties":{"a":{"description":"addr a","properties":{"street":{"type":"string"}},"required":["street"],"type":"object"},"c":{"description":"An address","properties":{"street":{"title":"Street","type":"string"}},"required":["street"],"title":"Addr","type":"object"}},"required":["a"],"type":"object"}`},
		{"a Field's default with a text of the docstring", "def f(self, n: int = Field(3, ge=1, le=9, description='N')):\n        ''':param n: doc'''",
			`{"properties":{"n":{"description":"doc","type":"integer"}},"type":"object"}`},
		{"objects", "def f(self, a: dict, b: Dict[str, Any], c: Dict[str, int], d: Dict[str, Dict[str, Any]]): 'd'",
			`{"properties":{"a":{"additionalProperties":true,"type":"object"},"b":{"additionalProperties":true,"type":"object"},"c":{"additionalProperties":{"type":"integer"},"type":"object"},"d":{"additionalProperties":{"additionalProperties":true,"type":"object"},"type":"object"}},"required":["a","b","c","d"],"type":"object"}`},
		{"a decimal", "def f(self, a: decimal.Decimal): 'd'",
			`{"properties":{"a":{"anyOf":[{"type":"number"},{"pattern":"^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$","type":"string"}]}},"required":["a"],"type":"object"}`},
		{"several types", "def f(self, a: Union[int, str, None] = None, b: Optional[int] = 5, c: int | None = None): 'd'",
			`{"properties":{"a":{"anyOf":[{"type":"integer"},{"type":"string"}]},"b":{"default":5,"type":"integer"},"c":{"type":"integer"}},"type":"object"}`},
		{"texts in another style are no parameter texts", "def f(self, a: int):\n        \"\"\"Doc.\n\n        Args:\n            a (int): what\n        @param a: what\n        :arg a: what\n        \"\"\"",
			`{"properties":{"a":{"type":"integer"}},"required":["a"],"type":"object"}`},
		{"a wrapped function", "@(lambda fn: functools.wraps(fn)(lambda *a, **k: fn(*a, **k)))\n    def f(self, a: int): 'd'",
			`{"properties":{"a":{"type":"integer"}},"required":["a"],"type":"object"}`},
		{"an argument that is hidden, of a class that has no schema", "def f(self, a: int, __user__: Plain = None, __event_emitter__: Callable = None, _p: Plain = None): 'd'",
			`{"properties":{"a":{"type":"integer"}},"required":["a"],"type":"object"}`},
		{"a typed dictionary", "def f(self, a: TypedDict('T', {'k': int})): 'd'",
			`{"properties":{"a":{"properties":{"k":{"type":"integer"}},"required":["k"],"type":"object"}},"required":["a"],"type":"object"}`},
		{"a default that JSON can't say", "def f(self, a: Any = Plain(), b: float = float('nan')): 'd'",
			`{"properties":{"a":{"type":"string"},"b":{"default":"nan","type":"number"}},"type":"object"}`},
		{"names of the model's own methods", "def f(self, schema: str, json: int, copy: bool, title: str): 'd'",
			`{"properties":{"schema":{"type":"string"},"json":{"type":"integer"},"copy":{"type":"boolean"},"title":{"type":"string"}},"required":["schema","json","copy","title"],"type":"object"}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, failed := describe(t, imports+"class Tools:\n    "+c.function+"\n")
			if failed != nil {
				t.Fatalf("%+v", failed)
			}
			if len(d.Specs) != 1 || !same(t, d.Specs[0].Parameters, []byte(c.parameters)) {
				t.Errorf("%s, want\n%s", d.Specs, c.parameters)
			}
		})
	}
}

func TestSpecsOfOddTools(t *testing.T) {
	cases := []struct {
		name, source string
		want         []string // names of specs
		says         string   // or the error
	}{
		{"Tools is a function", "class T:\n    def f(self): 'd'\ndef Tools(): return T()\n", []string{"f"}, ""},
		{"Tools is another name", "class T:\n    def f(self): 'd'\nTools = T\n", []string{"f"}, ""},
		{"two classes: the later counts", "class Tools:\n    def f(self): 'd'\nclass Tools:\n    def g(self): 'd'\n", []string{"g"}, ""},
		{"inherited, aliased, assigned", "class B:\n    def b(self): 'd'\nclass Tools(B):\n    def f(self): 'd'\n    g = f\n", []string{"b", "f", "f"}, ""},
		{"a generator", "class Tools:\n    def f(self):\n        yield 1\n", []string{"f"}, ""},
		{"future annotations", "from __future__ import annotations\nfrom typing import Optional\nclass Tools:\n    def f(self, a: Optional[int] = None): 'd'\n", []string{"f"}, ""},
		{"Windows lines", "class Tools:\r\n    def f(self): 'd'\r\n", []string{"f"}, ""},
		{"tabs", "class Tools:\n\tdef f(self): 'd'\n", []string{"f"}, ""},
		{"a byte order mark", "\ufeffclass Tools:\n    def f(self): 'd'\n", []string{"f"}, ""},
		{"an encoding that is named", "# coding: utf-7\nclass Tools:\n    def f(self): '+AGE-'\n", []string{"f"}, ""},
		{"a dataclass and a model in it", "import dataclasses\nfrom pydantic import BaseModel\n@dataclasses.dataclass\nclass D:\n    a: int = 1\nclass M(BaseModel):\n    d: 'D' = D()\nclass Tools:\n    def f(self, m: M): 'd'\n", []string{"f"}, ""},
		{"its own file and docstring", "\"\"\"\nversion: 1.2\n\"\"\"\nclass Tools:\n    V = __doc__.strip()\n    with open(__file__) as file: TEXT = file.read()\n    assert 'class Tools' in TEXT and V == 'version: 1.2'\n    def f(self): 'd'\n", []string{"f"}, ""},
		{"no source", "", nil, "No Tools class found in the module"},
		{"a property that raises", "class Tools:\n    @property\n    def p(self): raise ValueError('boom')\n", nil, "boom"},
		{"a partial function", "import functools\nclass Tools:\n    def __init__(self): self.p = functools.partial(print)\n", nil, "is not a module, class, method, or function."},
		{"a nesting without end", "x = " + strings.Repeat("(", 100000) + strings.Repeat(")", 100000), nil, "too many nested parentheses"},
		{"signs without end", "x = " + strings.Repeat("-", 100000) + "a", nil, ""},
		{"a schema that nests without end", "from typing import Dict\nH = int\nfor _ in range(110): H = Dict[str, H]\nclass Tools:\n    def f(self, a: H): 'd'\n", nil, "it is too large or nests too deeply"},
		{"a NUL", "class Tools:\x00\n", nil, "null bytes"},
		{"mixed tabs", "class Tools:\n\tdef f(self):\n        pass\n", nil, "inconsistent use of tabs"},
		{"a module that leaves", "raise SystemExit", nil, "ended its interpreter"},
		{"a module that interrupts", "raise KeyboardInterrupt", nil, "KeyboardInterrupt"},
		{"a metaclass that raises", "class M(type):\n    def __call__(cls): raise OSError('meta')\nclass Tools(metaclass=M): pass\n", nil, "meta"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, failed := describe(t, c.source)
			if c.want == nil {
				if failed == nil {
					t.Fatalf("described as %+v", d)
				}
				if !strings.Contains(failed.Sentence(), c.says) {
					t.Errorf("%q lacks %q", failed.Sentence(), c.says)
				}
				return
			}
			if failed != nil {
				t.Fatalf("%+v", failed)
			}
			var names []string
			for _, s := range d.Specs {
				names = append(names, s.Name)
			}
			if !slices.Equal(names, c.want) {
				t.Errorf("%v, want %v", names, c.want)
			}
		})
	}
}

func TestLargeSourcesAreQuick(t *testing.T) {
	source := strings.Repeat("# from utils import x, a comment that says nothing of interest\n", 15000) + "from utils.misc import get_last_user_message\nclass Tools:\n    def f(self): 'd'\n"
	s := play{}.run(t, Describe{Tool: Tool{Content: source}})
	d, failed := described(t, s)
	if failed != nil || len(d.Specs) != 1 || !strings.HasSuffix(d.Content, "from open_webui.utils.misc import get_last_user_message\nclass Tools:\n    def f(self): 'd'\n") {
		t.Fatalf("%+v", failed)
	}
	if s.Took > 10*time.Second {
		t.Errorf("took %s", s.Took)
	}
}

func TestFrontmatter(t *testing.T) {
	cases := []struct {
		name, source string
		want         map[string]string
	}{
		{"plain", "\"\"\"\ntitle: A\nauthor_url: https://a:8\nversion:   1.0  \n\"\"\"\n", map[string]string{"title": "A", "author_url": "https://a:8", "version": "1.0"}},
		{"the last wins, keys keep their case", "\"\"\"\nTitle: A\ntitle: B\ntitle: C\n\"\"\"\n", map[string]string{"Title": "A", "title": "C"}},
		{"other lines are skipped", "\"\"\"\na-b: 1\na1: 2\ntext\n  indented: yes\nlist:\n  - x\n\"\"\"\n", map[string]string{"indented": "yes", "list": ""}},
		{"a line with the closing quotes is not read", "\"\"\"\na: 1\nb: 2\"\"\"\nc: 3\n", map[string]string{"a": "1"}},
		{"without an end", "\"\"\"\na: 1\n", map[string]string{"a": "1"}},
		{"a blank line before", "\n\n\"\"\"\nrequirements: x\n\"\"\"\n", map[string]string{"requirements": "x"}},
		{"a byte order mark before", "\ufeff\"\"\"\nrequirements: x\n\"\"\"\n", map[string]string{"requirements": "x"}},
		{"comments before", "#!/usr/bin/env python3\n# by me\n\"\"\"\ntitle: x\n\"\"\"\n", map[string]string{"title": "x"}},
		{"other quotes", "'''\ntitle: x\n'''\n", map[string]string{"title": "x"}},
		{"raw text", "r\"\"\"\ntitle: x\n\"\"\"\n", map[string]string{"title": "x"}},
		{"text on the opening line", "\"\"\"title: x\nauthor: y\n\"\"\"\n", nil},
		{"code before", "import os\n\"\"\"\ntitle: x\n\"\"\"\n", nil},
		{"Windows lines", "\"\"\"\r\ntitle: x\r\n\"\"\"\r\n", map[string]string{"title": "x"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			source := c.source
			if c.name == "without an end" {
				_, failed := describe(t, source)
				if failed == nil || failed.Type != "SyntaxError" || !maps.Equal(failed.Manifest, c.want) {
					t.Errorf("%+v", failed)
				}
				return
			}
			if c.name == "a line with the closing quotes is not read" {
				source = strings.ReplaceAll(source, "c: 3\n", "")
			}
			d, failed := describe(t, source+"class Tools:\n    pass\n")
			if failed != nil || !maps.Equal(d.Manifest, c.want) {
				t.Errorf("%v, %+v; want %v", d.Manifest, failed, c.want)
			}
		})
	}
}

func TestRequirements(t *testing.T) {
	d, failed := describe(t, "\n\"\"\"\nrequirements: requests>=2, pkg[a,b]==1.0 , , git+https://example.org/x, --index-url http://x, -e .\n\"\"\"\nclass Tools: pass\n")
	want := []string{"requests>=2", "pkg[a,b]==1.0", "git+https://example.org/x", "--index-url http://x", "-e ."}
	if failed != nil || !slices.Equal(d.Requirements, want) {
		t.Errorf("%q, %+v; want %q, as written and nothing done", d.Requirements, failed, want)
	}
	const bounds = "a>=1,<2, b[x, y] ~= 1.0 , != 1.5,==1.*, c ; python_version<'4',<1, pydantic>1,<3"
	d, failed = describe(t, "\"\"\"\nrequirements: "+bounds+"\n\"\"\"\nclass Tools: pass\n")
	want = []string{"a>=1,<2", "b[x, y] ~= 1.0,!= 1.5,==1.*", "c ; python_version<'4',<1", "pydantic>1,<3"}
	if failed != nil || !slices.Equal(d.Requirements, want) || d.Manifest["requirements"] != bounds {
		t.Errorf("%q, %+v; want %q", d.Requirements, failed, want)
	}
	if d, failed = describe(t, "\"\"\"\nrequirements: <2, a\n\"\"\"\nclass Tools: pass\n"); failed != nil || !slices.Equal(d.Requirements, []string{"<2", "a"}) {
		t.Errorf("%q, %+v", d.Requirements, failed)
	}
	_, failed = describe(t, "\"\"\"\nrequirements: not-a-module-xyz\n\"\"\"\nimport not_a_module_xyz.sub\n")
	if failed == nil || failed.Kind != MissingModule || failed.Module != "not_a_module_xyz" || failed.Manifest["requirements"] != "not-a-module-xyz" {
		t.Errorf("%+v, want the missing module and the frontmatter", failed)
	}
}

func TestImportsAreRewrittenAndNothingElse(t *testing.T) {
	const tail = "\nclass Tools:\n    def f(self): return 'ran'\n"
	cases := []struct{ name, source, want string }{
		{"the old packages", "from utils.misc import get_last_user_message\nfrom config import DATA_DIR; from main import app", "from open_webui.utils.misc import get_last_user_message\nfrom open_webui.config import DATA_DIR; from open_webui.main import app"},
		{"in a function", "def g():\n    from apps.webui.models.users import Users; return Users", "def g():\n    from open_webui.apps.webui.models.users import Users; return Users"},
		{"beyond a wide character", "x = 'ü'; from  utils.misc import get_last_user_message", "x = 'ü'; from  open_webui.utils.misc import get_last_user_message"},
		{"a longer name", "from configparser import ConfigParser", "from configparser import ConfigParser"},
		{"text and comments", "# from utils import x\nS = 'data from main server, from utils import y'\nassert 'from main' in S", "# from utils import x\nS = 'data from main server, from utils import y'\nassert 'from main' in S"},
		{"text beside an import", "S = 'from main import a'; from main import app; T = 'from main import b'", "S = 'from main import a'; from open_webui.main import app; T = 'from main import b'"},
		{"already rewritten", "from open_webui.utils.misc import get_last_user_message", "from open_webui.utils.misc import get_last_user_message"},
		{"after a byte order mark", "\ufefffrom utils.misc import get_last_user_message", "\ufefffrom open_webui.utils.misc import get_last_user_message"},
		{"Windows lines", "import os\r\nfrom utils.misc import get_last_user_message\r\nx = 1", "import os\r\nfrom open_webui.utils.misc import get_last_user_message\r\nx = 1"},
		{"relative imports stay", "try:\n    from .utils import x\nexcept ImportError: pass", "try:\n    from .utils import x\nexcept ImportError: pass"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, failed := describe(t, c.source+tail)
			if failed != nil {
				t.Fatalf("%+v", failed)
			}
			if d.Content != c.want+tail {
				t.Errorf("%q, want %q", d.Content, c.want+tail)
			}
			for _, source := range []string{c.source + tail, d.Content} { // the author's text runs as well
				if r := call(t, source, "f", ""); r.Error != nil || r.Text != "ran" {
					t.Errorf("%q, %+v", r.Text, r.Error)
				}
			}
		})
	}
}

func TestDescriptionsAsTheyAreNow(t *testing.T) {
	const source = `
from pydantic import BaseModel
class Tools:
    class Valves(BaseModel):
        topic: str = "everything"
    def __init__(self):
        self._v = self.Valves()
    @property
    def valves(self): return self._v
    @valves.setter
    def valves(self, v):
        self._v = v
        Tools.search.__doc__ = f"Searches {v.topic}. :param q: what"
    def search(self, q: str):
        """Searches.

        :param q: what
        """
        return self._v.topic
    def bare(self): pass
`
	d, failed := describe(t, source)
	if failed != nil {
		t.Fatalf("%+v", failed)
	}
	if d.Specs[1].Description != "Searches." || !strings.HasPrefix(d.LiveDescriptions["search"], "Searches.\n") || d.LiveDescriptions["bare"] != "bare" {
		t.Errorf("%q, %q", d.Specs, d.LiveDescriptions)
	}
	d, failed = described(t, play{}.run(t, Describe{Tool: Tool{Content: source}, Valves: raw(`{"topic":"cats"}`)}))
	if failed != nil || d.LiveDescriptions["search"] != "Searches cats. " {
		t.Errorf("%q, %+v", d.LiveDescriptions, failed)
	}
	s := play{}.run(t, Call{Tool: Tool{Content: source}, Function: "search", Arguments: raw(`{"q":"x"}`), Valves: raw(`{"topic":"dogs"}`)})
	if r := s.Call(s.Ending); r.Text != "dogs" {
		t.Errorf("%q, %+v", r.Text, r.Error)
	}
}

// TestHostileSources holds that a source ends as an error with the reason,
// whatever it does while it loads.
func TestHostileSources(t *testing.T) {
	cases := []struct {
		name, source string
		kind         Kind
		says         string
	}{
		{"it never ends", "while True: pass", TimedOut, "still running after 3s"},
		{"it sleeps", "import time; time.sleep(1000)", TimedOut, "still running"},
		{"it leaves at once", "import os; os._exit(7)", Died, "exit code 7"},
		{"it kills itself", "import os; os.kill(os.getpid(), 9)", Died, "SIGKILL"},
		{"it closes everything", "import os\nos.closerange(0, 1000)\nclass Tools: pass", Died, "exit code"},
		{"the options of its valves never end", "from pydantic import BaseModel, Field\nclass Tools:\n    class Valves(BaseModel):\n        k: str = Field('', json_schema_extra={'input': {'options': 'opts'}})\n        @classmethod\n        def opts(cls):\n            while True: pass\n", TimedOut, "still running"},
		{"the options of its valves leave", "import os\nfrom pydantic import BaseModel, Field\nclass Tools:\n    class Valves(BaseModel):\n        k: str = Field('', json_schema_extra={'input': {'options': 'opts'}})\n        @classmethod\n        def opts(cls): os._exit(9)\n", Died, "exit code 9"},
		{"a default, an annotation, a decorator and a class body that leave", "import sys\nclass Tools:\n    @sys.exit(4)\n    def f(self, a: sys.exit(5) = sys.exit(6)): 'd'\n", Exit, "SystemExit(4)"},
		{"it has no memory", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (600 << 20,) * 2)\nx = bytearray(10 << 30)", Load, "MemoryError"},
		{"its result is forged", "import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'{\"result\": {\"specs\": 7}}\\n')\n    except OSError: pass\nos._exit(0)", Disturbed, "disturbed"},
		{"its result is noise", "import os\nfor fd in range(3, 300):\n    try: os.write(fd, os.urandom(100).replace(b'\\n', b'') + b'\\n')\n    except OSError: pass", Disturbed, "disturbed"},
		{"its error has no words and no class", "type('', (Exception,), {})\nraise type('', (Exception,), {})()", Load, "failed"},
		{"its description is enormous", "class Tools:\n    def f(self): 'd'\n    f.__doc__ = 'x' * 20_000_000\n", TooLarge, "bytes of at most"},
		{"it spoils the program", "import sys, json\njson.dumps = None\njson.loads = None\nsys.modules.clear()\nclass Tools: pass", Exception, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			wall := 30 * time.Second
			if c.kind == TimedOut {
				wall = 3 * time.Second
			}
			s := play{wall: wall}.run(t, Describe{Tool: Tool{Content: c.source}})
			d, failed := described(t, s)
			if failed == nil {
				t.Fatalf("described as %+v", d)
			}
			if len(failed.Sentence()) > maxText {
				t.Errorf("%d bytes of words", len(failed.Sentence()))
			}
			if (failed.Kind != c.kind && c.says != "") || !strings.Contains(failed.Sentence(), c.says) || failed.Sentence() == "" {
				t.Errorf("%s: %q, want %s: %q\n%s", failed.Kind, failed.Sentence(), c.kind, c.says, s.Stderr)
			}
			if _, err := s.Values(s.Ending); err == nil {
				t.Error("it has values")
			}
			if r := s.Call(s.Ending); r.Error == nil {
				t.Errorf("it returned %+v", r)
			}
		})
	}
}

func TestOldPydanticIsSaid(t *testing.T) {
	fake := t.TempDir()
	if err := os.Mkdir(filepath.Join(fake, "pydantic"), 0o755); err != nil {
		t.Fatal(err)
	}
	init := filepath.Join(fake, "pydantic", "__init__.py")
	if err := os.WriteFile(init, []byte("VERSION = '1.10.22'\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	python := []string{"python3"} // any will do, and it sees the folder
	for _, r := range []requester{
		Describe{Tool: Tool{Content: "class Tools: pass"}},
		ValidateValves{Tool: Tool{Content: "class Tools: pass"}, Which: Valves, Values: raw(`{}`)},
		Call{Tool: Tool{Content: "class Tools:\n    def f(self): return 1\n"}, Function: "f"},
	} {
		for _, c := range []struct {
			name string
			argv func(string) []string
			says string
		}{
			{"1", func(p string) []string {
				return []string{p, "-c", "import sys; sys.path.insert(0, '" + fake + "')\n" + Source()}
			}, "pydantic 1.10.22; Python tools need pydantic 2."},
			{"none", func(p string) []string { return []string{p, "-I", "-S", "-c", Source()} }, "has no pydantic; Python tools need pydantic 2."},
		} {
			s := play{python: python, argv: c.argv}.run(t, r)
			_, err := s.Description(s.Ending)
			failed, _ := err.(*Error)
			if failed == nil || failed.Kind != Pydantic || !strings.Contains(failed.Message, c.says) {
				t.Errorf("%T with %s: %v\n%s", r, c.name, err, s.Stderr)
			}
		}
	}
}

func TestFilesOfTheSessionAreNoModules(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"pydantic", "json", "asyncio", "fcntl", "sitecustomize", "usercustomize", "tool_case"} {
		if err := os.WriteFile(filepath.Join(dir, name+".py"), []byte("raise SystemExit('taken over')\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	python := testpython(t)
	if len(python) > 1 {
		python = []string{"python3"} // it must see the folder
	}
	p := play{dir: dir, python: python, env: []string{"PYTHONPATH=" + dir, "PYTHONSTARTUP=" + dir + "/json.py"}}
	s := p.run(t, Describe{Tool: Tool{ID: "case", Content: "class Tools:\n    def f(self): 'd'\n"}})
	if d, failed := described(t, s); failed != nil && failed.Kind != Pydantic || failed == nil && len(d.Specs) != 1 {
		t.Errorf("%+v\n%s", failed, s.Stderr)
	}
}

func TestPackagesOfTheTool(t *testing.T) {
	layer := folder(t, "layered_package.py", "N = 7")
	s := play{}.run(t, Call{Tool: Tool{Content: "import layered_package\nclass Tools:\n    def f(self): return layered_package.N\n", Paths: []string{layer}}, Function: "f"})
	if r := s.Call(s.Ending); r.Text != "7" {
		t.Errorf("%q, %+v", r.Text, r.Error)
	}
}

// folder makes one with a file in it where the test's interpreter sees it,
// which may be in a root of its own.
func folder(t *testing.T, file, content string) string {
	t.Helper()
	dir := fmt.Sprintf("/tmp/harness_test_%d_%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "_"))
	path := filepath.Join(dir, file)
	source := fmt.Sprintf("import os\nos.makedirs(os.path.dirname(%[1]q))\nopen(%[1]q, 'w').write(%[2]q)\nclass Tools: pass\n", path, content)
	if _, failed := describe(t, source); failed != nil {
		t.Fatalf("%+v", failed)
	}
	t.Cleanup(func() {
		call(t, fmt.Sprintf("import shutil\nclass Tools:\n    def f(self): shutil.rmtree(%q)\n", dir), "f", "")
	})
	return dir
}

func TestRequestsThatAreNone(t *testing.T) {
	for _, body := range []string{"", "x", "[]", `{"op":"describe"}`, `{"op":"other","content":""}`, `{"op":"validate_valves","content":"class Tools: pass","which":"x","values":{}}`} {
		s := play{}.raw(t, []byte(body))
		if _, err := s.Description(s.Ending); err == nil || err.(*Error).Kind != BadRequest {
			t.Errorf("%q: %v", body, err)
		}
	}
	if _, err := (Call{Arguments: json.RawMessage("{")}).Request(Limits{}); err == nil {
		t.Error("a raw field that is not JSON made a request")
	}
}

func TestStandIns(t *testing.T) {
	cases := []struct{ name, source, want string }{
		{"responses", `
from fastapi import Request, Response, HTTPException, status, UploadFile, Depends
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse, FileResponse
from starlette.responses import HTMLResponse as Other
from fastapi.concurrency import run_in_threadpool
from starlette.concurrency import run_in_threadpool as other_threadpool
from fastapi.encoders import jsonable_encoder
import fastapi.status, starlette.requests
class Tools:
    async def f(self):
        assert HTMLResponse is Other and issubclass(HTMLResponse, Response)
        r = HTMLResponse(content="<p>é", status_code=201, headers={"X-A": "1"})
        assert r.body == "<p>é".encode() and r.headers["x-a"] == "1" and r.headers["Content-Type"] == "text/html; charset=utf-8"
        assert JSONResponse({"a": 1}).body == b'{"a":1}'
        assert RedirectResponse("/x").headers["location"] == "/x"
        assert status.HTTP_404_NOT_FOUND == fastapi.status.HTTP_404_NOT_FOUND == 404
        assert jsonable_encoder({"a": {1}}) == {"a": [1]}
        assert repr(HTMLResponse).endswith("HTMLResponse'>") and "locals" not in repr(HTMLResponse)
        try: raise HTTPException(404)
        except HTTPException as e: assert e.detail == "Not Found", e.detail
        return await run_in_threadpool(lambda: "ok")
`, "ok"},
		{"messages", `
from open_webui.utils.misc import get_last_user_message, get_last_assistant_message, pop_system_message, add_or_update_system_message
class Tools:
    def f(self):
        m = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}, {"role": "assistant", "content": "a"}]
        system, rest = pop_system_message(m)
        assert system["content"] == "s" and len(rest) == 2
        assert add_or_update_system_message("new", [{"role": "user", "content": "x"}])[0]["content"] == "new"
        return get_last_user_message(m) + get_last_assistant_message(m)
`, "ua"},
		{"places", `
import logging, os
from open_webui.env import SRC_LOG_LEVELS
from open_webui.config import UPLOAD_DIR, CACHE_DIR
log = logging.getLogger(__name__)
log.setLevel(SRC_LOG_LEVELS["MAIN"])
class Tools:
    def f(self): return os.path.basename(UPLOAD_DIR)
`, "uploads"},
		{"what is not here can be named", `
from typing import Optional
from open_webui.models.users import Users, UserModel
from open_webui.routers.images import image_generations, GenerateImageForm
import open_webui.models.files
class Form(GenerateImageForm): pass
class Tools:
    def f(self, q: str = "", __user__: Optional[UserModel] = None):
        assert not hasattr(Users, "anything")
        return "loaded"
`, "loaded"},
		{"what is not here says so when it is used", "from open_webui.models.users import Users\nclass Tools:\n    def f(self): return Users.get_user_by_id('x')\n", "!open_webui.models.users.Users is not available in a sandbox (its 'get_user_by_id' was asked for)"},
		{"what is not here says so when it is called", "from open_webui.routers.images import image_generations\nclass Tools:\n    async def f(self): return await image_generations()\n", "!open_webui.routers.images.image_generations is not available in a sandbox"},
		{"an unknown package of the server", "import open_webui.nothing\nclass Tools: pass\n", "!No module named 'open_webui.nothing'"},
		{"an unknown part of fastapi", "import fastapi.nothing\nclass Tools: pass\n", "!No module named 'fastapi.nothing'"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := call(t, c.source, "f", "")
			if want, fails := strings.CutPrefix(c.want, "!"); fails {
				if r.Error == nil || r.Error.Message != want {
					t.Errorf("%q, %+v; want %q", r.Text, r.Error, want)
				}
				return
			}
			if r.Error != nil || r.Text != c.want {
				t.Errorf("%q, %+v; want %q", r.Text, r.Error, c.want)
			}
		})
	}
}

func TestRealPackagesWin(t *testing.T) {
	real := folder(t, "fastapi/__init__.py", "REAL = 1")
	tool := Tool{Content: "import fastapi\nR = fastapi.REAL\nimport fastapi.responses\nclass Tools: pass\n", Paths: []string{real}}
	_, failed := described(t, play{}.run(t, Describe{Tool: tool}))
	if failed == nil || failed.Kind != MissingModule || failed.Module != "fastapi.responses" {
		t.Errorf("%+v, want no stand-in inside a real package", failed)
	}
}

func TestSourcesAreNotLeftInFiles(t *testing.T) {
	const look = "\nimport glob\nFOUND = len(glob.glob('/tmp/tool_left_case*'))\nclass Tools:\n    def f(self): return [FOUND, len(glob.glob('/tmp/tool_left_case*'))]\n"
	for source, want := range map[string]string{look: `[0,0]`, "ME = __file__" + look: `[1,0]`} {
		s := play{}.run(t, Call{Tool: Tool{ID: "left_case", Content: source}, Function: "f"})
		if r := s.Call(s.Ending); r.Error != nil || !same(t, r.Value, []byte(want)) {
			t.Errorf("%s, %+v; want %s", r.Value, r.Error, want)
		}
	}
}

func TestWhatIsLackingIsSaidWithoutLoading(t *testing.T) {
	source := "\"\"\"\nrequirements: pydantic>=2, no-such[x,y]>=1, ../x, json, no_such_too ; python_version < '9'\n\"\"\"\nraise SystemExit\n"
	s := play{}.run(t, Lacks{Tool: Tool{ID: "case", Content: source}})
	got, err := s.Lacking(s.Ending)
	if err != nil {
		t.Fatal(err)
	}
	want := []Requirement{{"no-such", "no-such[x,y]>=1"}, {"../x", "../x"}, {"no_such_too", "no_such_too ; python_version < '9'"}}
	if !slices.Equal(got.Missing, want) || !strings.HasPrefix(got.Interpreter, "cpython 3.") {
		t.Errorf("got %+v", got)
	}
	forged := &Results{}
	_, _ = forged.Write([]byte(`{"result":{"missing":[{"name":"a","text":"b"}],"interpreter":""}}` + "\n"))
	if _, err := forged.Lacking(Ending{}); err == nil {
		t.Error("a name that its text lacks was believed")
	}
}

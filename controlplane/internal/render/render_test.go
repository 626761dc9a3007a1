package render

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/shared/fault"
)

// renderShell parses and renders in one step.
func renderShell(t testing.TB, template, args string) (string, error) {
	t.Helper()
	s, err := ParseShell(template)
	if err != nil {
		return "", err
	}
	a, err := ParseArguments([]byte(args))
	if err != nil {
		return "", err
	}
	inv, err := s.Render(a)
	return inv.Script, err
}

func TestQuotedValues(t *testing.T) {
	for value, want := range map[string]string{
		"": "''", "abc": "abc", "-rf": "-rf", "x=1": "x=1", "~": "'~'", "*": "'*'", "é": "'é'", "日本": "'日本'", "\u202e": "'\u202e'", "a'b": `'a'"'"'b'`,
		"{y}": "'{y}'", "$&": "'$&'", "%s": "%s", "@%+=:,./-_": "@%+=:,./-_",
	} {
		arg, _ := json.Marshal(map[string]string{"x": value, "y": "other"})
		got, err := renderShell(t, "echo {x}", string(arg))
		if err != nil || got != "echo "+want {
			t.Errorf("%q: got %q, %v; want %q", value, got, err, "echo "+want)
		}
	}
}

func TestShellTemplatesTakePlainFieldsOnly(t *testing.T) {
	for _, field := range []string{"{x!r}", "{x!s}", "{x!a}", "{x:>10}", "{x:.3}", "{x[0]}", "{x.real}", "{x:}", "{x.y[0]}"} {
		_, err := ParseShell("echo " + field)
		if f := fault.From(err); err == nil || f.Code != UnsupportedField || f.Field != TemplateField || !strings.Contains(f.Message, "line 1, column 6") {
			t.Errorf("%s: %v (%s)", field, err, f.Code)
		}
	}
}

func TestRefusedTemplatesSayWhere(t *testing.T) {
	templates := []string{
		"{}", "{0}", "{:}", "{!r}", "{", "}", "{x", "x}", "{x}}", "{x!}", "{x!z}", "{x[}", "{d[]}", "{x.}", "{x..y}", "{ x }", "{x }", "{a-b}", `{"x"}`, "{日}", "{é}", "{x!r", "{x:", "{x!rr}", "{{}", "{x{y}}", "{0x}", "{x:{y}", "{x:{y:{z}}}", "{x:.}", "{x:,_}", "{x:5q}", "{x:55555555555555555555}", "{x:.2000000}",
	}
	for _, parse := range map[string]func(string) error{
		"python": func(s string) error { _, err := ParsePython(s); return err },
		"shell":  func(s string) error { _, err := ParseShell(s); return err },
	} {
		for _, template := range templates {
			err := parse("echo\n " + template)
			f := fault.From(err)
			if err == nil || f.Kind != fault.Invalid || f.Field != TemplateField || f.Code != BadTemplate && f.Code != UnsupportedField || !strings.Contains(f.Message, "line 2, column ") {
				t.Errorf("%s: %v (%s)", template, err, f.Code)
			}
		}
	}
}

func TestPythonTemplatesReachNoAttributes(t *testing.T) {
	for _, field := range []string{"{x.__class__}", "{x.__class__.__mro__}", "{x.__init__.__globals__}", "{x.upper}", "{x[0]}", "{x[k].y}", "{x:{y.z}}"} {
		if _, err := ParsePython("print(" + field + ")"); fault.From(err).Code != UnsupportedField {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestMissingArgumentIsNamed(t *testing.T) {
	_, err := renderShell(t, "echo {a} {b}", `{"a": 1}`)
	if f := fault.From(err); f.Code != string(fault.InvalidArguments) || f.Field != "b" || !strings.Contains(f.Message, `"b"`) {
		t.Errorf("got %v (%s, %s)", err, f.Code, f.Field)
	}
	if got, err := renderShell(t, "echo {a}", `{"a": 1, "more": 2}`); err != nil || got != "echo 1" {
		t.Errorf("an argument too many: %q, %v", got, err)
	}
	if _, err := renderPython(t, "{e}", `{"é": 1}`); fault.From(err).Field != "e" {
		t.Errorf("got %v", err)
	}
}

func TestBraceEscapes(t *testing.T) {
	for _, c := range [][2]string{{"{{}}", "{}"}, {"{{x}}", "{x}"}, {"{{{x}}}", "{v}"}, {"${{v:-d}}", "${v:-d}"}, {"a{{b}}c{x}", "a{b}cv"}, {"{x}", "v"}, {"{y}", "{x}"}, {"", ""}} {
		if got, err := renderPython(t, c[0], `{"x": "v", "y": "{x}"}`); err != nil || got != c[1] {
			t.Errorf("%s: got %q, %v; want %q", c[0], got, err, c[1])
		}
	}
	if got, err := renderShell(t, "echo ${{v:-d}} {x} '{{x}}'", `{"x": "a b"}`); err != nil || got != "echo ${v:-d} 'a b' '{x}'" {
		t.Errorf("shell: got %q, %v", got, err)
	}
}

func TestHugeWidthsCostNothing(t *testing.T) {
	var before, after runtime.MemStats
	for _, c := range []struct{ template, args string }{
		{"{x:>{w}}", `{"x": "a", "w": 9999999999}`}, {"{x:.{w}f}", `{"x": 1.5, "w": 9999999999}`}, {"{x:{w}}", `{"x": 1, "w": 9999999999}`}, {"{x:0{w},}", `{"x": 1, "w": 2000000000}`}, {"{x:é>{w}}", `{"x": "a", "w": 100000}`},
		{"{x:>131072}" + "{x:>1}", `{"x": "a"}`}, {strings.Repeat("{x:>100000}", 100), `{"x": "a"}`}, {strings.Repeat("{x:.100000f}", 100), `{"x": 1.5}`}, {strings.Repeat("{x}", 20000), `{"x": "aaaaaaaaaa"}`},
	} {
		runtime.ReadMemStats(&before)
		start := time.Now()
		_, err := renderPython(t, c.template, c.args)
		took := time.Since(start)
		runtime.ReadMemStats(&after)
		f := fault.From(err)
		if err == nil || f.Kind != fault.Invalid || f.Code != string(fault.ArgumentTooLarge) && f.Code != BadTemplate {
			t.Errorf("%.40s: %v (%s)", c.template, err, f.Code)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 16<<20 || took > 5*time.Second {
			t.Errorf("%.40s: %d bytes in %v", c.template, grown, took)
		}
	}
	if _, err := ParsePython("{x:>2000000000}"); fault.From(err).Code != BadTemplate {
		t.Errorf("a literal width: %v", err)
	}
}

func TestReprRoundTripsThroughPython(t *testing.T) {
	value := "'\"\\\n\r\t\x00\u2028\U0001F600\u00ad\u200b\x7f\u0378é日\ufffd"
	arg, _ := json.Marshal(map[string]string{"x": value})
	script, err := renderPython(t, "import sys; sys.stdout.buffer.write({x!r}.encode())", string(arg))
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("/usr/bin/python3", "-c", script).Output()
	if err != nil || string(out) != value {
		t.Errorf("got %q, %v; want %q", out, err, value)
	}
}

func TestArgumentsAreStrict(t *testing.T) {
	for _, args := range []string{
		``, `null`, `[]`, `"a"`, `1`, `{`, `{"a": 1} {}`, `{"a": 1, "a": 2}`, `{"a": {"b": 1, "b": 2}}`, `{"a": NaN}`, `{"a": 1e400}`, `{"a": -1e999999}`, `{"a": "\ud800"}`, `{"a": "\udc00\ud800"}`, "{\"a\": \"\xff\"}", `{"a": 01}`, `{"a": 1,}`, "\ufeff{}", `{"a": /* no */ 1}`, `{'a': 1}`,
		`{"a": ` + strings.Repeat("[", 1100) + strings.Repeat("]", 1100) + `}`, `{"a": ` + strings.Repeat("[", 20000), `{"a": ` + strings.Repeat("9", 5000) + `}`,
	} {
		_, err := ParseArguments([]byte(args))
		if f := fault.From(err); err == nil || f.Kind != fault.Invalid || f.Code != string(fault.InvalidArguments) {
			t.Errorf("%.60s: %v (%s)", args, err, f.Code)
		}
	}
}

func TestNumbersKeepTheirPrecision(t *testing.T) {
	ten400 := "1" + strings.Repeat("0", 400)
	for in, want := range map[string]string{
		ten400: ten400, "-" + ten400: "-" + ten400, "9007199254740993": "9007199254740993", "1e16": "1e+16", "1.0": "1.0", "-0": "0", "-0.0": "-0.0", "true": "True", "null": "None", "[1, 'a']": "", `[1,"a",null,true,1.50]`: "[1, 'a', None, True, 1.5]", `{"z":1,"a":2}`: "{'z': 1, 'a': 2}", "1e-400": "0.0",
	} {
		got, err := renderPython(t, "{x}", `{"x": `+in+`}`)
		if want == "" {
			if err == nil {
				t.Errorf("%s: accepted as %q", in, got)
			}
			continue
		}
		if err != nil || got != want {
			t.Errorf("%s: got %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestNULIsRefused(t *testing.T) {
	for _, args := range []string{`{"x": "a\u0000b"}`, `{"x": "\u0000"}`} {
		_, err := renderShell(t, "echo {x}", args)
		if f := fault.From(err); f.Code != string(fault.NULByte) || f.Field != "x" {
			t.Errorf("%s: %v (%s)", args, err, f.Code)
		}
	}
	if got, err := renderShell(t, "echo {x}", `{"x": ["a\u0000b"]}`); err != nil || got != `echo '['"'"'a\x00b'"'"']'` {
		t.Errorf("inside a list it is escaped: %q, %v", got, err)
	}
	for _, template := range []string{"echo \x00", "echo \x00{x}"} {
		if _, err := ParseShell(template); fault.From(err).Code != string(fault.NULByte) {
			t.Errorf("%q: %v", template, err)
		}
	}
}

func TestRenderedSizeIsCapped(t *testing.T) {
	for _, c := range []struct {
		size int
		ok   bool
	}{{MaxRendered - len("echo "), true}, {MaxRendered - len("echo ") + 1, false}, {1 << 20, false}, {16 << 20, false}} {
		got, err := renderShell(t, "echo {x}", `{"x": "`+strings.Repeat("a", c.size)+`"}`)
		if c.ok && (err != nil || len(got) != MaxRendered) {
			t.Errorf("%d: %d bytes, %v", c.size, len(got), err)
		}
		if f := fault.From(err); !c.ok && (f.Code != string(fault.ArgumentTooLarge) || f.Field != "x") {
			t.Errorf("%d: %v", c.size, err)
		}
	}
	quoted := `{"x": "` + strings.Repeat("'", 100000) + `"}`
	if _, err := renderShell(t, "echo {x}", quoted); fault.From(err).Code != string(fault.ArgumentTooLarge) {
		t.Errorf("quoting makes it too large: %v", err)
	}
}

func TestLargestElementRuns(t *testing.T) {
	script, err := renderShell(t, "printf %s {x} | wc -c", `{"x": "`+strings.Repeat("a", MaxRendered-len("printf %s  | wc -c"))+`"}`)
	if err != nil || len(script) != MaxRendered {
		t.Fatalf("%d bytes, %v", len(script), err)
	}
	out, err := exec.Command("/bin/bash", "-c", script).Output()
	if err != nil || strings.TrimSpace(string(out)) != fmt.Sprint(MaxRendered-len("printf %s  | wc -c")) {
		t.Errorf("bash: %s, %v", out, err)
	}
}

func TestTemplatesOfEverySizeAreQuick(t *testing.T) {
	templates := map[string]string{
		"1000 fields":    "echo" + strings.Repeat(" {x}", 1000),
		"16000 fields":   "echo" + strings.Repeat(" {x}", 16000),
		"braces":         strings.Repeat("{{", 32<<10),
		"ten megabytes":  strings.Repeat("a", 10<<20),
		"open brackets":  "echo {x} " + strings.Repeat("(", 60000),
		"open subshells": "echo {x}; " + strings.Repeat("$(", 30000),
		"arithmetic":     "echo {x}; " + strings.Repeat("((", 30000),
		"backquotes":     "echo {x} " + strings.Repeat("`", 60000),
		"quotes":         "echo {x} " + strings.Repeat(`"$(`, 20000),
		"if":             "echo {x}; " + strings.Repeat("if ", 20000),
		"case":           "echo {x}; " + strings.Repeat("case a in a) ", 5000),
		"while":          "echo {x}; " + strings.Repeat("while ", 10000),
		"negations":      "echo {x}; " + strings.Repeat("! ", 30000),
		"pipes":          "echo {x}" + strings.Repeat("|a", 30000),
		"ands":           "echo {x}" + strings.Repeat("&&a", 20000),
		"statements":     "echo {x}" + strings.Repeat(";a", 30000),
		"redirects":      "echo {x}" + strings.Repeat(">a", 30000),
		"heredocs":       "echo {x}" + strings.Repeat("<<a ", 15000),
		"assignments":    strings.Repeat("a=", 30000) + " echo {x}",
		"comments":       strings.Repeat("#\n", 30000) + " echo {x}",
		"continuations":  strings.Repeat("\\\n", 30000) + " echo {x}",
		"globs":          "echo {x}" + strings.Repeat(" @(", 20000),
		"tests":          "echo {x}; [[ " + strings.Repeat("( ", 30000),
		"not tests":      "echo {x}; [[ " + strings.Repeat("! ", 30000),
		"unary":          "echo {x}; (( " + strings.Repeat("-", 60000) + "1 ))",
		"time":           "echo {x}; " + strings.Repeat("time ", 12000),
		"functions":      "echo {x}; " + strings.Repeat("f()", 20000),
		"coprocs":        "echo {x}; " + strings.Repeat("coproc ", 9000),
		"elifs":          "echo {x}; if a; then b; " + strings.Repeat("elif a; then b; ", 4000) + "fi",
		"ternary":        "echo {x}; (( " + strings.Repeat("1?1:", 15000) + "1 ))",
		"params":         "echo {x} " + strings.Repeat("${{a:-", 10000),
	}
	for name, template := range templates {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			s, err := ParseShell(template)
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("parsing took %v", took)
			}
			if err != nil {
				if !fault.Is(err, fault.Invalid) {
					t.Errorf("%v", err)
				}
				return
			}
			start = time.Now()
			if _, err := s.Render(Arguments{"x": {}}); err != nil && !fault.Is(err, fault.Invalid) {
				t.Errorf("%v", err)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("rendering took %v", took)
			}
			t.Logf("parsed in %v", time.Since(start))
		})
	}
}

func TestRefusalsSayWhatToWrite(t *testing.T) {
	for template, want := range map[string]string{
		`echo "{pattern}"`:           "{pattern} at line 1, column 7 is inside quotes; it is quoted for you, so remove the quotes around it (write {{ and }} for literal braces)",
		`[[ {pattern} -eq 1 ]]`:      "use case {x} in",
		`n={pattern}`:                "use it directly as an argument",
		`eval {pattern}`:             "eval, which evaluates its arguments",
		`bash -c {pattern}`:          "bash, which evaluates its arguments",
		`echo $(( {pattern} ))`:      "expr or awk",
		`printf {pattern}`:           "printf '%s' {pattern}",
		`echo ${pattern}`:            "${{pattern}}",
		"cat <<E\n{pattern}\nE":      "printf",
		"echo `grep {pattern} f`":    "$( )",
		`echo "$(grep {pattern} f)"`: "assign the $( ) to a variable first",
	} {
		_, err := ParseShell(template)
		if f := fault.From(err); f.Code != UnsafePlaceholder || !strings.Contains(f.Message, want) {
			t.Errorf("%s\n\tsays  %v\n\tlacks %q", template, err, want)
		}
	}
}

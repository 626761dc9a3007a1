package render

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/fault"
)

// oracle is CPython: it formats each case and says what came out.
const oracle = `
import json, sys
out = []
for line in sys.stdin:
    case = json.loads(line)
    try:
        text = case["template"].format_map(case["args"])
        text.encode()
        out.append({"text": text, "ok": True})
    except Exception as e:
        out.append({"text": type(e).__name__ + ": " + str(e), "ok": False})
json.dump(out, sys.stdout)
`

type oracleCase struct {
	Template string          `json:"template"`
	Args     json.RawMessage `json:"args"`
}

type oracleAnswer struct {
	Text string `json:"text"`
	OK   bool   `json:"ok"`
}

func askPython(t *testing.T, cases []oracleCase) []oracleAnswer {
	t.Helper()
	var in bytes.Buffer
	for _, c := range cases {
		line, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	cmd := exec.Command("/usr/bin/python3", "-X", "utf8", "-c", oracle)
	cmd.Stdin = &in
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("python3: %v\n%s", err, errors.String())
	}
	var answers []oracleAnswer
	if err := json.Unmarshal(out, &answers); err != nil || len(answers) != len(cases) {
		t.Fatalf("python3 gave %d answers for %d cases: %v", len(answers), len(cases), err)
	}
	return answers
}

// compare demands that we say what Python says, or refuse where it raises.
func compare(t *testing.T, cases []oracleCase) {
	t.Helper()
	bad := 0
	for i, want := range askPython(t, cases) {
		got, err := renderPython(t, cases[i].Template, string(cases[i].Args))
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%q with %s: not a fault of kind invalid: %v", cases[i].Template, cases[i].Args, err)
		}
		if strings.Contains(want.Text, "\x00") && fault.From(err).Code == string(fault.NULByte) {
			continue // no command line carries it
		}
		if (err == nil) == want.OK && (err != nil || got == want.Text) {
			continue
		}
		if bad++; bad <= 25 {
			t.Errorf("%q with %s\n\tgot    %q, %v\n\tpython %q", cases[i].Template, cases[i].Args, got, err, want.Text)
		}
	}
	if bad > 25 {
		t.Errorf("%d of %d cases differ", bad, len(cases))
	}
}

var oracleValues = []string{
	`"hi"`, `""`, `"it's"`, `"a\"b"`, `"a'b\"c"`, `"a\\b"`, `"\n\t\r\u0000\u001f\u007f"`, `"\u00e9\u65e5\ud83d\ude00"`, `"\u00ad\u200b\u2028\ufeff\ue000\u0378\uffff"`,
	`0`, `-0`, `7`, `-42`, `255`, `1234567`, `1000000000000000000000000000000`, `-98765432109876543210`, `1114111`, `65`, `55296`,
	`0.0`, `-0.0`, `1.0`, `3.14159`, `-2.5`, `0.5`, `1.5`, `2.5`, `1e16`, `1e15`, `123456789012345680.0`, `9999999999999998.0`, `0.0001`, `0.00001`, `1e-7`, `1.5e-10`, `1e100`, `1.7976931348623157e308`, `5e-324`, `123456.789`, `0.1`, `1e22`, `1e23`, `99999.5`, `0.00099995`, `1E5`, `-1e-5`,
	`true`, `false`, `null`, `[]`, `[1, "a", null, true, 2.0]`, `{"k": "v", "n": {"l": [1.5, -0.0]}}`, `{}`, `["it's"]`, `["\u00ad'\""]`,
}

func TestFormatSpecsLikePython(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pick := func(options ...string) string { return options[rng.IntN(len(options))] }
	var cases []oracleCase
	add := func(conversion, spec, value string) {
		template := "[{v" + conversion
		if spec != "" {
			template += ":" + spec
		}
		cases = append(cases, oracleCase{template + "}]", json.RawMessage(`{"v": ` + value + `}`)})
	}
	for _, v := range oracleValues {
		for _, conversion := range []string{"", "!s", "!r", "!a"} {
			add(conversion, "", v)
		}
		for _, typ := range strings.Split("s b c d o x X n e E f F g G % q S 1", " ") {
			add("", typ, v)
			add("", ","+typ, v)
			add("", "#"+typ, v)
			add("", ".0"+typ, v)
			add("", "#.0"+typ, v)
			add("", "z.1"+typ, v)
		}
		for range 400 {
			spec := pick("", "", "", "*", "0", "é", "x", "😀")
			if spec != "" {
				spec += pick("<", ">", "^", "=")
			} else {
				spec = pick("", "", "<", ">", "^", "=")
			}
			spec += pick("", "", "", "+", "-", " ") + pick("", "", "", "z") + pick("", "", "#") + pick("", "", "0") +
				pick("", "", "1", "7", "12", "25", "08") + pick("", "", "", ",", "_") + pick("", "", "", ".0", ".1", ".3", ".10", ".", ".17", ".30") +
				pick("", "", "s", "d", "b", "o", "x", "X", "n", "c", "e", "E", "f", "F", "g", "G", "%")
			add(pick("", "", "", "!r", "!s"), spec, v)
		}
	}
	t.Logf("%d cases", len(cases))
	compare(t, cases)
}

func TestNestedSpecsLikePython(t *testing.T) {
	var cases []oracleCase
	for _, template := range []string{
		"{v:{w}}", "{v:{w}.{p}f}", "{v:>{w}}", "{v:{w!r}}", "{v:{w:02}}", "{v:{{}}}", "{v:{fill}>{w}}", "{v!r:{fill}^{w}}", "{v:{v}}", "{v:{missing}}", "{v:{w}{w}}",
	} {
		for _, v := range []string{`"x"`, `3`, `2.5`, `null`, `"10"`} {
			cases = append(cases, oracleCase{template, json.RawMessage(`{"v": ` + v + `, "w": 9, "p": 2, "fill": "*"}`)})
		}
	}
	compare(t, cases)
}

func TestBracesLikePython(t *testing.T) {
	const alphabet = "{}x!:rs>5"
	var cases []oracleCase
	var grow func(string, int)
	grow = func(s string, left int) {
		cases = append(cases, oracleCase{s, json.RawMessage(`{"x": "v", "r": "5", "s": 3, "xx": "w"}`)})
		if left > 0 {
			for i := range len(alphabet) {
				grow(s+alphabet[i:i+1], left-1)
			}
		}
	}
	grow("{x", 4)
	grow("", 4)
	compare(t, cases)
}

// TestReprLikePython compares every character's repr and ascii.
func TestReprLikePython(t *testing.T) {
	var cases []oracleCase
	for block := 0; block < 0x110000; block += 0x400 {
		if block >= 0xd800 && block < 0xe000 {
			continue
		}
		var s strings.Builder
		for r := block; r < block+0x400; r++ {
			s.WriteRune(rune(r))
		}
		arg, err := json.Marshal(map[string]string{"x": s.String()})
		if err != nil {
			t.Fatal(err)
		}
		cases = append(cases, oracleCase{"{x!r}{x!a}", arg})
	}
	compare(t, cases)
}

func TestFloatsLikePython(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var cases []oracleCase
	for range 20000 {
		f := rng.NormFloat64() * []float64{1, 1e-300, 1e300, 1e16, 1e-5, 1e6}[rng.IntN(6)]
		spec := []string{"", ":g", ":.3g", ":e", ":f", ":.12", ":,.2f", ":.1%", ":#.4g", ":020.5e"}[rng.IntN(10)]
		cases = append(cases, oracleCase{"{x" + spec + "}", json.RawMessage(fmt.Sprintf(`{"x": %v}`, formatJSON(f)))})
	}
	compare(t, cases)
}

func formatJSON(f float64) string {
	s := fmt.Sprintf("%.17g", f)
	if !strings.ContainsAny(s, ".e") {
		s += ".0"
	}
	return s
}

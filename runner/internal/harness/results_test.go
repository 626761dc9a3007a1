package harness

import (
	"bufio"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func readLines(into *[]string) func(io.Reader) {
	return func(r io.Reader) {
		s := bufio.NewScanner(r)
		for s.Scan() {
			*into = append(*into, s.Text())
		}
	}
}

const (
	fine      = `{"result":{"type":"str","text":"ok","value":null,"same":true,"files":[],"embeds":[],"truncated":false},"events_dropped":0}`
	fineEvent = `{"event":{"type":"status","data":{}}}`
	deep      = `[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[`
)

// TestHostileStreams holds what becomes of result lines that the program
// would not have written.
func TestHostileStreams(t *testing.T) {
	small := Limits{Text: 100, Attachments: 100, Line: 1000, Events: 3, EventBytes: 100, EventTotal: 250}
	cases := []struct {
		name, stream string
		kind         Kind   // of the error, or
		text         string // of the result
		events       int
		dropped      int64
	}{
		{"a result", fine + "\n", "", "ok", 0, 0},
		{"events, then a result", fineEvent + "\n" + fineEvent + "\n" + fine + "\n", "", "ok", 2, 0},
		{"the first result counts", fine + "\n" + strings.Replace(fine, "ok", "no", 1) + "\n" + fineEvent + "\nnoise", "", "ok", 0, 0},
		{"nothing", "", Died, "", 0, 0},
		{"only events", fineEvent + "\n", Died, "", 1, 0},
		{"half a result", fine, Died, "", 0, 0},
		{"noise", "hello\n" + fine + "\n", Disturbed, "", 0, 0},
		{"an empty line", "\n" + fine + "\n", Disturbed, "", 0, 0},
		{"no object", "[]\n", Disturbed, "", 0, 0},
		{"two things in a line", `{"event":{},"result":{}}` + "\n", Disturbed, "", 0, 0},
		{"nothing in a line", `{}` + "\n", Disturbed, "", 0, 0},
		{"unknown keys", `{"event":{},"x":1}` + "\n", Disturbed, "", 0, 0},
		{"a key twice", `{"result":1,"result":2}` + "\n", Disturbed, "", 0, 0},
		{"a key twice within", `{"event":{"a":1,"a":2}}` + "\n", Disturbed, "", 0, 0},
		{"an event that is no object", `{"event":"x"}` + "\n", Disturbed, "", 0, 0},
		{"an event that is null", `{"event":null}` + "\n", Disturbed, "", 0, 0},
		{"no UTF-8", "{\"event\":{\"a\":\"\xff\"}}\n", Disturbed, "", 0, 0},
		{"half a character", `{"event":{"a":"\ud800"}}` + "\n", Disturbed, "", 0, 0},
		{"a NUL", `{"event":{"a":"\u0000"}}` + "\n", Disturbed, "", 0, 0},
		{"a NUL that is none", `{"event":{"a":"\\u0000"}}` + "\n" + fine + "\n", "", "ok", 1, 0},
		{"deep", `{"event":{"a":` + deep + strings.ReplaceAll(deep, "[", "]") + "}}\n", Disturbed, "", 0, 0},
		{"brackets in a text", `{"event":{"a":"` + deep[:50] + `\"["}}` + "\n" + fine + "\n", "", "ok", 1, 0},
		{"a long line", strings.Repeat("x", 2000), Disturbed, "", 0, 0},
		{"a long event", `{"event":{"a":"` + strings.Repeat("x", 200) + `"}}` + "\n" + fine + "\n", "", "ok", 0, 1},
		{"too many events", strings.Repeat(fineEvent+"\n", 5) + fine + "\n", "", "ok", 3, 2},
		{"too many bytes of events", strings.Repeat(`{"event":{"a":"`+strings.Repeat("x", 85)+`"}}`+"\n", 3) + fine + "\n", "", "ok", 2, 1},
		{"a text past the limit", strings.Replace(fine, "ok", strings.Repeat("x", 101), 1) + "\n", Disturbed, "", 0, 0},
		{"a value past the limit", strings.Replace(fine, "null", `"`+strings.Repeat("x", 101)+`"`, 1) + "\n", Disturbed, "", 0, 0},
		{"embeds past the limit", strings.Replace(fine, `"embeds":[]`, `"embeds":["`+strings.Repeat("x", 101)+`"]`, 1) + "\n", Disturbed, "", 0, 0},
		{"a file that is a link", strings.Replace(fine, `"files":[]`, `"files":[{"type":"image","url":"http://x"}]`, 1) + "\n", Disturbed, "", 0, 0},
		{"a result of another kind", `{"result":{"specs":[]}}` + "\n", Disturbed, "", 0, 0},
		{"a result that is null", `{"result":null}` + "\n", Disturbed, "", 0, 0},
		{"an unknown error", `{"error":{"kind":"whatever","message":"x"}}` + "\n", Disturbed, "", 0, 0},
		{"an error that only we conclude", `{"error":{"kind":"oom_killed","message":"x"}}` + "\n", Disturbed, "", 0, 0},
		{"an error", `{"error":{"kind":"load","type":"T","message":"m","traceback":""}}` + "\n", Load, "", 0, 0},
		{"a negative count", strings.Replace(fine, `"events_dropped":0`, `"events_dropped":-5`, 1) + "\n", "", "ok", 0, 0},
	}
	for _, c := range cases {
		for _, chunk := range []int{1, 7, 1 << 20} {
			var published int
			r := &Results{Limits: small, OnEvent: func(json.RawMessage) { published++ }}
			for rest := []byte(c.stream); len(rest) > 0; {
				n := min(chunk, len(rest))
				if wrote, err := r.Write(rest[:n]); wrote != n || err != nil {
					t.Fatalf("%s: wrote %d, %v", c.name, wrote, err)
				}
				rest = rest[n:]
			}
			got := r.Call(Ending{Code: 1})
			kind := Kind("")
			if got.Error != nil {
				kind = got.Error.Kind
			}
			if kind != c.kind || got.Text != c.text || published != c.events || got.EventsDropped != c.dropped {
				t.Errorf("%s in pieces of %d: %q, %q, %d events, %d dropped; want %q, %q, %d, %d", c.name, chunk, kind, got.Text, published, got.EventsDropped, c.kind, c.text, c.events, c.dropped)
			}
			if got.Error != nil && got.Error.Sentence() == "" {
				t.Errorf("%s: no sentence", c.name)
			}
		}
	}
}

func TestForgedDescriptions(t *testing.T) {
	const good = `{"specs":[{"name":"f","description":"","parameters":{}}],"live_descriptions":{},"manifest":{},"requirements":[],"valves_schema":null,"user_valves_schema":null,"has_user_valves":false,"flags":{"citation":false,"file_handler":false,"valves":false},"content":""}`
	decode := func(result string) (Description, error) {
		var r Results
		_, _ = r.Write([]byte(`{"result":` + result + `,"events_dropped":0}` + "\n"))
		return r.Description(Ending{})
	}
	if d, err := decode(good); err != nil || d.Specs[0].Name != "f" {
		t.Fatal(err)
	}
	for _, change := range [][2]string{
		{`"name":"f"`, `"name":""`},
		{`"name":"f"`, `"name":"` + strings.Repeat("x", 300) + `"`},
		{`"name":"f"`, `"name":7`},
		{`"parameters":{}`, `"parameters":[]`},
		{`,"parameters":{}`, ``},
		{`"valves_schema":null`, `"valves_schema":7`},
		{`"has_user_valves":false`, `"has_user_valves":true`},
		{`"user_valves_schema":null`, `"user_valves_schema":{}`},
		{`"manifest":{}`, `"manifest":{"a":1}`},
		{`"content":""`, `"content":"","more":1`},
		{`[{"name":"f","description":"","parameters":{}}]`, "[" + strings.Repeat(`{"name":"f","description":"","parameters":{}},`, 600) + `{"name":"f","description":"","parameters":{}}]`},
	} {
		changed := strings.Replace(good, change[0], change[1], 1)
		if changed == good {
			t.Fatalf("%q is not in it", change[0])
		}
		if d, err := decode(changed); err == nil || err.(*Error).Kind != Disturbed {
			t.Errorf("%q: %+v, %v", change[1][:min(len(change[1]), 50)], d, err)
		}
	}
	for _, values := range []string{`{"values":[]}`, `{"values":null}`, `{}`, `{"values":{},"x":1}`, `7`} {
		var r Results
		_, _ = r.Write([]byte(`{"result":` + values + `}` + "\n"))
		if got, err := r.Values(Ending{}); err == nil {
			t.Errorf("%s: %s", values, got)
		}
	}
}

func TestEndings(t *testing.T) {
	cases := []struct {
		ending Ending
		kind   Kind
		says   string
	}{
		{Ending{OOM: true, MemoryMB: 512, TimedOut: true, Signal: "SIGKILL"}, OOMKilled, "The tool needed more memory than it may have (512 MiB)."},
		{Ending{PIDs: true, PIDsLimit: 64, TimedOut: true}, PIDsExhausted, "The tool started more processes and threads than it may have (64)."},
		{Ending{TimedOut: true, Wall: 10 * time.Second, Signal: "SIGKILL"}, TimedOut, "The tool was still running after 10s."},
		{Ending{Cancelled: true, Signal: "SIGKILL"}, Cancelled, "The tool was stopped before it had finished."},
		{Ending{DiskFull: true, Code: 1}, DiskFull, "The tool filled its disk."},
		{Ending{Signal: "SIGSEGV", Code: -1}, Died, "The tool's interpreter was ended by SIGSEGV before it had finished."},
		{Ending{Code: 3}, Died, "The tool ended its interpreter with exit code 3 before it had finished."},
		{Ending{}, Died, "The tool ended its interpreter with exit code 0 before it had finished."},
	}
	for _, c := range cases {
		var r Results
		_, err := r.Description(c.ending)
		if got := err.(*Error); got.Kind != c.kind || got.Error() != c.says {
			t.Errorf("%+v: %s: %q, want %s: %q", c.ending, got.Kind, got.Error(), c.kind, c.says)
		}
		_, _ = r.Write([]byte(fine + "\n"))
		if got := r.Call(c.ending); got.Error != nil || got.Text != "ok" {
			t.Errorf("%+v hid an answer: %+v", c.ending, got.Error)
		}
	}
}

func TestAnyBytesAreAnAnswerOrAnError(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		events := 0
		r := &Results{Limits: Limits{Line: 4096, Events: 5}, OnEvent: func(json.RawMessage) { events++ }}
		pieces := rapid.SliceOf(rapid.OneOf(
			rapid.SampledFrom([]string{fine, fineEvent, "\n", `{"event":`, "}", `"`, `\`, "\x00", `{"error":{"kind":"load"}}`}),
			rapid.String(),
		)).Draw(t, "pieces")
		for _, p := range pieces {
			_, _ = r.Write([]byte(p))
		}
		c := r.Call(Ending{})
		if (c.Error == nil) == (c.Value == nil) || events > 5 || int64(len(r.pending)) > 4096 {
			t.Fatalf("%+v", c)
		}
		if c.Error != nil && c.Error.Sentence() == "" {
			t.Fatal("no sentence")
		}
	})
}

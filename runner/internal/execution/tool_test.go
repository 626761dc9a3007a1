package execution

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// toolRig is a rig whose sandboxes say what answer holds on the results'
// descriptor, and end as exit says.
type toolRig struct {
	*rig
	key, reply *ecdh.PrivateKey
	answer     string
	exit       sandbox.Exit
	got        sandbox.Process
	n          int
}

func newToolRig(t *testing.T) *toolRig {
	t.Helper()
	r := &toolRig{rig: newRig(t), exit: sandbox.Exit{Reason: sandbox.Exited}}
	for _, key := range []**ecdh.PrivateKey{&r.key, &r.reply} {
		var err error
		if *key, err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			t.Fatal(err)
		}
	}
	r.Box = r.key
	r.machine.any = func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		r.got = p
		_, _ = p.Results.Write([]byte(r.answer))
		if p.Stdout != nil {
			_, _ = p.Stdout.Write([]byte("printed"))
		}
		return r.exit
	}
	r.live(t, "ses_1")
	return r
}

func (r *toolRig) ask(t *testing.T, q wire.ToolRequest, secrets wire.ToolSecrets) *wire.Done {
	t.Helper()
	r.n++
	id := fmt.Sprintf("call_%d", r.n)
	plain, err := strictjson.Encode(secrets)
	if err != nil {
		t.Fatal(err)
	}
	if q.Sealed == nil {
		if q.Sealed, err = envelope.SealBox(r.key.PublicKey(), id, plain); err != nil {
			t.Fatal(err)
		}
	}
	script, err := strictjson.Encode(q)
	if err != nil {
		t.Fatal(err)
	}
	o := callOrder("ses_1", 1, id, "")
	o.Call.Program, o.Call.Script, o.Call.InArgv = wire.PythonTool, script, false
	r.begin(t, o)
	return r.inbox.wait(t, wire.CallDone, id).Done
}

func TestToolCallsGetTheirSecretsAndReturn(t *testing.T) {
	r := newToolRig(t)
	r.answer = `{"event":{"type":"status"}}` + "\n" + `{"result":{"type":"dict","text":"{}","value":{"a":1},"same":false,"files":[],"embeds":["<p>"],"truncated":false},"events_dropped":0}` + "\n"
	done := r.ask(t, wire.ToolRequest{Op: wire.ToolCall, ID: "t", Content: "source", Function: "f", Arguments: json.RawMessage(`{"x":1}`)},
		wire.ToolSecrets{Valves: json.RawMessage(`{"k":"v1"}`), UserValves: json.RawMessage(`{"k":"v2"}`), User: &wire.ToolUser{ID: "usr_1", Name: "Ann", Role: "user"}})
	if done.Status != "ok" || done.ValueKind != wire.PythonTool || done.ExitCode != nil || string(done.Stdout) != "printed" {
		t.Fatalf("got %+v, %+v", done, done.Error)
	}
	var got wire.ToolResult
	if err := strictjson.Decode(done.Value, &got); err != nil || string(got.Value) != `{"a":1}` || *got.Text != "{}" || got.Embeds[0] != "<p>" {
		t.Errorf("got %s, %v", done.Value, err)
	}
	if r.got.Program != sandbox.Harness {
		t.Errorf("ran %q", r.got.Program)
	}
	for _, want := range []string{`"function":"f"`, `"valves":{"k":"v1"}`, `"user_valves":{"k":"v2"}`, `"name":"Ann"`, `"x":1`,
		`"metadata":{"user_id":"usr_1","chat_id":"ses_1","message_id":"run_1","session_id":"ses_1"}`, `"ids":{"chat":"ses_1","message":"run_1"}`} {
		if !strings.Contains(string(r.got.Script), want) {
			t.Errorf("the request lacks %s: %s", want, r.got.Script)
		}
	}
}

func TestToolsFailInWords(t *testing.T) {
	r := newToolRig(t)
	for name, c := range map[string]struct {
		answer                 string
		exit                   sandbox.Exit
		status, code, says, on string
	}{
		"raises": {
			`{"error":{"kind":"exception","type":"ValueError","message":"no","traceback":"  line 3"}}` + "\n",
			sandbox.Exit{Reason: sandbox.Exited, Code: 1}, "error", "tool_failed", "ValueError: no", "",
		},
		"bad argument": {
			`{"error":{"kind":"arguments","message":"x must be a number","argument":"x"}}` + "\n",
			sandbox.Exit{Reason: sandbox.Exited, Code: 1}, "invalid_arguments", "invalid_arguments", "x must be a number", "x",
		},
		"no such function": {
			`{"error":{"kind":"function","message":"no g"}}` + "\n",
			sandbox.Exit{Reason: sandbox.Exited, Code: 1}, "invalid_arguments", "unknown_tool", "no g", "",
		},
		"silence": {"", sandbox.Exit{Reason: sandbox.Exited}, "error", "tool_failed", "exit code 0", ""},
		"forged":  {"nonsense\n", sandbox.Exit{Reason: sandbox.Exited}, "error", "tool_failed", "disturbed", ""},
		"too long": {
			"", sandbox.Exit{Reason: sandbox.TimedOut, Code: -1}, "timed_out", "wall_clock", "wall_clock_seconds", "wall_clock_seconds",
		},
		"out of memory": {
			"", sandbox.Exit{Reason: sandbox.Exited, Code: -1, Signal: "SIGKILL", OOM: true}, "oom_killed", "memory_limit", "memory_mb", "memory_mb",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r.answer, r.exit = c.answer, c.exit
			done := r.ask(t, wire.ToolRequest{Op: wire.ToolCall, ID: "t", Content: "s", Function: "f"}, wire.ToolSecrets{})
			if done.Status != c.status || done.Error == nil || done.Error.Code != c.code || !strings.Contains(done.Error.Message, c.says) || done.Error.Field != c.on {
				t.Errorf("got %s, %+v", done.Status, done.Error)
			}
			if done.HasValue {
				t.Errorf("it has a value: %s", done.Value)
			}
		})
	}
}

func TestAnswersAboutToolsAreBoxed(t *testing.T) {
	r := newToolRig(t)
	ask := func(t *testing.T, q wire.ToolRequest) (wire.ToolAnswer, *wire.Done) {
		q.ReplyTo = r.reply.PublicKey().Bytes()
		done := r.ask(t, q, wire.ToolSecrets{Values: json.RawMessage(`{"k":"hush"}`)})
		var a wire.ToolAnswer
		plain, err := envelope.OpenBox(r.reply, fmt.Sprintf("call_%d", r.n), done.Value)
		if err != nil {
			t.Fatalf("%v: %+v", err, done)
		}
		if err := strictjson.Decode(plain, &a); err != nil {
			t.Fatal(err)
		}
		if len(done.Stdout) > 0 || strings.Contains(string(done.Value), "hush") {
			t.Errorf("it says %q and %q", done.Stdout, done.Value)
		}
		return a, done
	}
	r.answer = `{"result":{"values":{"k":"hush"}}}` + "\n"
	if a, done := ask(t, wire.ToolRequest{Op: wire.ToolValidate, ID: "t", Content: "s", Which: "valves"}); string(a.Values) != `{"k":"hush"}` || done.Status != "ok" {
		t.Errorf("got %+v, %+v", a, done)
	}
	r.answer, r.exit = `{"error":{"kind":"load","type":"ValueError","message":"hush"}}`+"\n", sandbox.Exit{Reason: sandbox.Exited, Code: 1}
	if a, done := ask(t, wire.ToolRequest{Op: wire.ToolDescribe, ID: "t", Content: "s"}); a.Error == nil || a.Error.Message != "hush" || done.Error != nil {
		t.Errorf("got %+v, %+v", a, done)
	}
	r.answer, r.exit = `{"result":{"values":{"k":"`+strings.Repeat("x", 7<<20)+`"}}}`+"\n", sandbox.Exit{Reason: sandbox.Exited}
	if a, done := ask(t, wire.ToolRequest{Op: wire.ToolValidate, ID: "t", Content: "s", Which: "valves"}); a.Error == nil || a.Error.Kind != "disturbed" || len(done.Value) > 4096 {
		t.Errorf("more than anybody keeps: %+v in %d bytes", a.Error, len(done.Value))
	}
	r.answer, r.exit = "", sandbox.Exit{Reason: sandbox.TimedOut, Code: -1}
	if a, done := ask(t, wire.ToolRequest{Op: wire.ToolDescribe, ID: "t", Content: "s"}); a.Error == nil || a.Error.Kind != "timed_out" || done.Status != "timed_out" {
		t.Errorf("got %+v, %+v", a.Error, done)
	}
}

func TestRequestsForAnotherRunnerAreNotRun(t *testing.T) {
	r := newToolRig(t)
	other, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := envelope.SealBox(other.PublicKey(), "call_1", []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	done := r.ask(t, wire.ToolRequest{Op: wire.ToolCall, ID: "t", Content: "s", Function: "f", Sealed: sealed}, wire.ToolSecrets{})
	if done.Status != "start_failed" || !strings.Contains(done.Error.Message, "key") || r.got.ID != "" {
		t.Errorf("got %+v, %+v; ran %q", done, done.Error, r.got.ID)
	}
	done = r.ask(t, wire.ToolRequest{Op: "dance"}, wire.ToolSecrets{})
	if done.Status != "start_failed" || r.got.ID != "" {
		t.Errorf("got %+v; ran %q", done, r.got.ID)
	}
}

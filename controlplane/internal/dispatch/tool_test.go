package dispatch

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// settings are what every tool is set to, by user.
type settings struct{ err error }

const toolSecret = "the-secret-of-the-tool"

func (s settings) SettingsOf(_ context.Context, workspace, user string, pin tool.Pin) (pytool.Settings, error) {
	return pytool.Settings{
		Valves: json.RawMessage(`{"key":"` + toolSecret + `"}`), UserValves: json.RawMessage(`{"of":"` + user + `"}`),
		User: pytool.User{ID: user, Name: workspace + "/" + pin.ID},
	}, s.err
}

func TestOrdersForPythonToolsCarryNoSecretInClear(t *testing.T) {
	r := newRig(t, func(d *Dispatcher) { d.Boxes, d.Settings = d.Keys.(*KeyFolder), settings{} })
	one := r.runner("r1")
	box := make(chan *ecdh.PrivateKey, 1)
	box <- one.rebox()
	got := one.orders(accept)
	inv := tool.Invocation{Program: tool.PythonTool, Function: &tool.Function{
		Pin: tool.Pin{ID: "calc"}, Content: "source", Name: "add", Arguments: json.RawMessage(`{"a":1}`),
	}}
	c := run.Call{ID: "call_1", Run: "run_1", Session: "ses_1", Workspace: "w1", Epoch: 1, Runner: "r1", Incarnation: one.incarnation}
	reply, err := r.d.Call(t.Context(), session.Session{ID: "ses_1"}, c, inv.CalledBy("usr_1"))
	if err != nil || !reply.Accepted {
		t.Fatalf("got %+v, %v", reply, err)
	}
	order := got.all()[0]
	if order.Call.Program != wire.PythonTool || order.Call.InArgv {
		t.Errorf("got %+v", order.Call)
	}
	var q wire.ToolRequest
	if err := strictjson.Decode(order.Call.Script, &q); err != nil {
		t.Fatal(err)
	}
	if q.Op != wire.ToolCall || q.ID != "calc" || q.Content != "source" || q.Function != "add" || string(q.Arguments) != `{"a":1}` {
		t.Errorf("got %+v", q)
	}
	plain, err := envelope.OpenBox(<-box, "call_1", q.Sealed)
	if err != nil {
		t.Fatal(err)
	}
	var secrets wire.ToolSecrets
	if err := strictjson.Decode(plain, &secrets); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(secrets.Valves), toolSecret) || string(secrets.UserValves) != `{"of":"usr_1"}` || secrets.User.ID != "usr_1" || secrets.User.Role != "user" {
		t.Errorf("got %s, %+v", plain, secrets.User)
	}
	for _, clear := range []string{toolSecret, base64.StdEncoding.EncodeToString([]byte(toolSecret))[:20]} {
		if bytes.Contains(got.raw[0], []byte(clear)) || bytes.Contains(order.Call.Script, []byte(clear)) {
			t.Errorf("%q is in the order", clear)
		}
	}
}

func TestLargeRequestsForPythonToolsAreBlobs(t *testing.T) {
	r := newRig(t, func(d *Dispatcher) { d.Boxes, d.Settings = d.Keys.(*KeyFolder), settings{} })
	one := r.runner("r1")
	got := one.orders(accept)
	inv := tool.Invocation{Program: tool.PythonTool, Function: &tool.Function{Pin: tool.Pin{ID: "t"}, Content: string(big(900 << 10)), Name: "f"}}
	c := run.Call{ID: "call_1", Run: "run_1", Session: "ses_1", Workspace: "w1", Epoch: 1, Runner: "r1", Incarnation: one.incarnation}
	if reply, err := r.d.Call(t.Context(), session.Session{ID: "ses_1"}, c, inv); err != nil || !reply.Accepted {
		t.Fatalf("got %+v, %v", reply, err)
	}
	if call := got.all()[0].Call; call.Blob == nil || len(call.Script) > 0 {
		t.Errorf("got %+v", call)
	}
}

func TestWhyAPythonToolGetsNoSettingsIsTold(t *testing.T) {
	why := fault.New(fault.Conflict, "it was set anew")
	r := newRig(t, func(d *Dispatcher) { d.Boxes, d.Settings = d.Keys.(*KeyFolder), settings{err: why} })
	one := r.runner("r1")
	inv := tool.Invocation{Program: tool.PythonTool, Function: &tool.Function{Pin: tool.Pin{ID: "t", Revision: 1}, Name: "f"}}
	c := run.Call{ID: "call_1", Run: "run_1", Session: "ses_1", Workspace: "w1", Epoch: 1, Runner: "r1", Incarnation: one.incarnation}
	reply, err := r.d.Call(t.Context(), session.Session{ID: "ses_1"}, c, inv)
	if err != nil || reply.Accepted || reply.Code != codeNotSent || reply.Reason != "it was set anew" {
		t.Errorf("got %+v, %v", reply, err)
	}
}

func TestNoOrderForAPythonToolWithoutItsSettings(t *testing.T) {
	for name, change := range map[string]func(*Dispatcher){
		"no keys":     func(*Dispatcher) {},
		"no settings": func(d *Dispatcher) { d.Boxes, d.Settings = d.Keys.(*KeyFolder), settings{err: errors.New("down")} },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, change)
			one := r.runner("r1")
			got := one.orders(accept)
			inv := tool.Invocation{Program: tool.PythonTool, Function: &tool.Function{Pin: tool.Pin{ID: "t"}, Name: "f"}}
			c := run.Call{ID: "call_1", Run: "run_1", Session: "ses_1", Workspace: "w1", Epoch: 1, Runner: "r1", Incarnation: one.incarnation}
			reply, err := r.d.Call(t.Context(), session.Session{ID: "ses_1"}, c, inv)
			if err != nil || reply.Accepted || reply.Code != codeNotSent || len(got.all()) > 0 {
				t.Errorf("got %+v, %v, %d orders", reply, err, len(got.all()))
			}
		})
	}
}

// rebox gives the runner a box key that the test has.
func (r *runner) rebox() *ecdh.PrivateKey {
	r.t.Helper()
	private, err := envelope.LoadOrMake(r.dir + "/" + r.id + ".key")
	if err != nil {
		r.t.Fatal(err)
	}
	p := envelope.Public{Sign: r.signer.Public(), Box: private.Box.PublicKey()}
	if err := envelope.WritePublic(r.dir+"/"+r.id+".pub", p); err != nil {
		r.t.Fatal(err)
	}
	return private.Box
}

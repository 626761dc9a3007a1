package dispatch

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

func (s settings) SettingsOf(_ context.Context, workspace, user, id string) (pytool.Settings, error) {
	return pytool.Settings{
		Valves: json.RawMessage(`{"key":"` + toolSecret + `"}`), UserValves: json.RawMessage(`{"of":"` + user + `"}`),
		User: pytool.User{ID: user, Name: workspace + "/" + id},
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

// asked stands for the sandboxes: every question ends as end says.
type asked struct {
	t      *testing.T
	ready  int
	end    func(q *tool.Inquiry, call string) run.Call
	hold   chan struct{} // closed: go on
	open   atomic.Int64
	most   atomic.Int64
	mu     sync.Mutex
	closed int
}

func (a *asked) Any(context.Context, string) (int, error) { return a.ready, nil }

func (a *asked) CreateInternal(_ context.Context, workspace string) (session.Session, error) {
	return session.Session{ID: "own_1", Workspace: workspace}, nil
}

func (a *asked) CloseInternal(context.Context, session.Session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed++
}

func (a *asked) Ask(ctx context.Context, _ session.Session, inv tool.Invocation) (run.Call, error) {
	n := a.open.Add(1)
	defer a.open.Add(-1)
	for most := a.most.Load(); n > most && !a.most.CompareAndSwap(most, n); most = a.most.Load() {
	}
	if a.hold != nil {
		select {
		case <-a.hold:
		case <-ctx.Done():
		}
	}
	return a.end(inv.Inquiry, "call_1"), nil
}

// boxed is a call that ended with that answer.
func boxed(t *testing.T, q *tool.Inquiry, call string, status run.CallStatus, answer wire.ToolAnswer) run.Call {
	t.Helper()
	plain, err := strictjson.Encode(answer)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdh.X25519().NewPublicKey(q.ReplyTo)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := envelope.SealBox(key, call, plain)
	if err != nil {
		t.Fatal(err)
	}
	c := run.Call{ID: call, Status: status, Result: run.Result{Value: sealed, HasValue: true}}
	if status != run.OK {
		c.Result.Error = &run.Failure{Code: "wall_clock", Message: "too long"}
	}
	return c
}

func (a *asked) describer() *Describer {
	return &Describer{Sessions: a, Runs: a, Fleet: a, Pool: "default"}
}

func TestDescriptions(t *testing.T) {
	a := &asked{t: t, ready: 1}
	a.end = func(q *tool.Inquiry, call string) run.Call {
		if q.Ask != tool.Describe || q.ID != "t" || q.Content != "source" || string(q.Values) != `{"k":1}` {
			t.Errorf("asked %+v", q)
		}
		return boxed(t, q, call, run.OK, wire.ToolAnswer{Description: &wire.ToolDescription{
			Specs: json.RawMessage(`[]`), Manifest: map[string]string{"title": "T"}, Valves: json.RawMessage("null"), UserValves: json.RawMessage(`{}`), Citation: true,
		}})
	}
	src := pytool.Source{Workspace: "w1", ID: "t", Content: "source"}
	d, err := a.describer().Describe(t.Context(), src, json.RawMessage(`{"k":1}`))
	if err != nil || string(d.Specs) != "[]" || string(d.Manifest) != `{"title":"T"}` || !d.Citation || string(d.UserValves) != "{}" {
		t.Errorf("got %+v, %v", d, err)
	}
	a.end = func(q *tool.Inquiry, call string) run.Call {
		if q.Ask != tool.ValidateValves || q.Which != pytool.WhichUserValves {
			t.Errorf("asked %+v", q)
		}
		return boxed(t, q, call, run.OK, wire.ToolAnswer{Values: json.RawMessage(`{"k":"v"}`)})
	}
	values, err := a.describer().ValidateValves(t.Context(), src, pytool.ValvesCheck{Which: pytool.WhichUserValves, Values: json.RawMessage(`{"k":"v"}`)})
	if err != nil || string(values) != `{"k":"v"}` {
		t.Errorf("got %s, %v", values, err)
	}
	if a.closed != 2 {
		t.Errorf("%d sandboxes were thrown away", a.closed)
	}
}

func TestSourcesThatCannotBeDescribed(t *testing.T) {
	failed := wire.ToolAnswer{Error: &wire.ToolError{Kind: "load", Message: "no good"}}
	lost := func(status run.CallStatus, code string) func(*tool.Inquiry, string) run.Call {
		return func(*tool.Inquiry, string) run.Call {
			return run.Call{Status: status, Result: run.Result{Error: &run.Failure{Code: code, Message: "it is so"}}}
		}
	}
	with := func(status run.CallStatus, answer wire.ToolAnswer) func(*tool.Inquiry, string) run.Call {
		return func(q *tool.Inquiry, call string) run.Call { return boxed(t, q, call, status, answer) }
	}
	for name, c := range map[string]struct {
		end        func(*tool.Inquiry, string) run.Call
		kind       fault.Kind
		code, says string
	}{
		"does not load":     {with(run.OK, failed), fault.Invalid, "tool_load", "no good"},
		"runs too long":     {with(run.TimedOut, failed), fault.Invalid, "tool_load", "no good"},
		"lacks a package":   {with(run.OK, wire.ToolAnswer{Description: &wire.ToolDescription{Missing: []string{"numpy"}}}), fault.Invalid, "tool_missing_module", "numpy"},
		"runner lost":       {lost(run.RunnerLost, "runner_lost"), fault.Unavailable, "runner_lost", "nothing was stored"},
		"lost with a value": {with(run.RunnerLost, failed), fault.Unavailable, "", "nothing was stored"},
		"no slot":           {lost(run.StartFailed, "capacity"), fault.Unavailable, "capacity", "it is so"},
		"still waiting":     {func(*tool.Inquiry, string) run.Call { return run.Call{Status: run.Pending} }, fault.Unavailable, "capacity", "no runner"},
		"another's answer": {func(*tool.Inquiry, string) run.Call {
			return run.Call{ID: "call_1", Status: run.OK, Result: run.Result{Value: []byte("x"), HasValue: true}}
		}, fault.Internal, "", ""},
		"an answer to something else": {with(run.OK, wire.ToolAnswer{Values: json.RawMessage(`{}`)}), fault.Internal, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := &asked{t: t, ready: 1, end: c.end}
			_, err := a.describer().Describe(t.Context(), pytool.Source{Workspace: "w1"}, nil)
			f := fault.From(err)
			if f.Kind != c.kind || c.code != "" && f.Code != c.code || !strings.Contains(f.Message, c.says) {
				t.Errorf("got %s %q: %v", f.Kind, f.Code, err)
			}
			if a.closed != 1 {
				t.Errorf("%d sandboxes were thrown away", a.closed)
			}
		})
	}
	a := &asked{t: t}
	if _, err := a.describer().Describe(t.Context(), pytool.Source{}, nil); !fault.Is(err, fault.Unavailable) || fault.From(err).Code != "no_runner" || a.closed != 0 {
		t.Errorf("without a runner: %v, %d sandboxes", err, a.closed)
	}
}

func TestAWorkspaceDescribesAFewAtOnce(t *testing.T) {
	a := &asked{t: t, ready: 1, hold: make(chan struct{})}
	a.end = func(q *tool.Inquiry, call string) run.Call {
		return boxed(t, q, call, run.OK, wire.ToolAnswer{Values: json.RawMessage(`{}`)})
	}
	d := a.describer()
	d.Each = 2
	var wg sync.WaitGroup
	ask := func(workspace string) {
		wg.Go(func() {
			if _, err := d.ValidateValves(t.Context(), pytool.Source{Workspace: workspace}, pytool.ValvesCheck{}); err != nil {
				t.Error(err)
			}
		})
	}
	for range 6 {
		ask("w1")
	}
	eventually(t, "two are asked", func() bool { return a.open.Load() == 2 })
	ask("w2") // another's are another's
	eventually(t, "a third is", func() bool { return a.open.Load() == 3 })
	hurry := d
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := hurry.ValidateValves(short, pytool.Source{Workspace: "w1"}, pytool.ValvesCheck{}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("who did not want to wait got %v", err)
	}
	close(a.hold)
	wg.Wait()
	if a.most.Load() > 3 {
		t.Errorf("%d at once", a.most.Load())
	}
	if len(d.slots) != 0 {
		t.Errorf("%d workspaces are remembered", len(d.slots))
	}
}

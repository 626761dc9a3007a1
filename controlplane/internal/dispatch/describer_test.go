package dispatch

import (
	"context"
	"crypto/ecdh"
	"encoding/json"
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
		"lacks a package":   {with(run.OK, wire.ToolAnswer{Error: &wire.ToolError{Kind: "missing_module", Message: "no package numpy"}}), fault.Invalid, "tool_missing_module", "numpy"},
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

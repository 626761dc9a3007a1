package dispatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

const (
	orderLife      = 30 * time.Second // how long an order may be carried out
	requestTimeout = 3 * time.Second  // how long a runner may take to answer
	reachWait      = 20 * time.Second // how long a call waits for a runner that surely has not got it
	maxOrderReply  = 64 << 10
)

// Codes of replies that no runner gave: the order never left, nothing ran.
const (
	codeUnreachable = "unreachable"
	codeTooLarge    = "too_large"
	codeNotSent     = "not_sent"
)

// Announce puts a ticket for the session's epoch before the pool's runners.
// The same epoch twice within a minute is one ticket.
func (d *Dispatcher) Announce(ctx context.Context, s session.Session) error {
	d.setUp()
	data, err := strictjson.Encode(wire.Ticket{V: wire.Version, Session: s.ID, Epoch: s.Epoch})
	if err != nil {
		return fmt.Errorf("encode ticket: %w", err)
	}
	id := jetstream.WithMsgID(fmt.Sprintf("%s/%d", s.ID, s.Epoch))
	_, err = d.JS.Publish(ctx, bus.Start(d.Pool), data, id)
	if errors.Is(err, jetstream.ErrNoStreamResponse) { // its store was lost, or we are first
		d.recheck()
		if err = d.ensure(ctx); err == nil {
			_, err = d.JS.Publish(ctx, bus.Start(d.Pool), data, id)
		}
	}
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "the message bus is not reachable")
	}
	return nil
}

// Call sends a call to the runner that the call names. An error means that
// nobody answered: the runner may have it or not. A reply that is not
// accepted means that nothing was started, nor will be.
func (d *Dispatcher) Call(ctx context.Context, s session.Session, c run.Call, inv tool.Invocation) (run.Reply, error) {
	call := wireCall(c, inv)
	if inv.Program == wire.PythonTool {
		script, err := d.toolRequest(ctx, c, inv)
		if err != nil {
			d.Log.WarnContext(ctx, "request for a Python tool not made", "call", c.ID, "error", err)
			reason := "what the tool is set to could not be sealed for the runner"
			if f := fault.From(err); f.Kind == fault.Conflict {
				reason = f.Message
			}
			return run.Reply{Code: codeNotSent, Reason: reason}, nil
		}
		call.Script = script
	}
	if len(call.Script) > wire.MaxInline {
		blob, err := d.putBlob(ctx, c.Runner, scriptBlob(c.ID), call.Script)
		if err != nil {
			d.Log.WarnContext(ctx, "script not kept for the runner", "call", c.ID, "error", err)
			return run.Reply{Code: codeNotSent, Reason: "the script could not be put on the bus"}, nil
		}
		call.Script, call.Blob = nil, blob
	}
	o := d.order(wire.OrderCall, to{c.Runner, c.Incarnation, c.Workspace, c.Session, c.Epoch})
	o.Call = &call
	sealed, err := d.Signer.Seal(wire.OrderType, o)
	switch {
	case err != nil:
		return run.Reply{}, fmt.Errorf("seal call %s: %w", c.ID, err)
	case len(sealed) > wire.MaxOrder:
		return run.Reply{Code: codeTooLarge, Reason: "the order is too large"}, nil
	}
	return d.deliver(ctx, c.Runner, sealed)
}

// deliver sends until somebody listens: an order that had no responder is
// known to be nowhere. It gives up before the order's life ends.
func (d *Dispatcher) deliver(ctx context.Context, runner string, sealed []byte) (run.Reply, error) {
	end := d.Now().Add(reachWait)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if d.Bus.IsConnected() {
			r, err := d.request(ctx, runner, sealed)
			if !errors.Is(err, nats.ErrNoResponders) {
				return r, err
			}
		}
		if sleep(ctx, pause); ctx.Err() != nil || d.Now().After(end) {
			return run.Reply{Code: codeUnreachable, Reason: "runner " + runner + " does not listen for orders"}, nil
		}
	}
}

// Cancel asks the session's runner to end a call.
func (d *Dispatcher) Cancel(ctx context.Context, s session.Session, callID string) (run.Reply, error) {
	return d.tell(ctx, wire.OrderCancel, s, callID)
}

// Status asks the session's runner what became of a call. From then on the
// runner refuses a call that it did not know.
func (d *Dispatcher) Status(ctx context.Context, s session.Session, callID string) (run.Reply, error) {
	return d.tell(ctx, wire.OrderStatus, s, callID)
}

// Stop asks the session's runner to end its sandbox.
func (d *Dispatcher) Stop(ctx context.Context, s session.Session) error {
	r, err := d.tell(ctx, wire.OrderStop, s, "")
	if err == nil && !r.Accepted {
		err = fault.New(fault.Conflict, "runner %s did not stop the session", s.Runner).WithCode(r.Code)
	}
	return err
}

// tell sends an order that may be sent again, once.
func (d *Dispatcher) tell(ctx context.Context, kind wire.OrderKind, s session.Session, target string) (run.Reply, error) {
	o := d.order(kind, to{s.Runner, s.Incarnation, s.Workspace, s.ID, s.Epoch})
	o.Target = target
	sealed, err := d.Signer.Seal(wire.OrderType, o)
	if err != nil {
		return run.Reply{}, fmt.Errorf("seal %s: %w", kind, err)
	}
	return d.request(ctx, s.Runner, sealed)
}

// request sends an order and waits for the runner's answer.
func (d *Dispatcher) request(ctx context.Context, runner string, sealed []byte) (run.Reply, error) {
	if !bus.ValidRunner(runner) {
		return run.Reply{}, fmt.Errorf("order for %.80q, which is no runner", runner)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	m, err := d.Bus.RequestWithContext(ctx, bus.Order(runner), sealed)
	if err != nil {
		return run.Reply{}, fault.Wrap(err, fault.Unavailable, "runner %s did not answer", runner)
	}
	var r wire.OrderReply
	if len(m.Data) > maxOrderReply {
		return run.Reply{}, fmt.Errorf("answer of runner %s is %d bytes", runner, len(m.Data))
	}
	if err := strictjson.Decode(m.Data, &r); err != nil {
		return run.Reply{}, fmt.Errorf("answer of runner %s: %w", runner, err)
	}
	return reply(r), nil
}

// to is an order's audience and object.
type to struct {
	runner, incarnation, workspace, session string
	epoch                                   int64
}

func (d *Dispatcher) order(kind wire.OrderKind, t to) wire.Order {
	now := d.Now()
	return wire.Order{
		V:           wire.Version,
		JTI:         d.NewID(),
		Kind:        kind,
		Runner:      t.runner,
		Incarnation: t.incarnation,
		IssuedAt:    now.UnixMilli(),
		ExpiresAt:   now.Add(orderLife).UnixMilli(),
		Workspace:   t.workspace,
		Session:     t.session,
		Epoch:       t.epoch,
	}
}

// startOrder seals the order that answers a claim.
func (d *Dispatcher) startOrder(c session.Claim, g session.Grant) ([]byte, error) {
	o := d.order(wire.OrderStart, to{c.Runner, c.Incarnation, g.Session.Workspace, c.Session, c.Epoch})
	o.Start = &wire.Start{Policy: wirePolicy(g.Policy), PolicyDigest: g.Policy.Digest()}
	return d.Signer.Seal(wire.OrderType, o)
}

// scriptBlob names the blob of a call's script.
func scriptBlob(call string) string { return "script-" + call }

func wireCall(c run.Call, inv tool.Invocation) wire.Call {
	w := wire.Call{ID: c.ID, Run: c.Run, Program: inv.Program, InArgv: inv.InArgv, Script: []byte(inv.Script), Path: inv.Path, Encoding: inv.Encoding}
	if inv.Program == wire.FileWrite {
		w.Script = []byte(inv.Content)
	}
	return w
}

func wirePolicy(p policy.Policy) wire.Policy {
	return wire.Policy{
		FSAllowlist:      list(p.FSAllowlist),
		NetworkAllowlist: list(p.NetworkAllowlist),
		CPUShares:        p.CPUShares,
		MemoryMB:         p.MemoryMB,
		PIDsLimit:        p.PIDsLimit,
		WallClockSeconds: p.WallClockSeconds,
		OutputBytesLimit: p.OutputBytesLimit,
		BaseImage:        p.BaseImage,
	}
}

// list is never null on the wire.
func list(l []string) []string {
	if l == nil {
		return []string{}
	}
	return l
}

func reply(r wire.OrderReply) run.Reply {
	return run.Reply{Accepted: r.Accepted, Code: r.Code, Reason: clip(r.Reason, 500), State: r.State}
}

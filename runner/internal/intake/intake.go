// Package intake takes orders: it pulls tickets, claims sessions, opens what is
// sealed, refuses what is not for this start of this runner or was seen before,
// and tells the control plane every few seconds that the runner lives.
package intake

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/bigwave/bigwave/runner/internal/execution"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// work carries out what intake let in.
type work interface {
	Start(o wire.Order, over func()) error
	Fail(o wire.Order, f wire.Failure)
	Call(o wire.Order, over func()) (run func(), err error)
	Cancel(held wire.Held, call string)
	Stop(held wire.Held)
	Raise(held wire.Held)
	Abandon()
	Load() execution.Load
}

// How much is remembered and handled at once.
const (
	maxOrders   = 1 << 20
	maxCalls    = 1 << 21
	maxHandlers = 64
)

// Intake stands between the bus and the work. Run it once; Drain may be called
// at any time.
type Intake struct {
	Conn     *nats.Conn
	Keys     envelope.Keys // of the control plane
	Signer   *envelope.Signer
	Work     work
	To       Audience
	Pool     string
	Slots    int // live sandboxes at most
	Ceilings Ceilings

	About       About
	BeatEvery   time.Duration
	Unheard     time.Duration // beats unanswered for so long: no new calls; 0: 15 s
	KeepUnheard time.Duration // and for so long: sandboxes are closed; 0: 10 min

	Now func() time.Time
	Log *slog.Logger

	memory   *memory
	slots    chan struct{}
	handlers chan struct{}
	busy     sync.WaitGroup // handlers and claims
	quiet    *rate.Limiter  // of log lines about refusals

	draining atomic.Bool               // no new sessions
	stopping atomic.Bool               // no new calls either
	heard    atomic.Pointer[time.Time] // when the last answered beat was sent; nil: never
	known    chan struct{}

	mu      sync.Mutex
	rejects map[string]int64
}

// About is what beats say of the runner; it doesn't change.
type About struct {
	Version  string
	Backend  string
	Labels   map[string]string
	Enforces map[string]string
}

// Run listens, pulls and beats until ctx ends; then it sends the last beat.
// Drain first, and let the work end before ctx does.
func (in *Intake) Run(ctx context.Context) error {
	in.prepare()
	sub, err := in.Conn.SubscribeSync(bus.Order(in.To.Runner))
	if err != nil {
		return fmt.Errorf("listen for orders: %w", err)
	}
	if err := sub.SetPendingLimits(4096, 64<<20); err != nil {
		return fmt.Errorf("bound the orders that wait: %w", err)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return in.receive(gctx, sub) })
	g.Go(func() error { return in.beat(gctx) })
	g.Go(func() error { return in.tickets(gctx) })
	err = g.Wait()
	_ = sub.Unsubscribe() // fails only when the connection is closed
	in.busy.Wait()
	in.lastBeat(context.WithoutCancel(ctx))
	return err
}

func (in *Intake) prepare() {
	in.memory = newMemory(maxOrders, maxCalls)
	in.slots = make(chan struct{}, in.Slots)
	in.handlers = make(chan struct{}, maxHandlers)
	in.quiet = rate.NewLimiter(20, 50)
	in.known = make(chan struct{})
	in.rejects = map[string]int64{}
	if in.Unheard == 0 {
		in.Unheard = 15 * time.Second
	}
	if in.KeepUnheard == 0 {
		in.KeepUnheard = 10 * time.Minute
	}
}

// Drain takes no more sessions and calls: the runner is about to stop.
func (in *Intake) Drain() {
	in.draining.Store(true)
	in.stopping.Store(true)
}

// Rejects counts the refused orders by code.
func (in *Intake) Rejects() map[string]int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return maps.Clone(in.rejects)
}

// receive takes orders off the subscription until ctx ends; each gets a handler
// of its own.
func (in *Intake) receive(ctx context.Context, sub *nats.Subscription) error {
	for {
		m, err := sub.NextMsgWithContext(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, nats.ErrSlowConsumer): // some were dropped, and their senders will ask
			continue
		case err != nil:
			return fmt.Errorf("take the next order: %w", err)
		}
		in.handlers <- struct{}{}
		in.busy.Go(func() {
			defer func() { <-in.handlers }()
			in.handle(m)
		})
	}
}

func (in *Intake) handle(m *nats.Msg) {
	reply, act := in.decide(m.Subject, m.Data)
	in.answer(m, reply)
	if act != nil {
		act()
	}
}

func (in *Intake) answer(m *nats.Msg, reply wire.OrderReply) {
	data, err := strictjson.Encode(reply)
	if err == nil && m.Reply != "" {
		err = m.Respond(data)
	}
	if err != nil {
		in.Log.Warn("order was not answered", "error", err)
	}
}

// decide verifies an order and returns the answer and what is to be done after
// it was given. Nothing of a refused order runs.
func (in *Intake) decide(subject string, data []byte) (wire.OrderReply, func()) {
	o, s, r := in.verify(subject, data)
	var act func()
	if r == nil {
		act, r = in.prepared(o, s)
	}
	if r != nil {
		in.reject(o, r)
		return wire.OrderReply{Code: r.Code, Reason: r.Reason}, nil
	}
	return wire.OrderReply{Accepted: true, State: stateOf(o.Kind, s)}, act
}

func stateOf(kind wire.OrderKind, s state) string {
	if kind == wire.OrderCancel || kind == wire.OrderStatus {
		return string(s)
	}
	return ""
}

// verify makes the checks in their order: size, subject, envelope, signature,
// form, version, audience, time, epoch, seen before.
func (in *Intake) verify(subject string, data []byte) (wire.Order, state, *Refusal) {
	if len(data) > wire.MaxOrder {
		return wire.Order{}, unknown, refuse(envelope.ErrSize.Error(), "%d bytes, at most %d", len(data), wire.MaxOrder)
	}
	if subject != bus.Order(in.To.Runner) {
		return wire.Order{}, unknown, refuse(wire.RefusedSubject, "it came on another subject")
	}
	o, r := open(in.Keys, data)
	if r != nil {
		return o, unknown, r
	}
	now := in.Now().UnixMilli()
	if r := address(o, in.To, now); r != nil {
		return o, unknown, r
	}
	if r := shape(o); r != nil {
		return o, unknown, r
	}
	if o.Kind == wire.OrderStart {
		return o, unknown, refuse(wire.RefusedUnclaimed, "a start order comes only as the answer to a claim")
	}
	s, r := in.memory.admit(o, now)
	return o, s, r
}

// prepared makes the last checks, the runner's own, and returns the action.
func (in *Intake) prepared(o wire.Order, s state) (func(), *Refusal) {
	held := wire.Held{Session: o.Session, Epoch: o.Epoch}
	switch o.Kind {
	case wire.OrderCall:
		act, r := in.call(o, held)
		if r != nil {
			in.memory.mark(held, o.Call.ID, tombstone)
		}
		return act, r
	case wire.OrderCancel:
		if s == running {
			return func() { in.Work.Cancel(held, o.Target) }, nil
		}
	case wire.OrderStop:
		return func() { in.Work.Stop(held) }, nil
	case wire.OrderDrain:
		in.draining.Store(true)
		in.Log.Info("draining: no new sessions")
	}
	return nil, nil
}

func (in *Intake) call(o wire.Order, held wire.Held) (func(), *Refusal) {
	switch {
	case in.stopping.Load():
		return nil, refuse(wire.RefusedDraining, "this runner is shutting down")
	case in.silence() > in.Unheard:
		return nil, refuse(wire.RefusedUnheard, "this runner can't reach the control plane")
	}
	if r := callCeilings(*o.Call); r != nil {
		return nil, r
	}
	run, err := in.Work.Call(o, func() { in.memory.mark(held, o.Call.ID, finished) })
	if err != nil {
		return nil, refusalOf(err)
	}
	return run, nil
}

func refusalOf(err error) *Refusal {
	if r, ok := errors.AsType[*execution.Refused](err); ok {
		return &Refusal{Code: r.Code, Reason: r.Reason}
	}
	return refuse(wire.RefusedError, "the order could not be carried out")
}

// reject counts and logs a refusal. The log holds no part of the order but
// ids whose form was checked by then.
func (in *Intake) reject(o wire.Order, r *Refusal) {
	in.mu.Lock()
	in.rejects[r.Code]++
	n := in.rejects[r.Code]
	in.mu.Unlock()
	if in.quiet.Allow() {
		in.Log.Warn("order refused", "code", r.Code, "reason", r.Reason, "kind", string(o.Kind), "session", o.Session, "count", n)
	}
}

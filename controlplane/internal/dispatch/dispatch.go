// Package dispatch is the control plane's side of the bus: it seals orders
// and sends them, answers claims and beats, checks what runners report and
// hands it on, and lets clients watch a run. Here domain types become wire
// messages and back; nothing else of the control plane knows the wire.
package dispatch

import (
	"context"
	"crypto/ecdh"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
)

// Sessions moves sessions forward by what their runners say. A Conflict is
// the answer to a runner that does not own the session's epoch.
type Sessions interface {
	Claim(ctx context.Context, c session.Claim) (session.Grant, error)
	Started(ctx context.Context, c session.Claim, s session.Sandbox) error
	StartFailed(ctx context.Context, c session.Claim, code, field, message string) error
	Ended(ctx context.Context, c session.Claim, code, message string) error
}

// Runs moves runs forward. Apply takes each outcome once, and the same one
// again without an error. Heard wakes whoever waits on this replica; it does
// not block.
type Runs interface {
	Apply(ctx context.Context, o run.Outcome) error
	Heard(sessionID string, n run.Notice)
}

// Fleet takes beats and answers with what the runner holds without owning it.
type Fleet interface {
	Beat(ctx context.Context, b fleet.Beat) ([]fleet.Held, error)
}

// Keys knows which keys may sign for a runner.
type Keys interface {
	Keys(runner string) (envelope.Keys, error)
}

// Boxes knows to which key a runner's secrets are sealed.
type Boxes interface {
	Box(runner string) (*ecdh.PublicKey, error)
}

// Settings knows what a call of a Python tool is given besides its arguments.
type Settings interface {
	SettingsOf(ctx context.Context, workspace, user string, pin tool.Pin) (pytool.Settings, error)
}

// Records keeps the audit record.
type Records interface {
	InsertEvent(ctx context.Context, e audit.Event) error
}

// Dispatcher sends orders and listens for what comes back. Run has to run for
// anything to be heard; the other methods may be called from several
// goroutines, before Run and while it runs.
type Dispatcher struct {
	Bus      *nats.Conn
	JS       jetstream.JetStream
	Signer   *envelope.Signer
	Keys     Keys
	Boxes    Boxes    // nil: no order carries secrets, so Python tools are not called
	Settings Settings // likewise
	Sessions Sessions
	Runs     Runs
	Fleet    Fleet
	Records  Records
	Senders  func(ctx context.Context, run string) (runners []string, err error) // whose frames of a run count; nil: everybody's

	Pool    string // whose runners get the tickets
	Replica string // this control plane's own random name
	Limits  Limits
	Rejects *prometheus.CounterVec // by "what" and "reason"; may be nil
	Log     *slog.Logger
	Now     func() time.Time
	NewID   func() string // random, without prefix, never twice the same

	pools   sync.Map // pools whose consumer is known to be there
	blobs   atomic.Pointer[jetstream.Stream]
	beats   lastBeats
	records quota
	ready   atomic.Bool
	hearing atomic.Pointer[time.Time] // since when beats can be heard; nil: not now
	broken  chan struct{}             // asks for streams and consumers to be checked
	start   sync.Once
}

// queue is the group in which the replicas share what is asked of them.
const queue = "controlplane"

// handlers is how many requests of one kind are worked on at once.
const handlers = 32

// Run listens until ctx ends, then finishes what it has begun. While the bus
// is away it waits for it.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.setUp()
	var wg sync.WaitGroup
	defer wg.Wait()
	drop, err := d.listen(ctx, &wg)
	if err != nil {
		return err
	}
	defer drop()
	wg.Go(func() { d.track(ctx) })
	for pause := time.Duration(0); ctx.Err() == nil; {
		err := d.ensure(ctx)
		if err == nil {
			pause = 0
			d.ready.Store(true)
			err = d.consume(ctx)
		}
		d.ready.Store(false)
		if err != nil && ctx.Err() == nil {
			pause = min(max(2*pause, 100*time.Millisecond), 2*time.Second)
			d.Log.WarnContext(ctx, "bus is not ready", "error", err, "again_in", pause)
			sleep(ctx, pause)
		}
	}
	return nil
}

// setUp makes what the zero value lacks.
func (d *Dispatcher) setUp() {
	d.start.Do(func() { d.broken = make(chan struct{}, 1) })
}

// listen subscribes to all that runners ask and replicas tell.
func (d *Dispatcher) listen(ctx context.Context, wg *sync.WaitGroup) (drop func(), err error) {
	var subs []*nats.Subscription
	drop = func() {
		for _, s := range subs {
			_ = s.Unsubscribe() // fails only when the connection is closed
		}
	}
	add := func(s *nats.Subscription, e error) {
		if err = errors.Join(err, e); e == nil {
			subs = append(subs, s)
		}
	}
	add(d.Bus.QueueSubscribe(bus.AllClaims, queue, pooled(ctx, wg, d.onClaim)))
	add(d.Bus.QueueSubscribe(bus.AllBeats, queue, d.onBeat(ctx, wg)))
	add(d.Bus.QueueSubscribe(bus.AllBlobs, queue, pooled(ctx, wg, d.onBlob)))
	add(d.Bus.Subscribe(bus.AllNotices, d.onNotice))
	if err != nil {
		drop()
		return nil, fmt.Errorf("listen on the bus: %w", err)
	}
	return drop, nil
}

// pooled works on messages side by side, a bounded number of them.
func pooled(ctx context.Context, wg *sync.WaitGroup, handle func(context.Context, *nats.Msg)) nats.MsgHandler {
	slots := make(chan struct{}, handlers)
	return func(m *nats.Msg) {
		select {
		case <-ctx.Done():
			return
		case slots <- struct{}{}:
		}
		wg.Go(func() {
			defer func() { <-slots }()
			handle(ctx, m)
		})
	}
}

// track keeps Hearing true, and has everything checked after a break.
func (d *Dispatcher) track(ctx context.Context) {
	changes := d.Bus.StatusChanged(nats.CONNECTED, nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
	defer d.Bus.RemoveStatusListener(changes)
	for first := true; ; {
		switch connected := d.Bus.IsConnected(); {
		case !connected:
			d.hearing.Store(nil)
		case d.hearing.Load() == nil && d.Bus.FlushTimeout(requestTimeout) == nil: // the subscriptions have arrived
			now := d.Now()
			d.hearing.Store(&now)
			if !first {
				d.recheck()
			}
			first = false
		}
		select {
		case <-ctx.Done():
			return
		case <-changes:
		case <-time.After(time.Second): // a change that was missed
		}
	}
}

// recheck asks Run to look after streams and consumers.
func (d *Dispatcher) recheck() {
	select {
	case d.broken <- struct{}{}:
	default:
	}
}

// Hearing reports whether beats can be heard now, and since when.
func (d *Dispatcher) Hearing() (since time.Time, ok bool) {
	if at := d.hearing.Load(); at != nil {
		return *at, true
	}
	return time.Time{}, false
}

// Ready is nil when orders can go out and reports come in.
func (d *Dispatcher) Ready(context.Context) error {
	switch {
	case !d.Bus.IsConnected():
		return fault.New(fault.Unavailable, "not connected to the message bus")
	case !d.ready.Load():
		return fault.New(fault.Unavailable, "the streams on the message bus are not ready")
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

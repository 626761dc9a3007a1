package dispatch

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// handleTimeout is how long a claim or a beat may take.
const handleTimeout = 5 * time.Second

// onClaim answers a runner that wants a session: with its start order, or
// that it is taken.
func (d *Dispatcher) onClaim(ctx context.Context, m *nats.Msg) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), handleTimeout)
	defer cancel()
	d.reply(ctx, m, d.claim(ctx, m.Subject, m.Data))
}

func (d *Dispatcher) claim(ctx context.Context, subject string, data []byte) wire.ClaimReply {
	var c wire.Claim
	err := open(d.Keys, wire.ClaimType, maxClaim, subject, data, &c)
	if err == nil {
		err = checkClaim(c, subject, d.Now())
	}
	if err != nil {
		d.reject(ctx, audit.ClaimRejected, bus.RunnerOf(subject), c.Session, err)
		return wire.ClaimReply{Taken: true, Reason: reason(err)}
	}
	grant, err := d.Sessions.Claim(ctx, claim(c))
	if err != nil {
		return wire.ClaimReply{Taken: true, Reason: d.why(ctx, "claim", err)}
	}
	order, err := d.startOrder(claim(c), grant)
	if err != nil {
		return wire.ClaimReply{Taken: true, Reason: d.why(ctx, "seal start", err)}
	}
	return wire.ClaimReply{Order: order}
}

// why is what a runner is told about an error; the rest stays in the log.
func (d *Dispatcher) why(ctx context.Context, doing string, err error) string {
	f := fault.From(err)
	if f.Kind == fault.Internal || f.Kind == fault.Unavailable {
		d.Log.ErrorContext(ctx, "runner got no answer", "doing", doing, "error", err)
		return string(f.Kind)
	}
	return f.Message
}

// lastBeats remembers each runner's last beat, so that an older one that
// somebody kept can't bring a past start of the runner back.
type lastBeats struct {
	mu sync.Mutex
	at map[string]int64
}

// newer reports whether a beat of that time is not older than the last one.
func (l *lastBeats) newer(runner string, at int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at == nil {
		l.at = map[string]int64{}
	}
	if at < l.at[runner] {
		return false
	}
	l.at[runner] = at
	return true
}

// onBeat checks beats in the order in which they came and works on them side
// by side.
func (d *Dispatcher) onBeat(ctx context.Context, wg *sync.WaitGroup) nats.MsgHandler {
	work := make(chan struct{}, handlers)
	return func(m *nats.Msg) {
		b, err := d.openBeat(m.Subject, m.Data)
		if err != nil {
			d.reject(ctx, audit.BeatRejected, bus.RunnerOf(m.Subject), b.Incarnation, err)
			d.reply(ctx, m, wire.BeatReply{Reason: reason(err)})
			return
		}
		select {
		case <-ctx.Done():
			return
		case work <- struct{}{}:
		}
		wg.Go(func() {
			defer func() { <-work }()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), handleTimeout)
			defer cancel()
			d.reply(ctx, m, d.beat(ctx, b))
		})
	}
}

func (d *Dispatcher) openBeat(subject string, data []byte) (wire.Beat, error) {
	var b wire.Beat
	if err := open(d.Keys, wire.BeatType, maxBeat, subject, data, &b); err != nil {
		return b, err
	}
	if err := checkBeat(b, subject, d.Now()); err != nil {
		return b, err
	}
	if !d.beats.newer(b.Runner, b.At) {
		return b, refuse("replay", "an older beat")
	}
	return b, nil
}

func (d *Dispatcher) beat(ctx context.Context, b wire.Beat) wire.BeatReply {
	if err := d.ensurePool(ctx, b.Pool); err != nil {
		d.Log.WarnContext(ctx, "pool has no consumer yet", "pool", b.Pool, "error", err)
	}
	held, err := d.Fleet.Beat(ctx, beat(b, d.Now()))
	if err != nil {
		return wire.BeatReply{Reason: d.why(ctx, "beat", err)}
	}
	return wire.BeatReply{OK: true, Raised: raised(held)}
}

// reply answers a request; one without a reply subject gets none.
func (d *Dispatcher) reply(ctx context.Context, m *nats.Msg, v any) {
	if m.Reply == "" {
		return
	}
	data, err := strictjson.Encode(v)
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		d.Log.WarnContext(ctx, "answer not sent", "subject", m.Subject, "error", err)
	}
}

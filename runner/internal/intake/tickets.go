package intake

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// How tickets are pulled and claimed.
const (
	pullWait  = 5 * time.Second
	pullPause = 250 * time.Millisecond // after a failed pull, and between looks at whether to pull
	claimWait = 3 * time.Second
)

// tickets pulls one ticket at a time, and only while a slot is free for it.
func (in *Intake) tickets(ctx context.Context) error {
	select {
	case <-in.known: // the control plane has to know this start before it claims
	case <-ctx.Done():
		return nil
	}
	js, err := in.Conn.JetStream()
	if err != nil {
		return err
	}
	name := bus.PoolConsumer(in.Pool)
	sub, err := js.PullSubscribe("", name, nats.Bind(bus.Tickets, name), nats.SkipConsumerLookup())
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	for ctx.Err() == nil {
		if in.draining.Load() || in.silence() > in.Unheard {
			pause(ctx, pullPause)
			continue
		}
		select {
		case in.slots <- struct{}{}:
			in.pull(ctx, sub)
		case <-ctx.Done():
		}
	}
	return nil
}

// pull waits for one ticket; the slot that the caller took goes to it or back.
func (in *Intake) pull(ctx context.Context, sub *nats.Subscription) {
	wait, cancel := context.WithTimeout(ctx, pullWait)
	defer cancel()
	msgs, err := sub.Fetch(1, nats.Context(wait))
	if err != nil || len(msgs) == 0 {
		<-in.slots
		if ctx.Err() == nil && err != nil && !errors.Is(err, nats.ErrTimeout) && !errors.Is(err, context.DeadlineExceeded) {
			in.Log.Debug("no ticket could be pulled", "error", err)
			pause(ctx, pullPause)
		}
		return
	}
	in.busy.Go(func() {
		if !in.ticket(ctx, msgs[0]) {
			<-in.slots
		}
	})
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// ticket claims a session and starts it; false: the slot is free again.
func (in *Intake) ticket(ctx context.Context, m *nats.Msg) bool {
	if in.draining.Load() {
		_ = m.Nak() // another runner may take it; else it comes again by itself
		return false
	}
	in.busy.Go(func() { in.ack(ctx, m) }) // beside the claim, which alone decides

	var t wire.Ticket
	if err := strictjson.Decode(m.Data, &t); err != nil || t.V != wire.Version || !idForm.MatchString(t.Session) || t.Epoch < 1 {
		in.reject(wire.Order{}, refuse(wire.RefusedTicket, "the ticket is malformed"))
		return false
	}
	held := wire.Held{Session: t.Session, Epoch: t.Epoch}
	if !in.memory.reserve(held) {
		return false // it is here already, or was
	}
	defer in.memory.release(held)
	if err := in.claim(ctx, held); err != nil {
		in.Log.Info("session was not claimed", "session", held.Session, "epoch", held.Epoch, "why", err)
		return false
	}
	return true
}

// ack takes the ticket off the queue and waits for the queue's word; when it
// fails the ticket comes again and finds the session taken.
func (in *Intake) ack(ctx context.Context, m *nats.Msg) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimWait)
	defer cancel()
	if err := m.AckSync(nats.Context(ctx)); err != nil {
		in.Log.Warn("ticket could not be acknowledged", "error", err)
	}
}

var errTaken = errors.New("taken")

// claim asks for the session's start order, checks it and hands it on.
func (in *Intake) claim(ctx context.Context, held wire.Held) error {
	reply, err := in.askClaim(ctx, held)
	if err != nil {
		return err
	}
	if reply.Taken {
		return errTaken
	}
	o, r := in.verifyStart(reply.Order, held)
	if r != nil {
		in.reject(o, r)
		if r.Code == wire.RefusedCeiling { // genuine, but more than this runner allows: say so
			in.Work.Fail(o, wire.Failure{Code: string(fault.PolicyUnenforceable), Field: r.Field, Message: "The runner refuses the policy: " + r.Reason + "."})
		}
		return r
	}
	in.memory.open(held) // first: a call may come as soon as the start is reported
	err = in.Work.Start(o, func() {
		in.memory.close(held, in.Now().UnixMilli())
		<-in.slots
	})
	if err != nil {
		in.memory.close(held, in.Now().UnixMilli())
	}
	return err
}

func (in *Intake) askClaim(ctx context.Context, held wire.Held) (wire.ClaimReply, error) {
	data, err := in.Signer.Seal(wire.ClaimType, wire.Claim{
		V: wire.Version, Runner: in.To.Runner, Incarnation: in.To.Incarnation,
		Session: held.Session, Epoch: held.Epoch, At: in.Now().UnixMilli(),
	})
	if err != nil {
		return wire.ClaimReply{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	m, err := in.Conn.RequestWithContext(ctx, bus.Claim(in.To.Runner), data)
	if err != nil {
		return wire.ClaimReply{}, err
	}
	var reply wire.ClaimReply
	if err := strictjson.Decode(m.Data, &reply); err != nil {
		return wire.ClaimReply{}, err
	}
	return reply, nil
}

// verifyStart is verify for the start order that answers a claim.
func (in *Intake) verifyStart(data []byte, held wire.Held) (wire.Order, *Refusal) {
	if len(data) > wire.MaxOrder {
		return wire.Order{}, refuse(envelope.ErrSize.Error(), "%d bytes, at most %d", len(data), wire.MaxOrder)
	}
	o, r := open(in.Keys, data)
	if r != nil {
		return o, r
	}
	now := in.Now().UnixMilli()
	if r := address(o, in.To, now); r != nil {
		return o, r
	}
	if r := shape(o); r != nil {
		return o, r
	}
	if o.Kind != wire.OrderStart || o.Session != held.Session || o.Epoch != held.Epoch {
		return o, refuse(wire.RefusedEpoch, "it is not the start that was claimed")
	}
	if _, r := in.memory.admit(o, now); r != nil {
		return o, r
	}
	return o, startCeilings(o.Start.Policy, in.Ceilings)
}

package intake

import (
	"context"
	"errors"
	"time"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// How beats are sent.
const (
	beatWait   = 2 * time.Second
	beatHurry  = 250 * time.Millisecond // between beats until the first is answered
	reportMute = 30 * time.Second       // between log lines about silence
)

// beat tells the control plane that the runner lives, until ctx ends, and acts
// on what it hears, or no longer hears.
func (in *Intake) beat(ctx context.Context) error {
	began := in.Now()
	var told time.Time
	for ctx.Err() == nil {
		sent := time.Now()
		if err := in.sendBeat(ctx, false); err != nil && ctx.Err() == nil {
			if now := time.Now(); now.Sub(told) > reportMute {
				told = now
				in.Log.Warn("beat was not answered", "error", err)
			}
			in.abandon(began)
		}
		every := in.BeatEvery
		if in.heard.Load() == nil {
			every = min(every, beatHurry)
		}
		pause(ctx, every-time.Since(sent))
	}
	return nil
}

// abandon closes every sandbox once the control plane was silent for too long.
func (in *Intake) abandon(began time.Time) {
	quiet := in.silence()
	if in.heard.Load() == nil {
		quiet = in.Now().Sub(began)
	}
	if quiet > in.KeepUnheard {
		in.Work.Abandon()
	}
}

// silence is how long no beat was answered; very long before the first.
func (in *Intake) silence() time.Duration {
	heard := in.heard.Load()
	if heard == nil {
		return 1<<63 - 1
	}
	return in.Now().Sub(*heard)
}

// sendBeat sends one beat and takes the answer.
func (in *Intake) sendBeat(ctx context.Context, leaving bool) error {
	load := in.Work.Load()
	now := in.Now()
	data, err := in.Signer.Seal(wire.BeatType, wire.Beat{
		V: wire.Version, Runner: in.To.Runner, Incarnation: in.To.Incarnation, At: now.UnixMilli(),
		Pool: in.Pool, Version: in.About.Version, Backend: in.About.Backend,
		Labels: in.About.Labels, Enforces: in.About.Enforces,
		Slots: in.Slots, Used: len(load.Sessions), Draining: in.draining.Load(), StartFailures: load.StartFailures, StartFailure: load.StartFailure,
		Sessions: load.Sessions, Calls: load.Calls, Leaving: leaving,
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, beatWait)
	defer cancel()
	m, err := in.Conn.RequestWithContext(ctx, bus.Beat(in.To.Runner), data)
	if err != nil {
		return err
	}
	var reply wire.BeatReply
	if err := strictjson.Decode(m.Data, &reply); err != nil {
		return err
	}
	if !reply.OK {
		return errors.New("the control plane refused it: " + reply.Reason)
	}
	if in.heard.Swap(&now) == nil {
		close(in.known)
		in.Log.Info("runner is known to the control plane")
	}
	for _, held := range reply.Raised {
		in.Log.Warn("session no longer belongs to this runner", "session", held.Session, "epoch", held.Epoch)
		in.Work.Raise(held)
	}
	return nil
}

// lastBeat says goodbye.
func (in *Intake) lastBeat(ctx context.Context) {
	if !in.Conn.IsConnected() {
		return
	}
	if err := in.sendBeat(ctx, true); err != nil {
		in.Log.Warn("last beat was not answered", "error", err)
	}
}

package dispatch

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

const (
	lanes       = 16               // reports worked on side by side
	laneDepth   = 32               // reports that wait in each lane
	pullAhead   = 256              // reports on their way to this replica
	holdFor     = 25 * time.Second // how long a report is tried here before another replica may
	takeTimeout = 10 * time.Second // for one try
	maxTries    = 50               // deliveries after which a report that we can't take is dropped
)

// consume hands on reports until ctx ends or the consumer has to be looked
// after. Reports of one session keep their order; what was begun is finished.
func (d *Dispatcher) consume(ctx context.Context) error {
	cons, err := d.JS.Consumer(ctx, bus.Events, bus.FinalsConsumer)
	if err != nil {
		return fmt.Errorf("find consumer %s: %w", bus.FinalsConsumer, err)
	}
	var lane [lanes]chan jetstream.Msg
	var wg sync.WaitGroup
	for i := range lane {
		lane[i] = make(chan jetstream.Msg, laneDepth)
		wg.Go(func() {
			for m := range lane[i] {
				d.onReport(ctx, m)
			}
		})
	}
	seed := maphash.MakeSeed()
	failed := make(chan error, 1)
	cc, err := cons.Consume(func(m jetstream.Msg) {
		lane[maphash.String(seed, m.Subject())%lanes] <- m
	}, jetstream.PullMaxMessages(pullAhead), jetstream.PullExpiry(30*time.Second), jetstream.PullHeartbeat(3*time.Second),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			select {
			case failed <- err:
			default:
			}
		}))
	if err == nil {
		select {
		case <-ctx.Done():
		case <-d.broken:
		case err = <-failed:
		}
		cc.Drain() // what is here already is taken, or given back
		<-cc.Closed()
	}
	for i := range lane {
		close(lane[i])
	}
	wg.Wait()
	return err
}

// verdict says what becomes of a report's message.
type verdict int

const (
	done  verdict = iota // taken, or known already
	drop                 // will never be taken
	retry                // can't be taken now
)

// onReport checks a report and hands it on. Its message is acknowledged after
// the database has it; while the database is away the report waits here and
// then on the bus, so nothing is lost.
func (d *Dispatcher) onReport(ctx context.Context, m jetstream.Msg) {
	r, err := d.openReport(m.Subject(), m.Data())
	if err != nil {
		d.reject(ctx, audit.ResultRejected, bus.RunnerOf(m.Subject()), object(r), err)
		d.settle(ctx, m, drop)
		return
	}
	end := d.Now().Add(holdFor)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		v := d.take(ctx, m, r)
		if v != retry || ctx.Err() != nil || d.Now().After(end) {
			d.settle(ctx, m, v)
			return
		}
		_ = m.InProgress() // at worst it comes twice, which is harmless
		sleep(ctx, pause)
	}
}

func (d *Dispatcher) openReport(subject string, data []byte) (wire.Report, error) {
	var r wire.Report
	if err := open(d.Keys, wire.ReportType, maxReport, subject, data, &r); err != nil {
		return r, err
	}
	return r, checkReport(r, subject)
}

// take hands a report on. What was begun is finished even when ctx ends.
func (d *Dispatcher) take(ctx context.Context, m jetstream.Msg, r wire.Report) verdict {
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeTimeout)
	defer cancel()
	err := d.apply(work, r)
	switch {
	case err == nil:
		return done
	case fault.Is(err, fault.Conflict), fault.Is(err, fault.NotFound), fault.Is(err, fault.Invalid): // recorded there
		d.count("result", string(fault.From(err).Kind))
		d.Log.WarnContext(ctx, "report refused", "kind", string(r.Kind), "runner", r.Runner, "session", r.Session, "epoch", r.Epoch, "call", r.Call, "error", err)
		return drop
	case !fault.Is(err, fault.Unavailable) && tries(m) >= maxTries:
		d.reject(ctx, audit.ResultRejected, r.Runner, object(r), &refusal{"internal", err})
		return drop
	}
	d.Log.WarnContext(ctx, "report not taken yet", "kind", string(r.Kind), "session", r.Session, "call", r.Call, "error", err)
	return retry
}

// apply moves the session or the call forward by what the report says.
func (d *Dispatcher) apply(ctx context.Context, r wire.Report) error {
	switch r.Kind {
	case wire.SessionStarted:
		return d.Sessions.Started(ctx, holder(r), sandbox(*r.Sandbox))
	case wire.SessionFailed:
		return d.Sessions.StartFailed(ctx, holder(r), r.Failure.Code, r.Failure.Field, r.Failure.Message)
	case wire.SessionEnded:
		return d.Sessions.Ended(ctx, holder(r), r.Failure.Code, r.Failure.Message)
	}
	return d.applyDone(ctx, r)
}

func (d *Dispatcher) applyDone(ctx context.Context, r wire.Report) error {
	blob := r.Done.Output
	if blob != nil {
		data, err := d.blob(ctx, r.Runner, *blob)
		full := withOutput
		switch {
		case errors.Is(err, errBlobHash), errors.Is(err, errNoBlob):
			d.reject(ctx, audit.ResultRejected, r.Runner, r.Call, &refusal{"output_hash", err})
			full = func(w wire.Done, _ []byte) wire.Done { return withoutOutput(w) }
		case err != nil:
			return fault.Wrap(err, fault.Unavailable, "output of call %s can't be read now", r.Call)
		}
		w := full(*r.Done, data)
		r.Done = &w
	}
	if err := d.Runs.Apply(ctx, outcome(r)); err != nil {
		return err
	}
	if blob != nil {
		d.dropBlob(ctx, r.Runner, blob.ID)
	}
	return nil
}

// settle tells the stream what became of a message. A lost acknowledgement
// brings the report again, and again it is known already.
func (d *Dispatcher) settle(ctx context.Context, m jetstream.Msg, v verdict) {
	var err error
	switch {
	case v == done:
		err = m.Ack()
	case v == drop:
		err = m.Term()
	case ctx.Err() != nil: // we end: the next one takes it at once
		err = m.Nak()
	default:
		err = m.NakWithDelay(time.Second)
	}
	if err != nil {
		d.Log.WarnContext(ctx, "report not acknowledged", "error", err)
	}
}

// Settled waits until the reports that are on the stream now are taken.
func (d *Dispatcher) Settled(ctx context.Context) error {
	s, err := d.JS.Stream(ctx, bus.Events)
	if err != nil {
		return fmt.Errorf("find stream %s: %w", bus.Events, err)
	}
	last, err := s.GetLastMsgForSubject(ctx, bus.AllFinals)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return nil
	case err != nil:
		return fmt.Errorf("find the last report: %w", err)
	}
	for {
		c, err := s.Consumer(ctx, bus.FinalsConsumer)
		if err != nil {
			return fmt.Errorf("find consumer %s: %w", bus.FinalsConsumer, err)
		}
		if c.CachedInfo().AckFloor.Stream >= last.Sequence {
			return nil
		}
		if sleep(ctx, 20*time.Millisecond); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (d *Dispatcher) count(what, why string) {
	if d.Rejects != nil {
		d.Rejects.WithLabelValues(what, why).Inc()
	}
}

func tries(m jetstream.Msg) uint64 {
	meta, err := m.Metadata()
	if err != nil {
		return 0
	}
	return meta.NumDelivered
}

// object is what a report is about.
func object(r wire.Report) string {
	if r.Call != "" {
		return r.Call
	}
	return r.Session
}

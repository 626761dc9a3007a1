package dispatch

import (
	"context"
	"encoding/hex"
	"errors"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// Event is one step of a run as watchers see it. Seq is its place in the
// stream: watching after it continues, on any replica.
type Event struct {
	Seq    uint64
	Kind   string // "run.started" "call.started" "call.output" "call.event" "call.finished" "run.finished"
	Run    string
	Call   string
	N      int64  // frames: counts from 1 in each call
	Stream string // call.output: "stdout" "stderr"
	Data   []byte
}

// How a watcher reads: little ahead, so that a slow one costs little.
const (
	watchAhead = 64
	watchIdle  = time.Minute
	maxFrame   = 256 << 10
	clockSlack = 30 * time.Second // between us and the bus
)

// Watch yields the events of one run in stream order: from its first, or from
// the one after the sequence number after. It ends when ctx ends or the
// caller stops; an error is the last thing it yields. A sequence number that
// is no longer kept is a Gone.
func (d *Dispatcher) Watch(ctx context.Context, sessionID, runID string, after uint64) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := d.watch(ctx, sessionID, runID, after, yield); err != nil {
			yield(Event{}, err)
		}
	}
}

func (d *Dispatcher) watch(ctx context.Context, sessionID, runID string, after uint64, yield func(Event, error) bool) error {
	cfg, err := d.from(ctx, runID, after)
	if err != nil {
		return err
	}
	cfg.FilterSubjects = []string{bus.Frame("*", sessionID), bus.Notice(sessionID)}
	cfg.InactiveThreshold = watchIdle
	cons, err := d.JS.OrderedConsumer(ctx, bus.Events, cfg)
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer d.forget(ctx, cons)
	messages, err := cons.Messages(jetstream.PullMaxMessages(watchAhead))
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer messages.Stop()
	var from senders
	for {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return unlessEnded(ctx, err)
		}
		e, ok := event(m, runID)
		if !ok || !from.counts(ctx, d, runID, bus.RunnerOf(m.Subject())) {
			continue
		}
		if !yield(e, nil) {
			return nil
		}
	}
}

// from says where in the stream a run's watcher begins.
func (d *Dispatcher) from(ctx context.Context, runID string, after uint64) (jetstream.OrderedConsumerConfig, error) {
	began, known := bornAt(runID)
	began = began.Add(-clockSlack)
	cfg := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy}
	if known {
		cfg = jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &began}
	}
	if after == 0 && d.Now().Sub(began) < 5*time.Minute {
		return cfg, nil
	}
	s, err := d.JS.Stream(ctx, bus.Events)
	if err != nil {
		return cfg, fault.Wrap(err, fault.Unavailable, "the event stream is not reachable")
	}
	info := s.CachedInfo()
	gone := fault.New(fault.Gone, "the events of this run are no longer kept; read the run itself")
	switch state := info.State; {
	case after == 0 && known && info.Created.Add(-clockSlack).After(began.Add(clockSlack)),
		after == 0 && known && state.FirstSeq > 1 && (state.Msgs == 0 || state.FirstTime.After(began.Add(2*clockSlack))):
		return cfg, gone
	case after > 0 && (after+1 < state.FirstSeq || after > state.LastSeq):
		return cfg, gone
	case after > 0:
		cfg = jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1}
	}
	return cfg, nil
}

// bornAt reads the time out of an id that ends in a UUIDv7.
func bornAt(id string) (time.Time, bool) {
	_, digits, _ := strings.Cut(id, "_")
	raw, err := hex.DecodeString(digits)
	if err != nil || len(raw) != 16 || raw[6]>>4 != 7 {
		return time.Time{}, false
	}
	var ms int64
	for _, b := range raw[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms), true
}

// forget removes a watcher's consumer; one that stays ages out.
func (d *Dispatcher) forget(ctx context.Context, cons jetstream.Consumer) {
	info := cons.CachedInfo()
	if info == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = d.JS.DeleteConsumer(ctx, bus.Events, info.Name) // may be gone already
}

// senders remembers for one watcher which runners have calls of its run.
type senders struct {
	runners []string
	asked   time.Time
}

// askAgain bounds look-ups for runners that have no business with the run.
const askAgain = 200 * time.Millisecond

// counts reports whether what that runner says of the run is shown. A runner
// was sent a call, in the database, before it can speak of it.
func (s *senders) counts(ctx context.Context, d *Dispatcher, runID, runner string) bool {
	if runner == bus.ControlPlane || d.Senders == nil || slices.Contains(s.runners, runner) {
		return true
	}
	if d.Now().Sub(s.asked) < askAgain {
		return false
	}
	s.asked = d.Now()
	runners, err := d.Senders(ctx, runID)
	if err != nil {
		d.Log.WarnContext(ctx, "frame not shown", "run", runID, "runner", runner, "error", err)
		return false
	}
	s.runners = runners
	return slices.Contains(runners, runner)
}

// event reads a message of the stream, if it is one of the run's.
func event(m jetstream.Msg, runID string) (Event, bool) {
	if m.Headers().Get(bus.HeaderRun) != runID || len(m.Data()) > maxFrame {
		return Event{}, false
	}
	meta, err := m.Metadata()
	if err != nil {
		return Event{}, false
	}
	if bus.RunnerOf(m.Subject()) == bus.ControlPlane {
		var n wire.Notice
		err := strictjson.Decode(m.Data(), &n)
		return Event{Seq: meta.Sequence.Stream, Kind: n.Kind, Run: n.Run, Call: n.Call}, err == nil && n.Run == runID && isNotice(n.Kind)
	}
	var f wire.Frame
	if strictjson.Decode(m.Data(), &f) != nil || f.Run != runID || !isFrame(f.Kind) {
		return Event{}, false
	}
	return Event{Seq: meta.Sequence.Stream, Kind: string(f.Kind), Run: f.Run, Call: f.Call, N: f.N, Stream: f.Stream, Data: f.Data}, true
}

func isNotice(kind string) bool {
	return kind == run.RunStarted || kind == run.CallFinished || kind == run.RunFinished
}

func isFrame(k wire.FrameKind) bool {
	return k == wire.FrameStarted || k == wire.FrameOutput || k == wire.FrameEvent
}

// unlessEnded hides err when it only says that the watcher left.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, jetstream.ErrMsgIteratorClosed) {
		return nil
	}
	return fault.Wrap(err, fault.Unavailable, "the event stream is not reachable")
}

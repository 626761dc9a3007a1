package dispatch

import (
	"context"
	"encoding/hex"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// collect reads n events, or fails after 5 s.
func collect(t *testing.T, d *Dispatcher, runID string, after uint64, n int) []Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	var out []Event
	for e, err := range d.Watch(ctx, "ses_1", runID, after) {
		if err != nil {
			t.Fatalf("watch: %v", err)
		}
		if out = append(out, e); len(out) == n {
			return out
		}
	}
	t.Fatalf("watch ended after %d events of %d: %+v", len(out), n, out)
	return nil
}

func say(r *rig, w *runner, runID string) {
	r.d.Notify("ses_1", run.Notice{Kind: run.RunStarted, Run: runID})
	if err := r.d.Bus.Flush(); err != nil {
		r.t.Fatal(err)
	}
	w.frame(wire.Frame{Run: runID, Call: "call_1", Kind: wire.FrameStarted, N: 1}, "ses_1")
	w.frame(wire.Frame{Run: runID, Call: "call_1", Kind: wire.FrameOutput, N: 2, Stream: "stdout", Data: []byte{0xc3}}, "ses_1")
	w.report(w.done("ses_1", "call_1"))
	r.d.Notify("ses_1", run.Notice{Kind: run.CallFinished, Run: runID, Call: "call_1"})
	r.d.Notify("ses_1", run.Notice{Kind: run.SessionChanged, Run: runID})
	r.d.Notify("ses_1", run.Notice{Kind: run.RunFinished, Run: runID})
}

func TestWatchersSeeARunInOrderAndResume(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	say(r, w, "run_"+newID()) // another run of the session
	id := "run_" + newID()
	go say(r, w, id)
	events := collect(t, r.d, id, 0, 5)
	want := []string{"run.started", "call.started", "call.output", "call.finished", "run.finished"}
	for i, e := range events {
		if e.Kind != want[i] || e.Run != id || e.Seq == 0 || i > 0 && e.Seq <= events[i-1].Seq {
			t.Errorf("event %d: %+v, want %s", i, e, want[i])
		}
	}
	if e := events[2]; e.Call != "call_1" || e.N != 2 || e.Stream != "stdout" || string(e.Data) != "\xc3" {
		t.Errorf("output %+v", e)
	}
	for i := range 4 {
		rest := collect(t, r.d, id, events[i].Seq, 4-i)
		if !reflect.DeepEqual(rest, events[i+1:]) {
			t.Errorf("after event %d came %+v", i, rest)
		}
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for e, err := range r.d.Watch(ctx, "ses_1", "run_"+newID(), 0) {
		t.Errorf("a silent run gave %+v, %v", e, err)
	}
}

func TestWatchSaysWhatIsGone(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	id := "run_" + newID()
	say(r, w, id)
	events := collect(t, r.d, id, 0, 5)
	s, err := r.d.JS.Stream(t.Context(), bus.Events)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	say(r, w, "run_"+newID())
	old := uuid.Must(uuid.NewV7())
	copy(old[:6], []byte{1, 0, 0, 0, 0, 0}) // 2004
	for name, c := range map[string]struct {
		run   string
		after uint64
	}{
		"events were dropped":     {id, events[0].Seq},
		"beyond the end":          {id, 1 << 40},
		"older than what is kept": {"run_" + hex.EncodeToString(old[:]), 0},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			for _, err := range r.d.Watch(t.Context(), "ses_1", c.run, c.after) {
				if n++; !fault.Is(err, fault.Gone) {
					t.Fatalf("want gone, got %v", err)
				}
			}
			if n != 1 {
				t.Errorf("%d answers", n)
			}
		})
	}
}

func TestFramesOfARunnerThatDoesNotOwnTheSessionAreNotShown(t *testing.T) {
	r := newRig(t, func(d *Dispatcher) {
		d.Senders = func(context.Context, string) ([]string, error) { return []string{"r1"}, nil }
	})
	w, evil := r.runner("r1"), r.runner("evil")
	id := "run_" + newID()
	evil.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameOutput, N: 1, Data: []byte("fake")}, "ses_1")
	evil.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameKind("run.finished"), N: 2}, "ses_1")
	w.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameKind("run.finished"), N: 1}, "ses_1")
	w.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameOutput, N: 2, Data: []byte("true")}, "ses_1")
	if e := collect(t, r.d, id, 0, 1)[0]; string(e.Data) != "true" {
		t.Errorf("shown: %+v", e)
	}
}

func TestASlowWatcherLosesNothing(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	id := "run_" + newID()
	const frames = 500
	for i := range frames {
		w.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameOutput, N: int64(i + 1), Stream: "stdout", Data: fmt.Appendf(nil, "%d", i)}, "ses_1")
	}
	n := int64(0)
	for e, err := range r.d.Watch(t.Context(), "ses_1", id, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; e.N != n {
			t.Fatalf("frame %d after %d", e.N, n-1)
		}
		if n%100 == 0 {
			time.Sleep(20 * time.Millisecond)
		}
		if n == frames {
			break
		}
	}
	eventually(t, "its consumer is gone", func() bool {
		s, err := r.d.JS.Stream(t.Context(), bus.Events)
		return err == nil && s.CachedInfo().State.Consumers == 1 // the finals
	})
}

func TestAWatcherOutlivesARestartOfTheBus(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	id := "run_" + newID()
	got := make(chan Event, 10)
	go func() {
		for e, err := range r.d.Watch(t.Context(), "ses_1", id, 0) {
			if err != nil {
				return
			}
			got <- e
		}
	}()
	w.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameStarted, N: 1}, "ses_1")
	<-got
	r.nats.Close()
	r.startBus()
	eventually(t, "dispatcher is ready again", func() bool {
		_, hears := r.d.Hearing()
		return hears && r.d.Ready(t.Context()) == nil && w.nc.IsConnected()
	})
	w.frame(wire.Frame{Run: id, Call: "call_1", Kind: wire.FrameOutput, N: 2}, "ses_1")
	select {
	case e := <-got:
		if e.N != 2 {
			t.Errorf("after the restart came %+v", e)
		}
	case <-time.After(20 * time.Second):
		t.Error("nothing came after the restart")
	}
}

func TestIDsTellWhenTheyWereMade(t *testing.T) {
	if at, ok := bornAt("run_" + newID()); !ok || time.Since(at).Abs() > time.Minute {
		t.Errorf("%v, %v", at, ok)
	}
	for _, id := range []string{"", "run_", "run_1", "run_zz", "run_" + hex.EncodeToString(make([]byte, 16))} {
		if _, ok := bornAt(id); ok {
			t.Errorf("%q has a time", id)
		}
	}
}

package run_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

var someInvocation = tool.Invocation{Program: "bash", Script: "true"}

func TestTheNextStartGoesOnWithWhatWasOpen(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		w.runner.hold = true
		running := w.begin(s, calls("shell_exec", "shell_exec"))
		w.until("it runs", w.runner.holds(1))
		w.runner.set(func(r *runner) { r.ignore = true })
		waiting := w.begin(w.session(), calls("shell_exec"))

		w.stop()
		if _, err := w.runs.Start(t.Context(), alice, s.ID, calls("shell_exec")); !fault.Is(err, fault.Unavailable) {
			t.Errorf("a stopped replica accepts: %v", err)
		}
		w.runner.set(func(r *runner) { r.ignore, r.hold = false, false })
		w.replica("replica-2", false)
		if waiting = w.wait(waiting); waiting.Calls[0].Status != run.OK {
			t.Errorf("the one that waited: %v", statuses(waiting))
		}
		w.runs.Apply(t.Context(), w.runner.release(running.Calls[0].ID))
		if running = w.wait(running); !slices.Equal(statuses(running), []string{"ok", "ok"}) || w.runner.mostStarts() != 1 {
			t.Errorf("the one that ran: %v", statuses(running))
		}
	})
}

// crash ends a replica without its last words: what it owns stays its own
// until the lease ends.
func (w *world) crash() {
	w.stop()
	for _, r := range []string{"replica-1"} {
		w.db.TakeRuns(w.t.Context(), r, time.Now().Add(time.Hour), time.Now().Add(300*time.Millisecond), true, 1000)
		w.db.RenewLeases(w.t.Context(), r, time.Now().Add(300*time.Millisecond))
	}
}

func TestAnotherReplicaTakesOverWhenTheLeaseEnds(t *testing.T) {
	w := lite(t, seldom)
	s := w.live()
	w.runner.deaf = errors.New("killed before the order went out")
	r := w.begin(s, calls("shell_exec"))
	w.until("sent", func() bool {
		got, _ := w.runs.Get(t.Context(), alice, s.ID, r.ID)
		return got.Calls[0].Status == run.Sent
	})
	w.crash()
	began := time.Now()
	w.replica("replica-2", false)
	r = w.wait(r)
	if !slices.Equal(statuses(r), []string{"runner_lost/runner_lost"}) || w.runner.mostStarts() > 1 {
		t.Errorf("got %v", statuses(r))
	}
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("taken over after %v, while the lease held", took)
	}
}

func TestASoleReplicaTakesOverAtOnce(t *testing.T) {
	w := lite(t)
	w.runner.ignore = true
	r := w.begin(w.session(), calls("shell_exec"))
	w.stop()
	w.db.TakeRuns(t.Context(), "dead", time.Now().Add(time.Hour), time.Now().Add(time.Hour), true, 10)
	w.runner.set(func(r *runner) { r.ignore = false })
	w.replica("replica-2", true)
	if r = w.wait(r); r.Calls[0].Status != run.OK {
		t.Errorf("got %v", statuses(r))
	}
}

func TestAReportMayReachAnyReplica(t *testing.T) {
	w := lite(t)
	s := w.live()
	w.runner.hold = true
	r := w.begin(s, calls("shell_exec", "shell_exec"))
	w.until("it runs", w.runner.holds(1))
	second := w.service("replica-2", false)
	w.start(second)
	waited := make(chan run.Run)
	go func() {
		got, _ := second.Wait(context.Background(), alice, s.ID, r.ID)
		waited <- got
	}()
	for i := range 2 {
		w.until("it runs", w.runner.holds(1))
		if err := second.Apply(t.Context(), w.runner.release(r.Calls[i].ID)); err != nil {
			t.Fatal(err)
		}
		w.runs.Heard(s.ID, run.Notice{Kind: run.CallFinished, Run: r.ID})
	}
	if got := w.wait(r); !slices.Equal(statuses(got), []string{"ok", "ok"}) {
		t.Errorf("got %v", statuses(got))
	}
	if got := <-waited; got.Status != run.Finished {
		t.Errorf("on the other replica: %v", got.Status)
	}
	if w.runner.mostStarts() != 1 {
		t.Error("a call started twice")
	}
}

func TestClosingASessionEndsWhatIsOpen(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		w.runner.hold = true
		r := w.begin(s, calls("shell_exec", "shell_exec"))
		w.until("it runs", w.runner.holds(1))
		for range 2 {
			if err := w.sessions.Close(t.Context(), alice, s.ID); err != nil {
				t.Fatal(err)
			}
		}
		if r = w.wait(r); r.Status != run.Cancelled || !slices.Equal(statuses(r), []string{"cancelled/cancelled", "cancelled/cancelled"}) {
			t.Errorf("got %s %v", r.Status, statuses(r))
		}
		if w.runner.ordered("stop") != 1 {
			t.Errorf("%d stop orders", w.runner.ordered("stop"))
		}
		if err := w.sessions.Ended(t.Context(), w.runner.claim(s), "stopped", ""); err != nil {
			t.Errorf("the runner's word that it ended: %v", err)
		}
		got, err := w.sessions.Get(t.Context(), alice, s.ID)
		if err != nil || got.Status != session.Closed || got.Reason != session.ClosedByClient {
			t.Errorf("the session is %+v, %v", got, err)
		}
		if _, err := w.runs.Start(t.Context(), alice, s.ID, calls("shell_exec")); fault.From(err).Code != "session_closed" {
			t.Errorf("a run in a closed session: %v", err)
		}
	})
}

func TestTTLs(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		idle, err := w.sessions.Create(t.Context(), alice, session.NewSession{IdleTTL: 300 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		short, err := w.sessions.Create(t.Context(), alice, session.NewSession{TTL: 700 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		status := func(s session.Session) session.Session {
			got, err := w.sessions.Get(t.Context(), alice, s.ID)
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		w.runner.hold = true
		r := w.begin(idle, calls("shell_exec"))
		q := w.begin(short, calls("shell_exec"))
		w.until("both run", w.runner.holds(2))
		time.Sleep(400 * time.Millisecond)
		w.sessions.Sweep(t.Context())
		if got := status(idle); got.Status != session.Live {
			t.Errorf("a session with an open call is %s: %s", got.Status, got.Reason)
		}
		w.runs.Apply(t.Context(), w.runner.release(r.Calls[0].ID))
		w.wait(r)
		w.sessions.Sweep(t.Context())
		if got := status(idle); got.Status != session.Live {
			t.Errorf("right after its call it is %s: %s", got.Status, got.Reason)
		}
		w.until("idle TTL", func() bool { w.sessions.Sweep(t.Context()); return status(idle).Status == session.Closed })
		if got := status(idle).Reason; got != session.ClosedByIdle {
			t.Errorf("closed for %s", got)
		}
		w.until("TTL", func() bool { w.sessions.Sweep(t.Context()); return status(short).Status == session.Closed })
		if got := status(short).Reason; got != session.ClosedByTTL {
			t.Errorf("closed for %s", got)
		}
		if q = w.wait(q); q.Status != run.Cancelled {
			t.Errorf("its run is %s", q.Status)
		}
	})
	w := lite(t)
	for name, n := range map[string]session.NewSession{"negative": {TTL: -1}, "too long": {TTL: session.MaxTTL + 1}, "idle too long": {IdleTTL: session.MaxTTL + 1}} {
		if _, err := w.sessions.Create(t.Context(), alice, n); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

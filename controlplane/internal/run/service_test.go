package run_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

func pageOf(n int) page.Page { return page.Page{Limit: n} }

func each(t *testing.T, test func(t *testing.T, w *world)) {
	storetest.Run(t, func(t *testing.T, db *store.DB) { test(t, newWorld(t, db)) })
}

func lite(t *testing.T, tweak ...func(*run.Service)) *world {
	return newWorld(t, storetest.Open(t, storetest.URL(t, storetest.SQLite)), tweak...)
}

// seldom makes drivers ask for nothing.
func seldom(s *run.Service) { s.Pace.Ask = time.Hour }

func TestARunStartsItsSandboxAndEnds(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.session()
		r := w.finish(s, calls("shell_exec"))
		c := r.Calls[0]
		if r.Status != run.Finished || c.Status != run.OK || string(c.Result.Stdout) != "out of c1" || c.Result.Backend != "memory" ||
			c.Result.Enforced["memory_mb"] != "cgroup" || !strings.HasPrefix(c.Result.PolicyDigest, "sha256:") || *c.Result.ExitCode != 0 {
			t.Errorf("got %+v", r)
		}
		if r.StartedAt.IsZero() || r.FinishedAt.IsZero() || r.OpenCalls != 0 || r.Usage != (run.Usage{Calls: 1, CPUMS: 0.5, DurationMS: 1.5}) {
			t.Errorf("the run says %+v", r)
		}
		again := w.finish(s, calls("python_exec", "shell_exec"))
		if got := statuses(again); !slices.Equal(got, []string{"ok", "ok"}) || w.runner.announced.Load() != 1 {
			t.Errorf("got %v with %d tickets", got, w.runner.announced.Load())
		}
		list, _, err := w.runs.List(t.Context(), alice, s.ID, page.Page{})
		if err != nil || len(list) != 2 || list[0].ID != again.ID || len(list[0].Calls) != 2 || len(list[0].Calls[0].Result.Stdout) != 0 {
			t.Errorf("listed %+v, %v", list, err)
		}
		if got := len(w.events("call.finished")); got != 3 {
			t.Errorf("%d events of calls", got)
		}
	})
}

func TestCallsGoInOrderAndAFailureStopsNobody(t *testing.T) {
	w := lite(t)
	w.runner.result = func(c run.Call) (run.CallStatus, run.Result) {
		if c.ClientID == "c1" {
			return run.Error, run.Result{Error: &run.Failure{Code: "tool_failed", Message: "exit 7"}}
		}
		return run.OK, run.Result{}
	}
	r := w.finish(w.session(), calls("shell_exec", "nobody_knows", "shell_exec", "shell_exec"))
	if got := statuses(r); !slices.Equal(got, []string{"error/tool_failed", "invalid_arguments/unknown_tool", "ok", "ok"}) {
		t.Errorf("got %v", got)
	}
	if want := []string{"call c1", "call c3", "call c4"}; !slices.Equal(w.runner.orders, want) || r.Status != run.Finished {
		t.Errorf("ordered %v, run %s", w.runner.orders, r.Status)
	}
}

func TestParallelCallsRunAtOnce(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.runner.hold = true
		q := calls("shell_exec", "shell_exec", "shell_exec", "shell_exec")
		q.Parallel = true
		r := w.begin(w.session(), q)
		w.until("all run", w.runner.holds(4))
		for _, id := range w.runner.heldCalls() {
			go w.runs.Apply(t.Context(), w.runner.release(id))
		}
		if r = w.wait(r); r.Status != run.Finished || r.Usage.DurationMS != 6 {
			t.Errorf("got %v, %+v", statuses(r), r.Usage)
		}
	})
}

func TestNothingIsDispatchedForARunWithoutAValidCall(t *testing.T) {
	w := lite(t)
	s := w.session()
	q := calls("shell_exec", "nobody_knows")
	q.Calls[0].Arguments = []byte(`{"command":7}`)
	r := w.begin(s, q)
	if got := statuses(r); r.Status != run.Finished || !slices.Equal(got, []string{"invalid_arguments/invalid_arguments", "invalid_arguments/unknown_tool"}) || r.Calls[0].Result.Error.Field != "command" {
		t.Errorf("got %s %v on %q", r.Status, got, r.Calls[0].Result.Error.Field)
	}
	if w.runner.announced.Load() != 0 || len(w.events("call.finished")) != 2 {
		t.Error("a sandbox was asked for, or the calls were not recorded")
	}
	for name, q := range map[string]run.Request{
		"no call": {}, "129 calls": calls(slices.Repeat([]string{"shell_exec"}, 129)...),
		"no id":        {Calls: []run.ToolCall{{Name: "shell_exec"}}},
		"an id twice":  {Calls: []run.ToolCall{{ID: "a", Name: "shell_exec"}, {ID: "a", Name: "shell_exec"}}},
		"a NUL":        {Calls: []run.ToolCall{{ID: "a\x00", Name: "shell_exec"}}},
		"no name":      {Calls: []run.ToolCall{{ID: "a"}}},
		"a NUL's name": {Calls: []run.ToolCall{{ID: "a", Name: "x\x00"}}},
	} {
		if _, err := w.runs.Start(t.Context(), alice, s.ID, q); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestARunBelongsToItsSessionsOwner(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.session()
		r := w.finish(s, calls("shell_exec"))
		_, foreign := w.runs.Start(t.Context(), bob, s.ID, calls("shell_exec"))
		_, unknown := w.runs.Start(t.Context(), bob, "ses_"+strings.Repeat("0", 32), calls("shell_exec"))
		if fault.From(foreign).Kind != fault.NotFound || strings.ReplaceAll(foreign.Error(), s.ID, "X") != strings.ReplaceAll(unknown.Error(), "ses_"+strings.Repeat("0", 32), "X") {
			t.Errorf("foreign: %v, unknown: %v", foreign, unknown)
		}
		for _, p := range []struct {
			name string
			err  error
		}{
			{"start", second(w.runs.Start(t.Context(), other, s.ID, calls("shell_exec")))},
			{"get", second(w.runs.Get(t.Context(), bob, s.ID, r.ID))},
			{"get under another session", second(w.runs.Get(t.Context(), alice, w.session().ID, r.ID))},
			{"wait", second(w.runs.Wait(t.Context(), other, s.ID, r.ID))},
			{"cancel", second(w.runs.Cancel(t.Context(), bob, s.ID, r.ID))},
			{"list", third(w.runs.List(t.Context(), bob, s.ID, page.Page{}))},
			{"session", second(w.sessions.Get(t.Context(), bob, s.ID))},
			{"close", w.sessions.Close(t.Context(), other, s.ID)},
			{"a NUL", second(w.runs.Get(t.Context(), alice, s.ID, "run_\x00"))},
			{"a NUL session", second(w.runs.Start(t.Context(), alice, "ses_\x00", calls("shell_exec")))},
		} {
			if !fault.Is(p.err, fault.NotFound) {
				t.Errorf("%s: %v", p.name, p.err)
			}
		}
		if _, err := w.runs.Get(t.Context(), admin, s.ID, r.ID); err != nil {
			t.Errorf("the workspace's admin: %v", err)
		}
		mine, _, err1 := w.sessions.List(t.Context(), alice, page.Page{})
		his, _, err2 := w.sessions.List(t.Context(), bob, page.Page{})
		all, _, err3 := w.sessions.List(t.Context(), admin, page.Page{})
		if len(mine) != 2 || len(his) != 0 || len(all) != 2 || err1 != nil || err2 != nil || err3 != nil {
			t.Errorf("alice sees %d, bob %d, the admin %d sessions: %v %v %v", len(mine), len(his), len(all), err1, err2, err3)
		}
	})
}

func second[T any](_ T, err error) error      { return err }
func third[T, U any](_ T, _ U, e error) error { return e }

func TestASessionTakesSoManyRunsAtOnce(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		w.runner.hold = true
		errs := make(chan error)
		for range 20 {
			go func() { errs <- second(w.runs.Start(t.Context(), alice, s.ID, calls("shell_exec"))) }()
		}
		ok, busy := 0, 0
		for range 20 {
			switch err := <-errs; {
			case err == nil:
				ok++
			case fault.Is(err, fault.Busy) && fault.From(err).Code == "session_busy":
				busy++
			default:
				t.Error(err)
			}
		}
		if ok != 8 || busy != 12 {
			t.Errorf("%d accepted, %d busy", ok, busy)
		}
		w.until("all run", w.runner.holds(8))
	})
}

func TestWithoutARunnerCallsEndAndSayWhy(t *testing.T) {
	for name, tc := range map[string]struct {
		ready int
		want  string
	}{"none is there": {0, "start_failed/no_runner"}, "all are full": {1, "start_failed/capacity"}} {
		t.Run(name, func(t *testing.T) {
			w := lite(t)
			w.runner.ignore, w.runner.ready = true, tc.ready
			s := w.session()
			began := time.Now()
			r := w.finish(s, calls("shell_exec", "shell_exec"))
			if got := statuses(r); !slices.Equal(got, []string{tc.want, tc.want}) || r.Status != run.Finished || !r.Calls[0].Result.Retryable {
				t.Errorf("got %v", got)
			}
			if took := time.Since(began); took < 2*time.Second || took > 4*time.Second {
				t.Errorf("took %v", took)
			}
			// Tickets that nobody took were repeated under new epochs, and an old one is worth nothing.
			first := w.runner.tickets[0]
			if n := len(w.runner.tickets); n < 3 || w.runner.tickets[n-1].Epoch != first.Epoch+int64(n)-1 {
				t.Errorf("%d tickets", n)
			}
			if _, err := w.sessions.Claim(t.Context(), w.runner.claim(first)); !fault.Is(err, fault.Conflict) {
				t.Errorf("an old ticket: %v", err)
			}
			// Nobody waits any more: the session comes back to idle and can be used again.
			w.until("idle", func() bool {
				w.sessions.Sweep(t.Context())
				s, _ = w.db.Session(t.Context(), s.ID)
				return s.Status == session.Idle
			})
			w.runner.set(func(r *runner) { r.ignore = false })
			if r := w.finish(s, calls("shell_exec")); r.Calls[0].Status != run.OK {
				t.Errorf("later: %v", statuses(r))
			}
		})
	}
}

func TestAClaimWithoutAStartIsGivenToTheNext(t *testing.T) {
	w := lite(t)
	w.sessions.StartTimeout = 200 * time.Millisecond
	w.runner.claimOnly = true
	r := w.begin(w.session(), calls("shell_exec"))
	w.until("a claim", func() bool { s, _ := w.db.Session(t.Context(), r.Session); return s.Runner != "" })
	w.runner.set(func(r *runner) { r.claimOnly = false })
	if r = w.wait(r); r.Calls[0].Status != run.OK || w.runner.announced.Load() != 2 {
		t.Errorf("got %v after %d tickets", statuses(r), w.runner.announced.Load())
	}
}

func TestASandboxThatCantStartEndsTheCallsThatWait(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.runner.failStart = fault.PolicyUnenforceable
		s := w.session()
		r := w.finish(s, calls("shell_exec", "shell_exec"))
		if got := statuses(r); !slices.Equal(got, []string{"start_failed/policy_unenforceable", "start_failed/policy_unenforceable"}) || r.Calls[0].Result.Error.Field != "base_image" || r.Calls[0].Result.Error.Message != "it can't be" {
			t.Errorf("got %v, %+v", got, r.Calls[0].Result.Error)
		}
		w.runner.set(func(r *runner) { r.failStart = "" })
		if r := w.finish(s, calls("shell_exec")); r.Calls[0].Status != run.OK {
			t.Errorf("the next run: %v", statuses(r))
		}
	})
}

func TestARunnerThatIsFullIsAskedAgain(t *testing.T) {
	w := lite(t)
	w.runner.failStart = fault.Capacity
	r := w.begin(w.session(), calls("shell_exec"))
	w.until("some tickets", func() bool { return w.runner.announced.Load() > 2 })
	w.runner.set(func(r *runner) { r.failStart = "" })
	if r = w.wait(r); r.Calls[0].Status != run.OK {
		t.Errorf("got %v", statuses(r))
	}
}

func TestAnUnansweredOrderIsResolvedByItsStatus(t *testing.T) {
	t.Run("it had arrived", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.mute, w.runner.hold = true, true
		r := w.begin(s, calls("shell_exec"))
		w.until("it runs", w.runner.holds(1))
		w.until("its status was asked", func() bool { return w.runner.ordered("status") > 0 })
		w.runs.Apply(t.Context(), w.runner.release(r.Calls[0].ID))
		if r = w.wait(r); r.Calls[0].Status != run.OK {
			t.Errorf("got %v", statuses(r))
		}
	})
	t.Run("it was lost", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.deaf = errors.New("timeout")
		r := w.finish(s, calls("shell_exec"))
		if got := statuses(r); !slices.Equal(got, []string{"runner_lost/runner_lost"}) {
			t.Errorf("got %v", got)
		}
		// The delayed order itself finds a tombstone.
		w.runner.set(func(r *runner) { r.deaf = nil })
		if reply, _ := w.runner.Call(t.Context(), s, r.Calls[0], someInvocation); reply.Accepted {
			t.Error("a delayed order ran")
		}
	})
	t.Run("the bus is away for a while", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.mute, w.runner.hold, w.runner.statusError = true, true, errors.New("no servers")
		r := w.begin(s, calls("shell_exec"))
		w.until("it runs", w.runner.holds(1))
		time.Sleep(200 * time.Millisecond)
		w.runner.set(func(r *runner) { r.statusError = nil })
		w.runs.Apply(t.Context(), w.runner.release(r.Calls[0].ID))
		if r = w.wait(r); r.Calls[0].Status != run.OK || w.runner.mostStarts() != 1 {
			t.Errorf("got %v", statuses(r))
		}
	})
	t.Run("it is done and the report never comes", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.hold = true
		r := w.begin(s, calls("shell_exec"))
		w.until("it runs", w.runner.holds(1))
		w.runner.release(r.Calls[0].ID)
		if r = w.wait(r); !slices.Equal(statuses(r), []string{"runner_lost/result_unavailable"}) {
			t.Errorf("got %v", statuses(r))
		}
	})
}

func TestARefusedOrderStartsNothing(t *testing.T) {
	for code, want := range map[string]string{"expired": "start_failed/order_refused", "capacity": "start_failed/capacity", "draining": "start_failed/capacity"} {
		w := lite(t)
		s := w.live()
		w.runner.refuse = code
		if r := w.finish(s, calls("shell_exec", "shell_exec")); !slices.Equal(statuses(r), []string{want, want}) {
			t.Errorf("%s: got %v", code, statuses(r))
		}
	}
}

func TestACallThatTakesAWhileIsShownAsRunning(t *testing.T) {
	w := lite(t)
	s := w.live()
	w.runner.hold = true
	r := w.begin(s, calls("shell_exec"))
	w.until("it is shown as running", func() bool {
		r, _ = w.runs.Get(t.Context(), alice, s.ID, r.ID)
		return r.Calls[0].Status == run.Started && r.Status == run.Running
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if r, err := w.runs.Wait(ctx, alice, s.ID, r.ID); err != nil || r.Status != run.Running {
		t.Errorf("waiting so long: %v, %v", r.Status, err)
	}
}

func TestOnlyTheHolderOfTheEpochEndsACall(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		w.runner.hold = true
		r := w.begin(s, calls("shell_exec"))
		w.until("it runs", w.runner.holds(1))
		right := w.runner.release(r.Calls[0].ID)
		big := []byte(strings.Repeat("x", 1025))
		for name, forge := range map[string]func(*run.Outcome){
			"another runner":      func(o *run.Outcome) { o.Runner = "r2" },
			"another incarnation": func(o *run.Outcome) { o.Incarnation = "inc0" },
			"an old epoch":        func(o *run.Outcome) { o.Epoch-- },
			"a later epoch":       func(o *run.Outcome) { o.Epoch++ },
			"another call":        func(o *run.Outcome) { o.Call = "call_0" },
			"another run":         func(o *run.Outcome) { o.Run = "run_0" },
			"another session":     func(o *run.Outcome) { o.Session = "ses_0" },
			"a state on the way":  func(o *run.Outcome) { o.Status = run.Started },
			"no status":           func(o *run.Outcome) { o.Status = "" },
			"too much stdout":     func(o *run.Outcome) { o.Result.Stdout = big },
			"too much stderr":     func(o *run.Outcome) { o.Result.Stderr = big },
			"negative bytes":      func(o *run.Outcome) { o.Result.StderrBytes = -1 },
			"not a number":        func(o *run.Outcome) { o.Result.CPUMS = math.NaN() },
			"endless":             func(o *run.Outcome) { o.Result.DurationMS = math.Inf(1) },
			"negative time":       func(o *run.Outcome) { o.Result.DurationMS = -1 },
			"exit 300":            func(o *run.Outcome) { n := 300; o.Result.ExitCode = &n },
		} {
			o := right
			forge(&o)
			before := len(w.events("result_rejected"))
			if err := w.runs.Apply(t.Context(), o); !fault.Is(err, fault.Conflict) && !fault.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", name, err)
			}
			if len(w.events("result_rejected")) != before+1 {
				t.Errorf("%s left no record", name)
			}
		}
		if got, _ := w.runs.Get(t.Context(), alice, s.ID, r.ID); got.Status.Final() {
			t.Fatalf("a forged report ended the run: %v", statuses(got))
		}
		for range 2 { // the same again is fine
			if err := w.runs.Apply(t.Context(), right); err != nil {
				t.Errorf("the right one: %v", err)
			}
		}
		second := right
		second.Status, second.Result.Error = run.Error, &run.Failure{Code: "tool_failed", Message: "x"}
		if err := w.runs.Apply(t.Context(), second); !fault.Is(err, fault.Conflict) {
			t.Errorf("a second final: %v", err)
		}
		if r = w.wait(r); r.Calls[0].Status != run.OK {
			t.Errorf("got %v", statuses(r))
		}
	})
}

func TestTextsOfARunnerAreMadeFitToBeKept(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.runner.result = func(run.Call) (run.CallStatus, run.Result) {
			return run.Denied, run.Result{
				Stdout: []byte("a\x00b\xff"), Error: &run.Failure{Code: "NOT A CODE", Message: "nul \x00 bad \xff" + strings.Repeat("€", 9000)},
				Denials: []run.Denial{{Kind: "dns", Target: "x\x00", Reason: "\xff"}},
			}
		}
		r := w.finish(w.session(), calls("shell_exec"))
		c := r.Calls[0]
		if string(c.Result.Stdout) != "a\x00b\xff" || c.Result.Error.Code != "path_denied" || len(c.Result.Error.Message) > 9000 ||
			!strings.HasPrefix(c.Result.Error.Message, "nul \uFFFD bad \uFFFD€") || c.Result.Denials[0].Target != "x\uFFFD" {
			t.Errorf("got %q %+v", c.Result.Stdout, c.Result)
		}
	})
}

func TestALostRunnerEndsWhatItHeld(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s, second := w.live(), w.live()
		w.runner.hold = true
		r := w.begin(s, calls("shell_exec", "shell_exec"))
		w.until("it runs", w.runner.holds(1))
		late := w.runner.release(r.Calls[0].ID)
		for range 2 {
			if err := w.runs.RunnerLost(t.Context(), "r1", "inc1", "lost_beat"); err != nil {
				t.Fatal(err)
			}
		}
		r = w.wait(r)
		if got := statuses(r); !slices.Equal(got, []string{"runner_lost/runner_lost", "start_failed/session_lost"}) || r.Status != run.Finished {
			t.Errorf("got %s %v", r.Status, got)
		}
		for _, id := range []string{s.ID, second.ID} {
			if got, _ := w.db.Session(t.Context(), id); got.Status != session.Lost || got.Epoch != s.Epoch+1 || got.Reason != "runner_lost" {
				t.Errorf("the session is %+v", got)
			}
		}
		// What comes late is refused, and the first verdict stays.
		if err := w.runs.Apply(t.Context(), late); !fault.Is(err, fault.Conflict) {
			t.Errorf("a late result: %v", err)
		}
		if err := w.sessions.Ended(t.Context(), w.runner.claim(s), "sandbox_died", ""); !fault.Is(err, fault.Conflict) {
			t.Errorf("a late end: %v", err)
		}
		if again, _ := w.runs.Get(t.Context(), alice, s.ID, r.ID); !slices.Equal(statuses(again), statuses(r)) {
			t.Errorf("the verdict flipped to %v", statuses(again))
		}
		if _, err := w.runs.Start(t.Context(), alice, s.ID, calls("shell_exec")); !fault.Is(err, fault.Conflict) || fault.From(err).Code != "session_lost" {
			t.Errorf("a run in a lost session: %v", err)
		}
		// The record tells the mechanism.
		if got := w.events("session.lost"); len(got) != 2 || !strings.Contains(got[0], "lost_beat of r1") {
			t.Errorf("recorded %v", got)
		}
	})
}

func TestALostRunnerLosesNoSessionThatItOnlyClaimed(t *testing.T) {
	w := lite(t)
	w.sessions.StartTimeout = time.Minute
	w.runner.claimOnly = true
	r := w.begin(w.session(), calls("shell_exec"))
	w.until("a claim", func() bool { s, _ := w.db.Session(t.Context(), r.Session); return s.Runner != "" })
	w.runner.set(func(r *runner) { r.claimOnly = false })
	if err := w.runs.RunnerLost(t.Context(), "r1", "inc1", "new_incarnation"); err != nil {
		t.Fatal(err)
	}
	if r = w.wait(r); r.Calls[0].Status != run.OK {
		t.Errorf("got %v", statuses(r))
	}
}

func TestASandboxThatDiesEndsItsCalls(t *testing.T) {
	w := lite(t)
	s := w.live()
	w.runner.hold = true
	r := w.begin(s, calls("shell_exec", "shell_exec"))
	w.until("it runs", w.runner.holds(1))
	if err := w.sessions.Ended(t.Context(), w.runner.claim(s), "sandbox_died", "init exited"); err != nil {
		t.Fatal(err)
	}
	if r = w.wait(r); !slices.Equal(statuses(r), []string{"runner_lost/sandbox_died", "start_failed/session_lost"}) {
		t.Errorf("got %v", statuses(r))
	}
	if got, _ := w.db.Session(t.Context(), s.ID); got.Status != session.Lost || got.Reason != "sandbox_died" {
		t.Errorf("the session is %+v", got)
	}
}

func TestCancel(t *testing.T) {
	t.Run("while it waits for a sandbox", func(t *testing.T) {
		w := lite(t)
		w.runner.ignore = true
		r := w.begin(w.session(), calls("shell_exec", "shell_exec"))
		r, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID)
		if err != nil || r.Status != run.Cancelled || !slices.Equal(statuses(r), []string{"cancelled/cancelled", "cancelled/cancelled"}) {
			t.Errorf("got %s %v, %v", r.Status, statuses(r), err)
		}
	})
	t.Run("while it runs", func(t *testing.T) {
		each(t, func(t *testing.T, w *world) {
			s := w.live()
			w.runner.hold = true
			r := w.begin(s, calls("shell_exec", "shell_exec"))
			w.until("it runs", w.runner.holds(1))
			r, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID)
			if err != nil || r.Status != run.Cancelled || !slices.Equal(statuses(r), []string{"cancelled/cancelled", "cancelled/cancelled"}) {
				t.Errorf("got %s %v, %v", r.Status, statuses(r), err)
			}
			if got := w.events("run.cancelled"); len(got) != 1 || !strings.Contains(got[0], "usr_alice client cancel") {
				t.Errorf("recorded %v", got)
			}
		})
	})
	t.Run("while the order is lost", func(t *testing.T) {
		w := lite(t, seldom)
		s := w.live()
		w.runner.deaf = errors.New("timeout")
		r := w.begin(s, calls("shell_exec"))
		w.until("sent", func() bool {
			got, _ := w.runs.Get(t.Context(), alice, s.ID, r.ID)
			return got.Calls[0].Status == run.Sent
		})
		r, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID)
		if err != nil || r.Status != run.Cancelled {
			t.Errorf("got %s %v, %v", r.Status, statuses(r), err)
		}
	})
	t.Run("when the order is not answered at first", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.hold, w.runner.statusError = true, errors.New("timeout")
		r := w.begin(s, calls("shell_exec"))
		w.until("it runs", w.runner.holds(1))
		go func() {
			time.Sleep(200 * time.Millisecond)
			w.runner.set(func(r *runner) { r.statusError = nil })
		}()
		r, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID)
		if err != nil || r.Status != run.Cancelled {
			t.Errorf("got %s %v, %v", r.Status, statuses(r), err)
		}
	})
	t.Run("after it ended", func(t *testing.T) {
		w := lite(t)
		r := w.finish(w.session(), calls("shell_exec"))
		r, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID)
		if err != nil || r.Status != run.Finished {
			t.Errorf("got %s, %v", r.Status, err)
		}
	})
	t.Run("then its runner is lost", func(t *testing.T) {
		w := lite(t)
		s := w.live()
		w.runner.hold, w.runner.statusError = true, errors.New("timeout")
		r := w.begin(s, calls("shell_exec", "shell_exec"))
		w.until("it runs", w.runner.holds(1))
		if _, err := w.runs.Cancel(t.Context(), alice, r.Session, r.ID); err != nil {
			t.Fatal(err)
		}
		w.runs.RunnerLost(t.Context(), "r1", "inc1", "lost_beat")
		if r = w.wait(r); r.Status != run.Cancelled || !slices.Equal(statuses(r), []string{"runner_lost/runner_lost", "cancelled/cancelled"}) || w.runner.mostStarts() != 1 {
			t.Errorf("got %s %v", r.Status, statuses(r))
		}
	})
}

// TestTheAnswerIsWhatIsKept: who waits for a run of one call is answered from
// memory, with just what the database gives to who asks later.
func TestTheAnswerIsWhatIsKept(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		seven, limit := 7, int64(64)
		for name, ends := range map[string]struct {
			status run.CallStatus
			result run.Result
		}{
			"ok":     {run.OK, run.Result{ExitCode: new(int), Stdout: []byte("a\x00\xff"), StdoutBytes: 3, DurationMS: 1.25, CPUMS: 0.5, MemoryPeak: 9}},
			"empty":  {run.OK, run.Result{ExitCode: new(int), Stdout: []byte{}, Denials: []run.Denial{}}},
			"value":  {run.OK, run.Result{Value: []byte{}, HasValue: true, Encoding: "base64"}},
			"error":  {run.Error, run.Result{ExitCode: &seven, Stderr: []byte("no"), StderrBytes: 5, Truncated: true}},
			"signal": {run.Error, run.Result{Signal: "SIGSEGV"}},
			"oom":    {run.OOMKilled, run.Result{OOMKills: 2, Error: &run.Failure{Code: "memory_limit", Message: "m", Field: "memory_mb", Limit: &limit}}},
			"denied": {run.Denied, run.Result{Denials: []run.Denial{{Kind: "dns", Target: "x\x00", Reason: "\xff"}}}},
		} {
			w.runner.set(func(r *runner) {
				r.result = func(run.Call) (run.CallStatus, run.Result) { return ends.status, ends.result }
			})
			answered := w.finish(s, calls("shell_exec"))
			kept, err := w.db.Run(t.Context(), answered.ID)
			if err != nil {
				t.Fatal(err)
			}
			answered.LeaseUntil = kept.LeaseUntil // renewed meanwhile
			if a, b := shown(t, answered), shown(t, kept); a != b {
				t.Errorf("%s:\nanswered %s\nkept     %s", name, a, b)
			}
		}
	})
}

// shown is r as text; bytes that are empty and bytes that are not there are the same.
func shown(t *testing.T, r run.Run) string {
	for i := range r.Calls {
		c := &r.Calls[i].Result
		for _, b := range []*[]byte{&c.Stdout, &c.Stderr, &c.Value} {
			if *b == nil {
				*b = []byte{}
			}
		}
		if len(c.Denials) == 0 {
			c.Denials = nil
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

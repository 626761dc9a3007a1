package run_test

import (
	"cmp"
	"context"

	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

// TestNoInterleavingBreaksARun plays random stories of one session against
// the store itself, step by step, as drivers, runners and clients would: what
// holds must hold after every step.
func TestNoInterleavingBreaksARun(t *testing.T) {
	for _, kind := range []storetest.Kind{storetest.SQLite, storetest.Postgres} {
		t.Run(string(kind), func(t *testing.T) {
			db := storetest.Open(t, storetest.URL(t, kind))
			rapid.Check(t, func(r *rapid.T) { play(t.Context(), r, db) })
		})
	}
}

// story is what a random play knows beside the database.
type story struct {
	*rapid.T
	ctx      context.Context
	db       *store.DB
	session  string
	runs     []string
	final    map[string]run.CallStatus // by call, as first seen
	sent     map[string]int            // by call, how often it was marked as sent
	outcomes []run.Outcome             // of calls that were sent, to be reported at any time
}

var machineFinish = run.Finish{Actor: "test", NewID: newID}

func play(ctx context.Context, t *rapid.T, db *store.DB) {
	s := &story{T: t, ctx: ctx, db: db, session: "ses_" + newID(), final: map[string]run.CallStatus{}, sent: map[string]int{}}
	now := time.Now()
	c := session.Session{ID: s.session, Workspace: "default", Owner: alice.UserID, Status: session.New, IdleTTL: time.Hour, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(time.Hour)}
	if err := db.InsertSession(ctx, c, event()); err != nil {
		t.Fatal(err)
	}
	t.Repeat(map[string]func(*rapid.T){
		"admit": s.admit, "up": s.up, "up again": s.up, "begin": s.begin, "claim": s.claim, "started": s.started, "send": s.send, "mark": s.mark,
		"report": s.report, "cancel": s.cancel, "lose": s.lose, "end by status": s.endByStatus, "die": s.die, "close": s.close,
		"": s.check,
	})
}

func (s *story) now() session.Session {
	c, err := s.db.Session(s.ctx, s.session)
	if err != nil {
		s.Fatal(err)
	}
	return c
}

func (s *story) ok(err error, kinds ...fault.Kind) {
	if err != nil && !slices.Contains(kinds, fault.From(err).Kind) {
		s.Fatal(err)
	}
}

func (s *story) admit(t *rapid.T) {
	now := time.Now()
	r := run.Run{ID: "run_" + newID(), Session: s.session, Workspace: "default", Owner: alice.UserID, Status: run.Queued, Parallel: rapid.Bool().Draw(t, "parallel"), Replica: "a", CreatedAt: now}
	for i := range rapid.IntRange(1, 3).Draw(t, "calls") {
		call := run.Call{ID: "call_" + newID(), ClientID: fmt.Sprint(i), Run: r.ID, Session: s.session, Workspace: "default", Index: i, Name: "n", Arguments: []byte("{}"), Status: run.Pending}
		if rapid.IntRange(0, 4).Draw(t, "refused") == 0 {
			call.Status, call.Result.Error = run.InvalidArguments, &run.Failure{Code: "invalid_arguments"}
		}
		r.Calls = append(r.Calls, call)
	}
	r, c, err := s.db.AdmitRun(s.ctx, run.Admission{Run: r, Principal: alice, MaxOpen: 3, StartBy: now, Event: event()})
	s.ok(err, fault.Conflict, fault.Busy)
	if err == nil {
		s.runs = append(s.runs, r.ID)
		s.noteSent(c, r.Calls)
	}
}

func (s *story) noteSent(c session.Session, calls []run.Call) {
	for _, call := range calls {
		if call.Status != run.Sent {
			continue
		}
		s.sent[call.ID]++
		s.outcomes = append(s.outcomes, run.Outcome{
			Runner: c.Runner, Incarnation: c.Incarnation, Session: s.session, Epoch: c.Epoch, Run: call.Run, Call: call.ID, Status: run.OK,
		})
	}
}

func (s *story) begin(*rapid.T) {
	_, _, err := s.db.BeginStart(s.ctx, s.session, s.now().Epoch, time.Now(), time.Now())
	s.ok(err)
}

// holder is mostly who holds the session, and now and then somebody else.
func (s *story) holder(t *rapid.T) session.Claim {
	c := s.now()
	h := session.Claim{Runner: "r", Incarnation: cmp.Or(c.Incarnation, "i1"), Session: s.session, Epoch: c.Epoch}
	switch rapid.IntRange(0, 7).Draw(t, "who") {
	case 0:
		h.Incarnation = "i2"
	case 1:
		h.Epoch--
	}
	return h
}

// up brings the sandbox up, as far as the session's state allows.
func (s *story) up(t *rapid.T) {
	s.begin(t)
	s.claim(t)
	s.started(t)
}

func (s *story) claim(t *rapid.T) {
	_, err := s.db.ClaimSession(s.ctx, s.holder(t), session.Terms{PolicyDigest: "d", OutputBytesLimit: 10, StartBy: time.Now()}, event())
	s.ok(err, fault.Conflict)
}

func (s *story) started(t *rapid.T) {
	_, err := s.db.SessionStarted(s.ctx, s.holder(t), session.Sandbox{PolicyDigest: "d"}, event())
	s.ok(err, fault.Conflict)
}

func (s *story) aRun(t *rapid.T) run.Run {
	if len(s.runs) == 0 {
		t.Skip("no run yet")
	}
	r, err := s.db.RunState(s.ctx, rapid.SampledFrom(s.runs).Draw(t, "run"))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (s *story) send(t *rapid.T) {
	r := s.aRun(t)
	var ids []string
	for _, c := range r.Calls {
		if rapid.Bool().Draw(t, "this one") {
			ids = append(ids, c.ID) // whatever its state
		}
	}
	c := s.now()
	marked, err := s.db.SendCalls(s.ctx, r, c, ids, rapid.SampledFrom([]string{"a", "a", "b"}).Draw(t, "replica"), time.Now())
	s.ok(err)
	for _, call := range r.Calls {
		if slices.Contains(marked, call.ID) {
			call.Status = run.Sent
			s.noteSent(c, []run.Call{call})
		}
	}
}

func (s *story) mark(t *rapid.T) {
	r := s.aRun(t)
	s.ok(s.db.MarkStarted(s.ctx, r.ID, r.Calls[0].ID))
}

func (s *story) report(t *rapid.T) {
	if len(s.outcomes) == 0 {
		t.Skip("nothing was sent")
	}
	o := rapid.SampledFrom(s.outcomes).Draw(t, "outcome")
	o.Status = rapid.SampledFrom(run.Finals()).Draw(t, "status")
	o.Result.Stdout = make([]byte, rapid.IntRange(0, 11).Draw(t, "output"))
	_, applied, err := s.db.FinishCall(s.ctx, o, machineFinish)
	s.ok(err)
	c := s.now()
	if applied && (len(o.Result.Stdout) > 10 || c.Epoch != o.Epoch || c.Runner != o.Runner || c.Incarnation != o.Incarnation) {
		t.Fatalf("applied a report of %s under epoch %d with %d bytes", o.Incarnation, o.Epoch, len(o.Result.Stdout))
	}
}

func (s *story) cancel(t *rapid.T) {
	_, err := s.db.CancelRun(s.ctx, s.aRun(t), "client", session.Verdict{Status: "cancelled", Code: "cancelled"}, machineFinish)
	s.ok(err)
}

func (s *story) lose(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
		t.Skip("seldom")
	}
	_, _, err := s.db.LoseRunner(s.ctx, run.Loss{
		Runner: "r", Incarnation: rapid.SampledFrom([]string{"i1", "i2"}).Draw(t, "incarnation"), Finish: machineFinish,
		Sent: session.Verdict{Status: "runner_lost", Code: "runner_lost"}, Pending: session.Verdict{Status: "start_failed", Code: "session_lost"},
	})
	s.ok(err)
}

func (s *story) endByStatus(t *rapid.T) {
	r := s.aRun(t)
	_, err := s.db.EndCalls(s.ctx, r, []string{r.Calls[0].ID}, []run.CallStatus{run.Sent, run.Accepted, run.Started}, session.Verdict{Status: "runner_lost", Code: "runner_lost"}, machineFinish)
	s.ok(err)
}

func (s *story) die(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "really") > 0 {
		t.Skip("seldom")
	}
	h := s.holder(t)
	_, _, err := s.db.EndSession(s.ctx, session.Ending{
		Session: s.session, Holder: &h, From: []session.Status{session.Live}, To: session.Lost, Raise: true, Event: event(), NewID: newID,
		Sent: session.Verdict{Status: "runner_lost", Code: "sandbox_died"}, Pending: session.Verdict{Status: "start_failed", Code: "session_lost"},
	})
	s.ok(err, fault.Conflict)
}

func (s *story) close(t *rapid.T) {
	if rapid.IntRange(0, 7).Draw(t, "really") > 0 {
		t.Skip("seldom")
	}
	_, _, err := s.db.EndSession(s.ctx, session.Ending{
		Session: s.session, From: []session.Status{session.New, session.Starting, session.Live, session.Idle, session.Lost}, To: session.Closed,
		Cancel: "session_closed", Event: event(), NewID: newID, Pending: session.Verdict{Status: "cancelled", Code: "cancelled"},
	})
	s.ok(err, fault.Conflict)
}

// check holds after every step.
func (s *story) check(t *rapid.T) {
	c := s.now()
	open := 0
	for _, id := range s.runs {
		r, err := s.db.Run(s.ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, call := range r.Calls {
			if before, ok := s.final[call.ID]; ok && before != call.Status {
				t.Fatalf("a call that ended as %s is %s", before, call.Status)
			}
			if call.Status.Final() {
				s.final[call.ID] = call.Status
			} else {
				n++
			}
			if s.sent[call.ID] > 1 {
				t.Fatal("a call was sent twice")
			}
			if slices.Contains([]run.CallStatus{run.Sent, run.Accepted, run.Started}, call.Status) && (c.Epoch != call.Epoch || c.Incarnation != call.Incarnation) {
				t.Fatalf("a call is %s under epoch %d of %s, the session is at %d of %s", call.Status, call.Epoch, call.Incarnation, c.Epoch, c.Incarnation)
			}
		}
		if n != r.OpenCalls || (n == 0) != r.Status.Final() {
			t.Fatalf("run %s counts %d open calls, there are %d", r.Status, r.OpenCalls, n)
		}
		if r.Status.Final() == r.FinishedAt.IsZero() && !r.FinishedAt.IsZero() {
			t.Fatalf("run %s finished at %v", r.Status, r.FinishedAt)
		}
		if !r.Status.Final() {
			open++
			if c.Status == session.Lost {
				t.Fatal("a lost session has an open run")
			}
		}
	}
	if open > 3 {
		t.Fatalf("%d open runs", open)
	}
}

// TestStormOnOneSession lets everybody at one session at once.
func TestStormOnOneSession(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.live()
		var wg sync.WaitGroup
		var mu sync.Mutex
		var begun []run.Run
		for i := range 8 {
			wg.Go(func() {
				for j := range 6 {
					q := calls("shell_exec", "shell_exec", "shell_exec")
					q.Parallel = (i+j)%2 == 0
					r, err := w.runs.Start(context.Background(), alice, s.ID, q)
					if fault.Is(err, fault.Busy) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					begun = append(begun, r)
					mu.Unlock()
					if (i+j)%3 == 0 {
						if _, err := w.runs.Cancel(context.Background(), alice, s.ID, r.ID); err != nil {
							t.Error(err)
						}
					}
					w.wait(r)
				}
			})
		}
		wg.Wait()
		for _, r := range begun {
			got := w.wait(r)
			for _, c := range got.Calls {
				if c.Status != run.OK && c.Status != run.CallCancelled && c.Status != run.RunnerLost {
					t.Errorf("a call is %s", c.Status)
				}
			}
		}
		if w.runner.mostStarts() != 1 || len(begun) < 8 {
			t.Errorf("%d runs; a call started %d times", len(begun), w.runner.mostStarts())
		}
	})
}

func TestARunnerDiesInAStorm(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		var begun []run.Run
		w.runner.hold = true
		for range 4 {
			s := w.session()
			for range 4 {
				begun = append(begun, w.begin(s, calls("shell_exec", "shell_exec")))
			}
		}
		w.until("they run", w.runner.holds(16))
		var wg sync.WaitGroup
		for _, id := range w.runner.heldCalls() {
			o := w.runner.release(id)
			wg.Go(func() {
				if err := w.runs.Apply(context.Background(), o); err != nil && !fault.Is(err, fault.Conflict) {
					t.Error(err)
				}
			})
		}
		wg.Go(func() {
			if err := w.runs.RunnerLost(context.Background(), "r1", "inc1", "lost_beat"); err != nil {
				t.Error(err)
			}
		})
		for _, r := range begun[:4] {
			wg.Go(func() { w.runs.Cancel(context.Background(), alice, r.Session, r.ID) })
		}
		wg.Wait()
		for _, r := range begun {
			w.wait(r)
		}
		if w.runner.mostStarts() != 1 {
			t.Error("a call started twice")
		}
	})
}

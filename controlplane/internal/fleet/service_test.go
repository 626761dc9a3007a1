package fleet_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

// runs notes who was called lost.
type runs struct {
	lost []string
	gone []string
	err  error
}

func (r *runs) RunnerLost(_ context.Context, runner, incarnation, reason string) error {
	if r.err == nil {
		r.lost = append(r.lost, runner+" "+incarnation+" "+reason)
	}
	return r.err
}

// Ended notes which sandbox is gone.
func (r *runs) Ended(_ context.Context, c session.Claim, code, _ string) error {
	r.gone = append(r.gone, c.Session+" "+c.Runner+" "+code)
	return nil
}

// broken fails while it is told to.
type broken struct {
	fleet.Store
	err error
}

func (b *broken) PutRunner(ctx context.Context, r fleet.Runner) error {
	if b.err != nil {
		return b.err
	}
	return b.Store.PutRunner(ctx, r)
}

type world struct {
	t       *testing.T
	db      *store.DB
	store   *broken
	runs    *runs
	fleet   *fleet.Service
	now     time.Time
	hearing time.Time // zero: the bus is away
}

func newWorld(t *testing.T, db *store.DB) *world {
	w := &world{t: t, db: db, store: &broken{Store: db}, runs: &runs{}, now: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)}
	w.hearing = w.now
	w.fleet = &fleet.Service{
		Store: w.store, Runs: w.runs, Sessions: w.runs, Now: func() time.Time { return w.now }, Log: slog.New(slog.DiscardHandler),
		Hearing: func() (time.Time, bool) { return w.hearing, !w.hearing.IsZero() },
	}
	return w
}

func (w *world) beat(id, incarnation string, change ...func(*fleet.Beat)) ([]fleet.Held, error) {
	b := fleet.Beat{Runner: fleet.Runner{ID: id, Incarnation: incarnation, Pool: "default", Slots: 4, Used: 1, Labels: map[string]string{"zone": "a"}}}
	for _, c := range change {
		c(&b)
	}
	return w.fleet.Beat(w.t.Context(), b)
}

func (w *world) mustBeat(id, incarnation string, change ...func(*fleet.Beat)) {
	w.t.Helper()
	if _, err := w.beat(id, incarnation, change...); err != nil {
		w.t.Fatal(err)
	}
}

// pass lets time pass while the sweep runs as it should.
func (w *world) pass(d time.Duration) {
	w.t.Helper()
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(time.Second)
		w.sweep()
	}
}

func (w *world) sweep() {
	w.t.Helper()
	if err := w.fleet.Sweep(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) state(id string) fleet.State {
	w.t.Helper()
	r, err := w.db.Runner(w.t.Context(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return r.State
}

func (w *world) wants(lost ...string) {
	w.t.Helper()
	if !slices.Equal(w.runs.lost, lost) {
		w.t.Errorf("called lost: %q, want %q", w.runs.lost, lost)
	}
}

func each(t *testing.T, test func(t *testing.T, w *world)) {
	storetest.Run(t, func(t *testing.T, db *store.DB) { test(t, newWorld(t, db)) })
}

func TestARunnerIsLostWhenItsBeatsStop(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.sweep()
		w.pass(20 * time.Second)
		w.mustBeat("r1", "a")
		first, _ := w.db.Runner(t.Context(), "r1")
		if first.Pool != "default" || first.Labels["zone"] != "a" || first.Slots != 4 || !first.FirstSeen.Equal(w.now) || first.State != fleet.Ready {
			t.Errorf("kept %+v", first)
		}
		w.pass(44 * time.Second)
		w.wants()
		w.pass(3 * time.Second)
		w.wants("r1 a lost_beat")
		if w.state("r1") != fleet.Lost {
			t.Errorf("it is %s", w.state("r1"))
		}
		if ready, _ := w.fleet.Any(t.Context(), "default"); ready != 0 {
			t.Error("it counts as ready")
		}
		// The same start may come back, with nothing of what it held.
		w.mustBeat("r1", "a")
		if ready, _ := w.fleet.Any(t.Context(), "default"); ready != 1 {
			t.Errorf("%d ready", ready)
		}
		if again, _ := w.db.Runner(t.Context(), "r1"); !again.FirstSeen.Equal(first.FirstSeen) {
			t.Error("it forgot when it was first seen")
		}
		if ready, _ := w.fleet.Any(t.Context(), "gpu"); ready != 0 {
			t.Error("it counts in another pool")
		}
	})
}

func TestNobodyIsCalledLostByWhoCouldNotHear(t *testing.T) {
	lite := func(t *testing.T) *world {
		w := newWorld(t, storetest.Open(t, storetest.URL(t, storetest.SQLite)))
		w.sweep()
		w.pass(time.Minute)
		w.mustBeat("r1", "a")
		return w
	}
	t.Run("the bus was away", func(t *testing.T) {
		w := lite(t)
		w.hearing = time.Time{}
		w.pass(time.Hour)
		w.wants()
		w.hearing = w.now
		w.pass(44 * time.Second)
		w.wants()
		w.pass(3 * time.Second)
		w.wants("r1 a lost_beat")
	})
	t.Run("the replica has just started", func(t *testing.T) {
		w := lite(t)
		next := newWorld(t, w.db)
		next.now = w.now.Add(time.Hour)
		next.sweep()
		next.pass(44 * time.Second)
		next.wants()
		next.pass(3 * time.Second)
		next.wants("r1 a lost_beat")
	})
	t.Run("the replica was stopped for an hour", func(t *testing.T) {
		w := lite(t)
		w.now = w.now.Add(time.Hour)
		w.pass(44 * time.Second)
		w.wants()
		w.pass(3 * time.Second)
		w.wants("r1 a lost_beat")
	})
	t.Run("the database was away", func(t *testing.T) {
		w := lite(t)
		w.store.err = fault.New(fault.Unavailable, "away")
		for range 40 {
			w.pass(2 * time.Second)
			if _, err := w.beat("r1", "a"); !fault.Is(err, fault.Unavailable) {
				t.Fatalf("got %v", err)
			}
		}
		w.store.err = nil
		w.pass(10 * time.Second)
		w.wants()
	})
}

func TestANewStartMakesTheOneBeforeItLost(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.sweep()
		settled := 0
		w.fleet.Settled = func(context.Context) error { settled++; return nil }
		w.mustBeat("r1", "a")
		w.mustBeat("r1", "b")
		w.wants("r1 a new_incarnation")
		if settled != 1 {
			t.Error("what it had reported was not waited for")
		}
		if _, err := w.beat("r1", "a"); !fault.Is(err, fault.Conflict) {
			t.Errorf("a beat of the old start: %v", err)
		}
		w.mustBeat("r1", "b")
		w.wants("r1 a new_incarnation")
		// While the old one can't be called lost, the new one is not taken in.
		w.runs.err = errors.New("away")
		if _, err := w.beat("r1", "c"); err == nil {
			t.Error("a start was replaced without a word")
		}
		if r, _ := w.db.Runner(t.Context(), "r1"); r.Incarnation != "b" {
			t.Errorf("the current start is %s", r.Incarnation)
		}
	})
}

func TestARunnerThatSaysGoodbye(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.sweep()
		w.mustBeat("r1", "a", func(b *fleet.Beat) { b.Draining = true })
		if w.state("r1") != fleet.Draining {
			t.Errorf("it is %s", w.state("r1"))
		}
		w.mustBeat("r1", "a", func(b *fleet.Beat) { b.Leaving = true })
		w.pass(2 * time.Minute)
		if w.wants(); w.state("r1") != fleet.Left {
			t.Errorf("it is %s", w.state("r1"))
		}
		// One that left something open is called lost for it.
		w.held("ses_1", "r2", "x")
		w.mustBeat("r2", "x", func(b *fleet.Beat) { b.Leaving = true })
		w.pass(44 * time.Second)
		w.wants()
		w.pass(2 * time.Second)
		if len(w.runs.lost) == 0 || w.runs.lost[0] != "r2 x left" {
			t.Errorf("called lost: %q", w.runs.lost)
		}
	})
}

// held makes a live session of that start.
func (w *world) held(id, runner, incarnation string) {
	w.t.Helper()
	ctx := w.t.Context()
	now := time.Now()
	e := func() audit.Event { return audit.Event{ID: "aud_" + id + now.String() + time.Now().String(), At: now} }
	err := w.db.InsertSession(ctx, session.Session{ID: id, Workspace: "default", Owner: "u", Status: session.New, IdleTTL: time.Hour, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(time.Hour)}, e())
	if err != nil {
		w.t.Fatal(err)
	}
	s, _, err := w.db.BeginStart(ctx, id, 0, now, now)
	if err != nil {
		w.t.Fatal(err)
	}
	c := session.Claim{Runner: runner, Incarnation: incarnation, Session: id, Epoch: s.Epoch}
	if _, err := w.db.ClaimSession(ctx, c, session.Terms{PolicyDigest: "d"}, e()); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.db.SessionStarted(ctx, c, session.Sandbox{PolicyDigest: "d"}, e()); err != nil {
		w.t.Fatal(err)
	}
}

func TestABeatIsToldWhatIsNoLongerTheRunners(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.mustBeat("r1", "a")
		w.mustBeat("r2", "a")
		w.held("ses_1", "r1", "a")
		w.held("ses_2", "r2", "a")
		raised, err := w.beat("r1", "a", func(b *fleet.Beat) {
			b.Sessions = []fleet.Held{{Session: "ses_1", Epoch: 1}, {Session: "ses_1", Epoch: 0}, {Session: "ses_2", Epoch: 1}, {Session: "ses_unknown", Epoch: 1}}
		})
		want := []fleet.Held{{Session: "ses_1", Epoch: 0}, {Session: "ses_2", Epoch: 1}, {Session: "ses_unknown", Epoch: 1}}
		if err != nil || !slices.Equal(raised, want) {
			t.Errorf("raised %v, %v", raised, err)
		}
	})
}

func TestASandboxThatIsNoLongerNamedIsGone(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.held("ses_1", "r1", "a")
		w.held("ses_2", "r1", "a")
		named := func(ids ...string) func(*fleet.Beat) {
			return func(b *fleet.Beat) {
				for _, id := range ids {
					b.Sessions = append(b.Sessions, fleet.Held{Session: id, Epoch: 1})
				}
			}
		}
		for range 4 {
			w.mustBeat("r1", "a", named("ses_1"))
		}
		w.mustBeat("r1", "a", named("ses_1", "ses_2"))
		for range 4 {
			w.mustBeat("r1", "a", named("ses_2"))
		}
		if len(w.runs.gone) != 0 {
			t.Errorf("given up too early: %v", w.runs.gone)
		}
		w.mustBeat("r1", "a", named("ses_2"))
		if !slices.Equal(w.runs.gone, []string{"ses_1 r1 sandbox_died"}) {
			t.Errorf("gone: %v", w.runs.gone)
		}
	})
}

func TestSessionsOfAStartThatIsNoLongerCurrentAreFound(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.mustBeat("r1", "a")
		w.held("ses_1", "r1", "a")
		w.sweep()
		w.wants()
		// As if the replica had died between calling it lost and saying so.
		if err := w.db.PutRunner(t.Context(), fleet.Runner{ID: "r1", Incarnation: "b", State: fleet.Ready, LastBeat: w.now}); err != nil {
			t.Fatal(err)
		}
		w.sweep()
		w.wants("r1 a superseded")
	})
}

func TestALostStartClaimsNothing(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		now := time.Now()
		w.mustBeat("r1", "b")
		e := func() audit.Event { return audit.Event{ID: "aud_" + time.Now().String(), At: now} }
		if err := w.db.InsertSession(t.Context(), session.Session{ID: "ses_1", Workspace: "default", Owner: "u", Status: session.New, ExpiresAt: now.Add(time.Hour)}, e()); err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.db.BeginStart(t.Context(), "ses_1", 0, now, now); err != nil {
			t.Fatal(err)
		}
		claim := session.Claim{Runner: "r1", Incarnation: "a", Session: "ses_1", Epoch: 1}
		if _, err := w.db.ClaimSession(t.Context(), claim, session.Terms{}, e()); !fault.Is(err, fault.Conflict) {
			t.Errorf("an earlier start claims: %v", err)
		}
		claim.Incarnation = "b"
		for range 2 {
			if _, err := w.db.ClaimSession(t.Context(), claim, session.Terms{}, e()); err != nil {
				t.Errorf("the current start claims: %v", err)
			}
		}
		claim.Runner, claim.Incarnation = "r2", "x"
		if _, err := w.db.ClaimSession(t.Context(), claim, session.Terms{}, e()); !fault.Is(err, fault.Conflict) {
			t.Errorf("a second runner claims: %v", err)
		}
	})
}

func TestRunEndsWithItsContext(t *testing.T) {
	w := newWorld(t, storetest.Open(t, storetest.URL(t, storetest.SQLite)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.fleet.Run(ctx); err != nil {
		t.Error(err)
	}
}

package session_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

var alice = identity.Principal{Workspace: "default", UserID: "usr_alice", Role: identity.Member}

type runs struct{ changed []string }

func (r *runs) SessionChanged(id string, _ []session.EndedCall) { r.changed = append(r.changed, id) }
func (r *runs) SessionLive(s session.Session)                   { r.changed = append(r.changed, s.ID) }
func (r *runs) CancelSent(context.Context, session.Session)     {}

type runner struct {
	stopped []string
	err     error
}

func (r *runner) Stop(_ context.Context, s session.Session) error {
	r.stopped = append(r.stopped, s.ID)
	return r.err
}

type policies struct {
	memory int64
	shared []string
}

func (p *policies) Resolve(_ context.Context, workspace string) (policy.Policy, error) {
	return policy.Policy{WorkspaceID: workspace, FSAllowlist: p.shared, MemoryMB: p.memory, OutputBytesLimit: 2048, WallClockSeconds: 9}, nil
}

type world struct {
	t        *testing.T
	db       *store.DB
	s        *session.Service
	runs     *runs
	runner   *runner
	policies *policies
}

func newID() string {
	id := uuid.Must(uuid.NewV7())
	return fmt.Sprintf("%x", id[:])
}

func newWorld(t *testing.T, db *store.DB) *world {
	w := &world{t: t, db: db, runs: &runs{}, runner: &runner{}, policies: &policies{memory: 64}}
	w.s = &session.Service{
		Store: db, Policies: w.policies, Runs: w.runs, Stopper: w.runner, IdleTTL: time.Minute, TTL: time.Hour,
		Now: time.Now, NewID: newID, Log: slog.New(slog.DiscardHandler),
	}
	return w
}

// starting is a session with a ticket out, and the claim that fits it.
func (w *world) starting() session.Claim {
	w.t.Helper()
	s, err := w.s.Create(w.t.Context(), alice, session.NewSession{})
	if err != nil {
		w.t.Fatal(err)
	}
	s, ok, err := w.db.BeginStart(w.t.Context(), s.ID, s.Epoch, time.Now(), time.Now().Add(time.Minute))
	if err != nil || !ok {
		w.t.Fatal(ok, err)
	}
	return session.Claim{Runner: "r1", Incarnation: "a", Session: s.ID, Epoch: s.Epoch}
}

func (w *world) get(id string) session.Session {
	w.t.Helper()
	s, err := w.s.Get(w.t.Context(), alice, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) rejected() int {
	events, _, err := w.db.AuditEvents(w.t.Context(), "default", page.Page{Limit: 200})
	if err != nil {
		w.t.Fatal(err)
	}
	n := 0
	for _, e := range events {
		if e.Action == "result_rejected" {
			n++
		}
	}
	return n
}

func TestAClaimFixesThePolicyOfThatMoment(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		w := newWorld(t, db)
		c := w.starting()
		g, err := w.s.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		w.policies.memory = 128
		if g.Policy.MemoryMB != 64 || g.Session.PolicyDigest != g.Policy.Digest() || g.Session.OutputBytesLimit != 2048 || g.Session.WallClockSeconds != 9 || g.Session.Runner != "r1" {
			t.Errorf("granted %+v", g)
		}
		for name, other := range map[string]session.Claim{
			"another runner":   {Runner: "r2", Incarnation: "a", Session: c.Session, Epoch: c.Epoch},
			"another start":    {Runner: "r1", Incarnation: "b", Session: c.Session, Epoch: c.Epoch},
			"an old epoch":     {Runner: "r1", Incarnation: "a", Session: c.Session, Epoch: c.Epoch - 1},
			"a later epoch":    {Runner: "r1", Incarnation: "a", Session: c.Session, Epoch: c.Epoch + 1},
			"no such session":  {Runner: "r1", Incarnation: "a", Session: "ses_0", Epoch: 1},
			"not even an name": {Runner: "r1", Incarnation: "a", Session: "\x00", Epoch: 1},
		} {
			if _, err := w.s.Claim(t.Context(), other); !fault.Is(err, fault.Conflict) || fault.From(err).Code != "taken" {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := w.s.Started(t.Context(), c, session.Sandbox{PolicyDigest: "sha256:another"}); !fault.Is(err, fault.Conflict) {
			t.Errorf("a sandbox under another policy: %v", err)
		}
		for range 2 {
			if err := w.s.Started(t.Context(), c, session.Sandbox{PolicyDigest: g.Policy.Digest(), Backend: "b", Enforced: map[string]string{"a": "b\x00"}}); err != nil {
				t.Errorf("started: %v", err)
			}
		}
		if s := w.get(c.Session); s.Status != session.Live || s.Backend != "b" || s.Enforced["a"] != "b\uFFFD" || !slices.Contains(w.runs.changed, s.ID) {
			t.Errorf("the session is %+v", s)
		}
		if _, err := w.s.Claim(t.Context(), c); !fault.Is(err, fault.Conflict) {
			t.Errorf("a claim of a live session: %v", err)
		}
	})
}

func TestReportsOfOthersChangeNothing(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		w := newWorld(t, db)
		c := w.starting()
		if _, err := w.s.Claim(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		before := w.get(c.Session)
		n := 0
		for name, forge := range map[string]func(*session.Claim){
			"another runner": func(c *session.Claim) { c.Runner = "r2" },
			"another start":  func(c *session.Claim) { c.Incarnation = "b" },
			"an old epoch":   func(c *session.Claim) { c.Epoch-- },
			"nobody":         func(c *session.Claim) { c.Runner, c.Incarnation = "", "" },
		} {
			other := c
			forge(&other)
			for report, err := range map[string]error{
				"started": w.s.Started(t.Context(), other, session.Sandbox{PolicyDigest: before.PolicyDigest}),
				"failed":  w.s.StartFailed(t.Context(), other, "start_failed", "", ""),
				"ended":   w.s.Ended(t.Context(), other, "sandbox_died", ""),
			} {
				if n++; !fault.Is(err, fault.Conflict) {
					t.Errorf("%s by %s: %v", report, name, err)
				}
			}
		}
		after := w.get(c.Session)
		if after.Status != session.Starting || after.Epoch != before.Epoch || w.rejected() != n {
			t.Errorf("the session is %+v, %d of %d are recorded", after, w.rejected(), n)
		}
		if err := w.s.Ended(t.Context(), session.Claim{Runner: "r1", Session: "ses_0"}, "", ""); !fault.Is(err, fault.Conflict) {
			t.Errorf("of an unknown session: %v", err)
		}
	})
}

func TestHowASandboxEnds(t *testing.T) {
	w := newWorld(t, storetest.Open(t, storetest.URL(t, storetest.SQLite)))
	live := func() session.Claim {
		c := w.starting()
		g, err := w.s.Claim(t.Context(), c)
		if err == nil {
			err = w.s.Started(t.Context(), c, session.Sandbox{PolicyDigest: g.Policy.Digest()})
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	claimed := func() session.Claim {
		c := w.starting()
		if _, err := w.s.Claim(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for name, tc := range map[string]struct {
		claim  session.Claim
		report func(session.Claim) error
		status session.Status
		reason string
	}{
		"it dies":              {live(), func(c session.Claim) error { return w.s.Ended(t.Context(), c, "sandbox_died", "x") }, session.Lost, "sandbox_died"},
		"its runner stops":     {live(), func(c session.Claim) error { return w.s.Ended(t.Context(), c, "runner_stopped", "x") }, session.Lost, "runner_stopped"},
		"while it starts":      {claimed(), func(c session.Claim) error { return w.s.Ended(t.Context(), c, "sandbox_died", "x") }, session.Idle, "sandbox_died"},
		"it can't start":       {claimed(), func(c session.Claim) error { return w.s.StartFailed(t.Context(), c, "policy_unenforceable", "", "x") }, session.Idle, "policy_unenforceable"},
		"for no known reason":  {claimed(), func(c session.Claim) error { return w.s.StartFailed(t.Context(), c, "\x00", "", "x") }, session.Idle, "start_failed"},
		"its reason is a tale": {live(), func(c session.Claim) error { return w.s.Ended(t.Context(), c, strings.Repeat("é", 500), "x") }, session.Lost, strings.Repeat("é", 64)},
	} {
		if err := tc.report(tc.claim); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		s := w.get(tc.claim.Session)
		if s.Status != tc.status || s.Reason != tc.reason || s.Epoch != tc.claim.Epoch+1 {
			t.Errorf("%s: the session is %s (%s) at epoch %d", name, s.Status, s.Reason, s.Epoch)
		}
		if err := tc.report(tc.claim); !fault.Is(err, fault.Conflict) {
			t.Errorf("%s twice: %v", name, err)
		}
	}
}

func TestClosingDoesNotDependOnTheRunner(t *testing.T) {
	w := newWorld(t, storetest.Open(t, storetest.URL(t, storetest.SQLite)))
	w.runner.err = errors.New("timeout")
	c := w.starting()
	if _, err := w.s.Claim(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.s.Close(t.Context(), alice, c.Session); err != nil {
			t.Error(err)
		}
	}
	if s := w.get(c.Session); s.Status != session.Closed || len(w.runner.stopped) != 1 {
		t.Errorf("the session is %+v, stopped %v", s, w.runner.stopped)
	}
	// The sandbox was on its way; its start is refused and nothing of it lives on.
	if err := w.s.Started(t.Context(), c, session.Sandbox{}); !fault.Is(err, fault.Conflict) {
		t.Errorf("a start of a closed session: %v", err)
	}
	if err := w.s.Close(t.Context(), alice, "ses_0"); !fault.Is(err, fault.NotFound) {
		t.Errorf("an unknown one: %v", err)
	}
}

func TestRunSweepsUntilItsContextEnds(t *testing.T) {
	db := storetest.Open(t, storetest.URL(t, storetest.SQLite))
	w := newWorld(t, db)
	w.s.SweepEvery = 10 * time.Millisecond
	s, err := w.s.Create(t.Context(), alice, session.NewSession{TTL: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.s.Run(ctx) }()
	for end := time.Now().Add(10 * time.Second); w.get(s.ID).Status != session.Closed; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the session outlives its TTL")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestTextIsFitToBeKept(t *testing.T) {
	for in, want := range map[string]string{
		"":                        "",
		"plain €":                 "plain €",
		"nul \x00":                "nul \uFFFD",
		"bad \xff\xfe end":        "bad \uFFFD end",
		strings.Repeat("€", 3000): strings.Repeat("€", 2730),
	} {
		if got := session.Text(in); got != want {
			t.Errorf("%.20q became %.20q (%d bytes)", in, got, len(got))
		}
	}
}

package run_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
	"github.com/bigwave/bigwave/shared/fault"
)

var (
	alice = identity.Principal{Workspace: "default", UserID: "usr_alice", Role: identity.Member}
	bob   = identity.Principal{Workspace: "default", UserID: "usr_bob", Role: identity.Member}
	admin = identity.Principal{Workspace: "default", UserID: "usr_admin", Role: identity.Admin}
	other = identity.Principal{Workspace: "other", UserID: "usr_other", Role: identity.InstanceAdmin}
)

// world is one control plane on a real database and a runner in memory that
// answers at once unless it is told otherwise.
type world struct {
	t        *testing.T
	db       *store.DB
	sessions *session.Service
	runs     *run.Service
	runner   *runner
	end      context.CancelFunc // of the replica
	ended    chan struct{}
}

func newID() string {
	id := uuid.Must(uuid.NewV7())
	return fmt.Sprintf("%x", id[:])
}

func newWorld(t *testing.T, db *store.DB, tweak ...func(*run.Service)) *world {
	w := &world{t: t, db: db, runner: &runner{name: "r1", incarnation: "inc1", started: map[string]int{}, held: map[string]run.Outcome{}, ready: 1}}
	w.sessions = &session.Service{
		Store: db, Policies: policies{}, Stopper: w.runner, IdleTTL: time.Hour, TTL: 24 * time.Hour,
		SweepEvery: 20 * time.Millisecond, Now: time.Now, NewID: newID, Log: slog.New(slog.DiscardHandler),
	}
	w.runner.w = w
	w.replica("replica-1", false, tweak...)
	return w
}

// replica ends the replica that runs and starts another.
func (w *world) replica(name string, sole bool, tweak ...func(*run.Service)) {
	w.stop()
	w.runs = w.service(name, sole)
	for _, change := range tweak {
		change(w.runs)
	}
	w.sessions.Runs = w.runs
	w.end, w.ended = w.start(w.runs)
}

func (w *world) service(name string, sole bool) *run.Service {
	return &run.Service{
		Store: w.db, Tools: []tool.Source{builtin.New()}, Dispatcher: w.runner, Fleet: w.runner, Pool: "default",
		Replica: name, Sole: sole, MaxOpen: 8, StartWait: 2 * time.Second, ClaimWait: 300 * time.Millisecond,
		Pace: run.Pace{
			Lease: 300 * time.Millisecond, Renew: 50 * time.Millisecond, Poll: 50 * time.Millisecond,
			Mark: 50 * time.Millisecond, Ask: 20 * time.Millisecond, Reassure: 100 * time.Millisecond, Unfetched: 300 * time.Millisecond,
		},
		Now: time.Now, NewID: newID, Log: slog.New(slog.DiscardHandler),
	}
}

func (w *world) start(s *run.Service) (context.CancelFunc, chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	w.t.Cleanup(func() { cancel(); <-ended })
	w.until("the replica accepts runs", func() bool {
		_, err := s.Start(ctx, alice, "ses_none", calls("shell_exec"))
		return fault.Is(err, fault.NotFound)
	})
	return cancel, ended
}

func (w *world) stop() {
	if w.end != nil {
		w.end()
		<-w.ended
		w.end = nil
	}
}

func (w *world) session() session.Session {
	w.t.Helper()
	s, err := w.sessions.Create(w.t.Context(), alice, session.NewSession{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// live is a session whose sandbox is up.
func (w *world) live() session.Session {
	w.t.Helper()
	s := w.session()
	w.finish(s, calls("shell_exec"))
	s, err := w.db.Session(w.t.Context(), s.ID)
	if err != nil || s.Status != session.Live {
		w.t.Fatalf("session is %q, %v", s.Status, err)
	}
	return s
}

func (w *world) begin(s session.Session, q run.Request) run.Run {
	w.t.Helper()
	r, err := w.runs.Start(w.t.Context(), alice, s.ID, q)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func (w *world) wait(r run.Run) run.Run {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	r, err := w.runs.Wait(ctx, alice, r.Session, r.ID)
	if err != nil {
		w.t.Fatal(err)
	}
	if !r.Status.Final() {
		w.t.Fatalf("run is still %s: %v", r.Status, statuses(r))
	}
	return r
}

func (w *world) finish(s session.Session, q run.Request) run.Run {
	w.t.Helper()
	return w.wait(w.begin(s, q))
}

func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("never: %s", what)
		}
	}
}

// events are the recorded outcomes of an action on any object.
func (w *world) events(action string) []string {
	w.t.Helper()
	var out []string
	for _, workspace := range []string{"default", ""} {
		events, _, err := w.db.AuditEvents(w.t.Context(), workspace, pageOf(200))
		if err != nil {
			w.t.Fatal(err)
		}
		for _, e := range events {
			if e.Action == action {
				out = append(out, e.Object+" "+e.Outcome+" "+e.Actor+" "+e.Detail)
			}
		}
	}
	return out
}

// calls is a request with one call per tool name, all of them valid.
func calls(names ...string) run.Request {
	var q run.Request
	for i, n := range names {
		args := `{"command":"true"}`
		if n == "python_exec" {
			args = `{"code":"pass"}`
		}
		q.Calls = append(q.Calls, run.ToolCall{ID: fmt.Sprint("c", i+1), Name: n, Arguments: []byte(args)})
	}
	return q
}

func statuses(r run.Run) []string {
	var out []string
	for _, c := range r.Calls {
		s := string(c.Status)
		if c.Result.Error != nil {
			s += "/" + c.Result.Error.Code
		}
		out = append(out, s)
	}
	return out
}

type policies struct{}

func (policies) Resolve(_ context.Context, workspace string) (policy.Policy, error) {
	return policy.Policy{WorkspaceID: workspace, FSAllowlist: []string{"/workspace"}, CPUShares: 2, MemoryMB: 64, PIDsLimit: 16, WallClockSeconds: 5, OutputBytesLimit: 1024, BaseImage: "base"}, nil
}

// runner is a runner in memory. It keeps the rules that a real one must keep:
// it starts a call at most once, and not at all once it was asked about it.
type runner struct {
	w                 *world
	name, incarnation string

	mu        sync.Mutex
	started   map[string]int         // by call: how often it ran
	gone      map[string]bool        // tombstones
	held      map[string]run.Outcome // calls that run until they are let go
	orders    []string               // what was ordered, in order
	last      tool.Invocation        // of the call that began last
	notices   []run.Notice
	tickets   []session.Session
	announced atomic.Int64

	ready       int  // runners that Fleet counts
	ignore      bool // tickets are not taken
	claimOnly   bool // they are claimed and then nothing follows
	failStart   fault.Code
	hold        bool  // calls run until release
	deaf        error // call orders: nothing arrives, this is the error
	mute        bool  // call orders arrive, their answer is lost
	statusError error
	refuse      string
	result      func(run.Call) (run.CallStatus, run.Result)
}

func (r *runner) claim(s session.Session) session.Claim {
	return session.Claim{Runner: r.name, Incarnation: r.incarnation, Session: s.ID, Epoch: s.Epoch}
}

func (r *runner) set(change func(*runner)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r)
}

func (r *runner) Announce(ctx context.Context, s session.Session) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tickets = append(r.tickets, s)
	r.announced.Add(1)
	if r.ignore {
		return nil
	}
	claimOnly, failStart := r.claimOnly, r.failStart
	go func() {
		ctx := context.WithoutCancel(ctx)
		g, err := r.w.sessions.Claim(ctx, r.claim(s))
		if err != nil || claimOnly {
			return
		}
		if failStart != "" {
			r.w.sessions.StartFailed(ctx, r.claim(s), string(failStart), "base_image", "it can't be")
			return
		}
		r.w.sessions.Started(ctx, r.claim(s), session.Sandbox{
			Backend: "memory", Isolation: "none", ImageDigest: "sha256:1", PolicyDigest: g.Policy.Digest(), Enforced: map[string]string{"memory_mb": "cgroup"},
		})
	}()
	return nil
}

func (r *runner) Call(_ context.Context, s session.Session, c run.Call, inv tool.Invocation) (run.Reply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.deaf != nil {
		return run.Reply{}, r.deaf
	}
	r.orders = append(r.orders, "call "+c.ClientID)
	if inv.Program == "" {
		return run.Reply{Code: "invalid", Reason: "no program"}, nil
	}
	if c.Incarnation != r.incarnation {
		return run.Reply{Code: "audience"}, nil
	}
	if r.started[c.ID] > 0 {
		return run.Reply{Code: "duplicate"}, nil
	}
	if r.gone[c.ID] || r.refuse != "" {
		return run.Reply{Code: cmp.Or(r.refuse, "tombstone"), Reason: "because"}, nil
	}
	r.started[c.ID]++
	r.last = inv
	o := run.Outcome{
		Runner: r.name, Incarnation: r.incarnation, Session: s.ID, Epoch: s.Epoch, Run: c.Run, Call: c.ID,
		Status: run.OK, Result: run.Result{ExitCode: new(int), Stdout: []byte("out of " + c.ClientID), StdoutBytes: 10, DurationMS: 1.5, CPUMS: 0.5},
	}
	if r.result != nil {
		o.Status, o.Result = r.result(c)
	}
	if r.hold {
		r.held[c.ID] = o
	} else {
		go r.w.runs.Apply(context.Background(), o)
	}
	if r.mute {
		return run.Reply{}, errors.New("no answer")
	}
	return run.Reply{Accepted: true}, nil
}

// startedAny reports whether any call began.
func (r *runner) startedAny() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.started) > 0
}

// invocation is what the last call was told to run.
func (r *runner) invocation() tool.Invocation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// release lets a held call end.
func (r *runner) release(call string) run.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.held[call]
	delete(r.held, call)
	return o
}

func (r *runner) state(call string) string {
	switch _, open := r.held[call]; {
	case open:
		return "running"
	case r.started[call] > 0:
		return "done"
	}
	if r.gone == nil {
		r.gone = map[string]bool{}
	}
	r.gone[call] = true
	return "unknown"
}

func (r *runner) Status(_ context.Context, s session.Session, call string) (run.Reply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.statusError != nil {
		return run.Reply{}, r.statusError
	}
	r.orders = append(r.orders, "status")
	return run.Reply{Accepted: true, State: r.state(call)}, nil
}

func (r *runner) Cancel(_ context.Context, s session.Session, call string) (run.Reply, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.statusError != nil {
		return run.Reply{}, r.statusError
	}
	r.orders = append(r.orders, "cancel")
	state := r.state(call)
	if state == "running" {
		o := r.held[call]
		delete(r.held, call)
		o.Status, o.Result.Error = run.CallCancelled, nil
		go r.w.runs.Apply(context.Background(), o)
	}
	return run.Reply{Accepted: true, State: state}, nil
}

func (r *runner) Stop(context.Context, session.Session) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.orders = append(r.orders, "stop")
	return nil
}

func (r *runner) Notify(_ string, n run.Notice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notices = append(r.notices, n)
}

func (r *runner) Any(context.Context, string) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ready, nil
}

func (r *runner) ordered(what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, o := range r.orders {
		if o == what {
			n++
		}
	}
	return n
}

func (r *runner) holds(n int) func() bool {
	return func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.held) == n
	}
}

func (r *runner) heldCalls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for id := range r.held {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (r *runner) mostStarts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	most := 0
	for _, n := range r.started {
		most = max(most, n)
	}
	return most
}

func event() audit.Event {
	return audit.Event{ID: "aud_" + newID(), At: time.Now(), Workspace: "default", Actor: "test", Action: "test"}
}

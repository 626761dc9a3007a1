package httpapi_test

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// fakeRuns keeps sessions, runs and their events in memory. What a run does is
// a test's script; without one every call ends ok and prints its arguments.
type fakeRuns struct {
	mu      sync.Mutex
	changed chan struct{} // closed and renewed at every change
	held    map[string]session.Session
	runs    map[string]run.Run
	events  map[string][]httpapi.Event
	seq     uint64
	kept    uint64 // events up to this number are no longer kept

	script func(ctx context.Context, id string) // runs beside the request
	err    error                                // instead of starting
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newFakeRuns() *fakeRuns {
	f := &fakeRuns{
		changed: make(chan struct{}), held: map[string]session.Session{},
		runs: map[string]run.Run{}, events: map[string][]httpapi.Event{}, seq: 100,
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.script = func(_ context.Context, id string) { f.play(id) }
	return f
}

func (f *fakeRuns) stop() {
	f.cancel()
	f.wg.Wait()
}

// emit appends an event to the run's stream.
func (f *fakeRuns) emit(id string, e httpapi.Event) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	e.Seq, e.Run = f.seq, id
	f.events[id] = append(f.events[id], e)
	f.wake()
	return f.seq
}

func (f *fakeRuns) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// change edits a run.
func (f *fakeRuns) change(id string, edit func(*run.Run)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.runs[id]
	r.Calls = append([]run.Call(nil), r.Calls...)
	edit(&r)
	f.runs[id] = r
	f.wake()
}

func (f *fakeRuns) get(id string) run.Run {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.runs[id]
}

// end makes a call final.
func (f *fakeRuns) end(id string, i int, status run.CallStatus, result run.Result) {
	f.change(id, func(r *run.Run) { r.Calls[i].Status, r.Calls[i].Result = status, result })
	f.emit(id, httpapi.Event{Kind: "call.finished", Call: f.get(id).Calls[i].ID})
}

// finish makes the run final.
func (f *fakeRuns) finish(id string) {
	f.settle(id)
	f.emit(id, httpapi.Event{Kind: "run.finished"})
}

// settle makes the run final without an event.
func (f *fakeRuns) settle(id string) {
	f.change(id, func(r *run.Run) {
		r.Status, r.FinishedAt = run.Finished, time.Now()
		r.Usage = run.Usage{Calls: len(r.Calls), CPUMS: 1.5, DurationMS: 2.5}
	})
}

func (f *fakeRuns) output(id string, i int, stream, data string) uint64 {
	return f.emit(id, httpapi.Event{Kind: "call.output", Call: f.get(id).Calls[i].ID, Stream: stream, Data: []byte(data)})
}

func (f *fakeRuns) play(id string) {
	f.emit(id, httpapi.Event{Kind: "run.started"})
	for i, c := range f.get(id).Calls {
		f.emit(id, httpapi.Event{Kind: "call.started", Call: c.ID})
		f.output(id, i, "stdout", string(c.Arguments))
		zero := 0
		f.end(id, i, run.OK, run.Result{
			ExitCode: &zero, Stdout: c.Arguments, StdoutBytes: int64(len(c.Arguments)), DurationMS: 1,
			Backend: "fake", Isolation: "none", Enforced: map[string]string{"memory_mb": "cgroup"},
		})
	}
	f.finish(id)
}

func (f *fakeRuns) find(p identity.Principal, sessionID string) (session.Session, error) {
	s, ok := f.held[sessionID]
	if !ok || !s.VisibleTo(p) {
		return session.Session{}, session.NotFound(sessionID)
	}
	return s, nil
}

func (f *fakeRuns) Start(_ context.Context, p identity.Principal, sessionID string, req run.Request) (run.Run, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.find(p, sessionID); err != nil {
		return run.Run{}, err
	}
	if f.err != nil {
		return run.Run{}, f.err
	}
	r := run.Run{
		ID: "run_" + newID(), Session: sessionID, Workspace: p.Workspace, Owner: p.UserID, Status: run.Running,
		Parallel: req.Parallel, CreatedAt: time.Now(), StartedAt: time.Now(),
	}
	for i, c := range req.Calls {
		r.Calls = append(r.Calls, run.Call{
			ID: "call_" + newID(), ClientID: c.ID, Run: r.ID, Index: i, Name: c.Name, Arguments: c.Arguments, Status: run.Pending, Runner: "r1",
		})
	}
	f.runs[r.ID] = r
	script := f.script
	f.wg.Go(func() { script(f.ctx, r.ID) })
	return r, nil
}

func (f *fakeRuns) Get(_ context.Context, p identity.Principal, sessionID, id string) (run.Run, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.find(p, sessionID)
	r, ok := f.runs[id]
	if err != nil || !ok || r.Session != sessionID {
		return run.Run{}, fault.New(fault.NotFound, "no run %q", id)
	}
	return r, nil
}

func (f *fakeRuns) Wait(ctx context.Context, p identity.Principal, sessionID, id string) (run.Run, error) {
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		r, err := f.Get(ctx, p, sessionID, id)
		if err != nil || r.Status.Final() {
			return r, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return r, nil
		}
	}
}

func (f *fakeRuns) List(_ context.Context, p identity.Principal, sessionID string, _ page.Page) ([]run.Run, string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.find(p, sessionID); err != nil {
		return nil, "", err
	}
	var out []run.Run
	for _, r := range f.runs {
		if r.Session == sessionID {
			out = append(out, r)
		}
	}
	return out, "", nil
}

func (f *fakeRuns) Cancel(ctx context.Context, p identity.Principal, sessionID, id string) (run.Run, error) {
	if r, err := f.Get(ctx, p, sessionID, id); err != nil || r.Status.Final() {
		return r, err
	}
	f.change(id, func(r *run.Run) {
		r.Status, r.FinishedAt = run.Cancelled, time.Now()
		for i := range r.Calls {
			r.Calls[i].Status = run.CallCancelled
			r.Calls[i].Result.Error = &run.Failure{Code: string(fault.Cancelled), Message: "the client cancelled the call"}
		}
	})
	return f.get(id), nil
}

// watch is a stream that keeps its events: it replays and then follows.
func (f *fakeRuns) watch(ctx context.Context, _, id string, after uint64) iter.Seq2[httpapi.Event, error] {
	return func(yield func(httpapi.Event, error) bool) {
		for {
			f.mu.Lock()
			changed, kept := f.changed, f.kept
			events := append([]httpapi.Event(nil), f.events[id]...)
			f.mu.Unlock()
			if after > 0 && after < kept {
				yield(httpapi.Event{}, fault.New(fault.Gone, "events after %d are no longer kept", after))
				return
			}
			for _, e := range events {
				if e.Seq <= max(after, kept) {
					continue
				}
				after = e.Seq
				if !yield(e, nil) {
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// fakeSessions is the sessions half of fakeRuns.
type fakeSessions struct{ *fakeRuns }

func (f *fakeRuns) sessions() fakeSessions { return fakeSessions{f} }

func (f fakeSessions) Create(_ context.Context, p identity.Principal, n session.NewSession) (session.Session, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	s := session.Session{
		ID: "ses_" + newID(), Workspace: p.Workspace, Owner: p.UserID, Status: session.New,
		IdleTTL: n.IdleTTL, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(n.TTL),
	}
	f.held[s.ID] = s
	return s, nil
}

func (f fakeSessions) Get(_ context.Context, p identity.Principal, id string) (session.Session, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.find(p, id)
}

func (f fakeSessions) List(_ context.Context, p identity.Principal, _ page.Page) ([]session.Session, string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []session.Session
	for _, s := range f.held {
		if s.VisibleTo(p) {
			out = append(out, s)
		}
	}
	return out, "", nil
}

func (f fakeSessions) Close(_ context.Context, p identity.Principal, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(p, id)
	if err != nil {
		return err
	}
	s.Status, s.Reason = session.Closed, session.ClosedByClient
	f.held[id] = s
	return nil
}

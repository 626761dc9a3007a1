// Package execution carries out orders: it owns the live sandboxes, runs the
// calls in them and reports how each ended, once.
package execution

import (
	"context"
	"crypto/ecdh"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/wire"
)

// reports takes a report and brings it to the control plane, whatever happens.
type reports interface {
	Send(r wire.Report) error
}

// frames takes a frame for the watchers, or says that it can't now.
type frames interface {
	Publish(session string, f wire.Frame) bool
}

// blobs moves what is too large for an order or a report.
type blobs interface {
	Get(ctx context.Context, b wire.Blob) ([]byte, error)
	Put(ctx context.Context, data []byte) (wire.Blob, error)
}

// backend makes the sandboxes.
type backend interface {
	Start(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error)
}

// uploadTime is how long Close waits for large outputs.
const uploadTime = 5 * time.Second

// Service runs verified orders. Every method may be called from several
// goroutines; Close ends all that it started.
type Service struct {
	Backend     backend
	Reports     reports
	Live        frames
	Blobs       blobs
	Box         *ecdh.PrivateKey // what secrets in orders are sealed to
	Runner      string
	Incarnation string
	MaxCalls    int       // open calls at once
	Packages    *Packages // nil: nothing is installed
	Now         func() time.Time
	Log         *slog.Logger

	once    sync.Once
	work    sync.WaitGroup
	uploads context.Context // ends when Close does not wait for uploads any more
	giveUp  context.CancelFunc

	mu       sync.Mutex
	sessions map[wire.Held]*session
	calls    int
	failures int    // starts that failed in a row
	failure  string // why the last of them did
	closed   bool   // no sessions and calls any more
	idle     chan struct{}
}

// Load is what a runner carries now.
type Load struct {
	Sessions      []wire.Held
	Calls         []string
	StartFailures int    // in a row
	StartFailure  string // why the last of them failed
}

// Refused is why an order was not taken. Code is short and stable, Reason is
// for people.
type Refused struct{ Code, Reason string }

// Error is the reason.
func (r *Refused) Error() string { return r.Code + ": " + r.Reason }

func (s *Service) init() {
	s.once.Do(func() {
		s.sessions = map[wire.Held]*session{}
		s.uploads, s.giveUp = context.WithCancel(context.Background())
	})
}

// Start makes the session's sandbox in the background and reports on it. over
// is called once, when nothing of the session is left, also when it never
// came to live.
func (s *Service) Start(o wire.Order, over func()) error {
	s.init()
	key := wire.Held{Session: o.Session, Epoch: o.Epoch}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return &Refused{wire.RefusedDraining, "this runner is shutting down"}
	}
	if s.sessions[key] != nil {
		return &Refused{wire.RefusedDuplicate, "the session's sandbox was started before"}
	}
	for other, ses := range s.sessions {
		if other.Session == o.Session { // an older epoch: it is not ours any more
			ses.cancel(raised)
		}
	}
	ses := newSession(key, o)
	s.sessions[key] = ses
	s.work.Go(func() {
		defer over()
		s.host(ses)
	})
	return nil
}

// Call reserves a place for a call in a live session and returns what starts
// it. over is called once, when the call's report is on its way.
func (s *Service) Call(o wire.Order, over func()) (run func(), err error) {
	s.init()
	s.mu.Lock()
	defer s.mu.Unlock()
	ses := s.sessions[wire.Held{Session: o.Session, Epoch: o.Epoch}]
	switch {
	case s.closed:
		return nil, &Refused{wire.RefusedDraining, "this runner is shutting down"}
	case ses == nil || !ses.live() || ses.workspace != o.Workspace:
		return nil, &Refused{wire.RefusedUnknownSession, "the session has no live sandbox here"}
	case s.calls >= s.MaxCalls:
		return nil, &Refused{wire.RefusedCapacity, "this runner carries as many calls as it may"}
	}
	c := newCall(ses, *o.Call)
	ses.open[c.ID] = c
	ses.running.Add(1)
	s.calls++
	s.work.Add(1)
	return func() {
		go func() {
			defer s.work.Done()
			s.run(c)
			s.finished(c)
			over()
		}()
	}, nil
}

func (s *Service) finished(c *call) {
	c.cancel(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(c.session.open, c.ID)
	c.session.running.Done()
	s.calls--
	if s.calls == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

// Cancel ends an open call because the client asked for it.
func (s *Service) Cancel(held wire.Held, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ses := s.sessions[held]; ses != nil && ses.open[id] != nil {
		ses.open[id].cancel(cancelled)
	}
}

// Stop closes a session because the control plane asked for it.
func (s *Service) Stop(held wire.Held) { s.end(held, stopped) }

// Raise closes a session that this runner no longer owns.
func (s *Service) Raise(held wire.Held) { s.end(held, raised) }

// Abandon closes every session: the control plane was not heard for too long.
func (s *Service) Abandon() {
	for _, held := range s.Load().Sessions {
		s.end(held, unheard)
	}
}

func (s *Service) end(held wire.Held, why *ending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ses := s.sessions[held]; ses != nil {
		ses.cancel(why)
	}
}

// Load says what is live and open now, in a stable order.
func (s *Service) Load() Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := Load{StartFailures: s.failures, StartFailure: s.failure}
	for held, ses := range s.sessions {
		l.Sessions = append(l.Sessions, held)
		l.Calls = slices.AppendSeq(l.Calls, maps.Keys(ses.open))
	}
	slices.SortFunc(l.Sessions, func(a, b wire.Held) int {
		switch {
		case a.Session < b.Session:
			return -1
		case a.Session > b.Session:
			return 1
		}
		return int(a.Epoch - b.Epoch)
	})
	slices.Sort(l.Calls)
	return l
}

// Drain takes no more sessions and calls and returns when the open calls have
// ended or ctx has.
func (s *Service) Drain(ctx context.Context) {
	s.init()
	s.mu.Lock()
	s.closed = true
	var idle chan struct{}
	if s.calls > 0 {
		if s.idle == nil {
			s.idle = make(chan struct{})
		}
		idle = s.idle
	}
	s.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// Close ends the calls and sandboxes that are left, with a reason, and returns
// when nothing of them runs and every report was sent. Large outputs are
// uploaded until uploadTime has passed; the reports then carry less.
//
// An error means that ctx ended first: something of a sandbox hangs.
func (s *Service) Close(ctx context.Context) error {
	s.init()
	defer s.giveUp()
	defer time.AfterFunc(uploadTime, s.giveUp).Stop()
	s.mu.Lock()
	s.closed = true
	for _, ses := range s.sessions {
		ses.cancel(shutdown)
	}
	s.mu.Unlock()
	gone := make(chan struct{})
	go func() { // ends with the work
		defer close(gone)
		s.work.Wait()
	}()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%+v still open: %w", s.Load(), context.Cause(ctx))
	}
}

// report sends r in the name of this start of this runner.
func (s *Service) report(held wire.Held, r wire.Report) {
	r.V = wire.Version
	r.Runner, r.Incarnation = s.Runner, s.Incarnation
	r.Session, r.Epoch = held.Session, held.Epoch
	r.At = s.Now().UnixMilli()
	if err := s.Reports.Send(r); err != nil {
		s.Log.Error("report could not be sent", "kind", r.Kind, "session", r.Session, "call", r.Call, "error", err)
	}
}

package run

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// Store keeps runs and calls. Every method is one transaction, and writes the
// audit events of what it changes in it.
type Store interface {
	// AdmitRun inserts a run as Admit makes it of the session's state, and
	// begins the start of a session that has no sandbox. It fails with
	// fault.NotFound, fault.Conflict (session_lost, session_closed) and
	// fault.Busy, and then changes nothing.
	AdmitRun(ctx context.Context, a Admission) (Run, session.Session, error)
	// Run fails with fault.NotFound. Its calls are in order and whole.
	Run(ctx context.Context, id string) (Run, error)
	// RunState is Run without the output of its calls.
	RunState(ctx context.Context, id string) (Run, error)
	// Runs lists a session's runs, newest first; their calls hold no output.
	Runs(ctx context.Context, session string, p page.Page) ([]Run, string, error)
	Session(ctx context.Context, id string) (session.Session, error)
	// BeginStart gives a session that has no sandbox, or whose start is late
	// at now, a new epoch. False: somebody else did, or it needs none.
	BeginStart(ctx context.Context, id string, epoch int64, now, startBy time.Time) (session.Session, bool, error)
	// SendCalls marks pending calls as sent to the session's holder, if that
	// still is the holder and the run this replica's; it returns those it marked.
	SendCalls(ctx context.Context, r Run, s session.Session, calls []string, replica string, at time.Time) ([]string, error)
	MarkStarted(ctx context.Context, run, call string) error
	// ForgetValue drops the value of a call that has ended.
	ForgetValue(ctx context.Context, run, call string) error
	// FinishCall stores an outcome if its sender holds the epoch under which
	// the call was sent, the call is not final and the output fits; false:
	// one of these is not so.
	FinishCall(ctx context.Context, o Outcome, limits Finish) (Ended, bool, error)
	// EndCalls ends those of the named calls that are still in one of from.
	EndCalls(ctx context.Context, r Run, calls []string, from []CallStatus, v session.Verdict, f Finish) ([]session.EndedCall, error)
	// CancelRun ends the run's pending calls and marks it as cancelled.
	CancelRun(ctx context.Context, r Run, reason string, v session.Verdict, f Finish) ([]session.EndedCall, error)
	// SentCalls lists the session's calls that a runner may be running.
	SentCalls(ctx context.Context, session string) ([]Call, error)
	// LoseRunner ends what one start of a runner held.
	LoseRunner(ctx context.Context, l Loss) ([]session.EndedCall, []string, error)
	// RenewLeases lists the open runs of replica and renews their leases.
	RenewLeases(ctx context.Context, replica string, until time.Time) ([]string, error)
	// TakeRuns gives runs whose lease has ended to replica; all: every open run.
	TakeRuns(ctx context.Context, replica string, now, until time.Time, all bool, limit int) ([]string, error)
	InsertEvent(ctx context.Context, e audit.Event) error
}

// Admission is a run to be inserted. Its calls are pending or already final.
type Admission struct {
	Run       Run
	Principal identity.Principal
	MaxOpen   int       // open runs of the session, this one included
	StartBy   time.Time // deadline of a start that begins with it
	Event     audit.Event
}

// Finish is what every end of a call needs beside the outcome.
type Finish struct {
	At     time.Time
	Actor  string
	Detail string        // the mechanism, for the audit event
	NewID  func() string // of the audit event, without prefix
}

// Ended is a call that a report ended, and how its run stands then.
type Ended struct {
	session.EndedCall
	RunStatus Status
}

// Loss is the end of one start of a runner.
type Loss struct {
	Runner, Incarnation string
	Sent                session.Verdict // what it may have run
	Pending             session.Verdict // what waited for the sessions that are lost
	Finish
}

// Dispatcher talks to runners. Its methods but Notify wait for an answer.
type Dispatcher interface {
	// Announce tells the pool that the session's epoch wants a sandbox.
	Announce(ctx context.Context, s session.Session) error
	// Call gives the order for c. An error means that there was no answer: the
	// runner may or may not have got it.
	Call(ctx context.Context, s session.Session, c Call, inv tool.Invocation) (Reply, error)
	Cancel(ctx context.Context, s session.Session, callID string) (Reply, error)
	Status(ctx context.Context, s session.Session, callID string) (Reply, error)
	Stop(ctx context.Context, s session.Session) error
	// Notify tells watchers and other replicas. It never blocks.
	Notify(sessionID string, n Notice)
}

// Reply is a runner's answer to an order.
type Reply struct {
	Accepted bool
	Code     string // why refused
	Reason   string
	State    string // status and cancel: one of the three below
}

// What runners answer, as far as it matters here. The words are the
// protocol's.
const (
	Capacity       = "capacity"
	Draining       = "draining"
	MemoryFull     = "memory_full"
	Unheard        = "unheard"
	UnknownSession = "unknown_session"
	WrongEpoch     = "epoch"
	Duplicate      = "duplicate"

	CallUnknown = "unknown" // never came, and can't come any more
	CallRunning = "running"
	CallEnded   = "done"
)

// neverHad reports whether a runner that was asked for a call, or told to
// cancel it, never had it and can't get it any more.
func (r Reply) neverHad() bool {
	return r.Accepted && r.State == CallUnknown || r.Code == UnknownSession
}

// Notice says that something about a session changed; readers load it.
type Notice struct{ Kind, Run, Call string }

// The kinds of notices.
const (
	RunStarted     = "run.started"
	CallFinished   = "call.finished"
	RunFinished    = "run.finished"
	SessionChanged = "session.changed"
)

// Fleet says whether runners are there.
type Fleet interface {
	// Any counts the runners of a pool that take sessions.
	Any(ctx context.Context, pool string) (ready int, err error)
}

// PythonTools offers the functions of the Python tools that runs name.
type PythonTools interface {
	// Pin returns the functions of the tools that p names, and what the run is
	// bound to. A fault of kind NotFound names one that p may not use.
	Pin(ctx context.Context, p identity.Principal, ids []string) ([]tool.Pin, []tool.Tool, error)
	// Pinned returns them again, but for those of tools that were changed since.
	Pinned(ctx context.Context, workspace string, pins []tool.Pin) ([]tool.Tool, error)
}

// ToolCall is one call as the client asks for it.
type ToolCall struct {
	ID        string
	Name      string
	Arguments json.RawMessage
}

// Request is one POST …/run.
type Request struct {
	Calls    []ToolCall
	Parallel bool
	ToolIDs  []string // Python tools whose functions may be called as well
}

// Caps of a request.
const (
	MaxCalls    = 128
	MaxClientID = 128 // bytes of a client's call id
	MaxName     = 128 // bytes of the name of a call's tool
)

// Service starts runs and drives them to their end. Run must be running for
// Start to accept any.
type Service struct {
	Store      Store
	Tools      []tool.Source // later ones override earlier ones
	Python     PythonTools   // nil: no run may name any
	Dispatcher Dispatcher
	Fleet      Fleet
	Pool       string
	Replica    string // a name that no other replica and no earlier start has
	Sole       bool   // there is no other replica: take every open run over at once
	MaxOpen    int    // open runs per session
	StartWait  time.Duration
	ClaimWait  time.Duration // a ticket's deadline
	Pace       Pace
	Now        func() time.Time
	NewID      func() string // without prefix
	Log        *slog.Logger

	hub   hub
	mu    sync.Mutex
	begin func(*driver) // nil while Run is not running
	mine  map[string]*driver
}

// Pace is how often things are looked at. Zero fields mean the defaults.
type Pace struct {
	Lease     time.Duration // how long a run is this replica's; 9 s
	Renew     time.Duration // 3 s
	Poll      time.Duration // the driver's look at the database when nothing wakes it; 1 s
	Mark      time.Duration // a call still open then is shown as running; 100 ms
	Ask       time.Duration // first status order after an unanswered call order, doubling to 5 s; 200 ms
	Reassure  time.Duration // status order for a call that was accepted long ago; 15 s
	Unfetched time.Duration // how long a call may be done without its report; 2 min
}

func (p Pace) withDefaults() Pace {
	set := func(d *time.Duration, otherwise time.Duration) {
		if *d == 0 {
			*d = otherwise
		}
	}
	set(&p.Lease, 9*time.Second)
	set(&p.Renew, 3*time.Second)
	set(&p.Poll, time.Second)
	set(&p.Mark, 100*time.Millisecond)
	set(&p.Ask, 200*time.Millisecond)
	set(&p.Reassure, 15*time.Second)
	set(&p.Unfetched, 2*time.Minute)
	return p
}

// notFound is the answer for an unknown run and for another's.
func notFound(id string) error {
	if len(id) > 128 {
		id = id[:128]
	}
	return fault.New(fault.NotFound, "no run %q in this session", id)
}

func (r Run) visibleTo(p identity.Principal) bool {
	return r.Workspace == p.Workspace && (r.Owner == p.UserID || p.IsAdmin() && !session.Internal(r.Session))
}

// Get finds one run of a session that p may see, with its calls.
func (s *Service) Get(ctx context.Context, p identity.Principal, sessionID, runID string) (Run, error) {
	r, err := s.Store.Run(ctx, runID)
	if fault.Is(err, fault.NotFound) || err == nil && (!r.visibleTo(p) || r.Session != sessionID) {
		return Run{}, notFound(runID)
	}
	return r, err
}

// List is one page of a session's runs, newest first. Its calls hold no
// output; Get has it.
func (s *Service) List(ctx context.Context, p identity.Principal, sessionID string, pg page.Page) ([]Run, string, error) {
	c, err := s.Store.Session(ctx, sessionID)
	if fault.Is(err, fault.NotFound) || err == nil && !c.VisibleTo(p) {
		return nil, "", session.NotFound(sessionID)
	}
	if err != nil {
		return nil, "", err
	}
	return s.Store.Runs(ctx, sessionID, pg)
}

// Wait returns the run once it is final, or as it is when ctx ends.
func (s *Service) Wait(ctx context.Context, p identity.Principal, sessionID, runID string) (Run, error) {
	l := s.hub.listen(runID)
	defer s.hub.drop(l, runID)
	if !s.drives(p, sessionID, runID) {
		r, err := s.Get(ctx, p, sessionID, runID)
		if err != nil || r.Status.Final() {
			return r, err
		}
	}
	poll := time.NewTicker(s.Pace.withDefaults().Poll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return s.soFar(ctx, p, sessionID, runID)
		case <-poll.C:
			if r, err := s.Store.RunState(ctx, runID); err != nil || !r.Status.Final() {
				continue // what is wrong now may be right later; the run goes on without us
			}
		case <-l.c:
			if !l.final.Load() {
				continue
			}
		}
		if r := l.whole.Load(); r != nil && r.visibleTo(p) && r.Session == sessionID {
			return *r, nil
		}
		r, err := s.Get(ctx, p, sessionID, runID)
		if fault.Is(err, fault.Unavailable) || err == nil && !r.Status.Final() {
			continue
		}
		return r, err
	}
}

func (s *Service) soFar(ctx context.Context, p identity.Principal, sessionID, runID string) (Run, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return s.Get(ctx, p, sessionID, runID)
}

// Cancel ends a run: calls that wait are cancelled at once, those that a
// runner has are ordered to end. It returns the run, final when the runner
// was quick. Cancelling a final run changes nothing.
func (s *Service) Cancel(ctx context.Context, p identity.Principal, sessionID, runID string) (Run, error) {
	r, err := s.Get(ctx, p, sessionID, runID)
	if err != nil || r.Status.Final() {
		return r, err
	}
	v := session.Verdict{Status: string(CallCancelled), Code: fault.Cancelled, Message: "the client cancelled the run before the call was sent; nothing ran"}
	ended, err := s.Store.CancelRun(ctx, r, "client", v, s.finish(p.UserID, "client cancel"))
	if err != nil {
		return Run{}, err
	}
	s.publish(ended)
	s.hub.wake(runID, false)
	s.Dispatcher.Notify(sessionID, Notice{Kind: SessionChanged, Run: runID})
	s.cancelSent(ctx, r)
	ctx, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	return s.Wait(ctx, p, sessionID, runID)
}

// cancelSent orders the runner to end what it has of r.
func (s *Service) cancelSent(ctx context.Context, r Run) {
	r, err := s.Store.RunState(ctx, r.ID)
	if err != nil {
		return // the driver does it when it looks next
	}
	c, err := s.Store.Session(ctx, r.Session)
	if err != nil {
		return
	}
	s.cancelCalls(ctx, c, r.Calls)
}

// CancelSent orders the runner to end the session's calls, as far as it answers.
func (s *Service) CancelSent(ctx context.Context, c session.Session) {
	calls, err := s.Store.SentCalls(ctx, c.ID)
	if err != nil {
		s.Log.WarnContext(ctx, "list open calls", "session", c.ID, "error", err)
		return
	}
	s.cancelCalls(ctx, c, calls)
}

// cancelCalls gives cancel orders for those calls that a runner may have, all
// at once, and waits for the answers.
func (s *Service) cancelCalls(ctx context.Context, c session.Session, calls []Call) {
	var wg sync.WaitGroup
	for _, call := range calls {
		if call.sent() && call.Epoch == c.Epoch && call.Incarnation == c.Incarnation {
			wg.Go(func() { s.cancelCall(ctx, c, call) })
		}
	}
	wg.Wait()
}

// cancelCall gives one cancel order. A runner that never heard of the call
// has now sworn not to run it, so it is cancelled for good.
func (s *Service) cancelCall(ctx context.Context, c session.Session, call Call) {
	reply, err := s.Dispatcher.Cancel(ctx, c, call.ID)
	if err != nil {
		s.Log.WarnContext(ctx, "cancel order unanswered", "call", call.ID, "runner", call.Runner, "error", err)
		return
	}
	if !reply.neverHad() {
		return
	}
	v := session.Verdict{Status: string(CallCancelled), Code: fault.Cancelled, Message: "the call was cancelled before it reached the runner; nothing ran"}
	s.endSent(ctx, call, v, "cancelled, the runner never had it")
}

// endSent ends one sent call by our own word.
func (s *Service) endSent(ctx context.Context, call Call, v session.Verdict, mechanism string) {
	r := Run{ID: call.Run, Session: call.Session, Workspace: call.Workspace}
	ended, err := s.Store.EndCalls(ctx, r, []string{call.ID}, inFlight, v, s.finish(audit.ControlPlane, mechanism))
	if err != nil {
		s.Log.WarnContext(ctx, "end a call", "call", call.ID, "error", err)
		return
	}
	s.publish(ended)
}

// RunnerLost ends what one start of a runner held: its sessions are lost or
// start again elsewhere, its open calls end as runner_lost. reason names the
// mechanism for the record. It may be called again for the same one.
func (s *Service) RunnerLost(ctx context.Context, runner, incarnation, reason string) error {
	ended, sessions, err := s.Store.LoseRunner(ctx, Loss{
		Runner: runner, Incarnation: incarnation,
		Sent:    session.Verdict{Status: string(RunnerLost), Code: fault.RunnerLost, Message: fault.Codes[fault.RunnerLost].Meaning},
		Pending: session.Verdict{Status: string(StartFailed), Code: fault.SessionLost, Message: "the session was lost before the call was sent; nothing ran"},
		Finish:  s.finish(audit.ControlPlane, reason),
	})
	if err != nil {
		return err
	}
	if len(ended)+len(sessions) > 0 {
		s.Log.WarnContext(ctx, "runner lost", "runner", runner, "incarnation", incarnation, "reason", reason,
			"sessions", len(sessions), "calls", len(ended))
	}
	s.publish(ended)
	for _, id := range sessions {
		s.SessionChanged(id, nil)
	}
	return nil
}

// SessionChanged wakes who waits for the session, here and on other replicas,
// and tells of the calls that ended with the change.
func (s *Service) SessionChanged(id string, ended []session.EndedCall) {
	s.publish(ended)
	s.hub.wake(id, false)
	s.Dispatcher.Notify(id, Notice{Kind: SessionChanged})
}

// SessionLive lets the runs go on that wait for c's sandbox.
func (s *Service) SessionLive(c session.Session) {
	s.hub.live(c)
	s.Dispatcher.Notify(c.ID, Notice{Kind: SessionChanged})
}

// Heard wakes who waits here for what another replica tells of.
func (s *Service) Heard(sessionID string, n Notice) {
	if n.Run != "" {
		s.hub.wake(n.Run, n.Kind == RunFinished)
	}
	s.hub.wake(sessionID, false)
}

// publish tells of calls that ended, after it is stored.
func (s *Service) publish(ended []session.EndedCall) {
	for _, e := range ended { // who waits here is in more of a hurry than who watches
		s.hub.wake(e.Run, e.RunFinal)
	}
	s.notify(ended)
}

// notify tells watchers and other replicas of calls that ended.
func (s *Service) notify(ended []session.EndedCall) {
	for _, e := range ended {
		s.Dispatcher.Notify(e.Session, Notice{Kind: CallFinished, Run: e.Run, Call: e.Call})
		if e.RunFinal {
			s.Dispatcher.Notify(e.Session, Notice{Kind: RunFinished, Run: e.Run})
		}
	}
}

func (s *Service) finish(actor, detail string) Finish {
	return Finish{At: s.now(), Actor: actor, Detail: detail, NewID: s.NewID}
}

// now is the time as the database keeps it.
func (s *Service) now() time.Time { return s.Now().UTC().Truncate(time.Microsecond) }

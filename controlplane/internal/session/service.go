package session

import (
	"context"
	"log/slog"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/shared/fault"
)

// Why a session is idle, lost or closed, beside the codes of fault.
const (
	ClosedByClient = "client"        // its owner or an admin deleted it
	ClosedByTTL    = "ttl"           // its life was over
	ClosedByIdle   = "idle_ttl"      // nobody used it
	StartExpired   = "start_expired" // no runner came in time and nobody waits any more
)

// MaxTTL is the longest life that a session may ask for.
const MaxTTL = 7 * 24 * time.Hour

// Store keeps sessions. Every method is one transaction; the audit event is
// written in it.
type Store interface {
	InsertSession(ctx context.Context, s Session, e audit.Event) error
	// Session fails with fault.NotFound.
	Session(ctx context.Context, id string) (Session, error)
	// Sessions lists one workspace's sessions, newest first; owner "" means everybody's.
	Sessions(ctx context.Context, workspace, owner string, p page.Page) ([]Session, string, error)
	// ClaimSession gives a starting session's epoch to its claimant, or fails
	// with fault.Conflict. The same claimant may ask twice.
	ClaimSession(ctx context.Context, c Claim, t Terms, e audit.Event) (Session, error)
	// SessionStarted makes a claimed session live; fault.Conflict when the
	// claimant no longer holds it or the policy is another. The event is its
	// workspace's.
	SessionStarted(ctx context.Context, c Claim, b Sandbox, e audit.Event) (Session, error)
	// EndSession fails with fault.Conflict when the session is not as e wants it.
	EndSession(ctx context.Context, e Ending) (Session, []EndedCall, error)
	// ExpiredSessions lists sessions that outlived a TTL, each with the reason in Reason.
	ExpiredSessions(ctx context.Context, now time.Time, limit int) ([]Session, error)
	// StaleStarts lists starting sessions whose start was to be by t and for which no run waits.
	StaleStarts(ctx context.Context, t time.Time, limit int) ([]Session, error)
	// InsertEvent records an event that changes nothing else.
	InsertEvent(ctx context.Context, e audit.Event) error
}

// Policies resolves the policy that a sandbox starts under.
type Policies interface {
	Resolve(ctx context.Context, workspace string) (policy.Policy, error)
}

// Runs is told what happened to sessions, so that waiting runs go on.
type Runs interface {
	// SessionChanged is called after the change is stored; it does not block.
	SessionChanged(id string, ended []EndedCall)
	// SessionLive is that for a session whose sandbox is up.
	SessionLive(s Session)
	// CancelSent orders the runner to end the session's calls, as far as it answers.
	CancelSent(ctx context.Context, s Session)
}

// Stopper orders the runner that holds a session to end its sandbox.
type Stopper interface {
	Stop(ctx context.Context, s Session) error
}

// Claim says who speaks for a session under which epoch.
type Claim struct {
	Runner      string
	Incarnation string
	Session     string
	Epoch       int64
}

// Grant is what a claimant needs to start the sandbox.
type Grant struct {
	Session Session
	Policy  policy.Policy
}

// Terms is what a claim fixes until the sandbox ends.
type Terms struct {
	PolicyDigest     string
	WallClockSeconds int64
	OutputBytesLimit int64
	StartBy          time.Time
}

// Sandbox is what a live sandbox says about itself.
type Sandbox struct {
	Backend      string
	Isolation    string
	ImageDigest  string
	PolicyDigest string
	Enforced     map[string]string
}

// Ending moves a session on and ends calls with it, in one transaction.
type Ending struct {
	Session string
	From    []Status // in one of which it must be
	Epoch   int64    // under which it must be; 0: any
	Holder  *Claim   // who must hold it; nil: anybody
	Unused  bool     // LastUsed must still be its last use: nobody used it meanwhile
	To      Status
	Reason  string
	Raise   bool // the epoch rises: whoever held it no longer does

	LastUsed time.Time
	Cancel   string  // its open runs are marked as cancelled for this reason; "": they are not
	Pending  Verdict // what calls become that no runner was told of; zero: they stay
	Sent     Verdict // what calls become that a runner may have run; zero: they stay
	At       time.Time
	Event    audit.Event
	NewID    func() string // of the events of the calls that end, without prefix
}

// Verdict is how a call ends with its session. Status is one of run's final
// call statuses, Code one of fault's.
type Verdict struct {
	Status  string
	Code    fault.Code
	Field   string
	Message string
}

// EndedCall is a call that ended, and whether its run ended with it.
type EndedCall struct {
	Session  string
	Run      string
	Call     string
	RunFinal bool
}

// NewSession asks for a session. Zero durations mean the service's defaults.
type NewSession struct {
	IdleTTL time.Duration
	TTL     time.Duration
}

// Service owns sessions from their creation to their end. Run must be running
// for TTLs to be kept.
type Service struct {
	Store        Store
	Policies     Policies
	Runs         Runs
	Stopper      Stopper
	IdleTTL      time.Duration // default of new sessions
	TTL          time.Duration // default of new sessions
	StartTimeout time.Duration // from claim to started; 0: 20 s
	SweepEvery   time.Duration // 0: 5 s
	Now          func() time.Time
	NewID        func() string // without prefix
	Log          *slog.Logger
}

// VisibleTo reports whether p may know of s: its creator and the admins of its workspace may.
func (s Session) VisibleTo(p identity.Principal) bool {
	return s.Workspace == p.Workspace && (s.Owner == p.UserID || p.IsAdmin() && !Internal(s.ID))
}

// NotFound is the answer for an unknown session and for another's.
func NotFound(id string) error {
	return fault.New(fault.NotFound, "no session %q", clip(id))
}

// Create makes a session; its sandbox is started by its first run.
func (s *Service) Create(ctx context.Context, p identity.Principal, n NewSession) (Session, error) {
	idle, ttl, err := s.ttls(n)
	if err != nil {
		return Session{}, err
	}
	now := s.Now()
	c := Session{
		ID: "ses_" + s.NewID(), Workspace: p.Workspace, Owner: p.UserID, Status: New,
		IdleTTL: idle, CreatedAt: now, LastUsedAt: now, ExpiresAt: now.Add(ttl),
	}
	if err := s.Store.InsertSession(ctx, c, s.event(c, p.UserID, audit.SessionCreated, audit.OK, "")); err != nil {
		return Session{}, err
	}
	return c, nil
}

func (s *Service) ttls(n NewSession) (idle, ttl time.Duration, err error) {
	idle, ttl = n.IdleTTL, n.TTL
	if idle < 0 || idle > MaxTTL {
		return 0, 0, fault.New(fault.Invalid, "idle_ttl_seconds must be between 1 and %d", int(MaxTTL.Seconds())).On("idle_ttl_seconds")
	}
	if ttl < 0 || ttl > MaxTTL {
		return 0, 0, fault.New(fault.Invalid, "ttl_seconds must be between 1 and %d", int(MaxTTL.Seconds())).On("ttl_seconds")
	}
	if idle == 0 {
		idle = s.IdleTTL
	}
	if ttl == 0 {
		ttl = s.TTL
	}
	return min(idle, ttl), ttl, nil
}

// Get finds one session that p may see.
func (s *Service) Get(ctx context.Context, p identity.Principal, id string) (Session, error) {
	c, err := s.Store.Session(ctx, id)
	if fault.Is(err, fault.NotFound) || err == nil && !c.VisibleTo(p) {
		return Session{}, NotFound(id)
	}
	return c, err
}

// List is one page of the sessions that p may see, newest first.
func (s *Service) List(ctx context.Context, p identity.Principal, pg page.Page) ([]Session, string, error) {
	owner := p.UserID
	if p.IsAdmin() {
		owner = ""
	}
	return s.Store.Sessions(ctx, p.Workspace, owner, pg)
}

// Close ends a session for good: calls that wait are cancelled, running ones
// are ordered to end, the sandbox is stopped. Closing twice is fine.
func (s *Service) Close(ctx context.Context, p identity.Principal, id string) error {
	c, err := s.Get(ctx, p, id)
	if err != nil || c.Status == Closed {
		return err
	}
	err = s.close(ctx, c, p.UserID, ClosedByClient, Ending{})
	if fault.Is(err, fault.Conflict) {
		return nil // somebody else closed it meanwhile
	}
	return err
}

// close ends c for reason. more holds further conditions.
func (s *Service) close(ctx context.Context, c Session, actor, reason string, more Ending) error {
	e := more
	e.Session, e.From, e.To, e.Reason = c.ID, []Status{New, Starting, Live, Idle, Lost}, Closed, reason
	e.Cancel = "session_closed"
	e.Pending = Verdict{Status: "cancelled", Code: fault.Cancelled, Message: "the session was closed before the call was sent"}
	e.At, e.NewID = s.Now(), s.NewID
	e.Event = s.event(c, actor, audit.SessionClosed, audit.OK, reason)
	closed, ended, err := s.Store.EndSession(ctx, e)
	if err != nil {
		return err
	}
	s.Runs.SessionChanged(c.ID, ended)
	if closed.Runner != "" {
		s.stop(ctx, closed)
	}
	return nil
}

// stop tells the holder to end a closed session. What it does not hear now,
// the answers to its beats tell it later.
func (s *Service) stop(ctx context.Context, c Session) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 4*time.Second)
	defer cancel()
	s.Runs.CancelSent(ctx, c)
	if err := s.Stopper.Stop(ctx, c); err != nil {
		s.Log.WarnContext(ctx, "stop order unanswered", "session", c.ID, "runner", c.Runner, "error", err)
	}
}

// Claim gives a starting session to the runner that asks first, with the
// policy as it is now. Everybody else gets fault.Conflict with the reason.
func (s *Service) Claim(ctx context.Context, c Claim) (Grant, error) {
	found, err := s.Store.Session(ctx, c.Session)
	if fault.Is(err, fault.NotFound) {
		return Grant{}, taken("the session is unknown")
	}
	if err != nil {
		return Grant{}, err
	}
	if found.Status != Starting || found.Epoch != c.Epoch {
		return Grant{}, taken("the session no longer wants this ticket")
	}
	p, err := s.Policies.Resolve(ctx, found.Workspace)
	if err != nil {
		return Grant{}, err
	}
	if Internal(found.ID) {
		p = bare(p)
	}
	t := Terms{
		PolicyDigest: p.Digest(), WallClockSeconds: p.WallClockSeconds, OutputBytesLimit: p.OutputBytesLimit,
		StartBy: s.Now().Add(orDuration(s.StartTimeout, 20*time.Second)),
	}
	e := s.event(found, audit.Runner(c.Runner), audit.SessionClaimed, audit.OK, "")
	e.PolicyDigest = t.PolicyDigest
	granted, err := s.Store.ClaimSession(ctx, c, t, e)
	if err != nil {
		return Grant{}, err
	}
	return Grant{Session: granted, Policy: p}, nil
}

// Started makes a claimed session live. A repeated report changes nothing; a
// report of anybody but the holder is refused with fault.Conflict and recorded.
func (s *Service) Started(ctx context.Context, c Claim, b Sandbox) error {
	e := s.event(Session{ID: c.Session}, audit.Runner(c.Runner), audit.SessionStarted, audit.OK, "")
	e.PolicyDigest = b.PolicyDigest
	live, err := s.Store.SessionStarted(ctx, c, b, e)
	if err == nil {
		s.Runs.SessionLive(live)
		return nil
	}
	if !fault.Is(err, fault.Conflict) {
		return err
	}
	found, heldErr := s.held(ctx, c, audit.SessionStarted)
	if heldErr != nil || found.Status == Live {
		return heldErr
	}
	return s.refused(ctx, c, found, audit.SessionStarted, err)
}

// StartFailed gives a claimed session back: the calls that wait for it end as
// start_failed with the runner's reason, and the next run tries again. A
// runner that is full only sends them on to the next.
func (s *Service) StartFailed(ctx context.Context, c Claim, code, field, message string) error {
	found, err := s.held(ctx, c, audit.SessionFailed)
	if err != nil {
		return err
	}
	known := fault.Code(code)
	if _, ok := fault.Codes[known]; !ok {
		known = fault.StartFailed
	}
	e := Ending{
		From: []Status{Starting}, To: Idle, Reason: string(known), Raise: true,
		Event: s.event(found, audit.Runner(c.Runner), audit.SessionFailed, string(known), Text(message)),
	}
	if known != fault.Capacity { // else those who wait ask again, as long as they have patience
		e.Pending = Verdict{Status: "start_failed", Code: known, Field: clip(field), Message: Text(message)}
	}
	return s.end(ctx, c, found, e)
}

// Ended records that a sandbox is gone. The files went with it, so a live
// session is lost; what was open may or may not have run to its end.
func (s *Service) Ended(ctx context.Context, c Claim, code, message string) error {
	found, err := s.held(ctx, c, audit.SessionEnded)
	if err != nil {
		return err
	}
	reason := clip(code)
	event := s.event(found, audit.Runner(c.Runner), audit.SessionEnded, reason, Text(message))
	switch found.Status {
	case Starting:
		return s.end(ctx, c, found, Ending{From: []Status{Starting}, To: Idle, Reason: reason, Raise: true, Event: event})
	case Closed:
		return s.end(ctx, c, found, Ending{
			From: []Status{Closed}, To: Closed, Reason: found.Reason, Event: event,
			Sent: Verdict{Status: "cancelled", Code: fault.Cancelled, Message: "the session was closed while the call was open"},
		})
	}
	sent := fault.SandboxDied
	if code != string(fault.SandboxDied) {
		sent = fault.RunnerLost
	}
	return s.end(ctx, c, found, Ending{
		From: []Status{Live}, To: Lost, Reason: reason, Raise: true, Event: event,
		Sent:    Verdict{Status: "runner_lost", Code: sent, Message: fault.Codes[sent].Meaning},
		Pending: Verdict{Status: "start_failed", Code: fault.SessionLost, Message: "the session was lost before the call was sent; nothing ran"},
	})
}

// end carries out what a report of the holder asks for.
func (s *Service) end(ctx context.Context, c Claim, found Session, e Ending) error {
	e.Session, e.Holder, e.At, e.NewID = c.Session, &c, s.Now(), s.NewID
	_, ended, err := s.Store.EndSession(ctx, e)
	if err != nil {
		return s.refused(ctx, c, found, e.Event.Action, err)
	}
	s.Runs.SessionChanged(c.Session, ended)
	return nil
}

// held finds the session of a report and checks that its sender holds it.
func (s *Service) held(ctx context.Context, c Claim, action string) (Session, error) {
	found, err := s.Store.Session(ctx, c.Session)
	if fault.Is(err, fault.NotFound) {
		return Session{}, fault.New(fault.Conflict, "the session is unknown")
	}
	if err != nil {
		return Session{}, err
	}
	if found.Epoch != c.Epoch || found.Runner != c.Runner || found.Incarnation != c.Incarnation || found.Runner == "" {
		return Session{}, s.refused(ctx, c, found, action,
			fault.New(fault.Conflict, "the sender does not hold the session's current epoch"))
	}
	return found, nil
}

// refused records a report that was not accepted and passes its error on.
func (s *Service) refused(ctx context.Context, c Claim, found Session, action string, err error) error {
	if !fault.Is(err, fault.Conflict) {
		return err
	}
	e := s.event(found, audit.Runner(c.Runner), audit.ResultRejected, "conflict", action+": "+fault.From(err).Message)
	if insertErr := s.Store.InsertEvent(ctx, e); insertErr != nil {
		return insertErr // the report comes again and is recorded then
	}
	return err
}

// Run keeps TTLs and puts starting sessions that nobody waits for back to
// idle, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(orDuration(s.SweepEvery, 5*time.Second))
	defer tick.Stop()
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.Log.WarnContext(ctx, "session sweep", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Sweep is one round of what Run repeats.
func (s *Service) Sweep(ctx context.Context) error {
	expired, err := s.Store.ExpiredSessions(ctx, s.Now(), 100)
	if err != nil {
		return err
	}
	for _, c := range expired {
		more := Ending{Unused: c.Reason == ClosedByIdle, LastUsed: c.LastUsedAt}
		if err := s.close(ctx, c, audit.ControlPlane, c.Reason, more); err != nil && !fault.Is(err, fault.Conflict) {
			return err
		}
	}
	stale, err := s.Store.StaleStarts(ctx, s.Now(), 100)
	if err != nil {
		return err
	}
	for _, c := range stale {
		_, ended, err := s.Store.EndSession(ctx, Ending{
			Session: c.ID, From: []Status{Starting}, Epoch: c.Epoch, Unused: true, LastUsed: c.LastUsedAt,
			To: Idle, Reason: StartExpired, Raise: true, At: s.Now(), NewID: s.NewID,
			Event: s.event(c, audit.ControlPlane, audit.SessionIdle, StartExpired, "deadline passed and no run waits"),
		})
		if err == nil {
			s.Runs.SessionChanged(c.ID, ended)
		} else if !fault.Is(err, fault.Conflict) {
			return err
		}
	}
	return nil
}

func (s *Service) event(c Session, actor, action, outcome, detail string) audit.Event {
	return audit.Event{
		ID: audit.ID(s.NewID()), At: s.Now(), Workspace: c.Workspace, Actor: actor, Action: action,
		Object: c.ID, Outcome: outcome, PolicyDigest: c.PolicyDigest, Detail: detail,
	}
}

func taken(reason string) error { return fault.New(fault.Conflict, "%s", reason).WithCode("taken") }

func orDuration(d, otherwise time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return otherwise
}

package run

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// driver moves one run forward until it is final, or is another replica's.
// It looks at the database, does what can be done, and waits to be woken;
// everything it does is a compare-and-set there, so two drivers of one run,
// which a stalled replica can bring about, do no harm.
type driver struct {
	*Service
	pace                          Pace
	id, session, owner, workspace string
	l                             *listener
	first                         *snapshot // what Start has stored just now; nil: look
	admitted                      *snapshot // that too, for good; nil: taken over

	invocations map[string]tool.Invocation // by call; calls of a run that was taken over are prepared anew
	flights     map[string]*flight         // by call; those that a runner may have
	since       time.Time                  // waits for a sandbox since
	announce    bool                       // the ticket of the current epoch is not out yet
	attempts    int                        // starts begun
	startAt     time.Time                  // no start before
	tried       bool                       // its calls went out, or not, without a look
}

type snapshot struct {
	run     Run
	session session.Session
}

// flight is a call that a runner may have.
type flight struct {
	answered  bool // the runner said that it has it
	marked    bool // shown as running
	markAt    time.Time
	askAt     time.Time     // when to ask for its status
	pause     time.Duration // between questions that are not answered
	doneSince time.Time     // the runner says done, the report is not here
	cancelAt  time.Time     // when to repeat the cancel order
}

// driver makes one and listens for it; dismiss is its end.
func (s *Service) driver(id, session string) *driver {
	return &driver{
		Service: s, pace: s.Pace.withDefaults(), id: id, session: session, l: s.hub.listen(id, session),
		invocations: map[string]tool.Invocation{}, flights: map[string]*flight{},
	}
}

// enlist notes that this replica drives d's run; false when it already does
// or Run is not running.
func (s *Service) enlist(d *driver) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begin == nil || s.mine[d.id] != nil {
		return false
	}
	s.mine[d.id] = d
	return true
}

func (s *Service) launch(d *driver) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.admitted = d.first
	if s.begin != nil { // else the run waits for who takes it over
		s.begin(d)
	}
}

func (s *Service) dismiss(d *driver) {
	s.hub.drop(d.l, d.id, d.session)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mine[d.id] == d {
		delete(s.mine, d.id)
	}
}

// drives reports whether a driver here will tell when p's run is final.
func (s *Service) drives(p identity.Principal, sessionID, runID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.mine[runID]
	return d != nil && !d.l.final.Load() && d.session == sessionID && d.workspace == p.Workspace && d.owner == p.UserID
}

// drive is the life of a driver.
func (d *driver) drive(ctx context.Context) {
	defer d.dismiss(d)
	timer := time.NewTimer(0)
	defer timer.Stop()
	at := d.first
	d.first = nil
	for {
		next, done := d.step(ctx, at)
		if done {
			return
		}
		if at != nil && at.session.Status == session.Live && len(d.flights) == 0 {
			at = nil // nothing could be sent: look why
			continue
		}
		timer.Reset(max(time.Millisecond, next.Sub(d.Now())))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-d.l.c:
		}
		if d.l.final.Load() {
			return
		}
		at = d.unsent()
	}
}

// unsent is the run as it was admitted, with the sandbox that it has waited
// for since; nil when there is more to it than that. To send its calls is a
// compare-and-set, so nothing has to be looked up before.
func (d *driver) unsent() *snapshot {
	c := d.l.live.Swap(nil)
	if c == nil || d.admitted == nil || d.admitted.run.Status != Queued || d.tried {
		return nil
	}
	d.tried = true
	return &snapshot{run: d.admitted.run, session: *c}
}

// step does what can be done now and returns when to look again at the latest.
func (d *driver) step(ctx context.Context, at *snapshot) (next time.Time, done bool) {
	retry := d.Now().Add(d.pace.Poll / 4)
	if at == nil {
		d.mark(ctx)
		r, err := d.Store.RunState(ctx, d.id)
		if fault.Is(err, fault.NotFound) || err == nil && (r.Status.Final() || r.Replica != d.Replica) {
			return time.Time{}, true
		}
		if err != nil {
			return retry, false
		}
		c, err := d.Store.Session(ctx, d.session)
		if err != nil {
			return retry, false
		}
		d.follow(ctx, r, c)
		at = &snapshot{run: r, session: c}
	} else {
		d.give(ctx, at.session, slices.DeleteFunc(slices.Clone(at.run.Calls), func(c Call) bool { return !c.sent() }))
	}
	next = d.Now().Add(d.pace.Poll)
	if waiting := at.run.sendable(); len(waiting) > 0 && at.run.CancelReason == "" {
		next = earliest(next, d.forward(ctx, at.run, at.session, waiting))
	}
	for _, f := range d.flights {
		next = earliest(next, f.askAt)
		if f.answered && !f.marked {
			next = earliest(next, f.markAt)
		}
	}
	return next, false
}

func earliest(a, b time.Time) time.Time {
	if b.IsZero() || a.Before(b) {
		return a
	}
	return b
}

// mark shows calls as running that were accepted a while ago.
func (d *driver) mark(ctx context.Context) {
	for id, f := range d.flights {
		if f.answered && !f.marked && !d.Now().Before(f.markAt) {
			f.marked = d.Store.MarkStarted(ctx, d.id, id) == nil
		}
	}
}

// forward sends the waiting calls, or sees to it that there is a sandbox for them.
func (d *driver) forward(ctx context.Context, r Run, c session.Session, waiting []int) time.Time {
	now := d.Now()
	switch c.Status {
	case session.Live:
		d.since = time.Time{}
		d.send(ctx, r, c, waiting)
		return now.Add(d.pace.Poll)
	case session.Lost:
		d.endPending(ctx, r, session.Verdict{Status: string(StartFailed), Code: fault.SessionLost, Message: "the session was lost before the call was sent; nothing ran"}, "session lost")
		return now.Add(d.pace.Poll)
	case session.Closed:
		d.endPending(ctx, r, session.Verdict{Status: string(CallCancelled), Code: fault.Cancelled, Message: "the session was closed before the call was sent"}, "session closed")
		return now.Add(d.pace.Poll)
	}
	if d.since.IsZero() {
		d.since = now
	}
	patience := d.since.Add(d.StartWait)
	if !now.Before(patience) {
		d.endPending(ctx, r, d.noSandbox(ctx), "start wait over")
		return now.Add(d.pace.Poll)
	}
	return earliest(patience, d.start(ctx, c))
}

// start puts a ticket out when the session has none that may still be taken.
func (d *driver) start(ctx context.Context, c session.Session) time.Time {
	now := d.Now()
	if late := c.Status != session.Starting || !now.Before(c.StartBy); late && !now.Before(d.startAt) {
		begun, ok, err := d.Store.BeginStart(ctx, c.ID, c.Epoch, now, now.Add(d.ClaimWait))
		if err != nil || !ok {
			return now.Add(d.pace.Poll / 4)
		}
		d.attempts++
		d.startAt = now.Add(min(50*time.Millisecond<<min(d.attempts, 6), 2*time.Second))
		c, d.announce = begun, true
	}
	if d.announce && c.Status == session.Starting && c.Runner == "" {
		if err := d.Dispatcher.Announce(ctx, c); err != nil {
			d.Log.WarnContext(ctx, "announce a session", "session", c.ID, "error", err)
			return now.Add(d.pace.Poll / 2)
		}
	}
	d.announce = false
	if c.Status != session.Starting {
		return d.startAt
	}
	return c.StartBy
}

// noSandbox is how calls end for which no runner came.
func (d *driver) noSandbox(ctx context.Context) session.Verdict {
	ready, err := d.Fleet.Any(ctx, d.Pool)
	if err == nil && ready == 0 {
		return session.Verdict{Status: string(StartFailed), Code: fault.NoRunner, Message: fault.Codes[fault.NoRunner].Meaning}
	}
	return session.Verdict{Status: string(StartFailed), Code: fault.Capacity, Message: "no runner of the pool had a free slot in time"}
}

// endPending ends what is still waiting to be sent.
func (d *driver) endPending(ctx context.Context, r Run, v session.Verdict, mechanism string) {
	var ids []string
	for _, c := range r.Calls {
		if c.Status == Pending {
			ids = append(ids, c.ID)
		}
	}
	ended, err := d.Store.EndCalls(ctx, r, ids, []CallStatus{Pending}, v, d.finish(audit.ControlPlane, mechanism))
	if err != nil {
		d.Log.WarnContext(ctx, "end waiting calls", "run", r.ID, "error", err)
	}
	d.publish(ended)
}

// send marks calls as sent, and only then gives the orders.
func (d *driver) send(ctx context.Context, r Run, c session.Session, waiting []int) {
	var ids []string
	for _, i := range waiting {
		if d.invocable(ctx, r, r.Calls[i]) {
			ids = append(ids, r.Calls[i].ID)
		}
	}
	if len(ids) == 0 {
		return
	}
	now := d.Now()
	marked, err := d.Store.SendCalls(ctx, r, c, ids, d.Replica, now)
	if err != nil {
		d.Log.WarnContext(ctx, "mark calls as sent", "run", r.ID, "error", err)
		return // if it was stored after all, its status is asked
	}
	var calls []Call
	for _, i := range waiting {
		if call := r.Calls[i]; slices.Contains(marked, call.ID) {
			call.Status, call.SentAt = Sent, now
			call.Epoch, call.Runner, call.Incarnation = c.Epoch, c.Runner, c.Incarnation
			calls = append(calls, call)
		}
	}
	d.give(ctx, c, calls)
}

// invocable makes sure that d knows what to run for call. A call whose tool
// went away since ends here.
func (d *driver) invocable(ctx context.Context, r Run, call Call) bool {
	if _, ok := d.invocations[call.ID]; ok {
		return true
	}
	registry, err := d.registryOf(ctx, r)
	if err != nil {
		return false
	}
	inv, err := invocation(registry, call)
	if failure, refused := refusal(err); refused {
		v := session.Verdict{Status: string(InvalidArguments), Code: fault.Code(failure.Code), Field: failure.Field, Message: failure.Message}
		ended, err := d.Store.EndCalls(ctx, r, []string{call.ID}, []CallStatus{Pending}, v, d.finish(audit.ControlPlane, "prepared anew after a take-over"))
		if err == nil {
			d.publish(ended)
		}
		return false
	}
	if err != nil {
		return false
	}
	d.invocations[call.ID] = inv
	return true
}

// give gives the orders for calls that are marked as sent, all at once, and
// takes the answers.
func (d *driver) give(ctx context.Context, c session.Session, calls []Call) {
	replies := make([]Reply, len(calls))
	errs := make([]error, len(calls))
	order := func(i int) {
		replies[i], errs[i] = d.Dispatcher.Call(ctx, c, calls[i], d.invocations[calls[i].ID].CalledBy(d.owner))
	}
	if len(calls) == 1 {
		order(0)
	} else {
		var wg sync.WaitGroup
		for i := range calls {
			wg.Go(func() { order(i) })
		}
		wg.Wait()
	}
	now := d.Now()
	for i, call := range calls {
		delete(d.invocations, call.ID)
		f := &flight{markAt: call.SentAt.Add(d.pace.Mark), askAt: now.Add(d.pace.Ask), pause: d.pace.Ask}
		d.flights[call.ID] = f
		switch {
		case errs[i] != nil:
			d.Log.WarnContext(ctx, "call order unanswered", "call", call.ID, "runner", call.Runner, "error", errs[i])
		case replies[i].Accepted, replies[i].Code == Duplicate:
			f.answered, f.askAt = true, now.Add(d.pace.Reassure)
		default:
			d.refused(ctx, call, replies[i])
		}
	}
}

// refusals are those that say more than that the order was no good.
var refusals = map[string]fault.Code{
	Capacity: fault.Capacity, Draining: fault.Capacity, MemoryFull: fault.Capacity, Unheard: fault.Capacity,
	UnknownSession: fault.SessionLost, WrongEpoch: fault.SessionLost,
}

// refused ends a call whose order was refused: nothing of it was started.
func (d *driver) refused(ctx context.Context, call Call, reply Reply) {
	v := session.Verdict{
		Status: string(StartFailed), Code: cmp.Or(refusals[reply.Code], fault.OrderRefused),
		Message: "the runner refused the order, nothing ran: " + session.Text(cmp.Or(reply.Reason, reply.Code)),
	}
	if r, err := d.Store.RunState(ctx, d.id); err == nil && r.CancelReason != "" {
		v = session.Verdict{Status: string(CallCancelled), Code: fault.Cancelled, Message: "the call was cancelled before it ran"}
	}
	d.endSent(ctx, call, v, "order refused: "+session.Text(reply.Code))
}

// follow looks after the calls in flight: it asks for those that nobody
// answered for, and repeats cancel orders.
func (d *driver) follow(ctx context.Context, r Run, c session.Session) {
	var wg sync.WaitGroup
	open := map[string]*flight{}
	for _, call := range r.Calls {
		if !call.sent() {
			continue
		}
		f := d.flights[call.ID]
		if f == nil { // taken over: the order may be anywhere
			f = &flight{askAt: d.Now(), pause: d.pace.Ask, markAt: call.SentAt.Add(d.pace.Mark)}
		}
		f.marked = f.marked || call.Status == Started
		open[call.ID] = f
		wg.Go(func() { d.look(ctx, r, c, call, f) })
	}
	wg.Wait()
	d.flights = open
}

// look looks after one call in flight.
func (d *driver) look(ctx context.Context, r Run, c session.Session, call Call, f *flight) {
	now := d.Now()
	if c.Epoch != call.Epoch || c.Incarnation != call.Incarnation {
		v := session.Verdict{Status: string(RunnerLost), Code: fault.RunnerLost, Message: fault.Codes[fault.RunnerLost].Meaning}
		d.endSent(ctx, call, v, "the epoch under which it was sent is over")
		return
	}
	if r.CancelReason != "" {
		if f.cancelAt.IsZero() { // who cancelled gives the first order
			f.cancelAt = now.Add(d.pace.Poll)
		}
		if !now.Before(f.cancelAt) {
			f.cancelAt = now.Add(2 * d.pace.Poll)
			d.cancelCall(ctx, c, call)
		}
	}
	if !now.Before(f.askAt) {
		d.ask(ctx, r, c, call, f)
	}
}

// ask asks the runner what became of a call. One that it never heard of can
// no longer run, since asking left a mark there.
func (d *driver) ask(ctx context.Context, r Run, c session.Session, call Call, f *flight) {
	reply, err := d.Dispatcher.Status(ctx, c, call.ID)
	now := d.Now()
	f.pause = min(2*f.pause, 5*time.Second)
	f.askAt = now.Add(f.pause)
	if err != nil {
		return
	}
	switch {
	case reply.neverHad():
		v := session.Verdict{Status: string(RunnerLost), Code: fault.RunnerLost, Message: "the order for the call was lost on its way; the runner never had it"}
		if r.CancelReason != "" {
			v = session.Verdict{Status: string(CallCancelled), Code: fault.Cancelled, Message: "the call was cancelled before it reached the runner; nothing ran"}
		}
		d.endSent(ctx, call, v, "status: the runner never had it")
	case !reply.Accepted:
	case reply.State == CallRunning:
		f.answered, f.doneSince = true, time.Time{}
		f.askAt = now.Add(d.pace.Reassure)
	case reply.State == CallEnded:
		f.answered = true
		if f.doneSince.IsZero() {
			f.doneSince = now
		}
		if now.Sub(f.doneSince) >= d.pace.Unfetched {
			v := session.Verdict{Status: string(RunnerLost), Code: fault.ResultUnavailable, Message: fault.Codes[fault.ResultUnavailable].Meaning}
			d.endSent(ctx, call, v, "status: done, but its report never came")
		}
	}
}

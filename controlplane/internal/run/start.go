package run

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// Start begins a run in a session that p may use. The run and its calls are
// stored when it returns; it goes on whatever becomes of ctx. Calls that do
// not fit their tool are final at once, and nothing of them is dispatched.
func (s *Service) Start(ctx context.Context, p identity.Principal, sessionID string, q Request) (Run, error) {
	if err := q.check(); err != nil {
		return Run{}, err
	}
	if session.Internal(sessionID) {
		return Run{}, session.NotFound(sessionID)
	}
	registry, pins, err := s.registry(ctx, p, q.ToolIDs)
	if err != nil {
		return Run{}, err
	}
	r, invocations, err := s.prepare(p, sessionID, q, registry)
	if err != nil {
		return Run{}, err
	}
	r.Tools = pins
	return s.admit(ctx, p, r, invocations)
}

// Ask carries out an invocation of the platform's own in an internal session
// and returns the call once it is final. When ctx ends first, so does the wait
// alone: whoever made the session closes it.
func (s *Service) Ask(ctx context.Context, c session.Session, inv tool.Invocation) (Call, error) {
	p := session.Platform(c.Workspace)
	r := s.newRun(p, c.ID, 1, false)
	call := Call{
		ID: "call_" + s.NewID(), ClientID: "ask", Run: r.ID, Session: c.ID, Workspace: c.Workspace,
		Name: inquiry, Arguments: orObject(nil), Status: Pending,
	}
	r.Calls = []Call{call}
	r, err := s.admit(ctx, p, r, map[string]tool.Invocation{call.ID: inv})
	if err != nil {
		return Call{}, err
	}
	if r, err = s.Wait(ctx, p, c.ID, r.ID); err != nil {
		return Call{}, err
	}
	asked := r.Calls[0]
	// Nobody can read the answer again: its key is gone with whoever asked.
	if asked.Result.HasValue && asked.Status.Final() {
		if err := s.Store.ForgetValue(context.WithoutCancel(ctx), r.ID, asked.ID); err != nil {
			s.Log.WarnContext(ctx, "an answer that was read is kept", "call", asked.ID, "error", err)
		}
	}
	return asked, nil
}

// inquiry is the name of a call that Ask makes. No tool can have it, so that
// another replica which takes the run over ends the call.
const inquiry = "platform.ask"

// admit stores a run and drives it.
func (s *Service) admit(ctx context.Context, p identity.Principal, r Run, invocations map[string]tool.Invocation) (Run, error) {
	d := s.driver(r.ID, r.Session)
	d.owner, d.workspace, d.invocations = r.Owner, r.Workspace, invocations
	if !s.enlist(d) {
		s.dismiss(d)
		return Run{}, fault.New(fault.Unavailable, "the control plane is starting or stopping; try again")
	}
	now := s.now()
	r, c, err := s.Store.AdmitRun(ctx, Admission{
		Run: r, Principal: p, MaxOpen: s.MaxOpen, StartBy: now.Add(s.ClaimWait),
		Event: audit.Event{
			ID: audit.ID(s.NewID()), At: now, Workspace: r.Workspace, Actor: r.Owner,
			Action: audit.RunStarted, Object: r.ID, Outcome: audit.OK, Detail: r.detail(),
		},
	})
	if err != nil {
		s.dismiss(d)
		return Run{}, err
	}
	s.Dispatcher.Notify(r.Session, Notice{Kind: RunStarted, Run: r.ID})
	for _, call := range r.Calls {
		if call.Status.Final() { // refused before dispatch
			s.Dispatcher.Notify(r.Session, Notice{Kind: CallFinished, Run: r.ID, Call: call.ID})
		}
	}
	if r.Status.Final() {
		s.dismiss(d)
		s.Dispatcher.Notify(r.Session, Notice{Kind: RunFinished, Run: r.ID})
		return r, nil
	}
	d.first = &snapshot{run: r, session: c}
	d.announce = c.Status == session.Starting && c.Runner == "" && c.StartBy.Equal(now.Add(s.ClaimWait))
	s.launch(d)
	return r, nil
}

// registry is what a run may call that p starts with Python tools.
func (s *Service) registry(ctx context.Context, p identity.Principal, ids []string) (tool.Registry, []tool.Pin, error) {
	merged, err := tool.Merge(ctx, p.Workspace, s.Tools...)
	if err != nil || len(ids) == 0 {
		return merged, nil, err
	}
	if s.Python == nil {
		return merged, nil, fault.New(fault.NotFound, "no Python tool %q", ids[0]).On("tool_ids")
	}
	pins, functions, err := s.Python.Pin(ctx, p, ids)
	return merged.With(functions), pins, err
}

// registryOf is registry for a run that another replica began.
func (s *Service) registryOf(ctx context.Context, r Run) (tool.Registry, error) {
	merged, err := tool.Merge(ctx, r.Workspace, s.Tools...)
	if err != nil || len(r.Tools) == 0 || s.Python == nil {
		return merged, err
	}
	functions, err := s.Python.Pinned(ctx, r.Workspace, r.Tools)
	return merged.With(functions), err
}

// detail is what the record says of the run's start: its session and, at
// their revisions, the Python tools that it may call.
func (r Run) detail() string {
	out := r.Session
	for _, pin := range r.Tools {
		out += fmt.Sprintf(" %s@%d", pin.ID, pin.Revision)
	}
	return out
}

// check refuses what no registry could make right.
func (q Request) check() error {
	if len(q.Calls) == 0 || len(q.Calls) > MaxCalls {
		return fault.New(fault.Invalid, "tool_calls must hold between 1 and %d calls", MaxCalls).On("tool_calls")
	}
	seen := map[string]bool{}
	for _, c := range q.Calls {
		switch {
		case c.ID == "" || len(c.ID) > MaxClientID || !utf8.ValidString(c.ID) || strings.ContainsRune(c.ID, 0):
			return fault.New(fault.Invalid, "each call needs an id of 1 to %d bytes", MaxClientID).On("tool_calls.id")
		case seen[c.ID]:
			return fault.New(fault.Invalid, "two calls have the id %q", c.ID).On("tool_calls.id")
		case c.Name == "" || len(c.Name) > MaxName || !utf8.ValidString(c.Name) || strings.ContainsRune(c.Name, 0):
			return fault.New(fault.Invalid, "each call needs the name of a tool").On("tool_calls.name")
		}
		seen[c.ID] = true
	}
	return nil
}

// prepare makes the run of a request: each call either has an invocation or
// has already ended.
func (s *Service) prepare(p identity.Principal, sessionID string, q Request, registry tool.Registry) (Run, map[string]tool.Invocation, error) {
	r := s.newRun(p, sessionID, len(q.Calls), q.Parallel)
	invocations := map[string]tool.Invocation{}
	for i, want := range q.Calls {
		c := Call{
			ID: "call_" + s.NewID(), ClientID: want.ID, Run: r.ID, Session: sessionID, Workspace: p.Workspace,
			Index: i, Name: want.Name, Arguments: orObject(want.Arguments), Status: Pending,
		}
		inv, err := invocation(registry, c)
		if failure, ok := refusal(err); ok {
			c.Status, c.Result.Error = InvalidArguments, &failure
		} else if err != nil {
			return Run{}, nil, err
		} else {
			invocations[c.ID] = inv
		}
		r.Calls = append(r.Calls, c)
	}
	return r, invocations, nil
}

func (s *Service) newRun(p identity.Principal, sessionID string, calls int, parallel bool) Run {
	return Run{
		ID: "run_" + s.NewID(), Session: sessionID, Workspace: p.Workspace, Owner: p.UserID,
		Status: Queued, Parallel: parallel, Usage: Usage{Calls: calls}, CreatedAt: s.now(),
		Replica: s.Replica, LeaseUntil: s.now().Add(s.Pace.withDefaults().Lease),
	}
}

func orObject(arguments json.RawMessage) json.RawMessage {
	if len(arguments) == 0 {
		return json.RawMessage("{}")
	}
	return arguments
}

// invocation is what to run for c by the tools of now.
func invocation(registry tool.Registry, c Call) (tool.Invocation, error) {
	t, ok := registry.Lookup(c.Name)
	if !ok {
		return tool.Invocation{}, fault.New(fault.Invalid, "there is no tool named %q", c.Name).WithCode(string(fault.UnknownTool))
	}
	return t.Prepare(c.Arguments)
}

// refusal is how a call ends whose arguments were refused with err.
func refusal(err error) (Failure, bool) {
	if !fault.Is(err, fault.Invalid) && !fault.Is(err, fault.TooLarge) {
		return Failure{}, false
	}
	f := fault.From(err)
	code := f.Code
	if _, ok := fault.Codes[fault.Code(code)]; !ok {
		code = string(fault.InvalidArguments)
	}
	return Failure{Code: code, Message: session.Text(f.Message), Field: session.Text(f.Field)}, true
}

// Admit is r as it enters the database while its session is as c: when that
// is live, what may go first counts as sent to its holder from now on.
func (r Run) Admit(c session.Session, now time.Time) Run {
	calls := make([]Call, len(r.Calls))
	copy(calls, r.Calls)
	r.Calls, r.OpenCalls = calls, 0
	for _, call := range calls {
		if !call.Status.Final() {
			r.OpenCalls++
		}
	}
	if r.OpenCalls == 0 {
		r.Status, r.StartedAt, r.FinishedAt = Finished, now, now
		return r
	}
	if c.Status != session.Live {
		return r
	}
	r.Status, r.StartedAt = Running, now
	for _, i := range r.sendable() {
		calls[i].Status, calls[i].SentAt = Sent, now
		calls[i].Epoch, calls[i].Runner, calls[i].Incarnation = c.Epoch, c.Runner, c.Incarnation
	}
	return r
}

// sendable are the indices of the calls that may be sent now: all that wait
// when they run at once, else the first one once nothing is in flight.
func (r Run) sendable() []int {
	var out []int
	for i, c := range r.Calls {
		switch {
		case c.sent() && !r.Parallel:
			return nil
		case c.Status == Pending && (r.Parallel || len(out) == 0):
			out = append(out, i)
		}
	}
	return out
}

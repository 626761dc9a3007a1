package run

import (
	"context"
	"math"
	"reflect"
	"regexp"
	"slices"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// Outcome is how a call ended, as the runner that holds the session reports it.
type Outcome struct {
	Runner, Incarnation, Session string
	Epoch                        int64
	Run, Call                    string
	Status                       CallStatus
	Result                       Result // what the sandbox is and the policy are the session's, not the report's
	At                           time.Time
}

// Caps of what a report may carry beside its output.
const (
	maxValue   = 64 << 20
	maxDenials = 256
)

// Apply stores an outcome, once, and ends the run with its last call. A report
// of anybody but the holder of the epoch under which the call was sent, a
// second outcome, and output over the limit are refused with fault.Conflict, a
// report that makes no sense with fault.Invalid; both are recorded. The same
// outcome again is fine.
func (s *Service) Apply(ctx context.Context, o Outcome) error {
	o, err := o.clean()
	if err != nil {
		return s.reject(ctx, o, "", err)
	}
	finish := s.finish(audit.Runner(o.Runner), "report")
	ended, ok, err := s.Store.FinishCall(ctx, o, finish)
	if err != nil {
		return err
	}
	if !ok {
		return s.explain(ctx, o)
	}
	s.hub.finish(ended, s.whole(o, ended.RunStatus, finish.At))
	s.notify([]session.EndedCall{ended.EndedCall})
	return nil
}

// whole is the run that o has ended, as the database now has it, without
// asking there: when it is one of a single call, driven here and admitted to
// the sandbox that reports. Nil: ask.
func (s *Service) whole(o Outcome, status Status, at time.Time) *Run {
	s.mu.Lock()
	var admitted *snapshot
	if d := s.mine[o.Run]; d != nil {
		admitted = d.admitted
	}
	s.mu.Unlock()
	if admitted == nil || status != Finished || len(admitted.run.Calls) != 1 {
		return nil
	}
	r, c := admitted.run, admitted.session
	call := r.Calls[0]
	if call.ID != o.Call || call.Epoch != o.Epoch || call.Incarnation != o.Incarnation {
		return nil
	}
	call.Status, call.Result = o.Status, o.Result
	call.Result.Backend, call.Result.Isolation, call.Result.ImageDigest = c.Backend, c.Isolation, c.ImageDigest
	call.Result.PolicyDigest, call.Result.Enforced = c.PolicyDigest, c.Enforced
	r.Calls, r.OpenCalls = []Call{call}, 0
	r.Status, r.FinishedAt = status, at
	r.Usage.CPUMS, r.Usage.DurationMS = o.Result.CPUMS, o.Result.DurationMS
	return &r
}

var (
	codeForm   = regexp.MustCompile(`^[a-z][a-z_]{0,63}$`)
	signalForm = regexp.MustCompile(`^[A-Za-z0-9+_ -]{0,32}$`)
)

// clean checks an outcome and makes its texts fit to be kept.
func (o Outcome) clean() (Outcome, error) {
	r := &o.Result
	bad := func(field string) (Outcome, error) {
		return o, fault.New(fault.Invalid, "the report's %s makes no sense", field).On(field)
	}
	switch {
	case !slices.Contains(byRunner, o.Status):
		return bad("status")
	case !sane(r.DurationMS), !sane(r.CPUMS):
		return bad("duration")
	case r.MemoryPeak < 0, r.OOMKills < 0, r.StdoutBytes < 0, r.StderrBytes < 0:
		return bad("usage")
	case r.ExitCode != nil && (*r.ExitCode < 0 || *r.ExitCode > 255):
		return bad("exit_code")
	case !signalForm.MatchString(r.Signal):
		return bad("signal")
	case len(r.Value) > maxValue:
		return bad("value")
	case len(r.Denials) > maxDenials:
		return bad("denials")
	case r.Encoding != "" && r.Encoding != "base64" && r.Encoding != Returned:
		return bad("encoding")
	}
	if o.Status == OK {
		r.Error = nil
	} else {
		r.Error = failure(o.Status, r.Error)
		r.Retryable = fault.Codes[fault.Code(r.Error.Code)].Retryable
	}
	denials := make([]Denial, len(r.Denials))
	for i, d := range r.Denials {
		denials[i] = Denial{Kind: session.Text(d.Kind), Target: session.Text(d.Target), Reason: session.Text(d.Reason)}
	}
	r.Denials = denials
	r.StdoutBytes, r.StderrBytes = max(r.StdoutBytes, 0), max(r.StderrBytes, 0)
	return o, nil
}

func sane(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) && v >= 0 }

// usual is the code of a final status whose report names none.
var usual = map[CallStatus]fault.Code{
	Error: fault.ToolFailed, InvalidArguments: fault.InvalidArguments, TimedOut: fault.WallClock,
	OOMKilled: fault.MemoryLimit, PIDsExhausted: fault.PIDsLimit, DiskFull: fault.DiskFull,
	OutputLimit: fault.OutputFlood, Denied: fault.PathDenied, CallCancelled: fault.Cancelled,
	StartFailed: fault.StartFailed, RunnerLost: fault.RunnerLost,
}

// failure is f with a code and a sentence in any case.
func failure(status CallStatus, f *Failure) *Failure {
	out := Failure{}
	if f != nil {
		out = *f
	}
	if !codeForm.MatchString(out.Code) {
		out.Code = string(usual[status])
	}
	if out.Message == "" {
		out.Message = fault.Codes[fault.Code(out.Code)].Meaning
	}
	out.Message, out.Field = session.Text(out.Message), session.Text(out.Field)
	return &out
}

// explain says why an outcome was not stored; nil when it already was.
func (s *Service) explain(ctx context.Context, o Outcome) error {
	r, err := s.Store.Run(ctx, o.Run)
	if fault.Is(err, fault.NotFound) {
		return s.reject(ctx, o, "", fault.New(fault.Conflict, "the run is unknown"))
	}
	if err != nil {
		return err
	}
	i := slices.IndexFunc(r.Calls, func(c Call) bool { return c.ID == o.Call })
	if i < 0 || r.Session != o.Session {
		return s.reject(ctx, o, r.Workspace, fault.New(fault.Conflict, "the call is unknown"))
	}
	c := r.Calls[i]
	switch {
	case c.Epoch != o.Epoch || c.Runner != o.Runner || c.Incarnation != o.Incarnation || c.Runner == "":
		return s.reject(ctx, o, r.Workspace, fault.New(fault.Conflict, "the call was not sent to the sender under that epoch"))
	case c.Status.Final() && o.same(c):
		return nil
	case c.Status.Final():
		return s.reject(ctx, o, r.Workspace, fault.New(fault.Conflict, "the call has already ended as %s", c.Status))
	}
	held, err := s.Store.Session(ctx, o.Session)
	if err != nil {
		return err
	}
	if held.Epoch != o.Epoch {
		return s.reject(ctx, o, r.Workspace, fault.New(fault.Conflict, "the epoch is over"))
	}
	return s.reject(ctx, o, r.Workspace, fault.New(fault.Conflict, "the output is over the limit of %d bytes", held.OutputBytesLimit))
}

// same reports whether c ended just so.
func (o Outcome) same(c Call) bool {
	a, b := o.Result, c.Result
	return o.Status == c.Status && reflect.DeepEqual(a.Error, b.Error) && reflect.DeepEqual(a.ExitCode, b.ExitCode) &&
		a.Signal == b.Signal && string(a.Stdout) == string(b.Stdout) && string(a.Stderr) == string(b.Stderr) &&
		string(a.Value) == string(b.Value) && a.HasValue == b.HasValue &&
		a.StdoutBytes == b.StdoutBytes && a.StderrBytes == b.StderrBytes
}

// reject records a report that was not accepted and passes its error on.
func (s *Service) reject(ctx context.Context, o Outcome, workspace string, err error) error {
	e := audit.Event{
		ID: audit.ID(s.NewID()), At: s.Now(), Workspace: workspace, Actor: session.Text(audit.Runner(o.Runner)),
		Action: audit.ResultRejected, Object: session.Text(o.Call), Outcome: fault.From(err).PublicCode(), Detail: fault.From(err).Message,
	}
	if insertErr := s.Store.InsertEvent(ctx, e); insertErr != nil {
		return insertErr // the report comes again and is recorded then
	}
	return err
}

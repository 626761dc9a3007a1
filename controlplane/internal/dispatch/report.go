package dispatch

import (
	"strings"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// These functions read wire messages that the checks have let through.

func claim(c wire.Claim) session.Claim {
	return session.Claim{Runner: c.Runner, Incarnation: c.Incarnation, Session: c.Session, Epoch: c.Epoch}
}

// holder is the claim under which a report speaks.
func holder(r wire.Report) session.Claim {
	return session.Claim{Runner: r.Runner, Incarnation: r.Incarnation, Session: r.Session, Epoch: r.Epoch}
}

func sandbox(s wire.Sandbox) session.Sandbox {
	return session.Sandbox{
		Backend:      s.Backend,
		Isolation:    s.Isolation,
		ImageDigest:  s.ImageDigest,
		PolicyDigest: s.PolicyDigest,
		Enforced:     s.Enforced,
	}
}

func outcome(r wire.Report) run.Outcome {
	return run.Outcome{
		Runner:      r.Runner,
		Incarnation: r.Incarnation,
		Session:     r.Session,
		Epoch:       r.Epoch,
		Run:         r.Run,
		Call:        r.Call,
		Status:      run.CallStatus(r.Done.Status),
		Result:      result(*r.Done),
		At:          time.UnixMilli(r.At),
	}
}

func result(d wire.Done) run.Result {
	r := run.Result{
		Error:       failure(d.Error),
		ExitCode:    d.ExitCode,
		Signal:      d.Signal,
		Stdout:      d.Stdout,
		Stderr:      d.Stderr,
		Value:       d.Value,
		HasValue:    d.HasValue || len(d.Value) > 0,
		StdoutBytes: d.StdoutBytes,
		StderrBytes: d.StderrBytes,
		Truncated:   d.Truncated,
		DurationMS:  d.DurationMS,
		CPUMS:       d.CPUMS,
		MemoryPeak:  d.MemoryPeak,
		OOMKills:    d.OOMKills,
	}
	if d.ValueKind == wire.PythonTool {
		r.Encoding = run.Returned
	}
	for _, n := range d.Denials {
		r.Denials = append(r.Denials, run.Denial{Kind: n.Kind, Target: n.Target, Reason: n.Reason})
	}
	if r.Error != nil {
		r.Retryable = fault.Codes[fault.Code(r.Error.Code)].Retryable
	}
	return r
}

// withOutput puts the bytes of a blob where they belong.
func withOutput(d wire.Done, data []byte) wire.Done {
	a, b := d.OutputSizes[0], d.OutputSizes[0]+d.OutputSizes[1]
	d.Stdout, d.Stderr, d.Value = data[:a:a], data[a:b:b], data[b:]
	d.Output = nil
	return d
}

// withoutOutput is d when its output can't be had: the outcome is known, the
// output is not.
func withoutOutput(d wire.Done) wire.Done {
	d.Output, d.HasValue, d.ValueKind = nil, false, ""
	d.Status = string(run.Error)
	d.Error = &wire.Error{Code: string(fault.ResultUnavailable), Message: "The call ended, but its output could not be fetched."}
	return d
}

func failure(e *wire.Error) *run.Failure {
	if e == nil {
		return nil
	}
	return &run.Failure{Code: e.Code, Message: e.Message, Field: e.Field, Limit: e.Limit, Observed: e.Observed}
}

func beat(b wire.Beat, now time.Time) fleet.Beat {
	state := fleet.Ready
	if b.Draining {
		state = fleet.Draining
	}
	out := fleet.Beat{
		Runner: fleet.Runner{
			ID:            b.Runner,
			Incarnation:   b.Incarnation,
			Pool:          b.Pool,
			State:         state,
			Backend:       b.Backend,
			Version:       b.Version,
			Labels:        b.Labels,
			Enforces:      b.Enforces,
			Slots:         b.Slots,
			Used:          b.Used,
			StartFailures: b.StartFailures,
			StartFailure:  b.StartFailure,
			LastBeat:      now,
		},
		Leaving:  b.Leaving,
		Draining: b.Draining,
	}
	for _, h := range b.Sessions {
		out.Sessions = append(out.Sessions, fleet.Held{Session: h.Session, Epoch: h.Epoch})
	}
	return out
}

func raised(list []fleet.Held) []wire.Held {
	var out []wire.Held
	for _, h := range list {
		out = append(out, wire.Held{Session: h.Session, Epoch: h.Epoch})
	}
	return out
}

func wireNotice(n run.Notice) wire.Notice {
	return wire.Notice{Kind: n.Kind, Run: n.Run, Call: n.Call}
}

func notice(n wire.Notice) run.Notice {
	return run.Notice{Kind: n.Kind, Run: n.Run, Call: n.Call}
}

// clip shortens s to at most n bytes of valid UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

package dispatch

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// Size caps of sealed messages from runners, in bytes.
const (
	maxClaim  = 8 << 10
	maxBeat   = 512 << 10
	maxReport = 2 << 20
)

// refusal is why a message of a runner is not taken; reason is a short code.
type refusal struct {
	reason string
	cause  error
}

func (r *refusal) Error() string { return r.reason + ": " + r.cause.Error() }
func (r *refusal) Unwrap() error { return r.cause }

func refuse(reason, format string, args ...any) error {
	return &refusal{reason, fmt.Errorf(format, args...)}
}

// reason is the short code of an error that open or a check returned.
func reason(err error) string {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.reason
	}
	return envelope.Reason(err)
}

// open checks that data is sealed by the runner that its subject names, and
// decodes it into v.
func open(keys Keys, payloadType string, limit int, subject string, data []byte, v any) error {
	k, err := keys.Keys(bus.RunnerOf(subject))
	if err != nil {
		return err
	}
	return k.Open(payloadType, limit, data, v)
}

var (
	token     = regexp.MustCompile(`^[A-Za-z0-9_-]{1,100}$`)
	codeToken = regexp.MustCompile(`^[a-z0-9_]{1,60}$`)
)

// Sizes of what a runner may say, beyond which it is refused.
const (
	maxText    = 8 << 10 // a message for people
	maxShort   = 256     // a name, a target, a label
	maxPairs   = 64
	maxDenials = 1024
	maxHeld    = 100_000
)

func checkSender(v int, runner, incarnation, subject string) error {
	switch {
	case v != wire.Version:
		return refuse("version", "version %d, not %d", v, wire.Version)
	case runner != bus.RunnerOf(subject):
		return refuse("runner", "%.80q speaks as %s", runner, bus.RunnerOf(subject))
	case !token.MatchString(incarnation):
		return refuse("form", "incarnation %.80q", incarnation)
	}
	return nil
}

func checkTime(at int64, now time.Time) error {
	if off := now.UnixMilli() - at; off > wire.SkewMS || off < -wire.SkewMS {
		return refuse("time", "clocks are apart: sent at %d, now %d", at, now.UnixMilli())
	}
	return nil
}

func checkClaim(c wire.Claim, subject string, now time.Time) error {
	if err := checkSender(c.V, c.Runner, c.Incarnation, subject); err != nil {
		return err
	}
	if !token.MatchString(c.Session) || c.Epoch < 1 {
		return refuse("form", "session %.80q, epoch %d", c.Session, c.Epoch)
	}
	return checkTime(c.At, now)
}

func checkBeat(b wire.Beat, subject string, now time.Time) error {
	if err := checkSender(b.V, b.Runner, b.Incarnation, subject); err != nil {
		return err
	}
	heldOK := func(h wire.Held) bool { return token.MatchString(h.Session) && h.Epoch >= 1 }
	switch {
	case !bus.ValidRunner(b.Pool):
		return refuse("form", "pool %.80q", b.Pool)
	case b.Slots < 0, b.Used < 0, b.StartFailures < 0:
		return refuse("form", "negative counts")
	case len(b.Version) > maxShort, len(b.StartFailure) > maxText, len(b.Backend) > maxShort, !shortPairs(b.Labels), !shortPairs(b.Enforces):
		return refuse("form", "text is too long")
	case len(b.Sessions) > maxHeld, !all(b.Sessions, heldOK), len(b.Calls) > maxHeld, !all(b.Calls, token.MatchString):
		return refuse("form", "sessions or calls")
	}
	return checkTime(b.At, now)
}

func checkReport(r wire.Report, subject string) error {
	if err := checkSender(r.V, r.Runner, r.Incarnation, subject); err != nil {
		return err
	}
	if !token.MatchString(r.Session) || subject != bus.Final(r.Runner, r.Session) || r.Epoch < 1 || r.At < 1 {
		return refuse("form", "session %.80q, epoch %d, at %d on %s", r.Session, r.Epoch, r.At, subject)
	}
	has := [3]bool{r.Sandbox != nil, r.Failure != nil, r.Done != nil}
	switch {
	case r.Kind == wire.SessionStarted && has == [3]bool{true, false, false}:
		return checkSandbox(*r.Sandbox)
	case (r.Kind == wire.SessionFailed || r.Kind == wire.SessionEnded) && has == [3]bool{false, true, false}:
		return checkFailure(*r.Failure)
	case r.Kind == wire.CallDone && has == [3]bool{false, false, true}:
		if !token.MatchString(r.Run) || !token.MatchString(r.Call) {
			return refuse("form", "run %.80q, call %.80q", r.Run, r.Call)
		}
		return checkDone(*r.Done)
	}
	return refuse("form", "kind %.40q with the wrong parts", string(r.Kind))
}

func checkSandbox(s wire.Sandbox) error {
	if len(s.Backend) > maxShort || len(s.Isolation) > maxShort || len(s.ImageDigest) > maxShort || len(s.PolicyDigest) > maxShort || !shortPairs(s.Enforced) {
		return refuse("form", "text is too long")
	}
	return nil
}

func checkFailure(f wire.Failure) error {
	if !codeToken.MatchString(f.Code) || len(f.Field) > maxShort || len(f.Message) > maxText {
		return refuse("form", "failure %.80q", f.Code)
	}
	return nil
}

func checkDone(d wire.Done) error {
	inline := len(d.Stdout) + len(d.Stderr) + len(d.Value)
	for _, n := range []int64{d.StdoutBytes, d.StderrBytes, d.StartedAt, d.MemoryPeak, d.OOMKills, d.OutputSizes[0], d.OutputSizes[1], d.OutputSizes[2]} {
		if n < 0 {
			return refuse("usage", "a negative number")
		}
	}
	for _, f := range []float64{d.DurationMS, d.CPUMS} {
		if math.IsNaN(f) || math.IsInf(f, 0) || f < 0 || f > 1e12 {
			return refuse("usage", "a time that can't be")
		}
	}
	switch {
	case !slices.Contains(run.Finals(), run.CallStatus(d.Status)):
		return refuse("status", "status %.40q is not final", d.Status)
	case d.ValueKind != "" && d.ValueKind != wire.PythonTool:
		return refuse("form", "value_kind %.40q", d.ValueKind)
	case len(d.Signal) > maxShort, len(d.Denials) > maxDenials, !all(d.Denials, shortDenial):
		return refuse("form", "text is too long")
	case inline > wire.MaxInlineDone:
		return refuse("output_size", "%d bytes inline, at most %d", inline, wire.MaxInlineDone)
	case d.Output == nil && d.OutputSizes != [3]int64{}:
		return refuse("output_size", "parts of an output that is not there")
	case d.Output != nil && inline > 0:
		return refuse("form", "output both inline and beside")
	case d.Output != nil && (!blobID.MatchString(d.Output.ID) || d.Output.Size < 0 || d.Output.Size > wire.MaxBlob):
		return refuse("output_size", "blob %.80q of %d bytes", d.Output.ID, d.Output.Size)
	case d.Output != nil && !sumsTo(d.OutputSizes, d.Output.Size):
		return refuse("output_size", "parts are not the whole of %d bytes", d.Output.Size)
	}
	return checkError(d.Error)
}

func checkError(e *wire.Error) error {
	if e == nil {
		return nil
	}
	if _, known := fault.Codes[fault.Code(e.Code)]; !known || len(e.Message) > maxText || len(e.Field) > maxShort {
		return refuse("form", "error code %.80q", e.Code)
	}
	return nil
}

// sumsTo adds without overflow: every part is at most MaxBlob.
func sumsTo(parts [3]int64, whole int64) bool {
	for _, n := range parts {
		if n > whole {
			return false
		}
		whole -= n
	}
	return whole == 0
}

func shortDenial(d wire.Denial) bool {
	return len(d.Kind) <= maxShort && len(d.Target) <= maxText && len(d.Reason) <= maxText
}

func shortPairs(m map[string]string) bool {
	if len(m) > maxPairs {
		return false
	}
	for k, v := range m {
		if len(k) > maxShort || len(v) > maxShort {
			return false
		}
	}
	return true
}

func all[T any](list []T, ok func(T) bool) bool {
	return !slices.ContainsFunc(list, func(v T) bool { return !ok(v) })
}

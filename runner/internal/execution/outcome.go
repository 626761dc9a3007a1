package execution

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// verdict is what the outcome of a call is decided from.
type verdict struct {
	exit    sandbox.Exit
	program sandbox.Program
	path    string
	policy  wire.Policy
	flooded bool
	stderr  func() []byte // the kept end of stderr, when a sentence needs it
}

// maxDenials is how many a report may carry.
const maxDenials = 256

// outcome says how a call ended: the first cause wins, and what we killed
// ourselves was not the memory limit's doing.
func outcome(v verdict) *wire.Done {
	d := judge(v)
	e := v.exit
	d.DurationMS = milliseconds(e.Duration)
	d.CPUMS = milliseconds(e.CPU)
	d.MemoryPeak = max(e.MemoryPeak, 0)
	d.OOMKills = max(e.OOMKills, 0)
	d.Signal = e.Signal
	for _, n := range e.Denials[:min(len(e.Denials), maxDenials-len(d.Denials))] {
		d.Denials = append(d.Denials, wire.Denial{Kind: n.Kind, Target: short(n.Target), Reason: short(n.Reason)})
	}
	if e.Code >= 0 && e.Signal == "" && (e.Reason == sandbox.Exited) && e.File == nil {
		code := e.Code
		d.ExitCode = &code
	}
	return d
}

func judge(v verdict) *wire.Done {
	switch {
	case v.exit.Reason == sandbox.Died:
		return end(died)
	case v.exit.Reason == sandbox.Killed:
		return killed(v, endingOf(v.exit.Cause))
	case v.exit.OOM: // also when the wall clock ended what was left: the first cause wins
		d := failed("oom_killed", fault.MemoryLimit, "The kernel ended a process of the call because memory_mb (%d MiB) was reached; use less memory or raise memory_mb.", v.policy.MemoryMB)
		return bounded(d, "memory_mb", v.policy.MemoryMB, v.exit.MemoryPeak>>20)
	case v.exit.PIDsHit:
		d := failed("pids_exhausted", fault.PIDsLimit, "A process or thread was refused because pids_limit (%d) was reached; start fewer or raise pids_limit.", v.policy.PIDsLimit)
		return bounded(d, "pids_limit", v.policy.PIDsLimit, -1)
	case v.exit.Reason == sandbox.TimedOut:
		limit := v.policy.WallClockSeconds
		d := failed("timed_out", fault.WallClock, "The call ran longer than wall_clock_seconds (%d s) and was ended; what it printed until then is kept.", limit)
		return bounded(d, "wall_clock_seconds", limit, int64(v.exit.Duration/time.Second))
	case v.exit.DiskFull:
		return failed("disk_full", fault.DiskFull, "The workspace is full; delete files or ask the operator for a larger one.")
	case v.flooded:
		return killed(v, flooded)
	case v.exit.File != nil:
		return filed(v)
	case v.exit.Reason == sandbox.Refused:
		return failed("denied", fault.PathDenied, "The operation was refused.")
	case v.exit.Signal != "" || v.exit.Code != 0:
		return failed("error", fault.ToolFailed, "%s", toolFailure(v))
	}
	return &wire.Done{Status: "ok"}
}

func killed(v verdict, why *ending) *wire.Done {
	d := end(why)
	if why == flooded {
		return bounded(d, "output_bytes_limit", v.policy.OutputBytesLimit, -1)
	}
	return d
}

// filed is the outcome of file_read and file_write.
func filed(v verdict) *wire.Done {
	f := v.exit.File
	switch {
	case f.Denied:
		d := failed("denied", fault.PathDenied, "%s", sentence(f.Message, "The path is outside the policy's fs_allowlist; use a path under /workspace."))
		d.Error.Field = "path"
		d.Denials = []wire.Denial{{Kind: "path", Target: short(v.path), Reason: "outside fs_allowlist"}}
		return d
	case f.Errno == "":
		return &wire.Done{Status: "ok", Value: f.Content, HasValue: v.program == sandbox.FileRead}
	case f.Errno == "ENOSPC":
		return failed("disk_full", fault.DiskFull, "%s", sentence(f.Message, "The workspace is full; delete files or ask the operator for a larger one."))
	}
	message := sentence(f.Message, "The file operation failed with "+f.Errno+".")
	if f.Errno == "ENOENT" {
		message = "There is no file at " + short(v.path) + "."
		if v.program == sandbox.FileWrite {
			message = "The directory for " + short(v.path) + " could not be found."
		}
	}
	d := failed("error", fault.FileFailed, "%s", message)
	d.Error.Field = "path"
	if f.Errno == "EFBIG" {
		limit, size := v.policy.OutputBytesLimit, f.Size
		d.Error.Limit, d.Error.Observed = &limit, &size
	}
	return d
}

// toolFailure says how the tool itself failed, with the last line of a Python
// traceback.
func toolFailure(v verdict) string {
	if v.exit.Signal != "" {
		return fmt.Sprintf("The tool was ended by %s.", v.exit.Signal)
	}
	if v.program == sandbox.Python && v.exit.Code == 1 {
		if line := exception(v.stderr()); line != "" {
			return "Python raised an exception: " + line
		}
	}
	if len(v.stderr()) > 0 {
		return fmt.Sprintf("The tool exited with code %d; its stderr may say why.", v.exit.Code)
	}
	return fmt.Sprintf("The tool exited with code %d and wrote nothing to stderr.", v.exit.Code)
}

// exception is the last line of the last traceback in stderr, or "".
func exception(stderr []byte) string {
	at := bytes.LastIndex(stderr, []byte("Traceback (most recent call last):"))
	if at < 0 {
		return syntaxError(stderr)
	}
	for i, line := range strings.Split(string(stderr[at:]), "\n") {
		if i > 0 && line != "" && line[0] != ' ' {
			return short(line)
		}
	}
	return ""
}

// syntaxError is the message of a source that Python could not compile: it
// prints no traceback line.
func syntaxError(stderr []byte) string {
	for line := range strings.SplitSeq(string(stderr), "\n") {
		if name, _, ok := strings.Cut(line, ": "); ok && strings.HasSuffix(name, "Error") && !strings.ContainsAny(name, " \t") {
			return short(line)
		}
	}
	return ""
}

// failed is an outcome with its reason.
func failed(status string, code fault.Code, format string, args ...any) *wire.Done {
	return &wire.Done{Status: status, Error: &wire.Error{Code: string(code), Message: fmt.Sprintf(format, args...)}}
}

func end(e *ending) *wire.Done { return failed(e.status, e.code, "%s", e.message) }

// bounded adds the policy's field, its limit and what was seen (below 0: not
// known).
func bounded(d *wire.Done, field string, limit, observed int64) *wire.Done {
	d.Error.Field, d.Error.Limit = field, &limit
	if observed >= 0 {
		d.Error.Observed = &observed
	}
	return d
}

func sentence(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return short(s)
}

// short bounds what comes out of a sandbox before it goes into a message.
func short(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= 500 {
		return s
	}
	return strings.ToValidUTF8(s[:500], "") + "…"
}

// long is short for what people may need whole.
func long(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= 4<<10 {
		return s
	}
	return strings.ToValidUTF8(s[:4<<10], "") + "…"
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0).Microseconds()) / 1000 }

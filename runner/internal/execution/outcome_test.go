package execution

import (
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/fault"
)

const traceback = `some noise
Traceback (most recent call last):
  File "<python_exec>", line 1, in <module>
    f()
ValueError: first line
second line
`

func TestOutcome(t *testing.T) {
	for _, tt := range []struct {
		name    string
		exit    sandbox.Exit
		program sandbox.Program
		flooded bool
		stderr  string
		status  string
		code    string
		message string
	}{
		{name: "exit 0", exit: sandbox.Exit{Reason: sandbox.Exited}, status: "ok"},
		{name: "exit 7", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 7}, status: "error", code: "tool_failed", message: "code 7"},
		{name: "exit 137 proves nothing", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 137}, status: "error", code: "tool_failed"},
		{name: "signal", exit: sandbox.Exit{Reason: sandbox.Exited, Code: -1, Signal: "SIGSEGV"}, status: "error", code: "tool_failed", message: "SIGSEGV"},
		{name: "python exception", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1}, program: sandbox.Python, stderr: traceback, status: "error", code: "tool_failed", message: "ValueError: first line"},
		{name: "python syntax", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1}, program: sandbox.Python, stderr: "  File \"x\", line 1\n    (\n    ^\nSyntaxError: '(' was never closed\n", status: "error", code: "tool_failed", message: "SyntaxError: '(' was never closed"},
		{name: "python sys.exit", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1}, program: sandbox.Python, status: "error", code: "tool_failed", message: "code 1"},
		{name: "wall clock", exit: sandbox.Exit{Reason: sandbox.TimedOut, Code: -1, Signal: "SIGKILL"}, status: "timed_out", code: "wall_clock"},
		{name: "wall clock beside another call's memory", exit: sandbox.Exit{Reason: sandbox.TimedOut, Code: -1, OOMKills: 1}, status: "timed_out", code: "wall_clock"},
		{name: "memory before the wall clock", exit: sandbox.Exit{Reason: sandbox.TimedOut, Code: -1, OOM: true, OOMKills: 1}, status: "oom_killed", code: "memory_limit"},
		{name: "processes before the wall clock", exit: sandbox.Exit{Reason: sandbox.TimedOut, Code: -1, PIDsHit: true}, status: "pids_exhausted", code: "pids_limit"},
		{name: "cancelled", exit: sandbox.Exit{Reason: sandbox.Killed, Cause: cancelled, Code: -1}, status: "cancelled", code: "cancelled"},
		{name: "cancelled is not memory", exit: sandbox.Exit{Reason: sandbox.Killed, Cause: cancelled, OOM: true}, status: "cancelled", code: "cancelled"},
		{name: "flood, killed", exit: sandbox.Exit{Reason: sandbox.Killed, Cause: flooded, Code: -1}, flooded: true, status: "output_limit", code: "output_flood"},
		{name: "flood, exited in the same moment", exit: sandbox.Exit{Reason: sandbox.Exited}, flooded: true, status: "output_limit", code: "output_flood"},
		{name: "flood, cancelled before", exit: sandbox.Exit{Reason: sandbox.Killed, Cause: cancelled, Code: -1}, flooded: true, status: "cancelled", code: "cancelled"},
		{name: "shut down", exit: sandbox.Exit{Reason: sandbox.Killed, Cause: shutdown, Code: -1}, status: "runner_lost", code: "runner_lost"},
		{name: "died", exit: sandbox.Exit{Reason: sandbox.Died, Code: -1, OOM: true}, status: "runner_lost", code: "sandbox_died"},
		{name: "memory", exit: sandbox.Exit{Reason: sandbox.Exited, Code: -1, Signal: "SIGKILL", OOM: true, OOMKills: 1}, status: "oom_killed", code: "memory_limit"},
		{name: "memory of a child, exit 0", exit: sandbox.Exit{Reason: sandbox.Exited, OOM: true, OOMKills: 1}, status: "oom_killed", code: "memory_limit"},
		{name: "memory of a neighbour", exit: sandbox.Exit{Reason: sandbox.Exited, OOMKills: 1}, status: "ok"},
		{name: "memory before pids", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1, OOM: true, PIDsHit: true}, status: "oom_killed", code: "memory_limit"},
		{name: "pids", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1, PIDsHit: true}, status: "pids_exhausted", code: "pids_limit"},
		{name: "disk", exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1, DiskFull: true}, status: "disk_full", code: "disk_full"},
		{name: "file ok", program: sandbox.FileRead, exit: sandbox.Exit{Reason: sandbox.Exited, Code: -1, File: &sandbox.FileResult{Content: []byte("x")}}, status: "ok"},
		{name: "file denied", program: sandbox.FileRead, exit: sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: &sandbox.FileResult{Denied: true, Errno: "EXDEV"}}, status: "denied", code: "path_denied"},
		{name: "file missing", program: sandbox.FileRead, exit: sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: &sandbox.FileResult{Errno: "ENOENT", Message: "no such file"}}, status: "error", code: "file_failed", message: "There is no file at p."},
		{name: "file too large", program: sandbox.FileRead, exit: sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: &sandbox.FileResult{Errno: "EFBIG", Size: 1 << 50}}, status: "error", code: "file_failed"},
		{name: "file, disk full", program: sandbox.FileWrite, exit: sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: &sandbox.FileResult{Errno: "ENOSPC"}}, status: "disk_full", code: "disk_full"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := outcome(verdict{exit: tt.exit, program: tt.program, path: "p", policy: policy(), flooded: tt.flooded, stderr: func() []byte { return []byte(tt.stderr) }})
			if d.Status != tt.status {
				t.Fatalf("got %s (%+v)", d.Status, d.Error)
			}
			if (d.Error == nil) != (tt.code == "") {
				t.Fatalf("got %+v", d.Error)
			}
			if d.Error != nil {
				if d.Error.Code != tt.code || !strings.Contains(d.Error.Message, tt.message) || d.Error.Message == "" {
					t.Errorf("got %+v", d.Error)
				}
				if _, ok := fault.Codes[fault.Code(d.Error.Code)]; !ok {
					t.Errorf("%q is not a public code", d.Error.Code)
				}
			}
			if d.OOMKills != tt.exit.OOMKills {
				t.Errorf("%d kills", d.OOMKills)
			}
		})
	}
}

func TestOutcomeNamesLimitAndWhatWasSeen(t *testing.T) {
	for _, tt := range []struct {
		exit            sandbox.Exit
		field           string
		limit, observed int64
	}{
		{sandbox.Exit{Reason: sandbox.TimedOut, Duration: 30*time.Second + 1}, "wall_clock_seconds", 30, 30},
		{sandbox.Exit{Reason: sandbox.Exited, OOM: true, MemoryPeak: 256 << 20}, "memory_mb", 256, 256},
		{sandbox.Exit{Reason: sandbox.Exited, PIDsHit: true}, "pids_limit", 64, -1},
		{sandbox.Exit{Reason: sandbox.Killed, Cause: flooded}, "output_bytes_limit", 64 << 10, -1},
	} {
		e := outcome(verdict{exit: tt.exit, policy: policy()}).Error
		if e.Field != tt.field || *e.Limit != tt.limit || (tt.observed >= 0 && *e.Observed != tt.observed) {
			t.Errorf("got %+v", e)
		}
	}
}

func TestEveryEndingHasAPublicCode(t *testing.T) {
	for _, e := range []*ending{cancelled, flooded, stopped, raised, unheard, shutdown, died} {
		if _, ok := fault.Codes[e.code]; !ok || e.message == "" || e.status == "" {
			t.Errorf("got %+v", e)
		}
	}
}

func TestMessagesStayShortAndValid(t *testing.T) {
	d := outcome(verdict{
		exit: sandbox.Exit{Reason: sandbox.Exited, Code: 1}, program: sandbox.Python, policy: policy(),
		stderr: func() []byte {
			return []byte("Traceback (most recent call last):\nValueError: " + strings.Repeat("é", 100_000) + "\xff\n")
		},
	})
	if len(d.Error.Message) > 600 || !strings.HasSuffix(d.Error.Message, "é…") {
		t.Errorf("%d bytes: %.40q", len(d.Error.Message), d.Error.Message)
	}
}

func TestDenialsOfTheNetworkAreReported(t *testing.T) {
	denials := make([]sandbox.Denial, 256)
	for i := range denials {
		denials[i] = sandbox.Denial{Kind: "connect", Target: "evil.test:443", Reason: "not in network_allowlist"}
	}
	d := outcome(verdict{exit: sandbox.Exit{Reason: sandbox.Exited, Denials: denials[:1]}, policy: policy()})
	if len(d.Denials) != 1 || d.Denials[0].Target != "evil.test:443" || d.Status != "ok" {
		t.Errorf("got %+v", d)
	}
	refused := &sandbox.FileResult{Denied: true, Errno: "EXDEV"}
	d = outcome(verdict{program: sandbox.FileRead, exit: sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: refused, Denials: denials}, policy: policy()})
	if len(d.Denials) != 256 || d.Denials[0].Kind != "path" {
		t.Errorf("%d are reported, the first %+v", len(d.Denials), d.Denials[0])
	}
}

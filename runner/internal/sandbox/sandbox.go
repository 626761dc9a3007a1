// Package sandbox is the contract between the runner and what isolates user
// code: a Backend makes Sandboxes, a Sandbox runs Processes.
package sandbox

import (
	"context"
	"errors"
	"io"
	"time"
)

// Backend makes sandboxes on this machine.
//
// Start may be called from several goroutines. Sweep is called once, before
// the first Start, and removes whatever an earlier process of this runner
// left behind; it touches nothing that it does not own. Check may be called at
// any time.
type Backend interface {
	Start(ctx context.Context, spec Spec) (Sandbox, error)
	Sweep(ctx context.Context) error
	Check(ctx context.Context) Report
	Close(ctx context.Context) error
}

// Sandbox is one isolated place to run programs.
//
// Exec may be called from several goroutines. Close may be called twice, and
// also when Exec has failed; it returns once nothing is left running. Done is
// closed when the sandbox has ended by itself or by Close; an Exec that is
// under way then returns an Exit with Reason Died.
type Sandbox interface {
	// Exec runs one process tree to its end and returns when every process of
	// it is gone and all its output was written to Stdout and Stderr. A
	// program that fails is an Exit; an error means that we failed and that
	// the program did not start. Cancelling ctx kills the tree; the Exit then
	// has Reason Killed and Cause context.Cause(ctx).
	Exec(ctx context.Context, p Process) (Exit, error)
	Done() <-chan struct{}
	Info() Info
	Close(ctx context.Context) error
}

// Spec is what a sandbox is made from: the resolved policy, and nothing of
// this machine.
type Spec struct {
	ID        string // unique on this runner: session and epoch; [a-zA-Z0-9_-]
	Policy    Policy
	Workspace string // the tenant, for labels only

	// PrivateAllow are hosts and addresses of the policy's network_allowlist
	// that this sandbox may reach although they are not public, because the
	// operator named them for what it does. No client's word may lead here.
	PrivateAllow []string
}

// Packages is where each sandbox sees the folder of Python packages that the
// runner keeps, if it keeps one: read-only, and not to be listed.
const Packages = "/run/bigwave/packages"

// Policy is the part of a sandbox policy that a backend enforces.
type Policy struct {
	FSAllowlist      []string
	NetworkAllowlist []string
	CPUShares        int64 // relative weight, 2–262144
	MemoryMB         int64 // MiB
	PIDsLimit        int64
	BaseImage        string
}

// Info is what a live sandbox says about itself; it goes into every result.
type Info struct {
	Backend     string            // "subprocess", "containerd"
	Isolation   string            // e.g. "userns+pidns+netns", "runc"
	ImageDigest string            // empty when the host's own files are used
	Enforced    map[string]string // policy field → how, e.g. "memory_mb": "cgroup-v1", "base_image": "host"
}

// Program says what interprets a Process's script.
type Program string

// The programs.
const (
	Bash      Program = "bash"
	Python    Program = "python3"
	FileRead  Program = "file_read"  // no interpreter: the supervisor reads Path as the call's user
	FileWrite Program = "file_write" // the supervisor writes Input to Path as the call's user
	Harness   Program = "harness"    // Python runs the program for Python tools: Script is its request, Results get its answers
)

// Process is one call.
type Process struct {
	ID      string // our call id; unique in the sandbox
	Program Program

	// Script is the source that Bash or Python runs. With InArgv it is passed
	// as `-c`'s argument (at most 131,071 bytes, no NUL); without, it travels
	// on a descriptor and may be of any size.
	Script []byte
	InArgv bool

	Path    string // FileRead, FileWrite: absolute, or relative to /workspace
	Input   []byte // FileWrite: the content
	MaxRead int64  // FileRead: refuse a larger file; bytes

	Env  map[string]string // added to the sandbox's own small environment
	Wall time.Duration     // wall clock from process start; the tree is killed past it. 0: none

	// Stdout, Stderr and, of Harness, Results get bytes as they come, from one
	// goroutine each. A Write that returns an error does not stop the process:
	// output is then drained and dropped. Started, if set, is called once the
	// program runs.
	Stdout, Stderr io.Writer
	Results        io.Writer
	Started        func()
}

// Reason says how a process tree came to its end.
type Reason string

// The reasons. With several, the first cause wins.
const (
	Exited   Reason = "exited"    // by itself: Code or Signal
	TimedOut Reason = "timed_out" // Wall ran out
	Killed   Reason = "killed"    // the context was cancelled; see Cause
	Died     Reason = "died"      // the sandbox ended under it
	Refused  Reason = "refused"   // a file operation that the policy or the kernel refused: see File
)

// Exit is the end of a process tree. Counters are the kernel's.
type Exit struct {
	Reason Reason
	Cause  error  // Killed: why
	Code   int    // exit code; -1 when there is none
	Signal string // "SIGKILL", … when a signal ended the main process

	OOM      bool  // this call was hit by the memory limit, by the cgroup's own counter
	OOMKills int64 // kills by the memory limit while the call ran, whoever was hit
	PIDsHit  bool  // the pids limit refused a fork or thread while the call ran
	DiskFull bool  // the workspace ran full while the call ran (a backend that can't tell says false)

	Duration   time.Duration // from process start to its end
	CPU        time.Duration
	MemoryPeak int64 // bytes

	File *FileResult // FileRead, FileWrite

	Denials []Denial // what the network fence refused while the call ran; at most 256
}

// Denial is something that the fence refused.
type Denial struct {
	Kind   string // "dns", "connect", "address", "tls", "limit"
	Target string // host:port, or a name
	Reason string
}

// FileResult is the outcome of a file operation.
type FileResult struct {
	Content []byte // FileRead
	Size    int64
	Errno   string // "ENOENT", "EACCES", "EXDEV", "EISDIR", "EFBIG", "ENOSPC", … empty when it worked
	Denied  bool   // the path is outside the allowlist
	Message string // for people
}

// StartError is why a sandbox could not be made. Code is one of the public
// codes of a failed start; Field names the policy field when one is to blame.
type StartError struct {
	Code    string // "policy_unenforceable", "image_unavailable", "start_failed"
	Field   string
	Message string
	Cause   error
}

// Error is the public sentence followed by the hidden cause.
func (e *StartError) Error() string {
	if e.Cause != nil {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

// Unwrap returns the hidden cause.
func (e *StartError) Unwrap() error { return e.Cause }

// ErrClosed is returned by Exec on a sandbox that has ended.
var ErrClosed = errors.New("the sandbox has ended")

// Report is the table that `bigwave-runner doctor` prints.
type Report struct {
	Backend string
	Pieces  []Piece
}

// Piece is one part of the fence on this machine.
type Piece struct {
	Name   string // "user namespaces", "cgroup memory", …
	State  string // "ok", "weak", "missing"
	Detail string // what was found
	Means  string // what it means and what to do
	Fatal  bool   // the runner refuses to start sandboxes without it
}

// Missing returns the fatal pieces that are not there.
func (r Report) Missing() []Piece {
	var out []Piece
	for _, p := range r.Pieces {
		if p.Fatal && p.State == "missing" {
			out = append(out, p)
		}
	}
	return out
}

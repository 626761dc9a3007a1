package sandboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Fake is a backend in memory that lies on command. Its programs are scripts
// of one command a line:
//
//	echo TEXT      print a line to stdout
//	warn TEXT      print a line to stderr
//	flood N        print N bytes
//	sleep D        a Go duration; ends early when the call is killed
//	exit N         end with that code; the script's end is exit 0
//	oom, pids      end as the memory or the pids limit would
//	full           end with code 1 and the workspace full
//	die            the sandbox dies under the call
//	fail           Exec returns an error
//	answer TEXT    give a line to Results
//
// File operations work on a map of each sandbox. The zero value is ready.
type Fake struct {
	// StartErr, when set, is asked before each Start.
	StartErr func(sandbox.Spec) error
	// Pieces is what Check reports.
	Pieces []sandbox.Piece

	mu        sync.Mutex
	sandboxes map[string]*FakeSandbox
	swept     bool
	closed    bool
}

var _ sandbox.Backend = (*Fake)(nil)

// Start implements sandbox.Backend.
func (f *Fake) Start(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if f.StartErr != nil {
		if err := f.StartErr(spec); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, sandbox.ErrClosed
	}
	if old := f.sandboxes[spec.ID]; old != nil && old.alive() {
		return nil, &sandbox.StartError{Code: "start_failed", Message: fmt.Sprintf("a sandbox %q is there already", spec.ID)}
	}
	if f.sandboxes == nil {
		f.sandboxes = map[string]*FakeSandbox{}
	}
	s := &FakeSandbox{Spec: spec, done: make(chan struct{}), files: map[string][]byte{}}
	f.sandboxes[spec.ID] = s
	return s, nil
}

// Sweep implements sandbox.Backend.
func (f *Fake) Sweep(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.swept = true
	return nil
}

// Swept says whether Sweep was called.
func (f *Fake) Swept() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.swept
}

// Check implements sandbox.Backend.
func (f *Fake) Check(context.Context) sandbox.Report {
	return sandbox.Report{Backend: "fake", Pieces: f.Pieces}
}

// Close implements sandbox.Backend.
func (f *Fake) Close(ctx context.Context) error {
	f.mu.Lock()
	f.closed = true
	all := maps.Clone(f.sandboxes)
	f.mu.Unlock()
	for _, s := range all {
		_ = s.Close(ctx)
	}
	return nil
}

// Sandbox returns the sandbox that was last started under id, or nil.
func (f *Fake) Sandbox(id string) *FakeSandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sandboxes[id]
}

// Live is how many sandboxes have not ended.
func (f *Fake) Live() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, s := range f.sandboxes {
		if s.alive() {
			n++
		}
	}
	return n
}

// FakeSandbox is a sandbox of a Fake.
type FakeSandbox struct {
	Spec sandbox.Spec

	done  chan struct{}
	ended sync.Once
	mu    sync.Mutex
	files map[string][]byte
	ran   []sandbox.Process
}

// Kill ends the sandbox as if its init had been killed.
func (s *FakeSandbox) Kill() { s.ended.Do(func() { close(s.done) }) }

// Processes are the calls that were started, in order.
func (s *FakeSandbox) Processes() []sandbox.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]sandbox.Process(nil), s.ran...)
}

// Done implements sandbox.Sandbox.
func (s *FakeSandbox) Done() <-chan struct{} { return s.done }

// Close implements sandbox.Sandbox.
func (s *FakeSandbox) Close(context.Context) error {
	s.Kill()
	return nil
}

// Info implements sandbox.Sandbox.
func (s *FakeSandbox) Info() sandbox.Info {
	return sandbox.Info{Backend: "fake", Isolation: "none", Enforced: map[string]string{"memory_mb": "fake"}}
}

func (s *FakeSandbox) alive() bool {
	select {
	case <-s.done:
		return false
	default:
		return true
	}
}

// Exec implements sandbox.Sandbox.
func (s *FakeSandbox) Exec(ctx context.Context, p sandbox.Process) (sandbox.Exit, error) {
	if !s.alive() {
		return sandbox.Exit{}, sandbox.ErrClosed
	}
	if ctx.Err() != nil {
		return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1}, nil
	}
	s.mu.Lock()
	s.ran = append(s.ran, p)
	s.mu.Unlock()
	begin := time.Now()
	if p.Wall > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, p.Wall, errWall)
		defer cancel()
	}
	if p.Started != nil {
		p.Started()
	}
	var e sandbox.Exit
	var err error
	switch p.Program {
	case sandbox.FileRead, sandbox.FileWrite:
		e = s.file(p)
	default:
		e, err = s.script(ctx, p)
	}
	e.Duration = time.Since(begin)
	return e, err
}

var errWall = errors.New("the wall clock ran out")

func (s *FakeSandbox) script(ctx context.Context, p sandbox.Process) (sandbox.Exit, error) {
	for line := range strings.Lines(string(p.Script)) {
		if e := s.stopped(ctx); e.Reason != "" {
			return e, nil
		}
		command, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, _ := strconv.Atoi(argument)
		switch command {
		case "echo":
			say(p.Stdout, argument+"\n")
		case "warn":
			say(p.Stderr, argument+"\n")
		case "answer":
			say(p.Results, argument+"\n")
		case "flood":
			say(p.Stdout, strings.Repeat("x", n))
		case "sleep":
			d, err := time.ParseDuration(argument)
			if err != nil {
				return sandbox.Exit{}, err
			}
			select {
			case <-time.After(d):
			case <-ctx.Done():
			case <-s.done:
			}
		case "exit":
			return sandbox.Exit{Reason: sandbox.Exited, Code: n}, nil
		case "oom":
			return sandbox.Exit{Reason: sandbox.Exited, Code: -1, Signal: "SIGKILL", OOM: true, OOMKills: 1}, nil
		case "pids":
			return sandbox.Exit{Reason: sandbox.Exited, Code: 1, PIDsHit: true}, nil
		case "full":
			return sandbox.Exit{Reason: sandbox.Exited, Code: 1, DiskFull: true}, nil
		case "die":
			s.Kill()
		case "fail":
			return sandbox.Exit{}, errors.New("the fake was told to fail")
		case "":
		default:
			say(p.Stderr, command+": command not found\n")
			return sandbox.Exit{Reason: sandbox.Exited, Code: 127}, nil
		}
	}
	if e := s.stopped(ctx); e.Reason != "" {
		return e, nil
	}
	return sandbox.Exit{Reason: sandbox.Exited}, nil
}

// stopped says how the call was ended from outside, if it was.
func (s *FakeSandbox) stopped(ctx context.Context) sandbox.Exit {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errWall):
		return sandbox.Exit{Reason: sandbox.TimedOut, Code: -1}
	case cause != nil:
		return sandbox.Exit{Reason: sandbox.Killed, Cause: cause, Code: -1}
	case !s.alive():
		return sandbox.Exit{Reason: sandbox.Died, Code: -1}
	}
	return sandbox.Exit{}
}

func (s *FakeSandbox) file(p sandbox.Process) sandbox.Exit {
	name := path.Join("/workspace", p.Path)
	if path.IsAbs(p.Path) {
		name = path.Clean(p.Path)
	}
	if !strings.HasPrefix(name, "/workspace/") {
		return refusal(sandbox.FileResult{Errno: "EACCES", Denied: true, Message: fmt.Sprintf("%q is outside /workspace", p.Path)})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.Program == sandbox.FileWrite {
		s.files[name] = bytes.Clone(p.Input)
		return sandbox.Exit{Reason: sandbox.Exited, File: &sandbox.FileResult{Size: int64(len(p.Input))}}
	}
	content, ok := s.files[name]
	switch {
	case !ok:
		return refusal(sandbox.FileResult{Errno: "ENOENT", Message: "no such file or directory"})
	case int64(len(content)) > p.MaxRead:
		return refusal(sandbox.FileResult{Errno: "EFBIG", Size: int64(len(content)), Message: "the file is too large"})
	}
	return sandbox.Exit{Reason: sandbox.Exited, File: &sandbox.FileResult{Content: bytes.Clone(content), Size: int64(len(content))}}
}

func refusal(r sandbox.FileResult) sandbox.Exit {
	return sandbox.Exit{Reason: sandbox.Refused, File: &r}
}

func say(w interface{ Write([]byte) (int, error) }, text string) {
	if w != nil {
		_, _ = w.Write([]byte(text))
	}
}

// Package sandboxtest holds the one suite that every sandbox backend must
// pass, and a fake backend for tests of what uses one.
package sandboxtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Image is the base image that backends under test must offer.
const Image = "bigwave/sandbox-base:latest"

// Policy is what a sandbox under test gets unless a test says otherwise.
func Policy() sandbox.Policy {
	return sandbox.Policy{
		FSAllowlist: []string{"/workspace"},
		CPUShares:   1024,
		MemoryMB:    128,
		PIDsLimit:   64,
		BaseImage:   Image,
	}
}

// Run holds a backend against the contract. make is called once; the backend
// must be fresh, and Run closes it.
func Run(t *testing.T, make func(t *testing.T) sandbox.Backend) {
	leaks := goleak.IgnoreCurrent()
	b := make(t)
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	for _, group := range []struct {
		name string
		run  func(t *testing.T, b sandbox.Backend)
	}{
		{"Ends", testEnds},
		{"Output", testOutput},
		{"Programs", testPrograms},
		{"Trees", testTrees},
		{"Limits", testLimits},
		{"Files", testFiles},
		{"Fence", testFence},
		{"Life", testLife},
	} {
		t.Run(group.name, func(t *testing.T) { group.run(t, b) })
	}
	if err := b.Close(context.Background()); err != nil {
		t.Errorf("Close: %v", err)
	}
	goleak.VerifyNone(t, leaks)
}

var sequence atomic.Int64

// Start makes a sandbox that is closed at the end of the test.
func Start(t testing.TB, b sandbox.Backend, change ...func(*sandbox.Policy)) sandbox.Sandbox {
	t.Helper()
	policy := Policy()
	for _, c := range change {
		c(&policy)
	}
	id := fmt.Sprintf("test-%d", sequence.Add(1))
	s, err := b.Start(t.Context(), sandbox.Spec{ID: id, Policy: policy, Workspace: "default"})
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// Result is an Exit with what was printed.
type Result struct {
	sandbox.Exit
	Stdout, Stderr string
}

// Exec runs p with its output kept and fails the test if it could not start.
func Exec(t testing.TB, s sandbox.Sandbox, p sandbox.Process) Result {
	t.Helper()
	r, err := exec(t.Context(), s, p)
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	return r
}

func exec(ctx context.Context, s sandbox.Sandbox, p sandbox.Process) (Result, error) {
	var out, errs bytes.Buffer
	if p.ID == "" {
		p.ID = fmt.Sprintf("call-%d", sequence.Add(1))
	}
	if p.Stdout == nil {
		p.Stdout = &out
	}
	if p.Stderr == nil {
		p.Stderr = &errs
	}
	e, err := s.Exec(ctx, p)
	return Result{Exit: e, Stdout: out.String(), Stderr: errs.String()}, err
}

// Bash runs a command as a template does.
func Bash(script string) sandbox.Process {
	return sandbox.Process{Program: sandbox.Bash, Script: []byte(script), InArgv: true}
}

// Python runs code as python_exec does.
func Python(script string) sandbox.Process {
	return sandbox.Process{Program: sandbox.Python, Script: []byte(script)}
}

// within is p with a wall clock.
func within(wall time.Duration, p sandbox.Process) sandbox.Process {
	p.Wall = wall
	return p
}

// mustExit fails the test unless r is that exit code.
func mustExit(t testing.TB, r Result, code int) {
	t.Helper()
	if r.Reason != sandbox.Exited || r.Code != code {
		t.Fatalf("got %+v\nstdout %q\nstderr %q, want exit code %d", r.Exit, r.Stdout, r.Stderr, code)
	}
}

// output is what a script that must succeed prints, without the last newline.
func output(t testing.TB, s sandbox.Sandbox, script string) string {
	t.Helper()
	r := Exec(t, s, Bash(script))
	mustExit(t, r, 0)
	return strings.TrimRight(r.Stdout, "\n")
}

// times is n, and a tenth of it in short runs.
func times(n int) int {
	if testing.Short() {
		return max(n/10, 3)
	}
	return n
}

// marker is a sleep of about a day that no other process on the host has.
func marker() string {
	return fmt.Sprintf("8%04d.%06d", sequence.Add(1), os.Getpid())
}

// survivors are the host's processes with a marker among their arguments.
func survivors(marker string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(content, []byte("sleep\x00"+marker)) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// mustBeGone fails the test when a marked process is still there after a second.
func mustBeGone(t testing.TB, marker string) {
	t.Helper()
	if !eventually(time.Second, func() bool { return len(survivors(marker)) == 0 }) {
		t.Errorf("processes %v outlived their call", survivors(marker))
	}
}

// eventually polls, for what the kernel does in its own time.
func eventually(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return ok()
}

// weak says whether a field of the policy is not really enforced here.
func weak(s sandbox.Sandbox, field string) bool {
	return strings.HasPrefix(s.Info().Enforced[field], "weak")
}

// ownUserNamespace says whether ids inside are others than outside.
func ownUserNamespace(t testing.TB, s sandbox.Sandbox) bool {
	t.Helper()
	host, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		t.Fatal(err)
	}
	return output(t, s, "readlink /proc/self/ns/user") != host
}

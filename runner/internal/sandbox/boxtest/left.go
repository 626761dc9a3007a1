package boxtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// loopsOf counts the loop devices whose image lies in a data directory.
func loopsOf(dir string) int {
	n := 0
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if content, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(content), filepath.Join(dir, "sandboxes")+"/") {
			n++
		}
	}
	return n
}

// holdings are what a start may not leave behind.
type holdings struct{ loops, mounts, fds, goroutines, groups, files int }

func holdingsOf(cfg box.Config) holdings {
	h := holdings{loops: loopsOf(cfg.DataDir), goroutines: runtime.NumGoroutine()}
	h.mounts = sandboxtest.Mounts()
	fds, _ := os.ReadDir("/proc/self/fd")
	h.fds = len(fds)
	files, _ := os.ReadDir(filepath.Join(cfg.DataDir, "sandboxes"))
	h.files = len(files)
	for _, pattern := range []string{"/sys/fs/cgroup/*/bigwave/%s/*/cgroup.procs", "/sys/fs/cgroup/bigwave/%s/*/cgroup.procs"} {
		groups, _ := filepath.Glob(fmt.Sprintf(pattern, box.Owner(cfg)))
		h.groups += len(groups)
	}
	return h
}

// FailedStarts lets each step of a start fail in turn, so many times in all.
// left counts what else may not be left.
func FailedStarts(t *testing.T, make New, times int, left func(cfg box.Config) int) {
	cfg := Config(t)
	var steps []string
	note := func(step string) error { steps = append(steps, step); return nil }
	step := note
	cfg.Spares = -1
	cfg.Step = func(name string) error { return step(name) }
	Disks(&cfg, sandboxtest.Disks{WorkspaceMB: 64, ReadOnly: t.TempDir(), Writable: t.TempDir()})
	b := Make(t, make, func(c *box.Config) { *c = cfg })
	policy := sandboxtest.Policy()
	policy.FSAllowlist = append(policy.FSAllowlist, "/data", "/shared")
	try := func() error {
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "try", Policy: policy})
		if err == nil {
			err = s.Close(t.Context())
		}
		return err
	}
	if err := try(); err != nil {
		t.Fatal(err)
	}
	if len(steps) < 6 {
		t.Fatalf("the steps are %v", steps)
	}
	var before, after holdings
	var more int
	settled := func(want holdings) bool {
		for range 300 {
			if after, more = holdingsOf(cfg), left(cfg); after == want && more == 0 {
				return true
			}
			time.Sleep(10 * time.Millisecond)
		}
		return false
	}
	time.Sleep(200 * time.Millisecond)
	before = holdingsOf(cfg)
	broken := errors.New("broken for the test")
	for i := range times {
		failing := steps[i%len(steps)]
		step = func(name string) error {
			if name == failing {
				return broken
			}
			return nil
		}
		if err := try(); !errors.Is(err, broken) {
			t.Fatalf("step %s: got %v", failing, err)
		}
	}
	if !settled(before) {
		t.Errorf("before %+v, after %+v and %d more", before, after, more)
	}
	step = note
	if err := try(); err != nil {
		t.Errorf("the next start: %v", err)
	}
}

// DiskGoes looks at the host: nothing has a name, and the device is free once
// the sandbox is closed, even when it was full.
func DiskGoes(t *testing.T, make New) {
	var dir string
	b := Make(t, make, none, func(c *box.Config) { c.WorkspaceMB = 64; dir = c.DataDir })
	if !hasDisks(t, b) {
		t.Skip("no disks here")
	}
	gone := func(before int) bool {
		for end := time.Now().Add(3 * time.Second); loopsOf(dir) > before; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				return false
			}
		}
		return true
	}
	if !gone(0) {
		t.Fatal("the check's own are left")
	}
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := s.Exec(t.Context(), sandboxtest.Bash("cat /dev/zero > f")); err != nil || !e.DiskFull {
		t.Errorf("got %+v, %v", e, err)
	}
	if n := loopsOf(dir); n != 1 {
		t.Errorf("%d loop devices", n)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "sandboxes", "image-*")); len(files) != 0 {
		t.Errorf("%v have a name", files)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if !gone(0) {
		t.Errorf("%d loop devices are left", loopsOf(dir))
	}
}

// InitIsKilled is a sandbox that dies under its calls.
func InitIsKilled(t *testing.T, make New) {
	b := Make(t, make)
	s := start(t, b)
	died := newEnd()
	p := sandboxtest.Bash("sleep 60")
	started := newCounter()
	p.Started = started.one
	go func() {
		e, _ := s.Exec(t.Context(), p)
		died <- e
	}()
	started.wait(1)
	pid := box.InitPID(s)
	children := descendants(pid)
	if len(children) < 3 {
		t.Fatalf("the init and its calls are %v", children)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("Done was not closed")
	}
	if e := <-died; e.Reason != sandbox.Died {
		t.Errorf("got %+v", e)
	}
	for _, child := range children[1:] { // reaped with their pid namespace
		if exists(child) {
			t.Errorf("process %d outlived the init", child)
		}
	}
	if _, err := s.Exec(t.Context(), sandboxtest.Bash("true")); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("Exec: %v", err)
	}
}

func exists(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}

func newEnd() chan sandbox.Exit { return make(chan sandbox.Exit, 1) }

// SupervisorIsKilled takes a call's pid 1 away, and one that waits for a call.
func SupervisorIsKilled(t *testing.T, make New) {
	s := start(t, Make(t, make))
	killAll := func() {
		for _, pid := range childrenOf(box.InitPID(s)) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			for exists(pid) { // or its call could still come to its start
				time.Sleep(time.Millisecond)
			}
		}
	}
	p := sandboxtest.Bash("sleep 60")
	started := newCounter()
	p.Started = started.one
	go func() {
		started.wait(1)
		killAll()
	}()
	e, err := s.Exec(t.Context(), p)
	if err != nil || e.Reason != sandbox.Exited || e.Signal != "SIGKILL" || e.OOM {
		t.Errorf("got %+v, %v", e, err)
	}
	for range 20 {
		killAll()
		if e, err := s.Exec(t.Context(), sandboxtest.Bash("exit 3")); err != nil || e.Code != 3 {
			t.Fatalf("got %+v, %v", e, err)
		}
	}
}

// InitIsFiltered looks at every thread of a sandbox's own processes: they have
// capabilities, so a filter of theirs leaves them little to use them for.
func InitIsFiltered(t *testing.T, make New) {
	s := start(t, Make(t, make))
	for _, pid := range descendants(box.InitPID(s)) {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil || len(tasks) == 0 {
			t.Fatalf("process %d has no threads: %v", pid, err)
		}
		for _, task := range tasks {
			if status := read(t, task); !strings.Contains(status, "\nSeccomp:\t2\n") {
				t.Errorf("%s is not filtered:\n%s", task, status)
			}
		}
	}
}

// IdleMemory adds up what an idle sandbox's own processes hold: the init, a
// supervisor that waits and its call's process. most is in KiB.
func IdleMemory(t *testing.T, make New, most int) {
	s := start(t, Make(t, make, none))
	for range 50 {
		if _, err := s.Exec(t.Context(), sandboxtest.Bash("true")); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(100 * time.Millisecond)
	total, n := 0, 0
	for _, pid := range descendants(box.InitPID(s)) {
		for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/smaps_rollup", pid))) {
			if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
				var kib int
				if _, err := fmt.Sscan(rest, &kib); err != nil {
					t.Fatal(err)
				}
				total, n = total+kib, n+1
			}
		}
	}
	t.Logf("%d processes hold %d KiB", n, total)
	if n != 3 || total > most {
		t.Errorf("%d processes hold %d KiB", n, total)
	}
}

func descendants(pid int) []int {
	pids := []int{pid}
	for _, child := range childrenOf(pid) {
		pids = append(pids, descendants(child)...)
	}
	return pids
}

func childrenOf(pid int) []int {
	var pids []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range tasks {
		content, _ := os.ReadFile(file)
		for _, word := range strings.Fields(string(content)) {
			var child int
			if _, err := fmt.Sscan(word, &child); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

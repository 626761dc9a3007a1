package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/snapshots"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/boxtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd/containerdtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// plain makes a backend without spares, and says what it was made with.
func plain(t *testing.T, change ...func(*Config)) (*box.Backend, box.Config) {
	t.Helper()
	var used box.Config
	b := boxtest.Make(t, func(cfg box.Config) (*box.Backend, error) {
		cfg.Spares = -1
		used = cfg
		c := config(cfg)
		for _, f := range change {
			f(&c)
		}
		return New(c)
	})
	return b, used
}

// down kills containerd; up starts it again, at the end of the test at last.
func down(t *testing.T) (up func()) {
	t.Helper()
	daemon.Kill()
	up = sync.OnceFunc(func() {
		if err := daemon.Restart(); err != nil {
			t.Errorf("containerd does not come back: %v", err)
		}
	})
	t.Cleanup(up)
	return up
}

// eventually polls, for what others do in their own time.
func eventually(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return ok()
}

// mustLeaveNothing waits until neither containerd nor the host has anything
// of a backend whose sandboxes are closed.
func mustLeaveNothing(t *testing.T, cfg box.Config) {
	t.Helper()
	if !eventually(20*time.Second, func() bool { return left(cfg) == 0 && boxtest.Held(cfg) == "" && len(bundles()) == 0 }) {
		t.Errorf("left: %d of containerd's, %s, bundles %v, shims %v", left(cfg), boxtest.Held(cfg), bundles(), daemon.Shims())
	}
	if !eventually(10*time.Second, func() bool { return len(daemon.Shims()) == 0 }) {
		t.Errorf("shims %v are left", daemon.Shims())
	}
}

// bundles are those of containers that containerd runs.
func bundles() []string {
	found, _ := filepath.Glob(filepath.Join(daemon.Dir, "state", "io.containerd.runtime.v2.task", containerdtest.Namespace, "*"))
	return found
}

// mustWork starts one sandbox, has it do something, and closes it.
func mustWork(t *testing.T, b *box.Backend, change ...func(*sandbox.Policy)) {
	t.Helper()
	policy := sandboxtest.Policy()
	for _, c := range change {
		c(&policy)
	}
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "next", Policy: policy})
	if err != nil {
		t.Errorf("the next start: %v", err)
		return
	}
	if e := sandboxtest.Exec(t, s, sandboxtest.Bash("exit 3")); e.Code != 3 {
		t.Errorf("the next call: %+v", e.Exit)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Errorf("the next close: %v", err)
	}
}

// mustBeNamed is a failed start as people are to read it.
func mustBeNamed(t *testing.T, err error, code, says string) {
	t.Helper()
	e, ok := errors.AsType[*sandbox.StartError](err)
	if !ok {
		t.Errorf("got %v, want a start error", err)
		return
	}
	if e.Code != code || !strings.Contains(e.Message, says) {
		t.Errorf("got %s: %q (%v), want %s: …%s…", e.Code, e.Message, e.Cause, code, says)
	}
	for _, hidden := range []string{daemon.Dir, "/var/", "/run/", "/tmp/", "rpc error", "code ="} {
		if strings.Contains(e.Message, hidden) {
			t.Errorf("%q shows %s", e.Message, hidden)
		}
	}
}

// running is a call under way.
type running struct {
	out bytes.Buffer
	end chan sandbox.Exit
	err error
}

// begin starts a call and returns once its program runs.
func begin(t *testing.T, s sandbox.Sandbox, p sandbox.Process) *running {
	t.Helper()
	r := &running{end: make(chan sandbox.Exit, 1)}
	started := make(chan struct{})
	p.Stdout, p.Stderr, p.Started = &r.out, &bytes.Buffer{}, sync.OnceFunc(func() { close(started) })
	go func() {
		var e sandbox.Exit
		e, r.err = s.Exec(context.WithoutCancel(t.Context()), p)
		r.end <- e
	}()
	select {
	case <-started:
	case e := <-r.end:
		t.Fatalf("the call did not run: %+v, %v", e, r.err)
	}
	return r
}

// wait returns how the call ended and what it printed.
func (r *running) wait(t *testing.T, limit time.Duration) (sandbox.Exit, string) {
	t.Helper()
	select {
	case e := <-r.end:
		return e, r.out.String()
	case <-time.After(limit):
		t.Fatalf("the call did not end within %v", limit)
		return sandbox.Exit{}, ""
	}
}

var marks int

// mark is a length of sleep that no other process has.
func mark() string {
	marks++
	return fmt.Sprintf("7%04d.%06d", marks, os.Getpid())
}

func TestContainerdIsKilled(t *testing.T) {
	b, cfg := plain(t)
	long, late, shut := sandboxtest.Start(t, b), sandboxtest.Start(t, b), sandboxtest.Start(t, b)
	m := mark()
	call := begin(t, long, sandboxtest.Bash("echo before; until test -e go; do sleep .05; done; echo after; exit 7"))
	begin(t, shut, sandboxtest.Bash("setsid sleep "+m+" & sleep "+m))
	up := down(t)

	t.Run("the wall clock holds", func(t *testing.T) {
		p := sandboxtest.Bash("setsid sleep " + m + " & sleep " + m)
		p.Wall = time.Second
		if e := sandboxtest.Exec(t, late, p); e.Reason != sandbox.TimedOut || e.Duration > 2*time.Second {
			t.Errorf("got %+v", e.Exit)
		}
	})
	t.Run("a start says so at once", func(t *testing.T) {
		begun := time.Now()
		var wait sync.WaitGroup
		for i := range 5 {
			wait.Go(func() {
				_, err := b.Start(t.Context(), sandbox.Spec{ID: fmt.Sprint("down-", i), Policy: sandboxtest.Policy()})
				mustBeNamed(t, err, "start_failed", "containerd does not answer")
			})
		}
		wait.Wait()
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		pieces := b.Check(t.Context()).Missing()
		if len(pieces) == 0 || pieces[0].Name != "containerd" || pieces[0].Means == "" {
			t.Errorf("the report misses %+v", pieces)
		}
	})
	t.Run("a sandbox closes", func(t *testing.T) {
		begun := time.Now()
		if err := shut.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		if pids := boxtest.Running(m); len(pids) != 0 {
			t.Errorf("%v go on", pids)
		}
	})
	t.Run("calls go on", func(t *testing.T) {
		if e := sandboxtest.Exec(t, long, sandboxtest.Bash("touch go")); e.Code != 0 {
			t.Errorf("a new one: %+v", e.Exit)
		}
		if e, out := call.wait(t, 10*time.Second); e.Reason != sandbox.Exited || e.Code != 7 || out != "before\nafter\n" {
			t.Errorf("the one under way: %+v, %q", e, out)
		}
	})
	t.Run("and afterwards all is as before", func(t *testing.T) {
		up()
		mustWork(t, b)
		if e := sandboxtest.Exec(t, late, sandboxtest.Bash("exit 4")); e.Code != 4 {
			t.Errorf("got %+v", e.Exit)
		}
		for _, s := range []sandbox.Sandbox{long, late} {
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		mustLeaveNothing(t, cfg)
	})
}

// TestContainerdHangs is one that takes connections and says nothing.
func TestContainerdHangs(t *testing.T) {
	b, cfg := plain(t)
	s := sandboxtest.Start(t, b)
	resume := sync.OnceFunc(daemon.Resume)
	t.Cleanup(resume)
	daemon.Pause()
	begun := time.Now()
	_, err := b.Start(t.Context(), sandbox.Spec{ID: "hangs", Policy: sandboxtest.Policy()})
	mustBeNamed(t, err, "start_failed", "containerd does not answer")
	if e := sandboxtest.Exec(t, s, sandboxtest.Bash("exit 5")); e.Code != 5 {
		t.Errorf("got %+v", e.Exit)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("it took %v", took)
	}
	resume()
	mustWork(t, b)
	mustLeaveNothing(t, cfg)
}

// shimOf is the pid of the shim that runs a sandbox.
func shimOf(t *testing.T, s sandbox.Sandbox) int {
	t.Helper()
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", box.InitPID(s)))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')'):]))
	pid, err := strconv.Atoi(fields[2])
	if err != nil {
		t.Fatal(err)
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(name, []byte("shim")) {
		t.Fatalf("the init's parent is %q, %v", name, err)
	}
	return pid
}

func TestShimIsKilled(t *testing.T) {
	for name, alone := range map[string]bool{"with containerd there": false, "with containerd down": true} {
		t.Run(name, func(t *testing.T) {
			b, cfg := plain(t)
			s, other := sandboxtest.Start(t, b), sandboxtest.Start(t, b)
			m := mark()
			call := begin(t, s, sandboxtest.Bash("setsid sleep "+m+" & sleep "+m))
			shim := shimOf(t, s)
			up := func() {}
			if alone {
				up = down(t)
			}
			if err := syscall.Kill(shim, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if alone { // nobody ends it for us
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			select {
			case <-s.Done():
			case <-time.After(5 * time.Second):
				t.Fatal("Done was not closed")
			}
			if e, _ := call.wait(t, time.Second); e.Reason != sandbox.Died {
				t.Errorf("got %+v", e)
			}
			if pids := boxtest.Running(m); len(pids) != 0 {
				t.Errorf("%v go on", pids)
			}
			if e := sandboxtest.Exec(t, other, sandboxtest.Bash("exit 6")); e.Code != 6 {
				t.Errorf("another sandbox: %+v", e.Exit)
			}
			up()
			for _, s := range []sandbox.Sandbox{s, other} {
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			mustLeaveNothing(t, cfg)
			mustWork(t, b)
		})
	}
}

// client is one of the tests' own, with a context in the namespace.
func client(t testing.TB) (context.Context, *containerd.Client) {
	t.Helper()
	c, err := daemon.Client()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return namespaces.WithNamespace(context.WithoutCancel(t.Context()), containerdtest.Namespace), c
}

// TestSweepTakesOnlyItsOwn puts others' things beside ours.
func TestSweepTakesOnlyItsOwn(t *testing.T) {
	ctx, c := client(t)
	theirs, _ := plain(t)
	living := sandboxtest.Start(t, theirs)
	others := map[string]map[string]string{
		"sweep-other":   {ownerLabel: "somebody-else"},
		"sweep-nobody":  nil,
		"box-abcdefg-1": nil, // as ours are named
	}
	names := c.SnapshotService(daemon.Snapshotter)
	for name, labels := range others {
		// Without a root label the collector would take the snapshot, not we.
		kept := map[string]string{gcRootLabel: time.Now().UTC().Format(time.RFC3339)}
		for k, v := range labels {
			kept[k] = v
		}
		if _, err := names.Prepare(ctx, name, "", snapshots.WithLabels(kept)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = names.Remove(ctx, name) })
		if _, err := c.ContainerService().Create(ctx, bare(name, labels)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.ContainerService().Delete(ctx, name) })
	}
	b, cfg := plain(t)
	if _, err := names.Prepare(ctx, "sweep-ours", "", snapshots.WithLabels(map[string]string{ownerLabel: box.Owner(cfg), gcRootLabel: "x"})); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ContainerService().Create(ctx, bare("sweep-ours", map[string]string{ownerLabel: box.Owner(cfg)})); err != nil {
		t.Fatal(err)
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := left(cfg); n != 0 {
		t.Errorf("%d of ours are left", n)
	}
	for name := range others {
		if _, err := c.ContainerService().Get(ctx, name); err != nil {
			t.Errorf("another's container %s: %v", name, err)
		}
		if _, err := names.Stat(ctx, name); err != nil {
			t.Errorf("another's snapshot %s: %v", name, err)
		}
	}
	if e := sandboxtest.Exec(t, living, sandboxtest.Bash("exit 8")); e.Code != 8 {
		t.Errorf("another runner's sandbox: %+v", e.Exit)
	}
}

// TestSweepBesideRemovals sweeps while the sandboxes that were just closed, as
// those of Check are, still go.
func TestSweepBesideRemovals(t *testing.T) {
	b, cfg := plain(t)
	for range 10 {
		var starts [3]sandbox.Sandbox
		for i := range starts {
			starts[i] = sandboxtest.Start(t, b)
		}
		for _, s := range starts {
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := b.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := left(cfg); n != 0 {
			t.Errorf("%d are left", n)
		}
	}
}

func bare(name string, labels map[string]string) containers.Container {
	return containers.Container{ID: name, Labels: labels, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}, Snapshotter: daemon.Snapshotter, SnapshotKey: name, Spec: anything{}}
}

// anything is a specification that nobody runs.
type anything struct{}

func (anything) GetTypeUrl() string { return "test" }
func (anything) GetValue() []byte   { return []byte("{}") }

// TestManyCallsAtOnce closes a sandbox under very many calls, each with a
// child that outlives it, while containerd goes and comes back.
func TestManyCallsAtOnce(t *testing.T) {
	calls := 200
	if testing.Short() {
		calls = 40
	}
	b, cfg := plain(t)
	s := sandboxtest.Start(t, b, func(p *sandbox.Policy) { p.PIDsLimit, p.MemoryMB = 4096, 1024 })
	m := mark()
	var wait sync.WaitGroup
	reasons := make([]sandbox.Reason, calls)
	var up sync.WaitGroup
	for i := range calls {
		script := "setsid sleep " + m + " & sleep " + m
		if i%2 == 0 {
			script = "setsid sleep " + m + " & exit 0"
		}
		p := sandboxtest.Bash(script)
		p.Stdout, p.Stderr = &bytes.Buffer{}, &bytes.Buffer{}
		up.Add(1)
		p.Started = sync.OnceFunc(up.Done)
		wait.Go(func() {
			e, err := s.Exec(t.Context(), p)
			if err != nil {
				t.Errorf("call %d: %v", i, err)
				p.Started()
			}
			reasons[i] = e.Reason
		})
	}
	up.Wait()
	restart := down(t)
	begun := time.Now()
	closed := make(chan error, 1)
	go func() { closed <- s.Close(context.WithoutCancel(t.Context())) }()
	restart()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	wait.Wait()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v", took)
	} else {
		t.Logf("closed under %d calls in %v", calls, took.Round(time.Millisecond))
	}
	if pids := boxtest.Running(m); len(pids) != 0 {
		t.Errorf("%v go on", pids)
	}
	for i, r := range reasons {
		if r != sandbox.Died && (i%2 == 1 || r != sandbox.Exited) {
			t.Errorf("call %d ended %s", i, r)
		}
	}
	mustLeaveNothing(t, cfg)
	mustWork(t, b)
}

// TestManyRestarts is a runner that starts again and again, sometimes without
// having closed what it had.
func TestManyRestarts(t *testing.T) {
	const boxes = 5
	times := 20
	if testing.Short() {
		times = 6
	}
	cfg := boxtest.Config(t)
	cfg.Spares = -1
	fds := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	var counts []int
	for i := range times {
		b, err := backend(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := left(cfg); n != 0 {
			t.Fatalf("%d are left of the last time", n)
		}
		var wait sync.WaitGroup
		for j := range boxes {
			wait.Go(func() {
				s, err := b.Start(t.Context(), sandbox.Spec{ID: fmt.Sprint("x", j), Policy: sandboxtest.Policy()})
				if err != nil {
					t.Errorf("start: %v", err)
					return
				}
				var out bytes.Buffer
				p := sandboxtest.Bash("echo up")
				p.Stdout, p.Stderr = &out, &out
				if e, err := s.Exec(t.Context(), p); err != nil || out.String() != "up\n" {
					t.Errorf("got %+v, %v, %q", e, err, out.String())
				}
			})
		}
		wait.Wait()
		ctx := context.WithoutCancel(t.Context())
		up := func() {}
		if i%3 == 2 { // it can't remove its containers, and leaves them to the next
			up = down(t)
			short, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			ctx = short
		}
		if err := b.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		up()
		if n := left(cfg); (n > 0) != (i%3 == 2) {
			t.Errorf("start %d left %d", i, n)
		}
		counts = append(counts, fds())
	}
	// What the process itself opens, it has opened by the second time.
	if first, last := counts[1], counts[len(counts)-1]; last > first+2 {
		t.Errorf("descriptors grow: %v", counts)
	}
	b, err := backend(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.Sweep(t.Context()), b.Close(t.Context())); err != nil {
		t.Error(err)
	}
	mustLeaveNothing(t, cfg)
}

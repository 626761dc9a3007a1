package subprocess

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

func TestDisks(t *testing.T) {
	sandboxtest.RunDisks(t, func(t *testing.T, d sandboxtest.Disks) sandbox.Backend {
		return newBackend(t, func(c *Config) {
			offerDisks(c, d)
			if os.Geteuid() != 0 {
				c.AllowWeak = []string{"memory", "pids", "cpu"}
			}
		})
	})
}

func offerDisks(c *Config, d sandboxtest.Disks) {
	c.WorkspaceMB = d.WorkspaceMB
	c.Mounts = []Mount{{Host: d.ReadOnly, Path: "/data"}, {Host: d.Writable, Path: "/shared", Writable: true}}
}

// TestDisksInMemory is a root without loop devices, as in many containers.
func TestDisksInMemory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("an ordinary user has only that")
	}
	sandboxtest.RunDisks(t, func(t *testing.T, d sandboxtest.Disks) sandbox.Backend {
		b := newBackend(t, func(c *Config) { offerDisks(c, d) })
		b.disks, b.noDisks = nil, errors.New("no loop devices")
		if p := b.checkDisk(); p.State != "weak" || p.Means == "" || p.Fatal {
			t.Errorf("got %+v", p)
		}
		return b
	})
}

func TestMountsAreRefused(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "real")
	if err := os.Mkdir(real, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{
		"/:/data:ro", "/etc:/data:ro", "/etc/ssl:/data:ro", "/proc:/data:ro", "/sys/fs:/data:ro", "/dev/shm:/data:rw", "/run:/data:ro", "/var/run/x:/data:ro",
		dir + "/link:/data:ro", dir + "/none:/data:ro", dir + "/file:/data:ro", dir + "/data/sandboxes:/data:ro", dir + ":/data:ro",
		real + ":/:ro", real + ":/etc:ro", real + ":/usr/x:ro", real + ":/workspace:rw", real + ":/workspace/x:rw", real + ":/tmp/x:rw", real + ":/proc:ro", real + ":/var:ro", real + ":/lib64/x:ro",
		real + "/:/data:ro", real + ":/data", real + ":/data:rx", "real:/data:ro", real + ":data:ro", real + ":/a/../b:ro", real + ":/data:ro:x",
	} {
		m, err := ParseMount(s)
		if err != nil {
			continue
		}
		cfg := config(t)
		cfg.DataDir, cfg.Mounts = filepath.Join(dir, "data"), []Mount{m}
		if b, err := New(cfg); err == nil {
			t.Errorf("%s was taken", s)
			_ = b.Close(context.Background())
		}
	}
	cfg := config(t)
	cfg.Mounts = []Mount{{Host: real, Path: "/data"}, {Host: real, Path: "/data/x"}}
	if b, err := New(cfg); err == nil {
		t.Error("two mounts that overlap were taken")
		_ = b.Close(context.Background())
	}
}

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

func (b *Backend) holdings() holdings {
	h := holdings{loops: loopsOf(b.cfg.DataDir), goroutines: runtime.NumGoroutine()}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	h.mounts = strings.Count(string(mounts), "\n")
	fds, _ := os.ReadDir("/proc/self/fd")
	h.fds = len(fds)
	files, _ := os.ReadDir(filepath.Join(b.cfg.DataDir, "sandboxes"))
	h.files = len(files)
	for _, pattern := range []string{"/sys/fs/cgroup/*/bigwave/%s/*/cgroup.procs", "/sys/fs/cgroup/bigwave/%s/*/cgroup.procs"} {
		groups, _ := filepath.Glob(fmt.Sprintf(pattern, ownCgroup(b.cfg)))
		h.groups += len(groups)
	}
	return h
}

// TestFailedStartsLeaveNothing lets each step of a start fail in turn.
func TestFailedStartsLeaveNothing(t *testing.T) {
	data, shared := t.TempDir(), t.TempDir()
	b := newBackend(t, func(c *Config) {
		c.Spares = -1
		offerDisks(c, sandboxtest.Disks{WorkspaceMB: 64, ReadOnly: data, Writable: shared})
		if os.Geteuid() != 0 {
			c.AllowWeak = []string{"memory", "pids", "cpu"}
		}
	})
	policy := sandboxtest.Policy()
	policy.FSAllowlist = append(policy.FSAllowlist, "/data", "/shared")
	try := func() error {
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "try", Policy: policy})
		if err == nil {
			err = s.Close(t.Context())
		}
		return err
	}
	var steps []string
	b.step = func(step string) error { steps = append(steps, step); return nil }
	if err := try(); err != nil {
		t.Fatal(err)
	}
	if len(steps) < 6 {
		t.Fatalf("the steps are %v", steps)
	}
	var before, after holdings
	settled := func(want holdings) bool {
		for range 300 {
			if after = b.holdings(); after == want {
				return true
			}
			time.Sleep(10 * time.Millisecond)
		}
		return false
	}
	time.Sleep(200 * time.Millisecond)
	before = b.holdings()
	broken := errors.New("broken for the test")
	for i := range 200 {
		failing := steps[i%len(steps)]
		b.step = func(step string) error {
			if step == failing {
				return broken
			}
			return nil
		}
		if err := try(); !errors.Is(err, broken) {
			t.Fatalf("step %s: got %v", failing, err)
		}
	}
	if !settled(before) {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// TestDiskGoesWithItsSandbox looks at the host: nothing has a name, and the
// device is free once the sandbox is closed, even when it was full.
func TestDiskGoesWithItsSandbox(t *testing.T) {
	b := newBackend(t, func(c *Config) { c.Spares = -1; c.WorkspaceMB = 64 })
	if b.disks == nil {
		t.Skipf("no disks here: %v", b.noDisks)
	}
	loops := func() int { return loopsOf(b.cfg.DataDir) }
	before := loops()
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := s.Exec(t.Context(), sandboxtest.Bash("cat /dev/zero > f")); err != nil || !e.DiskFull {
		t.Errorf("got %+v, %v", e, err)
	}
	if n := loops(); n != before+1 {
		t.Errorf("%d loop devices, %d before", n, before)
	}
	if h := b.holdings(); h.files != 0 {
		t.Errorf("%d files have a name", h.files)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for end := time.Now().Add(3 * time.Second); loops() > before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if n := loops(); n > before {
		t.Errorf("%d loop devices are left", n-before)
	}
}

// BenchmarkStart is a session's start with a spare ready, with and without
// mounts to attach.
func BenchmarkStart(b *testing.B) {
	data, shared := b.TempDir(), b.TempDir()
	for name, list := range map[string][]string{"plain": {"/workspace"}, "with mounts": {"/workspace", "/data", "/shared"}} {
		b.Run(name, func(b *testing.B) {
			backend := newBackend(b, func(c *Config) {
				offerDisks(c, sandboxtest.Disks{WorkspaceMB: 1024, ReadOnly: data, Writable: shared})
			})
			backend.fill()
			policy := sandboxtest.Policy()
			policy.FSAllowlist = list
			var starts []time.Duration
			for b.Loop() {
				backend.filling.Wait()
				begin := time.Now()
				s, err := backend.Start(b.Context(), sandbox.Spec{ID: "bench", Policy: policy})
				if err != nil {
					b.Fatal(err)
				}
				starts = append(starts, time.Since(begin))
				if err := s.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(median(starts), "start-µs")
		})
	}
}

// BenchmarkDisk is what a workspace costs, apart from the rest of a sandbox;
// the spare sandbox pays for it ahead of time.
func BenchmarkDisk(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("only root has disks")
	}
	d, err := newDisks(b.TempDir(), 1024)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		mount, err := d.make("bench", 1000, nil)
		if err != nil {
			b.Fatal(err)
		}
		closeFDs([]int{mount})
	}
}

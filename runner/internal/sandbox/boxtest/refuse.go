package boxtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// Kernels starts sandboxes on kernels that lack parts of the fence.
func Kernels(t *testing.T, make New) {
	t.Run("no filters", func(t *testing.T) { noFilters(t, make) })
	t.Run("a filter that the kernel does not take", func(t *testing.T) {
		b := Make(t, make, func(c *box.Config) {
			c.Kernel = &box.Kernel{Filter: []byte{0xff, 0xff, 0, 0, 0, 0, 0, 0}}
		})
		if s, err := b.Start(t.Context(), sandbox.Spec{ID: "bad", Policy: sandboxtest.Policy()}); err == nil {
			t.Errorf("started: %+v", s.Info())
		}
	})
	t.Run("Landlock", func(t *testing.T) { landlock(t, make) })
	t.Run("parts left out", func(t *testing.T) { leftOut(t, make) })
}

func noFilters(t *testing.T, make New) {
	why := errors.New("no filters")
	b := Make(t, make, none, func(c *box.Config) {
		c.Kernel = &box.Kernel{FilterErr: why, Landlock: box.ThisKernel().Landlock}
	})
	_, err := b.Start(t.Context(), sandbox.Spec{ID: "open", Policy: sandboxtest.Policy()})
	if e, ok := errors.AsType[*sandbox.StartError](err); !ok || e.Code != "start_failed" || !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	missing := map[string]bool{}
	for _, p := range b.Check(t.Context()).Missing() {
		missing[p.Name] = p.Means != ""
	}
	if !missing["seccomp"] || !missing["system call filter in force"] {
		t.Errorf("the report misses only %v", missing)
	}
}

func landlock(t *testing.T, make New) {
	here := box.ThisKernel()
	for name, c := range map[string]struct {
		abi     int
		require []string
		starts  bool
	}{
		"absent":                       {0, nil, true},
		"absent and required":          {0, []string{"landlock"}, false},
		"as the kernel has it":         {here.Landlock, nil, true},
		"the first ABI that is of use": {min(here.Landlock, box.LeastLandlock), nil, true},
		"as of Linux 6.2":              {min(here.Landlock, 3), nil, true},
		"as of Linux 6.10":             {min(here.Landlock, 5), nil, true},
	} {
		b := Make(t, make, none, func(cfg *box.Config) {
			cfg.Require = c.require
			cfg.Kernel = &box.Kernel{Filter: here.Filter, FilterErr: here.FilterErr, Landlock: c.abi}
		})
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
		if (err == nil) != c.starts {
			t.Errorf("%s: got %v", name, err)
		}
		if err == nil {
			const script = "mkdir a b && echo x > a/f && mv a/f b/g && : > b/g && cat /etc/passwd > /dev/null && echo x > /tmp/f && echo 0 > /proc/self/oom_score_adj && echo open"
			r := sandboxtest.Exec(t, s, sandboxtest.Bash(script))
			if open := r.Stdout == "open\n"; open != (c.abi == 0) {
				t.Errorf("%s: got %q, %+v, %s", name, r.Stdout, r.Exit, r.Stderr)
			}
			if r := sandboxtest.Exec(t, s, sandboxtest.Bash("test -e b/g && test -e /tmp/f")); r.Code != 0 {
				t.Errorf("%s: what is allowed did not work", name)
			}
		}
		if p := piece(t, b, "landlock"); (c.abi == 0) != (p.State == "missing") || p.Fatal != (c.require != nil) {
			t.Errorf("%s: got %+v", name, p)
		}
	}
}

// leftOut: a backend that is for measuring can't pass for one that holds its
// fence.
func leftOut(t *testing.T, make New) {
	b := Make(t, make, none, func(c *box.Config) { c.Without = []string{"seccomp", "landlock", "disk"} })
	for name, want := range map[string]string{"system call filter in force": "missing", "landlock": "missing", "workspace disk": "weak"} {
		if got := piece(t, b, name).State; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if len(b.Check(t.Context()).Missing()) == 0 {
		t.Error("a runner would start with it")
	}
}

// Room lets the host's disk run out under a backend.
func Room(t *testing.T, make New) {
	var has box.Space
	var gone error
	b := Make(t, make, func(c *box.Config) {
		c.WorkspaceMB = 2048
		c.Space = func(string) (box.Space, error) { return has, gone }
	})
	if !hasDisks(t, b) {
		t.Skip("no disks here")
	}
	const gib = 1 << 30
	for name, c := range map[string]struct {
		has  box.Space
		want bool
	}{
		"plenty":                          {box.Space{Free: 10 * gib, Total: 100 * gib}, true},
		"just enough":                     {box.Space{Free: 2 * gib, Total: 100 * gib}, true},
		"less than a workspace":           {box.Space{Free: 2*gib - 1, Total: 10 * gib}, false},
		"less than a fiftieth":            {box.Space{Free: 19 * gib, Total: 1000 * gib}, false},
		"a fiftieth":                      {box.Space{Free: 20 * gib, Total: 1000 * gib}, true},
		"nothing, on a disk of no size":   {box.Space{}, false},
		"a workspace, on a disk as small": {box.Space{Free: 2 * gib, Total: 2 * gib}, true},
	} {
		has = c.has
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
		if err == nil {
			err = s.Close(t.Context())
			if !c.want {
				t.Errorf("%s: it started", name)
			}
		}
		if e, ok := errors.AsType[*sandbox.StartError](err); !c.want && (!ok || e.Code != "capacity" || e.Message == "") || c.want && err != nil {
			t.Errorf("%s: got %v", name, err)
		}
		if p := piece(t, b, "disk room"); (p.State == "ok") != c.want || (p.Means == "") != c.want || !p.Fatal {
			t.Errorf("%s: got %+v", name, p)
		}
	}
	gone = errors.New("gone")
	if _, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()}); !errors.Is(err, gone) {
		t.Errorf("a disk that can't be asked: %v", err)
	}
}

// AtOnce counts the sandboxes that are in the making together.
func AtOnce(t *testing.T, make New) {
	const most = 2
	var now, peak atomic.Int64
	b := Make(t, make, none, func(c *box.Config) {
		c.AtOnce = most
		c.Step = func(step string) error {
			if step == "cgroup" {
				n := now.Add(1)
				for p := peak.Load(); n > p && !peak.CompareAndSwap(p, n); p = peak.Load() {
				}
				time.Sleep(20 * time.Millisecond)
				now.Add(-1)
			}
			return nil
		}
	})
	var starts errgroup.Group
	for i := range 8 {
		starts.Go(func() error {
			s, err := b.Start(t.Context(), sandbox.Spec{ID: fmt.Sprint("x", i), Policy: sandboxtest.Policy()})
			if err != nil {
				return err
			}
			return s.Close(t.Context())
		})
	}
	if err := starts.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := peak.Load(); n != most {
		t.Errorf("%d at once, want %d", n, most)
	}
}

// OneOwner is two backends with one data directory.
func OneOwner(t *testing.T, make New) {
	cfg := Config(t)
	b := Make(t, make, func(c *box.Config) { *c = cfg })
	if _, err := make(cfg); err == nil {
		t.Fatal("two backends share a data directory")
	}
	if err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	Make(t, make, func(c *box.Config) { *c = cfg })
}

// Mounts are those that no operator may offer.
func Mounts(t *testing.T, make New) {
	dir := t.TempDir()
	real := filepath.Join(dir, "real")
	if err := errors.Join(os.Mkdir(real, 0o755), os.Symlink(real, filepath.Join(dir, "link")), os.WriteFile(filepath.Join(dir, "file"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	taken := func(cfg box.Config) bool {
		b, err := make(cfg)
		if err == nil {
			_ = b.Close(t.Context())
		}
		return err == nil
	}
	for _, s := range []string{
		"/:/data:ro", "/etc:/data:ro", "/etc/ssl:/data:ro", "/proc:/data:ro", "/sys/fs:/data:ro", "/dev/shm:/data:rw", "/run:/data:ro", "/var/run/x:/data:ro",
		dir + "/link:/data:ro", dir + "/none:/data:ro", dir + "/file:/data:ro", dir + "/data/sandboxes:/data:ro", dir + ":/data:ro",
		real + ":/:ro", real + ":/etc:ro", real + ":/usr/x:ro", real + ":/workspace:rw", real + ":/workspace/x:rw", real + ":/tmp/x:rw", real + ":/proc:ro", real + ":/var:ro", real + ":/lib64/x:ro",
		real + "/:/data:ro", real + ":/data", real + ":/data:rx", "real:/data:ro", real + ":data:ro", real + ":/a/../b:ro", real + ":/data:ro:x",
	} {
		m, err := box.ParseMount(s)
		if err != nil {
			continue
		}
		cfg := Config(t)
		cfg.DataDir, cfg.Mounts = filepath.Join(dir, "data"), []box.Mount{m}
		if taken(cfg) {
			t.Errorf("%s was taken", s)
		}
	}
	cfg := Config(t)
	cfg.Mounts = []box.Mount{{Host: real, Path: "/data"}, {Host: real, Path: "/data/x"}}
	if taken(cfg) {
		t.Error("two mounts that overlap were taken")
	}
}

package sandboxtest

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func testLife(t *testing.T, b sandbox.Backend) {
	t.Run("refuses what it can't enforce", func(t *testing.T) {
		for field, change := range map[string]func(*sandbox.Policy){
			"fs_allowlist":      func(p *sandbox.Policy) { p.FSAllowlist = []string{"/workspace", "/no/such/mount"} },
			"network_allowlist": func(p *sandbox.Policy) { p.NetworkAllowlist = []string{"ok.test:443", "*:443"} },
			"base_image":        func(p *sandbox.Policy) { p.BaseImage = "no/such-image:1" },
		} {
			policy := Policy()
			change(&policy)
			_, err := b.Start(t.Context(), sandbox.Spec{ID: "refused", Policy: policy})
			e, ok := errors.AsType[*sandbox.StartError](err)
			code := "policy_unenforceable"
			if ok && field == "base_image" && e.Code == "image_unavailable" { // where there are others
				code = e.Code
			}
			if !ok || e.Code != code || e.Field != field || e.Message == "" {
				t.Errorf("%s: got %v", field, err)
			}
		}
	})
	t.Run("says what it is", func(t *testing.T) {
		info := Start(t, b).Info()
		if info.Backend == "" || info.Isolation == "" {
			t.Errorf("got %+v", info)
		}
		for _, field := range []string{"memory_mb", "pids_limit", "cpu_shares", "base_image", "fs_allowlist", "network_allowlist"} {
			if info.Enforced[field] == "" {
				t.Errorf("it does not say how it enforces %s", field)
			}
		}
	})
	t.Run("reports its pieces", func(t *testing.T) {
		r := b.Check(t.Context())
		if len(r.Pieces) < 5 || len(r.Missing()) > 0 {
			t.Errorf("got %+v", r)
		}
		for _, p := range r.Pieces {
			if p.Name == "" || p.State != "ok" && p.State != "weak" && p.State != "missing" {
				t.Errorf("got %+v", p)
			}
			if p.State != "ok" && p.Means == "" {
				t.Errorf("%s is %s and it does not say what to do", p.Name, p.State)
			}
		}
	})
	t.Run("close", func(t *testing.T) {
		s := Start(t, b)
		mark := marker()
		died := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, Bash("echo x; setsid sleep "+mark+" & sleep "+mark))
			died <- r
		}()
		eventually(3*time.Second, func() bool { return len(survivors(mark)) == 2 })
		begin := time.Now()
		if err := s.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
		if got := survivors(mark); len(got) > 0 {
			t.Errorf("processes %v outlived Close", got)
		}
		if r := <-died; r.Reason != sandbox.Died || r.Stdout != "x\n" {
			t.Errorf("got %+v, %q", r.Exit, r.Stdout)
		}
		select {
		case <-s.Done():
		default:
			t.Error("Done is not closed")
		}
		if _, err := exec(t.Context(), s, Bash("true")); !errors.Is(err, sandbox.ErrClosed) {
			t.Errorf("Exec after Close: %v", err)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
	t.Run("hostile leftovers", func(t *testing.T) {
		s := Start(t, b)
		mustExit(t, Exec(t, s, within(60*time.Second, Python(`
import os
os.chdir("/workspace")
os.mkfifo("fifo")
os.symlink("/", "root")
os.symlink("/etc/passwd", "-rf")
open(b"bad\xff\n", "w").close()
os.makedirs("shut/in"); open("shut/in/f", "w").close()
os.symlink("/etc/hosts", "shut/in/link"); os.chmod("shut/in", 0); os.chmod("shut", 0)
for i in range(2000): open("f%d" % i, "w").close()
for i in range(3000):
    os.mkdir("deep"); os.chdir("deep")
`))), 0)
		begin := time.Now()
		if err := s.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
	})
	t.Run("many starts at once", func(t *testing.T) {
		var wait sync.WaitGroup
		for range times(12) {
			wait.Go(func() {
				s := Start(t, b)
				r, err := exec(t.Context(), s, Bash("echo ok"))
				if err != nil || r.Stdout != "ok\n" {
					t.Errorf("got %+v, %v", r.Exit, err)
				}
				if err := s.Close(context.Background()); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
		}
		wait.Wait()
	})
	t.Run("nothing piles up", func(t *testing.T) { testFlat(t, b) })
}

// testFlat makes many calls, hostile ones among them, and counts before and after.
func testFlat(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	mix := []sandbox.Process{
		Bash("true"), Bash("exit 3"), Bash("setsid sleep 60 & exit 0"), within(10*time.Millisecond, Bash("sleep 5")),
		read("missing", plenty), write("f", "x"), fromFile(Bash("echo x")), Bash("head -c 200000 /dev/zero"), Bash("kill -9 $$"),
	}
	round := func(n int) {
		for i := range n {
			if _, err := exec(t.Context(), s, mix[i%len(mix)]); err != nil {
				t.Fatal(err)
			}
		}
	}
	round(20)
	before := counts()
	round(times(200))
	var wait sync.WaitGroup
	for range 16 {
		wait.Go(func() {
			for i := range 5 {
				_, _ = exec(t.Context(), s, mix[i])
			}
		})
	}
	wait.Wait()
	var after usage
	if !eventually(3*time.Second, func() bool { after = counts(); return after.within(before) }) {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// usage is what must not grow with calls.
type usage struct {
	fds, goroutines, mounts, zombies int
}

func counts() usage {
	u := usage{goroutines: runtime.NumGoroutine()}
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		u.fds = len(entries)
	}
	u.mounts = Mounts()
	u.zombies = zombies()
	return u
}

// Mounts counts the host's, without the roots of anybody's containers.
func Mounts() int {
	content, _ := os.ReadFile("/proc/self/mountinfo")
	n := 0
	for line := range strings.Lines(string(content)) {
		if !strings.Contains(line, "containerd") {
			n++
		}
	}
	return n
}

// zombies are this process's own.
func zombies() int {
	n := 0
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		content, err := os.ReadFile("/proc/" + entry.Name() + "/stat")
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(content), ") ")
		if strings.HasPrefix(rest, "Z "+itoa(os.Getpid())+" ") {
			n++
		}
	}
	return n
}

func (u usage) within(before usage) bool {
	return u.fds <= before.fds+1 && u.goroutines <= before.goroutines+1 && u.mounts <= before.mounts && u.zombies <= before.zombies
}

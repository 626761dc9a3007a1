package sandboxtest

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func replace(script, mark string) string { return strings.ReplaceAll(script, "MARK", mark) }

func contains(s, part string) bool { return strings.Contains(s, part) }

// bomb doubles until it is stopped, whatever order its processes run in.
const bomb = "f() { f & f & sleep 60; }; f"

func testLimits(t *testing.T, b sandbox.Backend) {
	t.Run("memory", func(t *testing.T) { testMemory(t, b) })
	t.Run("pids", func(t *testing.T) { testPIDs(t, b) })
	t.Run("sockets do not get around the memory limit", func(t *testing.T) { testSocketMemory(t, b) })
	t.Run("usage", func(t *testing.T) { testUsage(t, b) })
	t.Run("tmpfs does not get around the memory limit", func(t *testing.T) {
		s := Start(t, b, func(p *sandbox.Policy) { p.MemoryMB = 64 })
		for _, dir := range []string{"/tmp", "/dev/shm"} {
			r := Exec(t, s, within(20*time.Second, Bash("head -c 200M /dev/zero > "+dir+"/x; s=$?; rm -f "+dir+"/x; exit $s")))
			if r.Code == 0 && r.Signal == "" {
				t.Errorf("200 MB went into %s", dir)
			}
			mustExit(t, Exec(t, s, Bash("true")), 0)
		}
		r := Exec(t, s, within(60*time.Second, Bash("i=0; while : > /tmp/f$i; do i=$((i+1)); [ $i -lt 100000 ] || exit 9; done 2>/dev/null; rm -rf /tmp/f*; exit 0")))
		if r.Code == 9 {
			t.Error("there is no end to empty files in /tmp")
		}
	})
	t.Run("the smallest memory limit", func(t *testing.T) {
		s := Start(t, b, func(p *sandbox.Policy) { p.MemoryMB = 16 })
		if weak(s, "memory_mb") {
			t.Skip("weak here")
		}
		mustExit(t, Exec(t, s, Bash("true")), 0)
		for range 3 {
			r := Exec(t, s, within(20*time.Second, Python("x = bytearray(100 << 20)")))
			if !r.OOM {
				t.Errorf("got %+v", r.Exit)
			}
		}
		mustExit(t, Exec(t, s, Bash("true")), 0)
	})
}

func testMemory(t *testing.T, b sandbox.Backend) {
	s := Start(t, b, func(p *sandbox.Policy) { p.MemoryMB = 64 })
	if weak(s, "memory_mb") {
		r := Exec(t, s, within(20*time.Second, Python("x = bytearray(200 << 20)")))
		if r.Code == 0 {
			t.Error("not even a weak limit")
		}
		return
	}
	const eat = "x = bytearray(200 << 20)"
	for name, c := range map[string]struct {
		p     sandbox.Process
		exits bool // the main process goes on and exits 0
	}{
		"main":      {Python("import time\nprint('up', flush=True)\n" + eat), false},
		"at once":   {inArgv(Python(eat)), false},
		"a child":   {Bash("python3 -c '" + eat + "'; exit 0"), true},
		"an orphan": {Bash("(setsid sh -c \"python3 -c '" + eat + "'; touch done\" &); while ! [ -e done ]; do sleep 0.01; done; rm done; exit 0"), true},
		"in pieces": {Python("x = []\nwhile True:\n    x.append(bytearray(1 << 20))"), false},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range times(10) {
				r := Exec(t, s, within(20*time.Second, c.p))
				if !r.OOM || r.OOMKills < 1 || r.Reason != sandbox.Exited {
					t.Fatalf("run %d: got %+v, %q", i, r.Exit, r.Stderr)
				}
				if c.exits != (r.Code == 0) {
					t.Errorf("run %d: got %+v", i, r.Exit)
				}
				if r.MemoryPeak > 64<<20 || r.MemoryPeak < 48<<20 {
					t.Errorf("run %d: the peak is %d", i, r.MemoryPeak)
				}
			}
			mustExit(t, Exec(t, s, Bash("true")), 0)
		})
	}
	t.Run("a kill of ours is not the limit's", func(t *testing.T) {
		const hold = "x = bytearray(10 << 20)\nimport time\ntime.sleep(60)"
		r := Exec(t, s, within(500*time.Millisecond, Python(hold)))
		if r.Reason != sandbox.TimedOut || r.OOM || r.OOMKills != 0 {
			t.Errorf("timeout: got %+v", r.Exit)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		r, err := exec(ctx, s, Python(hold))
		if err != nil || r.Reason != sandbox.Killed || r.OOM {
			t.Errorf("cancel: got %+v, %v", r.Exit, err)
		}
		r = Exec(t, s, Bash("kill -9 $$"))
		if r.OOM || r.Signal != "SIGKILL" {
			t.Errorf("its own: got %+v", r.Exit)
		}
	})
	t.Run("side by side the killed one is blamed", func(t *testing.T) {
		var wait sync.WaitGroup
		var calm Result
		wait.Go(func() { calm, _ = exec(t.Context(), s, Bash("while ! [ -e over ]; do sleep 0.05; done; exit 0")) })
		time.Sleep(100 * time.Millisecond)
		r := Exec(t, s, Python(eat))
		mustExit(t, Exec(t, s, Bash("touch over")), 0)
		wait.Wait()
		if !r.OOM || r.Signal != "SIGKILL" {
			t.Errorf("the killed one: got %+v", r.Exit)
		}
		if calm.OOM || calm.OOMKills < 1 || calm.Code != 0 {
			t.Errorf("the other: got %+v", calm.Exit)
		}
	})
}

func testPIDs(t *testing.T, b sandbox.Backend) {
	limit := func(p *sandbox.Policy) { p.PIDsLimit = 32 }
	s, other := Start(t, b, limit), Start(t, b, limit)
	if weak(s, "pids_limit") {
		r := Exec(t, s, within(2*time.Second, Bash("for i in $(seq 200); do sleep 1 & done; wait; exit 0")))
		if r.Code == 0 && !contains(r.Stderr, "Resource temporarily unavailable") {
			t.Error("not even a weak limit")
		}
		mustExit(t, Exec(t, s, Bash("true")), 0)
		return
	}
	t.Run("exactly its own", func(t *testing.T) {
		for range 3 {
			r := Exec(t, s, within(20*time.Second, Python(`
import os, time
n = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        n += 1
except OSError:
    print(n)
`)))
			if !r.PIDsHit || r.Stdout != "32\n" {
				t.Errorf("got %+v, %q, want 32 processes", r.Exit, r.Stdout)
			}
		}
		r := Exec(t, s, within(20*time.Second, Bash("for i in $(seq 20); do sleep 0.01 & done; wait")))
		if r.PIDsHit || r.Code != 0 {
			t.Errorf("below the limit: got %+v, %q", r.Exit, r.Stderr)
		}
	})
	t.Run("bombs", func(t *testing.T) {
		for _, p := range []sandbox.Process{
			within(3*time.Second, Bash(bomb)),
			within(time.Second, Bash(":(){ :|:& };:; while :; do sleep 0.1; done")),
			within(3*time.Second, Python("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass")),
			within(3*time.Second, Python("import threading, time\ntry:\n    for _ in range(10000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nexcept RuntimeError as e:\n    print(e)")),
		} {
			begin := time.Now()
			r := Exec(t, s, p)
			if !r.PIDsHit && !contains(string(p.Script), ":|:") { // this one may burn out
				t.Errorf("got %+v, %.200q", r.Exit, r.Stderr)
			}
			if took := time.Since(begin); took > p.Wall+time.Second {
				t.Errorf("took %v", took)
			}
			mustExit(t, Exec(t, s, within(5*time.Second, Bash("true"))), 0)
		}
	})
	t.Run("a bomb is its own sandbox's", func(t *testing.T) {
		done := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(4*time.Second, Bash(bomb)))
			done <- r
		}()
		time.Sleep(300 * time.Millisecond)
		r := Exec(t, other, within(10*time.Second, Bash("for i in $(seq 20); do sleep 0.01 & done; wait; echo ok")))
		if r.Stdout != "ok\n" || r.PIDsHit {
			t.Errorf("got %+v, %q", r.Exit, r.Stderr)
		}
		if r := <-done; !r.PIDsHit {
			t.Errorf("got %+v", r.Exit)
		}
	})
	t.Run("a call beside a bomb starts", func(t *testing.T) {
		done := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(2*time.Second, Bash(bomb)))
			done <- r
		}()
		time.Sleep(300 * time.Millisecond)
		for range 3 {
			r, err := exec(t.Context(), s, within(5*time.Second, Bash("echo x")))
			if err != nil || r.Reason != sandbox.Exited || r.Code != 0 && !r.PIDsHit {
				t.Errorf("got %+v, %v", r.Exit, err)
			}
		}
		<-done
		mustExit(t, Exec(t, s, Bash("true")), 0)
	})
}

func testUsage(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	r := Exec(t, s, Bash("python3 -c 'import time\nx = bytearray(40 << 20)\nwhile time.process_time() < 0.3: pass'"))
	mustExit(t, r, 0)
	if r.CPU < 250*time.Millisecond || r.CPU > 5*time.Second {
		t.Errorf("cpu time is %v", r.CPU)
	}
	if r.MemoryPeak < 40<<20 || r.MemoryPeak > 128<<20 {
		t.Errorf("the memory peak is %d", r.MemoryPeak)
	}
	if r.Duration < 300*time.Millisecond || r.Duration > 10*time.Second {
		t.Errorf("the duration is %v", r.Duration)
	}
	r = Exec(t, s, within(3*time.Second, Python("while True: pass")))
	if r.CPU < 100*time.Millisecond || r.Duration < 3*time.Second {
		t.Errorf("killed: got %+v", r.Exit)
	}
}

package sandboxtest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func testEnds(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	t.Run("exit codes", func(t *testing.T) {
		for _, code := range []int{0, 1, 7, 126, 137, 255} {
			r := Exec(t, s, Bash("exit "+itoa(code)))
			mustExit(t, r, code)
			if r.Signal != "" || r.OOM || r.OOMKills != 0 || r.PIDsHit {
				t.Errorf("exit %d: got %+v", code, r.Exit)
			}
		}
	})
	t.Run("signals", func(t *testing.T) {
		for _, name := range []string{"TERM", "KILL", "SEGV"} {
			r := Exec(t, s, Bash("kill -"+name+" $$; sleep 5"))
			if r.Reason != sandbox.Exited || r.Signal != "SIG"+name || r.Code != -1 {
				t.Errorf("got %+v, want SIG%s", r.Exit, name)
			}
			if r.OOM {
				t.Errorf("SIG%s was taken for the memory limit", name)
			}
		}
	})
	t.Run("started is called once, before the end", func(t *testing.T) {
		var calls int
		p := Bash("true")
		p.Started = func() { calls++ }
		mustExit(t, Exec(t, s, p), 0)
		if calls != 1 {
			t.Errorf("Started was called %d times", calls)
		}
	})
	t.Run("timeout keeps the output and takes the tree", func(t *testing.T) {
		mark := marker()
		begin := time.Now()
		r := Exec(t, s, within(time.Second, Bash("echo one; echo two; echo three >&2; sleep "+mark+" & sleep "+mark)))
		if took := time.Since(begin); took < time.Second || took > 2*time.Second {
			t.Errorf("took %v, want a second", took)
		}
		if r.Reason != sandbox.TimedOut || r.OOM || r.Code != -1 {
			t.Errorf("got %+v", r.Exit)
		}
		if r.Stdout != "one\ntwo\n" || r.Stderr != "three\n" {
			t.Errorf("got stdout %q, stderr %q", r.Stdout, r.Stderr)
		}
		mustBeGone(t, mark)
	})
	t.Run("a program that ignores signals times out too", func(t *testing.T) {
		begin := time.Now()
		r := Exec(t, s, within(300*time.Millisecond, Bash("trap '' TERM INT HUP; while :; do :; done")))
		if r.Reason != sandbox.TimedOut || time.Since(begin) > 1300*time.Millisecond {
			t.Errorf("got %+v after %v", r.Exit, time.Since(begin))
		}
		r = Exec(t, s, within(300*time.Millisecond, Bash("kill -STOP $$")))
		if r.Reason != sandbox.TimedOut {
			t.Errorf("stopped: got %+v", r.Exit)
		}
	})
	t.Run("exit in the moment of the timeout", func(t *testing.T) {
		for range times(200) {
			r := Exec(t, s, within(20*time.Millisecond, Bash("sleep 0.017")))
			if r.Reason != sandbox.TimedOut && (r.Reason != sandbox.Exited || r.Code != 0) {
				t.Fatalf("got %+v", r.Exit)
			}
		}
	})
	t.Run("cancel", func(t *testing.T) {
		mark, why := marker(), errors.New("because")
		ctx, cancel := context.WithCancelCause(t.Context())
		p := Bash("echo before; sleep " + mark)
		var out counter
		p.Stdout = onWrite{&out, func() { cancel(why) }}
		r, err := exec(ctx, s, p)
		if err != nil || r.Reason != sandbox.Killed || !errors.Is(r.Cause, why) || out.n != len("before\n") || r.OOM {
			t.Errorf("got %+v, %d bytes, %v", r.Exit, out.n, err)
		}
		mustBeGone(t, mark)
		r, err = exec(ctx, s, Bash("true"))
		if err != nil || r.Reason != sandbox.Killed || !errors.Is(r.Cause, why) {
			t.Errorf("cancelled before: got %+v, %v", r.Exit, err)
		}
	})
	t.Run("cancel at any point", func(t *testing.T) {
		for range times(100) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(8000))*time.Microsecond)
			r, err := exec(ctx, s, Bash("exit 3"))
			cancel()
			if err != nil || r.Reason != sandbox.Killed && (r.Reason != sandbox.Exited || r.Code != 3) {
				t.Fatalf("got %+v, %v", r.Exit, err)
			}
		}
	})
	t.Run("no exit code is ever another's", func(t *testing.T) {
		var wait sync.WaitGroup
		for worker := range 16 {
			wait.Go(func() {
				for i := range times(30) {
					ctx, cancel := context.WithCancel(t.Context())
					if i%10 == 9 {
						time.AfterFunc(time.Millisecond, cancel)
					}
					r, err := exec(ctx, s, Bash("exit "+itoa(worker+7)))
					if err != nil || r.Reason != sandbox.Killed && (r.Reason != sandbox.Exited || r.Code != worker+7) {
						t.Errorf("got %+v, %v, want code %d", r.Exit, err, worker+7)
					}
					cancel()
				}
			})
		}
		wait.Wait()
	})
}

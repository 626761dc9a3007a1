package sandboxtest

import (
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func testTrees(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	t.Run("daemons end with their call", func(t *testing.T) {
		for name, script := range map[string]string{
			"background":   "sleep MARK & exit 0",
			"setsid":       "setsid sh -c 'sleep MARK' & disown; exit 0",
			"double fork":  "( ( sleep MARK & ) & ); exit 0",
			"nohup":        "setsid nohup sleep MARK >/dev/null 2>&1 & sleep 0.05; exit 0",
			"own streams":  "setsid sleep MARK </dev/null >/dev/null 2>&1 & exit 0",
			"ignores TERM": "(trap '' TERM HUP INT; sleep MARK; :) & exit 0",
			"many":         "for i in 1 2 3 4 5 6 7 8; do (setsid sleep MARK &) & done; wait; exit 0",
		} {
			mark := marker()
			begin := time.Now()
			r := Exec(t, s, Bash(replace(script, mark)))
			mustExit(t, r, 0)
			if took := time.Since(begin); took > 2*time.Second {
				t.Errorf("%s: the call returned after %v", name, took)
			}
			mustBeGone(t, mark)
		}
	})
	t.Run("side by side", func(t *testing.T) {
		begin := time.Now()
		var wait sync.WaitGroup
		for i := range 8 {
			wait.Go(func() {
				r, err := exec(t.Context(), s, Bash("sleep 0.5; exit "+itoa(i)))
				if err != nil || r.Code != i || r.Reason != sandbox.Exited {
					t.Errorf("got %+v, %v", r.Exit, err)
				}
			})
		}
		wait.Wait()
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("eight at once took %v", took)
		}
	})
	t.Run("a stuck call does not hold the next", func(t *testing.T) {
		stuck := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(1500*time.Millisecond, Bash("exec tail -f /dev/null")))
			stuck <- r
		}()
		mustExit(t, Exec(t, s, within(time.Second, Bash("echo next"))), 0)
		if r := <-stuck; r.Reason != sandbox.TimedOut {
			t.Errorf("got %+v", r.Exit)
		}
	})
	t.Run("calls do not see each other's processes", func(t *testing.T) {
		mark := marker()
		done := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(5*time.Second, Bash("touch here; sleep "+mark)))
			done <- r
		}()
		eventually(2*time.Second, func() bool { return len(survivors(mark)) > 0 })
		r := Exec(t, s, Bash("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; kill -9 -1; ls here"))
		if len(survivors(mark)) == 0 {
			t.Error("one call ended another's process")
		}
		if contains(r.Stdout, mark) {
			t.Errorf("one call saw another's processes: %q", r.Stdout)
		}
		mustExit(t, Exec(t, s, Bash("ls here")), 0) // files they share
		<-done
	})
	t.Run("the first process of its namespace can't be hurt", func(t *testing.T) {
		r := Exec(t, s, Bash(`for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; kill -9 1; head -c1 /proc/1/mem >/dev/null 2>&1 && echo read; cat /proc/1/environ 2>/dev/null; readlink /proc/1/fd/* /proc/1/exe /proc/1/ns/* 2>/dev/null; exit 6`))
		mustExit(t, r, 6)
		if r.Stdout != "" {
			t.Errorf("got %q", r.Stdout)
		}
		mustExit(t, Exec(t, s, Bash("true")), 0)
	})
}

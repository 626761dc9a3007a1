package e2e

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

func TestTheMainJob(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		s.tool("grep_repo", "grep -rn {pattern} /workspace", "pattern")
		s.setPolicy(nil)
		ses := s.session()
		run := s.run(ses,
			object{"id": "w", "name": "file_write", "arguments": object{"path": "a/b.txt", "content": "x\nTODO one\n"}},
			object{"id": "g", "name": "grep_repo", "arguments": object{"pattern": "TODO"}},
			object{"id": "p", "name": "python_exec", "arguments": object{"code": "print(open('a/b.txt').read().upper(), end='')"}},
			object{"id": "s", "name": "shell_exec", "arguments": object{"command": "wc -l < a/b.txt; exit 3"}},
			object{"id": "r", "name": "file_read", "arguments": object{"path": "/workspace/a/b.txt"}},
		)
		calls := run.list("calls")
		if len(calls) != 5 || run.str("status") != "finished" {
			t.Fatalf("got %v", run)
		}
		for i, want := range []string{"ok", "ok", "ok", "error", "ok"} {
			wantStatus(t, calls[i], want)
		}
		if got := calls[1].str("stdout"); got != "/workspace/a/b.txt:2:TODO one\n" {
			t.Errorf("grep_repo printed %q", got)
		}
		if got := calls[2].str("stdout"); got != "X\nTODO ONE\n" {
			t.Errorf("python_exec printed %q", got)
		}
		if got := calls[3]; got.str("stdout") != "2\n" || got.num("exit_code") != 3 || got.obj("error").str("code") != "tool_failed" {
			t.Errorf("shell_exec: %v", got)
		}
		if got := calls[4].str("result"); got != "x\nTODO one\n" {
			t.Errorf("file_read: %q", got)
		}
		for _, key := range []string{"runner_id", "backend", "isolation", "policy_digest"} {
			if calls[1].str(key) == "" {
				t.Errorf("a result does not say its %s: %v", key, calls[1])
			}
		}
		if got := calls[1].obj("enforced").str("base_image"); got != "host" {
			t.Errorf("enforced.base_image is %q", got)
		}
	})
}

func TestEventsStreamAndResume(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		ses := s.session()
		body := object{"stream": true, "tool_calls": []object{{"id": "c", "name": "shell_exec",
			"arguments": object{"command": "for i in 1 2 3 4 5; do echo line $i; sleep 0.15; done; echo err >&2"}}}}
		var all []event
		began := time.Now()
		var first time.Duration
		if err := s.stream(t.Context(), "POST", "/v1/agent-sessions/"+ses+"/run", body, "", func(e event) bool {
			if e.name == "call.output" && first == 0 {
				first = time.Since(began)
			}
			all = append(all, e)
			return true
		}); err != nil {
			t.Fatal(err)
		}
		var names []string
		var text strings.Builder
		for _, e := range all {
			names = append(names, e.name)
			if e.name == "call.output" && e.data.str("stream") == "stdout" {
				text.WriteString(e.data.str("text"))
			}
			if e.id == "" {
				t.Errorf("event %s has no id", e.name)
			}
		}
		if text.String() != "line 1\nline 2\nline 3\nline 4\nline 5\n" {
			t.Errorf("streamed %q", text.String())
		}
		if names[0] != "run.started" || names[1] != "call.started" || names[len(names)-2] != "call.finished" || names[len(names)-1] != "run.finished" {
			t.Errorf("got %v", names)
		}
		if total := time.Since(began); first > total-300*time.Millisecond {
			t.Errorf("the first output came after %v of %v: it is not streamed", first, total)
		}
		if got := all[len(all)-2].data.obj("call"); got.str("status") != "ok" || got.str("id") != "c" {
			t.Errorf("call.finished: %v", got)
		}

		run := all[0].data.obj("run").str("id")
		cut := len(all) / 2
		var rest []event
		if err := s.stream(t.Context(), "GET", "/v1/agent-sessions/"+ses+"/runs/"+run+"/events", nil, all[cut].id, func(e event) bool {
			rest = append(rest, e)
			return true
		}); err != nil {
			t.Fatal(err)
		}
		if len(rest) != len(all)-cut-1 || rest[0].id != all[cut+1].id {
			t.Errorf("resumed after %s with %d events, want %d", all[cut].id, len(rest), len(all)-cut-1)
		}
	})
}

func TestTimeLimitsEndTheWholeTree(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"wall_clock_seconds": 2})
	ses := s.session()

	began := time.Now()
	c := s.sh(ses, "echo one; echo two; echo three; sleep 300 & sleep 300")
	if took := time.Since(began); took > 3500*time.Millisecond {
		t.Errorf("it took %v", took)
	}
	wantStatus(t, c, "timed_out")
	if c.str("stdout") != "one\ntwo\nthree\n" {
		t.Errorf("what was printed before is lost: %q", c.str("stdout"))
	}
	if e := c.obj("error"); e.str("code") != "wall_clock" || e.num("limit") != 2 || e.str("message") == "" || e.str("remedy") == "" {
		t.Errorf("error: %v", e)
	}
	eventually(t, time.Second, "nothing of the call is left", func() error { return noProcess("sleep 300") })

	// Deaf to signals, stopped, and busy.
	for _, cmd := range []string{"trap '' TERM INT HUP; while :; do :; done", "kill -STOP $$", "python3 -c 'import signal,time\nfor s in range(1,32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\ntime.sleep(100)'", "cat </dev/zero >/dev/null"} {
		began := time.Now()
		c := s.sh(ses, cmd)
		wantStatus(t, c, "timed_out")
		if took := time.Since(began); took > 3500*time.Millisecond {
			t.Errorf("%s: it took %v", cmd, took)
		}
	}
	wantStatus(t, s.sh(ses, "true"), "ok")
}

func TestDaemonsDieWithTheirCall(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	for name, cmd := range map[string]string{
		"setsid":       "setsid sh -c 'sleep 3171' >/dev/null 2>&1 & disown; exit 0",
		"holds stdout": "setsid sh -c 'sleep 3172' & exit 0",
		"double fork":  "python3 -c \"import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0: time.sleep(3173)\n os._exit(0)\"",
		"nohup":        "nohup sleep 3174 >/dev/null 2>&1 & exit 0",
		"renamed":      "(exec -a innocent sleep 3175) & exit 0",
	} {
		began := time.Now()
		c := s.sh(ses, cmd)
		wantStatus(t, c, "ok")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s: the call came back after %v", name, took)
		}
	}
	for n := 3171; n <= 3175; n++ {
		eventually(t, time.Second, "the daemon is gone", func() error { return noProcess(fmt.Sprint("sleep ", n)) })
	}
}

func TestExitCodesSurviveConcurrencyAndCancels(t *testing.T) {
	s := start(t, options{})
	n := 600
	if testing.Short() {
		n = 60
	}
	sessions := make([]string, 8)
	for i := range sessions {
		sessions[i] = s.session()
	}
	var mu sync.Mutex
	got := map[string]int{}
	var wg sync.WaitGroup
	work := make(chan int)
	for w := range 32 {
		wg.Go(func() {
			for i := range work {
				ses := sessions[w%len(sessions)]
				for {
					cancelled := i%10 == 0
					cmd := "exit 7"
					if cancelled {
						cmd = "sleep 0.05; exit 7"
					}
					a, err := s.send(t.Context(), "POST", "/v1/agent-sessions/"+ses+"/run?wait=0", object{"tool_calls": []object{
						{"id": "c", "name": "shell_exec", "arguments": object{"command": cmd}}}})
					if err != nil {
						t.Error(err)
						return
					}
					if a.status == 429 {
						time.Sleep(5 * time.Millisecond)
						continue
					}
					id := a.str("id")
					if cancelled {
						_, _ = s.send(t.Context(), "POST", "/v1/agent-sessions/"+ses+"/runs/"+id+"/cancel", nil)
					}
					r := s.final(ses, id, 30*time.Second)
					c := r.list("calls")[0]
					key := fmt.Sprintf("%v %s %v", cancelled, c.str("status"), c["exit_code"])
					mu.Lock()
					got[key]++
					mu.Unlock()
					break
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	for key, count := range got {
		switch key {
		case "false error 7", "true error 7", "true cancelled <nil>", "true cancelled -1":
		default:
			t.Errorf("%d × %s", count, key)
		}
	}
	if got["false error 7"] != n-n/10 {
		t.Errorf("got %v", got)
	}
}

func TestAClientThatGoesAwayCancelsNothing(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := s.send(ctx, "POST", "/v1/agent-sessions/"+ses+"/run", object{"tool_calls": []object{
		{"id": "c", "name": "shell_exec", "arguments": object{"command": "sleep 1; echo done > f; echo out"}}}})
	if err == nil {
		t.Fatal("the request should have been cut")
	}
	runs := s.get("/v1/agent-sessions/" + ses + "/runs").want(200).list("items")
	if len(runs) != 1 {
		t.Fatalf("got %d runs", len(runs))
	}
	r := s.final(ses, runs[0].str("id"), 10*time.Second)
	wantStatus(t, r.list("calls")[0], "ok")
	if got := s.sh(ses, "cat f").str("stdout"); got != "done\n" {
		t.Errorf("got %q", got)
	}
}

func TestAHungCallDoesNotWedgeItsSession(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"wall_clock_seconds": 4})
	ses := s.session()
	hung := s.begin(ses, "mkfifo p; cat p")
	wantStatus(t, s.sh(ses, "echo beside"), "ok")
	wantStatus(t, s.final(ses, hung, 8*time.Second).list("calls")[0], "timed_out")
}

func TestAtMostEightRunsAtOnce(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	var runs []string
	for range 8 {
		runs = append(runs, s.begin(ses, "sleep 60"))
	}
	a := s.post("/v1/agent-sessions/"+ses+"/run", object{"tool_calls": []object{
		{"id": "c", "name": "shell_exec", "arguments": object{"command": "true"}}}}).want(429)
	if a.str("code") != "session_busy" || a.header.Get("Retry-After") == "" {
		t.Errorf("got %s, Retry-After %q", a.body, a.header.Get("Retry-After"))
	}
	for _, r := range runs {
		s.post("/v1/agent-sessions/"+ses+"/runs/"+r+"/cancel", nil).want(200)
	}
	for _, r := range runs {
		got := s.final(ses, r, 10*time.Second)
		if got.str("status") != "cancelled" {
			t.Errorf("run is %q", got.str("status"))
		}
		wantStatus(t, got.list("calls")[0], "cancelled")
	}
	eventually(t, time.Second, "nothing is left", func() error { return noProcess("sleep 60") })
	wantStatus(t, s.sh(ses, "true"), "ok")
}

func TestCancelAtAnyPoint(t *testing.T) {
	s := start(t, options{})
	for i := range 40 {
		ses := s.session()
		if i%2 == 0 {
			wantStatus(t, s.sh(ses, "true"), "ok") // then the sandbox is there already
		}
		run := s.begin(ses, "echo x >> w; sleep 20")
		time.Sleep(time.Duration(i) * time.Millisecond / 2)
		s.post("/v1/agent-sessions/"+ses+"/runs/"+run+"/cancel", nil).want(200)
		r := s.final(ses, run, 10*time.Second)
		if r.str("status") != "cancelled" {
			t.Fatalf("round %d: run is %q", i, r.str("status"))
		}
		wantStatus(t, r.list("calls")[0], "cancelled")
		s.delete("/v1/agent-sessions/" + ses).want(204)
	}
	eventually(t, 5*time.Second, "nothing is left", func() error {
		if err := noProcess("sleep 20"); err != nil {
			return err
		}
		if w := s.witnesses(); len(w) > 0 {
			return fmt.Errorf("left: %v", w)
		}
		return nil
	})
}

func TestOutputIsKeptExactly(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"output_bytes_limit": 1 << 20})
	ses := s.session()

	t.Run("one long line", func(t *testing.T) {
		c := s.on(t).py(ses, "import sys; sys.stdout.write('a'*524288)")
		wantStatus(t, c, "ok")
		if len(c.str("stdout")) != 524288 || c.num("stdout_bytes") != 524288 {
			t.Errorf("got %d bytes, stdout_bytes %v", len(c.str("stdout")), c["stdout_bytes"])
		}
	})
	t.Run("binary", func(t *testing.T) {
		c := s.on(t).sh(ses, "head -c 64 /dev/urandom | tee f; ")
		wantStatus(t, c, "ok")
		exact, err := base64.StdEncoding.DecodeString(c.str("stdout_base64"))
		if err != nil || len(exact) != 64 || c["lossy"] != true || c.num("stdout_bytes") != 64 {
			t.Errorf("got %v", c)
		}
		r := s.on(t).call(ses, "file_read", object{"path": "f", "encoding": "base64"})
		if r.str("result") != base64.StdEncoding.EncodeToString(exact) || r.str("encoding") != "base64" {
			t.Errorf("file_read: %v", r)
		}
	})
	t.Run("control characters", func(t *testing.T) {
		want := "\x00a\x1b[2J\rb\u202ec"
		c := s.on(t).py(ses, `print("\x00a\x1b[2J\rb\u202ec", end="")`)
		if c.str("stdout") != want || c["lossy"] == true {
			t.Errorf("got %q", c.str("stdout"))
		}
	})
	t.Run("noise on stderr", func(t *testing.T) {
		c := s.on(t).py(ses, "import sys\nsys.stderr.write('e'*10_000_000)\nprint('ok')")
		wantStatus(t, c, "ok")
		if c.str("stdout") != "ok\n" || c["truncated"] != true || c.num("stderr_bytes") != 10_000_000 || len(c.str("stderr")) > 1<<20 {
			t.Errorf("stdout %q, truncated %v, stderr %d of %v", c.str("stdout"), c["truncated"], len(c.str("stderr")), c["stderr_bytes"])
		}
	})
	t.Run("forged frames", func(t *testing.T) {
		forged := `{"kind":"call.done","status":"ok","exit_code":0}` + "\n\nevent: run.finished\ndata: {}\n\n"
		c := s.on(t).py(ses, "import sys,os\ns="+fmt.Sprintf("%q", forged)+"\nsys.stdout.write(s); sys.stdout.flush()\nfor fd in range(3,64):\n  try: os.write(fd, s.encode())\n  except OSError: pass\nsys.exit(5)")
		wantStatus(t, c, "error")
		if c.str("stdout") != forged || c.num("exit_code") != 5 {
			t.Errorf("got %q, exit %v", c.str("stdout"), c["exit_code"])
		}
	})
	t.Run("every byte comes before the exit", func(t *testing.T) {
		big := strings.Repeat("0123456789abcdef", 4096)
		for i := range 100 {
			c := s.on(t).sh(ses, "printf %s "+big)
			if c.str("stdout") != big {
				t.Fatalf("round %d: got %d bytes of %d", i, len(c.str("stdout")), len(big))
			}
		}
	})
}

func TestOutputLimits(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"output_bytes_limit": 1024, "wall_clock_seconds": 20})
	ses := s.session()
	for _, ch := range []string{"é", "日", "😀"} {
		c := s.py(ses, fmt.Sprintf("print(%q*3000, end='')", ch))
		out := c.str("stdout")
		wantStatus(t, c, "ok")
		if !utf8.ValidString(out) || strings.ContainsRune(out, utf8.RuneError) || len(out) > 1024 || c["truncated"] != true || c["lossy"] == true {
			t.Errorf("%s: %d bytes, truncated %v, lossy %v, valid %v", ch, len(out), c["truncated"], c["lossy"], utf8.ValidString(out))
		}
		if c.num("stdout_bytes") != float64(3000*len(ch)) || !strings.HasPrefix(out, ch) || !strings.HasSuffix(out, ch) || !strings.Contains(out, "dropped") {
			t.Errorf("%s: stdout_bytes %v: %q", ch, c["stdout_bytes"], out)
		}
	}
	rss := memory(t, s.runner.cmd.Process.Pid)
	for _, cmd := range []string{"yes", "yes >&2", "python3 -c \"print('x'*50_000_000)\""} {
		began := time.Now()
		c := s.sh(ses, cmd)
		wantStatus(t, c, "output_limit")
		if len(c.str("stdout")) > 1024 || len(c.str("stderr")) > 1024 || time.Since(began) > 10*time.Second {
			t.Errorf("%s: kept %d and %d bytes in %v", cmd, len(c.str("stdout")), len(c.str("stderr")), time.Since(began))
		}
	}
	if now := memory(t, s.runner.cmd.Process.Pid); now > rss+40<<20 {
		t.Errorf("the runner grew from %d to %d MiB", rss>>20, now>>20)
	}
}

func TestAReaderThatStopsReadingBlocksNobody(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"output_bytes_limit": 8 << 20})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	run := s.begin(ses, "sleep 0.5; head -c 100000000 /dev/zero | tr '\\0' a")
	stuck := make(chan struct{})
	defer close(stuck)
	go s.stream(t.Context(), "GET", "/v1/agent-sessions/"+ses+"/runs/"+run+"/events", nil, "", func(e event) bool {
		if e.name == "call.output" {
			<-stuck
			return false
		}
		return true
	})
	finished := make(chan event, 1)
	go s.stream(t.Context(), "GET", "/v1/agent-sessions/"+ses+"/runs/"+run+"/events", nil, "", func(e event) bool {
		if e.name == "run.finished" {
			finished <- e
		}
		return true
	})
	r := s.final(ses, run, 30*time.Second)
	if c := r.list("calls")[0]; c.num("stdout_bytes") != 100_000_000 || c.str("status") != "ok" {
		t.Errorf("got %v of %q", c["stdout_bytes"], c.str("status"))
	}
	select {
	case <-finished:
	case <-time.After(10 * time.Second):
		t.Error("the other reader did not see the end")
	}
}

func TestFiles(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"output_bytes_limit": 8 << 20}) // also bounds what file_read returns
	ses := s.session()
	secret := filepath.Join(t.TempDir(), "canary")
	if err := os.WriteFile(secret, []byte("canary"), 0o644); err != nil {
		t.Fatal(err)
	}
	wantStatus(t, s.sh(ses, "ln -s /etc/shadow x; ln -s / d; mkfifo p; truncate -s 10T sparse; mkdir dir; ln -s a/b inner"), "ok")
	for path, want := range map[string]string{
		"x": "denied", "d/root/.ssh/k": "denied", "d/etc/passwd": "denied", "../etc/passwd": "denied", "/etc/passwd": "denied",
		"/proc/self/environ": "denied", "/workspace/../etc/shadow": "denied", secret: "denied",
		"p": "error", "sparse": "error", "dir": "error", "missing": "error", "inner": "error",
	} {
		began := time.Now()
		c := s.call(ses, "file_read", object{"path": path})
		wantStatus(t, c, want)
		if time.Since(began) > 2*time.Second {
			t.Errorf("%s: took %v", path, time.Since(began))
		}
		if want == "denied" && c.obj("error").str("code") != "path_denied" {
			t.Errorf("%s: %v", path, c.obj("error"))
		}
	}
	for path, want := range map[string]string{"d/tmp/k": "denied", "/etc/k": "denied", "dir": "error", secret: "denied"} {
		wantStatus(t, s.call(ses, "file_write", object{"path": path, "content": "overwritten"}), want)
	}
	if got, _ := os.ReadFile(secret); string(got) != "canary" {
		t.Errorf("the canary is %q", got)
	}
	for _, name := range []string{"résumé 日本.txt", "new\nline", strings.Repeat("n", 255), "a/b/c/d/e", " spaces "} {
		wantStatus(t, s.call(ses, "file_write", object{"path": name, "content": "in " + name}), "ok")
		if got := s.call(ses, "file_read", object{"path": name}).str("result"); got != "in "+name {
			t.Errorf("%q: got %q", name, got)
		}
	}
	big := strings.Repeat("0123456789", 300_000)
	wantStatus(t, s.call(ses, "file_write", object{"path": "big", "content": big}), "ok")
	if got := s.call(ses, "file_read", object{"path": "big"}).str("result"); got != big {
		t.Errorf("big: got %d bytes of %d", len(got), len(big))
	}
	code := "x = '" + big + "'\nprint(len(x))"
	if got := s.py(ses, code).str("stdout"); got != "3000000\n" {
		t.Errorf("big code printed %q", got)
	}
}

func TestSessionsAreApart(t *testing.T) {
	s := start(t, options{})
	a, b := s.session(), s.session()
	wantStatus(t, s.sh(a, "echo secret > f; echo secret > /tmp/f; echo secret > /dev/shm/f"), "ok")
	hold := s.begin(a, "python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 4719")
	time.Sleep(500 * time.Millisecond)
	c := s.sh(b, "cat f /tmp/f /dev/shm/f; ls /proc | grep -c '^[0-9]'; cat /proc/*/cmdline | tr '\\0' ' '; (exec 3<>/dev/tcp/127.0.0.1/8123) && echo reached; hostname; env; true")
	out := c.str("stdout") + c.str("stderr")
	for _, leak := range []string{"secret", "4719", "reached", "CANARY_ENV", adminToken} {
		if strings.Contains(c.str("stdout"), leak) {
			t.Errorf("%q is seen: %s", leak, out)
		}
	}
	if got := s.sh(a, "cat f").str("stdout"); got != "secret\n" {
		t.Errorf("the session itself sees %q", got)
	}
	s.post("/v1/agent-sessions/"+a+"/runs/"+hold+"/cancel", nil).want(200)
}

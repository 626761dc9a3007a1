package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestMemoryLimit(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"memory_mb": 64})
	ses := s.session()
	hog := "x = bytearray(200*1024*1024); print(len(x))"
	for name, call := range map[string]func() object{
		"main process":  func() object { return s.py(ses, hog) },
		"child of bash": func() object { return s.sh(ses, "python3 -c '"+hog+"'; exit 0") },
		"hidden child":  func() object { return s.sh(ses, "(python3 -c '"+hog+"') 2>/dev/null || true; echo after") },
		"dev shm":       func() object { return s.sh(ses, "head -c 200000000 /dev/zero > /dev/shm/f; echo after") },
	} {
		for range 5 {
			c := call()
			if name == "dev shm" { // the file system's own size may refuse first
				if st := c.str("status"); st != "oom_killed" && !strings.Contains(c.str("stderr"), "No space") {
					t.Errorf("%s: %v", name, c)
				}
				s.sh(ses, "rm -f /dev/shm/f")
				continue
			}
			wantStatus(t, c, "oom_killed")
			if c.num("oom_kills") < 1 || c.obj("error").str("code") != "memory_limit" || c.obj("error").str("field") != "memory_mb" || c.obj("error").num("limit") != 64 {
				t.Errorf("%s: oom_kills %v, error %v", name, c["oom_kills"], c.obj("error"))
			}
			if peak := c.num("memory_peak_bytes"); peak > 64<<20 {
				t.Errorf("%s: peak %v is over the limit", name, peak)
			}
		}
	}
	wantStatus(t, s.sh(ses, "true"), "ok")

	s.setPolicy(object{"memory_mb": 64, "wall_clock_seconds": 1})
	other := s.session()
	c := s.sh(other, "sleep 30")
	wantStatus(t, c, "timed_out")
	if c.num("oom_kills") != 0 {
		t.Errorf("a forced kill is told as memory: %v", c)
	}
}

func TestProcessLimit(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"pids_limit": 64, "wall_clock_seconds": 5})
	ses, other := s.session(), s.session()
	wantStatus(t, s.sh(other, "true"), "ok")
	for _, bomb := range []string{
		":(){ :|:& };:; sleep 1",
		"python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
	} {
		began := time.Now()
		c := s.sh(ses, bomb)
		if st := c.str("status"); st != "pids_exhausted" {
			t.Errorf("%s: %v", bomb, c)
		}
		if e := c.obj("error"); e.str("code") != "pids_limit" || e.num("limit") != 64 {
			t.Errorf("error: %v", e)
		}
		if took := time.Since(began); took > 7*time.Second {
			t.Errorf("took %v", took)
		}
		wantStatus(t, s.sh(ses, "true"), "ok")
		wantStatus(t, s.sh(other, "true"), "ok")
	}
	c := s.py(ses, "import threading,time\nn=0\ntry:\n  for i in range(10000):\n    threading.Thread(target=time.sleep,args=(3,),daemon=True).start(); n+=1\nexcept RuntimeError: pass\nprint(n)")
	wantStatus(t, c, "pids_exhausted")
	var n int
	fmt.Sscan(c.str("stdout"), &n)
	if n > 64 || n < 40 {
		t.Errorf("%d threads under a limit of 64", n)
	}
}

func TestUserCodeHasNothing(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	c := s.sh(ses, "grep -E 'NoNewPrivs|^Cap|^Uid|^Groups' /proc/self/status; ls /sys 2>&1; ls /root 2>&1; cat /proc/kcore 2>&1 | head -c 10; cat /proc/1/environ 2>&1; ls /proc/1/fd 2>&1; touch /usr/x 2>&1; touch /x 2>&1; echo oom $(cat /proc/self/oom_score_adj); ls -l /proc/self/fd; ip a 2>&1; cat /proc/net/dev; echo x > /proc/sys/kernel/hostname")
	out := c.str("stdout") + c.str("stderr")
	t.Log(out)
	for _, want := range []string{"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "oom 1000"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in it", want)
		}
	}
	for _, leak := range []string{"Uid:\t0\t", adminToken, "CANARY_ENV", "eth0"} {
		if strings.Contains(out, leak) {
			t.Errorf("%q is in it", leak)
		}
	}
	if err := noHostRoot(s, ses); err != nil {
		t.Error(err)
	}
}

// noHostRoot starts a sleeper and looks from outside at whose it is.
func noHostRoot(s *stack, ses string) error {
	run := s.begin(ses, "exec sleep 7231")
	defer s.post("/v1/agent-sessions/"+ses+"/runs/"+run+"/cancel", nil)
	var uid string
	eventually(s.t, 5*time.Second, "the sleeper runs", func() error {
		var err error
		uid, err = uidOf("sleep 7231")
		return err
	})
	if uid == "0" {
		return fmt.Errorf("user code is root on the host")
	}
	return nil
}

func TestAKilledSandboxIsSaidSo(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	run := s.begin(ses, "sleep 5511")
	var pid int
	eventually(t, 5*time.Second, "it runs", func() error {
		var err error
		pid, err = initOf("sleep 5511")
		return err
	})
	kill(t, pid)
	r := s.final(ses, run, 10*time.Second)
	c := r.list("calls")[0]
	wantStatus(t, c, "runner_lost")
	if c.obj("error").str("code") != "sandbox_died" {
		t.Errorf("error: %v", c.obj("error"))
	}
	eventually(t, 2*time.Second, "no orphan", func() error { return noProcess("sleep 5511") })
	eventually(t, 2*time.Second, "the session is lost", func() error {
		if st := s.get("/v1/agent-sessions/" + ses).str("status"); st != "lost" {
			return fmt.Errorf("it is %q", st)
		}
		return nil
	})
	a := s.post("/v1/agent-sessions/"+ses+"/run", object{"tool_calls": []object{
		{"id": "c", "name": "shell_exec", "arguments": object{"command": "true"}}}}).want(409)
	if a.str("code") != "session_lost" {
		t.Errorf("got %s", a.body)
	}
	wantStatus(t, s.sh(s.session(), "true"), "ok")
}

func TestNothingIsLeftBehind(t *testing.T) {
	s := start(t, options{})
	hostile := []string{
		"true", "exit 3", "echo hi; echo err >&2", "sleep 100 & disown", "setsid sleep 100 & exit", "kill -9 $$",
		"head -c 300000 /dev/urandom", "mkdir -p a/b; chmod 000 a", "mkfifo f; exec 3<>f", "python3 -c 'import os; os.abort()'",
	}
	ses := s.session()
	for _, cmd := range hostile {
		s.sh(ses, cmd)
	}
	time.Sleep(300 * time.Millisecond)
	before := count(t, s)
	for i := range 150 {
		s.sh(ses, hostile[i%len(hostile)])
	}
	for range 10 {
		tmp := s.post("/v1/agent-sessions", object{}).want(201).str("id")
		s.sh(tmp, "mkdir -p x/y/z; touch x/y/z/f; chmod -R 000 x; ln -s / r")
		s.delete("/v1/agent-sessions/" + tmp).want(204)
	}
	eventually(t, 10*time.Second, "everything is where it was", func() error {
		after := count(t, s)
		for k, n := range after {
			slack := 0
			if strings.HasSuffix(k, "fds") {
				slack = 6
			}
			if n > before[k]+slack {
				return fmt.Errorf("%s: %d, then %d", k, before[k], n)
			}
		}
		if n := len(s.workspaces()); n > 2 { // ours, and the one that waits for the next session
			return fmt.Errorf("%d workspaces on disk, want 2", n)
		}
		return nil
	})
}

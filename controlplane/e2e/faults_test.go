package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// witnesses counts, from outside, how often each call of a session began: a
// call appends its name to /workspace/w, and the lines are read from the host.
func (s *stack) witnesses() map[string]int {
	out := map[string]int{}
	for _, dir := range s.workspaces() {
		data, err := os.ReadFile(filepath.Join(dir, "w"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			out[strings.TrimSpace(line)]++
		}
	}
	return out
}

const lostAfter = 3 * time.Second

func TestAKilledRunnerIsToldAsLost(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		s.cp.stop(syscall.SIGTERM)
		s.opt.cpEnv = append(s.opt.cpEnv, "BIGWAVE_RUNNER_LOST_AFTER="+lostAfter.String())
		s.startControlPlane()
		s.waitRunner()

		ses := s.session()
		wantStatus(t, s.sh(ses, "true"), "ok")
		run := s.begin(ses, "echo c >> w; sleep 600")
		time.Sleep(300 * time.Millisecond)
		began := s.witnesses()["c"]
		killed := time.Now()
		s.runner.stop(syscall.SIGKILL)
		r := s.final(ses, run, lostAfter+4*time.Second)
		if took := time.Since(killed); took > lostAfter+2500*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		wantStatus(t, r.list("calls")[0], "runner_lost")
		if st := s.get("/v1/agent-sessions/" + ses).str("status"); st != "lost" {
			t.Errorf("the session is %q", st)
		}
		was := s.incarnation()
		s.runner = s.spawnRunner()
		s.runner.lastIncarnation = was
		s.waitRunner()
		if w := s.witnesses(); len(w) > 0 {
			t.Errorf("the restart left %v", w)
		}
		if err := noProcess("sleep 600"); err != nil {
			t.Error(err)
		}
		if began != 1 {
			t.Errorf("the call began %d times", began)
		}
		wantStatus(t, s.sh(s.session(), "true"), "ok")
	})
}

func TestAQuickRestartRepeatsNothing(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	run := s.begin(ses, "echo c >> w; sleep 600")
	eventually(t, 5*time.Second, "it began", func() error {
		if n := s.witnesses()["c"]; n != 1 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	s.restartRunner(syscall.SIGKILL)
	// The beat of the new start tells that the old one is lost: no 45 s wait.
	wantStatus(t, s.final(ses, run, 5*time.Second).list("calls")[0], "runner_lost")
	time.Sleep(time.Second)
	if n := s.witnesses()["c"]; n > 1 {
		t.Errorf("the call began %d times", n)
	}
}

func TestACancelledRunIsNeverRunAgain(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	run := s.begin(ses, "sleep 600")
	s.post("/v1/agent-sessions/"+ses+"/runs/"+run+"/cancel", nil).want(200)
	s.restartRunner(syscall.SIGKILL)
	if r := s.final(ses, run, 10*time.Second); r.str("status") != "cancelled" {
		t.Errorf("got %q", r.str("status"))
	}
	time.Sleep(time.Second)
	if err := noProcess("sleep 600"); err != nil {
		t.Error(err)
	}
}

func TestAFrozenRunnerCannotChangeTheVerdict(t *testing.T) {
	s := start(t, options{cpEnv: []string{"BIGWAVE_RUNNER_LOST_AFTER=" + lostAfter.String()}})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	run := s.begin(ses, "echo c >> w; sleep 1; echo late")
	time.Sleep(200 * time.Millisecond)
	pid := s.runner.cmd.Process
	if err := pid.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r := s.final(ses, run, lostAfter+4*time.Second)
	wantStatus(t, r.list("calls")[0], "runner_lost")
	if err := pid.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second)
	wantStatus(t, s.get("/v1/agent-sessions/" + ses + "/runs/" + run).list("calls")[0], "runner_lost")
	eventually(t, 10*time.Second, "the old sandbox is ended", func() error {
		if w := s.witnesses(); len(w) > 0 {
			return fmt.Errorf("left: %v", w)
		}
		return nil
	})
	s.waitRunner()
	wantStatus(t, s.sh(s.session(), "true"), "ok")
}

func TestARestartOfTheControlPlaneLosesNothing(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		ses := s.session()
		wantStatus(t, s.sh(ses, "true"), "ok")
		run := s.begin(ses, "echo c >> w; sleep 3; echo survived")
		time.Sleep(200 * time.Millisecond)
		s.restartControlPlane(syscall.SIGKILL)
		c := s.final(ses, run, 30*time.Second).list("calls")[0]
		wantStatus(t, c, "ok")
		if c.str("stdout") != "survived\n" {
			t.Errorf("got %q", c.str("stdout"))
		}
		if n := s.witnesses()["c"]; n != 1 {
			t.Errorf("it began %d times", n)
		}
		wantStatus(t, s.sh(ses, "true"), "ok")
	})
}

// rounds is how often a random kill is tried; BIGWAVE_TEST_KILLS=200 makes a
// long run of it.
func rounds(t *testing.T) int {
	n := 8
	if v := os.Getenv("BIGWAVE_TEST_KILLS"); v != "" {
		if _, err := fmt.Sscan(v, &n); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func TestRandomKillsOfTheRunner(t *testing.T) {
	s := start(t, options{})
	for i := range rounds(t) {
		randomKill(t, s, i, func() map[string]int {
			was := s.incarnation()
			seen := s.witnesses() // they end with the runner
			s.runner.stop(syscall.SIGKILL)
			s.runner = s.spawnRunner()
			s.runner.lastIncarnation = was
			s.waitRunner()
			return seen
		})
	}
}

func TestRandomKillsOfTheControlPlane(t *testing.T) {
	s := start(t, options{})
	for i := range rounds(t) {
		randomKill(t, s, i, func() map[string]int {
			s.restartControlPlane(syscall.SIGKILL)
			return nil
		})
	}
}

// randomKill starts runs, kills something at a random point, and checks that
// every run that was accepted comes to one end and began at most once.
func randomKill(t *testing.T, s *stack, round int, strike func() map[string]int) {
	t.Helper()
	ses := s.post("/v1/agent-sessions", object{}).want(201).str("id")
	if round%2 == 0 {
		wantStatus(t, s.sh(ses, "true"), "ok")
	}
	type accepted struct{ name, run string }
	found := make(chan []accepted)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		var runs []accepted
		for i := range 6 {
			name := fmt.Sprintf("c%d.%d", round, i)
			a, err := s.send(ctx, "POST", "/v1/agent-sessions/"+ses+"/run?wait=0", object{"tool_calls": []object{
				{"id": "c", "name": "shell_exec", "arguments": object{"command": "echo " + name + " >> w; sleep 0.02"}}}})
			if err == nil && a.str("id") != "" {
				runs = append(runs, accepted{name, a.str("id")})
			}
		}
		found <- runs
	}()
	time.Sleep(time.Duration(rand.IntN(60_000)) * time.Microsecond)
	seen := strike()
	var runs []accepted
	select {
	case runs = <-found:
	case <-time.After(10 * time.Second):
		stop()
		runs = <-found
	}
	stop()
	ends := map[string]string{}
	for _, r := range runs {
		c := s.final(ses, r.run, 60*time.Second).list("calls")[0]
		ends[r.name] = c.str("status")
		switch c.str("status") {
		case "ok", "runner_lost", "start_failed":
		default:
			t.Errorf("round %d: %s ended as %v", round, r.name, c)
		}
	}
	for name, n := range s.witnesses() {
		seen = merge(seen, name, n)
	}
	for name, n := range seen {
		if n > 1 {
			t.Errorf("round %d: %s began %d times (%s)", round, name, n, ends[name])
		}
		if n == 1 && ends[name] == "start_failed" {
			t.Errorf("round %d: %s began but is told as start_failed", round, name)
		}
	}
	for name, end := range ends {
		if end == "ok" && seen[name] == 0 {
			t.Errorf("round %d: %s is ok but never began", round, name)
		}
	}
	s.deleteQuietly("/v1/agent-sessions/" + ses)
}

func merge(m map[string]int, name string, n int) map[string]int {
	if m == nil {
		m = map[string]int{}
	}
	m[name] = max(m[name], n)
	return m
}

func TestAnOrderlyShutdownDrains(t *testing.T) {
	s := start(t, options{runEnv: []string{"BIGWAVE_GRACE=10s"}})
	ses := s.session()
	wantStatus(t, s.sh(ses, "true"), "ok")
	var runs []string
	for range 5 {
		runs = append(runs, s.begin(ses, "sleep 2; echo done"))
	}
	time.Sleep(300 * time.Millisecond)
	if err := s.runner.stop(syscall.SIGTERM); err != nil {
		t.Errorf("the runner did not end well: %v", err)
	}
	for _, r := range runs {
		c := s.final(ses, r, 5*time.Second).list("calls")[0]
		wantStatus(t, c, "ok")
		if c.str("stdout") != "done\n" {
			t.Errorf("got %q", c.str("stdout"))
		}
	}
	eventually(t, 3*time.Second, "no disk is left", func() error {
		if d := s.disks(); len(d) > 0 {
			return fmt.Errorf("left: %v", d)
		}
		return nil
	})
	s.runner = s.spawnRunner()
	s.waitRunner()

	// The second signal does not wait.
	ses = s.session()
	run := s.begin(ses, "sleep 600")
	time.Sleep(500 * time.Millisecond)
	began := time.Now()
	_ = s.runner.cmd.Process.Signal(syscall.SIGTERM)
	time.Sleep(200 * time.Millisecond)
	_ = s.runner.stop(syscall.SIGTERM)
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("it took %v", took)
	}
	c := s.final(ses, run, 5*time.Second).list("calls")[0]
	if st := c.str("status"); st != "cancelled" && st != "runner_lost" {
		t.Errorf("got %v", c)
	}
}

func TestNoRunnerAndFullRunnersAreSaidSo(t *testing.T) {
	s := start(t, options{cpEnv: []string{"BIGWAVE_START_WAIT=2s"}, runEnv: []string{"BIGWAVE_SLOTS=1"}})
	first := s.session()
	wantStatus(t, s.sh(first, "true"), "ok")
	second := s.session()
	c := s.sh(second, "true")
	wantStatus(t, c, "start_failed")
	if c.obj("error").str("code") != "capacity" || c["retryable"] != true {
		t.Errorf("got %v", c)
	}
	s.delete("/v1/agent-sessions/" + first).want(204)
	wantStatus(t, s.sh(second, "true"), "ok")

	s.runner.stop(syscall.SIGTERM)
	third := s.session()
	c = s.sh(third, "true")
	wantStatus(t, c, "start_failed")
	if c.obj("error").str("code") != "no_runner" {
		t.Errorf("got %v", c)
	}
}

func TestPoliciesThatNoRunnerEnforces(t *testing.T) {
	s := start(t, options{})
	for field, change := range map[string]object{
		"fs_allowlist": {"fs_allowlist": []string{"/workspace", "/data/shared-readonly"}},
		"base_image":   {"base_image": "other/image:1"},
	} {
		s.setPolicy(change)
		ses := s.session()
		c := s.sh(ses, "true")
		wantStatus(t, c, "start_failed")
		if e := c.obj("error"); e.str("code") != "policy_unenforceable" || !strings.HasPrefix(e.str("field"), field) {
			t.Errorf("%s: error %v", field, e)
		}
		s.setPolicy(nil) // the next start reads the new policy
		wantStatus(t, s.sh(ses, "true"), "ok")
	}
}

func TestWhatTheNetworkRefusesIsInTheResult(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"network_allowlist": []string{"OK.test.:443"}})
	ses := s.session()
	c := s.sh(ses, "getent hosts ok.test && ! getent hosts other.test")
	wantStatus(t, c, "ok")
	if got := fmt.Sprint(c["denials"]); got != "[map[kind:dns reason:not in network_allowlist target:other.test]]" {
		t.Errorf("denials: %s", got)
	}
	c = s.sh(ses, "true")
	if got := fmt.Sprint(c["denials"]); got != "[]" {
		t.Errorf("the next call's denials: %s", got)
	}
}

func TestALiveSandboxKeepsItsPolicy(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"wall_clock_seconds": 20})
	old := s.session()
	a := s.sh(old, "true")
	s.setPolicy(object{"wall_clock_seconds": 10})
	b := s.sh(old, "true")
	c := s.sh(s.session(), "true")
	if a.str("policy_digest") == "" || a.str("policy_digest") != b.str("policy_digest") || b.str("policy_digest") == c.str("policy_digest") {
		t.Errorf("got %q, %q, then %q", a.str("policy_digest"), b.str("policy_digest"), c.str("policy_digest"))
	}
}

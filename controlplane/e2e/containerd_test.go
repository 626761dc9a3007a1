package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// onContainers is the environment of a runner whose sandboxes are containers, in
// the containerd that scripts/with-containerd.sh has started.
func onContainers(t *testing.T) []string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the containerd backend needs root")
	}
	address := os.Getenv("BIGWAVE_E2E_CONTAINERD")
	if address == "" {
		t.Fatal("BIGWAVE_E2E_CONTAINERD must name a containerd with the base image; scripts/test.sh starts one")
	}
	return []string{
		"BIGWAVE_BACKEND=containerd", "BIGWAVE_CONTAINERD_ADDRESS=" + address,
		"BIGWAVE_CONTAINERD_SNAPSHOTTER=" + os.Getenv("BIGWAVE_E2E_CONTAINERD_SNAPSHOTTER"),
	}
}

// eachTierOnContainers is eachTier with the containerd backend.
func eachTierOnContainers(t *testing.T, test func(t *testing.T, s *stack)) {
	env := onContainers(t)
	for _, tr := range []tier{personal, cluster} {
		t.Run(string(tr), func(t *testing.T) { test(t, start(t, options{tier: tr, runEnv: env})) })
	}
}

func TestTheMainJobInContainers(t *testing.T) {
	eachTierOnContainers(t, func(t *testing.T, s *stack) {
		s.tool("grep_repo", "grep -rn {pattern} /workspace", "pattern")
		ses := s.session()
		calls := s.run(ses,
			object{"id": "w", "name": "file_write", "arguments": object{"path": "a/b.txt", "content": "x\nTODO one\n"}},
			object{"id": "g", "name": "grep_repo", "arguments": object{"pattern": "TODO"}},
			object{"id": "p", "name": "python_exec", "arguments": object{"code": "import pydantic; print(pydantic.VERSION.split('.')[0])"}},
			object{"id": "r", "name": "file_read", "arguments": object{"path": "/workspace/a/b.txt"}},
		).list("calls")
		for _, c := range calls {
			wantStatus(t, c, "ok")
			if c.str("backend") != "containerd" || c.str("isolation") != "runc" || !strings.HasPrefix(c.str("image_digest"), "sha256:") {
				t.Errorf("the result says backend %q, isolation %q, image %q", c.str("backend"), c.str("isolation"), c.str("image_digest"))
			}
		}
		if got := calls[1].str("stdout"); got != "/workspace/a/b.txt:2:TODO one\n" {
			t.Errorf("grep_repo printed %q", got)
		}
		if got := calls[2].str("stdout"); got != "2\n" {
			t.Errorf("pydantic is %q", got)
		}
	})
}

func TestLimitsInContainers(t *testing.T) {
	s := start(t, options{tier: personal, runEnv: onContainers(t)})
	s.setPolicy(object{"memory_mb": 64, "pids_limit": 32, "wall_clock_seconds": 2})
	ses := s.session()
	for status, command := range map[string]string{
		"oom_killed":     "head -c 200M /dev/zero | tail",
		"timed_out":      "sleep 60",
		"pids_exhausted": "for i in $(seq 100); do sleep 5 & done; wait",
	} {
		wantStatus(t, s.run(ses, object{"id": status, "name": "shell_exec", "arguments": object{"command": command}}).list("calls")[0], status)
	}
}

// TestAnImageThatIsNotThere is refused with its reason, and the next session works.
func TestAnImageThatIsNotThere(t *testing.T) {
	s := start(t, options{tier: personal, runEnv: onContainers(t)})
	s.setPolicy(object{"base_image": "registry.invalid/no/such:1"})
	call := s.run(s.session(), object{"id": "x", "name": "shell_exec", "arguments": object{"command": "true"}}).list("calls")[0]
	wantStatus(t, call, "start_failed")
	e := call.obj("error")
	if e.str("code") != "image_unavailable" || e.str("field") != "base_image" || !strings.Contains(e.str("message"), "registry.invalid") {
		t.Errorf("got %v", e)
	}
	s.setPolicy(nil)
	call = s.run(s.session(), object{"id": "y", "name": "shell_exec", "arguments": object{"command": "true"}}).list("calls")[0]
	wantStatus(t, call, "ok")
}

// TestAKilledRunnerLeavesNoContainer counts what containerd still has of the
// runner once its next start is ready.
func TestAKilledRunnerLeavesNoContainer(t *testing.T) {
	env := append(onContainers(t), "BIGWAVE_WARM_COUNT=0")
	s := start(t, options{tier: personal, runEnv: env})
	for range 3 {
		wantStatus(t, s.run(s.session(), object{"id": "x", "name": "shell_exec", "arguments": object{"command": "setsid sleep 600 & true"}}).list("calls")[0], "ok")
	}
	if n := s.containers(); n != 3 {
		t.Errorf("%d containers, want 3", n)
	}
	s.restartRunner(syscall.SIGKILL)
	eventually(t, 20*time.Second, "nothing is left", func() error {
		if n := s.containers(); n > 0 {
			return fmt.Errorf("%d containers", n)
		}
		return nil
	})
	wantStatus(t, s.run(s.session(), object{"id": "y", "name": "shell_exec", "arguments": object{"command": "true"}}).list("calls")[0], "ok")
}

// TestAStoppedDoctorLeavesNoContainer ends one while it has a container: by
// Ctrl-C it removes that itself, and after a kill the next one does.
func TestAStoppedDoctorLeavesNoContainer(t *testing.T) {
	env := slices.Concat(onContainers(t), []string{"PATH=" + os.Getenv("PATH"), "BIGWAVE_DATA_DIR=" + t.TempDir()})
	doctor := func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, "bigwave-runner"), "doctor")
		cmd.Env = env
		return cmd
	}
	owned := func() int { return containersOf(t, "doctor") }
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		cmd := doctor()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 20*time.Second, "it has a container", func() error {
			if owned() == 0 {
				return errors.New("none")
			}
			return nil
		})
		if err := errors.Join(cmd.Process.Signal(sig), cmd.Wait()); err == nil {
			t.Errorf("%v: it says that all is well", sig)
		}
		if n := owned(); sig == syscall.SIGINT && n > 0 {
			t.Errorf("%v: %d containers are left", sig, n)
		}
	}
	if out, err := doctor().CombinedOutput(); err != nil {
		t.Errorf("the next doctor: %v\n%s", err, out)
	}
	if n := owned(); n > 0 {
		t.Errorf("%d containers are left", n)
	}
}

// containers counts those of this stack's runner.
func (s *stack) containers() int {
	s.t.Helper()
	return containersOf(s.t, "r1")
}

// containersOf counts a runner's.
func containersOf(t *testing.T, runner string) int {
	t.Helper()
	ctr := exec.Command("ctr", "-a", os.Getenv("BIGWAVE_E2E_CONTAINERD"), "-n", "bigwave", "containers", "ls", "-q", `labels."io.bigwave.owner"~="^`+runner+`-"`)
	out, err := ctr.CombinedOutput()
	if err != nil {
		t.Fatal(errors.Join(err, errors.New(string(out))))
	}
	return len(strings.Fields(string(out)))
}

// TestAPrivateContainerdComesBack kills the one of make up, which has nobody
// else to start it again.
func TestAPrivateContainerdComesBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a private containerd needs root")
	}
	dir := t.TempDir()
	cmd := exec.Command("../../scripts/containerd.sh", dir, "bash", "-c", `
		set -e
		ctr containers create --rootfs /nonexistent kept true
		for pid in $(cat /proc/$PPID/task/*/children); do
			if [[ $(cat /proc/$pid/comm) == containerd ]]; then kill -KILL $pid; killed=yes; fi
		done
		[[ $killed == yes ]]
		for ((i = 0; i < 100; i++)); do
			sleep 0.2
			if [[ $(timeout 5 ctr containers ls -q) == kept ]]; then exit 42; fi
		done`)
	out, err := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 42 {
		t.Errorf("exit code %d, %v: %s", code, err, out)
	}
	if !strings.Contains(string(out), "containerd ended and is started again") {
		t.Errorf("it said nothing: %s", out)
	}
	left, err := exec.Command("pgrep", "-f", "containerd.* "+dir+"/").Output()
	if len(left) > 0 {
		t.Errorf("processes %s are left, %v", left, err)
	}
}

// TestAPrivateContainerdAfterAKill kills the script of make up itself; what it
// left must not come back beside the next one's.
func TestAPrivateContainerdAfterAKill(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a private containerd needs root")
	}
	dir := t.TempDir()
	first := exec.Command("../../scripts/containerd.sh", dir, "bash", "-c", "kill -KILL $PPID")
	if out, _ := first.CombinedOutput(); first.ProcessState.Exited() {
		t.Fatalf("it was not killed: %s", out)
	}
	next := exec.Command("../../scripts/containerd.sh", dir, "bash", "-c", `
		sleep 3
		for cmdline in /proc/[0-9]*/cmdline; do
			if tr '\0' ' ' 2>/dev/null <$cmdline | grep -q "^containerd -c $0/"; then echo one; fi
		done`, dir)
	out, err := next.CombinedOutput()
	if err != nil || string(out) != "one\n" {
		t.Errorf("got %q, %v; want one containerd and no word of another", out, err)
	}
	left, err := exec.Command("pgrep", "-f", "containerd.* "+dir+"/").Output()
	if len(left) > 0 {
		t.Errorf("processes %s are left, %v", left, err)
	}
}

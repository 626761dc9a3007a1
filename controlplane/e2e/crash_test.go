package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestAKilledRunnerLeavesNothing kills a runner with twenty live sandboxes,
// half of them with a way out, whose programs fork and write.
func TestAKilledRunnerLeavesNothing(t *testing.T) {
	const sandboxes = 20
	s := start(t, options{})
	mark := fmt.Sprintf("sleep 86%d.5", os.Getpid())
	for i := range sandboxes {
		s.setPolicy(object{"network_allowlist": [][]string{{}, {"ok.test:443", "203.0.113.7:80"}}[i%2]})
		s.begin(s.session(), mark+` & setsid `+mark+` & (while :; do head -c 100000 /dev/zero > grows; (true &); sleep .1; done) & exec `+mark)
	}
	eventually(t, 30*time.Second, "all sandboxes are busy", func() error {
		if n := processes(mark); n < 3*sandboxes {
			return fmt.Errorf("%d processes, want %d", n, 3*sandboxes)
		}
		return nil
	})
	groups := s.cgroups()
	if len(groups) < sandboxes {
		t.Fatalf("%d cgroups of %d sandboxes", len(groups), sandboxes)
	}
	files := filepath.Join(s.data, "runner", "sandboxes")

	was := s.incarnation()
	s.runner.stop(syscall.SIGKILL)
	s.runner = s.spawnRunner()
	s.runner.lastIncarnation = was
	eventually(t, 30*time.Second, "nothing is left", func() error {
		var errs []error
		for _, g := range groups {
			if _, err := os.Stat(g); err == nil {
				errs = append(errs, fmt.Errorf("cgroup %s", g))
			}
		}
		if n := processes(mark); n > 0 {
			errs = append(errs, fmt.Errorf("%d processes", n))
		}
		// What is there now is the new start's: a spare, and one that proves the fence.
		if n := len(s.disks()); n > 2 {
			errs = append(errs, fmt.Errorf("%d disks", n))
		}
		if left, _ := os.ReadDir(files); len(left) > 0 {
			errs = append(errs, fmt.Errorf("%d files", len(left)))
		}
		return errors.Join(errs...)
	})
	s.waitRunner()
	wantStatus(t, s.sh(s.session(), "true"), "ok")
}

// processes counts the host's processes with exactly these arguments.
func processes(words string) int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && strings.ReplaceAll(string(data), "\x00", " ") == words+" " {
			n++
		}
	}
	return n
}

// cgroups are those of this stack's sandboxes, as directories of the host.
func (s *stack) cgroups() []string {
	var found []string
	for _, w := range s.workspaces() {
		data, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(w)), "cgroup"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
			controllers, path, _ := strings.Cut(rest, ":")
			dir := filepath.Join("/sys/fs/cgroup", controllers, path)
			if _, err := os.Stat(dir); err == nil && strings.Contains(path, "/box-") {
				found = append(found, dir)
			}
		}
	}
	return found
}

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// noProcess is an error while a process of this machine has words in its
// command line.
func noProcess(words string) error {
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range dirs {
		data, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		line := string(bytes.ReplaceAll(data, []byte{0}, []byte{' '}))
		if strings.Contains(line, words) && !strings.Contains(line, "e2e.test") {
			return fmt.Errorf("%s: %s", f, line)
		}
	}
	return nil
}

// memory is a process's resident memory in bytes.
func memory(t *testing.T, pid int) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// count says how many of something exist on this machine that the stack could
// leave behind.
func count(t *testing.T, s *stack) map[string]int {
	t.Helper()
	out := map[string]int{}
	for name, pid := range map[string]int{"control plane": s.cp.cmd.Process.Pid, "runner": s.runner.cmd.Process.Pid} {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		out[name+" fds"] = len(fds)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if !strings.Contains(line, "containerd") { // another test's containers
			out["mounts"]++
		}
	}
	cgroups, _ := filepath.Glob("/sys/fs/cgroup/*/bigwave/r1-*/*")
	for _, c := range cgroups {
		if st, err := os.Stat(c); err == nil && st.IsDir() { // the rest are the files of the group above
			out["cgroups"]++
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, p := range procs {
		data, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		after := string(data[bytes.LastIndexByte(data, ')')+1:])
		fields := strings.Fields(after)
		if len(fields) > 1 && fields[1] == strconv.Itoa(s.runner.cmd.Process.Pid) {
			out["children"]++
			if fields[0] == "Z" {
				out["zombies"]++
			}
		}
	}
	return out
}

// uidOf is the user id, on this machine, of the process with words in its
// command line.
func uidOf(words string) (string, error) {
	pid, err := pidOf(words)
	if err != nil {
		return "", err
	}
	return statusField(pid, "Uid:")
}

// initOf is the pid 1 of the sandbox that holds the process with words in its
// command line: the outermost process in another pid namespace than ours.
func initOf(words string) (int, error) {
	pid, err := pidOf(words)
	if err != nil {
		return 0, err
	}
	own, _ := os.Readlink("/proc/self/ns/pid")
	for {
		parent, err := statusField(pid, "PPid:")
		if err != nil {
			return 0, err
		}
		ppid, _ := strconv.Atoi(parent)
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", ppid))
		if err != nil {
			return 0, err
		}
		if ns == own {
			return pid, nil
		}
		pid = ppid
	}
}

func pidOf(words string) (int, error) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil && strings.TrimSpace(string(bytes.ReplaceAll(data, []byte{0}, []byte{' '}))) == words {
			return strconv.Atoi(filepath.Base(filepath.Dir(f)))
		}
	}
	return 0, fmt.Errorf("no process %q", words)
}

func statusField(pid int, field string) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			return strings.Fields(rest)[0], nil
		}
	}
	return "", fmt.Errorf("no %s of %d", field, pid)
}

func kill(t *testing.T, pid int) {
	t.Helper()
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// noProcessWithEnv is an error while a process has that line in its environment.
func noProcessWithEnv(line string) error {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil && bytes.Contains(append([]byte{0}, data...), []byte("\x00"+line+"\x00")) {
			return fmt.Errorf("%s has %s", f, line)
		}
	}
	return nil
}

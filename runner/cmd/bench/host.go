package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// leaks runs calls in a row, in this process and through the daemons, and
// prints what there is of everything that could be left behind.
func leaks(ctx context.Context, n int, backend sandbox.Backend, d *daemons) error {
	s, err := backend.Start(ctx, spec("bench-leaks"))
	if err != nil {
		return err
	}
	defer s.Close(context.WithoutCancel(ctx))
	sessions, err := d.sessions(ctx, 1)
	if err != nil {
		return err
	}
	defer d.closeSessions(ctx, sessions)
	what := work{name: "true", program: "bash", script: "true", tool: "shell_exec", args: `{"command":"true"}`}
	round := func(n int) error {
		for range n {
			if err := inSandbox(ctx, s, what); err != nil {
				return err
			}
			if err := d.call(ctx, sessions[0], what); err != nil {
				return err
			}
		}
		time.Sleep(500 * time.Millisecond)
		return nil
	}
	if err := round(20); err != nil {
		return err
	}
	before := host(d)
	if err := round(n); err != nil {
		return err
	}
	after := host(d)
	fmt.Printf("\nBefore and after %d calls in a row, each way\n\n| what | before | after |\n|---|---|---|\n", n)
	for i := range before {
		fmt.Printf("| %s | %d | %d |\n", before[i].name, before[i].n, after[i].n)
	}
	return nil
}

type counted struct {
	name string
	n    int
}

func host(d *daemons) []counted {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	cgroups := 0
	for _, pattern := range []string{"/sys/fs/cgroup/*/bigwave/*/*", "/sys/fs/cgroup/bigwave/*/*"} {
		found, _ := filepath.Glob(pattern + "/cgroup.procs")
		cgroups += len(found)
	}
	return []counted{
		{"goroutines of this process", runtime.NumGoroutine()},
		{"descriptors of this process", fds(os.Getpid())},
		{"descriptors of the control plane", fds(d.cp.Process.Pid)},
		{"descriptors of the runner", fds(d.runner.Process.Pid)},
		{"threads of the control plane", threads(d.cp.Process.Pid)},
		{"threads of the runner", threads(d.runner.Process.Pid)},
		{"cgroups", cgroups},
		{"mounts", bytes.Count(mounts, []byte{'\n'})},
		{"zombies", zombies()},
	}
}

func fds(pid int) int {
	e, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(e)
}

func threads(pid int) int {
	e, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return len(e)
}

func zombies() int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		if i := bytes.LastIndexByte(data, ')'); i >= 0 && bytes.HasPrefix(data[i+1:], []byte(" Z")) {
			n++
		}
	}
	return n
}

// idle prints the memory of idle daemons and of idle sandboxes.
func idle(ctx context.Context, backend sandbox.Backend, d *daemons) error {
	own := children(os.Getpid())
	var boxes []sandbox.Sandbox
	const n = 10
	for i := range n {
		s, err := backend.Start(ctx, spec(fmt.Sprint("bench-idle-", i)))
		if err != nil {
			return err
		}
		boxes = append(boxes, s)
		if err := inSandbox(ctx, s, work{program: "bash", script: "true"}); err != nil {
			return err
		}
	}
	time.Sleep(500 * time.Millisecond)
	var pss int
	for _, pid := range children(os.Getpid()) {
		pss += field(pid, "smaps_rollup", "Pss:")
	}
	for _, pid := range own {
		pss -= field(pid, "smaps_rollup", "Pss:")
	}
	for _, s := range boxes {
		if err := s.Close(ctx); err != nil {
			return err
		}
	}
	cp, r := field(d.cp.Process.Pid, "status", "VmRSS:"), field(d.runner.Process.Pid, "status", "VmRSS:")
	fmt.Printf("\nMemory when idle\n\n| what | MiB |\n|---|---|\n| control plane, RSS, after the calls above | %.1f |\n| runner, RSS | %.1f |\n| one subprocess sandbox, PSS of its init and its waiting supervisor | %.2f |\n",
		float64(cp)/1024, float64(r)/1024, float64(pss)/1024/n)
	return nil
}

// children is every process below pid.
func children(pid int) []int {
	var out []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		for s := range strings.FieldsSeq(string(data)) {
			if c, err := strconv.Atoi(s); err == nil {
				out = append(out, c)
				out = append(out, children(c)...)
			}
		}
	}
	return out
}

// field is a number of KiB in a file of /proc.
func field(pid int, file, name string) int {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			n, _ := strconv.Atoi(strings.Fields(rest)[0])
			return n
		}
	}
	return 0
}

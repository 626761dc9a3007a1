package main

import (
	"syscall"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// warmSocket is where supervisors ask the warm interpreter for a call; -1: there
// is none.
var warmSocket = -1

// startWarm starts the interpreter that calls are forked from. It has the
// init's rights, under the init's filter, and gives up what it does not need;
// it runs its own program only. When it does not come up, or ends, supervisors
// that ask it for a call fail, and that is how the runner hears of it.
func (m *machine) startWarm(w inside.Warm, program int) {
	if warmSocket >= 0 || m.warm != 0 {
		return
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		closeAll(pair[:])
		return
	}
	// Its output is a pipe, as that of a call is: what it knows of it, it hands on.
	var output [2]int
	if err := syscall.Pipe2(output[:], syscall.O_CLOEXEC); err != nil {
		closeAll(append(pair[:], null))
		return
	}
	attr := syscall.ProcAttr{
		Dir:   "/",
		Env:   w.Env,
		Files: []uintptr{fd(null), fd(output[1]), fd(output[1]), fd(pair[1]), fd(program)},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	if m.cgroup >= 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, m.cgroup
	}
	pid, err := syscall.ForkExec(w.Path, w.Argv, &attr)
	closeAll([]int{null, output[0], output[1], pair[1]})
	if err != nil {
		closeAll(pair[:1])
		return
	}
	// What it forks inherits them.
	for i := range rlimitCount {
		r := &rlimits[i]
		_, _, _ = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), r.resource, ptr(&r.value), 0, 0, 0)
	}
	m.warm = pid
	// Out of the way of what a supervisor moves to its place.
	moved, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, fd(pair[0]), dupCloexec, 200)
	_ = syscall.Close(pair[0])
	if errno == 0 {
		warmSocket = int(moved)
	}
}

// reapWarm takes note of the interpreter's end. Its socket stays: what is sent
// there fails.
func (m *machine) reapWarm() {
	if m.warm == 0 {
		return
	}
	var status syscall.WaitStatus
	if pid, err := syscall.Wait4(m.warm, &status, syscall.WNOHANG, nil); err == nil && pid == m.warm {
		m.warm = 0
	}
}

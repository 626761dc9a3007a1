package main

import (
	"os"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// callSocket is the descriptor on which a supervisor and its call's process
// find their socket; it lies above those that a request brings.
const callSocket = 20

// callRuleset is where they find the Landlock rules, if there are any.
const callRuleset = callSocket + 1

// callWarm is where a supervisor finds the warm interpreter's socket, if it
// asks there for its call.
const callWarm = callRuleset + 1

// masks are the parts of a call's /proc that say too much about the host to
// everybody (what is for the host's root only needs no mask: it is not mapped):
// files are covered by /dev/null, directories by an empty directory.
var masks = []mask{
	{path: "/proc/kcore"},
	{path: "/proc/keys"},
	{path: "/proc/timer_list"},
	{path: "/proc/timer_stats"},
	{path: "/proc/sched_debug"},
	{path: "/proc/latency_stats"},
	{path: "/proc/interrupts"},
	{path: "/proc/acpi", dir: true},
	{path: "/proc/scsi", dir: true},
	{path: "/proc/asound", dir: true},
	{path: "/proc/sysrq-trigger", readOnly: true},
	{path: "/proc/bus", readOnly: true},
	{path: "/proc/fs", readOnly: true},
	{path: "/proc/irq", readOnly: true},
	{path: "/proc/sys", readOnly: true},
}

type mask struct {
	path     string
	dir      bool
	readOnly bool  // bound to itself read-only instead of covered
	target   *byte // path, for the kernel; nil where this host has none
}

// prepareMasks looks once for what this kernel has.
func prepareMasks() {
	for i := range masks {
		if _, err := os.Lstat(masks[i].path); err == nil {
			masks[i].target = cstring(masks[i].path)
		}
	}
}

var (
	procType  = cstring("proc")
	procPath  = cstring("/proc")
	nullPath  = cstring("/dev/null")
	emptyPath = cstring("/run/empty") // made by the layout
	noString  = cstring("")
)

// wall has wait4 and waitid see also what was cloned without SIGCHLD.
const wall = 0x40000000

var vforkArgs cloneArgs

// signalInfo is the kernel's siginfo. The pid is 0 when the sender is outside
// of the pid namespace, which only the init is.
var signalInfo struct {
	_   [4]int32
	pid int32
	_   [27]int32
}

// note is a fork's only outgoing message; a fork has its own copy.
var (
	note       inside.Note
	notePacket [inside.NoteSize]byte
)

// supervise is a supervisor's whole life: it prepares the call's /proc, makes
// the process that will become the program (and sleeps until it has), or has the
// warm interpreter fork it, waits for it, ends what that one has left behind, and
// says how it went.
func supervise(socket int, fork bool) {
	if !keepOnly(socket, fork) {
		fail(inside.FailDescriptors, 0)
	}
	if errno := mountProc(); errno != 0 {
		fail(inside.FailProc, errno)
	}
	if errno := maskProc(); errno != 0 {
		fail(inside.FailMask, errno)
	}
	var pid int
	if fork {
		pid = borrow()
	} else {
		vforkArgs = cloneArgs{flags: syscall.CLONE_VM | syscall.CLONE_VFORK, exitSignal: uint64(syscall.SIGCHLD)}
		pid = int(vforkCall(&vforkArgs, unsafe.Sizeof(vforkArgs)))
		if pid < 0 {
			fail(inside.FailFork, syscall.Errno(-pid))
		}
	}
	note = inside.Note{Kind: inside.NoteExited}
	waitFor(pid)
	note.A = monotonic()
	endRest()
	var usage syscall.Rusage
	const children = ^uintptr(0) // RUSAGE_CHILDREN
	_, _, _ = syscall.RawSyscall(syscall.SYS_GETRUSAGE, children, ptr(&usage), 0)
	note.CPU = usage.Utime.Nano() + usage.Stime.Nano()
	note.MaxRSS = usage.Maxrss << 10
	sendNote()
	exit(0)
}

// keepOnly moves the call's socket, the rules and the warm interpreter's socket
// to their places and closes all else.
func keepOnly(socket int, fork bool) bool {
	if !moveTo(socket, callSocket) || !moveTo(ruleset, callRuleset) {
		return false
	}
	if !fork {
		_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, callWarm, 0, 0)
	} else if !moveTo(warmSocket, callWarm) {
		return false
	}
	_, _, _ = syscall.RawSyscall(sysCloseRange, 3, callSocket-1, 0)
	_, _, errno := syscall.RawSyscall(sysCloseRange, callWarm+1, uintptr(^uint32(0)), 0)
	return errno == 0
}

// moveTo has file at target, or nothing there where there is no file.
func moveTo(file int, target uintptr) bool {
	switch {
	case file < 0:
		_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, target, 0, 0)
	case uintptr(file) != target:
		_, _, errno := syscall.RawSyscall(syscall.SYS_DUP3, fd(file), target, syscall.O_CLOEXEC)
		return errno == 0
	}
	return true
}

func mountProc() syscall.Errno {
	const flags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	return rawMount(procType, procPath, procType, flags)
}

func maskProc() syscall.Errno {
	for i := range masks {
		if masks[i].target == nil {
			continue
		}
		if errno := masks[i].apply(); errno != 0 {
			return errno
		}
	}
	return 0
}

func (m *mask) apply() syscall.Errno {
	if m.readOnly {
		if errno := rawMount(m.target, m.target, noString, syscall.MS_BIND|syscall.MS_REC); errno != 0 {
			return errno
		}
		const flags = syscall.MS_REMOUNT | syscall.MS_BIND | syscall.MS_RDONLY | syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
		return rawMount(noString, m.target, noString, flags)
	}
	source := nullPath
	if m.dir {
		source = emptyPath
	}
	return rawMount(source, m.target, noString, syscall.MS_BIND)
}

func rawMount(source, target, kind *byte, flags uintptr) syscall.Errno {
	_, _, errno := syscall.RawSyscall6(syscall.SYS_MOUNT, ptr(source), ptr(target), ptr(kind), flags, 0, 0)
	return errno
}

// waitFor reaps until the main process has ended or the init asks for the end.
// Orphans of the call end up here too; those that a SIGKILL ended, which was
// not ours, are counted. All signals are blocked here, so that they wait.
func waitFor(main int) {
	const noHang = 1
	waited := uint64(1<<(syscall.SIGCHLD-1) | 1<<(syscall.SIGTERM-1))
	for {
		pid, status, errno := reap(noHang)
		switch {
		case errno == syscall.ECHILD:
			return
		case errno != 0:
		case pid == 0:
			signal, _, _ := syscall.RawSyscall6(syscall.SYS_RT_SIGTIMEDWAIT, ptr(&waited), ptr(&signalInfo), 0, sigSetBytes, 0, 0)
			if signal == uintptr(syscall.SIGTERM) && signalInfo.pid == 0 {
				note.B = 1
				return
			}
		case pid == main:
			note.Status = uint32(status)
			return
		case status.Signaled() && status.Signal() == syscall.SIGKILL:
			note.Killed++
		}
	}
}

// endRest kills and reaps all that is left of the call.
func endRest() {
	for {
		everyone := killEveryone
		_, _, _ = syscall.RawSyscall(syscall.SYS_KILL, uintptr(everyone), uintptr(syscall.SIGKILL), 0)
		if _, _, errno := reap(0); errno == syscall.ECHILD {
			return
		}
	}
}

func reap(flags uintptr) (int, syscall.WaitStatus, syscall.Errno) {
	var status uint32
	anyone := -1

	pid, _, errno := syscall.RawSyscall6(syscall.SYS_WAIT4, uintptr(anyone), ptr(&status), wall|flags, 0, 0, 0)
	return int(pid), syscall.WaitStatus(status), errno
}

// fail says what went wrong and ends the process.
func fail(step int64, errno syscall.Errno) {
	note = inside.Note{Kind: inside.NoteFailed, A: int64(errno), B: step}
	sendNote()
	exit(125)
}

func sendNote() {
	inside.PutNote(&notePacket, &note)
	for {
		_, _, errno := syscall.RawSyscall6(syscall.SYS_SENDTO, callSocket, ptr(&notePacket), inside.NoteSize, syscall.MSG_NOSIGNAL, 0, 0)
		if errno != syscall.EINTR {
			return
		}
	}
}

func monotonic() int64 {
	var now syscall.Timespec
	const clock = 1 // CLOCK_MONOTONIC
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clock, ptr(&now), 0)
	return now.Nano()
}

func exit(code uintptr) {
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, code, 0, 0)
	}
}

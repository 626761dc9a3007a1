package main

import (
	"syscall"
	"time"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// What borrow needs, made before any fork.
var (
	pidNamespace    = cstring("/proc/self/ns/pid")
	mountNamespace  = cstring("/proc/self/ns/mnt")
	cgroupNamespace = cstring("/proc/self/ns/cgroup")

	askByte   = [1]byte{'c'}
	askVector = syscall.Iovec{Base: &askByte[0], Len: 1}
	askRights struct {
		header syscall.Cmsghdr
		fds    [6]int32
	}
	told     [2]int32
	toldPID  int32
	childNow [128]byte // the kernel's siginfo
	briefly  = syscall.Timespec{Nsec: int64(100 * time.Microsecond)}
)

// borrow has the warm interpreter fork the call's process into this
// supervisor's namespaces, and returns its pid once it is a child of ours. The
// interpreter gets the namespaces by descriptor, the call's socket and the rules.
func borrow() int {
	_, _, errno := syscall.RawSyscall(syscall.SYS_PIPE2, ptr(&told), syscall.O_CLOEXEC, 0)
	must(inside.FailFork, errno)
	askRights.fds[0] = openRaw(pidNamespace)
	askRights.fds[1] = openRaw(mountNamespace)
	askRights.fds[2] = openRaw(cgroupNamespace)
	askRights.fds[3] = told[1]
	askRights.fds[4] = callSocket
	count := 5
	if ruleset >= 0 {
		askRights.fds[5] = callRuleset
		count = 6
	}
	length := syscall.SizeofCmsghdr + 4*count
	askRights.header = syscall.Cmsghdr{Len: uint64(length), Level: syscall.SOL_SOCKET, Type: syscall.SCM_RIGHTS}
	message := syscall.Msghdr{Iov: &askVector, Iovlen: 1}
	message.Control = (*byte)(unsafe.Pointer(&askRights.header))
	message.Controllen = uint64(length)
	_, _, errno = syscall.RawSyscall(syscall.SYS_SENDMSG, callWarm, ptr(&message), syscall.MSG_NOSIGNAL)
	must(inside.FailFork, errno)
	for _, file := range askRights.fds[:4] {
		_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(file), 0, 0)
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, callWarm, 0, 0)
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(told[0]), ptr(&toldPID), 4)
	must(inside.FailFork, errno)
	if n != 4 {
		fail(inside.FailFork, syscall.ECHILD)
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(told[0]), 0, 0)
	adopt(int(toldPID))
	note = inside.Note{Kind: inside.NoteReady}
	sendNote()
	return int(toldPID)
}

// adopt returns once pid is our child: its parent, which is to end, has ended.
func adopt(pid int) {
	const (
		byPID = 1             // P_PID
		look  = 4 | 1<<24 | 1 // WEXITED, WNOWAIT, WNOHANG
		tries = 20_000
	)
	for range tries {
		_, _, errno := syscall.RawSyscall6(syscall.SYS_WAITID, byPID, uintptr(pid), ptr(&childNow), look|wall, 0, 0)
		if errno == 0 {
			return
		}
		_, _, _ = syscall.RawSyscall(syscall.SYS_NANOSLEEP, ptr(&briefly), 0, 0)
	}
	fail(inside.FailFork, syscall.ECHILD)
}

func openRaw(path *byte) int32 {
	file, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, fd(atFDCWD), ptr(path), syscall.O_RDONLY|syscall.O_CLOEXEC, 0, 0, 0)
	must(inside.FailFork, errno)
	return int32(file)
}

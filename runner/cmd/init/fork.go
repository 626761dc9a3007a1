package main

import (
	"os"
	"syscall"
	"unsafe"
)

// A fork of a Go program has one thread and no scheduler, collector or
// monitor. What runs in it keeps to this:
//
//   - it makes system calls only by RawSyscall, which does not involve the
//     scheduler, and it never waits for another goroutine;
//   - everything it needs (strings for the kernel, buffers, the stack) was made
//     before; it does not allocate;
//   - it must never yield: the monitor may have asked for that just before the
//     fork, and there is nobody to come back from. So its thread keeps one of
//     the runtime's locks on itself, which forbids it (see forkSupervisor);
//   - no collection is under way when it is forked;
//   - it never returns from its entry function.

//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

// vforkCall makes the process of a call, which shares this one's memory until
// it becomes the program; this one sleeps until then. Copying the memory would
// be the dearest part of a supervisor. It returns a negative errno if it can't.
func vforkCall(args *cloneArgs, size uintptr) (pid uintptr)

type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

const (
	cloneClearSighand = 0x100000000
	cloneIntoCgroup   = 0x200000000
	clonePidfd        = 0x1000
	cloneNewCgroup    = 0x02000000
)

// forkSupervisor makes a supervisor and returns its pid and a pidfd. With
// cgroup ≥ 0 it starts in that cgroup, else in this thread's.
func forkSupervisor(socket, cgroup int, fork bool) (int, int, syscall.Errno) {
	pidfd := int32(-1)
	args := cloneArgs{
		flags:      syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | cloneNewCgroup | cloneClearSighand | clonePidfd,
		pidfd:      uint64(uintptr(unsafe.Pointer(&pidfd))),
		exitSignal: uint64(syscall.SIGCHLD),
	}
	if cgroup >= 0 {
		args.flags |= cloneIntoCgroup
		args.cgroup = uint64(cgroup)
	}
	// beforeFork blocks signals and locks the thread to what it is doing;
	// afterFork gives the stack its bounds back and takes one lock off. The
	// child keeps the other lock for good.
	beforeFork()
	beforeFork()
	pid, errno := rawFork(&args)
	afterFork()
	if errno == 0 && pid == 0 {
		supervise(socket, fork)
	}
	afterFork()
	return int(pid), int(pidfd), errno
}

// growStack makes the stack larger than any fork needs. A collection may
// shrink it again.
//
//go:noinline
func growStack() byte {
	var room [64 << 10]byte
	return room[len(os.Args)]
}

//go:nosplit
func rawFork(args *cloneArgs) (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall(sysClone3, uintptr(unsafe.Pointer(args)), unsafe.Sizeof(*args), 0)
	return pid, errno
}

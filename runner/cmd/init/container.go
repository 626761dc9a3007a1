package main

import (
	"os"
	"path/filepath"
	"syscall"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// In a container another program has made the namespaces and the root, and
// nothing can be inherited: the init is mounted into it, and so is the socket
// on which the runner waits.

// meet gets the control socket from the runner, and takes away what was mounted
// for that before any user code can see it. The control socket was made outside:
// one that was made here would show in this network namespace.
func meet(path string) error {
	socket, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := syscall.Connect(socket, &syscall.SockaddrUnix{Name: path}); err != nil {
		return os.NewSyscallError("connect", err)
	}
	var greeting [1]byte
	_, fds, err := inside.Receive(socket, greeting[:])
	if err != nil {
		return os.NewSyscallError("recvmsg", err)
	}
	_ = syscall.Close(socket)
	if len(fds) != 1 {
		return syscall.EPROTO
	}
	if fds[0] != inside.Control {
		if err := syscall.Dup3(fds[0], inside.Control, syscall.O_CLOEXEC); err != nil {
			return os.NewSyscallError("dup3", err)
		}
		_ = syscall.Close(fds[0])
	}
	for _, mount := range []string{path, os.Args[0]} {
		if err := syscall.Unmount(mount, syscall.MNT_DETACH); err != nil {
			return os.NewSyscallError("umount", err)
		}
	}
	return os.RemoveAll(filepath.Dir(path))
}

// furnish makes the steps in the root that is there, which is read-only to
// everybody but for that moment.
func furnish(l inside.Layout, mounts []int) inside.Trouble {
	if err := remountRoot(0); err != nil {
		return failed("open the root", err)
	}
	for i, s := range l.Steps {
		if err := makeStep(s, mounts[i], ""); err != nil {
			return failed("make "+s.Path, err)
		}
	}
	if err := remountRoot(syscall.MS_RDONLY); err != nil {
		return failed("shut the root", err)
	}
	return inside.Trouble{}
}

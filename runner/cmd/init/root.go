package main

import (
	"os"
	"path"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// The new root is put together on top of a directory that every host has;
// the one chosen does not matter, since the old root goes afterwards.
const buildAt = "/usr"

// maxInotify is how many inotify instances a sandbox may have; a host gives
// each of its users 128.
const maxInotify = "32"

// makeRoot builds what l says, enters it and lets go of the host's root.
func makeRoot(l inside.Layout, fds []int) inside.Trouble {
	mounts, trouble := openBinds(l, fds)
	if trouble.Step != "" {
		return trouble
	}
	if l.Built {
		return furnish(l, mounts)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return failed("make mounts private", err)
	}
	if err := syscall.Mount("root", buildAt, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=755,size=4m"); err != nil {
		return failed("mount the root", err)
	}
	for i, s := range l.Steps {
		if err := makeStep(s, mounts[i], buildAt); err != nil {
			return failed("make "+s.Path, err)
		}
	}
	// The first /proc is for the init alone. It has to be mounted while the
	// host's is still in sight, or the kernel lets no later one be mounted.
	if err := os.MkdirAll(buildAt+"/proc", 0o555); err != nil {
		return failed("make /proc", err)
	}
	if err := syscall.Mount("proc", buildAt+"/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return failed("mount /proc", err)
	}
	// In a user namespace of its own a program would have every capability
	// again, over that one at least; it can't make one.
	if err := os.WriteFile(buildAt+"/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		return failed("forbid further user namespaces", err)
	}
	// Each counts for whoever made the namespace too, and other sandboxes may
	// be of the same.
	if err := os.WriteFile(buildAt+"/proc/sys/user/max_inotify_instances", []byte(maxInotify), 0); err != nil && !os.IsNotExist(err) {
		return failed("bound inotify instances", err)
	}
	boundIPC()
	if err := enterRoot(); err != nil {
		return failed("pivot the root", err)
	}
	if err := syscall.Sethostname([]byte(l.Hostname)); err != nil {
		return failed("set the host name", err)
	}
	if err := loopbackUp(); err != nil {
		return failed("bring lo up", err)
	}
	return inside.Trouble{}
}

// openBinds returns a detached mount for each bind among the steps, before
// the new root hides anything.
func openBinds(l inside.Layout, fds []int) ([]int, inside.Trouble) {
	mounts := make([]int, len(l.Steps))
	for i, s := range l.Steps {
		mounts[i] = -1
		if s.Kind != inside.StepBind {
			continue
		}
		if s.FD >= 0 && s.FD < len(fds) {
			mounts[i] = fds[s.FD]
			continue
		}
		mount, err := openTree(atFDCWD, s.Data, openTreeClone|openTreeCloexec|atRecursive)
		if err != nil {
			return nil, failed("open "+s.Data, err)
		}
		mounts[i] = mount
	}
	return mounts, inside.Trouble{}
}

// makeStep makes one thing below the directory root.
func makeStep(s inside.Step, mount int, root string) error {
	target := root + path.Clean("/"+s.Path)
	if err := os.MkdirAll(path.Dir(target), 0o755); err != nil {
		return err
	}
	mode := os.FileMode(s.Mode & 0o777)
	switch {
	case s.Kind == inside.StepFile, s.Kind == inside.StepLink, s.Kind == inside.StepBind && s.File:
		// What an image has there may be a link, and lead elsewhere.
		if err := os.RemoveAll(target); err != nil {
			return err
		}
	}
	switch s.Kind {
	case inside.StepDir:
		return os.MkdirAll(target, mode)
	case inside.StepFile:
		return os.WriteFile(target, []byte(s.Data), mode)
	case inside.StepAppend:
		return appendTo(target, s.Data, mode)
	case inside.StepRemove:
		return os.RemoveAll(target)
	case inside.StepUnmount:
		return syscall.Unmount(target, syscall.MNT_DETACH)
	case inside.StepLink:
		return os.Symlink(s.Data, target)
	case inside.StepTmpfs:
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		return syscall.Mount("tmpfs", target, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, s.Data)
	case inside.StepBind:
		return bind(s, mount, target)
	}
	return syscall.EINVAL
}

// appendTo makes a file of its own of anything but a file: what an image has
// there may be a link, or a pipe that nobody reads.
func appendTo(target, data string, mode os.FileMode) error {
	if info, err := os.Lstat(target); err == nil && !info.Mode().IsRegular() {
		if err := os.RemoveAll(target); err != nil {
			return err
		}
	}
	file, err := os.OpenFile(target, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	_, err = file.WriteString(data)
	if closed := file.Close(); err == nil {
		err = closed
	}
	return err
}

func bind(s inside.Step, mount int, target string) error {
	attr := mountAttr{set: attrNoSuid | attrReadOnly | attrNoDev, propagation: syscall.MS_PRIVATE}
	if s.Writable {
		attr.set &^= attrReadOnly
	}
	if s.Device {
		attr.set &^= attrNoDev
	}
	if err := mountSetattr(mount, attr); err != nil {
		return err
	}
	if s.File {
		if err := os.WriteFile(target, nil, 0o644); err != nil {
			return err
		}
	} else if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return moveMount(mount, target)
}

// enterRoot makes the new root the only one and read-only.
func enterRoot() error {
	if err := os.Chdir(buildAt); err != nil {
		return err
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return syscall.Mount("", "/", "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY|syscall.MS_NOSUID|syscall.MS_NODEV, "")
}

// resize gives the tmpfs mounts their sizes. A tmpfs has one size wherever it
// is mounted, so that supervisors that wait already see it.
func resize(l inside.Limits) inside.Trouble {
	for _, t := range []struct {
		path  string
		bytes uint64
	}{{"/tmp", l.TmpBytes}, {"/dev/shm", l.ShmBytes}, {"/workspace", l.WorkspaceBytes}} {
		if t.bytes == 0 {
			continue
		}
		options := "size=" + strconv.FormatUint(t.bytes, 10)
		if err := syscall.Mount("tmpfs", t.path, "tmpfs", syscall.MS_REMOUNT|syscall.MS_NOSUID|syscall.MS_NODEV, options); err != nil {
			return failed("size "+t.path, err)
		}
	}
	return inside.Trouble{}
}

// boundIPC gives System V's shared memory the size that /dev/shm has at most,
// and its queues and semaphores small numbers: they outlive the calls that made
// them, and where there is no memory cgroup nothing else counts them. Older
// kernels let only the host's root say so.
func boundIPC() {
	for _, s := range []struct{ name, value string }{
		{"shmall", strconv.Itoa(64 << 20 / 4096)},
		{"msgmni", "64"},
		{"sem", "250 16000 32 64"}, // in a set, in all, at once, sets
	} {
		_ = os.WriteFile(buildAt+"/proc/sys/kernel/"+s.name, []byte(s.value), 0)
	}
}

// loopbackUp lets programs of the sandbox talk to each other on 127.0.0.1.
func loopbackUp() error {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(socket)
	var request struct {
		name  [16]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], "lo")
	request.flags = syscall.IFF_UP | syscall.IFF_RUNNING
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(socket), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request)))
	return asError(errno)
}

// lowerSelf gives up what neither the init nor a supervisor needs.
func lowerSelf() inside.Trouble {
	name := [16]byte{'b', 'w', '-', 'i', 'n', 'i', 't'}
	if err := prctl(prSetName, ptr(&name)); err != nil {
		return failed("set the name", err)
	}
	// A process of the user's uid must not be able to look into us.
	if err := prctl(prSetDumpable, 0); err != nil {
		return failed("become undumpable", err)
	}
	const keep = 1<<capKill | 1<<capSetGID | 1<<capSetUID | 1<<capSetPCap | 1<<capNetAdmin | 1<<capSysChroot | 1<<capSysAdmin
	header := capHeader{version: capVersion3}
	data := [2]capData{{effective: keep, permitted: keep}}
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_CAPSET, ptr(&header), ptr(&data), 0); errno != 0 {
		return failed("lower capabilities", errno)
	}
	return inside.Trouble{}
}

// filterSelf takes on a filter of the init's own system calls, with all its
// threads. What it starts has it too.
func filterSelf(program string) inside.Trouble {
	if program == "" {
		return inside.Trouble{}
	}
	const setModeFilter, allThreads = 1, 1
	f := filterProgram{uint16(len(program) / 8), unsafe.StringData(program)}
	if _, _, errno := syscall.Syscall(sysSeccomp, setModeFilter, allThreads, ptr(&f)); errno != 0 {
		return failed("load the init's system call filter", errno)
	}
	return inside.Trouble{}
}

func failed(step string, err error) inside.Trouble {
	errno, ok := unwrap(err)
	if !ok {
		errno = syscall.EIO
	}
	return inside.Trouble{Step: step, Errno: uint32(errno)}
}

func unwrap(err error) (syscall.Errno, bool) {
	for {
		switch e := err.(type) {
		case syscall.Errno:
			return e, true
		case interface{ Unwrap() error }:
			err = e.Unwrap()
		default:
			return 0, false
		}
	}
}

package main

import (
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// File operations run in the call's process, with its uid and nothing else:
// the kernel decides what it may touch, and openat2 that it stays beneath root.

type openHow struct {
	flags, mode, resolve uint64
}

const (
	resolveNoMagicLinks = 0x02
	resolveBeneath      = 0x08

	oPath      = 0x200000
	bodyFD     = 3
	stdoutFD   = 1
	sendfileAt = 1 << 20
)

// readFile copies the file to stdout, unless it is larger than limit.
func readFile(root, name *byte, limit uint64) {
	dir := openRoot(root)
	file, errno := beneath(dir, name, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	mustFile(errno, 0)
	size := mustRegular(file)
	if uint64(size) > limit {
		mustFile(syscall.EFBIG, size)
	}
	sent, errno := copyFile(stdoutFD, file, limit+1)
	mustFile(errno, size)
	if sent > limit { // it grew while we read
		mustFile(syscall.EFBIG, int64(sent))
	}
	fileDone(0, int64(sent))
}

// writeFile makes the file and its parents and gives it the body.
func writeFile(root, name *byte, size uint64) {
	dir := openRoot(root)
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_NONBLOCK | syscall.O_NOCTTY
	file, errno := beneath(dir, name, flags, 0o644)
	if errno == syscall.ENOENT {
		makeParents(dir, name)
		file, errno = beneath(dir, name, flags, 0o644)
	}
	mustFile(errno, 0)
	mustRegular(file)
	_, _, errno = syscall.RawSyscall(syscall.SYS_FTRUNCATE, uintptr(file), 0, 0)
	mustFile(errno, 0)
	sent, errno := copyFile(file, bodyFD, size)
	mustFile(errno, int64(sent))
	fileDone(0, int64(sent))
}

func openRoot(root *byte) int {
	dir, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, fd(atFDCWD), ptr(root), oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0, 0, 0)
	mustFile(errno, 0)
	return int(dir)
}

func beneath(dir int, name *byte, flags, mode uint64) (int, syscall.Errno) {
	how := openHow{flags: flags | syscall.O_CLOEXEC, mode: mode, resolve: resolveBeneath | resolveNoMagicLinks}
	for {
		file, _, errno := syscall.RawSyscall6(sysOpenat2, fd(dir), ptr(name), ptr(&how), unsafe.Sizeof(how), 0, 0)
		// The kernel could not rule out that a racing rename led outside.
		if errno != syscall.EAGAIN && errno != syscall.EINTR {
			return int(file), errno
		}
	}
}

// makeParents makes every directory on the way to name. Others may be doing
// the same: one that is there by now is as good as one that we made.
func makeParents(dir int, name *byte) {
	length := 0
	for p := name; *p != 0; length++ {
		p = (*byte)(unsafe.Add(unsafe.Pointer(p), 1))
	}
	whole := unsafe.Slice(name, length)
	parent, start := dir, 0
	for i := range whole {
		if whole[i] != '/' {
			continue
		}
		whole[i] = 0
		_, _, errno := syscall.RawSyscall(syscall.SYS_MKDIRAT, fd(parent), ptr(&whole[start]), 0o755)
		if errno != 0 && errno != syscall.EEXIST {
			mustFile(errno, 0)
		}
		next, errno := beneath(dir, name, oPath|syscall.O_DIRECTORY, 0)
		mustFile(errno, 0)
		if parent != dir {
			_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(parent), 0, 0)
		}
		whole[i] = '/'
		parent, start = next, i+1
	}
}

// copyFile moves up to limit bytes and says how many.
func copyFile(to, from int, limit uint64) (uint64, syscall.Errno) {
	var sent uint64
	for sent < limit {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_SENDFILE, uintptr(to), uintptr(from), 0, uintptr(min(limit-sent, sendfileAt)), 0, 0)
		if errno == syscall.EINTR {
			continue
		}
		if errno != 0 {
			return sent, errno
		}
		if n == 0 {
			break
		}
		sent += uint64(n)
	}
	return sent, 0
}

// mustRegular returns the file's size, or refuses what is no regular file.
func mustRegular(file int) int64 {
	var info syscall.Stat_t
	_, _, errno := syscall.RawSyscall(syscall.SYS_FSTAT, uintptr(file), ptr(&info), 0)
	mustFile(errno, 0)
	switch info.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return info.Size
	case syscall.S_IFDIR:
		mustFile(syscall.EISDIR, 0)
	}
	mustFile(syscall.EINVAL, 0)
	return 0
}

func mustFile(errno syscall.Errno, size int64) {
	if errno != 0 {
		fileDone(errno, size)
	}
}

func fileDone(errno syscall.Errno, size int64) {
	note = inside.Note{Kind: inside.NoteFile, A: int64(errno), B: size}
	sendNote()
	exit(0)
}

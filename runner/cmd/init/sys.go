package main

import (
	"syscall"
	"unsafe"
)

// Numbers that package syscall does not know; alike on amd64 and arm64.
const (
	sysOpenTree     = 428
	sysMoveMount    = 429
	sysFsopen       = 430
	sysFsconfig     = 431
	sysFsmount      = 432
	sysClone3       = 435
	sysCloseRange   = 436
	sysOpenat2      = 437
	sysMountSetattr = 442

	sysLandlockCreateRuleset = 444
	sysLandlockAddRule       = 445
	sysLandlockRestrictSelf  = 446

	atFDCWD     = -100
	atEmptyPath = 0x1000
	atRecursive = 0x8000

	openTreeClone   = 1
	openTreeCloexec = syscall.O_CLOEXEC

	moveMountFromEmpty = 0x4
	resolveNoSymlinks  = 0x04

	attrReadOnly = 0x1
	attrNoSuid   = 0x2
	attrNoDev    = 0x4
	attrNoExec   = 0x8

	prSetPdeathsig  = 1
	prSetDumpable   = 4
	prSetName       = 15
	prSetSeccomp    = 22
	prCapbsetDrop   = 24
	prSetSecurebits = 28
	prSetNoNewPrivs = 38
	prCapAmbient    = 47
	ambientClearAll = 4
	seccompFilter   = 2

	capKill      = 5
	capSetGID    = 6
	capSetUID    = 7
	capSetPCap   = 8
	capNetAdmin  = 12
	capSysChroot = 18
	capSysAdmin  = 21
	lastCap      = 40
	keyctlJoin   = 1
	sigSetBytes  = 8
	lastSignal   = 64
	killEveryone = -1
)

// capHeader and capData are capset's arguments, version 3.
type capHeader struct {
	version uint32
	pid     int32
}

type capData struct {
	effective, permitted, inheritable uint32
}

const capVersion3 = 0x20080522

type mountAttr struct {
	set, clear, propagation, userns uint64
}

// cstring returns s as the kernel takes it. It allocates: not for forks.
func cstring(s string) *byte {
	p, err := syscall.BytePtrFromString(s)
	if err != nil {
		p, _ = syscall.BytePtrFromString("")
	}
	return p
}

// fd makes a descriptor or AT_FDCWD an argument.
func fd(n int) uintptr { return uintptr(n) }

func ptr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

func openTree(dir int, path string, flags uintptr) (int, error) {
	n, _, errno := syscall.Syscall(sysOpenTree, fd(dir), ptr(cstring(path)), flags)
	return int(n), asError(errno)
}

func moveMount(from int, to string) error {
	_, _, errno := syscall.Syscall6(sysMoveMount, fd(from), ptr(cstring("")), fd(atFDCWD), ptr(cstring(to)), moveMountFromEmpty, 0)
	return asError(errno)
}

func mountSetattr(dir int, attr mountAttr) error {
	_, _, errno := syscall.Syscall6(sysMountSetattr, fd(dir), ptr(cstring("")), atEmptyPath|atRecursive, ptr(&attr), unsafe.Sizeof(attr), 0)
	return asError(errno)
}

func prctl(option, a uintptr) error {
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, option, a, 0, 0, 0, 0)
	return asError(errno)
}

func asError(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

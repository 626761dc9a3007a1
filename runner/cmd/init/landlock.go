package main

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// ruleset is the descriptor of this sandbox's Landlock rules, which every call
// puts on itself; -1: none.
var ruleset = -1

// Landlock's rights, by the ABI that brought them.
const (
	llExecute    = 1 << 0
	llWriteFile  = 1 << 1
	llReadFile   = 1 << 2
	llReadDir    = 1 << 3
	llMakeChar   = 1 << 6
	llMakeBlock  = 1 << 11
	llFirst      = 1<<13 - 1 // all of ABI 1
	llRefer      = 1 << 13   // 2
	llTruncate   = 1 << 14   // 3
	llIoctlDev   = 1 << 15   // 5
	llScopeKill  = 1 << 1    // 6: signals to others
	llOfFile     = llExecute | llWriteFile | llReadFile | llTruncate | llIoctlDev
	llRead       = llExecute | llReadFile | llReadDir
	llDevice     = llRead | llWriteFile | llTruncate | llIoctlDev
	llEverything = llFirst | llRefer | llTruncate
	llNoDevices  = llEverything &^ (llMakeChar | llMakeBlock)

	llPathBeneath = 1
	oPathOnly     = 0x200000 | syscall.O_CLOEXEC
	dupCloexec    = 1030 // F_DUPFD_CLOEXEC
)

// rulesetAttr is the kernel's landlock_ruleset_attr.
type rulesetAttr struct {
	files, network, scoped uint64
}

// makeRules allows what the layout's mounts allow, and nothing to be written
// beneath /proc: neither oom_score_adj nor anything else there is the user's.
// The rules hold on to the files themselves, so they mean the same in the
// mount namespace of every call.
func makeRules(l inside.Layout) inside.Trouble {
	if l.Landlock == 0 {
		return inside.Trouble{}
	}
	attr := rulesetAttr{files: llFirst}
	size := unsafe.Sizeof(attr.files)
	for _, added := range []struct {
		abi   uint32
		right uint64
	}{{2, llRefer}, {3, llTruncate}, {5, llIoctlDev}} {
		if l.Landlock >= added.abi {
			attr.files |= added.right
		}
	}
	if l.Landlock >= 6 {
		// Abstract sockets stay: calls of one sandbox may talk to each other
		// over them as over its loopback, and its network namespace ends both.
		attr.scoped = llScopeKill
		size = unsafe.Sizeof(attr)
	}
	made, _, errno := syscall.RawSyscall(sysLandlockCreateRuleset, ptr(&attr), size, 0)
	if errno != 0 {
		return failed("make Landlock rules", errno)
	}
	// Out of the way of what a supervisor moves to its place.
	moved, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, made, dupCloexec, 200)
	_ = syscall.Close(int(made))
	if errno != 0 {
		return failed("make Landlock rules", errno)
	}
	ruleset = int(moved)
	allow := func(path string, rights uint64) inside.Trouble {
		if err := addRule(path, rights&attr.files); err != nil {
			return failed("allow "+path+" by Landlock", err)
		}
		return inside.Trouble{}
	}
	trouble := allow("/", llRead)
	if trouble.Step == "" {
		trouble = allow("/dev", llDevice)
	}
	for _, s := range l.Steps {
		switch {
		case trouble.Step != "":
			return trouble
		case s.Kind == inside.StepTmpfs, s.Kind == inside.StepBind && s.Writable && !s.Device && !s.File:
			trouble = allow(s.Path, llNoDevices)
		case s.Kind == inside.StepBind && s.Writable && !s.Device:
			trouble = allow(s.Path, llNoDevices&llOfFile)
		}
	}
	return trouble
}

// addRule allows rights on path and all that is beneath it.
func addRule(path string, rights uint64) error {
	file, err := syscall.Open(path, oPathOnly, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(file)
	var rule [12]byte // packed: rights, descriptor
	binary.LittleEndian.PutUint64(rule[0:], rights)
	binary.LittleEndian.PutUint32(rule[8:], uint32(file))
	_, _, errno := syscall.RawSyscall6(sysLandlockAddRule, fd(ruleset), llPathBeneath, ptr(&rule), 0, 0, 0)
	return asError(errno)
}

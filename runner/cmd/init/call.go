package main

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// What becomeCall needs, made by prepareStub before any fork.
var (
	userID, groupID uintptr
	mayGroup        bool
	rlimits         [8]rlimit
	rlimitCount     int
	addressSpace    syscall.Rlimit // set last: a fork of ours has reserved more than it
	filter          filterProgram

	workspacePath = cstring("/workspace")
	scorePath     = cstring("/proc/self/oom_score_adj")
	score         = [4]byte{'1', '0', '0', '0'}

	requestBuffer [inside.MaxPacket]byte
	requestRights [64]byte
	argv          [inside.MaxStrings + 1]*byte
	envp          [inside.MaxStrings + 1]*byte
)

// filterProgram is the kernel's sock_fprog.
type filterProgram struct {
	count        uint16
	instructions *byte
}

type rlimit struct {
	resource uintptr
	value    syscall.Rlimit
}

const (
	rlimitNproc   = 6
	rlimitMemlock = 8
	rlimitPending = 11
	rlimitQueues  = 12
	rlimitNice    = 13
	rlimitRtprio  = 14
)

// prepareStub takes from l what a call's process has to know.
func prepareStub(l inside.Layout) {
	userID, groupID, mayGroup = uintptr(l.UID), uintptr(l.GID), l.Groups
	filter = filterProgram{}
	if n := len(l.Filter); n > 0 {
		filter = filterProgram{uint16(n / 8), unsafe.StringData(l.Filter)}
	}
	rlimitCount = 0
	add := func(resource uintptr, limit uint64) {
		var current syscall.Rlimit
		if err := syscall.Getrlimit(int(resource), &current); err == nil && current.Max < limit {
			limit = current.Max
		}
		rlimits[rlimitCount] = rlimit{resource, syscall.Rlimit{Cur: limit, Max: limit}}
		rlimitCount++
	}
	add(syscall.RLIMIT_CORE, 0)
	add(syscall.RLIMIT_NOFILE, 4096)
	add(rlimitMemlock, 64<<10)
	add(rlimitPending, 1024) // signals and timers; a host has so many for each of its users
	add(rlimitQueues, 128<<10)
	add(rlimitNice, 0)
	add(rlimitRtprio, 0)
	addressSpace = syscall.Rlimit{Cur: l.Limits.AddressSpace, Max: l.Limits.AddressSpace}
	if l.Limits.Processes > 0 {
		add(rlimitNproc, l.Limits.Processes)
	}
}

// becomeCall is the life of the process that a call is: it gives up every
// privilege, waits for the request and becomes the program.
func becomeCall() {
	setUp()
	note = inside.Note{Kind: inside.NoteReady}
	sendNote()
	request, fds := receive()
	arrange(fds)
	carryOut(request)
	exit(125)
}

func setUp() {
	const readWrite = syscall.O_RDWR
	null, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, fd(atFDCWD), ptr(nullPath), readWrite, 0, 0, 0)
	must(inside.FailDescriptors, errno)
	for target := range uintptr(3) {
		_, _, errno = syscall.RawSyscall(syscall.SYS_DUP3, null, target, 0)
		must(inside.FailDescriptors, errno)
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, null, 0, 0)
	_, _, _ = syscall.RawSyscall(syscall.SYS_UMASK, 0o022, 0, 0)
	_, _, _ = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
	setScore()
	_, _, _ = syscall.RawSyscall(syscall.SYS_SETPRIORITY, syscall.PRIO_PROCESS, 0, 0) // the init's may be better
	for i := range rlimitCount {
		r := &rlimits[i]
		_, _, errno = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, r.resource, ptr(&r.value), 0, 0, 0)
		must(inside.FailLimits, errno)
	}
	dropPrivileges()
	enterWorkspace()
	resetSignals()
	fence()
}

// enterWorkspace needs the user's rights, and gives them back to the user when
// an earlier call has taken them away.
func enterWorkspace() {
	_, _, errno := syscall.RawSyscall(syscall.SYS_CHDIR, ptr(workspacePath), 0, 0)
	if errno == syscall.EACCES {
		_, _, _ = syscall.RawSyscall(syscall.SYS_FCHMODAT, fd(atFDCWD), ptr(workspacePath), 0o755)
		_, _, errno = syscall.RawSyscall(syscall.SYS_CHDIR, ptr(workspacePath), 0, 0)
	}
	must(inside.FailWorkspace, errno)
}

// setScore makes the user's process the one that the kernel ends when memory
// runs out, and not the init, without which the sandbox is dead.
func setScore() {
	// Its own /proc files are closed to a process that is not dumpable.
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetDumpable, 1, 0)
	must(inside.FailScore, errno)
	file, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, fd(atFDCWD), ptr(scorePath), syscall.O_WRONLY, 0, 0, 0)
	must(inside.FailScore, errno)
	_, _, errno = syscall.RawSyscall(syscall.SYS_WRITE, file, ptr(&score), uintptr(len(score)))
	must(inside.FailScore, errno)
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, file, 0, 0)
	_, _, errno = syscall.RawSyscall(syscall.SYS_PRCTL, prSetDumpable, 0, 0)
	must(inside.FailScore, errno)
}

// dropPrivileges leaves nothing that an exec could bring back.
func dropPrivileges() {
	for c := range uintptr(lastCap + 1) {
		// A kernel that does not know the capability says so.
		_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prCapbsetDrop, c, 0)
		if errno != syscall.EINVAL {
			must(inside.FailPrivileges, errno)
		}
	}
	// Uid 0 means nothing to an exec, for good; nor can ambient
	// capabilities be raised again.
	const securebits = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x80
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetSecurebits, securebits, 0)
	must(inside.FailPrivileges, errno)
	if mayGroup {
		_, _, errno = syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0)
		must(inside.FailIdentity, errno)
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_SETRESGID, groupID, groupID, groupID)
	must(inside.FailIdentity, errno)
	_, _, errno = syscall.RawSyscall(syscall.SYS_SETRESUID, userID, userID, userID)
	must(inside.FailIdentity, errno)
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, prCapAmbient, ambientClearAll, 0, 0, 0, 0)
	header := capHeader{version: capVersion3}
	var none [2]capData
	_, _, errno = syscall.RawSyscall(syscall.SYS_CAPSET, ptr(&header), ptr(&none), 0)
	must(inside.FailPrivileges, errno)
	_, _, errno = syscall.RawSyscall6(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0, 0, 0, 0)
	must(inside.FailPrivileges, errno)
	// Without these two the fence still stands, so they may fail.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetPdeathsig, uintptr(syscall.SIGKILL), 0)
	_, _, _ = syscall.RawSyscall(syscall.SYS_KEYCTL, keyctlJoin, 0, 0) // its own session keyring
}

// fence comes last: what it forbids is needed above. It asks for
// no_new_privs, which dropPrivileges has set.
func fence() {
	if ruleset >= 0 {
		_, _, errno := syscall.RawSyscall(sysLandlockRestrictSelf, callRuleset, 0, 0)
		must(inside.FailLandlock, errno)
		_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, callRuleset, 0, 0)
	}
	if filter.count > 0 {
		_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetSeccomp, seccompFilter, ptr(&filter))
		must(inside.FailFilter, errno)
	}
}

// resetSignals gives the program the dispositions of a fresh login.
func resetSignals() {
	var action [4]uint64 // SIG_DFL
	for signal := uintptr(1); signal <= lastSignal; signal++ {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, signal, ptr(&action), 0, sigSetBytes, 0, 0)
	}
	var none uint64
	const setMask = 2
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, ptr(&none), 0, sigSetBytes, 0, 0)
}

// receive waits for the request. Its memory stays until the exec.
func receive() ([]byte, []int32) {
	vector := syscall.Iovec{Base: &requestBuffer[0], Len: inside.MaxPacket}
	message := syscall.Msghdr{Iov: &vector, Iovlen: 1, Control: &requestRights[0], Controllen: uint64(len(requestRights))}
	n, _, errno := syscall.RawSyscall(syscall.SYS_RECVMSG, callSocket, ptr(&message), syscall.MSG_CMSG_CLOEXEC)
	must(inside.FailRequest, errno)
	if n == 0 {
		exit(0) // nobody wants us any more
	}
	fds := receivedFDs(requestRights[:message.Controllen])
	packet := requestBuffer[:n]
	if string(packet) == inside.Bulk {
		last := fds[len(fds)-1]
		packet, fds = mapped(last), fds[:len(fds)-1]
	}
	return packet, fds
}

func receivedFDs(oob []byte) []int32 {
	if len(oob) < syscall.SizeofCmsghdr {
		must(inside.FailRequest, syscall.EPROTO)
	}
	header := (*syscall.Cmsghdr)(unsafe.Pointer(&oob[0]))
	count := (int(header.Len) - syscall.SizeofCmsghdr) / 4
	if header.Level != syscall.SOL_SOCKET || header.Type != syscall.SCM_RIGHTS || count < 2 {
		must(inside.FailRequest, syscall.EPROTO)
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&oob[syscall.SizeofCmsghdr])), count)
}

// mapped is the whole content of a memfd.
func mapped(file int32) []byte {
	size, _, errno := syscall.RawSyscall(syscall.SYS_LSEEK, uintptr(file), 0, 2)
	must(inside.FailRequest, errno)
	address, _, errno := syscall.RawSyscall6(syscall.SYS_MMAP, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE, uintptr(file), 0)
	must(inside.FailRequest, errno)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), int(size))
}

// arrange puts the descriptors where a program expects them: output on 1 and
// 2, a body on 3, results on 4. What they were received as closes with the exec.
func arrange(fds []int32) {
	for i, file := range fds {
		target := int32(i + 1)
		if file == target {
			_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(file), syscall.F_SETFD, 0)
			continue
		}
		_, _, errno := syscall.RawSyscall(syscall.SYS_DUP3, uintptr(file), uintptr(target), 0)
		must(inside.FailDescriptors, errno)
	}
}

// carryOut does what the request says; see inside.AppendRequest.
func carryOut(b []byte) {
	if len(b) < inside.RequestHeader {
		must(inside.FailRequest, syscall.EPROTO)
	}
	op := inside.Op(binary.LittleEndian.Uint32(b))
	argc := binary.LittleEndian.Uint32(b[4:])
	envc := binary.LittleEndian.Uint32(b[8:])
	limit := binary.LittleEndian.Uint64(b[16:])
	if argc > inside.MaxStrings || envc > inside.MaxStrings {
		must(inside.FailRequest, syscall.E2BIG)
	}
	rest := b[inside.RequestHeader:]
	program := nextString(&rest)
	root := nextString(&rest)
	for i := range argc {
		argv[i] = nextString(&rest)
	}
	for i := range envc {
		envp[i] = nextString(&rest)
	}
	note = inside.Note{Kind: inside.NoteStarted, A: monotonic()}
	sendNote()
	switch op {
	case inside.OpExec:
		if addressSpace.Cur > 0 {
			_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_AS, ptr(&addressSpace), 0, 0, 0)
			must(inside.FailLimits, errno)
		}
		_, _, errno := syscall.RawSyscall(syscall.SYS_EXECVE, ptr(program), ptr(&argv), ptr(&envp))
		fail(inside.FailExec, errno)
	case inside.OpRead:
		readFile(root, program, limit)
	case inside.OpWrite:
		writeFile(root, program, limit)
	}
	fail(inside.FailRequest, syscall.EPROTO)
}

// nextString takes one NUL-terminated string off b.
func nextString(b *[]byte) *byte {
	for i, c := range *b {
		if c == 0 {
			start := &(*b)[0]
			*b = (*b)[i+1:]
			return start
		}
	}
	fail(inside.FailRequest, syscall.EPROTO)
	return nil
}

func must(step int64, errno syscall.Errno) {
	if errno != 0 {
		fail(step, errno)
	}
}

package box

import (
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/seccomp"
)

// Kernel is what a kernel offers for the fence.
type Kernel struct {
	Filter    []byte // of user code's system calls, as the kernel takes it
	Own       []byte // of the init's
	FilterErr error  // why there is none; then no sandbox starts
	Landlock  int    // the ABI in use; 0: none
}

// ThisKernel asks.
func ThisKernel() Kernel {
	k := Kernel{Landlock: landlockABI()}
	k.Filter, k.FilterErr = callFilter(seccomp.Program)
	if k.FilterErr == nil {
		k.Own, k.FilterErr = callFilter(seccomp.InitProgram)
	}
	return k
}

// callFilter returns a system call filter, if this kernel can load one.
func callFilter(program func(goarch string) ([]byte, error)) ([]byte, error) {
	if err := seccompError(); err != nil {
		return nil, err
	}
	return program(runtime.GOARCH)
}

// seccompError asks the kernel whether it knows filters that answer with an errno.
func seccompError() error {
	const getActionAvailable, errnoAction = 2, uint32(0x00050000)
	action := errnoAction
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, getActionAvailable, 0, uintptr(unsafe.Pointer(&action)))
	if errno != 0 {
		return fmt.Errorf("the kernel has no system call filters (CONFIG_SECCOMP_FILTER): %w", errno)
	}
	return nil
}

// LeastLandlock is the first ABI that is of use: the one before forbids every
// rename and link from one directory to another.
const LeastLandlock = 2

// landlockABI is the version that the kernel offers, or 0.
func landlockABI() int {
	const askVersion = 1
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, askVersion)
	if errno != 0 || abi < LeastLandlock {
		return 0
	}
	return int(abi)
}

// requireLandlock is what Config.Require says to refuse a host without it.
const requireLandlock = "landlock"

func (b *Backend) needsLandlock() bool { return slices.Contains(b.cfg.Require, requireLandlock) }

// fenced refuses a host that lacks a part of the fence which every sandbox needs.
func (b *Backend) fenced() error {
	if b.kernel.FilterErr != nil {
		return &sandbox.StartError{Code: "start_failed", Message: "this runner can't filter system calls", Cause: b.kernel.FilterErr}
	}
	if b.kernel.Landlock == 0 && b.needsLandlock() {
		return &sandbox.StartError{
			Code: "policy_unenforceable", Field: "fs_allowlist",
			Message: "this runner's settings require Landlock for fs_allowlist, and its kernel has none",
		}
	}
	return nil
}

func (b *Backend) filesHeldBy() string {
	if b.kernel.Landlock == 0 {
		return "mount namespace, without Landlock"
	}
	return fmt.Sprintf("mount namespace, Landlock ABI %d", b.kernel.Landlock)
}

func (b *Backend) checkFilter() sandbox.Piece {
	if b.kernel.FilterErr != nil {
		return sandbox.Piece{
			Name: "seccomp", State: "missing", Detail: b.kernel.FilterErr.Error(), Fatal: true,
			Means: "user code could make every system call of the kernel, so no sandbox starts: use a kernel with CONFIG_SECCOMP_FILTER on amd64 or arm64",
		}
	}
	return sandbox.Piece{
		Name: "seccomp", State: "ok", Fatal: true,
		Detail: fmt.Sprintf("what is not allowed is refused; a filter of %d instructions", len(b.kernel.Filter)/8),
	}
}

func (b *Backend) checkLandlock() sandbox.Piece {
	p := sandbox.Piece{Name: "landlock", State: "ok", Detail: fmt.Sprintf("ABI %d", b.kernel.Landlock), Fatal: b.needsLandlock()}
	if b.kernel.Landlock == 0 {
		p.State, p.Detail = "missing", fmt.Sprintf("the kernel does not offer Landlock, ABI %d or later", LeastLandlock)
		p.Means = "mounts alone keep user code from files, and it can lower its own oom_score_adj: use Linux 5.19 or later with landlock among the kernel's lsm= list"
		if p.Fatal {
			p.Means += "; BIGWAVE_REQUIRE names it, so no sandbox starts"
		}
	}
	return p
}

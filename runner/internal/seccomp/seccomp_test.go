package seccomp

import (
	"encoding/binary"
	"maps"
	"slices"
	"syscall"
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
)

// run asks the filter as the kernel would. The test's machine reads words in
// network order, so they are written like that.
func run(t *testing.T, vm *bpf.VM, id arch.AuditArch, number uint32, args ...uint32) uint32 {
	t.Helper()
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[offNumber:], number)
	binary.BigEndian.PutUint32(data[offArch:], uint32(id))
	for i, a := range args {
		binary.BigEndian.PutUint32(data[offArgs+8*i:], a)
	}
	got, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

var machines = map[string]*arch.Info{"amd64": arch.X86_64, "arm64": arch.AARCH64}

func machine(t *testing.T, goarch string) *bpf.VM {
	t.Helper()
	return machineOf(t, goarch, ofUsers)
}

func machineOf(t *testing.T, goarch string, r rules) *bpf.VM {
	t.Helper()
	instructions, err := assemble(goarch, r)
	if err != nil {
		t.Fatal(err)
	}
	if len(instructions) > 400 {
		t.Errorf("%s: %d instructions: the tree has grown", goarch, len(instructions))
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	return vm
}

func TestEveryNumber(t *testing.T) {
	for goarch, info := range machines {
		vm := machine(t, goarch)
		for number := range uint32(1000) {
			name := info.SyscallNumbers[int(number)]
			if examined[name] != nil {
				continue
			}
			want := uint32(retErrno | syscall.EPERM)
			switch {
			case slices.Contains(allowed, name):
				want = retAllow
			case name == "sync" || name == "syncfs":
				want = retErrno
			case name == "" || slices.Contains(absent, name):
				want = retErrno | uint32(syscall.ENOSYS)
			}
			if got := run(t, vm, info.ID, number); got != want {
				t.Errorf("%s %d %s: got %#x, want %#x", goarch, number, name, got, want)
			}
		}
		for _, number := range []uint32{0x40000000, 0x40000001, 0x40000000 + 59, 0x7fffffff, 0x80000000, 0xffffffff} {
			if got := run(t, vm, info.ID, number); got != retErrno|uint32(syscall.ENOSYS) {
				t.Errorf("%s %#x: got %#x", goarch, number, got)
			}
		}
		for _, other := range []*arch.Info{arch.I386, arch.ARM, arch.X86_64, arch.AARCH64} {
			if other.ID == info.ID {
				continue
			}
			for number := range uint32(500) {
				if got := run(t, vm, other.ID, number); got != retKill {
					t.Fatalf("%s on %s, %d: got %#x", other.Name, goarch, number, got)
				}
			}
		}
	}
}

// TestInit: what user code may do the init may too, or a call could not; and
// what reaches the kernel itself nobody may.
func TestInit(t *testing.T) {
	for goarch, info := range machines {
		vm := machineOf(t, goarch, ofInit)
		for number := range uint32(1000) {
			name := info.SyscallNumbers[int(number)]
			may := slices.Contains(slices.Concat(allowed, idle, initOnly), name) || examined[name] != nil
			if got := run(t, vm, info.ID, number); (got == retAllow) != may {
				t.Errorf("%s %d %s: got %#x", goarch, number, name, got)
			}
		}
		for _, name := range words(`init_module finit_module delete_module kexec_load kexec_file_load bpf perf_event_open ptrace
			process_vm_readv process_vm_writev pidfd_getfd open_by_handle_at swapon swapoff reboot acct quotactl syslog
			settimeofday clock_settime iopl ioperm io_uring_setup userfaultfd add_key request_key fanotify_init`) {
			number, ok := info.SyscallNames[name]
			if got := run(t, vm, info.ID, uint32(number)); ok && got == retAllow {
				t.Errorf("%s: the init may %s", goarch, name)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	names := words(`unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
		open_tree_attr bpf perf_event_open keyctl add_key request_key kexec_load kexec_file_load init_module finit_module delete_module
		swapon swapoff reboot acct quotactl quotactl_fd open_by_handle_at name_to_handle_at lookup_dcookie fanotify_init fanotify_mark
		syslog sethostname setdomainname settimeofday clock_settime iopl ioperm modify_ldt ptrace process_vm_readv process_vm_writev
		process_madvise kcmp pidfd_getfd userfaultfd io_uring_setup io_uring_enter io_uring_register clone3 move_pages migrate_pages
		io_setup io_submit uselib ustat sysfs vhangup _sysctl nfsservctl mbind set_mempolicy`)
	for goarch, info := range machines {
		vm := machine(t, goarch)
		for _, name := range names {
			number, ok := info.SyscallNames[name]
			if !ok {
				continue
			}
			if got := run(t, vm, info.ID, uint32(number)); got&0xffff0000 != retErrno {
				t.Errorf("%s %s: got %#x", goarch, name, got)
			}
		}
	}
}

// TestAllowedExists finds slips of the pen: every name is one of some machine.
func TestAllowedExists(t *testing.T) {
	lists := slices.Concat(allowed, absent, slices.Collect(maps.Keys(examined)))
	slices.Sort(lists)
	for i, name := range lists {
		if i > 0 && lists[i-1] == name {
			t.Errorf("%s stands twice", name)
		}
		_, amd := arch.X86_64.SyscallNames[name]
		_, arm := arch.AARCH64.SyscallNames[name]
		if !amd && !arm {
			t.Errorf("no machine has %s", name)
		}
	}
}

func TestArguments(t *testing.T) {
	const eperm, family, protocol = retErrno | uint32(syscall.EPERM), retErrno | uint32(syscall.EAFNOSUPPORT), retErrno | uint32(syscall.EPROTONOSUPPORT)
	for _, c := range []struct {
		name string
		args []uint32
		want uint32
	}{
		{"clone", []uint32{uint32(syscall.SIGCHLD)}, retAllow},
		{"clone", []uint32{0x3d0f00}, retAllow}, // a thread
		{"clone", []uint32{syscall.CLONE_NEWUSER | uint32(syscall.SIGCHLD)}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWNS}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWNET}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWPID}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWIPC}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWUTS}, eperm},
		{"clone", []uint32{syscall.CLONE_NEWCGROUP}, eperm},
		{"socket", []uint32{syscall.AF_UNIX, syscall.SOCK_STREAM, 0}, retAllow},
		{"socket", []uint32{syscall.AF_UNIX, syscall.SOCK_SEQPACKET | syscall.SOCK_CLOEXEC, 0}, retAllow},
		{"socket", []uint32{syscall.AF_UNIX, syscall.SOCK_RAW, 0}, eperm},
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_STREAM | syscall.SOCK_CLOEXEC | syscall.SOCK_NONBLOCK, 0}, retAllow},
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_STREAM, syscall.IPPROTO_TCP}, retAllow},
		{"socket", []uint32{syscall.AF_INET6, syscall.SOCK_DGRAM, syscall.IPPROTO_UDP}, retAllow},
		{"socket", []uint32{syscall.AF_INET6, syscall.SOCK_STREAM, 0}, retAllow},
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_STREAM, 262}, protocol}, // MPTCP
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_DGRAM, syscall.IPPROTO_ICMP}, protocol},
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_RAW, 0}, eperm},
		{"socket", []uint32{syscall.AF_INET6, syscall.SOCK_RAW | syscall.SOCK_CLOEXEC, syscall.IPPROTO_TCP}, eperm},
		{"socket", []uint32{syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP}, protocol},
		{"socket", []uint32{syscall.AF_INET, 10, 0}, eperm}, // SOCK_PACKET
		{"socket", []uint32{syscall.AF_NETLINK, syscall.SOCK_RAW | syscall.SOCK_CLOEXEC, syscall.NETLINK_ROUTE}, retAllow},
		{"socket", []uint32{syscall.AF_NETLINK, syscall.SOCK_DGRAM, syscall.NETLINK_ROUTE}, retAllow},
		{"socket", []uint32{syscall.AF_NETLINK, syscall.SOCK_RAW, syscall.NETLINK_NETFILTER}, protocol},
		{"socket", []uint32{syscall.AF_NETLINK, syscall.SOCK_RAW, syscall.NETLINK_KOBJECT_UEVENT}, protocol},
		{"socket", []uint32{syscall.AF_PACKET, syscall.SOCK_DGRAM, 0}, family},
		{"socket", []uint32{38, 5, 0}, family}, // AF_ALG
		{"socket", []uint32{40, 1, 0}, family}, // AF_VSOCK
		{"socket", []uint32{0, 1, 0}, family},
		{"socketpair", []uint32{syscall.AF_UNIX, syscall.SOCK_STREAM, 0}, retAllow},
		{"socketpair", []uint32{syscall.AF_TIPC, syscall.SOCK_STREAM, 0}, family},
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, syscall.SO_REUSEADDR}, retAllow},
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, 0x2f}, retAllow},
		{"setsockopt", []uint32{0, syscall.IPPROTO_IPV6, syscall.SO_ATTACH_FILTER}, retAllow}, // IPV6_V6ONLY
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, syscall.SO_ATTACH_FILTER}, eperm},
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, 50}, eperm}, // SO_ATTACH_BPF
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, 51}, eperm}, // SO_ATTACH_REUSEPORT_CBPF
		{"setsockopt", []uint32{0, syscall.SOL_SOCKET, 52}, eperm}, // SO_ATTACH_REUSEPORT_EBPF
		{"ioctl", []uint32{0, syscall.TCGETS}, retAllow},
		{"ioctl", []uint32{0, syscall.TIOCSTI}, eperm},
		{"ioctl", []uint32{0, syscall.TIOCSETD}, eperm},
		{"ioctl", []uint32{0, 0x541c}, eperm},
		{"personality", []uint32{0}, retAllow},
		{"personality", []uint32{0xffffffff}, retAllow},
		{"personality", []uint32{8}, retAllow},
		{"personality", []uint32{0x20008}, retAllow},
		{"personality", []uint32{0x0040000}, eperm}, // ADDR_NO_RANDOMIZE
		{"personality", []uint32{0x0400000}, eperm}, // READ_IMPLIES_EXEC
	} {
		for goarch, info := range machines {
			if got := run(t, machine(t, goarch), info.ID, uint32(info.SyscallNames[c.name]), c.args...); got != c.want {
				t.Errorf("%s %s%v: got %#x, want %#x", goarch, c.name, c.args, got, c.want)
			}
		}
	}
}

func TestOtherArchitectures(t *testing.T) {
	if _, err := Program("riscv64"); err == nil {
		t.Error("a filter for a machine that has none")
	}
	for goarch := range machines {
		b, err := Program(goarch)
		if err != nil || len(b) == 0 || len(b)%8 != 0 {
			t.Errorf("%s: %d bytes, %v", goarch, len(b), err)
		}
		t.Logf("%s: %d instructions", goarch, len(b)/8)
	}
}

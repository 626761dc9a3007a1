package seccomp

import (
	"maps"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/net/bpf"
)

// rules say what a filter does with each call: later ones win.
type rules struct {
	allowed, absent, idle []string
	examined              map[string][]bpf.Instruction
}

var ofUsers = rules{allowed, absent, idle, examined}

// ofInit allows what user code may do with some arguments only, and what makes
// namespaces, mounts and users.
var ofInit = rules{
	allowed: slices.Concat(allowed, idle, slices.Collect(maps.Keys(examined)), initOnly),
	absent:  slices.DeleteFunc(slices.Clone(absent), func(name string) bool { return slices.Contains(initOnly, name) }),
}

var initOnly = words(`
	clone3 mount umount2 pivot_root move_mount open_tree mount_setattr fsopen fsconfig fsmount sethostname keyctl setns
`)

// allowed are the calls that need no look at their arguments. A name that an
// architecture lacks means nothing there. What is known and not here gets EPERM.
var allowed = words(`
	read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range
	open openat openat2 creat access faccessat faccessat2 dup dup2 dup3 fcntl flock umask
	pipe pipe2 splice tee vmsplice sendfile copy_file_range
	stat lstat fstat newfstatat statx statfs fstatfs readlink readlinkat getdents getdents64 getcwd chdir fchdir
	rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat mkdir mkdirat rmdir
	mknod mknodat chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat
	truncate ftruncate fallocate fadvise64 readahead fsync fdatasync sync_file_range cachestat
	utime utimes futimesat utimensat
	setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
	removexattr lremovexattr fremovexattr
	inotify_init inotify_init1 inotify_add_watch inotify_rm_watch

	poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait epoll_wait_old
	epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime

	bind listen accept accept4 connect shutdown getsockname getpeername getsockopt
	sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg

	mmap munmap mremap mprotect madvise msync mincore brk mlock mlock2 mlockall munlock munlockall
	memfd_create remap_file_pages pkey_alloc pkey_free pkey_mprotect membarrier mseal map_shadow_stack

	vfork fork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
	set_tid_address set_robust_list get_robust_list rseq arch_prctl prctl seccomp
	futex futex_waitv futex_wake futex_wait futex_requeue restart_syscall
	landlock_create_ruleset landlock_add_rule landlock_restrict_self

	rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo
	rt_tgsigqueueinfo sigaltstack pause alarm

	getpid getppid gettid getpgid setpgid getpgrp getsid setsid
	getuid geteuid getgid getegid getresuid getresgid getgroups
	setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset
	getrlimit setrlimit prlimit64 getrusage times getpriority setpriority ioprio_get ioprio_set
	sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler
	sched_setscheduler sched_get_priority_min sched_get_priority_max sched_rr_get_interval sched_getattr
	sched_setattr getcpu

	time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep getitimer setitimer adjtimex clock_adjtime
	timer_create timer_settime timer_gettime timer_getoverrun timer_delete
	uname sysinfo getrandom

	shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
	mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
`)

// absent are calls that have an older one to fall back to, and whose
// arguments can't be looked at since they lie in memory, or that programs ask
// for at every start to see whether this kernel has them, or whose requests
// come out of one number for the whole host (fs.aio-max-nr).
var absent = words(`
	io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
	clone3 io_uring_setup io_uring_enter io_uring_register userfaultfd memfd_secret
	statmount listmount setxattrat getxattrat listxattrat removexattrat
`)

// idle are calls that succeed and do nothing: they would write out what the
// host and every other sandbox have in memory. What a sandbox has goes with the
// host's end anyway, and a single file can still be written out.
var idle = words(`sync syncfs`)

func words(s string) []string { return strings.Fields(s) }

// examined are the calls whose arguments decide.
var examined = map[string][]bpf.Instruction{
	"clone":       clone,
	"socket":      socket,
	"socketpair":  socketPair,
	"setsockopt":  setSocketOption,
	"ioctl":       ioctl,
	"personality": personality,
}

// clone makes processes and threads, and no namespaces.
var clone = []bpf.Instruction{
	argument(0),
	bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: syscall.CLONE_NEWNS | syscall.CLONE_NEWCGROUP | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC |
		syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET, SkipFalse: 1},
	deny(syscall.EPERM),
	answer(retAllow),
}

// socketTypeMask leaves out the flags that share an argument with the type.
const socketTypeMask = 0xf

// socket lets in streams and datagrams of unix, TCP and UDP, and the netlink
// family that lists interfaces.
var socket = []bpf.Instruction{
	argument(0),
	equal(syscall.AF_NETLINK, 13, 0),
	equal(syscall.AF_INET, 4, 0),
	equal(syscall.AF_INET6, 3, 0),
	equal(syscall.AF_UNIX, 1, 0),
	deny(syscall.EAFNOSUPPORT),
	bpf.Jump{Skip: 5}, // unix: to its type
	argument(2),       // IPv4 and IPv6
	equal(0, 3, 0),
	equal(syscall.IPPROTO_TCP, 2, 0),
	equal(syscall.IPPROTO_UDP, 1, 0),
	deny(syscall.EPROTONOSUPPORT),
	argument(1),
	bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: socketTypeMask},
	bpf.Jump{Skip: 3},
	argument(2), // netlink
	equal(syscall.NETLINK_ROUTE, 5, 0),
	deny(syscall.EPROTONOSUPPORT),
	equal(syscall.SOCK_STREAM, 3, 0),
	equal(syscall.SOCK_DGRAM, 2, 0),
	equal(syscall.SOCK_SEQPACKET, 1, 0),
	deny(syscall.EPERM),
	answer(retAllow),
}

var socketPair = []bpf.Instruction{
	argument(0),
	equal(syscall.AF_UNIX, 1, 0),
	deny(syscall.EAFNOSUPPORT),
	answer(retAllow),
}

// setSocketOption refuses filters: they are compiled into memory that no
// limit of a sandbox counts, and when the host has no more of it no program can
// take on a system call filter, ours included.
var setSocketOption = []bpf.Instruction{
	argument(1),
	equal(syscall.SOL_SOCKET, 0, 5),
	argument(2),
	equal(syscall.SO_ATTACH_FILTER, 4, 0),
	equal(0x32, 3, 0), // SO_ATTACH_BPF
	equal(0x33, 2, 0), // SO_ATTACH_REUSEPORT_CBPF
	equal(0x34, 1, 0), // SO_ATTACH_REUSEPORT_EBPF
	answer(retAllow),
	deny(syscall.EPERM),
}

// ioctl refuses what types into a terminal or changes how it works.
var ioctl = []bpf.Instruction{
	argument(1),
	equal(syscall.TIOCSTI, 3, 0),
	equal(0x541c, 2, 0), // TIOCLINUX
	equal(syscall.TIOCSETD, 1, 0),
	answer(retAllow),
	deny(syscall.EPERM),
}

// personality may ask, and choose what changes only names.
var personality = []bpf.Instruction{
	argument(0),
	equal(0xffffffff, 5, 0), // what is it now?
	equal(0, 4, 0),
	equal(0x0008, 3, 0),  // 32 bits, by name
	equal(0x20000, 2, 0), // an old version number
	equal(0x20008, 1, 0),
	deny(syscall.EPERM),
	answer(retAllow),
}

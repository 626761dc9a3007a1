package sandboxtest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/elastic/go-seccomp-bpf/arch"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Hostile lets hostile code loose in a backend's sandboxes and looks for any
// effect that it must not have, and then whether ordinary programs still run.
// make is called once; Hostile closes the backend.
func Hostile(t *testing.T, make func(t *testing.T) sandbox.Backend) {
	b := make(t)
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	s := Start(t, b, func(p *sandbox.Policy) { p.MemoryMB = 512 })
	for _, group := range []struct {
		name string
		run  func(t *testing.T, s sandbox.Sandbox)
	}{
		{"Identity", testIdentity},
		{"SystemCalls", testSystemCalls},
		{"OtherArchitectures", testOtherArchitectures},
		{"Canary", testCanary},
		{"Writes", testWrites},
		{"Mounts", testMounts},
		{"Proc", testProc},
		{"Descriptors", testDescriptors},
		{"SetUserID", testSetUserID},
		{"SpecialFiles", testSpecialFiles},
		{"Score", testScore},
		{"SystemV", testSystemV},
		{"Sync", testSync},
		{"Ordinary", testOrdinary},
	} {
		t.Run(group.name, func(t *testing.T) { group.run(t, s) })
	}
	t.Run("HostsNumbers", func(t *testing.T) { testHostsNumbers(t, b) })
	t.Run("LeftBehind", func(t *testing.T) { testLeftBehind(t, b) })
	if err := b.Close(context.Background()); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// probe runs Python in which N has this machine's system call numbers, LIBC is
// the C library and refused(label, ok, f) is a line of output unless f, in a
// process of its own, gets an errno among ok.
func probe(t *testing.T, s sandbox.Sandbox, code string) string {
	t.Helper()
	info, err := arch.GetInfo("")
	if err != nil {
		t.Fatal(err)
	}
	numbers, err := json.Marshal(info.SyscallNames)
	if err != nil {
		t.Fatal(err)
	}
	r := Exec(t, s, within(120*time.Second, Python("import json\nN = json.loads('''"+string(numbers)+"''')\n"+prober+code)))
	if r.Reason != sandbox.Exited || r.Code != 0 || r.Stderr != "" {
		t.Fatalf("the probe ended as %+v: %s\n%s", r.Exit, r.Stdout, r.Stderr)
	}
	head, ok := strings.CutSuffix(r.Stdout, "probed\n")
	if !ok {
		t.Fatalf("the probe did not come to its end: %q", r.Stdout)
	}
	return head
}

const prober = `
import ctypes, errno, os, signal, sys
LIBC = ctypes.CDLL(None, use_errno=True)

def inside(f):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = f()
        except OSError as e:
            said = e.errno
        except BaseException as e:
            said = repr(e)
        os.write(w, repr(said).encode())
        os._exit(0)
    os.close(w)
    said = os.read(r, 1000).decode()
    os.close(r)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "signal %d" % os.WTERMSIG(status)
    return eval(said)

def raw(number, *args):
    ctypes.set_errno(0)
    got = LIBC.syscall(ctypes.c_long(number), *[a if isinstance(a, (bytes, ctypes.Array, ctypes.Structure)) or a is None else ctypes.c_long(a) for a in args])
    return "succeeded with %d" % got if got >= 0 else ctypes.get_errno()

def refused(label, ok, f, apart=True):
    got = inside(f) if apart else f()
    if got not in ok:
        print(label, "got", errno.errorcode.get(got, got), flush=True)

def call(name, *args, ok=(errno.EPERM, errno.ENOSYS)):
    if name in N:
        refused("%s%r" % (name, args), ok, lambda: raw(N[name], *args), apart=name != "socket")
`

func testIdentity(t *testing.T, s sandbox.Sandbox) {
	status := output(t, s, "cat /proc/self/status")
	for _, line := range []string{
		"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapInh:\t0000000000000000\n", "CapPrm:\t0000000000000000\n",
		"CapEff:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "CapAmb:\t0000000000000000\n",
	} {
		if !contains(status, line) {
			t.Errorf("no line %q in\n%s", line, status)
		}
	}
	for _, kind := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		host, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		got := output(t, s, "readlink /proc/self/ns/"+kind)
		if kind == "user" && s.Info().Backend != "subprocess" {
			continue
		}
		if got == host || !strings.HasPrefix(got, kind+":[") {
			t.Errorf("the %s namespace is %q, the host's is %q", kind, got, host)
		}
	}
	if got := output(t, s, "while read -r inside host count; do echo $host; done </proc/self/uid_map"); os.Geteuid() == 0 && got == "0" && ownUserNamespace(t, s) {
		t.Error("the host's root is mapped")
	}
}

func testSystemCalls(t *testing.T, s sandbox.Sandbox) {
	got := probe(t, s, `
NEW = dict(time=0x80, mount=0x20000, cgroup=0x02000000, uts=0x04000000, ipc=0x08000000, user=0x10000000, pid=0x20000000, net=0x40000000)
for name, flag in NEW.items():
    call("unshare", flag)
    if name != "time": # shares its bit with a signal there
        call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    call("clone3", (ctypes.c_uint64 * 11)(flag, 0, 0, 0, signal.SIGCHLD), 88)
    call("clone3", (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD), 88, ok=(errno.ENOSYS,))
call("unshare", 0x200)
call("unshare", 0)
for kind in ("net", "mnt", "user", "pid", "ipc", "uts"):
    call("setns", os.open("/proc/self/ns/" + kind, os.O_RDONLY), 0)

call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
call("mount", None, b"/", None, 0x1020, None)
call("mount", b"/usr", b"/workspace", None, 4096, None)
call("umount2", b"/proc/sys", 2)
call("pivot_root", b"/tmp", b"/tmp")
call("chroot", b"/tmp")
call("open_tree", -100, b"/", 1)
call("fsopen", b"tmpfs", 0)
call("fspick", -100, b"/tmp", 0)
call("fsmount", 0, 0, 0)
call("fsconfig", 0, 6, None, None, 0)
call("move_mount", -100, b"/tmp", -100, b"/workspace", 0)
call("mount_setattr", -100, b"/tmp", 0, (ctypes.c_uint64 * 4)(), 32)
call("open_tree_attr", -100, b"/tmp", 1, (ctypes.c_uint64 * 4)(), 32)

call("io_uring_setup", 8, (ctypes.c_uint32 * 30)())
call("io_uring_enter", 0, 1, 0, 0, None, 0)
call("io_uring_register", 0, 0, None, 0)
call("userfaultfd", 1)
call("bpf", 0, (ctypes.c_uint64 * 16)(2, 4, 4, 1), 72)
call("perf_event_open", (ctypes.c_uint32 * 32)(1, 128), 0, -1, -1, 0)
call("keyctl", 0, -3, 0)
call("keyctl", 1, None)
call("add_key", b"user", b"trace", b"x", 1, -3)
call("request_key", b"user", b"trace", None, 0)
call("kexec_load", 0, 0, None, 0)
call("kexec_file_load", -1, -1, 0, None, 0)
call("init_module", b"x", 1, b"")
call("finit_module", 0, b"", 0)
call("delete_module", b"x", 0)
call("swapon", b"/workspace/swap", 0)
call("swapoff", b"/workspace/swap")
call("reboot", 0xfee1dead, 672274793, 0, None)
call("acct", b"/workspace/acct")
call("quotactl", 0x800007, b"/dev/null", 0, None)
call("quotactl_fd", 0, 0x800007, 0, None)
call("name_to_handle_at", -100, b"/", (ctypes.c_uint32 * 40)(128), (ctypes.c_int * 1)(), 0)
call("open_by_handle_at", 0, (ctypes.c_uint32 * 40)(8, 1, 2), 0)
call("lookup_dcookie", 0, None, 0)
call("fanotify_init", 0, 0)
call("fanotify_init", 0x200, 0) # by name and without a privilege
call("fanotify_mark", 0, 1, 8, -100, b"/")
call("syslog", 3, (ctypes.c_char * 100)(), 100)
call("sethostname", b"x", 1)
call("setdomainname", b"x", 1)
call("settimeofday", (ctypes.c_long * 2)(1), None)
call("clock_settime", 0, (ctypes.c_long * 2)(1))
call("adjtimex", (ctypes.c_long * 40)(0x1 | 0x2, 5, 5))
call("clock_adjtime", 0, (ctypes.c_long * 40)(0x1 | 0x2, 5, 5))
call("iopl", 3)
call("ioperm", 0x80, 1, 1)
call("modify_ldt", 0, (ctypes.c_char * 64)(), 64)
call("vhangup")
call("uselib", b"/bin/true")
call("ustat", 0, None)
call("sysfs", 3)
call("kcmp", os.getpid(), os.getppid(), 0, 0, 0)
for persona in (0x0040000, 0x0400000, 0x4000000, 0x0003):
    call("personality", persona)

child = os.fork()
if child == 0:
    signal.pause()
iov = (ctypes.c_long * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
call("ptrace", 0, 0, 0, 0)
call("ptrace", 16, child, 0, 0)
call("ptrace", 0x4206, child, 0, 0)
call("ptrace", 16, 1, 0, 0)
call("process_vm_readv", child, iov, 1, iov, 1, 0)
call("process_vm_writev", child, iov, 1, iov, 1, 0)
call("process_madvise", os.pidfd_open(child), iov, 1, 21, 0)
call("pidfd_getfd", os.pidfd_open(child), 1, 0)
call("move_pages", child, 0, None, None, None, 0)
call("migrate_pages", child, 0, None, None)
os.kill(child, signal.SIGKILL)
call("no such call", ok=())
for number in (467 + 500, 1 << 20, 0x7fffffff):
    refused("call %d" % number, (errno.ENOSYS,), lambda: raw(number))

import socket
STREAM, DGRAM, RAW, RDM, SEQPACKET, PACKET = 1, 2, 3, 4, 5, 10
for family in range(0, 64):
    for kind in (STREAM, DGRAM, RAW, RDM, SEQPACKET, PACKET):
        if family in (1, 2, 10) and kind in (STREAM, DGRAM) or family == 1 and kind == SEQPACKET or family == 16 and kind in (DGRAM, RAW):
            continue
        ok = (errno.EPERM, errno.EAFNOSUPPORT) + ((errno.ESOCKTNOSUPPORT,) if family in (2, 10, 16) else ())
        call("socket", family, kind, 0, ok=ok)
for protocol in range(1, 32): # of netlink; 0 is how interfaces are listed
    for kind in (DGRAM, RAW):
        call("socket", 16, kind, protocol, ok=(errno.EPERM, errno.EPROTONOSUPPORT))
for family in (2, 10):
    for protocol in (1, 2, 33, 47, 50, 58, 115, 132, 136, 255, 262):
        for kind in (STREAM, DGRAM, RAW):
            call("socket", family, kind, protocol, ok=(errno.EPERM, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT))
    call("socket", family, RAW, 6)
    call("socket", family, RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 17)
call("socketpair", 30, STREAM, 0, (ctypes.c_int * 2)(), ok=(errno.EPERM, errno.EAFNOSUPPORT))

a, b = socket.socketpair()
for request in (0x5412, 0x541c, 0x5423, 0x5412 | 1 << 40):
    call("ioctl", a.fileno(), request, b"x")
print("probed")
`)
	if got != "" {
		t.Errorf("not refused:\n%s", got)
	}
}

// testOtherArchitectures calls the kernel by numbers that mean something else.
func testOtherArchitectures(t *testing.T, s sandbox.Sandbox) {
	if runtime.GOARCH != "amd64" {
		t.Log("this machine has no other numbers that a program could use")
		return
	}
	got := probe(t, s, `
for number in (0, 39, 56, 272, 512, 520):
    refused("x32 call %d" % number, (errno.ENOSYS,), lambda: raw(0x40000000 | number))

def interrupt():
    import mmap
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3") # getpid as a program of 32 bits
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    got = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    return "pid %d" % got if got > 0 else "an errno" # from a kernel that takes it for a call of 64 bits
refused("int 0x80", ("an errno", "signal %d" % signal.SIGSYS, "signal %d" % signal.SIGSEGV), interrupt)
print("probed")
`)
	if got != "" {
		t.Errorf("not refused:\n%s", got)
	}
}

// testCanary hides a secret on the host that every user there may read, and
// reaches for it and for what else a host has.
func testCanary(t *testing.T, s sandbox.Sandbox) {
	secret := rand.Text()
	dir := t.TempDir()
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte(secret), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BIGWAVE_CANARY", secret)
	script := fmt.Sprintf(`
cd /workspace; secret=%q; dir=%q
ln -sfn / root; ln -sfn "$dir" out; ln -sfn "$secret" direct; ln -sfn /proc/1/root one
for prefix in "" /proc/1/root /proc/self/root /proc/self/cwd/../.. /workspace/root /workspace/one /workspace/../.. /proc/1/cwd /dev/fd/0/../..; do
  cat "$prefix$secret" "$prefix/etc/shadow" "$prefix/root/.ssh/id_rsa" "$prefix/root/.bashrc"
  ls -A "$prefix$dir" "$prefix/root" "$prefix/home" "$prefix/srv" "$prefix/boot"
done
cat direct out/secret /proc/*/environ /proc/1/mem /proc/1/maps /proc/1/auxv /proc/1/stack
ls /proc/1/fd /proc/1/map_files /proc/1/fdinfo
cat /run/containerd/containerd.sock /var/run/docker.sock; ls /run /var/run /var/lib
cat /sys/kernel/*; ls /sys/*
`, file, dir)
	r := Exec(t, s, within(20*time.Second, Bash(script)))
	if r.Reason != sandbox.Exited {
		t.Fatalf("got %+v", r.Exit)
	}
	if contains(r.Stdout+r.Stderr, "BIGWAVE_CANARY") || contains(r.Stdout, secret) {
		t.Error("the secret was read")
	}
	absent := []string{"/etc/shadow", "/root/.ssh", "/root/.bashrc", "/boot", "/srv", "/sys", "/var/run", "/run/containerd", "/dev/kvm", "/dev/mem", "/dev/fuse", "/dev/net", "/dev/ptmx", "/dev/loop-control", dir, file}
	if s.Info().ImageDigest != "" { // of which these are parts
		for _, path := range []string{"/boot", "/srv", "/sys", "/var/run/"} {
			absent = slices.DeleteFunc(absent, func(p string) bool { return p == strings.TrimSuffix(path, "/") })
			if got := output(t, s, "ls -A "+path); got != "" && got != "empty" {
				t.Errorf("in %s there is %q", path, got)
			}
		}
	}
	for _, path := range absent {
		if got := output(t, s, "test -e "+path+" && echo there; :"); got != "" {
			t.Errorf("%s is there", path)
		}
	}
	for _, path := range []string{"root" + file, "root/etc/passwd", "out/secret", "direct", "/proc/self/root" + file, "/proc/1/environ", file, "../.." + file, "one/etc/passwd"} {
		r := Exec(t, s, within(10*time.Second, read(path, 1<<20)))
		if r.Reason != sandbox.Refused || r.File == nil || len(r.File.Content) > 0 {
			t.Errorf("file_read %s: got %+v, %+v", path, r.Exit, r.File)
		}
		r = Exec(t, s, within(10*time.Second, write(path, "changed")))
		if r.Reason != sandbox.Refused {
			t.Errorf("file_write %s: got %+v, %+v", path, r.Exit, r.File)
		}
	}
	if content, err := os.ReadFile(file); err != nil || string(content) != secret {
		t.Errorf("the canary has changed: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("beside the canary: %v, %v", entries, err)
	}
}

// testWrites makes, changes and removes where nothing may be.
func testWrites(t *testing.T, s sandbox.Sandbox) {
	var script strings.Builder
	for _, dir := range []string{"/", "/etc", "/usr", "/usr/bin", "/bin", "/lib", "/var", "/opt", "/boot", "/sys", "/proc", "/proc/self", "/proc/sys/kernel", "/dev", "/run", "/run/empty", "/home", "/root"} {
		fmt.Fprintf(&script, "for do in ': > %[1]s/new' 'mkdir %[1]s/new' 'ln -s x %[1]s/new' 'mkfifo %[1]s/new' 'cp /bin/true %[1]s/new' 'mv f %[1]s/new' 'ln f %[1]s/new'; do eval \"$do\" && echo \"$do\"; done\n", dir)
	}
	for _, file := range []string{"/etc/passwd", "/etc/resolv.conf", "/etc/ld.so.cache", "/usr/bin/env", "/bin/bash", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sys/user/max_user_namespaces", "/proc/sys/net/ipv4/ip_forward"} {
		fmt.Fprintf(&script, "for do in ': > %[1]s' 'echo 1 >> %[1]s' 'chmod 777 %[1]s' 'chmod u+s %[1]s' 'test -e %[1]s && rm -f %[1]s && test ! -e %[1]s' 'touch -d 2000-01-01 %[1]s' 'truncate -s 0 %[1]s' 'mv %[1]s f'; do eval \"$do\" && echo \"$do\"; done\n", file)
	}
	r := Exec(t, s, within(60*time.Second, Bash("cd /workspace; : > f\nexec 2>/dev/null\n"+script.String()+"for file in uid_map gid_map setgroups; do echo '0 0 1' > /proc/$$/$file && echo $file; done\necho 5 > /proc/1/oom_score_adj && echo score\necho probed")))
	mustExit(t, r, 0)
	if r.Stdout != "probed\n" {
		t.Errorf("not refused:\n%s", r.Stdout)
	}
	// The same by the machine's own file operations.
	for _, path := range []string{"/etc/passwd", "/usr/bin/new", "/proc/self/comm", "/dev/new", "../etc/new", "/workspace/../etc/new"} {
		if r := Exec(t, s, write(path, "x")); r.Reason != sandbox.Refused {
			t.Errorf("file_write %s: got %+v, %+v", path, r.Exit, r.File)
		}
	}
}

// testMounts reads what is mounted where, and how.
func testMounts(t *testing.T, s sandbox.Sandbox) {
	writable := map[string]bool{"/workspace": true, "/tmp": true, "/dev/shm": true, "/proc": true}
	devices := map[string]bool{}
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		writable["/dev/"+name], devices["/dev/"+name] = true, true
	}
	n := 0
	for line := range strings.Lines(output(t, s, "cat /proc/self/mountinfo")) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			continue
		}
		n++
		point, options := fields[4], ","+fields[5]+","
		masked := strings.HasPrefix(point, "/proc/") // by /dev/null or an empty directory
		if !contains(options, ",nosuid,") {
			t.Errorf("%s is mounted with %s: set-user-id counts", point, options)
		}
		if !contains(options, ",nodev,") && !devices[point] && !masked {
			t.Errorf("%s is mounted with %s: devices work", point, options)
		}
		if !contains(options, ",ro,") && !writable[point] && !masked {
			t.Errorf("%s is mounted with %s", point, options)
		}
	}
	if n < 5 {
		t.Errorf("only %d mounts were seen", n)
	}
	want := "fd full null random shm stderr stdin stdout urandom zero"
	if got := output(t, s, "echo $(ls /dev)"); got != want {
		t.Errorf("/dev has %q, want %q", got, want)
	}
}

func testProc(t *testing.T, s sandbox.Sandbox) {
	for _, path := range []string{"kcore", "keys", "latency_stats", "timer_list", "timer_stats", "sched_debug", "interrupts", "kmsg", "vmallocinfo", "kpagecount", "iomem", "slabinfo"} {
		script := fmt.Sprintf("f=/proc/%s; if test -e $f; then head -c 100 $f | tr -d '\\0 0\\n:-'; fi; :", path)
		if r := Exec(t, s, within(5*time.Second, Bash(script))); r.Stdout != "" && path != "iomem" {
			t.Errorf("/proc/%s says %q", path, r.Stdout)
		}
	}
	for _, path := range []string{"acpi", "asound", "scsi"} {
		if got := output(t, s, "ls -A /proc/"+path+" 2>/dev/null; :"); got != "" {
			t.Errorf("/proc/%s has %q", path, got)
		}
	}
	if got := output(t, s, "echo /proc/[0-9]*"); got != "/proc/1 /proc/2" {
		t.Errorf("the processes are %s", got)
	}
	got := output(t, s, "for f in environ mem maps io auxv stack root cwd exe fd/0; do if test -L /proc/1/$f; then readlink /proc/1/$f; else head -c 10 /proc/1/$f; fi; done 2>/dev/null; :")
	if got != "" {
		t.Errorf("pid 1 says %q", got)
	}
}

// testDescriptors looks for what was left open.
func testDescriptors(t *testing.T, s sandbox.Sandbox) {
	const list = "import os\nfor f in sorted(map(int, os.listdir('/proc/self/fd'))):\n    try: print(f, os.readlink('/proc/self/fd/%d' % f).split(':')[0])\n    except OSError: pass\n"
	want := "0 /dev/null\n1 pipe\n2 pipe\n"
	for range 3 {
		if r := Exec(t, s, inArgv(Python(list))); r.Stdout != want {
			t.Errorf("got %q, want %q; %s", r.Stdout, want, r.Stderr)
		}
		r := Exec(t, s, Python(list)) // the script's own may be there
		if rest, ok := strings.CutPrefix(r.Stdout, want); !ok || strings.Count(rest, "\n") > 1 {
			t.Errorf("got %q", r.Stdout)
		}
		if got := output(t, s, "ls /proc/$$/fd; :"); got != "0\n1\n2" {
			t.Errorf("bash has %q", got)
		}
	}
	done := make(chan error, 20) // beside many others too
	for range cap(done) {
		go func() {
			r, err := unattended(s, "ls /proc/$$/fd; sleep 0.5")
			if err == nil && r.Stdout != "0\n1\n2\n" {
				err = fmt.Errorf("got %q, %+v", r.Stdout, r.Exit)
			}
			done <- err
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func unattended(s sandbox.Sandbox, script string) (Result, error) {
	return exec(context.Background(), s, within(30*time.Second, Bash(script)))
}

// testSetUserID gains nothing by files that would give more elsewhere.
func testSetUserID(t *testing.T, s sandbox.Sandbox) {
	r := Exec(t, s, within(20*time.Second, Bash(`
me=$(id -u)
for dir in /workspace /tmp /dev/shm; do
  cp "$(command -v python3)" $dir/it; chmod 6755 $dir/it
  $dir/it -c 'import os; print(*os.getresuid()); print(*[l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")])'
  setcap cap_sys_admin+ep $dir/it && echo "a capability on $dir/it"
  rm $dir/it
done
for it in su passwd mount newgrp chsh ping; do
  path=$(command -v $it) || continue
  $path --help </dev/null >/dev/null &
  wait
done
printf x | su root -c id && echo root
echo me $me
`)))
	mustExit(t, r, 0)
	lines := strings.Split(strings.TrimSpace(r.Stdout), "\n")
	me, _ := strings.CutPrefix(lines[len(lines)-1], "me ")
	want := strings.Repeat(strings.Repeat(me+" ", 3)[:3*len(me)+2]+"\n0000000000000000\n", 3) + "me " + me
	if got := strings.TrimSpace(r.Stdout); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// testSpecialFiles makes what a host would stumble over.
func testSpecialFiles(t *testing.T, s sandbox.Sandbox) {
	got := probe(t, s, `
import stat
for dir in ("/workspace", "/tmp", "/dev/shm"):
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        refused("mknod in " + dir, (errno.EPERM, errno.EACCES), lambda: os.mknod(dir + "/device", kind | 0o666, os.makedev(1, 3)))
    assert not os.path.exists(dir + "/device")
os.mkfifo("/workspace/fifo")
import socket
socket.socket(socket.AF_UNIX).bind("/workspace/socket")
os.symlink("/dev/zero", "/workspace/zero")
os.mkdir("/workspace/directory")
print("probed")
`)
	if got != "" {
		t.Errorf("not refused:\n%s", got)
	}
	for _, name := range []string{"fifo", "socket", "zero", "directory", "/dev/zero", "/dev/stdin"} {
		begin := time.Now()
		if r := Exec(t, s, within(10*time.Second, read(name, 100))); r.Reason != sandbox.Refused {
			t.Errorf("file_read %s: got %+v", name, r.Exit)
		}
		if r := Exec(t, s, within(10*time.Second, write(name, "x"))); r.Reason != sandbox.Refused {
			t.Errorf("file_write %s: got %+v", name, r.Exit)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("%s: took %v", name, took)
		}
	}
}

// testScore tries to have somebody else ended when memory runs out.
func testScore(t *testing.T, s sandbox.Sandbox) {
	r := Exec(t, s, Bash("for n in -1000 -1 0 999; do echo $n > /proc/self/oom_score_adj; echo $n > /proc/$$/oom_score_adj; echo 0 > /proc/$$/oom_adj; done 2>/dev/null; cat /proc/$$/oom_score_adj"))
	if contains(s.Info().Enforced["fs_allowlist"], "without Landlock") {
		if r.Stdout != "0\n" && r.Stdout != "1000\n" && r.Stdout != "999\n" {
			t.Errorf("the score is %q", r.Stdout)
		}
		return
	}
	if r.Stdout != "1000\n" {
		t.Errorf("the score is %q", r.Stdout)
	}
}

// testLeftBehind looks in one sandbox for what another one has left.
func testLeftBehind(t *testing.T, b sandbox.Backend) {
	const left = `
open("/workspace/trace", "w").write("x"); open("/tmp/trace", "w").write("x"); open("/dev/shm/trace", "w").write("x")
print(raw(N["shmget"], 0x4242, 4096, 0o1666), raw(N["msgget"], 0x4242, 0o1666), raw(N["semget"], 0x4242, 1, 0o1666))
LIBC.syscall(N["mq_open"], b"trace", 0o102, 0o666, None) # Landlock refuses it
print("probed")
`
	one := Start(t, b)
	if got := probe(t, one, left); strings.Count(got, "succeeded") != 3 {
		t.Fatalf("nothing was left: %s", got)
	}
	if err := one.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := probe(t, Start(t, b), `
for dir in ("/workspace", "/tmp", "/dev/shm", "/var/tmp"):
    for name in os.listdir(dir):
        print(dir, name)
for name in ("shmget", "msgget"):
    call(name, 0x4242, 0, 0, ok=(errno.ENOENT,))
call("semget", 0x4242, 0, 0, ok=(errno.ENOENT,))
call("mq_open", b"trace", 0, 0, None, ok=(errno.ENOENT, errno.EACCES))
print("probed")
`)
	if got != "" {
		t.Errorf("found:\n%s", got)
	}
}

// testOrdinary runs what people run.
func testOrdinary(t *testing.T, s sandbox.Sandbox) {
	for _, c := range []struct{ needs, script string }{
		{"bash", "diff <(seq 9) <(seq 9) && cat < <(echo x) && coproc cat && echo a | tee >(cat >/dev/null) | grep -q a"},
		{"bash", "mkdir -p a b; echo x > a/f; mv a/f b/f; ln b/f a/g; mv b c; cp -a c d; rm -r a c d"},
		{"bash", "mkfifo p; (echo x > p) & read -r x < p; test $x = x; rm p"},
		{"bash", "trap 'got=1' USR1; kill -USR1 $$; test $got = 1; (kill -9 $BASHPID); test $? = 137"},
		{"bash", "ulimit -a >/dev/null; exec 5<>/tmp/five; echo x >&5; exec 5>&-; : > /dev/null; echo x >> /dev/stderr; x=$(</proc/self/status); test -n \"$x\""},
		{"timeout", "timeout 5 true; timeout 0.1 sleep 5; test $? = 124"},
		{"setsid", "setsid -w true; nohup true >/dev/null; nice -n 5 true"},
		{"find", "mkdir -p x/y; touch x/y/z; test \"$(find x -type f -exec echo {} +)\" = x/y/z; find x -print0 | xargs -0 -P 4 -n 1 ls -d >/dev/null; rm -r x"},
		{"tar", "mkdir t; seq 99999 > t/n; ln -s n t/l; tar czf t.tgz t; rm -r t; tar xzf t.tgz; test $(wc -l < t/n) = 99999; rm -r t t.tgz"},
		{"sort", "seq 200000 | shuf | sort -n --parallel=4 -S 1M | tail -1 | grep -qx 200000"},
		{"awk", "seq 9 | awk '{ s += $1 } END { exit s != 45 }'; echo abc > s; sed -i s/b/B/ s; grep -q aBc s"},
		{"git", "git init -q g && cd g && git config user.name x && git config user.email x@x && seq 99 > f && git add . && git commit -qm one && git mv f h && git commit -qam two && git gc -q && test $(git log --oneline | wc -l) = 2 && git clone -q . ../g2 && cd .. && rm -rf g g2"},
		{"curl", "curl --version >/dev/null; curl -s --max-time 3 http://127.0.0.1:9/; test $? = 7; curl -s file:///etc/hostname >/dev/null"},
		{"make", "printf 'all: a b\\na b:\\n\\techo x > $@\\n' > Makefile; make -s -j4; test -s a -a -s b; rm a b Makefile"},
		{"perl", "perl -e 'use IO::Socket::INET; my $l = IO::Socket::INET->new(Listen => 1) or die; print fork ? wait : exit' >/dev/null"},
		{"node", "node -e 'const w = require(\"worker_threads\"); console.log(1)' | grep -qx 1"},
		{"gcc", "echo 'int main(){return 0;}' > c.c && gcc c.c -o c && ./c && rm c c.c"},
		{"du", "df /workspace /tmp >/dev/null; du -s . >/dev/null; stat -f . >/dev/null; ls -la >/dev/null; ps ax >/dev/null; free >/dev/null; uptime >/dev/null; uname -a >/dev/null; nproc >/dev/null"},
	} {
		if c.needs == "node" && weak(s, "memory_mb") {
			continue // it reserves more than RLIMIT_AS lets it
		}
		if r := Exec(t, s, Bash("command -v "+c.needs)); r.Code != 0 {
			t.Logf("the sandbox has no %s", c.needs)
			continue
		}
		r := Exec(t, s, within(60*time.Second, Bash("set -eo pipefail; cd /tmp; mkdir -p o; cd o\n"+strings.ReplaceAll(c.script, "; test $? =", " || rc=$?; test ${rc:-0} ="))))
		if r.Reason != sandbox.Exited || r.Code != 0 {
			t.Errorf("%q: got %+v, %q", c.script, r.Exit, r.Stderr)
		}
	}
	for name, code := range map[string]string{
		"threads":         "import threading, concurrent.futures as f\nl = threading.Lock()\nwith f.ThreadPoolExecutor(20) as p: assert sum(p.map(abs, range(-99, 0))) == 4950\nt = threading.Thread(target=l.acquire); t.start(); t.join()",
		"subprocess":      "import subprocess as s\nassert s.run(['cat'], input=b'x', stdout=s.PIPE).stdout == b'x'\nassert s.run('exit 3', shell=True).returncode == 3\nassert s.run(['true'], close_fds=False, start_new_session=True, cwd='/tmp', umask=7).returncode == 0",
		"multiprocessing": "import multiprocessing as m\nif __name__ == '__main__':\n    c = m.get_context('fork')\n    with c.Pool(4) as p: assert p.map(abs, range(-9, 1)) == list(range(9, -1, -1))\n    q = c.Queue(); q.put(1); assert q.get() == 1\n    v = c.Value('i', 3); assert v.value == 3\n    from multiprocessing import shared_memory as s\n    b = s.SharedMemory(create=True, size=9999); b.buf[0] = 1; b.close(); b.unlink()",
		"asyncio":         "import asyncio\nasync def main():\n    p = await asyncio.create_subprocess_exec('echo', 'x', stdout=-1)\n    assert (await p.communicate())[0] == b'x\\n'\n    s = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)\n    r, w = await asyncio.open_connection(*s.sockets[0].getsockname())\n    assert await r.read() == b''\n    assert await asyncio.to_thread(sum, [1, 2]) == 3\nasyncio.run(main())",
		"sqlite":          "import sqlite3\nd = sqlite3.connect('/workspace/db'); d.execute('PRAGMA journal_mode=WAL'); d.execute('CREATE TABLE IF NOT EXISTS t (x)'); d.executemany('INSERT INTO t VALUES (?)', [(i,) for i in range(999)]); d.commit(); d.execute('VACUUM'); assert d.execute('SELECT count(*) FROM t').fetchone()[0] >= 999",
		"sockets":         "import socket\na, b = socket.socketpair(); a.send(b'x'); assert b.recv(9) == b'x'\nfor f, h in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):\n    l = socket.socket(f); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); l.bind((h, 0)); l.listen(); c = socket.socket(f); c.connect(l.getsockname()); c.close()\nu = socket.socket(socket.AF_UNIX); u.bind('/tmp/u'); u.listen(); socket.socket(socket.AF_UNIX).connect('/tmp/u')\nassert socket.getaddrinfo('localhost', 80) and socket.if_nameindex()",
		"files":           "import mmap, os, tempfile, shutil, fcntl, pathlib\nwith tempfile.NamedTemporaryFile() as f:\n    f.write(b'x' * 9999); f.flush(); m = mmap.mmap(f.fileno(), 0); assert m[5] == 120\n    fcntl.flock(f, fcntl.LOCK_EX)\nd = tempfile.mkdtemp(); pathlib.Path(d, 'a').write_text('x'); shutil.copytree(d, d + '2'); shutil.rmtree(d); os.utime(d + '2', (1, 1)); os.chmod(d + '2', 0o700); os.memfd_create('x'); os.getrandom(9); os.sched_getaffinity(0)",
		"modules":         "import ssl, hashlib, ctypes, select, signal, time, uuid, zlib, bz2, lzma, decimal, urllib.request, http.server\nssl.create_default_context(); signal.setitimer(signal.ITIMER_REAL, 0.05); signal.signal(signal.SIGALRM, lambda *_: None); time.sleep(0.1); hashlib.scrypt(b'x', salt=b'y', n=2, r=1, p=1); select.epoll().poll(0); uuid.uuid1()",
	} {
		r := Exec(t, s, within(60*time.Second, Python(code)))
		if r.Reason != sandbox.Exited || r.Code != 0 {
			t.Errorf("python %s: got %+v, %s", name, r.Exit, r.Stderr)
		}
	}
}

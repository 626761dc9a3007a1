package sandboxtest

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func testFence(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	t.Run("privileges", func(t *testing.T) {
		status := output(t, s, "cat /proc/self/status")
		for _, line := range []string{
			"NoNewPrivs:\t1", "CapInh:\t0000000000000000", "CapPrm:\t0000000000000000",
			"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000",
			"SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000",
		} {
			if !contains(status, line+"\n") {
				t.Errorf("no line %q in\n%s", line, status)
			}
		}
		if os.Geteuid() == 0 {
			want := "1000"
			if !ownUserNamespace(t, s) { // then it is the host's, which no user of the host has
				want = output(t, s, "id -u")
				if n, err := strconv.Atoi(want); err != nil || n < 1<<30 {
					t.Errorf("the uid on the host is %s", want)
				}
			}
			if got := output(t, s, "id -u; id -g; id -G"); got != want+"\n"+want+"\n"+want {
				t.Errorf("the ids are %q", got)
			}
		}
		if got := output(t, s, "cat /proc/self/oom_score_adj; ulimit -c; ulimit -Hc; cat /proc/self/setgroups"); !strings.HasPrefix(got, "1000\n0\n0\n") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("unprivileged on the host", func(t *testing.T) {
		mark := marker()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = exec(t.Context(), s, within(3*time.Second, Bash("sleep "+mark)))
		}()
		if !eventually(2*time.Second, func() bool { return len(survivors(mark)) > 0 }) {
			t.Fatal("the process is not to be seen")
		}
		for _, pid := range survivors(mark) {
			info, err := os.ReadFile("/proc/" + itoa(pid) + "/status")
			if err == nil && contains(string(info), "Uid:\t0\t") {
				t.Error("user code is root on the host")
			}
		}
		<-done
	})
	t.Run("what must fail", func(t *testing.T) {
		for _, script := range []string{
			": > /x", ": > /usr/x", ": > /etc/x", ": > /etc/passwd", ": > /proc/x", ": > /dev/x", ": > /run/x", ": > /var/x", ": > /bin/x",
			"mkdir /workspace/../made", "rm -rf /usr/bin/env; test ! -e /usr/bin/env", "mount -t tmpfs x /tmp", "mount -o remount,rw /", "umount /proc/kcore", "umount /usr",
			"mknod /workspace/null c 1 3", "chroot / true", "hostname other", "echo 1 > /proc/sys/kernel/hostname", "echo b > /proc/sysrq-trigger",
			"echo -1000 > /proc/self/oom_score_adj", "cat /proc/kcore | head -c1 | grep -q .", "test -s /proc/keys", "test -s /proc/timer_list", "ls /sys/kernel",
			"ls /proc/acpi/*", "nsenter -t 1 -m true", "date -s 2000-01-01", "renice -n -5 $$", "chrt -f 1 true", "ulimit -n 1000000", "su -c true", "test -e /etc/shadow",
			"dd if=/dev/mem count=1", "test -e /dev/sda -o -e /dev/vda -o -e /dev/kvm -o -e /dev/tty0", "echo x > /proc/1/oom_score_adj", "unshare -n true", "unshare -r true", "unshare -Urm true", "sysctl -w kernel.core_pattern=x",
		} {
			r := Exec(t, s, within(10*time.Second, Bash(script)))
			if r.Reason != sandbox.Exited || r.Code == 0 {
				t.Errorf("%q: got %+v, %q", script, r.Exit, r.Stdout)
			}
		}
	})
	t.Run("what must work", func(t *testing.T) {
		for _, script := range []string{
			"echo x > f && test -s f", "echo x > /tmp/f && rm /tmp/f", "echo x > /dev/shm/f && rm /dev/shm/f", "head -c1 /dev/urandom >/dev/null", "echo x > /dev/null",
			"cat <(echo x)", "echo x | tee /dev/stderr >/dev/stdout", "ls /proc/self/fd >/dev/null", "test \"$(id -un)\" = sandbox", "getent hosts localhost",
			"python3 -c 'import multiprocessing as m; m.Lock()'", "python3 -c 'import ssl, json, sqlite3'", "cat /etc/passwd >/dev/null", "grep -q x <<< x", "test -w /workspace", "nice true",
			"ls /etc/ssl/certs >/dev/null", "date >/dev/null", "awk 'BEGIN{exit 0}'", "test \"$(stat -c %a /tmp)\" = 1777", "sh -c true", "test $$ = 2",
		} {
			r := Exec(t, s, within(10*time.Second, Bash(script)))
			if r.Reason != sandbox.Exited || r.Code != 0 {
				t.Errorf("%q: got %+v, %q", script, r.Exit, r.Stderr)
			}
		}
	})
	t.Run("loopback among themselves only", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		_, port, _ := net.SplitHostPort(listener.Addr().String())
		if r := Exec(t, s, within(5*time.Second, Bash("exec 9<>/dev/tcp/127.0.0.1/"+port))); r.Code == 0 {
			t.Error("the host's loopback can be reached")
		}
		r := Exec(t, s, within(10*time.Second, Python(`
import socket
l = socket.create_server(("127.0.0.1", 0))
c = socket.create_connection(l.getsockname())
print(sorted(n for _, n in socket.if_nameindex()))
for family, address in ((socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET6, ("2001:db8::1", 80)), (socket.AF_INET, ("169.254.169.254", 80))):
    try:
        s = socket.socket(family, socket.SOCK_DGRAM)
        s.sendto(b"x", address)
        print("sent to", address)
    except OSError:
        pass
try:
    socket.getaddrinfo("example.com", 80)
    print("resolved")
except OSError:
    pass
`)))
		mustExit(t, r, 0)
		if r.Stdout != "['lo']\n" {
			t.Errorf("got %q", r.Stdout)
		}
	})
	t.Run("two sandboxes share nothing", func(t *testing.T) { testApart(t, b) })
}

// testApart leaves traces of every kind in one sandbox and looks in another.
func testApart(t *testing.T, b sandbox.Backend) {
	one, two := Start(t, b), Start(t, b)
	mark := marker()
	done := make(chan Result, 1)
	go func() {
		r, _ := exec(t.Context(), one, within(8*time.Second, Python(`
import os, socket, subprocess, sys
for d in ("/workspace", "/tmp", "/dev/shm", "/var/tmp"):
    open(d + "/trace", "w").write("secret")
a = socket.socket(socket.AF_UNIX); a.bind("\0trace"); a.listen()
l = socket.create_server(("127.0.0.1", 4444))
subprocess.run(["ipcmk", "-M", "1024", "-Q"], stdout=subprocess.DEVNULL)
open("/tmp/ready", "w")
subprocess.run(["sleep", "`+mark+`"])
`)))
		done <- r
	}()
	ready := eventually(5*time.Second, func() bool {
		r, err := exec(t.Context(), one, Bash("test -e /tmp/ready"))
		return err == nil && r.Code == 0
	})
	if !ready {
		t.Fatalf("the first sandbox did not get ready: %+v", <-done)
	}
	r := Exec(t, two, within(10*time.Second, Bash(`
for d in /workspace /tmp /dev/shm /var/tmp; do ls -A $d; done
case $(cat /proc/[0-9]*/cmdline | tr '\0' ' ') in *'sle''ep `+mark+`'*) echo process;; esac
(exec 9<>/dev/tcp/127.0.0.1/4444) 2>/dev/null && echo connected
python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("\0trace"); print("abstract")' 2>/dev/null
ipcs -m -q | grep -c 0x
grep -c . /proc/net/unix
`)))
	if got := strings.TrimSpace(r.Stdout); got != "0\n1" {
		t.Errorf("the second sandbox sees %q", got)
	}
	uids := map[string]bool{}
	for _, s := range []sandbox.Sandbox{one, two} {
		uids[strings.Fields(output(t, s, "cat /proc/self/uid_map"))[1]+" "+output(t, s, "id -u")] = true
	}
	if os.Geteuid() == 0 && len(uids) != 2 {
		t.Error("two sandboxes have the same host ids")
	}
	if err := one.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if r := <-done; r.Reason != sandbox.Died {
		t.Errorf("closed under its call: got %+v", r.Exit)
	}
	mustBeGone(t, mark)
}

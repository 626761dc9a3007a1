package subprocess

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// underUML is init of a User-mode Linux: it has a pure cgroup v2 host's look.
const underUML = `#!/bin/bash
export PATH=/usr/bin:/bin:/usr/sbin:/sbin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmp /run; mount -t tmpfs tmp /tmp
mkdir /tmp/host; mount -t hostfs -o %[1]s none /tmp/host
ip link set lo up
mount -t tmpfs tmp /sys/fs/cgroup; mount -t cgroup2 cgroup /sys/fs/cgroup
mkdir /sys/fs/cgroup/init.scope; echo $$ > /sys/fs/cgroup/init.scope/cgroup.procs
cp /tmp/host/bigwave-init /tmp/host/subprocess.test /tmp/
export HOME=/tmp %[2]s=/tmp/bigwave-init
chmod 1777 /tmp; chmod 666 /dev/null /dev/zero /dev/full /dev/random /dev/urandom
cd /sys/fs/cgroup; echo "+cpu +memory +pids" > cgroup.subtree_control
mkdir user; echo "+cpu +memory +pids" > user/cgroup.subtree_control
mkdir user/svc; chown 12345 user/svc user/svc/cgroup.procs user/svc/cgroup.subtree_control
cd /tmp
python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 0x41))' # lo up
bash -c '%[4]s exec "$@"' bash %[5]s /tmp/subprocess.test -test.short -test.v -test.run '%[3]s'
echo "RC=$?"
poweroff -f
`

// TestOnUnified runs the heart of the suite where there is only cgroup v2,
// when this host has v1: as root, and as an ordinary user to whom a subtree is
// delegated as a systemd unit with Delegate=yes has it.
func TestOnUnified(t *testing.T) {
	if os.Getenv("BIGWAVE_TEST_UML") == "" {
		t.Skip("takes minutes: set BIGWAVE_TEST_UML=1")
	}
	t.Run("root", func(t *testing.T) {
		onUnified(t, "^(TestBackend|TestInitIsKilled|TestIdleMemory|TestCrash)$/^(Ends|Limits)?$", "", "")
	})
	t.Run("hostile code, and no Landlock", func(t *testing.T) {
		onUnified(t, "^TestHostile$/^(Identity|SystemCalls|OtherArchitectures|Writes|Mounts|Proc|Descriptors|Score)$", "", "")
	})
	t.Run("egress without nf_tables", func(t *testing.T) {
		onUnified(t, "^TestEgress$/^without$/^(an empty list is nothing|what is listed|TLS names)$", "", "")
	})
	t.Run("disks", func(t *testing.T) {
		onUnified(t, "^TestDisks$", "", "")
	})
	t.Run("ordinary user", func(t *testing.T) {
		onUnified(t, "^(TestBackend|TestInitIsKilled)$/^(Limits)?$",
			"echo $$ > /sys/fs/cgroup/user/svc/cgroup.procs;", "setpriv --reuid 12345 --regid 12345 --clear-groups")
	})
}

func onUnified(t *testing.T, tests, before, as string) {
	kernel, err := exec.LookPath("linux.uml")
	if err != nil {
		t.Fatal("needs User-mode Linux: apt-get install --no-install-recommends user-mode-linux")
	}
	dir := t.TempDir()
	for name, from := range map[string]string{"bigwave-init": initProgram, "subprocess.test": os.Args[0]} {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for parent := dir; parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, fmt.Appendf(nil, underUML, dir, initEnv, tests, before, as), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, kernel, "mem=2G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
		"init="+script, "con=null", "con0=null,fd:1", "con1=null", "quiet")
	out, err := cmd.CombinedOutput()
	if !strings.Contains(string(out), "RC=0") {
		t.Errorf("%v\n%s", err, out)
	}
}

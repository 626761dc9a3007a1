// Package umltest runs a test's own program under User-mode Linux, for what a
// test's host can't show: a machine with nothing but cgroup v2.
package umltest

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

// Env must be set for such tests to run, which take minutes.
const Env = "BIGWAVE_TEST_UML"

// boot is init of the machine, which then looks like a pure cgroup v2 host:
// what this host has, read-only, with everything else in memory.
const boot = `#!/bin/bash
export PATH=/usr/bin:/bin:/usr/sbin:/sbin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmp /run; mount -t tmpfs -o size=90%% tmp /tmp
mkdir /tmp/host; mount -t hostfs -o %[1]s none /tmp/host
ip link set lo up
mount -t tmpfs tmp /sys/fs/cgroup; mount -t cgroup2 cgroup /sys/fs/cgroup
mkdir /sys/fs/cgroup/init.scope; echo $$ > /sys/fs/cgroup/init.scope/cgroup.procs
cp -L /tmp/host/* /tmp/
export HOME=/tmp
chmod 1777 /tmp; chmod 666 /dev/null /dev/zero /dev/full /dev/random /dev/urandom
cd /sys/fs/cgroup; echo "+cpu +memory +pids" > cgroup.subtree_control
cd /tmp
python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 0x41))' # lo up
%[2]s
echo "RC=$?"
poweroff -f
`

// Machine is one that starts, runs a script and ends.
type Machine struct {
	Memory  string            // 2G if empty
	Files   map[string]string // by their names in /tmp: what of this host they are
	Modules []string          // of its kernel, such as fs/overlayfs/overlay
	Script  string            // run by bash in /tmp, as root; its last command's status is the machine's
}

// Run starts a machine, fails the test if its script fails, and returns what it
// printed. It skips the test unless Env is set.
func Run(t *testing.T, m Machine) string {
	t.Helper()
	if os.Getenv(Env) == "" {
		t.Skip("takes minutes: set " + Env + "=1")
	}
	kernel, err := exec.LookPath("linux.uml")
	if err != nil {
		t.Fatal("needs User-mode Linux: apt-get install --no-install-recommends user-mode-linux")
	}
	dir := t.TempDir()
	files := filepath.Join(dir, "files")
	if err := os.Mkdir(files, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, from := range m.Files {
		copyFile(t, from, filepath.Join(files, name))
	}
	before := ""
	for _, module := range m.Modules {
		found, _ := filepath.Glob("/usr/lib/uml/modules/*/kernel/" + module + ".ko")
		if len(found) == 0 {
			t.Fatalf("User-mode Linux has no module %s", module)
		}
		before += "insmod " + found[len(found)-1] + " || { echo RC=no module; poweroff -f; }\n"
	}
	for parent := files; parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := filepath.Join(dir, "boot")
	if err := os.WriteFile(script, fmt.Appendf(nil, boot, files, before+m.Script), 0o755); err != nil {
		t.Fatal(err)
	}
	memory := m.Memory
	if memory == "" {
		memory = "2G"
	}
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, kernel, "mem="+memory, "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
		"init="+script, "con=null", "con0=null,fd:1", "con1=null", "quiet")
	cmd.WaitDelay = time.Second // its processes hold the output open
	out, err := cmd.CombinedOutput()
	if !strings.Contains(string(out), "RC=0") {
		t.Errorf("%v\n%s", err, out)
	} else if testing.Verbose() {
		t.Logf("%s", out)
	}
	return string(out)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, content, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

package subprocess

import (
	"fmt"
	"os"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/umltest"
)

// TestOnUnified runs the heart of the suite where there is only cgroup v2,
// when this host has v1: as root, and as an ordinary user to whom a subtree is
// delegated as a systemd unit with Delegate=yes has it.
func TestOnUnified(t *testing.T) {
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
	t.Run("warm Python", func(t *testing.T) {
		onUnified(t, "^TestWarmPython$", "", "")
	})
	t.Run("ordinary user", func(t *testing.T) {
		onUnified(t, "^(TestBackend|TestInitIsKilled)$/^(Limits)?$/^(memory|pids|usage)?$/^(main|a child|exactly its own|bombs)?$",
			"echo $$ > /sys/fs/cgroup/user/svc/cgroup.procs;", "setpriv --reuid 12345 --regid 12345 --clear-groups")
	})
}

func onUnified(t *testing.T, tests, before, as string) {
	umltest.Run(t, umltest.Machine{
		Files: map[string]string{"bigwave-init": initProgram, "subprocess.test": os.Args[0]},
		Script: fmt.Sprintf(`export %[1]s=/tmp/bigwave-init
cd /sys/fs/cgroup; mkdir user; echo "+cpu +memory +pids" > user/cgroup.subtree_control
mkdir user/svc; chown 12345 user/svc user/svc/cgroup.procs user/svc/cgroup.subtree_control
cd /tmp
bash -c '%[3]s exec "$@"' bash %[4]s /tmp/subprocess.test -test.short -test.v -test.run '%[2]s'`, initEnv, tests, before, as),
	})
}

package sandboxtest

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Disks is what a backend under RunDisks must offer.
type Disks struct {
	WorkspaceMB int64
	ReadOnly    string // a directory of the host, at /data
	Writable    string // another, at /shared
}

// RunDisks holds a backend to the bounds of its disks and to its mounts. make
// is called once; RunDisks closes the backend.
func RunDisks(t *testing.T, make func(t *testing.T, d Disks) sandbox.Backend) {
	leaks := goleak.IgnoreCurrent()
	d := Disks{WorkspaceMB: 64, ReadOnly: hostData(t), Writable: t.TempDir()}
	if err := os.Chmod(d.Writable, 0o777); err != nil {
		t.Fatal(err)
	}
	b := make(t, d)
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	t.Run("Full", func(t *testing.T) { testFull(t, b) })
	t.Run("Bounds", func(t *testing.T) { testBounds(t, b) })
	t.Run("Mounts", func(t *testing.T) { testOffers(t, b, d) })
	if err := b.Close(context.Background()); err != nil {
		t.Errorf("Close: %v", err)
	}
	goleak.VerifyNone(t, leaks)
}

// roomy leaves the disk, and not memory, to be what runs out.
func roomy(p *sandbox.Policy) { p.MemoryMB = 256 }

// onDisk is false where workspaces lie in memory.
func onDisk(s sandbox.Sandbox) bool { return !contains(s.Info().Enforced["workspace"], "tmpfs") }

func testFull(t *testing.T, b sandbox.Backend) {
	s, other := Start(t, b, roomy), Start(t, b, roomy)
	full := func(t *testing.T, p sandbox.Process) {
		t.Helper()
		if r := Exec(t, s, within(60*time.Second, p)); !r.DiskFull || r.Reason != sandbox.Exited || r.OOM {
			t.Errorf("got %+v, %q", r.Exit, r.Stderr)
		}
	}
	room := func(t *testing.T) {
		t.Helper()
		mustExit(t, Exec(t, s, within(60*time.Second, Bash("rm -rf /workspace/* && echo x > f && cat f"))), 0)
	}
	t.Run("fallocate", func(t *testing.T) {
		r := Exec(t, s, within(60*time.Second, Bash("fallocate -l 100G f")))
		if r.Code == 0 || !contains(r.Stderr, "No space left on device") {
			t.Errorf("got %+v, %q", r.Exit, r.Stderr)
		}
		if onDisk(s) && !r.DiskFull { // in memory it gives back what it could not have whole
			t.Errorf("got %+v", r.Exit)
		}
		room(t)
	})
	t.Run("written full, again and again", func(t *testing.T) {
		for range 3 {
			full(t, Bash("cat /dev/zero > f"))
			room(t)
		}
	})
	t.Run("in Python", func(t *testing.T) {
		full(t, Python("f = open('f', 'wb', buffering=0)\nwhile True:\n    f.write(bytes(1 << 20))"))
		room(t)
	})
	t.Run("a call that makes do is not blamed", func(t *testing.T) {
		r := Exec(t, s, within(60*time.Second, Bash("cat /dev/zero > f; exit 0")))
		if r.DiskFull || r.Code != 0 {
			t.Errorf("got %+v", r.Exit)
		}
		r = Exec(t, s, write("g", strings.Repeat("x", 1<<20)))
		if !r.DiskFull || r.Reason != sandbox.Refused || r.File == nil || r.File.Errno != "ENOSPC" {
			t.Errorf("file_write: got %+v, %+v", r.Exit, r.File)
		}
		mustExit(t, Exec(t, other, within(20*time.Second, Bash("head -c 32M /dev/zero > f && rm f"))), 0)
		room(t)
	})
	t.Run("no end of empty files", func(t *testing.T) {
		const many = "import os\nos.mkdir('d')\nfor i in range(2000000):\n    open('d/%d' % i, 'w').close()\n"
		full(t, Python(many))
		if n, err := strconv.Atoi(output(t, s, "ls -f d | wc -l")); err != nil || n > 100000 {
			t.Errorf("%d files, %v", n, err)
		}
		room(t)
	})
	t.Run("a failure with room left is its own", func(t *testing.T) {
		if r := Exec(t, s, Bash("exit 3")); r.DiskFull || r.Code != 3 {
			t.Errorf("got %+v", r.Exit)
		}
	})
}

func testBounds(t *testing.T, b sandbox.Backend) {
	s := Start(t, b, roomy)
	t.Run("a hole takes no room", func(t *testing.T) {
		mustExit(t, Exec(t, s, Bash("truncate -s 10G sparse && test $(stat -c %b sparse) -lt 100 && cp --sparse=always sparse copy && rm sparse copy")), 0)
		if r := Exec(t, s, Bash("truncate -s 1P sparse; echo x > f")); r.DiskFull {
			t.Errorf("got %+v", r.Exit)
		}
		mustExit(t, Exec(t, s, Bash("rm -f sparse")), 0)
	})
	t.Run("nothing else to write to has no bound", func(t *testing.T) {
		for _, dir := range []string{"/tmp", "/dev/shm", "/var/tmp"} {
			r := Exec(t, s, within(30*time.Second, Bash("fallocate -l 100G "+dir+"/x; s=$?; rm -f "+dir+"/x; exit $s")))
			if r.Code == 0 || r.DiskFull {
				t.Errorf("%s: got %+v", dir, r.Exit)
			}
		}
		for _, dir := range []string{"/run/lock", "/dev/mqueue", "/run/user", "/home", "/root", "/var/log", "/run"} {
			if r := Exec(t, s, Bash("echo x > "+dir+"/x")); r.Code == 0 {
				t.Errorf("%s can be written to", dir)
			}
		}
	})
	t.Run("its mount", func(t *testing.T) {
		if got := output(t, s, "grep ' /workspace ' /proc/self/mounts"); !contains(got, "nosuid") || !contains(got, "nodev") || !contains(got, " rw,") {
			t.Errorf("got %q", got)
		}
		if got := output(t, s, "ls -A; stat -c '%a %U' ."); got != "755 sandbox" && got != "f\n755 sandbox" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("a call that removes all of it", func(t *testing.T) {
		Exec(t, s, Bash(`rm -rf "$PWD" /tmp/* /workspace`))
		mustExit(t, Exec(t, s, Bash("cd /workspace && echo x > f && test -s f && echo x > /tmp/f")), 0)
	})
	t.Run("what is left goes quickly", func(t *testing.T) {
		s := Start(t, b, roomy)
		mustExit(t, Exec(t, s, within(60*time.Second, Bash("for i in {1..2000}; do : > f$i; done; mkdir d; : > d/x; chmod 0 d f1; chattr +i f2 2>/dev/null; head -c 30M /dev/urandom > big; true"))), 0)
		begin := time.Now()
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("took %v", took)
		}
	})
	t.Run("a new sandbox has nothing of the last", func(t *testing.T) {
		if got := output(t, Start(t, b), "ls -A /workspace /tmp /dev/shm /var/tmp/ | grep -v :$ | wc -w"); got != "0" {
			t.Errorf("got %s names", got)
		}
	})
}

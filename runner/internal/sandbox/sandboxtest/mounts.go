package sandboxtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// hostData is a directory with a part that policies ask for and others that
// they do not.
func hostData(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"proj/sub", "project2", "Proj"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"proj/f": "inside", "proj/sub/g": "deep", "project2/f": "secret", "Proj/f": "secret", "secret": "secret"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"proj/up": "../secret", "proj/abs": filepath.Join(dir, "secret"), "proj/other": "../project2", "link": "project2"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func allow(paths ...string) func(*sandbox.Policy) {
	return func(p *sandbox.Policy) { p.FSAllowlist = append(p.FSAllowlist, paths...) }
}

func testOffers(t *testing.T, b sandbox.Backend, d Disks) {
	t.Run("not asked for", func(t *testing.T) {
		s := Start(t, b)
		mustExit(t, Exec(t, s, Bash("! test -e /data && ! test -e /shared && ! test -e /run/offer")), 0)
		mustBeDenied(t, s, "/data/proj/f", "/shared/x", "/data")
	})
	t.Run("read-only", func(t *testing.T) {
		s := Start(t, b, allow("/data"))
		if got := output(t, s, "cat /data/proj/f /data/secret; ls /data/proj/sub"); got != "insidesecretg" {
			t.Errorf("got %q", got)
		}
		for _, script := range []string{
			"echo x > /data/proj/f", "echo x > /data/new", "mkdir /data/d", "rm -f /data/secret", "touch /data/secret", "chmod 777 /data/secret", "mv /data/secret /data/s",
			"ln /data/secret /data/hard", "mount -o remount,rw /data", "truncate -s 0 /data/secret", "umount /data", "rmdir /data",
		} {
			if r := Exec(t, s, Bash(script)); r.Code == 0 {
				t.Errorf("%q worked", script)
			}
		}
		r := Exec(t, s, read("/data/proj/f", plenty))
		if r.File == nil || string(r.File.Content) != "inside" {
			t.Errorf("got %+v, %+v", r.Exit, r.File)
		}
		r = Exec(t, s, write("/data/proj/f", "x"))
		if r.File == nil || r.File.Errno != "EROFS" && r.File.Errno != "EACCES" || r.File.Denied {
			t.Errorf("got %+v, %+v", r.Exit, r.File)
		}
		if content, err := os.ReadFile(filepath.Join(d.ReadOnly, "proj/f")); string(content) != "inside" || err != nil {
			t.Errorf("the host's file holds %q, %v", content, err)
		}
	})
	t.Run("a part", func(t *testing.T) { testPart(t, b) })
	t.Run("writable", func(t *testing.T) { testWritable(t, b, d) })
	t.Run("more than fit", func(t *testing.T) {
		var many []string
		for i := range 200 {
			name := fmt.Sprintf("/many%03d", i)
			many = append(many, "/data"+name)
			if err := os.MkdirAll(d.ReadOnly+name, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		policy := Policy()
		allow(many...)(&policy)
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "many", Policy: policy})
		if err == nil {
			_ = s.Close(t.Context())
		}
		if e, ok := errors.AsType[*sandbox.StartError](err); !ok || e.Code != "policy_unenforceable" || e.Field != "fs_allowlist" {
			t.Errorf("200 mounts: got %v", err)
		}
		mustExit(t, Exec(t, Start(t, b, allow(many[:64]...)), Bash("test -d "+many[63])), 0)
	})
	t.Run("what is not there", func(t *testing.T) {
		for _, path := range []string{
			"/data2", "/dat", "/data/none", "/data/proj/f", "/data/link", "/data/proj/other", "/data/proj/../project2", "/data/", "/etc", "/", "/DATA", "/shared2",
			"/proc/self/root/data", "/data/project2/../../../etc",
		} {
			policy := Policy()
			allow(path)(&policy)
			s, err := b.Start(t.Context(), sandbox.Spec{ID: "none", Policy: policy})
			if err == nil {
				t.Errorf("%s: started", path)
				_ = s.Close(t.Context())
				continue
			}
			e, ok := errors.AsType[*sandbox.StartError](err)
			if !ok || e.Code != "policy_unenforceable" || e.Field != "fs_allowlist" || !contains(e.Message, path) || contains(e.Message, d.ReadOnly) {
				t.Errorf("%s: got %v", path, err)
			}
		}
	})
}

func mustBeDenied(t *testing.T, s sandbox.Sandbox, paths ...string) {
	t.Helper()
	for _, path := range paths {
		for _, p := range []sandbox.Process{read(path, plenty), write(path, "x")} {
			r := Exec(t, s, p)
			if r.Reason != sandbox.Refused || r.File == nil || !r.File.Denied || len(r.File.Content) > 0 {
				t.Errorf("%s %s: got %+v, %+v", p.Program, path, r.Exit, r.File)
			}
		}
	}
}

// testPart asks for less than is offered.
func testPart(t *testing.T, b sandbox.Backend) {
	s := Start(t, b, allow("/data/proj", "/data/proj/sub"))
	if got := output(t, s, "cat /data/proj/f; ls /data"); got != "insideproj" {
		t.Errorf("got %q", got)
	}
	for _, path := range []string{"/data/proj/f", "/data//proj/./f", "/data/proj/sub/../f", "/workspace/../data/proj/f", "../data/proj/f"} {
		if r := Exec(t, s, read(path, plenty)); r.File == nil || string(r.File.Content) != "inside" {
			t.Errorf("%s: got %+v, %+v", path, r.Exit, r.File)
		}
	}
	mustBeDenied(t, s, "/data/project2/f", "/data/proj/../secret", "/data/secret", "/data", "/data/Proj/f", "/DATA/proj/f", "/data/proj/up", "/data/proj/abs",
		"/data/proj/other/f", "/proc/self/root/data/proj/f", "/data/proj2", "/data/ｐroj/f", "/data/proj/../../etc/passwd")
	for _, path := range []string{"up", "abs", "other/f", "../secret", "../project2/f"} {
		if r := Exec(t, s, Bash("cat /data/proj/"+path)); r.Code == 0 || contains(r.Stdout, "secret") {
			t.Errorf("%s: got %q", path, r.Stdout)
		}
	}
	output(t, s, "ln -s /data/secret out; ln -s /data/proj/f in")
	mustBeDenied(t, s, "out", "in") // a link never leads from one root to another
}

func testWritable(t *testing.T, b sandbox.Backend, d Disks) {
	s, other := Start(t, b, allow("/shared", "/data/proj")), Start(t, b, allow("/shared"))
	output(t, s, "echo -n one > /shared/a; mkdir -p /shared/dir/real; echo -n safe > /shared/dir/real/passwd; cp /data/proj/f /shared/copy; mv /shared/copy /shared/dir/moved; truncate -s 1 /shared/dir/moved")
	if got := output(t, other, "cat /shared/a; chmod 666 /shared/a 2>/dev/null; stat -c %s /shared/dir/moved"); got != "one1" {
		t.Errorf("the other sees %q", got)
	}
	if content, err := os.ReadFile(filepath.Join(d.Writable, "a")); string(content) != "one" || err != nil {
		t.Errorf("the host has %q, %v", content, err)
	}
	r := Exec(t, s, write("/shared/new/file", "x"))
	if r.File == nil || r.File.Errno != "" {
		t.Errorf("got %+v, %+v", r.Exit, r.File)
	}
	for _, line := range strings.Split(output(t, s, "grep -E ' /(shared|data/proj) ' /proc/self/mounts"), "\n") {
		if !contains(line, "nosuid") || !contains(line, "nodev") {
			t.Errorf("got %q", line)
		}
	}
	if r := Exec(t, s, Bash("mknod /shared/null c 1 3")); r.Code == 0 {
		t.Error("a device was made")
	}
	output(t, s, "ln -s / /shared/root; ln -s /etc /shared/dir/etc; ln -s "+d.ReadOnly+" /shared/host")
	mustBeDenied(t, s, "/shared/root/etc/passwd", "/shared/dir/etc/passwd", "/shared/host/secret")
	t.Run("a link in the place of a part", func(t *testing.T) {
		policy := Policy()
		for _, path := range []string{"/shared/root", "/shared/dir/etc", "/shared/host", "/shared/host/proj"} {
			policy.FSAllowlist = []string{"/workspace", path}
			if s, err := b.Start(t.Context(), sandbox.Spec{ID: "link", Policy: policy}); err == nil {
				t.Errorf("%s: started", path)
				_ = s.Close(t.Context())
			}
		}
	})
	t.Run("a directory swapped for a link all the time", func(t *testing.T) {
		stop := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(3*time.Second, Python("import os\nos.mkdir('/shared/swap')\n"+strings.ReplaceAll(swapper, `"swap"`, `"/shared/dir"`))))
			stop <- r
		}()
		for range times(200) {
			r := Exec(t, other, read("/shared/dir/dir/passwd", plenty))
			if r.File == nil || len(r.File.Content) > 0 && string(r.File.Content) != "safe" {
				t.Fatalf("got %+v, %+v", r.Exit, r.File)
			}
		}
		policy := Policy()
		policy.FSAllowlist = []string{"/workspace", "/shared/dir/dir"}
		for range times(50) {
			s, err := b.Start(t.Context(), sandbox.Spec{ID: "race", Policy: policy})
			if err != nil {
				continue
			}
			if got := output(t, s, "ls /shared/dir/dir"); got != "passwd" {
				t.Errorf("got %q", got)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		<-stop
	})
}

package sandboxtest

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func read(path string, limit int64) sandbox.Process {
	return sandbox.Process{Program: sandbox.FileRead, Path: path, MaxRead: limit, Wall: 10 * time.Second}
}

func write(path, content string) sandbox.Process {
	return sandbox.Process{Program: sandbox.FileWrite, Path: path, Input: []byte(content), Wall: 10 * time.Second}
}

const plenty = 16 << 20

func testFiles(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	mustWrite := func(t *testing.T, path, content string) {
		t.Helper()
		r := Exec(t, s, write(path, content))
		if r.Reason != sandbox.Exited || r.File == nil || r.File.Errno != "" || r.File.Size != int64(len(content)) {
			t.Fatalf("write %.80q: got %+v, %+v", path, r.Exit, r.File)
		}
	}
	mustRead := func(t *testing.T, path, want string) {
		t.Helper()
		r := Exec(t, s, read(path, plenty))
		if r.Reason != sandbox.Exited || r.File == nil || string(r.File.Content) != want || r.File.Size != int64(len(want)) {
			t.Fatalf("read %.80q: got %+v, %+v", path, r.Exit, r.File)
		}
	}
	refused := func(t *testing.T, p sandbox.Process, denied bool, errnos ...string) {
		t.Helper()
		r := Exec(t, s, p)
		if r.Reason != sandbox.Refused || r.File == nil || r.File.Denied != denied || r.File.Message == "" || len(r.File.Content) > 0 {
			t.Fatalf("%s %.80q: got %+v, %+v", p.Program, p.Path, r.Exit, r.File)
		}
		for _, errno := range errnos {
			if r.File.Errno == errno {
				return
			}
		}
		t.Errorf("%s %.80q: got %s, want one of %v", p.Program, p.Path, r.File.Errno, errnos)
	}
	t.Run("round trips", func(t *testing.T) {
		for path, content := range map[string]string{
			"plain.txt":              "hello\n",
			"/workspace/absolute":    "x",
			"a/b/c/deep":             "made on the way",
			"./dot/../up":            "clean",
			"empty":                  "",
			"résumé 日本.txt":          "é",
			"new\nline":              "x",
			"-rf":                    "x",
			"*":                      "x",
			strings.Repeat("n", 255): "long name",
			"binary":                 string([]byte{0, 1, 0xff, '\n', 0}),
			"invalid-\xff":           "x",
			"big":                    strings.Repeat("0123456789abcdef", 1<<18),
		} {
			mustWrite(t, path, content)
			mustRead(t, path, content)
		}
		mustRead(t, "/workspace/a/../a/b//c/deep", "made on the way")
		mustWrite(t, "plain.txt", "ho")
		mustRead(t, "plain.txt", "ho")
		if got := output(t, s, "cat plain.txt; stat -c '%a %U' plain.txt a/b"); got != "ho644 sandbox\n755 sandbox" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("fifty at once into new directories", func(t *testing.T) {
		var wait sync.WaitGroup
		for i := range 50 {
			wait.Go(func() {
				r, err := exec(t.Context(), s, write("p/q/r/s/"+itoa(i), "x"))
				if err != nil || r.File == nil || r.File.Errno != "" {
					t.Errorf("got %+v, %+v, %v", r.Exit, r.File, err)
				}
			})
		}
		wait.Wait()
		if got := output(t, s, "ls p/q/r/s | wc -l"); got != "50" {
			t.Errorf("got %s files", got)
		}
	})
	t.Run("outside", func(t *testing.T) {
		for _, path := range []string{
			"/etc/passwd", "/", "/workspace/../etc/passwd", "../etc/passwd", "a/../../etc/passwd", "/workspace2/x", "/workspacex",
			"/proc/self/root/etc/passwd", "/proc/self/cwd/x", "/dev/fd/3", "/tmp/x", "/WORKSPACE/x", "//etc/passwd", "/proc/1/environ",
		} {
			refused(t, read(path, plenty), true, "EACCES")
			refused(t, write(path, "x"), true, "EACCES")
		}
	})
	t.Run("links that lead outside", func(t *testing.T) {
		output(t, s, "ln -s / r; ln -s /etc/passwd x; ln -s ../etc above; ln -s /proc/self/root pr; ln -s /proc/self/fd/1 fd; ln -s r/etc chain; ln -s /dev/zero zero; ln -s /tmp/new new")
		for _, path := range []string{"r/etc/passwd", "x", "above/passwd", "pr/etc/passwd", "fd", "chain/passwd", "zero", "new"} {
			refused(t, read(path, plenty), true, "EXDEV", "ELOOP")
			refused(t, write(path, "x"), true, "EXDEV", "ELOOP")
		}
		refused(t, write("r/tmp/made/by", "x"), true, "EXDEV")
		if got := output(t, s, "ls /tmp | wc -l"); got != "0" {
			t.Error("a file was made outside")
		}
	})
	t.Run("links that stay inside", func(t *testing.T) {
		output(t, s, "mkdir -p in; echo -n y > in/f; ln -s in/f link; ln -s in dir; ln -s loop loop")
		mustRead(t, "link", "y")
		mustRead(t, "dir/f", "y")
		mustWrite(t, "dir/new/g", "z")
		mustRead(t, "in/new/g", "z")
		refused(t, read("loop", plenty), false, "ELOOP")
	})
	t.Run("not a regular file", func(t *testing.T) {
		output(t, s, "mkfifo fifo; mkdir -p d; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'")
		begin := time.Now()
		refused(t, read("fifo", plenty), false, "EINVAL")
		refused(t, write("fifo", "x"), false, "ENXIO", "EINVAL")
		refused(t, read("sock", plenty), false, "ENXIO")
		refused(t, read("d", plenty), false, "EISDIR")
		refused(t, write("d", "x"), false, "EISDIR")
		refused(t, write("d/", "x"), false, "EISDIR")
		refused(t, read(".", plenty), false, "EISDIR")
		refused(t, read("", plenty), false, "EISDIR")
		refused(t, read("missing", plenty), false, "ENOENT")
		refused(t, read("plain.txt/x", plenty), false, "ENOTDIR")
		refused(t, write("plain.txt/x", "y"), false, "ENOTDIR")
		refused(t, read("nul\x00byte", plenty), false, "EINVAL")
		refused(t, read(strings.Repeat("long/", 1000), plenty), false, "ENAMETOOLONG")
		refused(t, write(strings.Repeat("n", 256), "x"), false, "ENAMETOOLONG")
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
		mustRead(t, "plain.txt", "ho")
	})
	t.Run("sizes", func(t *testing.T) {
		output(t, s, "truncate -s 1000000000000 sparse; printf 0123456789 > ten")
		begin := time.Now()
		refused(t, read("sparse", plenty), false, "EFBIG")
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("a sparse file took %v", took)
		}
		refused(t, read("ten", 9), false, "EFBIG")
		r := Exec(t, s, read("ten", 10))
		if r.File == nil || !bytes.Equal(r.File.Content, []byte("0123456789")) {
			t.Errorf("got %+v", r.File)
		}
	})
	t.Run("permissions are the user's", func(t *testing.T) {
		output(t, s, "echo x > locked; chmod 000 locked; mkdir shut; chmod 000 shut")
		refused(t, read("locked", plenty), false, "EACCES")
		refused(t, write("locked", "y"), false, "EACCES")
		refused(t, write("shut/x", "y"), false, "EACCES")
	})
	t.Run("a workspace without permissions", func(t *testing.T) {
		s := Start(t, b)
		for _, mode := range []string{"000", "600", "444"} {
			mustExit(t, Exec(t, s, Bash("chmod "+mode+" /workspace")), 0)
			Exec(t, s, Bash("true")) // may have been waiting since before
			mustExit(t, Exec(t, s, Bash("pwd && echo x > f && cat f")), 0)
			if r := Exec(t, s, write("/workspace/dir/g", "x")); r.File == nil || r.File.Errno != "" {
				t.Errorf("%s: got %+v, %+v", mode, r.Exit, r.File)
			}
		}
	})
	t.Run("a directory swapped for a link all the time", func(t *testing.T) {
		output(t, s, "mkdir -p swap/real; echo -n safe > swap/real/passwd")
		stop := make(chan Result, 1)
		go func() {
			r, _ := exec(t.Context(), s, within(4*time.Second, Python(swapper)))
			stop <- r
		}()
		for range times(300) {
			r := Exec(t, s, read("swap/dir/passwd", plenty))
			if r.File == nil || len(r.File.Content) > 0 && string(r.File.Content) != "safe" {
				t.Fatalf("got %+v, %+v", r.Exit, r.File)
			}
		}
		<-stop
	})
}

const swapper = `
import os
os.chdir("swap")
while True:
    for target in ("real", "/etc"):
        try:
            os.symlink(target, "tmp")
        except FileExistsError:
            pass
        os.rename("tmp", "dir")
`

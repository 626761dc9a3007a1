package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

const root = "../.."

// TestTheREADMEIsTrue runs every command of the README's walk-through, in
// order, in one shell.
func TestTheREADMEIsTrue(t *testing.T) {
	s := start(t, options{})
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	before, after, ok := strings.Cut(string(text), pythonSection)
	if !ok {
		t.Fatal("the README does not speak of Python tools")
	}
	_, after, _ = strings.Cut(after, "\n## ")
	out := commands(t, s, before+after, 9)
	for _, want := range []string{`/workspace/notes.txt:1:TODO`, `42\n`, "event: call.output", `step 3`, "event: run.finished", "cgroup"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in the output:\n%s", want, out)
		}
	}
}

const pythonSection = "\n## Python tools\n"

// TestTheREADMEOnPythonToolsIsTrue does the same where the sandboxes have the
// base image.
func TestTheREADMEOnPythonToolsIsTrue(t *testing.T) {
	s := pythonStack(t)
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), pythonSection)
	section, _, _ = strings.Cut(section, "\n## ")
	out := commands(t, s, section, 6)
	for _, want := range []string{`"title":"Greeter"`, `"greeting":"Welcome"`, "event: call.event", "greeting 2", `"greeting":"Welcome, Ann!"`, `"authorised":true`, "Welcome, Bob!", "Hello, Eve!"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in the output:\n%s", want, out)
		}
	}
}

// commands runs the blocks of commands in a text, of which there are at least
// so many, in one shell, and returns what they print.
func commands(t *testing.T, s *stack, text string, least int) string {
	t.Helper()
	script := "set -euo pipefail\n"
	blocks := 0
	for _, m := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(text, -1) {
		if strings.HasPrefix(m[1], "make ") { // these have tests of their own
			continue
		}
		script += strings.ReplaceAll(m[1], "bin/bigwave-runner", filepath.Join(bin, "bigwave-runner")) + "\necho\n"
		blocks++
	}
	if blocks < least {
		t.Fatalf("only %d blocks of commands", blocks)
	}
	cmd := exec.Command("bash", "-c", script)
	cmd.Env = append(os.Environ(), "BIGWAVE_URL="+s.base, "BIGWAVE_ADMIN_TOKEN="+adminToken)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// TestEverySettingIsInTheREADME compares the settings that the code reads with
// the README's table.
func TestEverySettingIsInTheREADME(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, dir := range []string{"controlplane/internal/config", "runner/internal/config"} {
		files, _ := filepath.Glob(filepath.Join(root, dir, "*.go"))
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			src, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`env:"([A-Z_]+)`).FindAllStringSubmatch(string(src), -1) {
				found++
				if name := "BIGWAVE_" + strings.TrimPrefix(m[1], "BIGWAVE_"); !strings.Contains(string(text), "`"+name+"`") {
					t.Errorf("%s is not in the README", name)
				}
			}
		}
	}
	if found < 25 {
		t.Errorf("found only %d settings", found)
	}
}

// make starts a target of the Makefile in its own process group.
func makeTarget(t *testing.T, target string, env ...string) (*exec.Cmd, *lockedBuffer) {
	t.Helper()
	cmd := exec.Command("make", "-C", root, target)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out := &lockedBuffer{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

func TestMakeDemo(t *testing.T) {
	cmd, out := makeTarget(t, "demo")
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"== grep_repo", "README:1:TODO", "call.output", "step 2", "run.finished", "hello", "done"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the output:\n%s", want, out)
		}
	}
}

func TestMakeUpStaysUntilItIsTold(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		data := t.TempDir()
		for dir := data; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o711); err != nil {
				t.Fatal(err)
			}
		}
		addr := freeAddr(t)
		cmd, out := makeTarget(t, "up", "BIGWAVE_LISTEN="+addr, "BIGWAVE_DATA_DIR="+data)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		token := ""
		eventually(t, 2*time.Minute, "it says where it is", func() error {
			_, rest, ok := strings.Cut(out.String(), "admin token")
			if !ok {
				select {
				case err := <-ended:
					t.Fatalf("it ended: %v\n%s", err, out)
				default:
				}
				return os.ErrNotExist
			}
			token = strings.Fields(rest)[0]
			return nil
		})
		c := &client{t: t, base: "http://" + addr, token: token}
		wantStatus(t, c.sh(c.post("/v1/agent-sessions", object{}).want(201).str("id"), "echo hi"), "ok")

		if sig == syscall.SIGINT { // as a terminal does: to the whole group
			_ = syscall.Kill(-cmd.Process.Pid, sig)
		} else {
			_ = cmd.Process.Signal(sig)
		}
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Fatalf("%v: it did not end\n%s", sig, out)
		}
		if _, err := http.Get("http://" + addr + "/healthz"); err == nil {
			t.Errorf("%v: the control plane still answers", sig)
		}
		eventually(t, 5*time.Second, "nothing is left", func() error { return noProcessWithEnv("BIGWAVE_DATA_DIR=" + data) })
	}
}

package sandboxtest

import (
	"regexp"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// fromFile is p with its script on a descriptor.
func fromFile(p sandbox.Process) sandbox.Process {
	p.InArgv = false
	return p
}

func inArgv(p sandbox.Process) sandbox.Process {
	p.InArgv = true
	return p
}

func testPrograms(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	t.Run("bash", func(t *testing.T) {
		for name, p := range map[string]sandbox.Process{"argv": Bash(""), "descriptor": fromFile(Bash(""))} {
			for _, c := range []struct{ script, stdout, stderr string }{
				{"echo $0", "bash\n", ""},
				{"true\nno-such-command; echo \"[$REPLY]\"", "[]\n", "bash: line 2: no-such-command: command not found\n"},
				{"ls /proc/$$/fd; :", "0\n1\n2\n", ""},
				{"pwd; umask; echo $HOME", "/workspace\n0022\n/workspace\n", ""},
				{"trap 'echo bye' EXIT; f() { return 3; }; f || echo $?", "3\nbye\n", ""},
				{"cat <<X\nhere é\nX", "here é\n", ""},
				{"#!/bin/sh\n# comment\necho x # y", "x\n", ""},
				{"", "", ""},
			} {
				p.Script = []byte(c.script)
				r := Exec(t, s, p)
				if r.Reason != sandbox.Exited || r.Code != 0 || r.Stdout != c.stdout || r.Stderr != c.stderr {
					t.Errorf("%s %q: got %d, %q, %q", name, c.script, r.Code, r.Stdout, r.Stderr)
				}
			}
			p.Script = []byte("if; then")
			if r := Exec(t, s, p); r.Code == 0 || !strings.Contains(r.Stderr, "syntax error") {
				t.Errorf("%s: a syntax error gave %d, %q", name, r.Code, r.Stderr)
			}
		}
	})
	t.Run("python", func(t *testing.T) {
		for name, p := range map[string]sandbox.Process{"argv": inArgv(Python("")), "descriptor": Python("")} {
			for _, c := range []struct {
				script, stdout string
				code           int
			}{
				{"import sys, os\nprint(sys.argv, os.getcwd(), __name__)", "['-c'] /workspace __main__\n", 0},
				{"import sys\nsys.exit(5)", "", 5},
				{"import sys\nsys.exit('no')", "", 1},
				{"x = 1\ndef f():\n    return x\nclass C:\n    y = x\nprint(f(), C.y, [x for _ in range(2)])", "1 1 [1, 1]\n", 0},
				{"print('é')", "é\n", 0},
				{"import os\nprint(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))", "['0', '1', '2'] 4\n", 0},
				{"import atexit\natexit.register(print, 'bye')", "bye\n", 0},
				{"", "", 0},
			} {
				p.Script = []byte(c.script)
				r := Exec(t, s, p)
				if r.Reason != sandbox.Exited || r.Code != c.code || r.Stdout != c.stdout {
					t.Errorf("%s %q: got %d, %q, %q", name, c.script, r.Code, r.Stdout, r.Stderr)
				}
			}
		}
	})
	t.Run("harness", func(t *testing.T) {
		for _, request := range []string{"", "{}", `{"op":"dance"}`, strings.Repeat("x", 1<<20)} {
			p := sandbox.Process{Program: sandbox.Harness, Script: []byte(request)}
			var results strings.Builder
			p.Results = &results
			r := Exec(t, s, p)
			if r.Reason != sandbox.Exited || r.Code != 1 || r.Stdout != "" {
				t.Errorf("%.20q: got %+v, %q, %q", request, r.Exit, r.Stdout, r.Stderr)
			}
			if got := results.String(); strings.Count(got, "\n") != 1 || !strings.HasPrefix(got, `{"error"`) {
				t.Errorf("%.20q: got the results %.200q", request, got)
			}
			p.Results = nil // nobody listens
			mustExit(t, Exec(t, s, p), 1)
		}
	})
	t.Run("python imports from the workspace", func(t *testing.T) {
		mustExit(t, Exec(t, s, Bash("echo 'v = 41' > mine.py")), 0)
		if r := Exec(t, s, Python("import mine; print(mine.v + 1)")); r.Stdout != "42\n" {
			t.Errorf("got %q, %q", r.Stdout, r.Stderr)
		}
	})
	t.Run("tracebacks show the source", func(t *testing.T) {
		r := Exec(t, s, Python("def f():\n    raise ValueError('no')\n\nf()\n"))
		mustExit(t, r, 1)
		want := "Traceback (most recent call last):\n" +
			"  File \"<python_exec>\", line 4, in <module>\n    f()\n" +
			"  File \"<python_exec>\", line 2, in f\n    raise ValueError('no')\nValueError: no\n"
		marked := regexp.MustCompile("(?m)^ +[~^]+\n") // under what is at fault, in some versions
		if got := marked.ReplaceAllString(r.Stderr, ""); got != want {
			t.Errorf("got %s", r.Stderr)
		}
		r = Exec(t, s, Python("import traceback\ntry:\n    1/0\nexcept Exception:\n    traceback.print_exc()\nraise SystemExit(2)"))
		mustExit(t, r, 2)
		if !strings.Contains(r.Stderr, "    1/0\n") {
			t.Errorf("got %s", r.Stderr)
		}
		r = Exec(t, s, Python("x = = 1"))
		if r.Code != 1 || !strings.Contains(r.Stderr, "SyntaxError") || !strings.Contains(r.Stderr, "<python_exec>") {
			t.Errorf("got %d, %s", r.Code, r.Stderr)
		}
	})
	t.Run("large scripts", func(t *testing.T) {
		for _, size := range []int{50_000, 70_000, 131_071} {
			script := "echo ok #" + strings.Repeat("x", size-9)
			if r := Exec(t, s, Bash(script)); r.Stdout != "ok\n" {
				t.Errorf("%d in argv: got %+v, %q", size, r.Exit, r.Stderr)
			}
		}
		if _, err := exec(t.Context(), s, Bash(strings.Repeat("x", 131_072))); err == nil {
			t.Error("an argument that is too long was started")
		}
		if _, err := exec(t.Context(), s, Bash("echo a\x00b")); err == nil {
			t.Error("an argument with a NUL was started")
		}
		script := "true #" + strings.Repeat("x", 3<<20) + "\necho ok"
		if r := Exec(t, s, fromFile(Bash(script))); r.Stdout != "ok\n" {
			t.Errorf("bash: got %+v, %q", r.Exit, r.Stderr)
		}
		if r := Exec(t, s, Python("x = '"+strings.Repeat("x", 3<<20)+"'\nprint(len(x))")); r.Stdout != "3145728\n" {
			t.Errorf("python: got %+v, %q", r.Exit, r.Stderr)
		}
	})
	t.Run("environment", func(t *testing.T) {
		t.Setenv("BIGWAVE_CANARY", "from the host")
		p := Bash("env")
		p.Env = map[string]string{"MINE": "a b\nc", "BIG": strings.Repeat("x", 100_000)}
		r := Exec(t, s, p)
		mustExit(t, r, 0)
		if !strings.Contains(r.Stdout, "MINE=a b\nc\n") || !strings.Contains(r.Stdout, "BIG=xxx") || !strings.Contains(r.Stdout, "HOME=/workspace\n") {
			t.Errorf("got %.300s", r.Stdout)
		}
		if strings.Contains(r.Stdout, "CANARY") {
			t.Error("the host's environment is seen inside")
		}
		p.Env = map[string]string{"A=B": "c"}
		if _, err := exec(t.Context(), s, p); err == nil {
			t.Error("a name with = was passed")
		}
	})
}

package boxtest

import (
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// warmPython is a box.Config with warm interpreters.
func warmPython(cfg *box.Config) { cfg.WarmPython = true }

// roomy is a policy that has room for a warm interpreter.
func roomy(p *sandbox.Policy) { p.MemoryMB = 512 }

// fromWarm ends well in a process that a warm interpreter has forked.
const fromWarm = "import sys; sys.exit('asyncio' not in sys.modules)"

// warmed is a sandbox whose interpreter has forked a call.
func warmed(t testing.TB, b *box.Backend) sandbox.Sandbox {
	t.Helper()
	s := sandboxtest.Start(t, b, roomy)
	awaitFork(t, s)
	return s
}

// awaitFork returns once a call of s was forked. A call for which that takes
// too long, as on a busy host, has an interpreter started.
func awaitFork(t testing.TB, s sandbox.Sandbox) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if r := sandboxtest.Exec(t, s, sandboxtest.Python(fromWarm)); r.Exit.Code == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no call is forked from a warm interpreter")
		}
	}
}

// same are scripts that must not notice where their interpreter came from.
var same = map[string]string{
	"process": `
import os, resource, sys
for line in open("/proc/self/status"):
    if line.split(":")[0] in ("Name", "Umask", "State", "TracerPid", "Uid", "Gid", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"):
        print(line, end="")
print(os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/oom_score_adj").read())
print([(name, resource.getrlimit(getattr(resource, name))) for name in dir(resource) if name.startswith("RLIMIT")])
print(sorted(os.listdir("/proc/self/fd")), os.readlink("/proc/self/fd/0"), sorted(os.listdir("/proc/self/task")) == [str(os.getpid())])
print([p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())])
print(os.stat("/proc/self/environ").st_uid == os.getuid())
`,
	"interpreter": `
import os, sys
print(sys.argv, sys.path, sys.executable, sys.prefix, sys.flags, dict(os.environ), sorted(globals()), __name__, sys.modules["__main__"].__dict__ is globals())
print(sys.stdin.read(), sys.stdout.encoding, sys.stderr.errors, sys.stdout.line_buffering, sys.stdin.seekable(), sys.stdout.seekable(), sys.stdout.write_through, os.isatty(1), sys.getfilesystemencoding())
print(os.popen("echo $HOME $BASH_VERSION $PATH").read())
`,
	"an exception":    "def f():\n    return 1 / 0\nf()\n",
	"no syntax":       "def f(:\n",
	"an exit code":    "import sys\nsys.exit(7)\n",
	"an exit message": "import sys\nsys.exit('no')\n",
	"an exit handler": "import atexit, threading, time\natexit.register(print, 'bye')\nthreading.Thread(target=lambda: (time.sleep(0.1), print('done'))).start()\n",
	"a signal":        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
	"a module of its own": `
open("json.py", "w").write("mine = 1\n")
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import json; print(json.mine)"], capture_output=True, text=True).stdout)
`,
	"that module":     "import json\nprint(json.mine)\nimport os\nos.remove('json.py')\n",
	"multiprocessing": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))\n",
}

// WarmPython holds calls that are forked from a warm interpreter to what is so
// of those that start one.
func WarmPython(t *testing.T, make New) {
	cold := sandboxtest.Start(t, Make(t, make), roomy)
	warm := warmed(t, Make(t, make, warmPython))
	for _, name := range []string{
		"process", "interpreter", "an exception", "no syntax", "an exit code", "an exit message",
		"an exit handler", "a signal", "a module of its own", "that module", "multiprocessing",
	} {
		t.Run("same/"+name, func(t *testing.T) {
			want := sandboxtest.Exec(t, cold, sandboxtest.Python(same[name]))
			got := sandboxtest.Exec(t, warm, sandboxtest.Python(same[name]))
			if got.Stdout != want.Stdout || got.Stderr != want.Stderr || got.Exit.Code != want.Exit.Code || got.Exit.Signal != want.Exit.Signal || got.Exit.Reason != want.Exit.Reason {
				t.Errorf("forked: %+v\n%s%s\nstarted: %+v\n%s%s", got.Exit, got.Stdout, got.Stderr, want.Exit, want.Stdout, want.Stderr)
			}
		})
	}
	t.Run("nothing stays", func(t *testing.T) {
		sandboxtest.Exec(t, warm, sandboxtest.Python("import asyncio, os, sys, builtins\nasyncio.left = builtins.left = sys.left = 1\nos.environ['LEFT'] = '1'\nleft = 1\nsys.path.append('/left')\nos.umask(0)"))
		r := sandboxtest.Exec(t, warm, sandboxtest.Python("import asyncio, os, sys, builtins\nprint(hasattr(asyncio, 'left'), hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ, 'left' in globals(), '/left' in sys.path, os.umask(0))"))
		if strings.TrimSpace(r.Stdout) != "False False False False False False 18" {
			t.Errorf("got %s%s", r.Stdout, r.Stderr)
		}
	})
	t.Run("hostile", func(t *testing.T) {
		for _, script := range []string{
			"import os, signal\nos.kill(-1, signal.SIGKILL)",
			"import os, signal\ntry: os.kill(1, signal.SIGKILL)\nexcept OSError as e: print(e)\nos.kill(os.getppid(), 9)",
			"import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
			"x = bytearray(10 << 30)",
			"import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)\nos._exit(3)",
			"import os\nfor n in range(3, 4096):\n    try: os.write(n, b'x' * 48)\n    except OSError: pass",
		} {
			p := sandboxtest.Python(script)
			p.Wall = 2 * time.Second
			sandboxtest.Exec(t, warm, p)
			if r := sandboxtest.Exec(t, warm, sandboxtest.Python("print(6 * 7)")); r.Stdout != "42\n" {
				t.Errorf("after %q: %+v %s%s", script, r.Exit, r.Stdout, r.Stderr)
			}
		}
		awaitFork(t, warm)
	})
}

// QuietEnds closes sandboxes about when their interpreter starts, as a sandbox
// with one call does: an end that was asked for is nothing to warn of.
func QuietEnds(t *testing.T, make New) {
	var log strings.Builder
	lock := new(sync.Mutex)
	b := Make(t, make, warmPython, func(cfg *box.Config) {
		cfg.Log = slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
			lock.Lock()
			defer lock.Unlock()
			return log.Write(p)
		}), &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	for i := range 40 {
		s := sandboxtest.Start(t, b, roomy)
		sandboxtest.Exec(t, s, sandboxtest.Python("pass"))
		time.Sleep(15*time.Millisecond + time.Duration(i)*time.Millisecond)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(100 * time.Millisecond) // what would have been late has come
	lock.Lock()
	defer lock.Unlock()
	if log.Len() > 0 {
		t.Errorf("it was said:\n%s", log.String())
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// sums is a Python tool that says what it finds of earlier calls.
const sums = `
import os
left = []

class Tools:
    def add(self, a: int, b: int, __user__: dict = {}) -> dict:
        """
        Adds.
        :param a: one
        :param b: another
        """
        left.append(a)
        print("adding")
        return {"sum": a + b, "calls": len(left), "user": __user__["id"], "home": os.environ["HOME"]}
`

// WarmTools has Python tools called in a sandbox whose image has pydantic.
func WarmTools(t *testing.T, make New) {
	s := warmed(t, Make(t, make, warmPython))
	for _, user := range []string{"ann", "bob"} {
		var results harness.Results
		body, err := harness.Call{
			Tool: harness.Tool{ID: "sums", Content: sums}, Function: "add",
			Arguments: json.RawMessage(`{"a": 1, "b": 2}`), User: harness.User{ID: user},
		}.Request(results.Limits)
		if err != nil {
			t.Fatal(err)
		}
		var printed, errors strings.Builder
		exit, err := s.Exec(t.Context(), sandbox.Process{ID: user, Program: sandbox.Harness, Script: body, Results: &results, Stdout: &printed, Stderr: &errors, Wall: time.Minute})
		got := results.Call(harness.Ending{Code: exit.Code})
		if err != nil || got.Error != nil || printed.String() != "adding\n" || errors.String() != "" {
			t.Fatalf("%v %+v %v %q %q", err, exit, got.Error, printed.String(), errors.String())
		}
		want := `{"sum":3,"calls":1,"user":"` + user + `","home":"/workspace"}`
		if string(got.Value) != want {
			t.Errorf("got %s, want %s", got.Value, want)
		}
	}
}

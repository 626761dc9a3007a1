package subprocess

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// initProgram is built once for all tests.
var initProgram string

// initEnv hands it to a run of these tests as another user.
const initEnv = "BIGWAVE_TEST_INIT"

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if initProgram = os.Getenv(initEnv); initProgram != "" { // as an ordinary user
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "bigwave-init-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		panic(err)
	}
	initProgram = filepath.Join(dir, "bigwave-init")
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", initProgram, "github.com/bigwave/bigwave/runner/cmd/init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		panic(string(out))
	}
	return m.Run()
}

func config(t testing.TB) Config {
	return Config{DataDir: t.TempDir(), RunnerID: "test-" + filepath.Base(t.TempDir()) + "-" + strconv.Itoa(os.Getpid()), InitPath: initProgram}
}

func newBackend(t testing.TB, change ...func(*Config)) *Backend {
	t.Helper()
	cfg := config(t)
	for _, c := range change {
		c(&cfg)
	}
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(context.Background()); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return b
}

func TestBackend(t *testing.T) {
	sandboxtest.Run(t, func(t *testing.T) sandbox.Backend {
		return newBackend(t, func(c *Config) {
			if os.Geteuid() != 0 {
				c.AllowWeak = []string{"memory", "pids", "cpu"}
			}
		})
	})
}

func TestEgress(t *testing.T) {
	for name, noFilter := range map[string]bool{"with nf_tables": false, "without": true} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.RunEgress(t, func(t *testing.T, e sandboxtest.Egress) sandbox.Backend {
				return newBackend(t, func(c *Config) {
					c.Egress = egress.Config{Resolver: e.Resolver, PrivateAllow: e.PrivateAllow, NoFilter: noFilter}
					if os.Geteuid() != 0 {
						c.AllowWeak = []string{"memory", "pids", "cpu"}
					}
				})
			})
		})
	}
}

// TestAsOrdinaryUser runs the same suite with nothing but user namespaces.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this is an ordinary user")
	}
	program := filepath.Join(filepath.Dir(initProgram), "subprocess.test")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^(TestBackend|TestHostile|TestLandlock|TestRefusesWithoutSeccomp|TestRefusesABadFilter|TestDisks|TestFailedStarts.*|TestMountsAreRefused|TestEgress|TestWeak.*|TestRefusesWithoutLimits)$", "-test.short", "-test.v")
	cmd.Dir = os.TempDir()
	cmd.Env = []string{initEnv + "=" + initProgram, "PATH=/usr/bin:/bin", "HOME=/nonexistent", "TMPDIR=" + os.TempDir()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRefusesWithoutLimits is for hosts where an ordinary user has no cgroup.
func TestRefusesWithoutLimits(t *testing.T) {
	b := newBackend(t)
	if b.cgroups.Has(cgroup.Memory) {
		t.Skip("limits are to be had here")
	}
	_, err := b.Start(t.Context(), sandbox.Spec{ID: "open", Policy: sandboxtest.Policy()})
	e, ok := errors.AsType[*sandbox.StartError](err)
	if !ok || e.Code != "policy_unenforceable" || e.Field != "memory_mb" {
		t.Errorf("got %v", err)
	}
	missing := map[string]bool{}
	for _, p := range b.Check(t.Context()).Missing() {
		missing[p.Name] = true
	}
	for _, name := range []string{"cgroup memory", "cgroup pids", "cgroup cpu"} {
		if !missing[name] {
			t.Errorf("the report does not miss %s", name)
		}
	}
}

func start(t testing.TB, b *Backend) *box {
	t.Helper()
	return sandboxtest.Start(t, b).(*box)
}

func TestInitIsKilled(t *testing.T) {
	b := newBackend(t)
	x := start(t, b)
	died := make(chan sandbox.Exit, 1)
	started := make(chan struct{})
	go func() {
		p := sandboxtest.Bash("sleep 60")
		p.Started = func() { close(started) }
		e, _ := x.Exec(t.Context(), p)
		died <- e
	}()
	<-started
	if err := syscall.Kill(x.process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-x.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("Done was not closed")
	}
	if e := <-died; e.Reason != sandbox.Died {
		t.Errorf("got %+v", e)
	}
	if pids := x.group.Processes(); len(pids) > 0 {
		t.Errorf("processes %v outlived the init", pids)
	}
	if _, err := x.Exec(t.Context(), sandboxtest.Bash("true")); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("Exec: %v", err)
	}
}

func TestSupervisorIsKilled(t *testing.T) {
	b := newBackend(t)
	x := start(t, b)
	p := sandboxtest.Bash("sleep 60")
	p.Started = func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		for c := range x.calls {
			for range 2 { // asked, and then ended
				_ = x.kill(c.sup)
			}
		}
	}
	e, err := x.Exec(t.Context(), p)
	if err != nil || e.Reason != sandbox.Exited || e.Signal != "SIGKILL" || e.OOM {
		t.Errorf("got %+v, %v", e, err)
	}
	if e, err := x.Exec(t.Context(), sandboxtest.Bash("exit 3")); err != nil || e.Code != 3 {
		t.Errorf("the next call: got %+v, %v", e, err)
	}
}

func TestSpareSupervisorIsKilled(t *testing.T) {
	x := start(t, newBackend(t))
	for range 20 {
		x.mu.Lock()
		x.stock()
		spare := x.spares[0]
		_, _ = x.kill(spare), x.kill(spare)
		x.mu.Unlock()
		<-spare.ended
		if e, err := x.Exec(t.Context(), sandboxtest.Bash("exit 3")); err != nil || e.Code != 3 {
			t.Fatalf("got %+v, %v", e, err)
		}
	}
}

func TestOneBackendPerDataDirectory(t *testing.T) {
	cfg := config(t)
	b := newBackend(t, func(c *Config) { *c = cfg })
	if _, err := New(cfg); err == nil {
		t.Fatal("two backends share a data directory")
	}
	if err := b.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	newBackend(t, func(c *Config) { *c = cfg })
}

// TestCrash ends a process that holds a backend as kill -9 would, with many
// sandboxes whose programs fork and write, some with a way out.
func TestCrash(t *testing.T) {
	const id = "crash-test"
	cfg := config(t)
	cfg.RunnerID, cfg.Egress.PrivateAllow = id, []string{"127.0.0.2"}
	if os.Geteuid() != 0 {
		cfg.AllowWeak = []string{"memory", "pids", "cpu"}
	}
	if dir := os.Getenv("BIGWAVE_TEST_CRASH"); dir != "" {
		cfg.DataDir = dir
		crash(t, cfg)
		return
	}
	far, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCrash$", fmt.Sprintf("-test.short=%v", testing.Short()))
	cmd.Env = append(os.Environ(), "BIGWAVE_TEST_CRASH="+cfg.DataDir, "BIGWAVE_TEST_FAR="+far.Addr().String(), initEnv+"="+initProgram)
	mounts := strings.Count(readFile(t, "/proc/self/mountinfo"), "\n")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "sandboxes are up") {
		t.Fatalf("the crash did not happen: %v\n%s", err, out)
	}
	begin := time.Now()
	b := newBackend(t, func(c *Config) { *c = cfg; c.Spares = -1 })
	for _, p := range b.Check(t.Context()).Pieces { // what is left is not in its way
		if p.State == "missing" && p.Name != "landlock" {
			t.Errorf("%s: %s", p.Name, p.Detail)
		}
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	nothing := func() error {
		h := b.holdings()
		if pids := withArgument(crashMark); len(pids) > 0 || h.loops > 0 || h.files > 0 || h.groups > 0 || h.mounts > mounts {
			return fmt.Errorf("processes %v, %+v; %d mounts before", pids, h, mounts)
		}
		return nil
	}
	for nothing() != nil && time.Since(begin) < 30*time.Second {
		time.Sleep(20 * time.Millisecond)
	}
	if err := nothing(); err != nil {
		t.Errorf("left: %v", err)
	}
	t.Logf("gone after %v", time.Since(begin).Round(time.Millisecond))
}

// crashMark is an argument that no other process has.
const crashMark = "86399.5"

const crashScript = `mkdir d; echo x > d/f; chmod 0 d
sleep ` + crashMark + ` & setsid sleep ` + crashMark + ` &
if [ -n "$FAR_PORT" ]; then exec 3<>/dev/tcp/127.0.0.2/$FAR_PORT; fi
(while :; do head -c 1000000 /dev/zero > grows; (true &); sleep .05; done) &
exec sleep ` + crashMark

func crash(t *testing.T, cfg Config) {
	far := os.Getenv("BIGWAVE_TEST_FAR")
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	boxes := 20
	if testing.Short() { // where every process takes long to start
		boxes = 5
	}
	up := make(chan int)
	for i := range boxes {
		policy := sandboxtest.Policy()
		p := sandboxtest.Bash(crashScript)
		if i%2 == 0 {
			policy.NetworkAllowlist = []string{far, "ok.test:443"}
			_, port, _ := net.SplitHostPort(far)
			p.Env = map[string]string{"FAR_PORT": port}
		}
		s, err := b.Start(t.Context(), sandbox.Spec{ID: fmt.Sprint("x", i), Policy: policy})
		if err != nil {
			t.Fatal(err)
		}
		p.Started = func() { up <- i }
		go func() { _, _ = s.Exec(context.Background(), p) }() // ends with this process
	}
	for range boxes {
		<-up
	}
	for end := time.Now().Add(30 * time.Second); len(withArgument(crashMark)) < 3*boxes; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes came up, want %d", len(withArgument(crashMark)), 3*boxes)
		}
	}
	if h := b.holdings(); h.groups < boxes && b.cgroups.Has(cgroup.Memory) || h.loops < boxes && b.disks != nil {
		t.Fatalf("%d sandboxes hold only %+v", boxes, h)
	}
	fmt.Println("sandboxes are up")
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// withArgument are the host's sleeps of that length.
func withArgument(arg string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(content), "sleep\x00"+arg+"\x00") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// TestIdleMemory adds up what an idle sandbox's own processes hold: the init,
// a supervisor that waits and its call's process.
func TestIdleMemory(t *testing.T) {
	x := start(t, newBackend(t, func(c *Config) { c.Spares = -1 }))
	for range 50 {
		if _, err := x.Exec(t.Context(), sandboxtest.Bash("true")); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(100 * time.Millisecond)
	total, n := 0, 0
	for _, pid := range descendants(x.process.Pid) {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
				var kib int
				if _, err := fmt.Sscan(rest, &kib); err != nil {
					t.Fatal(err)
				}
				total, n = total+kib, n+1
			}
		}
	}
	t.Logf("%d processes hold %d KiB", n, total)
	if n != 3 || total > 6<<10 {
		t.Errorf("%d processes hold %d KiB", n, total)
	}
}

func descendants(pid int) []int {
	pids := []int{pid}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range tasks {
		content, _ := os.ReadFile(file)
		for _, word := range strings.Fields(string(content)) {
			if child, err := strconv.Atoi(word); err == nil {
				pids = append(pids, descendants(child)...)
			}
		}
	}
	return pids
}

// TestStart bounds what a session waits for; a spare makes the difference.
func TestStartIsQuickWithASpare(t *testing.T) {
	b := newBackend(t)
	x := start(t, b) // has the spare made
	b.filling.Wait()
	begin := time.Now()
	y := start(t, b)
	if took := time.Since(begin); took > 100*time.Millisecond { // 0.5 ms on a quiet machine
		t.Errorf("took %v", took)
	}
	if x.name == y.name || x.slot == y.slot {
		t.Error("the same sandbox twice")
	}
}

func TestRemoveTree(t *testing.T) {
	parent, outside := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "keep"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(parent, "box"), 0o755); err != nil {
		t.Fatal(err)
	}
	script := `cd box; ln -s "$0" out; ln -s "$0/keep" f; mkfifo p; mkdir -p a/b; ln -s "$0" a/b/out; chmod 0 a/b a
python3 -c '
import os
for i in range(10000):
    os.mkdir("deep"); os.chdir("deep")
open(b"\xff\n-rf", "w")'`
	cmd := exec.Command("bash", "-c", script, outside)
	cmd.Dir = parent
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := removeTree(parent, "box"); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(parent); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if info, err := os.Stat(filepath.Join(outside, "keep")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("what a link led to: %v, %v", info, err)
	}
	if err := removeTree(parent, "missing"); err != nil {
		t.Errorf("nothing to remove: %v", err)
	}
}

func TestBlamed(t *testing.T) {
	for name, c := range map[string]struct {
		v    verdict
		want bool
	}{
		"no kill":                          {verdict{alone: true, killed: true}, false},
		"alone":                            {verdict{kills: 1, alone: true}, true},
		"alone, and killed by us later":    {verdict{kills: 1, alone: true, byUs: true, before: true}, true},
		"alone, killed by us first":        {verdict{kills: 1, alone: true, byUs: true}, false},
		"beside others, unhurt":            {verdict{kills: 1}, false},
		"beside others, killed":            {verdict{kills: 1, killed: true}, true},
		"beside others, its supervisor":    {verdict{kills: 1, unspoken: true}, true},
		"beside others, killed by us":      {verdict{kills: 1, byUs: true, before: true}, false},
		"killed, but not by the limit":     {verdict{killed: true}, false},
		"its supervisor, not by the limit": {verdict{alone: true, unspoken: true}, false},
	} {
		if got := blamed(c.v); got != c.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestBeneathRoots(t *testing.T) {
	for path, want := range map[string]string{
		"a":                   "a",
		"/workspace/a/b":      "a/b",
		"/workspace":          ".",
		"":                    ".",
		"a/../b":              "b",
		"a/":                  "a/",
		"/workspace/./../a":   "",
		"/workspace2":         "",
		"..":                  "",
		"/workspace/..":       "",
		"/workspace/a/../..":  "",
		"/":                   "",
		"/workspace//a//b/./": "a/b/",
	} {
		_, got, ok := beneathRoots(path, []string{workspace, "/data/proj"})
		if got != want && ok || ok != (want != "") {
			t.Errorf("%q: got %q, %v, want %q", path, got, ok, want)
		}
	}
}

package boxtest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// crashEnv is set for a process that is to crash.
const crashEnv, farEnv = "BIGWAVE_TEST_CRASH", "BIGWAVE_TEST_FAR"

// Crash ends a process that holds a backend as kill -9 would, with many
// sandboxes whose programs fork and write, some with a way out. test is the
// name of the calling test, which runs again in that process; left counts what
// else a backend may not leave.
func Crash(t *testing.T, make New, test string, left func(cfg box.Config) int) {
	cfg := Config(t)
	cfg.RunnerID, cfg.Egress.PrivateAllow = "crash-test", []string{"127.0.0.2"}
	if dir := os.Getenv(crashEnv); dir != "" {
		cfg.DataDir = dir
		crash(t, make, cfg)
		return
	}
	far, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$", fmt.Sprintf("-test.short=%v", testing.Short()))
	cmd.Env = append(os.Environ(), crashEnv+"="+cfg.DataDir, farEnv+"="+far.Addr().String())
	mounts := sandboxtest.Mounts()
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "sandboxes are up") {
		t.Fatalf("the crash did not happen: %v\n%s", err, out)
	}
	begin := time.Now()
	cfg.Spares = -1
	b := Make(t, make, func(c *box.Config) { *c = cfg })
	for _, p := range b.Check(t.Context()).Pieces { // what is left is not in its way
		if p.State == "missing" && p.Name != "landlock" {
			t.Errorf("%s: %s", p.Name, p.Detail)
		}
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	nothing := func() error {
		h := holdingsOf(cfg)
		if pids, more := withArgument(crashMark), left(cfg); len(pids) > 0 || h.loops > 0 || h.files > 0 || h.groups > 0 || h.mounts > mounts || more > 0 {
			return fmt.Errorf("processes %v, %+v and %d more; %d mounts before", pids, h, more, mounts)
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

func crash(t *testing.T, make New, cfg box.Config) {
	far := os.Getenv(farEnv)
	b, err := make(cfg)
	if err != nil {
		t.Fatal(err)
	}
	disks := hasDisks(t, b)
	boxes := 20
	if testing.Short() { // where every process takes long to start
		boxes = 5
	}
	up := newCounter()
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
		p.Started = up.one
		go func() { _, _ = s.Exec(context.Background(), p) }() // ends with this process
	}
	up.wait(boxes)
	for end := time.Now().Add(30 * time.Second); len(withArgument(crashMark)) < 3*boxes; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes came up, want %d", len(withArgument(crashMark)), 3*boxes)
		}
	}
	if h := holdingsOf(cfg); h.groups < boxes && os.Geteuid() == 0 || h.loops < boxes && disks {
		t.Fatalf("%d sandboxes hold only %+v", boxes, h)
	}
	fmt.Println("sandboxes are up")
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// counter counts what several goroutines have done.
type counter struct{ done chan struct{} }

func newCounter() counter { return counter{make(chan struct{})} }

func (c counter) one() { c.done <- struct{}{} }

func (c counter) wait(n int) {
	for range n {
		<-c.done
	}
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
		var pid int
		if _, err := fmt.Sscan(filepath.Base(filepath.Dir(file)), &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func read(t testing.TB, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

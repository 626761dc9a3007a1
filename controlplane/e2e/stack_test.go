package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/bus"
)

const adminToken = "e2e-admin-token-0123456789abcdef"

// bin is where the built programs are.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "bigwave-e2e-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		bin = dir
		defer shared.stop()
		root, _ := filepath.Abs("../..")
		for name, pkg := range map[string]string{
			"bigwave-controlplane": "./controlplane/cmd/controlplane",
			"bigwave-runner":       "./runner/cmd/runner",
			"bigwave-init":         "./runner/cmd/init",
		} {
			cmd := exec.Command("go", "build", "-o", filepath.Join(bin, name), pkg)
			cmd.Dir = root
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				fmt.Fprintf(os.Stderr, "build %s: %v\n%s", name, err, out)
				return 1
			}
		}
		return m.Run()
	}())
}

// tier is which parts the control plane stands on.
type tier string

const (
	personal tier = "personal" // SQLite, NATS in process
	cluster  tier = "cluster"  // PostgreSQL, a NATS server of its own
)

// eachTier runs the test on both tiers.
func eachTier(t *testing.T, test func(t *testing.T, s *stack)) {
	for _, tr := range []tier{personal, cluster} {
		t.Run(string(tr), func(t *testing.T) { test(t, start(t, options{tier: tr})) })
	}
}

type options struct {
	tier   tier
	env    []string // for both daemons
	cpEnv  []string
	runEnv []string
}

// stack is one control plane with one runner, as processes.
type stack struct {
	*client
	t      *testing.T
	opt    options
	data   string
	listen string
	cp     *daemon
	runner *daemon
}

// start starts a stack and waits until a runner is ready.
func start(t *testing.T, opt options) *stack {
	t.Helper()
	s := &stack{t: t, opt: opt, data: t.TempDir(), listen: freeAddr(t)}
	s.client = &client{t: t, base: "http://" + s.listen, token: adminToken}
	// A sandbox's user must be able to reach its workspace below this folder.
	for dir := s.data; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if opt.tier == cluster {
		s.opt.cpEnv = append(s.opt.cpEnv, "BIGWAVE_DATABASE_URL="+storetest.URL(t, storetest.Postgres))
		url := natsServer(t, filepath.Join(s.data, "nats-server"))
		access := filepath.Join(s.data, "access.json")
		if err := bus.WriteAccess(access, bus.Access{URL: url, User: "bigwave", Password: "e2e-nats-password"}); err != nil {
			t.Fatal(err)
		}
		s.opt.env = append(s.opt.env, "BIGWAVE_NATS_URL="+url, "BIGWAVE_NATS_ACCESS_FILE="+access)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, d := range []*daemon{s.cp, s.runner} {
				if d != nil {
					t.Logf("%s log (end):\n%s", d.name, d.tail(12000))
				}
			}
		}
	})
	s.startControlPlane()
	s.startRunner()
	return s
}

func (s *stack) startControlPlane() {
	s.t.Helper()
	s.cp = spawn(s.t, "bigwave-controlplane", slices.Concat([]string{
		"BIGWAVE_DATA_DIR=" + s.data, "BIGWAVE_LISTEN=" + s.listen, "BIGWAVE_ADMIN_TOKEN=" + adminToken,
	}, s.opt.env, s.opt.cpEnv))
	eventually(s.t, 30*time.Second, "the control plane is ready", func() error {
		if err := s.cp.dead(); err != nil {
			return err
		}
		resp, err := http.Get(s.base + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(resp.Body)
			return fmt.Errorf("readyz: %d %s", resp.StatusCode, body)
		}
		return nil
	})
}

func (s *stack) startRunner() {
	s.t.Helper()
	s.runner = s.spawnRunner()
	s.waitRunner()
}

func (s *stack) spawnRunner() *daemon {
	s.t.Helper()
	return spawn(s.t, "bigwave-runner", slices.Concat([]string{
		"BIGWAVE_DATA_DIR=" + s.data, "BIGWAVE_RUNNER_ID=r1",
	}, s.opt.env, s.opt.runEnv))
}

func (s *stack) waitRunner() {
	s.t.Helper()
	eventually(s.t, 30*time.Second, "the runner is ready", func() error {
		if err := s.runner.dead(); err != nil {
			return err
		}
		for _, r := range s.get("/admin/runners").list("items") {
			if r.str("state") == "ready" && r.str("incarnation") != s.runner.lastIncarnation {
				return nil
			}
		}
		return errors.New("no ready runner")
	})
}

// incarnation is the incarnation of the runner as the control plane knows it.
func (s *stack) incarnation() string {
	for _, r := range s.get("/admin/runners").list("items") {
		return r.str("incarnation")
	}
	return ""
}

// restartRunner kills the runner with sig, waits for its end and starts it anew.
func (s *stack) restartRunner(sig syscall.Signal) {
	s.t.Helper()
	was := s.incarnation()
	s.runner.stop(sig)
	s.runner = s.spawnRunner()
	s.runner.lastIncarnation = was
	s.waitRunner()
}

// restartControlPlane does the same to the control plane.
func (s *stack) restartControlPlane(sig syscall.Signal) {
	s.t.Helper()
	s.cp.stop(sig)
	s.startControlPlane()
}

// workspaces are the live sandboxes' workspaces, as their first processes see
// them.
func (s *stack) workspaces() []string {
	var dirs []string
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	parent := fmt.Sprintf(" %d ", s.runner.cmd.Process.Pid)
	for _, stat := range stats {
		content, err := os.ReadFile(stat)
		if err != nil {
			continue
		}
		name, rest, _ := strings.Cut(string(content), ") ")
		if strings.HasSuffix(name, "(bw-init") && !strings.HasPrefix(rest, "Z") && strings.HasPrefix(rest[1:], parent) {
			dirs = append(dirs, filepath.Join(filepath.Dir(stat), "root", "workspace"))
		}
	}
	return dirs
}

// disks are the loop devices of this stack's workspaces.
func (s *stack) disks() []string {
	var found []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		if content, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(content), s.data+"/") {
			found = append(found, file)
		}
	}
	return found
}

// daemon is one process that this test started.
type daemon struct {
	name            string
	cmd             *exec.Cmd
	log             *lockedBuffer
	done            chan struct{}
	err             error
	lastIncarnation string
}

func spawn(t *testing.T, name string, env []string) *daemon {
	t.Helper()
	cmd := exec.Command(filepath.Join(bin, name))
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "BIGWAVE_LOG_LEVEL=debug",
		"CANARY_ENV=must-not-be-seen-inside"}, env...)
	d := &daemon{name: name, cmd: cmd, log: &lockedBuffer{}, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = d.log, d.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// Pdeathsig follows the thread that forks: keep it to this process's life.
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			d.err = cmd.Wait()
		}
		close(d.done)
	}()
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	t.Cleanup(func() { d.stop(syscall.SIGTERM) })
	return d
}

// stop sends sig and waits for the end; after 40 s it kills.
func (d *daemon) stop(sig syscall.Signal) error {
	_ = d.cmd.Process.Signal(sig)
	select {
	case <-d.done:
	case <-time.After(40 * time.Second):
		_ = d.cmd.Process.Kill()
		<-d.done
		return fmt.Errorf("%s did not end after %v", d.name, sig)
	}
	return d.err
}

func (d *daemon) dead() error {
	select {
	case <-d.done:
		return fatal{errors.Join(fmt.Errorf("%s ended", d.name), d.err)}
	default:
		return nil
	}
}

func (d *daemon) tail(n int) string {
	s := d.log.String()
	return s[max(0, len(s)-n):]
}

// natsServer is an external NATS server with JetStream.
func natsServer(t *testing.T, dir string) string {
	t.Helper()
	ns, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
		Username: "bigwave", Password: "e2e-nats-password",
	})
	if err != nil {
		t.Fatal(err)
	}
	go ns.Start()
	if !ns.ReadyForConnections(10 * time.Second) {
		t.Fatal("the NATS server is not ready")
	}
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	return ns.ClientURL()
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// fatal stops eventually at once.
type fatal struct{ error }

// eventually asks until it gets nil.
func eventually(t *testing.T, within time.Duration, what string, ask func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for {
		err := ask()
		if err == nil {
			return
		}
		if _, ok := errors.AsType[fatal](err); ok || ctx.Err() != nil {
			t.Fatalf("%s: not within %v: %v", what, within, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.ToValidUTF8(b.b.String(), "?")
}

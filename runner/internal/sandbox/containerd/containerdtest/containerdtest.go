// Package containerdtest runs a containerd of its own for tests: private root,
// state and socket, which the host's own does not notice.
package containerdtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/namespaces"

	"golang.org/x/sys/unix"
)

// ImageEnv names the archive of the base image, as `make image` builds it.
const ImageEnv = "BIGWAVE_TEST_IMAGE"

// Namespace is where the base image is.
const Namespace = "bigwave"

// Daemon is a containerd. Its methods are for one goroutine at a time.
type Daemon struct {
	Address     string
	Snapshotter string // that works where its root lies
	Dir         string // of its own

	config string
	cmd    *exec.Cmd
	ended  chan struct{}
	log    buffer
}

const config = `version = 2
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.restart", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = %[3]q
[ttrpc]
address = %[4]q
`

// Start starts one with its files in dir, which must be short: a socket's path
// has at most 107 bytes.
func Start(dir string) (*Daemon, error) {
	program, err := exec.LookPath("containerd")
	if err != nil {
		return nil, errors.New("needs containerd: apt-get install --no-install-recommends containerd runc")
	}
	d := &Daemon{Dir: dir, Address: filepath.Join(dir, "c.sock"), Snapshotter: "native", config: filepath.Join(dir, "config.toml")}
	if overlays(dir) {
		d.Snapshotter = "overlayfs"
	}
	text := fmt.Sprintf(config, filepath.Join(dir, "root"), filepath.Join(dir, "state"), d.Address, d.Address+".ttrpc")
	if err := os.WriteFile(d.config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return d, d.run(program)
}

func (d *Daemon) run(program string) error {
	d.cmd = exec.Command(program, "-c", d.config, "--log-level", "warn")
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// As root's shell has it, since runc lies in sbin.
	d.cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin")
	if err := d.cmd.Start(); err != nil {
		return err
	}
	d.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { // ends with the process
		_ = cmd.Wait()
		close(ended)
	}(d.cmd, d.ended)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := d.Client()
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			_, err = c.Version(ctx)
			cancel()
			_ = c.Close()
		}
		select {
		case <-d.ended:
			return fmt.Errorf("containerd ended: %s", d.log.String())
		default:
		}
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("containerd does not come up: %w\n%s", err, d.log.String())
		}
	}
}

// Client is a new one, the caller's to close.
func (d *Daemon) Client() (*containerd.Client, error) {
	return containerd.New(d.Address, containerd.WithTimeout(time.Second))
}

// Import puts an image archive into Namespace and unpacks it.
func (d *Daemon) Import(ctx context.Context, archive string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	client, err := d.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	ctx = namespaces.WithNamespace(ctx, Namespace)
	found, err := client.Import(ctx, file)
	if err != nil {
		return fmt.Errorf("import %s: %w", archive, err)
	}
	for _, image := range found {
		if err := containerd.NewImage(client, image).Unpack(ctx, d.Snapshotter); err != nil {
			return fmt.Errorf("unpack %s: %w", image.Name, err)
		}
	}
	return nil
}

// Kill ends containerd as kill -9 does; what it runs goes on.
func (d *Daemon) Kill() {
	_ = d.cmd.Process.Kill()
	<-d.ended
}

// Pause stops it from answering, as one that hangs, until Resume.
func (d *Daemon) Pause() { _ = d.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (d *Daemon) Resume() { _ = d.cmd.Process.Signal(syscall.SIGCONT) }

// Restart starts it again after Kill.
func (d *Daemon) Restart() error { return d.run(d.cmd.Path) }

// Shims are the pids of its shims.
func (d *Daemon) Shims() []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(content, []byte("containerd-shim")) || !bytes.Contains(content, []byte(d.Address)) {
			continue
		}
		var pid int
		if _, err := fmt.Sscan(filepath.Base(filepath.Dir(file)), &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Left counts its containers, snapshots of containers and shims.
func (d *Daemon) Left(ctx context.Context) (int, error) {
	client, err := d.Client()
	if err != nil {
		return 0, err
	}
	defer client.Close()
	all, err := client.Containers(namespaces.WithNamespace(ctx, Namespace))
	if err != nil {
		return 0, err
	}
	bundles, _ := filepath.Glob(filepath.Join(d.Dir, "state", "io.containerd.runtime.v2.task", Namespace, "*"))
	return len(all) + len(d.Shims()) + len(bundles), nil
}

// Log is what it has said.
func (d *Daemon) Log() string { return d.log.String() }

// Stop ends it with all that it runs and removes its files.
func (d *Daemon) Stop() error {
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.ended:
	case <-time.After(10 * time.Second):
		d.Kill()
	}
	for _, pid := range d.Shims() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(string(content), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if fields := strings.Fields(lines[i]); len(fields) > 4 && strings.HasPrefix(fields[4], d.Dir+"/") {
			_ = unix.Unmount(fields[4], unix.MNT_DETACH)
		}
	}
	return os.RemoveAll(d.Dir)
}

// overlays says whether overlayfs can lie on dir's file system.
func overlays(dir string) bool {
	probe, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return false
	}
	defer os.RemoveAll(probe)
	at := func(name string) string { return filepath.Join(probe, name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			return false
		}
	}
	options := "lowerdir=" + at("lower") + ",upperdir=" + at("upper") + ",workdir=" + at("work")
	if unix.Mount("overlay", at("merged"), "overlay", 0, options) != nil {
		return false
	}
	return unix.Unmount(at("merged"), 0) == nil
}

// buffer is safe for a process's two streams.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

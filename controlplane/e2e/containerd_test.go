package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// containers is the containerd that the tests of this run share, with the
// base image in it. It is started when the first test asks for it.
type containers struct {
	once sync.Once
	err  error

	dir, address, snapshotter string
	cmd                       *exec.Cmd
	log                       lockedBuffer
	ended                     chan struct{}
}

var shared containers

// onContainers is the environment of a runner whose sandboxes have the base
// image, and so its Python.
func onContainers(t *testing.T) []string {
	t.Helper()
	shared.once.Do(func() { shared.err = shared.start() })
	if shared.err != nil {
		t.Fatalf("containerd: %v\n%s", shared.err, shared.log.String())
	}
	return []string{
		"BIGWAVE_BACKEND=containerd", "BIGWAVE_CONTAINERD_ADDRESS=" + shared.address,
		"BIGWAVE_CONTAINERD_SNAPSHOTTER=" + shared.snapshotter,
	}
}

const containerdConfig = `version = 2
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.restart", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = %[3]q
[ttrpc]
address = %[4]q
`

func (c *containers) start() error {
	archive := os.Getenv("BIGWAVE_TEST_IMAGE")
	if archive == "" {
		return errors.New("BIGWAVE_TEST_IMAGE must name the base image's archive: BIGWAVE_TEST_IMAGE=$(scripts/image.sh)")
	}
	var err error
	if c.dir, err = os.MkdirTemp("", "bwe-"); err != nil { // a socket's path must be short
		return err
	}
	if err := os.Chmod(c.dir, 0o755); err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(c.dir, name) }
	c.address, c.snapshotter = at("c.sock"), "native"
	if overlays(c.dir) {
		c.snapshotter = "overlayfs"
	}
	config := fmt.Sprintf(containerdConfig, at("root"), at("state"), c.address, c.address+".ttrpc")
	if err := os.WriteFile(at("config.toml"), []byte(config), 0o600); err != nil {
		return err
	}
	c.cmd = exec.Command("containerd", "-c", at("config.toml"), "--log-level", "warn")
	c.cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin")
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.ended = make(chan struct{})
	go func() { _ = c.cmd.Wait(); close(c.ended) }()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if err = c.ctr("version"); err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	return c.ctr("images", "import", "--digests=false", "--snapshotter", c.snapshotter, archive)
}

func (c *containers) ctr(args ...string) error {
	out, err := exec.Command("ctr", append([]string{"-a", c.address, "-n", "bigwave"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ctr %s: %w: %s", args[0], err, out)
	}
	return nil
}

// stop ends it with all that it runs and removes its files.
func (c *containers) stop() {
	if c.cmd == nil || c.cmd.Process == nil {
		return
	}
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.ended:
	case <-time.After(10 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
	content, _ := os.ReadFile("/proc/self/mountinfo")
	lines := strings.Split(string(content), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if fields := strings.Fields(lines[i]); len(fields) > 4 && strings.HasPrefix(fields[4], c.dir+"/") {
			_ = syscall.Unmount(fields[4], 2) // MNT_DETACH
		}
	}
	_ = os.RemoveAll(c.dir)
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
	if syscall.Mount("overlay", at("merged"), "overlay", 0, options) != nil {
		return false
	}
	return syscall.Unmount(at("merged"), 0) == nil
}

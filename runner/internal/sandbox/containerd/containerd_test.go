package containerd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/boxtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd/containerdtest"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// What all tests share, made once.
var (
	initProgram string
	daemon      *containerdtest.Daemon
)

// These hand them to a run of these tests elsewhere.
const (
	initEnv    = "BIGWAVE_TEST_INIT"
	addressEnv = "BIGWAVE_TEST_CONTAINERD"
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "bwc-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return 0, err
	}
	if initProgram = os.Getenv(initEnv); initProgram == "" {
		initProgram = filepath.Join(dir, "bigwave-init")
		build := exec.Command("go", "build", "-ldflags=-s -w", "-o", initProgram, "github.com/bigwave/bigwave/runner/cmd/init")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("build the init: %w\n%s", err, out)
		}
	}
	if address := os.Getenv(addressEnv); address != "" { // of the test that started us
		daemon = &containerdtest.Daemon{Address: address, Snapshotter: os.Getenv(addressEnv + "_SNAPSHOTTER"), Dir: filepath.Dir(address)}
		return m.Run(), nil
	}
	archive := os.Getenv(containerdtest.ImageEnv)
	if archive == "" {
		return 0, fmt.Errorf("%s must name the base image's archive: %s=$(scripts/image.sh)", containerdtest.ImageEnv, containerdtest.ImageEnv)
	}
	if daemon, err = containerdtest.Start(filepath.Join(dir)); err != nil {
		return 0, err
	}
	defer func() {
		if stopped := daemon.Stop(); err == nil {
			err = stopped
		}
	}()
	if err := daemon.Import(context.Background(), archive); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// config is that of a backend under test.
func config(cfg box.Config) Config {
	return Config{Config: cfg, InitPath: initProgram, Address: daemon.Address, Snapshotter: daemon.Snapshotter}
}

// backend makes one for boxtest.
func backend(cfg box.Config) (*box.Backend, error) { return New(config(cfg)) }

func TestBackend(t *testing.T) {
	sandboxtest.Run(t, func(t *testing.T) sandbox.Backend { return boxtest.Make(t, backend) })
}

func TestHostile(t *testing.T) {
	sandboxtest.Hostile(t, func(t *testing.T) sandbox.Backend { return boxtest.Make(t, backend) })
}

func TestEgress(t *testing.T) {
	for name, noFilter := range map[string]bool{"with nf_tables": false, "without": true} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.RunEgress(t, func(t *testing.T, e sandboxtest.Egress) sandbox.Backend {
				return boxtest.Make(t, backend, func(c *box.Config) {
					c.Egress = egress.Config{Resolver: e.Resolver, PrivateAllow: e.PrivateAllow, NoFilter: noFilter}
				})
			})
		})
	}
}

func TestDisks(t *testing.T) {
	sandboxtest.RunDisks(t, func(t *testing.T, d sandboxtest.Disks) sandbox.Backend {
		return boxtest.Make(t, backend, func(c *box.Config) { boxtest.Disks(c, d) })
	})
}

// left counts what of a backend containerd still has.
func left(cfg box.Config) int {
	n, err := ownedBy(box.Owner(cfg))
	if err != nil {
		return -1
	}
	return n
}

func TestFailedStartsLeaveNothing(t *testing.T) { boxtest.FailedStarts(t, backend, 40, left) }

func TestCrash(t *testing.T) {
	t.Setenv(initEnv, initProgram)
	t.Setenv(addressEnv, daemon.Address)
	t.Setenv(addressEnv+"_SNAPSHOTTER", daemon.Snapshotter)
	boxtest.Crash(t, backend, "TestCrash", left)
}

func TestDiskGoesWithItsSandbox(t *testing.T) { boxtest.DiskGoes(t, backend) }

func TestInitIsKilled(t *testing.T) { boxtest.InitIsKilled(t, backend) }

func TestSupervisorIsKilled(t *testing.T) { boxtest.SupervisorIsKilled(t, backend) }

func TestInitIsFiltered(t *testing.T) { boxtest.InitIsFiltered(t, backend) }

func TestPackages(t *testing.T) { boxtest.Packages(t, backend) }

func TestIdleMemory(t *testing.T) { boxtest.IdleMemory(t, backend, 6<<10) }

func TestKernels(t *testing.T) { boxtest.Kernels(t, backend) }

func TestNoStartWithoutRoom(t *testing.T) { boxtest.Room(t, backend) }

func TestStartsAreBounded(t *testing.T) { boxtest.AtOnce(t, backend) }

func TestOneBackendPerDataDirectory(t *testing.T) { boxtest.OneOwner(t, backend) }

func TestMounts(t *testing.T) { boxtest.Mounts(t, backend) }

func TestWarmPython(t *testing.T) { boxtest.WarmPython(t, backend) }

func TestWarmTools(t *testing.T) { boxtest.WarmTools(t, backend) }

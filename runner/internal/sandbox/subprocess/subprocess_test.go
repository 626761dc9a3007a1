package subprocess

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/boxtest"
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

// backend makes one for boxtest.
func backend(cfg box.Config) (*box.Backend, error) {
	return New(Config{Config: cfg, InitPath: initProgram})
}

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

// TestDisksInMemory is a root without loop devices, as in many containers.
func TestDisksInMemory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("an ordinary user has only that")
	}
	sandboxtest.RunDisks(t, func(t *testing.T, d sandboxtest.Disks) sandbox.Backend {
		return boxtest.Make(t, backend, func(c *box.Config) { boxtest.Disks(c, d); c.Without = []string{"disk"} })
	})
}

func nothing(box.Config) int { return 0 }

func TestFailedStartsLeaveNothing(t *testing.T) { boxtest.FailedStarts(t, backend, 200, nothing) }

func TestCrash(t *testing.T) { boxtest.Crash(t, backend, "TestCrash", nothing) }

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
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^(TestBackend|TestHostile|TestKernels|TestDisks|TestFailedStarts.*|TestMounts|TestPackages|TestWarmPython|TestEgress|TestRefusesWithoutLimits)$", "-test.short", "-test.v")
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
	b := boxtest.Make(t, backend, func(c *box.Config) { c.AllowWeak = nil })
	if !slices.ContainsFunc(b.Check(t.Context()).Missing(), func(p sandbox.Piece) bool { return p.Name == "cgroup memory" }) {
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

// BenchmarkExec compares a call in a live sandbox with the same program
// without one, in turns, so that both see the same machine.
func BenchmarkExec(b *testing.B) {
	made, err := backend(boxtest.Config(b))
	if err != nil {
		b.Fatal(err)
	}
	defer made.Close(context.Background())
	s, err := made.Start(b.Context(), sandbox.Spec{ID: "a", Policy: sandbox.Policy{FSAllowlist: []string{"/workspace"}, BaseImage: "bigwave/sandbox-base:latest", MemoryMB: 256, PIDsLimit: 64, CPUShares: 262144}})
	if err != nil {
		b.Fatal(err)
	}
	var sandboxed, inside, bare []time.Duration
	for b.Loop() {
		begin := time.Now()
		var out, errs bytes.Buffer
		e, err := s.Exec(b.Context(), sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("true"), Stdout: &out, Stderr: &errs})
		if err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		sandboxed = append(sandboxed, time.Since(begin))
		inside = append(inside, e.Duration)
		begin = time.Now()
		c := exec.Command("bash", "-c", "true")
		c.Stdin, c.Stdout, c.Stderr = new(bytes.Buffer), &out, &errs
		if err := c.Run(); err != nil {
			b.Fatal(err)
		}
		bare = append(bare, time.Since(begin))
	}
	b.ReportMetric(median(sandboxed), "exec-µs")
	b.ReportMetric(median(inside), "inside-µs")
	b.ReportMetric(median(bare), "bare-µs")
	b.ReportMetric(median(sandboxed)/median(bare), "ratio")
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Microseconds())
}

// BenchmarkStart is a session's start with a spare ready, with and without
// mounts to attach.
func BenchmarkStart(b *testing.B) {
	data, shared := b.TempDir(), b.TempDir()
	for name, list := range map[string][]string{"plain": {"/workspace"}, "with mounts": {"/workspace", "/data", "/shared"}} {
		b.Run(name, func(b *testing.B) {
			made := boxtest.Make(b, backend, func(c *box.Config) {
				boxtest.Disks(c, sandboxtest.Disks{WorkspaceMB: 1024, ReadOnly: data, Writable: shared})
			})
			if err := made.Sweep(b.Context()); err != nil {
				b.Fatal(err)
			}
			policy := sandboxtest.Policy()
			policy.FSAllowlist = list
			var starts []time.Duration
			for b.Loop() {
				made.Settle()
				begin := time.Now()
				s, err := made.Start(b.Context(), sandbox.Spec{ID: "bench", Policy: policy})
				if err != nil {
					b.Fatal(err)
				}
				starts = append(starts, time.Since(begin))
				if err := s.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(median(starts), "start-µs")
		})
	}
}

func TestWarmPython(t *testing.T) { boxtest.WarmPython(t, backend) }

func TestQuietEnds(t *testing.T) { boxtest.QuietEnds(t, backend) }

package subprocess

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// initProgram is built once for all tests.
var initProgram string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
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
	return Config{DataDir: t.TempDir(), RunnerID: "test-" + filepath.Base(t.TempDir()) + "-" + itoa(os.Getpid()), InitPath: initProgram}
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
	sandboxtest.Run(t, func(t *testing.T) sandbox.Backend { return newBackend(t) })
}

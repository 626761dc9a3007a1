// Package boxtest holds tests of what all backends have in common that the
// contract's own suite can't see: what a failed start, a crash or a full host
// leaves behind. Every backend runs them.
package boxtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// New makes a backend of the kind under test; change is applied last.
type New func(cfg box.Config) (*box.Backend, error)

// Config is what a backend under test is given.
func Config(t testing.TB) box.Config {
	cfg := box.Config{DataDir: t.TempDir(), RunnerID: fmt.Sprintf("test-%s-%d", filepath.Base(t.TempDir()), os.Getpid())}
	if os.Geteuid() != 0 {
		cfg.AllowWeak = []string{"memory", "pids", "cpu"}
	}
	return cfg
}

// Make makes a backend that is closed with the test.
func Make(t testing.TB, make New, change ...func(*box.Config)) *box.Backend {
	t.Helper()
	cfg := Config(t)
	for _, c := range change {
		c(&cfg)
	}
	b, err := make(cfg)
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

// Disks is the part of a Config that sandboxtest.RunDisks asks for.
func Disks(cfg *box.Config, d sandboxtest.Disks) {
	cfg.WorkspaceMB = d.WorkspaceMB
	cfg.Mounts = []box.Mount{{Host: d.ReadOnly, Path: "/data"}, {Host: d.Writable, Path: "/shared", Writable: true}}
}

// none is a box.Config without spares.
func none(cfg *box.Config) { cfg.Spares = -1 }

func start(t testing.TB, b *box.Backend) sandbox.Sandbox {
	t.Helper()
	return sandboxtest.Start(t, b)
}

// piece is one line of a report.
func piece(t testing.TB, b *box.Backend, name string) sandbox.Piece {
	t.Helper()
	pieces := b.Check(t.Context()).Pieces
	i := slices.IndexFunc(pieces, func(p sandbox.Piece) bool { return p.Name == name })
	if i < 0 {
		t.Fatalf("the report has no %s", name)
	}
	return pieces[i]
}

// hasDisks says whether workspaces are disks here.
func hasDisks(t testing.TB, b *box.Backend) bool { return piece(t, b, "workspace disk").State == "ok" }

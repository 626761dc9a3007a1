package subprocess

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// TestNoStartWithoutRoom lets the host's disk run out under a backend.
func TestNoStartWithoutRoom(t *testing.T) {
	b := newBackend(t, func(c *Config) { c.WorkspaceMB = 2048 })
	if b.disks == nil {
		t.Skipf("no disks here: %v", b.noDisks)
	}
	const gib = 1 << 30
	for name, c := range map[string]struct {
		has  space
		want bool
	}{
		"plenty":                          {space{free: 10 * gib, total: 100 * gib}, true},
		"just enough":                     {space{free: 2 * gib, total: 100 * gib}, true},
		"less than a workspace":           {space{free: 2*gib - 1, total: 10 * gib}, false},
		"less than a fiftieth":            {space{free: 19 * gib, total: 1000 * gib}, false},
		"a fiftieth":                      {space{free: 20 * gib, total: 1000 * gib}, true},
		"nothing, on a disk of no size":   {space{}, false},
		"a workspace, on a disk as small": {space{free: 2 * gib, total: 2 * gib}, true},
	} {
		b.space = func(string) (space, error) { return c.has, nil }
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
		if err == nil {
			err = s.Close(t.Context())
			if !c.want {
				t.Errorf("%s: it started", name)
			}
		}
		if e, ok := errors.AsType[*sandbox.StartError](err); !c.want && (!ok || e.Code != "capacity" || e.Message == "") || c.want && err != nil {
			t.Errorf("%s: got %v", name, err)
		}
		if p := b.checkRoom(); (p.State == "ok") != c.want || (p.Means == "") != c.want || !p.Fatal {
			t.Errorf("%s: got %+v", name, p)
		}
	}
	b.space = func(string) (space, error) { return space{}, errors.New("gone") }
	if err := b.room(); err == nil {
		t.Error("a disk that can't be asked has room")
	}
	if s := (space{free: gib - 1}); s.free >= s.least(16<<20) {
		t.Error("small workspaces may use the last GiB")
	}
}

func TestSpaceOfWhatIsNotThereYet(t *testing.T) {
	dir := t.TempDir()
	here, err := spaceOf(dir)
	if err != nil || here.total == 0 || here.free > here.total {
		t.Errorf("got %+v, %v", here, err)
	}
	if later, err := spaceOf(filepath.Join(dir, "a", "b")); err != nil || later.total != here.total {
		t.Errorf("got %+v, %v, want %+v", later, err, here)
	}
}

// TestLeftOutPartsAreMissed: a backend that is for measuring can't pass for one
// that holds its fence.
func TestLeftOutPartsAreMissed(t *testing.T) {
	b := newBackend(t, func(c *Config) { c.Without = []string{"seccomp", "landlock", "disk"}; c.Spares = -1 })
	report := b.Check(t.Context())
	state := func(name string) string {
		i := slices.IndexFunc(report.Pieces, func(p sandbox.Piece) bool { return p.Name == name })
		if i < 0 {
			return "not reported"
		}
		return report.Pieces[i].State
	}
	for name, want := range map[string]string{"system call filter in force": "missing", "landlock": "missing", "workspace disk": "weak"} {
		if got := state(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if len(report.Missing()) == 0 {
		t.Error("a runner would start with it")
	}
}

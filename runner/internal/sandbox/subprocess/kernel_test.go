package subprocess

import (
	"errors"
	"os"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

func TestHostile(t *testing.T) {
	sandboxtest.Hostile(t, func(t *testing.T) sandbox.Backend {
		return newBackend(t, allowWeakAsUser)
	})
}

func allowWeakAsUser(c *Config) {
	if os.Geteuid() != 0 {
		c.AllowWeak = []string{"memory", "pids", "cpu"}
	}
}

// TestRefusesWithoutSeccomp is a kernel that has no filters.
func TestRefusesWithoutSeccomp(t *testing.T) {
	b := newBackend(t, allowWeakAsUser)
	b.filter, b.filterErr = nil, errors.New("no filters")
	_, err := b.Start(t.Context(), sandbox.Spec{ID: "open", Policy: sandboxtest.Policy()})
	if e, ok := errors.AsType[*sandbox.StartError](err); !ok || e.Code != "start_failed" || !errors.Is(err, b.filterErr) {
		t.Errorf("got %v", err)
	}
	missing := map[string]bool{}
	for _, p := range b.Check(t.Context()).Missing() {
		missing[p.Name] = p.Means != ""
	}
	if !missing["seccomp"] || !missing["system call filter in force"] {
		t.Errorf("the report misses only %v", missing)
	}
}

// TestRefusesABadFilter is a filter that the kernel does not take.
func TestRefusesABadFilter(t *testing.T) {
	b := newBackend(t, allowWeakAsUser)
	b.filter = []byte{0xff, 0xff, 0, 0, 0, 0, 0, 0}
	if s, err := b.Start(t.Context(), sandbox.Spec{ID: "bad", Policy: sandboxtest.Policy()}); err == nil {
		t.Errorf("started: %+v", s.Info())
	}
}

func TestLandlock(t *testing.T) {
	for name, c := range map[string]struct {
		abi     int
		require []string
		state   string
		starts  bool
	}{
		"absent":                       {0, nil, "missing", true},
		"absent and required":          {0, []string{"landlock"}, "missing", false},
		"as the kernel has it":         {landlockABI(), nil, "", true},
		"the first ABI that is of use": {min(landlockABI(), leastLandlock), nil, "", true},
		"as of Linux 6.2":              {min(landlockABI(), 3), nil, "", true},
		"as of Linux 6.10":             {min(landlockABI(), 5), nil, "", true},
	} {
		b := newBackend(t, allowWeakAsUser, func(c *Config) { c.Spares = -1 })
		b.cfg.Require, b.landlock = c.require, c.abi
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "x", Policy: sandboxtest.Policy()})
		if (err == nil) != c.starts {
			t.Errorf("%s: got %v", name, err)
		}
		if err == nil {
			const script = "mkdir a b && echo x > a/f && mv a/f b/g && : > b/g && cat /etc/passwd > /dev/null && echo x > /tmp/f && echo 0 > /proc/self/oom_score_adj && echo open"
			r := sandboxtest.Exec(t, s, sandboxtest.Bash(script))
			if open := r.Stdout == "open\n"; open != (c.abi == 0) {
				t.Errorf("%s: got %q, %+v, %s", name, r.Stdout, r.Exit, r.Stderr)
			}
			if r := sandboxtest.Exec(t, s, sandboxtest.Bash("test -e b/g && test -e /tmp/f")); r.Code != 0 {
				t.Errorf("%s: what is allowed did not work", name)
			}
		}
		for _, p := range b.Check(t.Context()).Pieces {
			if p.Name == "landlock" && (c.abi == 0) != (p.State == "missing") || p.Name == "landlock" && p.Fatal != (c.require != nil) {
				t.Errorf("%s: got %+v", name, p)
			}
		}
	}
}

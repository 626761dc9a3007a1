package oci

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

var update = flag.Bool("update", false, "write the golden files")

func example() Container {
	return Container{Init: "/opt/bigwave/bigwave-init", Socket: "/var/lib/bigwave/sandboxes/box-1/socket", CgroupsPath: "/bigwave/runner-1/box-1"}
}

// TestGolden has one file for each concern, so that a change shows what it is
// about.
func TestGolden(t *testing.T) {
	s := Spec(example())
	for name, part := range map[string]any{
		"process":    s.Process,
		"root":       map[string]any{"root": s.Root, "hostname": s.Hostname, "propagation": s.Linux.RootfsPropagation},
		"mounts":     s.Mounts,
		"namespaces": s.Linux.Namespaces,
		"resources":  map[string]any{"cgroupsPath": s.Linux.CgroupsPath, "resources": s.Linux.Resources},
		"sysctl":     s.Linux.Sysctl,
	} {
		got, err := json.MarshalIndent(part, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, '\n')
		path := filepath.Join("testdata", name+".json")
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is\n%s\nwant\n%s", name, got, want)
		}
	}
}

// TestNothingElse is for what no golden file shows: a part of a specification
// that is not there.
func TestNothingElse(t *testing.T) {
	s := Spec(example())
	if s.Hooks != nil || s.Annotations != nil || s.Linux.Devices != nil || s.Linux.Seccomp != nil || s.Linux.UIDMappings != nil {
		t.Errorf("got %+v, %+v", s, s.Linux)
	}
	if got := Spec(example()); !reflect.DeepEqual(got, s) {
		t.Error("the same container has another specification")
	}
}

// TestHoldsWhatItMust says in words what a change must not take away.
func TestHoldsWhatItMust(t *testing.T) {
	s := Spec(example())
	for _, kind := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace} {
		i := slices.IndexFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == kind })
		if i < 0 || s.Linux.Namespaces[i].Path != "" {
			t.Errorf("no %s namespace of its own", kind)
		}
	}
	if !s.Root.Readonly || !s.Process.NoNewPrivileges || s.Process.Terminal {
		t.Errorf("got %+v, %+v", s.Root, s.Process)
	}
	if c := s.Process.Capabilities; len(c.Ambient) > 0 || len(c.Inheritable) > 0 || slices.Contains(c.Bounding, "CAP_SYS_MODULE") || slices.Contains(c.Bounding, "CAP_MKNOD") || slices.Contains(c.Bounding, "CAP_SYS_PTRACE") {
		t.Errorf("got %+v", c)
	}
	if d := s.Linux.Resources.Devices; len(d) == 0 || d[0].Allow || d[0].Type != "" {
		t.Errorf("devices are not refused first: %+v", d)
	}
	for _, m := range s.Mounts {
		if m.Type == "bind" && !strings.HasPrefix(m.Destination, "/run/bigwave/") || m.Destination == "/sys" {
			t.Errorf("%+v shows the host", m)
		}
		if !slices.Contains(m.Options, "nosuid") {
			t.Errorf("%+v counts set-user-id", m)
		}
	}
}

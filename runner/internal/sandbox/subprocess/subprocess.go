// Package subprocess is the backend that needs nothing but the kernel: each
// sandbox is a set of namespaces around the host's own /usr.
package subprocess

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// Config is what the operator decides.
type Config struct {
	box.Config

	InitPath  string // the bigwave-init program
	Python    string // the interpreter; python3 from PATH if empty
	HostImage string // the base_image that the host's own files stand for; bigwave/sandbox-base:latest if empty
	UIDBase   int    // first host id for sandboxes when root; see box.SandboxIDs
}

// New returns the backend; see box.New.
func New(cfg Config) (*box.Backend, error) {
	init, err := os.Open(cfg.InitPath)
	if err != nil {
		return nil, fmt.Errorf("open the init program: %w", err)
	}
	m := &maker{
		init:  init,
		host:  lookAtHost(cfg.Python),
		image: cmp.Or(cfg.HostImage, "bigwave/sandbox-base:latest"),
		base:  cfg.UIDBase,
		root:  os.Geteuid() == 0,
	}
	b, err := box.New(cfg.Config, m)
	if err != nil {
		return nil, errors.Join(err, init.Close())
	}
	return b, nil
}

// maker implements box.Maker.
type maker struct {
	init  *os.File
	host  host
	image string
	base  int  // host id
	root  bool // we map ids
}

func (m *maker) About() box.About {
	return box.About{
		Backend:       "subprocess",
		Isolation:     "userns+mountns+pidns+netns+ipcns+utsns+cgroupns",
		BaseImage:     "host",
		UserNamespace: true,
		Help:          userNamespaceHelp(),
	}
}

func (m *maker) IDs(slot int) box.IDs {
	if m.root {
		return box.SandboxIDs(m.base, slot)
	}
	own := os.Geteuid()
	return box.IDs{First: own, Count: 1, Host: own}
}

func (m *maker) Standard() string { return m.image }

// Image knows only the one that the host stands for.
func (m *maker) Image(_ context.Context, base string) (box.Image, error) {
	if base != m.image {
		return box.Image{}, &sandbox.StartError{
			Code: "policy_unenforceable", Field: "base_image",
			Message: fmt.Sprintf("this runner has the base_image %s, not %s", m.image, base),
		}
	}
	return box.Image{Name: base}, nil
}

// Sweep finds nothing: what a sandbox has goes with its processes, which the
// cgroups know.
func (m *maker) Sweep(context.Context) error { return nil }

func (m *maker) Close(context.Context) error { return m.init.Close() }

func (m *maker) Check(context.Context) []sandbox.Piece {
	return append([]sandbox.Piece{m.checkInit(), m.checkIDs()}, m.checkPrograms()...)
}

func (m *maker) checkInit() sandbox.Piece {
	p := sandbox.Piece{Name: "init program", State: "ok", Detail: m.init.Name(), Fatal: true}
	info, err := m.init.Stat()
	switch {
	case err != nil:
		p.State, p.Detail = "missing", err.Error()
	case info.Mode().Perm()&0o005 != 0o005:
		p.State = "missing"
		p.Detail = fmt.Sprintf("%s has mode %v", m.init.Name(), info.Mode().Perm())
		p.Means = "sandboxes run it with ids of their own: chmod 755 it"
	}
	return p
}

func (m *maker) checkIDs() sandbox.Piece {
	p := sandbox.Piece{Name: "uid mapping", State: "ok"}
	if m.root {
		ids := m.IDs(0)
		p.Detail = fmt.Sprintf("each sandbox has %d host ids of its own from %d on", ids.Count, ids.First)
		return p
	}
	p.State = "weak"
	p.Detail = fmt.Sprintf("user code has the runner's own host uid %d", os.Geteuid())
	p.Means = "it has no capability and sees nothing of the host but /usr; run as root to give every sandbox ids of its own"
	return p
}

func (m *maker) checkPrograms() []sandbox.Piece {
	bash := sandbox.Piece{Name: "bash", State: "ok", Detail: m.host.bash, Fatal: true}
	if err := m.host.bashErr; err != nil {
		bash.State, bash.Detail, bash.Means = "missing", err.Error(), "install bash"
	}
	python := sandbox.Piece{Name: "python3", State: "ok", Detail: m.host.python}
	if err := m.host.pythonErr; err != nil {
		python.State, python.Detail = "missing", err.Error()
		python.Means = "python_exec and Python templates fail; install python3 or name one in the settings"
	}
	return []sandbox.Piece{bash, python}
}

// userNamespaceHelp reads the switches that distributions use.
func userNamespaceHelp() string {
	for _, s := range []struct{ path, bad, help string }{
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor forbids user namespaces to ordinary users: run as root, or sysctl kernel.apparmor_restrict_unprivileged_userns=0, or give bigwave-runner a profile with userns"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1, or run as root"},
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"},
	} {
		content, err := os.ReadFile(s.path)
		if err == nil && strings.TrimSpace(string(content)) == s.bad {
			return s.help
		}
	}
	return "no sandbox can be made here: in a container the runner needs the right to make namespaces and an unmasked /proc; Linux 5.12 or later"
}

package subprocess

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Check implements sandbox.Backend. It tries the real thing: a sandbox is
// started and a program in it says what it may do.
func (b *Backend) Check(ctx context.Context) sandbox.Report {
	r := sandbox.Report{Backend: "subprocess"}
	r.Pieces = append(r.Pieces, b.checkInit(), b.checkIDs(), b.checkDisk(), b.checkRoom())
	r.Pieces = append(r.Pieces, b.checkPrograms()...)
	r.Pieces = append(r.Pieces, b.checkLimits()...)
	r.Pieces = append(r.Pieces, b.checkFilter(), b.checkLandlock())
	r.Pieces = append(r.Pieces, b.checkFence(ctx)...)
	r.Pieces = append(r.Pieces, b.checkGate(ctx)...)
	r.Pieces = append(r.Pieces, b.checkCanary(ctx))
	return r
}

func (b *Backend) checkInit() sandbox.Piece {
	p := sandbox.Piece{Name: "init program", State: "ok", Detail: b.cfg.InitPath, Fatal: true}
	info, err := b.init.Stat()
	switch {
	case err != nil:
		p.State, p.Detail = "missing", err.Error()
	case info.Mode().Perm()&0o005 != 0o005:
		p.State = "missing"
		p.Detail = fmt.Sprintf("%s has mode %v", b.cfg.InitPath, info.Mode().Perm())
		p.Means = "sandboxes run it with ids of their own: chmod 755 it"
	}
	return p
}

func (b *Backend) checkIDs() sandbox.Piece {
	p := sandbox.Piece{Name: "uid mapping", State: "ok"}
	if b.root {
		p.Detail = fmt.Sprintf("each sandbox has %d host ids of its own from %d on", idsPerSandbox, b.cfg.UIDBase)
		return p
	}
	p.State = "weak"
	p.Detail = fmt.Sprintf("user code has the runner's own host uid %d", os.Geteuid())
	p.Means = "it has no capability and sees nothing of the host but /usr; run as root to give every sandbox ids of its own"
	return p
}

func (b *Backend) checkDisk() sandbox.Piece {
	p := sandbox.Piece{Name: "workspace disk", State: "ok", Detail: fmt.Sprintf("each sandbox has an ext4 of %d MiB", b.cfg.WorkspaceMB)}
	if b.disks == nil {
		p.State, p.Detail = "weak", b.noDisks.Error()
		p.Means = fmt.Sprintf("workspaces lie in memory, with at most %d MiB and half of memory_mb; for disks run as root, with e2fsprogs, /dev/loop-control and loop devices", b.cfg.WorkspaceMB)
	}
	return p
}

func (b *Backend) checkPrograms() []sandbox.Piece {
	bash := sandbox.Piece{Name: "bash", State: "ok", Detail: b.host.bash, Fatal: true}
	if err := b.host.bashErr; err != nil {
		bash.State, bash.Detail, bash.Means = "missing", err.Error(), "install bash"
	}
	python := sandbox.Piece{Name: "python3", State: "ok", Detail: b.host.python}
	if err := b.host.pythonErr; err != nil {
		python.State, python.Detail = "missing", err.Error()
		python.Means = "python_exec and Python templates fail; install python3 or name one in the settings"
	}
	return []sandbox.Piece{bash, python}
}

func (b *Backend) checkLimits() []sandbox.Piece {
	var pieces []sandbox.Piece
	for _, l := range limits {
		p := sandbox.Piece{Name: "cgroup " + string(l.controller), State: "ok", Detail: string(b.cgroups.Version())}
		if !b.cgroups.Has(l.controller) {
			p.Detail = b.cgroups.Why(l.controller)
			p.Means = fmt.Sprintf("%s can't be enforced: run as root, or under a unit with Delegate=yes (cgroup v2), "+
				"or name %s in BIGWAVE_ALLOW_WEAK", l.field, l.controller)
			p.State, p.Fatal = "missing", true
			if b.weak(l.controller) {
				p.State, p.Fatal = "weak", false
				p.Means = fmt.Sprintf("%s is held like this: %s", l.field, l.weak)
			}
		}
		pieces = append(pieces, p)
	}
	return pieces
}

// fence is what the probe must find, with what to do when it does not.
var fence = []struct {
	name, key, want, means string
}{
	{"no_new_privs", "NoNewPrivs", "1", "the kernel does not know no_new_privs (Linux 3.5)"},
	{"system call filter in force", "Seccomp", "2", "user code could make every system call"},
	{"no capabilities", "Caps", "0000000000000000", "user code would have capabilities"},
	{"no further user namespaces", "Userns", "0", "user code could make user namespaces of its own, with capabilities in them"},
	{"pid namespace", "Pid", "2", "user code would see other processes"},
	{"network namespace", "Net", "lo", "user code would see the host's network"},
	{"read-only root", "Root", "ro", "user code could change the root"},
}

const probe = `
while read -r key value _; do
  case $key in NoNewPrivs:) echo "NoNewPrivs $value";; Seccomp:) echo "Seccomp $value";; CapBnd:) echo "Caps $value";; esac
done </proc/self/status
echo "Pid $$"
echo "Userns $(</proc/sys/user/max_user_namespaces)"
net=; while IFS=: read -r name rest; do case $name in *\|*) ;; *) net+=${name// };; esac; done </proc/net/dev
echo "Net $net"
if : >/probe; then echo "Root rw"; else echo "Root ro"; fi 2>/dev/null
`

// checkFence starts a sandbox and asks a program in it.
func (b *Backend) checkFence(ctx context.Context) []sandbox.Piece {
	p := sandbox.Piece{Name: "user namespaces", State: "ok", Detail: isolation, Fatal: true}
	facts, err := b.probe(ctx)
	if err != nil {
		p.State, p.Detail = "missing", err.Error()
		p.Means = userNamespaceHelp()
		return []sandbox.Piece{p}
	}
	pieces := []sandbox.Piece{p}
	for _, f := range fence {
		piece := sandbox.Piece{Name: f.name, State: "ok", Detail: facts[f.key], Fatal: true}
		if facts[f.key] != f.want {
			piece.State, piece.Means = "missing", f.means
		}
		pieces = append(pieces, piece)
	}
	return pieces
}

func (b *Backend) probe(ctx context.Context) (map[string]string, error) {
	x, err := b.prepare(ctx)
	if err != nil {
		return nil, err
	}
	defer x.Close(context.WithoutCancel(ctx))
	var out contentWriter
	exit, err := x.Exec(ctx, sandbox.Process{ID: "probe", Program: sandbox.Bash, Script: []byte(probe), InArgv: true, Stdout: &out, Wall: closeTimeout})
	if err != nil {
		return nil, err
	}
	if exit.Reason != sandbox.Exited || exit.Code != 0 {
		return nil, fmt.Errorf("the probe ended as %s with code %d", exit.Reason, exit.Code)
	}
	facts := map[string]string{}
	for line := range strings.Lines(string(out.bytes)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		facts[key] = value
	}
	return facts, nil
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

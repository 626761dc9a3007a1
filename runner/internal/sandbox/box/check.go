package box

import (
	"context"
	"fmt"
	"strings"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Check implements sandbox.Backend. It tries the real thing: a sandbox is
// started and a program in it says what it may do.
func (b *Backend) Check(ctx context.Context) sandbox.Report {
	r := sandbox.Report{Backend: b.maker.About().Backend}
	r.Pieces = append(r.Pieces, b.maker.Check(ctx)...)
	r.Pieces = append(r.Pieces, b.checkDisk(), b.checkRoom())
	r.Pieces = append(r.Pieces, b.checkLimits()...)
	r.Pieces = append(r.Pieces, b.checkFilter(), b.checkLandlock())
	r.Pieces = append(r.Pieces, b.checkFence(ctx)...)
	r.Pieces = append(r.Pieces, b.checkGate(ctx)...)
	r.Pieces = append(r.Pieces, b.checkCanary(ctx))
	return r
}

func (b *Backend) checkDisk() sandbox.Piece {
	p := sandbox.Piece{Name: "workspace disk", State: "ok", Detail: fmt.Sprintf("each sandbox has an ext4 of %d MiB", b.cfg.WorkspaceMB)}
	if b.disks == nil {
		p.State, p.Detail = "weak", b.noDisks.Error()
		p.Means = fmt.Sprintf("workspaces lie in memory, with at most %d MiB and half of memory_mb; for disks run as root, with e2fsprogs, /dev/loop-control and loop devices", b.cfg.WorkspaceMB)
	}
	return p
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
	about := b.maker.About()
	p := sandbox.Piece{Name: "sandbox", State: "ok", Detail: about.Isolation, Fatal: true}
	facts, err := b.probe(ctx)
	if err != nil {
		p.State, p.Detail = "missing", err.Error()
		p.Means = about.Help
		return []sandbox.Piece{p}
	}
	pieces := []sandbox.Piece{p}
	for _, f := range fence {
		if f.key == "Userns" && !about.UserNamespace {
			continue // the host's number; the filter refuses to make any
		}
		piece := sandbox.Piece{Name: f.name, State: "ok", Detail: facts[f.key], Fatal: true}
		if facts[f.key] != f.want {
			piece.State, piece.Means = "missing", f.means
		}
		pieces = append(pieces, piece)
	}
	return pieces
}

// prepareStandard makes a sandbox that nobody gets.
func (b *Backend) prepareStandard(ctx context.Context) (*box, error) {
	image, err := b.maker.Image(ctx, b.maker.Standard())
	if err != nil {
		return nil, err
	}
	return b.prepare(ctx, image)
}

func (b *Backend) probe(ctx context.Context) (map[string]string, error) {
	x, err := b.prepareStandard(ctx)
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

package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/cio"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/containerd/oci"
	"github.com/containerd/containerd/snapshots"
	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
	spec "github.com/bigwave/bigwave/runner/internal/oci"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// meetTimeout is how long an init may take from its start to its connection.
const meetTimeout = 10 * time.Second

// Launch makes a container whose process is the init, and meets that.
func (m *maker) Launch(ctx context.Context, p box.Place) (guest box.Guest, err error) {
	client, err := m.connect()
	if err != nil {
		return box.Guest{}, err
	}
	r, err := m.prepared(p.Image)
	if err != nil {
		return box.Guest{}, err
	}
	ctx = m.scope(ctx)
	meeting, err := listen(filepath.Join(m.cfg.DataDir, "sandboxes", p.Name))
	if err != nil {
		return box.Guest{}, fmt.Errorf("listen for the init: %w", err)
	}
	defer meeting.close()
	defer func() {
		if err != nil {
			m.remove(p.Name)
			m.forget(p.Image, err)
			err = startError(err)
		}
	}()
	labels := map[string]string{ownerLabel: m.owner}
	snapshot := map[string]string{ownerLabel: m.owner, gcRootLabel: time.Now().UTC().Format(time.RFC3339)}
	if _, err := client.SnapshotService(m.cfg.Snapshotter).Prepare(ctx, p.Name, r.chain, snapshots.WithLabels(snapshot)); err != nil {
		return box.Guest{}, fmt.Errorf("snapshot: %w", err)
	}
	c := spec.Container{Init: m.init, Socket: meeting.path}
	if p.Group != nil {
		c.CgroupsPath = p.Group.RuntimePath()
	}
	container, err := client.NewContainer(ctx, p.Name,
		containerd.WithContainerLabels(labels),
		withRootfs(p.Image.Name, m.cfg.Snapshotter, p.Name),
		containerd.WithRuntime(m.cfg.Runtime, nil),
		containerd.WithSpec(spec.Spec(c), withoutDefaults),
	)
	if err != nil {
		return box.Guest{}, fmt.Errorf("container: %w", err)
	}
	task, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		return box.Guest{}, fmt.Errorf("task: %w", err)
	}
	init, err := openProcess(int(task.Pid()))
	if err != nil {
		return box.Guest{}, fmt.Errorf("task: %w", err)
	}
	if err := task.Start(ctx); err != nil {
		return box.Guest{}, errors.Join(fmt.Errorf("start: %w", err), init.close())
	}
	control, err := meeting.meet(ctx, init.pid)
	if err != nil {
		return box.Guest{}, errors.Join(fmt.Errorf("meet the init: %w", err), init.Kill(), init.close())
	}
	programs, err := m.programs(p.Image, r, init.pid)
	if err != nil {
		return box.Guest{}, errors.Join(err, control.Close(), init.Kill(), init.close())
	}
	return box.Guest{
		Process:  init,
		Control:  control,
		Layout:   inside.Layout{Built: true, Steps: steps(p)},
		Programs: programs,
		Joined:   true,
		Remove: func(context.Context) error {
			m.remove(p.Name)
			return init.close()
		},
	}, nil
}

// withRootfs names a container's image and its snapshot, both of which are
// known to be there.
func withRootfs(image, snapshotter, key string) containerd.NewContainerOpts {
	return func(_ context.Context, _ *containerd.Client, c *containers.Container) error {
		c.Image, c.Snapshotter, c.SnapshotKey = image, snapshotter, key
		return nil
	}
}

// withoutDefaults keeps the client from adding anything to our specification.
func withoutDefaults(context.Context, oci.Client, *containers.Container, *oci.Spec) error { return nil }

// steps furnish the container's root. What the image has in /etc stays, but
// for what says where the sandbox is.
func steps(p box.Place) []inside.Step {
	tmpfs := func(path string, mb int64) inside.Step {
		return inside.Step{Kind: inside.StepTmpfs, Path: path, Data: fmt.Sprintf("mode=1777,size=%dm,nr_inodes=%d", mb, mb*256)}
	}
	file := func(path, content string) inside.Step {
		return inside.Step{Kind: inside.StepFile, Path: path, Data: content, Mode: 0o644}
	}
	added := func(path, line string) inside.Step {
		return inside.Step{Kind: inside.StepAppend, Path: path, Data: line, Mode: 0o644}
	}
	steps := []inside.Step{
		{Kind: inside.StepUnmount, Path: "/run"},
		{Kind: inside.StepRemove, Path: "/run"},
		{Kind: inside.StepDir, Path: "/run/empty", Mode: 0o755},
		// The runtime's /dev allows devices as a whole; ours only these.
		{Kind: inside.StepUnmount, Path: "/dev"},
		{Kind: inside.StepRemove, Path: "/dev"},
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		steps = append(steps, inside.Step{
			Kind: inside.StepBind, Path: "/dev/" + name, Data: "/dev/" + name, File: true, Writable: true, Device: true,
		})
	}
	for name, target := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		steps = append(steps, inside.Step{Kind: inside.StepLink, Path: "/dev/" + name, Data: "/proc/self/fd" + target})
	}
	steps = append(steps, p.Packages...)
	return append(steps,
		file("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n"),
		file("/etc/hostname", "sandbox\n"),
		file("/etc/resolv.conf", "nameserver 127.0.0.1\n"), // the gate, or nobody
		added("/etc/passwd", fmt.Sprintf("sandbox:x:%d:%d:sandbox:/workspace:/bin/bash\n", p.IDs.User, p.IDs.User)),
		added("/etc/group", fmt.Sprintf("sandbox:x:%d:\n", p.IDs.User)),
		tmpfs("/dev/shm", p.ShmMB),
		tmpfs("/tmp", p.TmpMB),
		inside.Step{Kind: inside.StepRemove, Path: "/var/tmp"},
		inside.Step{Kind: inside.StepLink, Path: "/var/tmp", Data: "/tmp"},
		p.Workspace,
	)
}

// meeting is a socket that one init connects to, once.
type meeting struct {
	dir  string
	path string
	l    *net.UnixListener
}

func listen(dir string) (*meeting, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	m := &meeting{dir: dir, path: filepath.Join(dir, "socket")}
	held, err := os.Open(dir)
	if err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	defer held.Close()
	// A socket's address is short; a data directory's path need not be.
	short := "/proc/self/fd/" + strconv.Itoa(int(held.Fd())) + "/socket"
	if m.l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: short, Net: "unixpacket"}); err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	m.l.SetUnlinkOnClose(false) // by that address it could be another's
	return m, nil
}

func (m *meeting) close() {
	_ = m.l.Close()
	_ = os.RemoveAll(m.dir)
}

// meet takes the connection of the process pid and no other, and gives it its
// control socket.
func (m *meeting) meet(ctx context.Context, pid int) (*box.Socket, error) {
	ctx, cancel := context.WithTimeout(ctx, meetTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = m.l.SetDeadline(time.Now()) })
	defer stop()
	conn, err := m.l.AcceptUnix()
	if err != nil {
		return nil, errors.Join(context.Cause(ctx), err)
	}
	defer conn.Close()
	file, err := conn.File()
	if err != nil {
		return nil, err
	}
	defer file.Close()
	peer, err := unix.GetsockoptUcred(int(file.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, err
	}
	if int(peer.Pid) != pid || peer.Uid != 0 {
		return nil, fmt.Errorf("process %d of uid %d connected, not the init %d", peer.Pid, peer.Uid, pid)
	}
	ours, theirs, err := box.NewSocket()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if err := inside.Send(int(file.Fd()), []byte{0}, theirs.FD()); err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	return ours, nil
}

// process is the init by a descriptor, which never means another process. It
// is the shim's child, not ours.
type process struct {
	pid int
	fd  *os.File
}

func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	return &process{pid, os.NewFile(uintptr(fd), "init")}, nil
}

func (p *process) PID() int { return p.pid }

func (p *process) Kill() error {
	err := unix.PidfdSendSignal(int(p.fd.Fd()), unix.SIGKILL, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// Wait returns when the process is a zombie, which the first of a pid
// namespace becomes when all others of that are gone.
func (p *process) Wait() {
	set := []unix.PollFd{{Fd: int32(p.fd.Fd()), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(set, -1); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (p *process) close() error { return p.fd.Close() }

package subprocess

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// box is one sandbox. It is made before its spec is known (see prepare) and
// becomes the session's by begin.
type box struct {
	b     *Backend
	slot  int
	name  string
	group *cgroup.Group
	info  sandbox.Info

	process *os.Process
	control *socket
	up      chan inside.Trouble // Hello, and the answers to Layout and Limits, in order
	made    chan made           // the answers to Sockets
	gate    *egress.Gate        // the way out; nil: none
	roots   []string            // what file operations may reach
	done    chan struct{}       // closed once nothing runs in it any more

	mu          sync.Mutex
	dead        bool
	supervisors map[uint32]*supervisor
	spares      []*supervisor // have no call yet
	lastID      uint32
	pidsLimit   int64 // of user code; 0 before begin
	calls       map[*call]bool
	workspace   *os.File // only to ask how full it is; nil before begin

	closing sync.Once
	closed  chan struct{}
	err     error // of closing
}

// supervisor is one call's pid 1, with or without its call yet.
type supervisor struct {
	id    uint32
	sock  *socket
	taken bool
	ended chan inside.Ended
}

// ids are a sandbox's on the host and inside.
type ids struct {
	first int // host id of inside 0
	count int
	user  int // of user code, inside
}

func (b *Backend) ids(slot int) ids {
	if !b.root {
		return ids{first: os.Geteuid(), count: 1}
	}
	return ids{first: b.cfg.UIDBase + slot*idsPerSandbox, count: idsPerSandbox, user: userID}
}

// prepare makes a sandbox without limits, up to its first waiting supervisor.
func (b *Backend) prepare(ctx context.Context) (*box, error) {
	slot, name := b.slot()
	x := &box{
		b:           b,
		slot:        slot,
		name:        name,
		info:        sandbox.Info{Backend: "subprocess", Isolation: isolation, Enforced: b.enforced()},
		up:          make(chan inside.Trouble, 1),
		made:        make(chan made, 1),
		roots:       []string{workspace},
		done:        make(chan struct{}),
		supervisors: map[uint32]*supervisor{},
		calls:       map[*call]bool{},
		closed:      make(chan struct{}),
	}
	b.track(x, true)
	if err := x.make(ctx); err != nil {
		return nil, errors.Join(err, x.Close(context.WithoutCancel(ctx)))
	}
	return x, nil
}

const isolation = "userns+mountns+pidns+netns+ipcns+utsns+cgroupns"

func (x *box) make(ctx context.Context) error {
	ids := x.b.ids(x.slot)
	mount := -1
	if x.b.disks != nil {
		var err error
		if mount, err = x.b.disks.make(x.name, ids.first+ids.user, x.b.at); err != nil {
			return err
		}
		defer closeFDs([]int{mount})
	}
	if err := x.b.at("cgroup"); err != nil {
		return err
	}
	if x.b.cgroups.Version() != cgroup.None {
		var err error
		if x.group, err = x.b.cgroups.Create(x.name); err != nil {
			return err
		}
		if err := x.group.Delegate(ids.first); err != nil {
			return err
		}
	}
	if err := x.b.at("launch"); err != nil {
		return err
	}
	if err := x.launch(ids); err != nil {
		return err
	}
	if err := x.b.at("hello"); err != nil {
		return err
	}
	// Only a running init has the threads that must stay out of the pids cgroup.
	if err := x.answer(ctx); err != nil {
		return err
	}
	if err := x.b.at("join"); err != nil {
		return err
	}
	if x.group != nil {
		if err := x.group.Join(x.process.Pid); err != nil {
			return err
		}
	}
	if err := x.b.at("layout"); err != nil {
		return err
	}
	if err := x.sendLayout(mount, ids); err != nil {
		return err
	}
	if err := x.answer(ctx); err != nil {
		return err
	}
	if err := x.b.at("spare"); err != nil {
		return err
	}
	return x.firstSpare(ctx)
}

// launch starts the init in its namespaces. It waits for its layout.
func (x *box) launch(ids ids) error {
	ours, theirs, err := newSocket()
	if err != nil {
		return err
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return errors.Join(err, ours.Close())
	}
	defer null.Close()
	attr := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: ids.first, Size: ids.count}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: ids.first, Size: ids.count}},
		GidMappingsEnableSetgroups: x.b.root,
		Credential:                 &syscall.Credential{NoSetGroups: !x.b.root},
		Setsid:                     true,
	}
	if !x.b.root {
		attr.GidMappings[0].HostID = os.Getegid()
	}
	if x.group != nil && x.group.InitFD() >= 0 {
		attr.UseCgroupFD, attr.CgroupFD = true, x.group.InitFD()
	}
	// By descriptor, since its ids may not lead it to the file. The program
	// is number 4 in the child.
	start := func() (err error) {
		x.process, err = os.StartProcess("/proc/self/fd/4", []string{"bigwave-init"}, &os.ProcAttr{
			Dir:   "/",
			Env:   []string{"GOMAXPROCS=1"},
			Files: []*os.File{null, null, os.Stderr, theirs.File, x.b.init},
			Sys:   attr,
		})
		return err
	}
	if x.b.root {
		err = asOwner(ids.first, start)
	} else {
		err = start()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("start the init: %w", err), ours.Close())
	}
	if x.b.root {
		// Among the processes of its own cgroup it comes first, and so do the
		// supervisors: it has to get a turn beside those that it is to end.
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, x.process.Pid, -10)
	}
	x.control = ours
	x.b.working.Go(x.listen)
	return nil
}

func (x *box) sendLayout(mount int, ids ids) error {
	steps := x.b.host.layout(ids, x.b.cfg.TmpMB, x.b.cfg.ShmMB, x.b.workspaceStep(mount, ids))
	layout := inside.Layout{
		Hostname: "sandbox",
		UID:      uint32(ids.user),
		GID:      uint32(ids.user),
		Groups:   x.b.root,
		CgroupFD: -1,
		Filter:   string(x.b.filter),
		Landlock: uint32(x.b.landlock),
		Steps:    steps,
	}
	var fds []int
	if x.b.root {
		var err error
		if fds, err = openMounts(steps); err != nil {
			return err
		}
		defer closeFDs(fds)
	} else {
		for i := range steps {
			steps[i].FD = -1
		}
		for _, o := range x.b.offers {
			layout.Offers = append(layout.Offers, inside.Offer{Path: o.Host})
		}
	}
	if x.group != nil && x.group.CallsFD() >= 0 {
		layout.CgroupFD = len(fds)
		fds = append(fds[:len(fds):len(fds)], x.group.CallsFD())
	}
	return x.control.send(inside.AppendLayout(nil, layout), fds...)
}

// answer waits for the init's answer to the last thing that was asked of it.
func (x *box) answer(ctx context.Context) error {
	select {
	case t := <-x.up:
		if t.Step != "" {
			return fmt.Errorf("in the sandbox: %s: %w", t.Step, syscall.Errno(t.Errno))
		}
		return nil
	case <-x.done:
		return errors.New("the init ended at its start")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// firstSpare proves that a call could start.
func (x *box) firstSpare(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = x.process.Kill() })
	defer stop()
	x.mu.Lock()
	s, err := x.spawn()
	if err == nil {
		x.spares = append(x.spares, s)
	}
	x.mu.Unlock()
	if err != nil {
		return err
	}
	note, err := s.note()
	if err != nil {
		return fmt.Errorf("hear from the first supervisor: %w", err)
	}
	if note.Kind != inside.NoteReady {
		return failure(note)
	}
	return nil
}

func failure(n inside.Note) error {
	return fmt.Errorf("in the sandbox: %s: %w", inside.FailSteps[n.B], syscall.Errno(n.A))
}

// begin gives the sandbox its limits.
func (x *box) begin(ctx context.Context, spec sandbox.Spec) error {
	p := spec.Policy
	memory := p.MemoryMB << 20
	tmp := inside.Limits{
		TmpBytes: uint64(min(x.b.cfg.TmpMB<<20, memory/2)),
		ShmBytes: uint64(min(x.b.cfg.ShmMB<<20, memory/2)),
	}
	if x.b.disks == nil {
		tmp.WorkspaceBytes = uint64(min(x.b.cfg.WorkspaceMB<<20, memory/2))
	}
	wishes, err := x.b.wishes(p.FSAllowlist)
	if err != nil {
		return err
	}
	var fds []int
	if tmp.Mounts, fds, err = x.b.mounts(wishes); err != nil {
		return err
	}
	defer closeFDs(fds)
	for _, w := range wishes {
		x.roots = append(x.roots, w.path)
	}
	again := len(wishes) > 0 // the supervisors that wait were made without
	if !x.b.cgroups.Has(cgroup.Memory) {
		tmp.Rlimits.AddressSpace, again = uint64(memory), true
	}
	if !x.b.cgroups.Has(cgroup.PIDs) {
		// The init's threads and the supervisors have the same uid.
		tmp.Rlimits.Processes, again = uint64(p.PIDsLimit)+initTasks, true
	}
	if err := x.b.at("limits"); err != nil {
		return err
	}
	if err := x.control.send(inside.AppendLimits(nil, tmp), fds...); err != nil {
		return err
	}
	x.mu.Lock()
	x.pidsLimit = p.PIDsLimit
	err = x.limitPIDs()
	if again {
		x.dropSpares()
	}
	x.mu.Unlock()
	if err != nil {
		return err
	}
	if x.group != nil {
		if err := x.group.Set(cgroup.Limits{MemoryBytes: memory, CPUShares: p.CPUShares}); err != nil {
			return err
		}
	}
	if err := x.answer(ctx); err != nil {
		return err
	}
	if err := x.b.at("gate"); err != nil {
		return err
	}
	return x.openGate(ctx, x.b.fence, p.NetworkAllowlist)
}

// initTasks is how many tasks of ours count under an RLIMIT_NPROC: the init's
// threads, a supervisor and a spare one with its waiting process.
const initTasks = 12

// limitPIDs sets the pids limit so that user code gets exactly its own: what
// else is in the cgroup is the init's forking thread (v1), one task for each
// supervisor, and a waiting process for each without a call. mu is held.
func (x *box) limitPIDs() error {
	if x.group == nil || x.pidsLimit == 0 {
		return nil
	}
	ours := int64(len(x.supervisors))
	for _, s := range x.supervisors {
		if !s.taken {
			ours++
		}
	}
	if x.group.CallsFD() < 0 {
		ours++
	}
	return x.group.SetPIDs(x.pidsLimit + ours)
}

// spawn asks for a supervisor. mu is held.
func (x *box) spawn() (*supervisor, error) {
	if x.dead {
		return nil, sandbox.ErrClosed
	}
	ours, theirs, err := newSocket()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	x.lastID++
	s := &supervisor{id: x.lastID, sock: ours, ended: make(chan inside.Ended, 1)}
	x.supervisors[s.id] = s
	if err := x.limitPIDs(); err != nil {
		return nil, errors.Join(err, x.forget(s))
	}
	if err := x.control.send(inside.AppendID(nil, inside.KindSpawn, s.id), theirs.fd); err != nil {
		return nil, errors.Join(fmt.Errorf("ask for a supervisor: %w", err), x.forget(s))
	}
	return s, nil
}

// forget drops a supervisor that is gone. mu is held.
func (x *box) forget(s *supervisor) error {
	delete(x.supervisors, s.id)
	return errors.Join(s.sock.Close(), x.limitPIDs())
}

// dropSpares ends the supervisors that wait; the init says when. mu is held.
func (x *box) dropSpares() {
	for _, s := range x.spares {
		_, _ = x.kill(s), x.kill(s)
	}
	x.spares = nil
}

func (x *box) kill(s *supervisor) error {
	return x.control.send(inside.AppendID(nil, inside.KindKill, s.id))
}

// listen hears the init until it ends, and then buries the sandbox.
func (x *box) listen() {
	defer close(x.done)
	buffer := make([]byte, 4096)
	for {
		n, fds, err := x.control.receive(buffer)
		if err != nil {
			break
		}
		x.hear(inside.Kind(buffer[0]), buffer[1:n], fds)
	}
	_ = x.process.Kill()
	_, _ = x.process.Wait() // returns when the kernel has emptied the pid namespace
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dead = true
	x.spares = nil
	for _, s := range x.supervisors {
		if !s.taken {
			_ = s.sock.Close()
		}
	}
	_ = x.control.Close()
}

func (x *box) hear(kind inside.Kind, body []byte, fds []int) {
	if kind == inside.KindMade {
		if t, err := inside.ParseTrouble(body); err == nil && x.handOver(made{t, fds}) {
			return
		}
	}
	if kind == inside.KindLimited && len(fds) == 1 && x.keepWorkspace(fds[0]) {
		fds = nil
	}
	closeFDs(fds)
	switch kind {
	case inside.KindHello, inside.KindUp, inside.KindLimited:
		if t, err := inside.ParseTrouble(body); err == nil {
			select {
			case x.up <- t:
			default: // nobody asked
			}
		}
	case inside.KindEnded:
		if e, err := inside.ParseEnded(body); err == nil {
			x.supervisorEnded(e)
		}
	}
}

// keepWorkspace takes the first descriptor of the workspace.
func (x *box) keepWorkspace(fd int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.workspace != nil {
		return false
	}
	x.workspace = os.NewFile(uintptr(fd), workspace)
	return true
}

// letGo frees the workspace's disk: nothing of it is needed any more.
func (x *box) letGo() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.workspace != nil {
		abandon(x.workspace)
		_ = x.workspace.Close()
	}
}

func (x *box) supervisorEnded(e inside.Ended) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.supervisors[e.ID]
	if s == nil {
		return
	}
	delete(x.supervisors, s.id)
	for i, spare := range x.spares {
		if spare == s {
			x.spares = append(x.spares[:i], x.spares[i+1:]...)
			break
		}
	}
	if !s.taken {
		_ = s.sock.Close()
	}
	_ = x.limitPIDs()
	s.ended <- e
}

// take returns a supervisor for a call.
func (x *box) take() (*supervisor, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.dead {
		return nil, sandbox.ErrClosed
	}
	var s *supervisor
	if len(x.spares) > 0 {
		s = x.spares[0]
		x.spares = x.spares[1:]
	} else {
		var err error
		if s, err = x.spawn(); err != nil {
			return nil, err
		}
	}
	s.taken = true
	return s, x.limitPIDs()
}

// stockUp has the next supervisor made, if none waits.
func (x *box) stockUp() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stock()
}

func (x *box) stock() {
	if x.dead || len(x.spares) > 0 {
		return
	}
	if s, err := x.spawn(); err == nil {
		x.spares = append(x.spares, s)
	}
}

func (x *box) alive() bool {
	select {
	case <-x.done:
		return false
	default:
		return true
	}
}

// Done implements sandbox.Sandbox.
func (x *box) Done() <-chan struct{} { return x.done }

// Info implements sandbox.Sandbox.
func (x *box) Info() sandbox.Info { return x.info }

// Close implements sandbox.Sandbox. Killing the init ends everything: the
// kernel does not leave a process in a pid namespace whose first is gone.
func (x *box) Close(ctx context.Context) error {
	x.closing.Do(func() {
		x.b.working.Go(func() {
			defer close(x.closed)
			x.err = x.shut(context.WithoutCancel(ctx))
		})
	})
	select {
	case <-x.closed:
		return x.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (x *box) shut(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	var errs []error
	if x.process == nil {
		close(x.done)
	} else {
		_ = x.process.Kill()
		select {
		case <-x.done:
		case <-time.After(closeTimeout / 2): // the group's own removal kills too
		}
	}
	x.closeGate()
	if x.group != nil {
		errs = append(errs, x.group.Remove(ctx))
	}
	x.letGo()
	x.b.track(x, false)
	if x.alive() { // its ids are not to be had by another
		errs = append(errs, errors.New("a sandbox outlived its end"))
	} else {
		x.b.freeSlot(x.slot)
	}
	return errors.Join(errs...)
}

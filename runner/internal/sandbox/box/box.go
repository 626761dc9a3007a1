package box

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
	image Image
	ids   IDs
	group *cgroup.Group
	info  sandbox.Info

	guest Guest               // its Process is nil until launch
	up    chan inside.Trouble // Hello, and the answers to Layout and Limits, in order
	made  chan made           // the answers to Sockets
	gate  *egress.Gate        // the way out; nil: none
	roots []string            // what file operations may reach
	done  chan struct{}       // closed once nothing runs in it any more

	mu          sync.Mutex
	dead        bool
	leaving     bool // Close has been called
	supervisors map[uint32]*supervisor
	spares      []*supervisor // have no call yet
	lastID      uint32
	pidsLimit   int64 // of user code; 0 before begin
	memory      int64 // bytes of the policy; 0 before begin
	python      interpreter
	calls       map[*call]bool
	workspace   *os.File // only to ask how full it is; nil before begin

	closing sync.Once
	closed  chan struct{}
	err     error // of closing
}

// supervisor is one call's pid 1, with or without its call yet.
type supervisor struct {
	id    uint32
	sock  *Socket
	taken bool
	ended chan inside.Ended

	// Of one whose call's process is forked from the warm interpreter: closed
	// when it is, or could not be; and whether it is.
	ready  chan struct{}
	forked bool
}

// prepare makes a sandbox without limits, up to its first waiting supervisor.
func (b *Backend) prepare(ctx context.Context, image Image) (*box, error) {
	slot, name := b.slot()
	x := &box{
		b:           b,
		slot:        slot,
		name:        name,
		image:       image,
		ids:         b.maker.IDs(slot),
		info:        b.info(image),
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

func (x *box) make(ctx context.Context) error {
	mount := -1
	if x.b.disks != nil {
		var err error
		if mount, err = x.b.disks.make(x.name, x.ids.Host, x.b.at); err != nil {
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
		if err := x.group.Delegate(x.ids.First); err != nil {
			return err
		}
	}
	if err := x.b.at("launch"); err != nil {
		return err
	}
	if err := x.launch(ctx, mount); err != nil {
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
	if err := x.join(); err != nil {
		return err
	}
	if err := x.b.at("layout"); err != nil {
		return err
	}
	if err := x.sendLayout(); err != nil {
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

// launch has the maker start the init, and hears what it says from now on.
func (x *box) launch(ctx context.Context, mount int) error {
	g, err := x.b.maker.Launch(ctx, Place{
		Name:      x.name,
		IDs:       x.ids,
		Group:     x.group,
		Image:     x.image,
		TmpMB:     x.b.cfg.TmpMB,
		ShmMB:     x.b.cfg.ShmMB,
		Workspace: x.b.workspaceStep(mount, x.ids),
		Packages:  x.b.packagesSteps(),
	})
	if err != nil {
		return err
	}
	x.guest = g
	if x.b.root {
		// Among the processes of its own cgroup it comes first, and so do the
		// supervisors: it has to get a turn beside those that it is to end.
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, g.Process.PID(), -10)
	}
	x.b.working.Go(x.listen)
	return nil
}

func (x *box) join() error {
	if x.group == nil {
		return nil
	}
	if x.guest.Joined {
		return x.group.JoinCalls(x.guest.Process.PID())
	}
	return x.group.Join(x.guest.Process.PID())
}

func (x *box) sendLayout() error {
	layout := x.guest.Layout
	layout.Hostname = "sandbox"
	layout.UID, layout.GID = uint32(x.ids.User), uint32(x.ids.User)
	layout.Groups = x.b.root
	layout.CgroupFD = -1
	layout.Filter, layout.Own = string(x.b.kernel.Filter), string(x.b.kernel.Own)
	layout.Landlock = uint32(x.b.kernel.Landlock)
	var fds []int
	if x.b.root {
		var err error
		if fds, err = openMounts(layout.Steps); err != nil {
			return err
		}
		defer closeFDs(fds)
	} else {
		for i := range layout.Steps {
			layout.Steps[i].FD = -1
		}
		for _, o := range x.b.offers {
			layout.Offers = append(layout.Offers, inside.Offer{Path: o.Host})
		}
	}
	if x.group != nil && x.group.CallsFD() >= 0 {
		layout.CgroupFD = len(fds)
		fds = append(fds[:len(fds):len(fds)], x.group.CallsFD())
	}
	return x.guest.Control.send(inside.AppendLayout(nil, layout), fds...)
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
	stop := context.AfterFunc(ctx, func() { _ = x.guest.Process.Kill() })
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
	if err := x.guest.Control.send(inside.AppendLimits(nil, tmp), fds...); err != nil {
		return err
	}
	x.mu.Lock()
	x.pidsLimit, x.memory = p.PIDsLimit, memory
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
	return x.openGate(ctx, x.b.fence, p.NetworkAllowlist, spec.PrivateAllow)
}

// initTasks is how many tasks of ours count under an RLIMIT_NPROC: the init's
// threads, a supervisor and a spare one with its waiting process.
const initTasks = 12

// limitPIDs sets the pids limit so that user code gets exactly its own: what
// else is in the cgroup is the init's forking thread (v1), one task for each
// supervisor, a waiting process for each without a call, and the warm interpreter
// with what it forks a call by. mu is held.
func (x *box) limitPIDs() error {
	if x.group == nil || x.pidsLimit == 0 {
		return nil
	}
	ours := int64(len(x.supervisors))
	for _, s := range x.supervisors {
		if !s.taken {
			ours++
		}
		if s.ready != nil && !s.forked {
			ours++
		}
	}
	if x.group.CallsFD() < 0 {
		ours++
	}
	if x.python.started {
		ours++
	}
	return x.group.SetPIDs(x.pidsLimit + ours)
}

// spawn asks for a supervisor. mu is held.
func (x *box) spawn() (*supervisor, error) { return x.spawnAs(inside.KindSpawn) }

func (x *box) spawnAs(kind inside.Kind) (*supervisor, error) {
	if x.dead {
		return nil, sandbox.ErrClosed
	}
	ours, theirs, err := NewSocket()
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
	if err := x.guest.Control.send(inside.AppendID(nil, kind, s.id), theirs.FD()); err != nil {
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
		x.dismiss(s)
	}
	x.spares = nil
}

// dismiss ends a supervisor that has no call: asked twice, it goes itself.
func (x *box) dismiss(s *supervisor) { _, _ = x.kill(s), x.kill(s) }

// kill has a supervisor end its call.
func (x *box) kill(s *supervisor) error {
	return x.guest.Control.send(inside.AppendID(nil, inside.KindKill, s.id))
}

// listen hears the init until it ends, and then buries the sandbox.
func (x *box) listen() {
	defer close(x.done)
	buffer := make([]byte, 4096)
	for {
		n, fds, err := x.guest.Control.receive(buffer)
		if err != nil {
			break
		}
		x.hear(inside.Kind(buffer[0]), buffer[1:n], fds)
	}
	_ = x.guest.Process.Kill()
	x.guest.Process.Wait()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dead = true
	x.spares = nil
	for _, s := range x.supervisors {
		if !s.taken {
			_ = s.sock.Close()
		}
	}
	_ = x.guest.Control.Close()
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
	if x.python.fork == s {
		x.python.fork = nil
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
		x.mu.Lock()
		x.leaving = true
		x.mu.Unlock()
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
	if x.guest.Process == nil {
		close(x.done)
	} else {
		_ = x.guest.Process.Kill()
		select {
		case <-x.done:
		case <-time.After(closeTimeout / 2): // the group's own removal kills too
		}
	}
	x.closeGate()
	if x.group != nil {
		errs = append(errs, x.group.Remove(ctx))
	}
	if x.guest.Remove != nil {
		errs = append(errs, x.guest.Remove(ctx))
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

// InitPID is the host's pid of a sandbox's init, for those who look at it from
// outside; 0 if s is not a sandbox of this package.
func InitPID(s sandbox.Sandbox) int {
	if x, ok := s.(*box); ok {
		return x.guest.Process.PID()
	}
	return 0
}

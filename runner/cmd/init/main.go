// Command init is pid 1 in every sandbox. It builds the sandbox's root, then
// makes a supervisor whenever the runner asks for one, and ends when the
// runner's end of its socket closes; the kernel then ends what is left.
//
// A supervisor is pid 1 of one call's own pid and mount namespace. It is a
// fork of the init without an exec, since starting a Go program anew would
// cost more than the call does; see fork.go for the rules that this brings.
package main

import (
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// The thread that forks must be the process's first: on cgroup v1 it alone
// sits in the pids cgroup, and all that it forks inherits it. Locking it here,
// before main, also keeps the runtime from cloning other threads from it.
func init() { runtime.LockOSThread() }

// A collection must not be under way in a fork, so they run by hand.
const forksPerCollection = 2048

func main() {
	debug.SetGCPercent(-1)
	if err := run(); err != nil && err != io.EOF {
		_, _ = os.Stderr.WriteString("bigwave-init: " + err.Error() + "\n")
		os.Exit(1)
	}
}

// machine is the init's state; one goroutine holds it.
type machine struct {
	layout      inside.Layout
	cgroup      int // of the calls, on cgroup v2; else -1
	supervisors []supervisor
	warm        int   // the interpreter's pid; 0: none
	offers      []int // detached mounts of the layout's offers, until the limits come
	forks       int
	packet      []byte
	in          [inside.MaxPacket]byte
}

// supervisor is one live child.
type supervisor struct {
	id    uint32
	pid   int
	pidfd int
	asked bool // to end its call
}

func run() error {
	m := &machine{cgroup: -1}
	if len(os.Args) > 1 {
		if err := meet(os.Args[1]); err != nil {
			return err
		}
	}
	if err := m.build(); err != nil {
		return err
	}
	for {
		ready, err := m.wait()
		if err != nil {
			return err
		}
		if err := m.reap(); err != nil {
			return err
		}
		if !ready {
			continue
		}
		if err := m.obey(); err != nil {
			return err
		}
	}
}

// build reads the layout and makes the root; the runner hears how it went.
func (m *machine) build() error {
	if err := m.tell(inside.AppendTrouble(nil, inside.KindHello, inside.Trouble{})); err != nil {
		return err
	}
	n, fds, err := inside.Receive(inside.Control, m.in[:])
	if err != nil {
		return err
	}
	if inside.Kind(m.in[0]) != inside.KindLayout {
		return syscall.EPROTO
	}
	if m.layout, err = inside.ParseLayout(m.in[1:n]); err != nil {
		return err
	}
	if i := m.layout.CgroupFD; i >= 0 && i < len(fds) {
		m.cgroup = fds[i]
	}
	trouble := m.openOffers()
	if trouble.Step == "" {
		trouble = makeRoot(m.layout, fds)
	}
	for i, fd := range fds {
		if i != m.layout.CgroupFD {
			_ = syscall.Close(fd)
		}
	}
	if trouble.Step == "" {
		trouble = makeRules(m.layout)
	}
	if trouble.Step == "" {
		trouble = lowerSelf()
	}
	if trouble.Step == "" {
		trouble = filterSelf(m.layout.Own)
	}
	prepareStub(m.layout)
	prepareMasks()
	collect()
	return m.tell(inside.AppendTrouble(m.packet[:0], inside.KindUp, trouble))
}

// collect also gives memory back, since a fork copies what there is of it.
func collect() {
	debug.FreeOSMemory()
	growStack()
}

// obey carries out one packet.
func (m *machine) obey() error {
	n, fds, err := inside.Receive(inside.Control, m.in[:])
	if err != nil {
		return err
	}
	body := m.in[1:n]
	switch inside.Kind(m.in[0]) {
	case inside.KindSpawn, inside.KindFork:
		id, err := inside.ParseID(body)
		if err != nil || len(fds) != 1 {
			return syscall.EPROTO
		}
		err = m.spawn(id, fds[0], inside.Kind(m.in[0]) == inside.KindFork)
		_ = syscall.Close(fds[0])
		return err
	case inside.KindKill:
		id, err := inside.ParseID(body)
		if err != nil {
			return err
		}
		m.kill(id)
		return nil
	case inside.KindWarm:
		w, err := inside.ParseWarm(body)
		if err != nil || len(fds) != 1 {
			return syscall.EPROTO
		}
		m.startWarm(w, fds[0])
		_ = syscall.Close(fds[0])
		return nil
	case inside.KindLimits:
		limits, err := inside.ParseLimits(body)
		if err != nil {
			return err
		}
		return m.limit(limits, fds)
	case inside.KindSockets:
		sockets, err := inside.ParseSockets(body)
		if err != nil || len(sockets) > inside.MaxFDs {
			return syscall.EPROTO
		}
		return m.makeSockets(sockets)
	}
	return syscall.EPROTO
}

// limit gives the sandbox what the policy says, once.
func (m *machine) limit(limits inside.Limits, fds []int) error {
	trouble := resize(limits)
	if trouble.Step == "" {
		trouble = m.attach(limits.Mounts, fds)
	}
	closeAll(fds)
	closeAll(m.offers)
	m.offers = nil
	m.layout.Limits = limits.Rlimits
	prepareStub(m.layout)
	m.packet = inside.AppendTrouble(m.packet[:0], inside.KindLimited, trouble)
	if trouble.Step != "" {
		return m.tell(m.packet)
	}
	// With it the runner can see how full the workspace is.
	dir, err := syscall.Open("/workspace", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return m.tell(inside.AppendTrouble(m.packet[:0], inside.KindLimited, failed("open /workspace", err)))
	}
	defer syscall.Close(dir)
	return inside.Send(inside.Control, m.packet, dir)
}

// makeSockets hands out sockets of this network namespace. The runner does the
// rest with them: whoever made the namespace has every right in it.
func (m *machine) makeSockets(sockets []inside.Socket) error {
	var trouble inside.Trouble
	fds := make([]int, 0, len(sockets))
	for _, s := range sockets {
		fd, err := syscall.Socket(s.Family, s.Type|syscall.SOCK_CLOEXEC, s.Protocol)
		if err != nil {
			trouble = failed("make a socket", err)
			break
		}
		fds = append(fds, fd)
	}
	m.packet = inside.AppendTrouble(m.packet[:0], inside.KindMade, trouble)
	var err error
	if trouble.Step == "" {
		err = inside.Send(inside.Control, m.packet, fds...)
	} else {
		err = m.tell(m.packet)
	}
	for _, fd := range fds {
		_ = syscall.Close(fd)
	}
	return err
}

// spawn makes a supervisor that talks on socket; with fork the warm interpreter
// makes its call.
func (m *machine) spawn(id uint32, socket int, fork bool) error {
	if m.forks++; m.forks%forksPerCollection == 0 {
		collect()
	}
	pid, pidfd, errno := forkSupervisor(socket, m.cgroup, fork)
	if errno != 0 {
		return m.tell(inside.AppendEnded(m.packet[:0], inside.Ended{ID: id, Errno: uint32(errno)}))
	}
	m.supervisors = append(m.supervisors, supervisor{id: id, pid: pid, pidfd: pidfd})
	return nil
}

// kill has a supervisor end its call and say what that had used. When it is
// asked again it goes itself, and with it, by the kernel, its pid namespace. A
// supervisor that has ended but is not reaped yet still holds its pid, so
// nobody else can be hit.
func (m *machine) kill(id uint32) {
	for i := range m.supervisors {
		s := &m.supervisors[i]
		if s.id != id {
			continue
		}
		signal := syscall.SIGTERM
		if s.asked {
			signal = syscall.SIGKILL
		}
		s.asked = true
		_ = syscall.Kill(s.pid, signal)
	}
}

type pollFD struct {
	fd      int32
	events  int16
	revents int16
}

const pollIn = 1

// wait returns when a supervisor may have ended, or with true when the
// control socket has something to say.
func (m *machine) wait() (bool, error) {
	var set [64]pollFD
	set[0] = pollFD{fd: inside.Control, events: pollIn}
	n := 1
	for _, s := range m.supervisors {
		if n < len(set) {
			set[n] = pollFD{fd: int32(s.pidfd), events: pollIn}
			n++
		}
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&set[0])), uintptr(n), 0, 0, 0, 0)
	if errno == syscall.EINTR {
		return false, nil
	}
	if errno != 0 {
		return false, errno
	}
	return set[0].revents != 0, nil
}

// reap tells the runner about every supervisor that has ended.
func (m *machine) reap() error {
	m.reapWarm()
	for i := 0; i < len(m.supervisors); {
		s := m.supervisors[i]
		var status syscall.WaitStatus
		var usage syscall.Rusage
		pid, err := syscall.Wait4(s.pid, &status, syscall.WNOHANG, &usage)
		if err == syscall.EINTR {
			continue
		}
		if err == nil && pid == 0 {
			i++
			continue
		}
		_ = syscall.Close(s.pidfd)
		last := len(m.supervisors) - 1
		m.supervisors[i] = m.supervisors[last]
		m.supervisors = m.supervisors[:last]
		ended := inside.Ended{ID: s.id, Status: uint32(status), CPU: usage.Utime.Nano() + usage.Stime.Nano()}
		if err := m.tell(inside.AppendEnded(m.packet[:0], ended)); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) tell(packet []byte) error {
	m.packet = packet
	return inside.Send(inside.Control, packet)
}

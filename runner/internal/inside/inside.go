// Package inside is both ends of what the runner and a sandbox's init say to
// each other, and how it travels: packets on a unix socket, with descriptors.
//
// Two sockets exist. The control socket joins the runner and the init: Layout
// first, then Limits, Sockets, Spawn, Kill, Warm and Fork go down; Hello, Up, Limited, Made
// and Ended come back. Each call has a socket of its own to its supervisor, handed over with Spawn: one
// Request goes down, Notes come back. User code never holds either of them.
package inside

import (
	"encoding/binary"
	"errors"
)

// MaxPacket is the largest packet that either end sends.
const MaxPacket = 64 << 10

// MaxFDs is the largest number of descriptors in one packet.
const MaxFDs = 64

// Control is the descriptor on which the init finds its control socket. Where
// it can't inherit one, its argument is the path of a socket to connect to, on
// which it gets it.
const Control = 3

// Kind is the first byte of a packet on the control socket.
type Kind uint8

// The kinds.
const (
	KindLayout  Kind = iota + 1 // runner → init: build the root
	KindLimits                  // runner → init: size the tmpfs mounts, attach the policy's mounts
	KindSpawn                   // runner → init: make a supervisor; brings its socket
	KindKill                    // runner → init: end a supervisor's tree; the second time without asking it
	KindHello                   // init → runner: running; its other threads were made before it is put in a cgroup
	KindUp                      // init → runner: the root stands, or why not
	KindLimited                 // init → runner: the limits stand, with a descriptor of the workspace, or why not
	KindEnded                   // init → runner: a supervisor and its tree are gone
	KindSockets                 // runner → init: make sockets in the sandbox's network namespace
	KindMade                    // init → runner: here they are, or why not
	KindWarm                    // runner → init: start the interpreter that calls are forked from; brings its program
	KindFork                    // runner → init: as Spawn, of a supervisor whose call that interpreter forks
)

// StepKind says what a Step of a Layout makes.
type StepKind uint8

// The kinds of steps.
const (
	StepDir     StepKind = iota + 1 // a directory
	StepFile                        // a file that holds Data
	StepLink                        // a symbolic link to Data
	StepBind                        // Data of the host, read-only unless Writable
	StepTmpfs                       // a tmpfs with Data as its options
	StepAppend                      // Data at the end of a file
	StepRemove                      // nothing: what is there goes, with all that is in it
	StepUnmount                     // what was below a mount
)

// Step makes one thing under the new root. Parents are made as needed.
type Step struct {
	Kind     StepKind
	Path     string // where, absolute in the sandbox
	Data     string
	Mode     uint32
	FD       int  // StepBind: index of a detached mount among the packet's descriptors; -1: open Data by path
	File     bool // StepBind: the source is no directory
	Writable bool // StepBind
	Device   bool // StepBind: device nodes keep working
}

// Layout is what an init makes its sandbox from.
type Layout struct {
	Built    bool // the root is made and entered; the steps are made in it
	Hostname string
	UID, GID uint32 // of user code, as seen inside
	Groups   bool   // setgroups is allowed in the user namespace
	CgroupFD int    // index of the calls' cgroup v2 directory among the descriptors; -1: children inherit
	Filter   string // of user code's system calls, as the kernel takes it; empty: none
	Own      string // the init's own, which user code is under too; empty: none
	Landlock uint32 // the Landlock ABI that fences files once more; 0: none
	Limits   Rlimits
	Steps    []Step
	Offers   []Offer
}

// Offer is a directory of the host, of which Limits may want a part. The init
// keeps a detached mount of it until then.
type Offer struct{ Path string }

// Mount attaches a directory at Path of the sandbox.
type Mount struct {
	Path     string // absolute in the sandbox
	FD       int    // index of a detached mount among the packet's descriptors; -1: a part of an offer
	Offer    int    // index among the layout's offers
	Sub      string // what of the offer, relative to it
	Writable bool
}

// Rlimits are the resource limits of user code; 0 leaves one alone.
type Rlimits struct {
	AddressSpace uint64 // bytes
	Processes    uint64
}

// Ended is the end of a supervisor.
type Ended struct {
	ID     uint32
	Errno  uint32 // not 0: it could not be made
	Status uint32 // as wait4 gives it
	CPU    int64  // of its whole tree, nanoseconds
}

// Trouble is Hello, Up, Limited and Made: an empty Step means that all is well.
type Trouble struct {
	Step  string
	Errno uint32
}

// Limits is what the policy adds to a sandbox. A size of 0 leaves a file
// system as it is.
type Limits struct {
	TmpBytes, ShmBytes, WorkspaceBytes uint64
	Rlimits                            Rlimits
	Mounts                             []Mount
}

// Warm is how the interpreter is started that calls are forked from. It finds
// the socket on which supervisors ask it for a call on WarmSocket, and what it
// runs on WarmProgram.
type Warm struct {
	Path      string
	Argv, Env []string
}

// The descriptors of the warm interpreter.
const (
	WarmSocket  = 3
	WarmProgram = 4
)

// Socket says what a socket is made with.
type Socket struct{ Family, Type, Protocol int }

var errShort = errors.New("a packet is shorter than it says")

// Layout packets.

// AppendLayout appends the packet of l.
func AppendLayout(b []byte, l Layout) []byte {
	b = append(b, byte(KindLayout))
	b = appendBool(b, l.Built)
	b = appendString(b, l.Hostname)
	b = appendUint32(b, l.UID)
	b = appendUint32(b, l.GID)
	b = appendBool(b, l.Groups)
	b = appendUint32(b, uint32(l.CgroupFD))
	b = appendString(b, l.Filter)
	b = appendString(b, l.Own)
	b = appendUint32(b, l.Landlock)
	b = appendRlimits(b, l.Limits)
	b = appendUint32(b, uint32(len(l.Steps)))
	for _, s := range l.Steps {
		b = append(b, byte(s.Kind))
		b = appendString(b, s.Path)
		b = appendString(b, s.Data)
		b = appendUint32(b, s.Mode)
		b = appendUint32(b, uint32(s.FD))
		b = appendBool(b, s.File)
		b = appendBool(b, s.Writable)
		b = appendBool(b, s.Device)
	}
	b = appendUint32(b, uint32(len(l.Offers)))
	for _, o := range l.Offers {
		b = appendString(b, o.Path)
	}
	return b
}

// ParseLayout reads what AppendLayout wrote, without its kind.
func ParseLayout(b []byte) (Layout, error) {
	r := reader{b: b}
	l := Layout{
		Built:    r.bool(),
		Hostname: r.string(),
		UID:      r.uint32(),
		GID:      r.uint32(),
		Groups:   r.bool(),
		CgroupFD: int(int32(r.uint32())),
		Filter:   r.string(),
		Own:      r.string(),
		Landlock: r.uint32(),
		Limits:   r.rlimits(),
	}
	for range r.uint32() {
		if r.short {
			break
		}
		l.Steps = append(l.Steps, Step{
			Kind:     StepKind(r.byte()),
			Path:     r.string(),
			Data:     r.string(),
			Mode:     r.uint32(),
			FD:       int(int32(r.uint32())),
			File:     r.bool(),
			Writable: r.bool(),
			Device:   r.bool(),
		})
	}
	for range r.uint32() {
		if r.short {
			break
		}
		l.Offers = append(l.Offers, Offer{Path: r.string()})
	}
	return l, r.err()
}

// AppendLimits appends the packet of l.
func AppendLimits(b []byte, l Limits) []byte {
	b = append(b, byte(KindLimits))
	b = appendUint64(b, l.TmpBytes)
	b = appendUint64(b, l.ShmBytes)
	b = appendUint64(b, l.WorkspaceBytes)
	b = appendRlimits(b, l.Rlimits)
	b = appendUint32(b, uint32(len(l.Mounts)))
	for _, m := range l.Mounts {
		b = appendString(b, m.Path)
		b = appendUint32(b, uint32(m.FD))
		b = appendUint32(b, uint32(m.Offer))
		b = appendString(b, m.Sub)
		b = appendBool(b, m.Writable)
	}
	return b
}

// ParseLimits reads what AppendLimits wrote, without its kind.
func ParseLimits(b []byte) (Limits, error) {
	r := reader{b: b}
	l := Limits{TmpBytes: r.uint64(), ShmBytes: r.uint64(), WorkspaceBytes: r.uint64(), Rlimits: r.rlimits()}
	for range r.uint32() {
		if r.short {
			break
		}
		l.Mounts = append(l.Mounts, Mount{
			Path:     r.string(),
			FD:       int(int32(r.uint32())),
			Offer:    int(int32(r.uint32())),
			Sub:      r.string(),
			Writable: r.bool(),
		})
	}
	return l, r.err()
}

// AppendSockets appends the packet that asks for sockets, at most MaxFDs.
func AppendSockets(b []byte, sockets []Socket) []byte {
	b = appendUint32(append(b, byte(KindSockets)), uint32(len(sockets)))
	for _, s := range sockets {
		b = appendUint32(appendUint32(appendUint32(b, uint32(s.Family)), uint32(s.Type)), uint32(s.Protocol))
	}
	return b
}

// ParseSockets reads what AppendSockets wrote, without its kind.
func ParseSockets(b []byte) ([]Socket, error) {
	r := reader{b: b}
	var sockets []Socket
	for range r.uint32() {
		if r.short {
			break
		}
		sockets = append(sockets, Socket{Family: int(r.uint32()), Type: int(r.uint32()), Protocol: int(r.uint32())})
	}
	return sockets, r.err()
}

// AppendWarm appends the packet of w.
func AppendWarm(b []byte, w Warm) []byte {
	b = appendString(append(b, byte(KindWarm)), w.Path)
	return appendStrings(appendStrings(b, w.Argv), w.Env)
}

// ParseWarm reads what AppendWarm wrote, without its kind.
func ParseWarm(b []byte) (Warm, error) {
	r := reader{b: b}
	w := Warm{Path: r.string(), Argv: r.strings(), Env: r.strings()}
	return w, r.err()
}

// AppendID appends a Spawn, Fork or Kill packet.
func AppendID(b []byte, kind Kind, id uint32) []byte {
	return appendUint32(append(b, byte(kind)), id)
}

// ParseID reads what AppendID wrote, without its kind.
func ParseID(b []byte) (uint32, error) {
	r := reader{b: b}
	id := r.uint32()
	return id, r.err()
}

// AppendTrouble appends a Hello, Up, Limited or Made packet.
func AppendTrouble(b []byte, kind Kind, t Trouble) []byte {
	return appendString(appendUint32(append(b, byte(kind)), t.Errno), t.Step)
}

// ParseTrouble reads what AppendTrouble wrote, without its kind.
func ParseTrouble(b []byte) (Trouble, error) {
	r := reader{b: b}
	t := Trouble{Errno: r.uint32(), Step: r.string()}
	return t, r.err()
}

// AppendEnded appends the packet of e.
func AppendEnded(b []byte, e Ended) []byte {
	b = appendUint32(append(b, byte(KindEnded)), e.ID)
	b = appendUint32(b, e.Errno)
	b = appendUint32(b, e.Status)
	return appendUint64(b, uint64(e.CPU))
}

// ParseEnded reads what AppendEnded wrote, without its kind.
func ParseEnded(b []byte) (Ended, error) {
	r := reader{b: b}
	e := Ended{ID: r.uint32(), Errno: r.uint32(), Status: r.uint32(), CPU: int64(r.uint64())}
	return e, r.err()
}

func appendUint32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func appendUint64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func appendString(b []byte, s string) []byte {
	return append(appendUint32(b, uint32(len(s))), s...)
}

func appendStrings(b []byte, list []string) []byte {
	b = appendUint32(b, uint32(len(list)))
	for _, s := range list {
		b = appendString(b, s)
	}
	return b
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendRlimits(b []byte, l Rlimits) []byte {
	return appendUint64(appendUint64(b, l.AddressSpace), l.Processes)
}

// reader takes values off b; past its end it returns zeroes and says so in err.
type reader struct {
	b     []byte
	short bool
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.b, r.short = nil, true
		return nil
	}
	head := r.b[:n]
	r.b = r.b[n:]
	return head
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) bool() bool { return r.byte() != 0 }

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *reader) string() string { return string(r.take(int(r.uint32()))) }

func (r *reader) strings() []string {
	var list []string
	for range r.uint32() {
		if r.short {
			break
		}
		list = append(list, r.string())
	}
	return list
}

func (r *reader) rlimits() Rlimits {
	return Rlimits{AddressSpace: r.uint64(), Processes: r.uint64()}
}

func (r *reader) err() error {
	if r.short {
		return errShort
	}
	return nil
}

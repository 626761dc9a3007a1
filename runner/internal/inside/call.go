package inside

import "encoding/binary"

// Op says what a Request asks for.
type Op uint32

// The operations.
const (
	OpExec  Op = iota + 1 // run a program: descriptors stdout, stderr[, body[, results]]
	OpRead                // read a file: its content goes to stdout
	OpWrite               // write body to a file

	// What the warm interpreter does itself, with OpExec's descriptors; Path,
	// Argv and Env are for starting another where that would differ.
	OpScript  // run the body as a script
	OpHarness // run the program for Python tools
)

// Request is one call. Its strings end in NUL on the wire, so that the
// process that becomes the program can use them where they lie.
type Request struct {
	Op   Op
	Path string // OpExec: the program; OpRead, OpWrite: relative to Root
	Root string // OpRead, OpWrite: the directory that must not be left
	Argv []string
	Env  []string
	Max  uint64 // OpRead: refuse a larger file; OpWrite: the size of body
	Body bool   // a body's descriptor follows stdout and stderr; OpExec gives it to the program as 3, and what follows it as 4
}

// RequestHeader is the fixed part of a request: op, argc, envc, body as
// uint32, max as uint64. Path and root, the arguments and the environment follow.
const RequestHeader = 24

// MaxStrings bounds the arguments, and apart from them the environment.
const MaxStrings = 1000

// Bulk is a packet that says only that the request lies in the descriptor
// after all others, from its start: the escape for what
// does not fit in MaxPacket.
const Bulk = "bulk"

// AppendRequest appends the flat form of r.
func AppendRequest(b []byte, r Request) []byte {
	b = appendUint32(b, uint32(r.Op))
	b = appendUint32(b, uint32(len(r.Argv)))
	b = appendUint32(b, uint32(len(r.Env)))
	var body uint32
	if r.Body {
		body = 1
	}
	b = appendUint32(b, body)
	b = appendUint64(b, r.Max)
	b = appendCString(b, r.Path)
	b = appendCString(b, r.Root)
	for _, s := range r.Argv {
		b = appendCString(b, s)
	}
	for _, s := range r.Env {
		b = appendCString(b, s)
	}
	return b
}

func appendCString(b []byte, s string) []byte { return append(append(b, s...), 0) }

// NoteKind says what a Note tells.
type NoteKind uint32

// The kinds of notes, in the order in which a good call sends them.
const (
	NoteReady   NoteKind = iota + 1 // waiting for a request
	NoteStarted                     // about to become the program; A: time
	NoteFile                        // a file operation's outcome; A: errno, B: size
	NoteFailed                      // nothing ran; A: errno, B: the step
	NoteExited                      // the whole tree is gone; see Note
)

// Note is what a call's own process or its supervisor says, in one packet of
// fixed size. Times are CLOCK_MONOTONIC in nanoseconds.
type Note struct {
	Kind   NoteKind
	Status uint32 // NoteExited: of the main process, as wait4 gives it
	Killed uint32 // NoteExited: other processes that a SIGKILL ended before we killed the rest
	A, B   int64  // NoteExited: A is the time of the main process's end; B is 1 when the runner ordered it
	CPU    int64  // NoteExited: of the whole tree, nanoseconds
	MaxRSS int64  // NoteExited: of the largest process, bytes
}

// NoteSize is the size of a note's packet.
const NoteSize = 48

// PutNote writes n into b.
func PutNote(b *[NoteSize]byte, n *Note) {
	binary.LittleEndian.PutUint32(b[0:], uint32(n.Kind))
	binary.LittleEndian.PutUint32(b[4:], n.Status)
	binary.LittleEndian.PutUint32(b[8:], n.Killed)
	binary.LittleEndian.PutUint64(b[16:], uint64(n.A))
	binary.LittleEndian.PutUint64(b[24:], uint64(n.B))
	binary.LittleEndian.PutUint64(b[32:], uint64(n.CPU))
	binary.LittleEndian.PutUint64(b[40:], uint64(n.MaxRSS))
}

// ParseNote reads what PutNote wrote.
func ParseNote(b []byte) (Note, error) {
	if len(b) != NoteSize {
		return Note{}, errShort
	}
	return Note{
		Kind:   NoteKind(binary.LittleEndian.Uint32(b[0:])),
		Status: binary.LittleEndian.Uint32(b[4:]),
		Killed: binary.LittleEndian.Uint32(b[8:]),
		A:      int64(binary.LittleEndian.Uint64(b[16:])),
		B:      int64(binary.LittleEndian.Uint64(b[24:])),
		CPU:    int64(binary.LittleEndian.Uint64(b[32:])),
		MaxRSS: int64(binary.LittleEndian.Uint64(b[40:])),
	}, nil
}

// The steps that a NoteFailed names.
const (
	FailProc = iota + 1
	FailMask
	FailFork
	FailDescriptors
	FailWorkspace
	FailScore
	FailLimits
	FailPrivileges
	FailIdentity
	FailRequest
	FailExec
	FailLandlock
	FailFilter
)

// FailSteps are the steps' names.
var FailSteps = map[int64]string{
	FailProc:        "mount /proc",
	FailMask:        "mask /proc",
	FailFork:        "fork",
	FailDescriptors: "arrange descriptors",
	FailWorkspace:   "enter /workspace",
	FailScore:       "set oom_score_adj",
	FailLimits:      "set resource limits",
	FailPrivileges:  "drop privileges",
	FailIdentity:    "change user",
	FailRequest:     "read the request",
	FailExec:        "exec the program",
	FailLandlock:    "restrict file access by Landlock",
	FailFilter:      "load the system call filter",
}

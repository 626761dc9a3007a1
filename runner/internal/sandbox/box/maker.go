package box

import (
	"context"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Maker makes what only one kind of backend knows how to make: a process in
// namespaces and a root of its own, which runs the init. Its methods may be
// called from several goroutines.
type Maker interface {
	// About says what goes into every result.
	About() About
	// IDs are those of the sandbox in a slot; no two slots share one.
	IDs(slot int) IDs
	// Image finds what a policy's base_image stands for, and gets it if need
	// be. A *sandbox.StartError says why there is none.
	Image(ctx context.Context, base string) (Image, error)
	// Standard is the base_image that sandboxes are kept ready for before any
	// was asked for.
	Standard() string
	// Launch starts the init of a new sandbox, which says Hello on its control
	// socket and waits for its layout. After an error nothing of it is left.
	Launch(ctx context.Context, p Place) (Guest, error)
	// Sweep removes what an earlier start of the same owner left behind.
	Sweep(ctx context.Context) error
	// Check reports on what the maker needs of this machine.
	Check(ctx context.Context) []sandbox.Piece
	// Close is called last, when no sandbox is left.
	Close(ctx context.Context) error
}

// About is a maker's part of sandbox.Info.
type About struct {
	Backend   string // "subprocess", "containerd"
	Isolation string // e.g. "runc"
	BaseImage string // how a policy's base_image is held, e.g. "host"

	UserNamespace bool   // each sandbox has one of its own
	Help          string // what to do when no sandbox can be made
}

// Image is what a base_image stands for now.
type Image struct {
	Name   string
	Digest string // empty when the host's own files are used
}

// IDs are a sandbox's user ids, which are its group ids too.
type IDs struct {
	First int // on the host: of root inside
	Count int // how many it has
	User  int // of user code, as seen inside
	Host  int // of user code, as the host sees it
}

// Place is where a guest is to be made.
type Place struct {
	Name      string        // unique on this machine, [a-z0-9-]
	IDs       IDs           // as the maker gave them
	Group     *cgroup.Group // nil where this machine has no cgroups
	Image     Image
	TmpMB     int64 // most for /tmp
	ShmMB     int64 // most for /dev/shm
	Workspace inside.Step
	Packages  []inside.Step // shows the packages that the runner keeps; they come after what makes /run
}

// Guest is a new sandbox whose init waits.
type Guest struct {
	Process  Process
	Control  *Socket // the runner's end
	Layout   inside.Layout
	Programs Programs

	// Joined says that the init was started in its memory and cpu cgroups.
	Joined bool
	// Remove frees what Launch made besides the process, which has ended. It
	// may be nil. What takes long it may leave to the maker.
	Remove func(ctx context.Context) error
}

// Process is a guest's first process, which is pid 1 inside.
type Process interface {
	PID() int    // as the host sees it
	Kill() error // at once; also what has ended
	Wait()       // until the kernel has ended everything in its pid namespace
}

// Programs are where a guest has its interpreters.
type Programs struct {
	Bash      string
	BashErr   error // why there is none
	Python    string
	PythonErr error
	Path      string   // the environment's PATH
	Env       []string // what else the image says, as NAME=value
}

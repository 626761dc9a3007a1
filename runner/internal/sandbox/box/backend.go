// Package box is what the backends have in common: it gives each sandbox its
// limits, its workspace, its mounts and its way out, runs calls in it through
// the init that is its pid 1, keeps sandboxes ready, and removes them. What a
// sandbox is made of (namespaces around the host's own files, a container of an
// image) is a Maker's affair.
//
// As root each sandbox has host ids of its own, so that user code is nobody on
// the host. As an ordinary user there is only that user's id; user code then
// has it, but no capability and no way out of its namespaces.
package box

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Config is what the operator decides for any backend.
type Config struct {
	DataDir  string // this backend's own; made if need be, one backend at a time
	RunnerID string // names our cgroups: [a-zA-Z0-9_-]

	CgroupParent string // bigwave if empty
	TmpMB        int64  // most for /tmp; 256 if 0. Counts as memory, so never more than half of memory_mb
	ShmMB        int64  // most for /dev/shm; 64 if 0
	AllowWeak    []string
	WorkspaceMB  int64    // size of /workspace; 1024 if 0
	Mounts       []Mount  // what policies may ask for besides /workspace
	OwnFiles     []string // paths that no mount may show, besides DataDir
	Packages     string   // folder of Python packages that sandboxes see at sandbox.Packages; none if empty
	Require      []string // parts of the fence that a start needs although they are optional: landlock

	Spares      int           // sandboxes kept ready; 1 if 0, none if negative
	Follow      bool          // spares are of the image that was started last, not of the standard one
	RefillAfter time.Duration // how long after a start the next spare is made; 5 ms if 0
	AtOnce      int           // sandboxes being made at once; twice the cores if 0, at least 4
	MakeWithin  time.Duration // how long one may take; 30 s if 0

	WarmPython bool // Python calls are forked from an interpreter of the sandbox's own, where that is safe

	Egress egress.Config // how sandboxes reach what their policy lists

	// RoomOf is a path on the file system that must have room for a workspace,
	// where workspaces are disks; DataDir if empty.
	RoomOf string

	// Without leaves out parts of the fence, to measure what they cost: seccomp,
	// landlock, disk. No setting of the runner leads here, and Check misses them.
	Without []string

	// What this machine is asked, unless tests say otherwise.
	Kernel *Kernel                          // what the kernel offers
	Space  func(path string) (Space, error) // of a file system
	Step   func(step string) error          // is told each step of a start and may end it

	Log *slog.Logger // slog.Default() if nil
}

const (
	closeTimeout   = 5 * time.Second
	closesAtOnce   = 16
	idsPerSandbox  = 65536
	defaultUIDBase = 1879048192
	userID         = 1000 // of user code, above a sandbox's first id
)

// Backend implements sandbox.Backend.
type Backend struct {
	cfg     Config
	maker   Maker
	log     *slog.Logger
	disks   *disks // nil: workspaces lie in memory
	noDisks error  // why
	offers  []offer
	cgroups *cgroup.Manager
	fence   *egress.Fence
	lock    *os.File
	root    bool // we give ids and see every file
	kernel  Kernel
	making  chan struct{} // a place for each sandbox in the making

	mu      sync.Mutex
	closed  bool
	closing chan struct{}
	slots   map[int]bool
	boxes   map[*box]bool
	spares  []*box
	refill  bool  // a goroutine is making a spare
	wanted  Image // what spares are made of; empty: not known yet
	made    int
	run     string         // of this process: no name is ever one that an earlier process used
	filling sync.WaitGroup // the making of spares
	working sync.WaitGroup // listening to inits, removing what they leave
}

var _ sandbox.Backend = (*Backend)(nil)

// New takes the data directory and looks at the host. What the host lacks is
// not an error here: Check reports it and Start refuses. The maker is the
// backend's, which closes it; after an error it is still the caller's.
func New(cfg Config, maker Maker) (*Backend, error) {
	cfg.CgroupParent = cmp.Or(cfg.CgroupParent, "bigwave")
	cfg.TmpMB = cmp.Or(cfg.TmpMB, 256)
	cfg.ShmMB = cmp.Or(cfg.ShmMB, 64)
	cfg.WorkspaceMB = cmp.Or(cfg.WorkspaceMB, 1024)
	cfg.Spares = cmp.Or(cfg.Spares, 1)
	// Made at once, it would slow the first call of the sandbox that took the last one.
	cfg.RefillAfter = cmp.Or(cfg.RefillAfter, 5*time.Millisecond)
	cfg.AtOnce = cmp.Or(cfg.AtOnce, max(4, 2*runtime.GOMAXPROCS(0)))
	cfg.MakeWithin = cmp.Or(cfg.MakeWithin, 30*time.Second)
	cfg.RoomOf = cmp.Or(cfg.RoomOf, cfg.DataDir)
	if cfg.Space == nil {
		cfg.Space = spaceOf
	}
	if !plainName(cfg.RunnerID) {
		return nil, fmt.Errorf("runner id %q must be of letters, digits, - and _", cfg.RunnerID)
	}
	b := &Backend{
		cfg:    cfg,
		maker:  maker,
		log:    cmp.Or(cfg.Log, slog.Default()),
		root:   os.Geteuid() == 0,
		run:    strings.ToLower(rand.Text()[:8]),
		making: make(chan struct{}, cfg.AtOnce),

		closing: make(chan struct{}),
		slots:   map[int]bool{},
		boxes:   map[*box]bool{},
	}
	var err error
	cfg.Egress.Log = cmp.Or(cfg.Egress.Log, b.log)
	if b.fence, err = egress.New(cfg.Egress); err != nil {
		return nil, fmt.Errorf("egress: %w", err)
	}
	if b.lock, err = takeDataDir(cfg.DataDir); err != nil {
		return nil, err
	}
	if b.cgroups, err = cgroup.Find(cfg.CgroupParent, Owner(cfg)); err != nil {
		return nil, errors.Join(err, b.lock.Close())
	}
	if b.offers, err = openOffers(cfg.Mounts, append([]string{cfg.DataDir}, cfg.OwnFiles...)...); err != nil {
		return nil, errors.Join(err, b.lock.Close())
	}
	b.lookForDisks()
	if cfg.Kernel != nil {
		b.kernel = *cfg.Kernel
	} else {
		b.kernel = ThisKernel()
	}
	b.leaveOut(cfg.Without)
	return b, nil
}

// leaveOut is for measuring only: see Config.Without.
func (b *Backend) leaveOut(parts []string) {
	for _, part := range parts {
		switch part {
		case "seccomp":
			b.kernel.Filter, b.kernel.Own = nil, nil
		case "landlock":
			b.kernel.Landlock = 0
		case "disk":
			b.disks, b.noDisks = nil, errors.New("left out")
		}
	}
}

// SandboxIDs are those of a slot when each sandbox has a range of host ids, the
// first of them from base on; 1879048192 if that is 0.
func SandboxIDs(base, slot int) IDs {
	first := cmp.Or(base, defaultUIDBase) + slot*idsPerSandbox
	return IDs{First: first, Count: idsPerSandbox, User: userID, Host: first + userID}
}

// lookForDisks finds out whether workspaces can be file systems on a disk.
func (b *Backend) lookForDisks() {
	if !b.root {
		b.noDisks = errors.New("only root can mount a file system")
		return
	}
	if b.disks, b.noDisks = newDisks(filepath.Join(b.cfg.DataDir, "sandboxes"), b.cfg.WorkspaceMB); b.noDisks != nil {
		b.disks = nil
		b.log.Warn("workspaces lie in memory", "error", b.noDisks)
	}
}

// at tells a test that a start has come to a step.
func (b *Backend) at(step string) error {
	if b.cfg.Step == nil {
		return nil
	}
	return b.cfg.Step(step)
}

// Owner names the owner of everything that a backend makes. The data directory
// is part of the name, since its lock is what makes us the owner: two runners
// of one name on one host must not sweep each other's sandboxes.
func Owner(cfg Config) string {
	dir, err := filepath.Abs(cfg.DataDir)
	if err != nil {
		dir = cfg.DataDir
	}
	sum := sha256.Sum256([]byte(dir))
	return cfg.RunnerID + "-" + hex.EncodeToString(sum[:4])
}

// takeDataDir makes dir and holds its lock for as long as the file is open.
func takeDataDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(dir, "sandboxes"), 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "owner.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the owner lock: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("the data directory %s belongs to another runner that is alive: %w", dir, err), lock.Close())
	}
	return lock, nil
}

// Start implements sandbox.Backend. With a spare of its image ready it takes
// about a millisecond.
func (b *Backend) Start(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if err := b.enforceable(spec); err != nil {
		return nil, err
	}
	image, err := b.maker.Image(ctx, spec.Policy.BaseImage)
	if err != nil {
		return nil, startError(err)
	}
	x, err := b.takeSpare(ctx, image)
	if err != nil {
		return nil, startError(err)
	}
	if err := x.begin(ctx, spec); err != nil {
		return nil, startError(errors.Join(err, x.Close(context.WithoutCancel(ctx))))
	}
	return x, nil
}

func startError(err error) error {
	if e, ok := errors.AsType[*sandbox.StartError](err); ok {
		return e
	}
	return &sandbox.StartError{Code: "start_failed", Message: "the sandbox could not be made", Cause: err}
}

// enforceable refuses a policy that this backend could not hold on this host.
func (b *Backend) enforceable(spec sandbox.Spec) error {
	refuse := func(field, format string, args ...any) error {
		return &sandbox.StartError{Code: "policy_unenforceable", Field: field, Message: fmt.Sprintf(format, args...)}
	}
	p := spec.Policy
	if !plainName(spec.ID) {
		return &sandbox.StartError{Code: "start_failed", Message: fmt.Sprintf("sandbox id %q must be of letters, digits, - and _", spec.ID)}
	}
	if !slices.Contains(p.FSAllowlist, workspace) {
		return refuse("fs_allowlist", "fs_allowlist must contain %s", workspace)
	}
	if _, err := b.wishes(p.FSAllowlist); err != nil {
		return err
	}
	if p.MemoryMB <= 0 || p.PIDsLimit <= 0 || p.CPUShares <= 0 {
		return &sandbox.StartError{Code: "start_failed", Message: "memory_mb, pids_limit and cpu_shares must be positive"}
	}
	if err := b.fenced(); err != nil {
		return err
	}
	for _, c := range limits {
		if !b.cgroups.Has(c.controller) && !b.weak(c.controller) {
			return refuse(c.field, "this runner can't enforce %s: %s", c.field, b.cgroups.Why(c.controller))
		}
	}
	if err := b.room(); err != nil {
		return &sandbox.StartError{Code: "capacity", Message: "this runner's disk has too little room for another sandbox", Cause: err}
	}
	return nil
}

// limits says which controller holds which field.
var limits = []struct {
	controller cgroup.Controller
	field      string
	weak       string // how it is held without the controller
}{
	{cgroup.Memory, "memory_mb", "weak: RLIMIT_AS for each process"},
	{cgroup.PIDs, "pids_limit", "weak: RLIMIT_NPROC"},
	{cgroup.CPU, "cpu_shares", "weak: not at all"},
}

func (b *Backend) weak(c cgroup.Controller) bool {
	return slices.Contains(b.cfg.AllowWeak, string(c))
}

// info is what a new sandbox says about itself.
func (b *Backend) info(image Image) sandbox.Info {
	about := b.maker.About()
	return sandbox.Info{Backend: about.Backend, Isolation: about.Isolation, ImageDigest: image.Digest, Enforced: b.enforced()}
}

// enforced is the part of Info that says how each field is held.
func (b *Backend) enforced() map[string]string {
	how := map[string]string{
		"fs_allowlist":       b.filesHeldBy(),
		"network_allowlist":  "network namespace with lo only",
		"base_image":         b.maker.About().BaseImage,
		"wall_clock_seconds": "runner's clock, pid namespace killed",
		"workspace":          fmt.Sprintf("ext4 of %d MiB", b.cfg.WorkspaceMB),
	}
	if b.disks == nil {
		how["workspace"] = fmt.Sprintf("tmpfs of %d MiB, at most half of memory_mb", b.cfg.WorkspaceMB)
	}
	for _, l := range limits {
		if b.cgroups.Has(l.controller) {
			how[l.field] = string(b.cgroups.Version())
		} else {
			how[l.field] = l.weak
		}
	}
	return how
}

// Sweep implements sandbox.Backend: the data directory is ours by its lock,
// the cgroups by their parent's name.
func (b *Backend) Sweep(ctx context.Context) error {
	if err := b.maker.Sweep(ctx); err != nil {
		return fmt.Errorf("sweep %s: %w", b.maker.About().Backend, err)
	}
	if err := b.cgroups.Sweep(ctx); err != nil {
		return fmt.Errorf("sweep cgroups: %w", err)
	}
	dir := filepath.Join(b.cfg.DataDir, "sandboxes")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("sweep sandboxes: %w", err)
	}
	for _, entry := range entries {
		if err := removeTree(dir, entry.Name()); err != nil {
			return fmt.Errorf("sweep sandboxes: %w", err)
		}
	}
	b.fill()
	return nil
}

// Close ends every sandbox and gives the data directory back.
func (b *Backend) Close(ctx context.Context) error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	close(b.closing)
	b.mu.Unlock()
	b.filling.Wait() // a spare in the making sees closed and goes away

	b.mu.Lock()
	var boxes []*box
	for x := range b.boxes {
		boxes = append(boxes, x)
	}
	b.mu.Unlock()
	errs := make([]error, len(boxes))
	var wait sync.WaitGroup
	turns := make(chan struct{}, closesAtOnce) // each has little time, once it is its turn
	for i, x := range boxes {
		turns <- struct{}{}
		wait.Go(func() {
			errs[i] = x.Close(ctx)
			<-turns
		})
	}
	wait.Wait()
	b.working.Wait() // what Close left to be removed
	b.cgroups.Close()
	closeOffers(b.offers)
	return errors.Join(errors.Join(errs...), b.maker.Close(ctx), b.lock.Close())
}

// slot reserves a range of host ids and a name that was never used before.
func (b *Backend) slot() (int, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for b.slots[n] {
		n++
	}
	b.slots[n] = true
	b.made++
	return n, fmt.Sprintf("box-%s-%d", b.run, b.made)
}

func (b *Backend) freeSlot(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.slots, n)
}

func (b *Backend) track(x *box, live bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if live {
		b.boxes[x] = true
	} else {
		delete(b.boxes, x)
	}
}

func plainName(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' {
			return false
		}
	}
	return s != "" && len(s) <= 128
}

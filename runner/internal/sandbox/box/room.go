package box

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Workspaces are sparse: together they may grow past what the host's disk has.
// So that the sandboxes which live can go on, and the host too, none starts
// when less than this is free: leastFree, a fiftieth of the file system, or one
// full workspace, whichever is most.
const (
	leastFree     = 1 << 30
	leastFreePart = 50
)

// Space is of a file system, in bytes.
type Space struct{ Free, Total uint64 }

// least is what must be free for another workspace of so many bytes.
func (s Space) least(workspace uint64) uint64 {
	return max(leastFree, s.Total/leastFreePart, workspace)
}

// room says why there is none for another sandbox.
func (b *Backend) room() error {
	if b.disks == nil {
		return nil
	}
	s, err := b.cfg.Space(b.cfg.RoomOf)
	if err != nil {
		return fmt.Errorf("ask how much is free in %s: %w", b.cfg.RoomOf, err)
	}
	if least := s.least(uint64(b.cfg.WorkspaceMB) << 20); s.Free < least {
		return fmt.Errorf("%d MiB are free in %s, less than %d MiB", s.Free>>20, b.cfg.RoomOf, least>>20)
	}
	return nil
}

// spaceOf asks the file system of path, or of what will hold it.
func spaceOf(path string) (Space, error) {
	var s unix.Statfs_t
	err := unix.Statfs(path, &s)
	for errors.Is(err, fs.ErrNotExist) && path != filepath.Dir(path) {
		path = filepath.Dir(path)
		err = unix.Statfs(path, &s)
	}
	if err != nil {
		return Space{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return Space{Free: s.Bavail * uint64(s.Bsize), Total: s.Blocks * uint64(s.Bsize)}, nil
}

func (b *Backend) checkRoom() sandbox.Piece {
	p := sandbox.Piece{Name: "disk room", State: "ok", Detail: "workspaces lie in memory", Fatal: true}
	if b.disks == nil {
		return p
	}
	if err := b.room(); err != nil {
		p.State, p.Detail = "missing", err.Error()
		p.Means = "workspaces grow as they are written: no sandbox starts until there is room for a full one, for 1 GiB and for 2 % of the disk; make room or lower BIGWAVE_WORKSPACE_MB"
		return p
	}
	s, err := b.cfg.Space(b.cfg.RoomOf)
	if err != nil { // it was there just now
		p.Detail = err.Error()
		return p
	}
	p.Detail = fmt.Sprintf("%d MiB are free in %s; a start needs %d", s.Free>>20, b.cfg.RoomOf, s.least(uint64(b.cfg.WorkspaceMB)<<20)>>20)
	return p
}

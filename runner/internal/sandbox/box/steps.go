package box

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

const workspace = "/workspace"

// workspaceStep shows the disk that the mount is; without one (-1) the
// workspace lies in memory.
func (b *Backend) workspaceStep(mount int, ids IDs) inside.Step {
	if mount >= 0 {
		return inside.Step{Kind: inside.StepBind, Path: workspace, FD: mount, Writable: true}
	}
	mb := b.cfg.WorkspaceMB
	options := fmt.Sprintf("mode=755,uid=%d,gid=%d,size=%dm,nr_inodes=%d", ids.User, ids.User, mb, mb<<20/bytesPerInode)
	return inside.Step{Kind: inside.StepTmpfs, Path: workspace, Data: options}
}

// packagesSteps show what the runner keeps of packages. It comes into /run,
// where nothing of an image is that could lead it elsewhere.
func (b *Backend) packagesSteps() []inside.Step {
	if b.cfg.Packages == "" {
		return nil
	}
	return []inside.Step{{Kind: inside.StepBind, Path: sandbox.Packages, Data: b.cfg.Packages}}
}

// openMounts turns each bind among steps into a detached mount that the init
// only has to attach: with its own ids it could not even reach some of them. A
// bind without Data already is one; it is the caller's, who gets a copy.
func openMounts(steps []inside.Step) (fds []int, err error) {
	for i := range steps {
		if steps[i].Kind != inside.StepBind {
			continue
		}
		fd, err := openMount(steps[i])
		if err != nil {
			closeFDs(fds)
			return nil, fmt.Errorf("open the mount of %s: %w", steps[i].Data, err)
		}
		steps[i].FD = len(fds)
		fds = append(fds, fd)
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, attributes(steps[i])); err != nil {
			closeFDs(fds)
			return nil, fmt.Errorf("restrict the mount of %s: %w", steps[i].Data, err)
		}
	}
	return fds, nil
}

func openMount(s inside.Step) (int, error) {
	if s.Data == "" {
		return unix.FcntlInt(uintptr(s.FD), unix.F_DUPFD_CLOEXEC, 0)
	}
	return unix.OpenTree(unix.AT_FDCWD, s.Data, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
}

func attributes(s inside.Step) *unix.MountAttr {
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}
	if s.Writable {
		attr.Attr_set &^= unix.MOUNT_ATTR_RDONLY
	}
	if s.Device {
		attr.Attr_set &^= unix.MOUNT_ATTR_NODEV
	}
	return attr
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

package box

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// removeTree removes parent/name whatever user code has put into it. It never
// follows a link, holds few descriptors however deep the tree is, and needs no
// permission of the files themselves: a directory that is not empty is moved
// up beside the first, until all are flat.
func removeTree(parent, name string) error {
	top, err := unix.Open(parent, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", parent, err)
	}
	defer unix.Close(top)
	r := remover{top: top, name: name}
	if err := r.remove(top, name); err != nil {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	for len(r.queue) > 0 {
		dir := r.queue[len(r.queue)-1]
		r.queue = r.queue[:len(r.queue)-1]
		if err := r.empty(dir); err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	return nil
}

type remover struct {
	top   int
	name  string
	moved int
	queue []string // directories under top that are to be emptied and removed
}

// remove removes an entry of dir, or queues it as a directory under top.
func (r *remover) remove(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return err
	}
	if unix.Unlinkat(dir, name, unix.AT_REMOVEDIR) == nil {
		return nil
	}
	target := name
	if dir != r.top {
		r.moved++
		target = fmt.Sprintf("%s.rm-%d", r.name, r.moved)
		// An owner has to be able to write a directory to move it.
		if err := openUp(dir, name); err != nil {
			return err
		}
		if err := unix.Renameat(dir, name, r.top, target); err != nil {
			return err
		}
	}
	r.queue = append(r.queue, target)
	return nil
}

func (r *remover) empty(name string) error {
	fd, err := openDir(r.top, name)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(1024)
		for _, entry := range names {
			if err := r.remove(fd, entry); err != nil {
				return err
			}
		}
		if len(names) == 0 || err != nil {
			break
		}
	}
	err = unix.Unlinkat(r.top, name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) { // it changed while it was read
		r.queue = append(r.queue, name)
		return nil
	}
	return err
}

func openDir(top int, name string) (int, error) {
	if err := openUp(top, name); err != nil {
		return -1, err
	}
	return unix.Openat(top, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// openUp gives us every permission on a directory, and on nothing that a link
// might lead to.
func openUp(dir int, name string) error {
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o700)
}

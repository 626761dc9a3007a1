package main

import (
	"os"
	"path"
	"syscall"
	"unsafe"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// attachAt is where an offer is attached while parts of it are taken.
const attachAt = "/run/offer"

// openOffers keeps a detached mount of each offer, while the host's root is
// still in sight. A link on the way to one is refused.
func (m *machine) openOffers() inside.Trouble {
	for _, o := range m.layout.Offers {
		dir, err := openDirectory(atFDCWD, o.Path, resolveNoSymlinks)
		if err != nil {
			return failed("open "+o.Path, err)
		}
		mount, err := openTree(dir, "", openTreeClone|openTreeCloexec|atRecursive|atEmptyPath)
		_ = syscall.Close(dir)
		if err != nil {
			return failed("open "+o.Path, err)
		}
		m.offers = append(m.offers, mount)
	}
	return inside.Trouble{}
}

// attach puts mounts where the policy wants them. Only supervisors that are
// made afterwards have them.
func (m *machine) attach(mounts []inside.Mount, fds []int) inside.Trouble {
	if len(mounts) == 0 {
		return inside.Trouble{}
	}
	if err := remountRoot(0); err != nil {
		return failed("open the root", err)
	}
	taken, trouble := m.takeParts(mounts, fds)
	for i := 0; i < len(taken) && trouble.Step == ""; i++ {
		if err := attachOne(mounts[i], taken[i]); err != nil {
			trouble = failed("mount "+mounts[i].Path, err)
		} else if err := m.mayWrite(mounts[i]); err != nil {
			trouble = failed("allow "+mounts[i].Path+" by Landlock", err)
		}
	}
	closeAll(taken)
	if err := remountRoot(syscall.MS_RDONLY); err != nil && trouble.Step == "" {
		trouble = failed("shut the root", err)
	}
	return trouble
}

func remountRoot(flag uintptr) error {
	return syscall.Mount("", "/", "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_NOSUID|syscall.MS_NODEV|flag, "")
}

func attachOne(m inside.Mount, mount int) error {
	attr := mountAttr{set: attrNoSuid | attrNoDev, propagation: syscall.MS_PRIVATE}
	if !m.Writable {
		attr.set |= attrReadOnly
	}
	if err := mountSetattr(mount, attr); err != nil {
		return err
	}
	target := path.Clean("/" + m.Path)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return moveMount(mount, target)
}

// mayWrite adds a writable mount to the rules, by which all may be read.
func (m *machine) mayWrite(mount inside.Mount) error {
	if ruleset < 0 || !mount.Writable {
		return nil
	}
	rights := uint64(llNoDevices)
	if m.layout.Landlock < 3 {
		rights &^= llTruncate
	}
	return addRule(mount.Path, rights)
}

// takeParts returns a detached mount for each of mounts, the caller's to
// close. A mount that is not attached anywhere can't be cloned on older
// kernels, so an offer is attached for that moment.
func (m *machine) takeParts(mounts []inside.Mount, fds []int) ([]int, inside.Trouble) {
	taken := make([]int, len(mounts))
	for i := range taken {
		taken[i] = -1
		if fd := mounts[i].FD; fd >= 0 && fd < len(fds) {
			taken[i], fds[fd] = fds[fd], -1
		}
	}
	for offer, mount := range m.offers {
		if err := takeOffer(mounts, taken, offer, mount); err != nil {
			return taken, failed("take a part of "+m.layout.Offers[offer].Path, err)
		}
	}
	for i := range taken {
		if taken[i] < 0 {
			return taken, failed("mount "+mounts[i].Path, syscall.EBADF)
		}
	}
	return taken, inside.Trouble{}
}

func takeOffer(mounts []inside.Mount, taken []int, offer, mount int) error {
	attached := false
	for i, want := range mounts {
		if taken[i] >= 0 || want.Offer != offer {
			continue
		}
		if !attached {
			if err := os.MkdirAll(attachAt, 0o755); err != nil {
				return err
			}
			if err := moveMount(mount, attachAt); err != nil {
				return err
			}
			attached = true
			defer func() {
				_ = syscall.Unmount(attachAt, syscall.MNT_DETACH)
				_ = os.Remove(attachAt)
			}()
		}
		dir, err := openDirectory(mount, want.Sub, resolveNoSymlinks|resolveBeneath)
		if err != nil {
			return err
		}
		taken[i], err = openTree(dir, "", openTreeClone|openTreeCloexec|atRecursive|atEmptyPath)
		_ = syscall.Close(dir)
		if err != nil {
			taken[i] = -1
			return err
		}
	}
	return nil
}

func openDirectory(dir int, name string, resolve uint64) (int, error) {
	how := openHow{flags: oPath | syscall.O_DIRECTORY | syscall.O_CLOEXEC, resolve: resolve}
	for {
		n, _, errno := syscall.Syscall6(sysOpenat2, fd(dir), ptr(cstring(name)), ptr(&how), unsafe.Sizeof(how), 0, 0)
		// The kernel could not rule out that a racing rename led outside.
		if errno != syscall.EAGAIN && errno != syscall.EINTR {
			return int(n), asError(errno)
		}
	}
}

func closeAll(fds []int) {
	for _, n := range fds {
		if n >= 0 {
			_ = syscall.Close(n)
		}
	}
}

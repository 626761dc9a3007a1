package box

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Mount is a directory of the host that policies may ask for, whole or in
// part, in their fs_allowlist.
type Mount struct {
	Host     string // absolute, clean, without a symbolic link on its way
	Path     string // where it is in a sandbox
	Writable bool
}

// ParseMount reads host_path:sandbox_path:ro or :rw.
func ParseMount(s string) (Mount, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 3 || parts[2] != "ro" && parts[2] != "rw" {
		return Mount{}, fmt.Errorf("mount %q must be host_path:sandbox_path:ro or host_path:sandbox_path:rw", s)
	}
	m := Mount{Host: parts[0], Path: parts[1], Writable: parts[2] == "rw"}
	for _, p := range parts[:2] {
		if !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsAny(p, "\x00\n") {
			return Mount{}, fmt.Errorf("mount %q: %q must be an absolute path without . .. // or a slash at its end", s, p)
		}
	}
	return m, nil
}

// What may not be offered, with everything below it, and what a sandbox has of
// its own.
var (
	neverOffered = []string{"/etc", "/proc", "/sys", "/dev", "/run", "/var/run"}
	sandboxOwn   = []string{
		"/etc", "/proc", "/sys", "/dev", "/run", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
		"/tmp", "/var/tmp", "/var/run", workspace,
	}
)

// offer is a Mount whose host side is held, so that nothing that happens to
// the path later leads elsewhere.
type offer struct {
	Mount
	dir *os.File
}

// openOffers validates mounts and opens their host sides.
func openOffers(mounts []Mount, private ...string) (offers []offer, err error) {
	defer func() {
		if err != nil {
			closeOffers(offers)
			offers = nil
		}
	}()
	for i, m := range mounts {
		if err := mayOffer(m, mounts[:i], private); err != nil {
			return offers, fmt.Errorf("mount %s: %w", m.Host, err)
		}
		how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
		fd, err := openat2(unix.AT_FDCWD, m.Host, how)
		switch {
		case errors.Is(err, unix.ELOOP):
			return offers, fmt.Errorf("mount %s: there is a symbolic link on the way; name the real directory", m.Host)
		case errors.Is(err, unix.ENOTDIR):
			return offers, fmt.Errorf("mount %s: only directories can be offered", m.Host)
		case err != nil:
			return offers, fmt.Errorf("mount %s: %w", m.Host, err)
		}
		offers = append(offers, offer{m, os.NewFile(uintptr(fd), m.Host)})
	}
	return offers, nil
}

func mayOffer(m Mount, others []Mount, private []string) error {
	switch {
	case m.Host == "/" || m.Path == "/":
		return errors.New("/ can't be offered")
	case slices.ContainsFunc(neverOffered, func(p string) bool { return beneath(p, m.Host) }):
		return fmt.Errorf("nothing of %s can be offered", strings.Join(neverOffered, ", "))
	case slices.ContainsFunc(sandboxOwn, func(p string) bool { return beneath(p, m.Path) || beneath(m.Path, p) }):
		return fmt.Errorf("a sandbox has its own %s", m.Path)
	}
	for _, p := range private {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			p = real
		}
		if beneath(p, m.Host) || beneath(m.Host, p) {
			return errors.New("it holds, or lies in, the runner's own files")
		}
	}
	for _, o := range others {
		if beneath(o.Path, m.Path) || beneath(m.Path, o.Path) {
			return fmt.Errorf("%s and %s overlap in the sandbox", o.Path, m.Path)
		}
	}
	return nil
}

// beneath compares by the components of clean paths.
func beneath(parent, name string) bool {
	return name == parent || strings.HasPrefix(name, strings.TrimSuffix(parent, "/")+"/")
}

func closeOffers(offers []offer) {
	for _, o := range offers {
		_ = o.dir.Close()
	}
}

// wish is a part of an offer that a policy lists.
type wish struct {
	offer int
	sub   string // "." for all of it
	path  string
}

// wishes finds the offer of each path of an allowlist; below a path that is
// listed too there is nothing more to do.
func (b *Backend) wishes(allowlist []string) ([]wish, error) {
	list := slices.Clone(allowlist)
	slices.Sort(list)
	var found []wish
	for _, p := range list {
		if p == workspace || slices.ContainsFunc(found, func(w wish) bool { return beneath(w.path, p) }) {
			continue
		}
		i := slices.IndexFunc(b.offers, func(o offer) bool { return beneath(o.Path, p) })
		if i < 0 || path.Clean(p) != p {
			return nil, noMount("this runner offers no mount for %s in fs_allowlist", p)
		}
		sub := strings.TrimPrefix(strings.TrimPrefix(p, b.offers[i].Path), "/")
		if len(found) == inside.MaxFDs {
			return nil, noMount("this runner makes at most %d mounts, and %s in fs_allowlist is one more", inside.MaxFDs, p)
		}
		found = append(found, wish{i, cmp.Or(sub, "."), p})
	}
	return found, nil
}

func noMount(format string, args ...any) error {
	return &sandbox.StartError{Code: "policy_unenforceable", Field: "fs_allowlist", Message: fmt.Sprintf(format, args...)}
}

// mounts is what the init is asked to attach, with detached mounts for it
// where we may make them. The descriptors are the caller's to close.
func (b *Backend) mounts(wishes []wish) (mounts []inside.Mount, fds []int, err error) {
	defer func() {
		if err != nil {
			closeFDs(fds)
			fds = nil
		}
	}()
	for _, w := range wishes {
		o := b.offers[w.offer]
		m := inside.Mount{Path: w.path, FD: -1, Offer: w.offer, Sub: w.sub, Writable: o.Writable}
		dir, err := openPart(o, w)
		if err != nil {
			return nil, fds, err
		}
		if b.root {
			fd, err := unix.OpenTree(dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|unix.AT_EMPTY_PATH)
			if err != nil {
				return nil, fds, errors.Join(fmt.Errorf("open the mount of %s: %w", w.path, err), unix.Close(dir))
			}
			m.FD = len(fds)
			fds = append(fds, fd)
			attr := attributes(inside.Step{Writable: o.Writable})
			if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, attr); err != nil {
				return nil, fds, errors.Join(fmt.Errorf("restrict the mount of %s: %w", w.path, err), unix.Close(dir))
			}
		}
		_ = unix.Close(dir)
		mounts = append(mounts, m)
	}
	return mounts, fds, nil
}

// openPart opens the directory that a wish names. Whoever may write in the
// offer can have put a link there: none is followed.
func openPart(o offer, w wish) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH}
	dir, err := openat2(int(o.dir.Fd()), w.sub, how)
	if err != nil {
		return -1, noMount("this runner can't mount %s of fs_allowlist: %v", w.path, err)
	}
	return dir, nil
}

func openat2(dir int, name string, how unix.OpenHow) (int, error) {
	for {
		fd, err := unix.Openat2(dir, name, &how)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func ioctlPointer[T any](f *os.File, request uintptr, p *T) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(p)))
	if errno != 0 {
		return errno
	}
	return nil
}

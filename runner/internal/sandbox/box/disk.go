package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// disks makes workspaces that are file systems of their own, bounded in bytes
// and files: ext4 in a sparse image on a loop device. The image has no name
// and the device goes with its last user, so that nothing is left behind
// however we end.
type disks struct {
	dir     string
	bytes   int64
	content []extent // of a fresh file system; the rest of the image is a hole
}

type extent struct {
	at   int64
	data []byte
}

const (
	loopControl   = "/dev/loop-control"
	loopMajor     = 7
	loopAttempts  = 100
	ext4Shutdown  = 0x8004587d // EXT4_IOC_SHUTDOWN
	ext4NoFlush   = 2          // what is not on the disk yet need not get there
	bytesPerInode = 16 << 10
	mkfsTimeout   = 30 * time.Second
)

// newDisks makes a fresh file system once, to be copied from memory, and one
// workspace, to see that it works here.
func newDisks(dir string, mb int64) (*disks, error) {
	d := &disks{dir: dir, bytes: mb << 20}
	image, err := d.image()
	if err != nil {
		return nil, err
	}
	defer image.Close()
	if err := format(image); err != nil {
		return nil, err
	}
	if d.content, err = extents(image); err != nil {
		return nil, fmt.Errorf("read the fresh file system: %w", err)
	}
	mount, err := d.make("probe", os.Geteuid(), nil)
	if err != nil {
		return nil, err
	}
	return d, unix.Close(mount)
}

// format makes no journal, which nothing here outlives, and leaves the inode
// tables a hole: the checksums of their groups say that they are empty.
func format(image *os.File) error {
	program, err := exec.LookPath("mke2fs")
	for _, path := range []string{"/usr/sbin/mke2fs", "/sbin/mke2fs"} {
		if err != nil {
			program, err = exec.LookPath(path)
		}
	}
	if err != nil {
		return errors.New("there is no mke2fs (package e2fsprogs)")
	}
	ctx, cancel := context.WithTimeout(context.Background(), mkfsTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "-q", "-F", "-b", "4096", "-I", "256", "-i", fmt.Sprint(bytesPerInode), "-m", "0",
		"-O", "none,extent,dir_index,filetype,sparse_super,large_file,huge_file,flex_bg,metadata_csum,extra_isize,dir_nlink",
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "/proc/self/fd/3")
	cmd.Env = []string{"MKE2FS_CONFIG=/dev/null", "LC_ALL=C"}
	cmd.ExtraFiles = []*os.File{image}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make a file system: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

func extents(f *os.File) ([]extent, error) {
	var list []extent
	for at := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if at, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE); err != nil {
			return nil, err
		}
		e := extent{at: start, data: make([]byte, at-start)}
		if _, err := io.ReadFull(io.NewSectionReader(f, start, at-start), e.data); err != nil {
			return nil, err
		}
		list = append(list, e)
	}
}

// make returns a detached mount of a fresh workspace that belongs to owner. at
// is told each step, and may end it.
func (d *disks) make(name string, owner int, at func(step string) error) (mount int, err error) {
	if at == nil {
		at = func(string) error { return nil }
	}
	if err := at("image"); err != nil {
		return -1, err
	}
	image, err := d.image()
	if err != nil {
		return -1, err
	}
	defer image.Close()
	for _, e := range d.content {
		if _, err := image.WriteAt(e.data, e.at); err != nil {
			return -1, fmt.Errorf("write the workspace's image: %w", err)
		}
	}
	if err := at("loop"); err != nil {
		return -1, err
	}
	loop, err := d.attach(image, name)
	if err != nil {
		return -1, err
	}
	defer loop.close() // the mount keeps the device
	if err := at("mount"); err != nil {
		return -1, err
	}
	if mount, err = mountExt4(loop.node.Name()); err != nil {
		return -1, fmt.Errorf("mount the workspace's image: %w", err)
	}
	err = at("own")
	if err == nil {
		err = unix.Fchownat(mount, "", owner, owner, unix.AT_EMPTY_PATH)
	}
	if err == nil {
		err = unix.Unlinkat(mount, "lost+found", unix.AT_REMOVEDIR)
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("hand over the workspace: %w", err), unix.Close(mount))
	}
	return mount, nil
}

// image is a hole of the right size without a name.
func (d *disks) image() (*os.File, error) {
	f, err := os.CreateTemp(d.dir, "image-")
	if err != nil {
		return nil, fmt.Errorf("make the workspace's image: %w", err)
	}
	if err := errors.Join(os.Remove(f.Name()), f.Truncate(d.bytes)); err != nil {
		return nil, errors.Join(fmt.Errorf("make the workspace's image: %w", err), f.Close())
	}
	return f, nil
}

// attach binds the image to a loop device, which is free again once it is
// neither open nor mounted.
func (d *disks) attach(image *os.File, name string) (*loop, error) {
	control, err := os.OpenFile(loopControl, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("no loop devices: %w", err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	copy(config.Info.File_name[:len(config.Info.File_name)-1], "bigwave "+name)
	for range loopAttempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device: %w", err)
		}
		device, err := d.openLoop(n, name)
		if err != nil {
			return nil, fmt.Errorf("open a loop device: %w", err)
		}
		err = unix.IoctlLoopConfigure(int(device.node.Fd()), &config)
		if err == nil {
			return device, nil
		}
		device.close()
		if !errors.Is(err, unix.EBUSY) { // somebody was faster
			return nil, fmt.Errorf("configure a loop device: %w", err)
		}
	}
	return nil, errors.New("every free loop device was taken by somebody else")
}

// loop is an open loop device.
type loop struct {
	node *os.File
	own  bool // the node is ours to remove
}

func (l *loop) close() {
	if l.own {
		_ = os.Remove(l.node.Name())
	}
	_ = l.node.Close()
}

// openLoop makes the device's node when this /dev lacks it, as a container's
// does: it has those that were there when it started.
func (d *disks) openLoop(n int, name string) (*loop, error) {
	node, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
	if err == nil {
		return &loop{node: node}, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	path := filepath.Join(d.dir, fmt.Sprintf("loop%d-%s", n, name))
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, uint32(n)))); err != nil {
		return nil, err
	}
	if node, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return &loop{node: node, own: true}, nil
}

func mountExt4(device string) (int, error) {
	fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", device); err != nil {
		return -1, err
	}
	// Deleted blocks leave the host's disk, the inode tables stay a hole, and
	// nothing has to reach the host's disk at a certain time.
	for _, flag := range []string{"discard", "noinit_itable", "nobarrier"} {
		if err := unix.FsconfigSetFlag(fs, flag); err != nil {
			return -1, fmt.Errorf("option %s: %w", flag, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
}

// abandon lets a workspace go without writing what is still in memory. On
// anything but ext4 it does nothing.
func abandon(dir *os.File) {
	flags := uint32(ext4NoFlush)
	_ = ioctlPointer(dir, ext4Shutdown, &flags)
}

// full says whether a file system has no room for a block or a file.
func full(dir *os.File) bool {
	var s unix.Statfs_t
	if dir == nil || unix.Fstatfs(int(dir.Fd()), &s) != nil {
		return false
	}
	least := min(nearlyFull/uint64(s.Bsize), s.Blocks/32)
	return s.Blocks > 0 && s.Bavail <= least || s.Files > 0 && s.Ffree == 0
}

// nearlyFull is what may still be free, in bytes, when a write is refused:
// ext4 takes large ones in pieces of this size, whole or not at all.
const nearlyFull = 2 << 20

package egress

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

const insideEnv = "BIGWAVE_TEST_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(insideEnv) != "" {
		if err := socketMaker(); err != nil && err != io.EOF {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// socketMaker sits in a network namespace and makes sockets, as an init does.
func socketMaker() error {
	if err := loUp(); err != nil {
		return err
	}
	b := make([]byte, inside.MaxPacket)
	for {
		n, _, err := inside.Receive(3, b)
		if err != nil {
			return err
		}
		wishes, err := inside.ParseSockets(b[1:n])
		if err != nil {
			return err
		}
		var fds []int
		var trouble inside.Trouble
		for _, w := range wishes {
			fd, err := syscall.Socket(w.Family, w.Type|syscall.SOCK_CLOEXEC, w.Protocol)
			if errno, ok := err.(syscall.Errno); ok {
				trouble = inside.Trouble{Step: "socket", Errno: uint32(errno)}
				break
			}
			fds = append(fds, fd)
		}
		if err := inside.Send(3, inside.AppendTrouble(nil, inside.KindMade, trouble), fds...); err != nil {
			return err
		}
		for _, fd := range fds {
			_ = syscall.Close(fd)
		}
	}
}

func loUp() error {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(socket)
	var request struct {
		name  [16]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], "lo")
	request.flags = syscall.IFF_UP | syscall.IFF_RUNNING
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(socket), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}

// netns is a network namespace of a user namespace of its own, as a sandbox has.
type netns struct {
	t  testing.TB
	mu sync.Mutex
	fd int
}

func newNetns(t testing.TB) *netns {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "theirs")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{insideEnv + "=1"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	t.Cleanup(func() {
		_ = syscall.Close(fds[0])
		if err := cmd.Wait(); err != nil {
			t.Errorf("the socket maker: %v", err)
		}
	})
	return &netns{t: t, fd: fds[0]}
}

func (n *netns) sockets(wishes []Socket) ([]*os.File, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var files []*os.File
	for len(wishes) > 0 {
		some := make([]inside.Socket, min(len(wishes), inside.MaxFDs))
		for i := range some {
			some[i] = inside.Socket(wishes[i])
		}
		wishes = wishes[len(some):]
		if err := inside.Send(n.fd, inside.AppendSockets(nil, some)); err != nil {
			return files, err
		}
		var b [256]byte
		size, fds, err := inside.Receive(n.fd, b[:])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "socket"))
		}
		if trouble, err := inside.ParseTrouble(b[1:size]); err != nil || trouble.Step != "" {
			return files, fmt.Errorf("%s: %w", trouble.Step, syscall.Errno(trouble.Errno))
		}
	}
	return files, nil
}

// dial connects from inside; the socket is a blocking one until it is up.
func (n *netns) dial(to netip.AddrPort) (*net.TCPConn, error) {
	family := unix.AF_INET
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(to.Port())}
	if to.Addr().Is4() {
		sa.(*unix.SockaddrInet4).Addr = to.Addr().As4()
	} else {
		family = unix.AF_INET6
		sa = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	files, err := n.sockets([]Socket{{family, unix.SOCK_STREAM, 0}})
	if err != nil {
		return nil, err
	}
	defer files[0].Close()
	fd := int(files[0].Fd())
	wait := unix.NsecToTimeval((5 * time.Second).Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait); err != nil {
		return nil, err
	}
	err = unix.Connect(fd, sa)
	for err == unix.EINTR || err == unix.EALREADY { // a signal of the scheduler's; the kernel goes on
		time.Sleep(time.Millisecond)
		err = unix.Connect(fd, sa)
	}
	if err != nil && err != unix.EISCONN {
		return nil, err
	}
	c, err := net.FileConn(files[0])
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

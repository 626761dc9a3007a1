package box

import (
	"cmp"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/bigwave/bigwave/runner/internal/inside"
)

// Socket is the runner's end of a packet socket; reads wait in the runtime's poller.
type Socket struct {
	*os.File
	fd int
}

// NewSocket returns our end and theirs, both the caller's to close. Theirs is a
// plain blocking descriptor.
func NewSocket() (*Socket, *Socket, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		closeFDs(fds[:])
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return &Socket{os.NewFile(uintptr(fds[0]), "ours"), fds[0]}, &Socket{os.NewFile(uintptr(fds[1]), "theirs"), fds[1]}, nil
}

// FD is the descriptor, for handing it on.
func (s *Socket) FD() int { return s.fd }

// send writes one packet. An init that takes none for seconds is as good as dead.
func (s *Socket) send(packet []byte, fds ...int) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Control(func(fd uintptr) { sent = inside.Send(int(fd), packet, fds...) })
	if err != nil || sent != syscall.EAGAIN {
		return cmp.Or(err, sent)
	}
	if err := s.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	err = raw.Write(func(fd uintptr) bool {
		sent = inside.Send(int(fd), packet, fds...)
		return sent != syscall.EAGAIN
	})
	return cmp.Or(err, sent)
}

// receive waits for one packet; the descriptors in it are the caller's.
func (s *Socket) receive(b []byte) (int, []int, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	var n int
	var fds []int
	var received error
	err = raw.Read(func(fd uintptr) bool {
		n, fds, received = inside.Receive(int(fd), b)
		return received != syscall.EAGAIN
	})
	return n, fds, cmp.Or(err, received)
}

const sendTimeout = 3 * time.Second

// note waits for the supervisor's next note.
func (s *supervisor) note() (inside.Note, error) {
	var packet [inside.NoteSize]byte
	n, err := s.sock.Read(packet[:])
	if err != nil {
		return inside.Note{}, err
	}
	return inside.ParseNote(packet[:n])
}

package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Libraries for netlink open their own socket, in the network namespace of
// whoever calls. Ours was made inside the sandbox and handed out, so the few
// messages that are needed are put together here.

// netlinkSocket is a netlink socket of a sandbox's network namespace.
type netlinkSocket struct {
	fd  int
	seq uint32
	out []byte
	end int // where the last message in out begins
	in  [32 << 10]byte
}

// netlinkTimeout bounds the wait for an answer of the kernel, which answers at once.
const netlinkTimeout = 5 * time.Second

// openNetlink takes over f's descriptor.
func openNetlink(f *os.File) (*netlinkSocket, error) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &netlinkSocket{fd: -1}
	var dup error
	if err := raw.Control(func(fd uintptr) { s.fd, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dup != nil {
		return nil, dup
	}
	wait := unix.NsecToTimeval(netlinkTimeout.Nanoseconds())
	if err := errors.Join(
		unix.SetNonblock(s.fd, false),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	); err != nil {
		s.close()
		return nil, fmt.Errorf("prepare a netlink socket: %w", err)
	}
	// Lists come in parts as large as this allows; without it only smaller.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return s, nil
}

func (s *netlinkSocket) close() { _ = unix.Close(s.fd) }

// message appends one message whose body is written by body.
func (s *netlinkSocket) message(kind, flags uint16, body func(*attributes)) {
	start := len(s.out)
	s.end = start
	s.seq++
	a := attributes{b: append(s.out, make([]byte, unix.SizeofNlMsghdr)...)}
	body(&a)
	h := a.b[start:]
	binary.NativeEndian.PutUint32(h[0:], uint32(len(h)))
	binary.NativeEndian.PutUint16(h[4:], kind)
	binary.NativeEndian.PutUint16(h[6:], flags|unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(h[8:], s.seq)
	s.out = a.b
}

// wantAck has the kernel answer the last message. It answers the others only
// to refuse them: so many answers would not fit in the socket.
func (s *netlinkSocket) wantAck() {
	flags := s.out[s.end+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
}

// flush sends what was put together.
func (s *netlinkSocket) flush() error {
	defer func() { s.out = s.out[:0] }()
	return unix.Sendto(s.fd, s.out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// ackError is the kernel's refusal of the message number seq.
type ackError struct {
	seq   uint32
	errno syscall.Errno
}

func (e *ackError) Error() string { return e.errno.Error() }
func (e *ackError) Unwrap() error { return e.errno }

// acks reads answers until that to the message last, or a refusal of the
// message first, after which there are no others. The first refusal is returned.
func (s *netlinkSocket) acks(first, last uint32) error {
	var refusal error
	for {
		done, err := s.answers(func(kind uint16, seq uint32, body []byte) bool {
			if kind != unix.NLMSG_ERROR || len(body) < 4 {
				return false
			}
			errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(body)))
			if errno != 0 && refusal == nil {
				refusal = &ackError{seq: seq, errno: errno}
			}
			return seq == last || seq == first && errno != 0
		})
		if err != nil {
			return errors.Join(refusal, err)
		}
		if done {
			return refusal
		}
	}
}

// answers reads once and gives each message to each, until it says true.
func (s *netlinkSocket) answers(each func(kind uint16, seq uint32, body []byte) bool) (bool, error) {
	n, err := s.receive()
	if err != nil {
		return false, fmt.Errorf("hear from the kernel: %w", err)
	}
	for b := s.in[:n]; len(b) >= unix.SizeofNlMsghdr; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return false, errors.New("hear from the kernel: a message is cut")
		}
		kind, seq := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])
		if each(kind, seq, b[unix.SizeofNlMsghdr:size]) {
			return true, nil
		}
		b = b[min(align(size), len(b)):]
	}
	return false, nil
}

func (s *netlinkSocket) receive() (int, error) {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in[:], 0)
		if err != unix.EINTR {
			return n, err
		}
	}
}

func align(n int) int { return (n + 3) &^ 3 }

// attributes is the body of a message: fixed parts and attributes, which may
// be nested.
type attributes struct{ b []byte }

func (a *attributes) raw(b ...byte) { a.b = append(a.b, b...) }

func (a *attributes) bytes(kind uint16, value ...byte) {
	a.b = binary.NativeEndian.AppendUint16(a.b, uint16(4+len(value)))
	a.b = binary.NativeEndian.AppendUint16(a.b, kind)
	a.b = append(a.b, value...)
	a.pad()
}

func (a *attributes) text(kind uint16, s string) { a.bytes(kind, append([]byte(s), 0)...) }

// number is in the order of the network, as nf_tables wants it.
func (a *attributes) number(kind uint16, v uint32) {
	a.bytes(kind, binary.BigEndian.AppendUint32(nil, v)...)
}

// native is in the machine's order, as rtnetlink wants it.
func (a *attributes) native(kind uint16, v uint32) {
	a.bytes(kind, binary.NativeEndian.AppendUint32(nil, v)...)
}

func (a *attributes) nest(kind uint16, body func()) {
	start := len(a.b)
	a.b = append(a.b, 0, 0, 0, 0)
	body()
	binary.NativeEndian.PutUint16(a.b[start:], uint16(len(a.b)-start))
	binary.NativeEndian.PutUint16(a.b[start+2:], kind|unix.NLA_F_NESTED)
	a.pad()
}

func (a *attributes) pad() {
	for len(a.b)%4 != 0 {
		a.b = append(a.b, 0)
	}
}

// attributeType is an attribute's kind without its flags.
const attributeType = 1<<14 - 1

// each calls f for every attribute in b.
func each(b []byte, f func(kind uint16, value []byte)) {
	for len(b) >= 4 {
		size := int(binary.NativeEndian.Uint16(b))
		if size < 4 || size > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&attributeType, b[4:size])
		b = b[min(align(size), len(b)):]
	}
}

package inside

import (
	"io"
	"syscall"
)

// Send writes one packet with descriptors to the socket fd. The receiver gets
// copies; the caller keeps its own.
func Send(fd int, b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = syscall.UnixRights(fds...)
	}
	for {
		err := syscall.Sendmsg(fd, b, oob, nil, syscall.MSG_NOSIGNAL)
		if err != syscall.EINTR {
			return err
		}
	}
}

// Receive reads one packet into b. The descriptors that came with it are the
// caller's to close. At the end of the socket it returns io.EOF.
func Receive(fd int, b []byte) (int, []int, error) {
	var oob [24 + 4*MaxFDs]byte
	for {
		n, oobn, flags, _, err := syscall.Recvmsg(fd, b, oob[:], syscall.MSG_CMSG_CLOEXEC)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return 0, nil, err
		}
		fds, err := rights(oob[:oobn])
		if err == nil && flags&(syscall.MSG_TRUNC|syscall.MSG_CTRUNC) != 0 {
			err = errShort
		}
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil {
			closeAll(fds)
			return 0, nil, err
		}
		return n, fds, nil
	}
}

func rights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	for _, m := range messages {
		more, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return fds, err
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = syscall.Close(fd)
	}
}

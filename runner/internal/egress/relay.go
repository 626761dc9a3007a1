package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// refusal is an error that becomes a Denial.
type refusal struct{ kind, reason string }

func (r *refusal) Error() string { return r.reason }

// serve connects a client to its target and passes bytes until both are done.
func (g *Gate) serve(client *net.TCPConn, t target) error {
	host, err := g.dial(t)
	if err != nil {
		g.fence.log.Debug("no connection for a sandbox", "target", t.String(), "error", err)
		return err
	}
	defer host.Close()
	t.counter.connections.Add(1)
	r := &relay{gate: g, target: t, client: client, host: host}
	return r.run()
}

// dial resolves the target anew, so that what is checked is what is dialled.
func (g *Gate) dial(t target) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(g.ctx, g.fence.cfg.DialTimeout)
	defer cancel()
	addrs := []netip.Addr{t.addr}
	if t.name != "" {
		var err error
		if addrs, err = g.fence.resolve(ctx, t.name); err != nil {
			return nil, err
		}
	}
	good, err := g.fine(t.name, addrs)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i, addr := range good {
		c, err := g.fence.try(ctx, netip.AddrPortFrom(addr, t.port), len(good)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// fine returns those of a target's addresses that may be dialled.
func (g *Gate) fine(name string, addrs []netip.Addr) ([]netip.Addr, error) {
	own, err := g.fence.own.addresses()
	if err != nil {
		return nil, err
	}
	var good []netip.Addr
	why := "it has no address"
	for _, addr := range addrs[:min(len(addrs), maxAnswers)] {
		reason := g.fence.allowed.refusal(name, addr, own)
		if reason != "" && g.also.refusal(name, addr, own) != "" {
			why = reason
		} else {
			good = append(good, addr.Unmap())
		}
	}
	if len(good) == 0 {
		return nil, &refusal{KindAddress, why}
	}
	return good, nil
}

// try dials one of several addresses, which share the time that is left.
func (f *Fence) try(ctx context.Context, to netip.AddrPort, left int) (*net.TCPConn, error) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
		defer cancel()
	}
	return f.cfg.Dial(ctx, to)
}

// relay is one connection and its other half.
type relay struct {
	gate         *Gate
	target       target
	client, host *net.TCPConn
	active       atomic.Int64 // when bytes last moved
	idle         *time.Timer
	cut          atomic.Bool // we ended it
}

// run returns when both directions are done, or one has failed.
func (r *relay) run() error {
	stop := context.AfterFunc(r.gate.ctx, r.abort)
	defer stop()
	r.active.Store(time.Now().UnixNano())
	r.idle = time.AfterFunc(time.Hour, r.checkIdle)
	r.idle.Reset(r.gate.fence.cfg.IdleTimeout)
	defer r.idle.Stop()

	var back error
	var wait sync.WaitGroup
	wait.Go(func() {
		if back = r.copy(r.client, r.host, &r.target.counter.received); back != nil {
			r.abort()
		}
	})
	err := r.forth()
	if err != nil {
		r.abort()
	}
	wait.Wait()
	if err == nil && back == nil {
		_ = r.client.Close() // in good order
	}
	if why, ok := errors.AsType[*refusal](back); ok {
		return why
	}
	return err
}

// checkIdle cuts the connection when nothing has moved for long enough.
func (r *relay) checkIdle() {
	quiet := time.Since(time.Unix(0, r.active.Load()))
	if left := r.gate.fence.cfg.IdleTimeout - quiet; left > 0 {
		r.idle.Reset(left)
		return
	}
	r.abort()
}

func (r *relay) abort() {
	if !r.cut.Swap(true) {
		reset(r.client)
		reset(r.host)
	}
}

// forth passes what the client sends, once its opening was looked at.
func (r *relay) forth() error {
	if r.target.name != "" {
		first, err := r.opening()
		if err != nil {
			return err
		}
		if err := r.moved(len(first), &r.target.counter.sent); err != nil {
			return err
		}
		if _, err := r.host.Write(first); err != nil {
			return err
		}
	}
	return r.copy(r.host, r.client, &r.target.counter.sent)
}

// opening reads until it is clear that the client does not speak TLS, or that
// its hello names the target. It returns what was read.
func (r *relay) opening() ([]byte, error) {
	var b []byte
	for {
		b = append(b, make([]byte, 2048)...)[:len(b)]
		n, err := r.client.Read(b[len(b) : len(b)+2048])
		b = b[:len(b)+n]
		if n == 0 && err != nil {
			if len(b) == 0 && errors.Is(err, io.EOF) {
				return nil, nil // it only listens
			}
			if len(b) > 0 {
				return nil, &refusal{KindTLS, "the TLS hello did not come whole"}
			}
			return nil, err
		}
		if len(b) == n { // the first bytes
			if err := r.client.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
				return nil, err
			}
		}
		r.active.Store(time.Now().UnixNano())
		kind, h, err := classify(b)
		switch {
		case err != nil:
			return nil, &refusal{KindTLS, err.Error()}
		case kind == undecided:
			continue
		case kind == tls:
			if err := h.meant(r.target.name); err != nil {
				return nil, err
			}
		}
		return b, r.client.SetReadDeadline(time.Time{})
	}
}

// meant refuses a hello that is for anyone but name.
func (h hello) meant(name string) error {
	switch {
	case h.hidden:
		return &refusal{KindTLS, "the TLS hello hides its server name (ECH)"}
	case h.serverName == "":
		return &refusal{KindTLS, "the TLS hello names no server"}
	case h.serverName != name:
		return &refusal{KindTLS, fmt.Sprintf("the TLS hello names %.80q", h.serverName)}
	}
	return nil
}

// moved counts bytes before they go on.
func (r *relay) moved(n int, count *atomic.Int64) error {
	r.active.Store(time.Now().UnixNano())
	limit := r.gate.fence.cfg.MaxBytes
	if total := r.gate.bytes.Add(int64(n)); limit > 0 && total > limit {
		return &refusal{KindLimit, fmt.Sprintf("more than %d bytes", limit)}
	}
	count.Add(int64(n))
	return nil
}

// buffers are shared: a connection has one only while bytes are on their way.
var buffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// A direction that has passed so much is worth a pipe, through which the
// kernel moves bytes without showing them to us.
const bulk = 1 << 20

// copy passes bytes until src ends, and then ends dst's direction.
func (r *relay) copy(dst, src *net.TCPConn, count *atomic.Int64) error {
	from, err := src.SyscallConn()
	if err != nil {
		return err
	}
	for passed := 0; passed < bulk; {
		n, err := r.step(dst, from, count)
		if err != nil {
			return err
		}
		if n == 0 {
			return dst.CloseWrite()
		}
		passed += n
	}
	var pipe [2]int
	if unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return r.steps(dst, from, count) // out of descriptors
	}
	defer func() { _ = errors.Join(unix.Close(pipe[0]), unix.Close(pipe[1])) }()
	_, _ = unix.FcntlInt(uintptr(pipe[0]), unix.F_SETPIPE_SZ, pipeSize) // or as large as it is
	return r.splice(dst, from, pipe, count)
}

// steps passes bytes to the end without a pipe.
func (r *relay) steps(dst *net.TCPConn, from syscall.RawConn, count *atomic.Int64) error {
	for {
		n, err := r.step(dst, from, count)
		if err != nil {
			return err
		}
		if n == 0 {
			return dst.CloseWrite()
		}
	}
}

// step passes what there is; 0 is the end.
func (r *relay) step(dst *net.TCPConn, from syscall.RawConn, count *atomic.Int64) (int, error) {
	var b *[64 << 10]byte
	n, err := when(from.Read, func(fd int) (int, error) {
		b = buffers.Get().(*[64 << 10]byte)
		n, err := unix.Read(fd, b[:])
		if err != nil {
			buffers.Put(b)
		}
		return n, err
	})
	if err != nil {
		return 0, err
	}
	defer buffers.Put(b)
	if n == 0 {
		return 0, nil
	}
	if err := r.moved(n, count); err != nil {
		return 0, err
	}
	_, err = dst.Write(b[:n])
	return n, err
}

const pipeSize = 512 << 10

// splice passes bytes to the end by way of a pipe, which is empty in between.
func (r *relay) splice(dst *net.TCPConn, from syscall.RawConn, pipe [2]int, count *atomic.Int64) error {
	const flags = unix.SPLICE_F_MOVE | unix.SPLICE_F_NONBLOCK
	to, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	for {
		n, err := when(from.Read, func(fd int) (int, error) {
			n, err := unix.Splice(fd, nil, pipe[1], nil, pipeSize, flags)
			return int(n), err
		})
		if err != nil {
			return err
		}
		if n == 0 {
			return dst.CloseWrite()
		}
		if err := r.moved(n, count); err != nil {
			return err
		}
		for n > 0 {
			out, err := when(to.Write, func(fd int) (int, error) {
				out, err := unix.Splice(pipe[0], nil, fd, nil, n, flags)
				return int(out), err
			})
			if err != nil {
				return err
			}
			n -= out
		}
	}
}

// when calls do as soon as it does not have to wait for the descriptor.
func when(ready func(func(uintptr) bool) error, do func(fd int) (int, error)) (n int, err error) {
	waited := ready(func(fd uintptr) bool {
		for {
			if n, err = do(int(fd)); err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	return n, cmp.Or(waited, err)
}

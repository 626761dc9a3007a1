package box

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// files are the descriptors of one attempt: pipes for its output, and memory
// files for what does not go into a packet.
type files struct {
	packet []byte
	out    pipe
	err    pipe
	body   *os.File
	res    pipe // results; not there for most programs
	bulk   *os.File
}

// pipe is an output's two ends. Only ours is non-blocking: the program must
// not be surprised by EAGAIN.
type pipe struct {
	read  *os.File
	fd    int // of read, for reading without waiting
	write int
}

func (x *box) newFiles(request, body []byte, results bool) (*files, error) {
	f := &files{packet: request, out: pipe{write: -1}, err: pipe{write: -1}, res: pipe{write: -1}}
	err := f.open(request, body, results)
	if err == nil && x.b.root {
		// Or a program could not open its own /dev/stdout.
		err = errors.Join(syscall.Fchown(f.out.write, x.ids.Host, -1), syscall.Fchown(f.err.write, x.ids.Host, -1))
	}
	if err != nil {
		f.close()
		return nil, fmt.Errorf("make the call's descriptors: %w", err)
	}
	return f, nil
}

func (f *files) open(request, body []byte, results bool) (err error) {
	if f.out, err = newPipe(); err != nil {
		return err
	}
	if f.err, err = newPipe(); err != nil {
		return err
	}
	if body != nil {
		if f.body, err = memoryFile("script", body); err != nil {
			return err
		}
	}
	if results {
		if f.res, err = newPipe(); err != nil {
			return err
		}
	}
	if len(request) > inside.MaxPacket {
		f.packet = []byte(inside.Bulk)
		f.bulk, err = memoryFile("request", request)
	}
	return err
}

func newPipe() (pipe, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return pipe{write: -1}, err
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		closeFDs(fds[:])
		return pipe{write: -1}, err
	}
	return pipe{read: os.NewFile(uintptr(fds[0]), "output"), fd: fds[0], write: fds[1]}, nil
}

// memoryFile holds content that nobody can change any more.
func memoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), name)
	if len(content) > 0 {
		if _, err := file.WriteAt(content, 0); err != nil {
			closeFile(file)
			return nil, err
		}
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		closeFile(file)
		return nil, err
	}
	return file, nil
}

// theirs are the descriptors that go with the request, in its order.
func (f *files) theirs() []int {
	fds := []int{f.out.write, f.err.write}
	if f.body != nil {
		fds = append(fds, int(f.body.Fd()))
	}
	if f.res.write >= 0 {
		fds = append(fds, f.res.write)
	}
	if f.bulk != nil {
		fds = append(fds, int(f.bulk.Fd()))
	}
	return fds
}

func (f *files) closeTheirs() {
	for _, p := range []*pipe{&f.out, &f.err, &f.res} {
		if p.write >= 0 {
			_ = syscall.Close(p.write)
			p.write = -1
		}
	}
	closeFile(f.body)
	closeFile(f.bulk)
	f.body, f.bulk = nil, nil
}

func (f *files) close() {
	f.closeTheirs()
	closeFile(f.out.read)
	closeFile(f.err.read)
	closeFile(f.res.read)
}

// copyOutput starts copying the streams; a file's content comes as stdout.
func (c *call) copyOutput(copying *sync.WaitGroup, f *files, content *contentWriter) {
	out := c.p.Stdout
	if c.p.Program == sandbox.FileRead || c.p.Program == sandbox.FileWrite {
		out = content
	}
	copying.Go(func() { f.out.copyTo(out) })
	copying.Go(func() { f.err.copyTo(c.p.Stderr) })
	if f.res.read != nil {
		copying.Go(func() { f.res.copyTo(c.p.Results) })
	}
}

const copySize = 32 << 10

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// copyTo hands on what comes until no writer is left, or until drain says so.
// When w has had enough, the rest is dropped.
func (p *pipe) copyTo(w io.Writer) {
	buffer := buffers.Get().(*[copySize]byte)
	defer buffers.Put(buffer)
	give := func(b []byte) {
		if w == nil || len(b) == 0 {
			return
		}
		if _, err := w.Write(b); err != nil {
			w = nil
		}
	}
	for {
		n, err := p.read.Read(buffer[:])
		give(buffer[:n])
		if err != nil {
			if os.IsTimeout(err) {
				p.rest(buffer[:], give)
			}
			return
		}
	}
}

// rest takes what is in the pipe without waiting for more.
func (p *pipe) rest(buffer []byte, give func([]byte)) {
	for taken := 0; taken < 1<<20; { // more than a pipe holds
		n, err := syscall.Read(p.fd, buffer)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		give(buffer[:n])
		taken += n
	}
}

// handedOn is how long a pipe may stay open after its tree is gone. Only a
// program that gave its output to another call's process makes that happen.
const handedOn = 200 * time.Millisecond

// drain returns when the streams have been copied.
func (f *files) drain(copying *sync.WaitGroup) {
	late := time.AfterFunc(handedOn, func() {
		for _, p := range []*pipe{&f.out, &f.err, &f.res} {
			if p.read != nil {
				_ = p.read.SetReadDeadline(time.Now())
			}
		}
	})
	copying.Wait()
	late.Stop()
}

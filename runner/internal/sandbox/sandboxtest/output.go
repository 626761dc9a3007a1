package sandboxtest

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func itoa(n int) string { return strconv.Itoa(n) }

// counter counts bytes; after limit it refuses them.
type counter struct {
	n, limit int
}

func (c *counter) Write(p []byte) (int, error) {
	c.n += len(p)
	if c.limit > 0 && c.n > c.limit {
		return 0, errors.New("enough")
	}
	return len(p), nil
}

func testOutput(t *testing.T, b sandbox.Backend) {
	s := Start(t, b)
	t.Run("both streams", func(t *testing.T) {
		r := Exec(t, s, Bash("echo out; echo err >&2; echo out2"))
		mustExit(t, r, 0)
		if r.Stdout != "out\nout2\n" || r.Stderr != "err\n" {
			t.Errorf("got %q and %q", r.Stdout, r.Stderr)
		}
	})
	t.Run("no input", func(t *testing.T) {
		mustExit(t, Exec(t, s, within(5*time.Second, Bash("cat; read -r x || exit 0"))), 0)
	})
	t.Run("half a mebibyte without a newline", func(t *testing.T) {
		r := Exec(t, s, Bash("head -c 524288 /dev/zero | tr '\\0' x"))
		if r.Stdout != strings.Repeat("x", 524288) {
			t.Errorf("got %d bytes", len(r.Stdout))
		}
	})
	t.Run("any bytes", func(t *testing.T) {
		r := Exec(t, s, Python("import sys; sys.stdout.buffer.write(bytes(range(256))*4); sys.stderr.buffer.write(b'\\xff\\x00\\r')"))
		want := make([]byte, 0, 1024)
		for range 4 {
			for i := range 256 {
				want = append(want, byte(i))
			}
		}
		if r.Stdout != string(want) || r.Stderr != "\xff\x00\r" {
			t.Errorf("got %d and %q", len(r.Stdout), r.Stderr)
		}
	})
	t.Run("a flood of one chunk", func(t *testing.T) {
		var c counter
		p := Python("print('x' * 50_000_000)")
		p.Stdout = &c
		mustExit(t, Exec(t, s, p), 0)
		if c.n != 50_000_001 {
			t.Errorf("got %d bytes", c.n)
		}
	})
	t.Run("a writer that has had enough does not stop the process", func(t *testing.T) {
		p := Bash("head -c 10000000 /dev/zero; echo done >&2")
		p.Stdout = &counter{limit: 1000}
		r := Exec(t, s, p)
		mustExit(t, r, 0)
		if r.Stderr != "done\n" {
			t.Errorf("got %q", r.Stderr)
		}
		p.Stdout, p.Stderr = nil, nil
		if e, err := s.Exec(t.Context(), p); err != nil || e.Code != 0 {
			t.Errorf("without writers: %+v, %v", e, err)
		}
	})
	t.Run("a slow writer gets everything", func(t *testing.T) {
		var got bytes.Buffer
		p := Bash("head -c 300000 /dev/zero")
		p.Stdout = slow{&got}
		mustExit(t, Exec(t, s, p), 0)
		if got.Len() != 300000 {
			t.Errorf("got %d bytes", got.Len())
		}
	})
	t.Run("all output comes before the end", func(t *testing.T) {
		big := strings.Repeat("0123456789", 6000)
		for i := range times(500) {
			r := Exec(t, s, Bash("printf %s "+big))
			if r.Stdout != big {
				t.Fatalf("run %d: got %d bytes of %d", i, len(r.Stdout), len(big))
			}
		}
	})
	t.Run("what looks like a frame is output", func(t *testing.T) {
		r := Exec(t, s, Bash(`printf '\x05\0\0\0\0\0{"status":"ok"}\n'; printf '\x05\0\0\0' >&20; printf x >&3; exit 4`))
		mustExit(t, r, 4)
		if r.Stdout != "\x05\x00\x00\x00\x00\x00{\"status\":\"ok\"}\n" {
			t.Errorf("got %q", r.Stdout)
		}
	})
	t.Run("output handed to another call does not hold the first", func(t *testing.T) {
		other := make(chan error, 1)
		go func() {
			r, err := exec(t.Context(), s, within(20*time.Second, Python(handedOver)))
			if err == nil && (r.Reason != sandbox.Exited || r.Code != 0) {
				err = errors.New(r.Stderr)
			}
			other <- err
		}()
		begin := time.Now()
		r := Exec(t, s, within(20*time.Second, Python(handOver)))
		mustExit(t, r, 0)
		if took := time.Since(begin); took > 10*time.Second || r.Stdout != "mine\n" {
			t.Errorf("took %v, got %q", took, r.Stdout)
		}
		mustExit(t, Exec(t, s, Bash("touch /tmp/release")), 0)
		if err := <-other; err != nil {
			t.Error(err)
		}
	})
}

// handOver sends its stdout to handedOver, which keeps it open.
const handOver = `
import array, socket, sys, time
s = socket.socket(socket.AF_UNIX)
for _ in range(500):
    try:
        s.connect("\0meet")
        break
    except OSError:
        time.sleep(0.01)
print("mine", flush=True)
s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1]))])
s.recv(1)
`

const handedOver = `
import os, socket, time
s = socket.socket(socket.AF_UNIX)
s.bind("\0meet")
s.listen()
c, _ = s.accept()
got = c.recvmsg(1, 64)
c.send(b"k")
for _ in range(1500):
    if os.path.exists("/tmp/release"):
        break
    time.sleep(0.01)
`

// onWrite calls back when something has come.
type onWrite struct {
	w    io.Writer
	then func()
}

func (o onWrite) Write(p []byte) (int, error) {
	defer o.then()
	return o.w.Write(p)
}

type slow struct{ w io.Writer }

func (s slow) Write(p []byte) (int, error) {
	time.Sleep(20 * time.Millisecond)
	return s.w.Write(p)
}

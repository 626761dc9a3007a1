package sandboxtest

import (
	"os"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// takeAll holds as many inotify instances, queued signals and asynchronous
// requests as it gets, says how many, and keeps them for a while.
const takeAll = `
import signal, time
def many(number, *args):
    n = 0
    while n < 200000 and LIBC.syscall(ctypes.c_long(number), *args) >= 0:
        n += 1
    return n

signal.pthread_sigmask(signal.SIG_BLOCK, [40])
LIBC.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
queued = 0
while queued < 200000 and LIBC.sigqueue(os.getpid(), 40, None) == 0:
    queued += 1
print("inotify", many(N["inotify_init1"], 0), "signals", queued, flush=True)
rings = 0
while rings < 1000 and LIBC.syscall(ctypes.c_long(N["io_setup"]), 1000, ctypes.byref(ctypes.c_ulong(0))) == 0:
    rings += 1
print("rings", rings, flush=True)
time.sleep(2)
print("probed")
`

// testHostsNumbers has several sandboxes take all that they can of what the
// kernel counts by user, or once for the host, and meanwhile looks whether the
// host still gets some of it.
func testHostsNumbers(t *testing.T, b sandbox.Backend) {
	var wait sync.WaitGroup
	for range 6 {
		s := Start(t, b)
		wait.Go(func() {
			got := probe(t, s, takeAll)
			if !strings.Contains(got, "rings 0\n") {
				t.Errorf("asynchronous requests are the host's: %s", got)
			}
			t.Log(strings.ReplaceAll(got, "\n", " "))
		})
	}
	done := make(chan struct{})
	go func() { wait.Wait(); close(done) }()
	for {
		select {
		case <-done:
			return
		case <-time.After(20 * time.Millisecond):
			if os.Geteuid() == 0 && !hostHasInotify(t) || !hostHasTimers(t) {
				<-done
				return
			}
		}
	}
}

// hostHasInotify fails the test, once, if the host has no instance left for
// this user. An ordinary user's sandboxes are that user's.
func hostHasInotify(t *testing.T) bool {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Errorf("the host has no inotify instance left: %v", err)
		return false
	}
	_ = unix.Close(fd)
	return true
}

func hostHasTimers(t *testing.T) bool {
	var id int32
	if _, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&id))); errno != 0 {
		t.Errorf("the host has no timer left: %v", errno)
		return false
	}
	_, _, _ = unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(id), 0, 0)
	return true
}

// testSocketMemory fills sockets: what waits in them is memory of the sandbox.
func testSocketMemory(t *testing.T, b sandbox.Backend) {
	s := Start(t, b, func(p *sandbox.Policy) { p.MemoryMB = 64 })
	if weak(s, "memory_mb") {
		t.Skip("weak here")
	}
	r := Exec(t, s, within(15*time.Second, Python(`
import socket
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
l.bind(("127.0.0.1", 0))
l.listen()
keep, total, piece = [], 0, b"x" * (1 << 18)
for _ in range(100):
    c = socket.socket()
    c.settimeout(5)
    try:
        c.connect(l.getsockname())
    except OSError:
        break
    a, _ = l.accept()
    keep += [a, c]
    c.setblocking(False)
    try:
        while True:
            total += c.send(piece)
    except BlockingIOError:
        pass
    if total > 2 * 64 << 20:
        print("more than twice the limit waits in sockets")
        break
`)))
	if r.Stdout != "" {
		t.Errorf("got %q, %q", r.Stdout, r.Stderr)
	}
	mustExit(t, Exec(t, s, Bash("true")), 0)
}

// testSystemV makes memory that outlives the process that made it, where
// perhaps no cgroup counts it.
func testSystemV(t *testing.T, s sandbox.Sandbox) {
	got := probe(t, s, `
held, ids = 0, []
while held < 512:
    i = LIBC.syscall(ctypes.c_long(N["shmget"]), 0, ctypes.c_long(16 << 20), 0o1600)
    if i < 0:
        break
    ids.append(i)
    held += 16
for i in ids:
    LIBC.syscall(ctypes.c_long(N["shmctl"]), i, 0, None)
if held > 64:
    print(held, "MiB")
print("probed")
`)
	if got != "" {
		t.Errorf("System V's shared memory may be larger than /dev/shm: %s", got)
	}
}

// testSync asks that all of the host's file systems be written out, far more
// often than any host could do it in the time, and sees that one file still can.
func testSync(t *testing.T, s sandbox.Sandbox) {
	got := probe(t, s, `
import time
usr, begin = os.open("/usr", os.O_RDONLY), time.monotonic()
for i in range(5000):
    LIBC.sync()
    LIBC.syncfs(usr)
    if time.monotonic() - begin > 1:
        print("only", i, "in a second: they are carried out")
        break
f = os.open("/workspace/synced", os.O_WRONLY | os.O_CREAT)
os.write(f, b"x")
os.fsync(f)
print("probed")
`)
	if got != "" {
		t.Error(got)
	}
}

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// doors are ways out of a sandbox or into its machinery. Each line that the
// program prints is one that was open.
const doors = `
import ctypes, errno, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
buf = ctypes.create_string_buffer(4096)
def sys(n, *a):
    r = libc.syscall(n, *a)
    if r < 0: raise OSError(ctypes.get_errno(), "")
    return r
def shut(name, f):
    pid = os.fork()
    if pid == 0:
        try: f()
        except Exception: os._exit(0)
        os.write(1, (name + "\n").encode()); os._exit(0)
    os.waitpid(pid, 0)
for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM): shut("signal %d to pid 1" % s, lambda: os.kill(1, s))
shut("ptrace attach", lambda: sys(101, 16, 1, 0, 0))
shut("ptrace seize", lambda: sys(101, 0x4206, 1, 0, 0))
shut("descriptors of pid 1", lambda: sys(438, sys(434, 1, 0), 20, 0))
for f in ("mem", "maps", "environ", "fd", "root", "cwd", "exe", "ns/mnt", "oom_score_adj"):
    p = "/proc/1/" + f
    shut(p, lambda: os.readlink(p) if f in ("root", "cwd", "exe", "ns/mnt") else os.listdir(p) if f == "fd" else open(p, "r+b").read(1))
for name, flag in dict(user=0x10000000, mnt=0x20000, net=0x40000000, pid=0x20000000, ipc=0x08000000, uts=0x04000000, cgroup=0x02000000).items():
    shut("unshare " + name, lambda: sys(272, flag))
    shut("setns " + name, lambda: sys(308, os.open("/proc/1/ns/" + name, os.O_RDONLY), 0))
shut("chroot", lambda: os.chroot("/workspace"))
shut("mount", lambda: sys(165, b"x", b"/tmp", b"tmpfs", 0, 0))
shut("remount of /proc/sys", lambda: sys(165, b"", b"/proc/sys", b"", 32 | 4096, 0))
shut("remount of /", lambda: sys(165, b"", b"/", b"", 32 | 4096, 0))
shut("umount of a mask", lambda: sys(166, b"/proc/keys", 2))
shut("pivot_root", lambda: sys(155, b".", b"."))
shut("open_tree", lambda: sys(428, -100, b"/", 1))
shut("fsopen", lambda: sys(430, b"proc", 0))
shut("device", lambda: os.mknod("/workspace/dev", 0o20666, os.makedev(1, 3)))
shut("setuid", lambda: os.setuid(0))
shut("setgid", lambda: os.setgid(0))
shut("setgroups", lambda: os.setgroups([0]))
shut("host name", lambda: sys(170, b"x", 1))
shut("clock", lambda: sys(227, 0, buf))
shut("kernel log", lambda: sys(103, 3, buf, 20))
shut("nice", lambda: os.nice(-5))
shut("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)))
shut("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
shut("packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
for p in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/user/max_user_namespaces", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/usr/x", "/etc/x", "/x", "/dev/x", "/run/x", "/bin/x"):
    shut("write " + p, lambda: os.write(os.open(p, os.O_WRONLY | os.O_CREAT), b"1"))
fds = [f for f in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + f) and int(f) > 2]
if fds: print("descriptors", fds)
`

func TestNoDoorIsOpen(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	c := s.py(ses, doors+"print('end')")
	wantStatus(t, c, "ok")
	if got := c.str("stdout"); got != "end\n" {
		t.Errorf("open: %s%s", got, c.str("stderr"))
	}
	wantStatus(t, s.sh(ses, "true"), "ok")
}

func TestNothingReachesTheHost(t *testing.T) {
	s := start(t, options{})
	var mu sync.Mutex
	var heard []string
	hear := func(what string) { mu.Lock(); defer mu.Unlock(); heard = append(heard, what) }
	accept := func(name, network, addr string) string {
		l, err := net.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				hear(name)
				c.Close()
			}
		}()
		return l.Addr().String()
	}
	_, port, _ := net.SplitHostPort(accept("tcp", "tcp", "0.0.0.0:0"))
	path := filepath.Join(t.TempDir(), "sock")
	accept("unix", "unix", path)
	accept("abstract", "unix", "@bigwave-canary")
	udp, err := net.ListenPacket("udp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { udp.Close() })
	go func() {
		if _, _, err := udp.ReadFrom(make([]byte, 64)); err == nil {
			hear("udp")
		}
	}()
	_, udpPort, _ := net.SplitHostPort(udp.LocalAddr().String())
	_, api, _ := net.SplitHostPort(s.listen)
	hosts := []string{"127.0.0.1", "::1", "localhost", "169.254.169.254"}
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			hosts = append(hosts, n.IP.String())
		}
	}
	code := fmt.Sprintf(`
import socket
for h in %q.split():
    for p in (%s, %s):
        try: socket.create_connection((h, p), 0.3); print("connected", h, p)
        except OSError: pass
    try: socket.socket(socket.AF_INET6 if ":" in h else socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (h, %s))
    except OSError: pass
for p in (%q, "\0bigwave-canary", "/run/containerd/containerd.sock", "/var/run/docker.sock"):
    try: socket.socket(socket.AF_UNIX).connect(p); print("connected", repr(p))
    except OSError: pass
try: print("resolved", socket.getaddrinfo("example.com", 80))
except OSError: pass
`, strings.Join(hosts, " "), port, api, udpPort, path)
	c := s.py(s.session(), code)
	wantStatus(t, c, "ok")
	if c.str("stdout") != "" {
		t.Error(c.str("stdout"))
	}
	time.Sleep(200 * time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	if len(heard) > 0 {
		t.Errorf("heard: %v", heard)
	}
}

func TestASwappedDirectoryNeverLeadsOut(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	wantStatus(t, s.sh(ses, "mkdir d; ln -s /tmp l1; ln -s /etc l2; echo untouched > /tmp/canary"), "ok")
	run := s.begin(ses, `python3 -c "
import os, time
end = time.time() + 4
while time.time() < end:
    for l in ('l1', 'l2'):
        os.rename('d', 'aside'); os.rename(l, 'd'); os.rename('d', l); os.rename('aside', 'd')
"`)
	denied := 0
	for began := time.Now(); time.Since(began) < 3500*time.Millisecond; {
		w := s.call(ses, "file_write", object{"path": "d/canary", "content": "escaped"})
		r := s.call(ses, "file_read", object{"path": "d/passwd"})
		if r.str("status") == "ok" {
			t.Fatalf("it read %q", r.str("result"))
		}
		for _, c := range []object{w, r} {
			switch c.str("status") {
			case "denied":
				denied++
			case "ok", "error":
			default:
				t.Errorf("got %v", c)
			}
		}
		// A write may have made a directory of its own while the name was free.
		if st := s.get("/v1/agent-sessions/" + ses + "/runs/" + run).str("status"); st != "running" {
			break
		}
	}
	s.final(ses, run, 10*time.Second)
	if got := s.sh(ses, "cat /tmp/canary").str("stdout"); got != "untouched\n" {
		t.Errorf("the canary is %q", got)
	}
	t.Logf("%d were refused", denied)
}

func TestTheSmallestPolicyStillRunsCalls(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"cpu_shares": 2, "memory_mb": 16, "pids_limit": 4, "wall_clock_seconds": 10, "output_bytes_limit": 1024})
	ses := s.session()
	for _, cmd := range []string{"true", "echo a | cat", "ls | wc -l", "python3 -c 'print(1)'"} {
		wantStatus(t, s.sh(ses, cmd), "ok")
	}
	wantStatus(t, s.py(ses, "print(2)"), "ok")
	wantStatus(t, s.call(ses, "file_write", object{"path": "f", "content": strings.Repeat("x", 3000)}), "ok")
	c := s.call(ses, "file_read", object{"path": "f"})
	if e := c.obj("error"); c.str("status") != "error" || e.num("limit") != 1024 || e.num("observed") != 3000 {
		t.Errorf("got %v", c)
	}
	for name, code := range map[string]string{"memory": "x = bytearray(50_000_000)", "deep": "f = lambda n: f(n + 1)\nf(0)"} {
		if st := s.py(ses, code).str("status"); st != "oom_killed" && st != "error" {
			t.Errorf("%s: got %q", name, st)
		}
	}
	wantStatus(t, s.sh(ses, "sleep 1 & sleep 1 & sleep 1 & sleep 1 & sleep 1 & wait"), "pids_exhausted")
	wantStatus(t, s.sh(ses, "true"), "ok")
}

func TestMemoryCountsWhereverItLies(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"memory_mb": 64, "pids_limit": 64, "wall_clock_seconds": 10})
	ses := s.session()
	for name, code := range map[string]string{
		"memfd":   "import os\nfd = os.memfd_create('x')\nfor i in range(200): os.write(fd, b'x' * (1 << 20))",
		"pipes":   "import os, fcntl\nkeep = []\nwhile True:\n  r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); os.set_blocking(w, False); keep.append((r, w))\n  os.write(w, b'x' * (1 << 20))",
		"mmap":    "import mmap\nm = mmap.mmap(-1, 200 << 20)\nfor i in range(0, 200 << 20, 4096): m[i] = 1",
		"tmp":     "f = open('/tmp/f', 'wb')\nfor i in range(200): f.write(b'x' * (1 << 20))",
		"sockets": "import socket\nkeep = []\nwhile True:\n  a, b = socket.socketpair(); a.setblocking(False); keep.append((a, b))\n  try:\n    while True: a.send(b'x' * 65536)\n  except BlockingIOError: pass",
	} {
		c := s.py(ses, code)
		switch st := c.str("status"); {
		case st == "oom_killed", st == "error": // the kernel's own caps may refuse first
		default:
			t.Errorf("%s: %v", name, c)
		}
		if peak := c.num("memory_peak_bytes"); peak > 64<<20 {
			t.Errorf("%s: peak %v is over the limit", name, peak)
		}
		s.sh(ses, "rm -f /tmp/f")
		wantStatus(t, s.sh(ses, "true"), "ok")
	}
}

func TestManyEndsAtTheLimitHitNobodyElse(t *testing.T) {
	s := start(t, options{})
	bystander := s.session()
	wantStatus(t, s.sh(bystander, "true"), "ok") // it keeps the policy of its start
	watch := s.begin(bystander, "for i in $(seq 1 31); do case $i in 9|17|19) ;; *) trap \"echo hit $i\" $i;; esac; done; for i in $(seq 80); do read -t 0.1 <> <(:); done; echo unharmed")
	s.setPolicy(object{"wall_clock_seconds": 1})
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := map[string]int{}
	for w := range 5 {
		ses := s.session()
		for k := range 8 {
			wg.Go(func() {
				for i := range 5 {
					c := s.sh(ses, fmt.Sprintf("exec sleep 0.99%d", (w+k+i)%10))
					mu.Lock()
					got[c.str("status")]++
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	if got["ok"]+got["timed_out"] != 200 {
		t.Errorf("got %v", got)
	}
	t.Logf("%v", got)
	if err := s.runner.dead(); err != nil {
		t.Error(err)
	}
	c := s.final(bystander, watch, 20*time.Second).list("calls")[0]
	if strings.Contains(c.str("stdout"), "hit") || c.str("status") != "ok" {
		t.Errorf("the bystander: %v", c)
	}
}

func TestOutputOfEveryShapeEnds(t *testing.T) {
	s := start(t, options{})
	s.setPolicy(object{"output_bytes_limit": 4096, "wall_clock_seconds": 5})
	ses := s.session()
	for cmd, want := range map[string]string{
		"yes & yes >&2":                               "output_limit",
		"while :; do printf x; done":                  "output_limit timed_out",
		"for i in 1 2 3; do echo $i; sleep 0.2; done": "ok",
		"exec 1>&-; echo lost; exit 0":                "ok error",
		"exec >&- 2>&-; sleep 0.2":                    "ok",
		"sleep 300 & echo now":                        "ok",
		"printf 'no newline'":                         "ok",
		"printf '\\xff\\xfe%.0s' {1..4000}":           "ok",
	} {
		began := time.Now()
		c := s.sh(ses, cmd)
		if !strings.Contains(want, c.str("status")) {
			t.Errorf("%s: %v", cmd, c)
		}
		if took := time.Since(began); took > 7*time.Second || want == "ok" && took > 4*time.Second {
			t.Errorf("%s: took %v", cmd, took)
		}
		if len(c.str("stdout")) > 4096*3 || len(c.str("stderr")) > 4096*3 {
			t.Errorf("%s: kept %d and %d bytes", cmd, len(c.str("stdout")), len(c.str("stderr")))
		}
	}
}

func TestPostgresKeepsEveryByte(t *testing.T) {
	s := start(t, options{tier: cluster})
	ses := s.session()
	c := s.py(ses, `import sys; sys.stdout.buffer.write(b"\x00a\x1b[2J\rb\xff\xfe"); sys.stderr.write("\x00")`)
	wantStatus(t, c, "ok")
	if c.str("stdout_base64") == "" || c["lossy"] != true || c.str("stderr") != "\x00" {
		t.Errorf("got %v", c)
	}
	c = s.py(ses, `raise Exception("\x00\udc80")`)
	wantStatus(t, c, "error")
	wantStatus(t, s.call(ses, "file_write", object{"path": "n", "content": "a\x00b"}), "ok")
	if got := s.call(ses, "file_read", object{"path": "n"}).str("result"); got != "a\x00b" {
		t.Errorf("got %q", got)
	}
}

func TestWhatIsLeftIsNotForTheNextSession(t *testing.T) {
	s := start(t, options{})
	const leave = `
import ctypes
l = ctypes.CDLL(None)
for d in ("/tmp", "/dev/shm", "/workspace"): open(d + "/canary", "w").write("x")
l.shmget(4242, 4096, 0o1666); l.semget(4242, 1, 0o1666)
for ring in (-3, -4, -5): l.syscall(248, b"user", b"canary", b"x", 1, ring)
`
	const look = `
import ctypes, os
l = ctypes.CDLL(None)
for d in ("/tmp", "/dev/shm", "/workspace"):
    if os.listdir(d): print(d, os.listdir(d))
if l.shmget(4242, 4096, 0) >= 0: print("shared memory")
if l.semget(4242, 1, 0) >= 0: print("semaphores")
if l.syscall(249, b"user", b"canary", None, 0) >= 0: print("key")
`
	for range 3 {
		ses := s.session()
		wantStatus(t, s.py(ses, leave), "ok")
		beside := s.session()
		if got := s.py(beside, look).str("stdout"); got != "" {
			t.Errorf("beside: %s", got)
		}
		s.delete("/v1/agent-sessions/" + ses).want(204)
		if got := s.py(s.session(), look).str("stdout"); got != "" {
			t.Errorf("after: %s", got)
		}
	}
}

func TestABusySandboxLeavesRoomForOthers(t *testing.T) {
	s := start(t, options{})
	busy, other := s.session(), s.session()
	wantStatus(t, s.sh(other, "true"), "ok")
	run := s.begin(busy, "for i in $(seq 16); do (nice -n -20 bash -c 'while :; do :; done') & done; chrt -f 99 true; sleep 5")
	time.Sleep(500 * time.Millisecond)
	for range 10 {
		began := time.Now()
		wantStatus(t, s.sh(other, "true"), "ok")
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("a call beside it took %v", took)
		}
		for _, r := range s.get("/admin/runners").list("items") {
			if r.str("state") != "ready" {
				t.Errorf("the runner is %q", r.str("state"))
			}
		}
	}
	s.post("/v1/agent-sessions/"+busy+"/runs/"+run+"/cancel", nil).want(200)
	s.final(busy, run, 10*time.Second)
	eventually(t, 2*time.Second, "nothing spins", func() error { return noProcess("while :; do :; done") })
}

func TestADeletedSessionEndsItsRuns(t *testing.T) {
	s := start(t, options{})
	for i := range 20 {
		ses := s.session()
		if i%2 == 0 {
			wantStatus(t, s.sh(ses, "true"), "ok")
		}
		run := s.post("/v1/agent-sessions/"+ses+"/run?wait=0", object{"tool_calls": []object{
			{"id": "a", "name": "shell_exec", "arguments": object{"command": "sleep 6161"}},
			{"id": "b", "name": "shell_exec", "arguments": object{"command": "echo never >> w"}},
		}}).str("id")
		time.Sleep(time.Duration(i) * 2 * time.Millisecond)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if a := s.delete("/v1/agent-sessions/" + ses); a.status != 204 && a.status != 404 {
					t.Errorf("delete: %d %s", a.status, a.body)
				}
			})
			wg.Go(func() {
				if a := s.post("/v1/agent-sessions/"+ses+"/runs/"+run+"/cancel", nil); a.status >= 500 {
					t.Errorf("cancel: %d %s", a.status, a.body)
				}
			})
		}
		wg.Wait()
		for _, c := range s.final(ses, run, 10*time.Second).list("calls") {
			wantStatus(t, c, "cancelled")
		}
		if a := s.post("/v1/agent-sessions/"+ses+"/run", object{"tool_calls": []object{{"id": "c", "name": "shell_exec", "arguments": object{"command": "true"}}}}); a.status < 400 || a.status >= 500 {
			t.Errorf("a run in a deleted session: %d %s", a.status, a.body)
		}
	}
	eventually(t, 5*time.Second, "nothing is left", func() error { return noProcess("sleep 6161") })
	if w := s.witnesses(); len(w) > 0 {
		t.Errorf("left: %v", w)
	}
}

func TestPoliciesAndToolsChangeUnderLoad(t *testing.T) {
	eachTier(t, func(t *testing.T, s *stack) {
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for i := range 8 {
					a := s.put("/admin/sandbox/policy", policy(object{"memory_mb": 100 + w*8 + i}))
					b := s.put("/admin/workspace-tools/same", object{"name": "python_exec", "handler_kind": "shell_template", "handler_payload": object{"command": fmt.Sprint("echo ", w*8+i)}})
					if a.status != 200 || b.status != 200 {
						t.Errorf("put: %d %s, %d %s", a.status, a.body, b.status, b.body)
					}
					if b.str("name") != "same" {
						t.Errorf("the body's name won: %s", b.body)
					}
					if i == 4 {
						if d := s.delete("/admin/workspace-tools/same"); d.status != 204 && d.status != 404 {
							t.Errorf("delete: %d %s", d.status, d.body)
						}
					}
				}
			})
		}
		for range 2 {
			wg.Go(func() {
				for range 5 {
					ses := s.session()
					if c := s.sh(ses, "echo on"); c.str("stdout") != "on\n" || c.str("policy_digest") == "" {
						t.Errorf("got %v", c)
					}
					s.delete("/v1/agent-sessions/" + ses)
				}
			})
		}
		wg.Wait()
		list := s.get("/admin/workspace-tools").want(200)
		if n := strings.Count(string(list.body), `"same"`); n > 1 {
			t.Errorf("%d rows of one tool: %s", n, list.body)
		}
	})
}

func TestGarbageInQueriesAndHeadersIsNamed(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	run := s.run(ses, object{"id": "c", "name": "shell_exec", "arguments": object{"command": "true"}}).str("id")
	path := "/v1/agent-sessions/" + ses
	for _, id := range []string{"garbage", "-1", "1.5", "1e3", "0x10", "+5", "-0", ",", "1;2", "18446744073709551616", strings.Repeat("9", 4000)} {
		if a := s.do("GET", path+"/runs/"+run+"/events", nil, "Accept", "text/event-stream", "Last-Event-ID", id); a.status != 400 || a.str("field") == "" {
			t.Errorf("Last-Event-ID %.20q: %d %.200s", id, a.status, a.body)
		}
	}
	for _, id := range []string{"18446744073709551615", "9223372036854775807"} {
		s.do("GET", path+"/runs/"+run+"/events", nil, "Accept", "text/event-stream", "Last-Event-ID", id).want(http.StatusGone)
	}
	for _, q := range []string{"limit=0", "limit=-1", "limit=1e9", "limit=99999999999999999999", "limit=x", "cursor=garbage", "cursor=%00", "cursor=%ff", "cursor=a&cursor=b", "limit=1&limit=2", "cursor=%27%20OR%201%3D1--"} {
		for _, list := range []string{"/v1/agent-sessions", "/admin/users", "/admin/api-keys", "/admin/workspaces", path + "/runs"} {
			if a := s.get(list + "?" + q); a.status != 400 || a.str("field") == "" {
				t.Errorf("%s?%s: %d %.200s", list, q, a.status, a.body)
			}
		}
	}
	for _, w := range []string{"-1", "x", "1e999", "99999999999", "NaN", "1&wait=2"} {
		if a := s.post(path+"/run?wait="+w, object{"tool_calls": []object{{"id": "c", "name": "shell_exec", "arguments": object{"command": "echo ran >> w"}}}}); a.status != 400 || a.str("field") == "" {
			t.Errorf("wait=%s: %d %.200s", w, a.status, a.body)
		}
	}
	for _, tag := range []string{"garbage", `"x"`, `W/"1"`, `"1", "2"`} {
		if a := s.do("PUT", "/admin/workspace-tools/tagged", object{"handler_kind": "shell_template", "handler_payload": object{"command": "true"}}, "If-Match", tag); a.status != 412 && a.status != 400 {
			t.Errorf("If-Match %s: %d %s", tag, a.status, a.body)
		}
	}
	s.get("/admin/workspace-tools/tagged").want(404)
	if w := s.witnesses(); len(w) > 0 {
		t.Errorf("a refused request ran: %v", w)
	}
}

// plain sends bytes as they are and returns the statuses of what comes back.
func (s *stack) plain(t *testing.T, request string) []int {
	t.Helper()
	conn, err := net.Dial("tcp", s.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.WriteString(conn, request) // it may hang up before it has read all
	var out []int
	for in := bufio.NewReader(conn); ; {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return out
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		out = append(out, resp.StatusCode)
	}
}

func TestOnlyTheBearerHeaderLetsIn(t *testing.T) {
	s := start(t, options{})
	const get = "GET /v1/tools HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
	for name, tc := range map[string]struct {
		request string
		want    int
	}{
		"as documented":   {get + "Authorization: Bearer " + adminToken + "\r\n\r\n", 200},
		"two, good first": {get + "Authorization: Bearer " + adminToken + "\r\nAuthorization: Bearer wrong\r\n\r\n", 401},
		"two, good last":  {get + "Authorization: Bearer wrong\r\nAuthorization: Bearer " + adminToken + "\r\n\r\n", 401},
		"basic":           {get + "Authorization: Basic " + adminToken + "\r\n\r\n", 401},
		"bare":            {get + "Authorization: " + adminToken + "\r\n\r\n", 401},
		"with a tail":     {get + "Authorization: Bearer " + adminToken + ",x\r\n\r\n", 401},
		"cookie":          {get + "Cookie: token=" + adminToken + "\r\nX-Api-Key: " + adminToken + "\r\n\r\n", 401},
		"query":           {"GET /v1/tools?access_token=" + adminToken + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 401},
		"huge":            {get + "Authorization: Bearer " + strings.Repeat("a", 1<<20) + "\r\n\r\n", 431},
		"a NUL":           {get + "Authorization: Bearer \x00\r\n\r\n", 400},
		"no host":         {"GET /v1/tools HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer " + adminToken + "\r\n\r\n", 400},
		"many headers":    {get + strings.Repeat("X-Y: z\r\n", 20000) + "\r\n", 431},
		"two lengths":     {"PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", 400},
		"odd transfer":    {"PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501},
		"chunked flood": {"PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + adminToken +
			"\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("10000\r\n"+strings.Repeat(" ", 65536)+"\r\n", 64) + "0\r\n\r\n", 413},
	} {
		got := s.plain(t, tc.request)
		if name == "chunked flood" && len(got) == 0 {
			continue // it hung up while we were still writing
		}
		if len(got) == 0 || got[0] != tc.want {
			t.Errorf("%s: got %v, want %d", name, got, tc.want)
		}
	}
	// What hides behind a body is a request of its own, without our bearer.
	hidden := s.plain(t, "PUT /admin/sandbox/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+adminToken+
		"\r\nContent-Type: application/json\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/tools HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	for i, status := range hidden {
		if status < 400 {
			t.Errorf("request %d was answered with %d", i, status)
		}
	}
}

func TestUserCodeCannotHideBehindTheRunner(t *testing.T) {
	s := start(t, options{})
	ses := s.session()
	// When memory runs out the kernel takes the highest score first.
	c := s.sh(ses, "for n in -1000 -500 -1 0; do echo $n > /proc/self/oom_score_adj; done 2>/dev/null; cat /proc/self/oom_score_adj")
	wantStatus(t, c, "ok")
	inside, err := strconv.Atoi(strings.TrimSpace(c.str("stdout")))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", s.runner.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	outside, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if inside < outside {
		t.Errorf("user code got down to %d, the runner is at %d", inside, outside)
	}
}

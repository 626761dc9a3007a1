package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/runner/internal/bustest"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// beRunner makes the test binary the runner itself.
const beRunner = "BIGWAVE_TEST_BE_RUNNER"

var initProgram string

var planes atomic.Int64

func TestMain(m *testing.M) {
	if os.Getenv(beRunner) != "" {
		main()
		return
	}
	os.Exit(withInit(m))
}

// withInit builds the init program for the tests.
func withInit(m *testing.M) int {
	dir, err := os.MkdirTemp("", "bigwave-init-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	initProgram = filepath.Join(dir, "bigwave-init")
	build := exec.Command("go", "build", "-o", initProgram, "github.com/bigwave/bigwave/runner/cmd/init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build init: %v\n%s", err, out)
		return 1
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// plane is a control plane in miniature beside real runner processes.
type plane struct {
	t      testing.TB
	srv    *bustest.Server
	nc     *nats.Conn
	js     jetstream.JetStream
	signer *envelope.Signer
	public envelope.Public
	dir    string // the data directory of both
	id     string // the runner's: its cgroups are named so, and other tests may run beside

	mu      sync.Mutex
	policy  wire.Policy
	beats   []wire.Beat
	reports []wire.Report
	order   []string // what came: "beat INCARNATION", "report KIND CALL"
	next    int
}

func newPlane(t testing.TB) *plane {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{"keys/runners", "nats", "runner"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	key, err := envelope.LoadOrMake(filepath.Join(dir, "keys", "controlplane.key"))
	if err != nil {
		t.Fatal(err)
	}
	p := &plane{t: t, srv: bustest.Start(t), signer: envelope.NewSigner(key.Sign), public: key.Public(), dir: dir,
		id: fmt.Sprintf("test-%d-%d", os.Getpid(), planes.Add(1))}
	p.policy = wire.Policy{
		FSAllowlist: []string{"/workspace"}, NetworkAllowlist: []string{}, CPUShares: 1024, MemoryMB: 256, PIDsLimit: 64,
		WallClockSeconds: 60, OutputBytesLimit: 1 << 20, BaseImage: "bigwave/sandbox-base:latest",
	}
	p.nc = p.srv.Connect(t)
	p.js = p.srv.Streams(t, p.nc, "default")
	p.handle(bus.AllBeats, p.beat)
	p.handle(bus.AllClaims, p.claim)
	p.handle(bus.AllFinals, p.report)
	return p
}

func (p *plane) handle(subject string, f func(*nats.Msg)) {
	if _, err := p.nc.Subscribe(subject, f); err != nil {
		p.t.Fatal(err)
	}
	if err := p.nc.Flush(); err != nil {
		p.t.Fatal(err)
	}
}

// keys are what the runner left in the folder that both know.
func (p *plane) keys() envelope.Keys {
	pub, err := envelope.LoadPublic(filepath.Join(p.dir, "keys", "runners", p.id+".pub"))
	if err != nil {
		p.t.Errorf("the runner's public key: %v", err)
		return nil
	}
	return envelope.NewKeys(pub.Sign)
}

func (p *plane) beat(m *nats.Msg) {
	var b wire.Beat
	if err := p.keys().Open(wire.BeatType, 1<<20, m.Data, &b); err != nil {
		p.t.Errorf("beat: %v", err)
		return
	}
	p.mu.Lock()
	p.beats = append(p.beats, b)
	p.order = append(p.order, "beat "+b.Incarnation)
	p.mu.Unlock()
	p.answer(m, wire.BeatReply{OK: true})
}

func (p *plane) claim(m *nats.Msg) {
	var c wire.Claim
	if err := p.keys().Open(wire.ClaimType, 1<<20, m.Data, &c); err != nil {
		p.t.Errorf("claim: %v", err)
		return
	}
	o := p.newOrder(wire.OrderStart, c.Incarnation, c.Session)
	o.Epoch = c.Epoch
	p.mu.Lock()
	o.Start = &wire.Start{PolicyDigest: "sha256:x", Policy: p.policy}
	p.mu.Unlock()
	p.answer(m, wire.ClaimReply{Order: p.seal(o)})
}

func (p *plane) report(m *nats.Msg) {
	var r wire.Report
	if err := p.keys().Open(wire.ReportType, 2<<20, m.Data, &r); err != nil {
		p.t.Errorf("report: %v", err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reports = append(p.reports, r)
	p.order = append(p.order, fmt.Sprintf("report %s %s", r.Kind, r.Call))
}

func (p *plane) answer(m *nats.Msg, v any) {
	data, _ := strictjson.Encode(v)
	_ = m.Respond(data)
}

func (p *plane) newOrder(kind wire.OrderKind, incarnation, session string) wire.Order {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next++
	now := time.Now().UnixMilli()
	return wire.Order{
		V: wire.Version, JTI: fmt.Sprintf("jti_%d", p.next), Kind: kind, Runner: p.id, Incarnation: incarnation,
		IssuedAt: now, ExpiresAt: now + 30_000, Workspace: "ws", Session: session, Epoch: 1,
	}
}

func (p *plane) seal(o wire.Order) []byte {
	data, err := p.signer.Seal(wire.OrderType, o)
	if err != nil {
		p.t.Error(err)
	}
	return data
}

func (p *plane) until(what string, ok func() bool) {
	p.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		p.mu.Lock()
		yes := ok()
		p.mu.Unlock()
		if yes {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("waited in vain for %s; came: %v", what, p.order)
		}
	}
}

// incarnation is the current start of the runner, once its first beat came.
func (p *plane) incarnation(after string) string {
	p.t.Helper()
	p.until("a beat", func() bool { return len(p.beats) > 0 && p.beats[len(p.beats)-1].Incarnation != after })
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.beats[len(p.beats)-1].Incarnation
}

func (p *plane) find(kind wire.ReportKind, session, call string) *wire.Report {
	for i, r := range p.reports {
		if r.Kind == kind && r.Session == session && r.Call == call {
			return &p.reports[i]
		}
	}
	return nil
}

func (p *plane) wait(kind wire.ReportKind, session, call string) wire.Report {
	p.t.Helper()
	p.until(fmt.Sprintf("%s %s %s", kind, session, call), func() bool { return p.find(kind, session, call) != nil })
	p.mu.Lock()
	defer p.mu.Unlock()
	return *p.find(kind, session, call)
}

// session brings a session to the runner.
func (p *plane) session(id string) {
	p.t.Helper()
	data, _ := strictjson.Encode(wire.Ticket{V: wire.Version, Session: id, Epoch: 1})
	if _, err := p.js.Publish(p.t.Context(), bus.Start("default"), data); err != nil {
		p.t.Fatal(err)
	}
	p.wait(wire.SessionStarted, id, "")
}

// call sends a bash call and returns the sealed order with its answer.
func (p *plane) call(incarnation, session, id, script string) ([]byte, wire.OrderReply) {
	p.t.Helper()
	o := p.newOrder(wire.OrderCall, incarnation, session)
	o.Call = &wire.Call{ID: id, Run: "run_1", Program: "bash", Script: []byte(script)}
	sealed := p.seal(o)
	return sealed, p.send(sealed)
}

func (p *plane) send(sealed []byte) wire.OrderReply {
	p.t.Helper()
	m, err := p.nc.Request(bus.Order(p.id), sealed, 10*time.Second)
	if err != nil {
		p.t.Fatal(err)
	}
	var r wire.OrderReply
	if err := strictjson.Decode(m.Data, &r); err != nil {
		p.t.Fatal(err)
	}
	return r
}

// trust writes what the runner waits for.
func (p *plane) trust() {
	p.t.Helper()
	if err := envelope.WritePublic(filepath.Join(p.dir, "keys", "controlplane.pub"), p.public); err != nil {
		p.t.Fatal(err)
	}
	if err := bus.WriteAccess(filepath.Join(p.dir, "nats", "runner.json"), bus.Access{URL: p.nc.ConnectedUrl()}); err != nil {
		p.t.Fatal(err)
	}
}

// lines is what a process prints, readable while it runs.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// process is one start of the runner.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	log  *lines
	exit chan error
}

func (p *plane) command(env ...string) (*exec.Cmd, *lines) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append([]string{
		beRunner + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"),
		"BIGWAVE_DATA_DIR=" + p.dir, "BIGWAVE_RUNNER_ID=" + p.id, "BIGWAVE_INIT=" + initProgram, "BIGWAVE_BEAT_EVERY=200ms",
		"BIGWAVE_ALLOW_WEAK=memory,pids,cpu",
	}, env...)
	log := &lines{}
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, log
}

func (p *plane) runner(env ...string) *process {
	p.t.Helper()
	cmd, log := p.command(env...)
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	r := &process{t: p.t, cmd: cmd, log: log, exit: make(chan error, 1)}
	go func() { r.exit <- cmd.Wait() }()
	p.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // lets it remove its cgroups
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-r.exit:
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			<-r.exit
		}
		if p.t.Failed() {
			p.t.Logf("runner's log:\n%s", log)
		}
	})
	return r
}

func (r *process) signal(s os.Signal) {
	r.t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		r.t.Fatal(err)
	}
}

// ended waits for the process and returns its exit code.
func (r *process) ended(within time.Duration) int {
	r.t.Helper()
	select {
	case err := <-r.exit:
		r.exit <- err
		return r.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		r.t.Fatalf("the runner did not end within %v", within)
	}
	return -1
}

func TestRunnerWaitsForTheControlPlaneThenServesAndStops(t *testing.T) {
	p := newPlane(t)
	r := p.runner()
	p.until("a line about what is waited for", func() bool { return strings.Contains(r.log.String(), "waiting for a file") })
	p.trust()
	inc := p.incarnation("")
	p.session("ses_1")
	if _, reply := p.call(inc, "ses_1", "call_1", "echo hello; echo oops >&2; exit 3"); !reply.Accepted {
		t.Fatalf("got %+v", reply)
	}
	done := p.wait(wire.CallDone, "ses_1", "call_1").Done
	if done.Status != "error" || string(done.Stdout) != "hello\n" || string(done.Stderr) != "oops\n" || done.ExitCode == nil || *done.ExitCode != 3 {
		t.Errorf("got %+v", done)
	}
	r.signal(syscall.SIGTERM)
	if code := r.ended(20 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if f := p.wait(wire.SessionEnded, "ses_1", "").Failure; f.Code != "runner_stopped" {
		t.Errorf("got %+v", f)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := p.beats[len(p.beats)-1]; !last.Leaving || len(last.Sessions) != 0 {
		t.Errorf("the last beat is %+v", last)
	}
	if st, err := os.Stat(filepath.Join(p.dir, "runner", "runner.key")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", st, err)
	}
}

func TestGracefulStopLetsCallsEnd(t *testing.T) {
	p := newPlane(t)
	p.trust()
	r := p.runner()
	inc := p.incarnation("")
	p.session("ses_1")
	for i := range 5 {
		if _, reply := p.call(inc, "ses_1", fmt.Sprintf("call_%d", i), "sleep 1; echo late"); !reply.Accepted {
			t.Fatalf("got %+v", reply)
		}
	}
	r.signal(syscall.SIGTERM)
	p.until("a draining beat", func() bool { return p.beats[len(p.beats)-1].Draining })
	if _, reply := p.call(inc, "ses_1", "call_9", "true"); reply.Code != "draining" {
		t.Errorf("a call while draining: %+v", reply)
	}
	if code := r.ended(20 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for i := range 5 {
		if done := p.wait(wire.CallDone, "ses_1", fmt.Sprintf("call_%d", i)).Done; done.Status != "ok" || string(done.Stdout) != "late\n" {
			t.Errorf("got %+v", done)
		}
	}
}

func TestSecondSignalEndsCallsAtOnce(t *testing.T) {
	p := newPlane(t)
	p.trust()
	r := p.runner("BIGWAVE_GRACE=10m")
	inc := p.incarnation("")
	p.session("ses_1")
	p.call(inc, "ses_1", "call_1", "echo before; sleep 300")
	time.Sleep(300 * time.Millisecond)
	r.signal(syscall.SIGTERM)
	time.Sleep(300 * time.Millisecond)
	r.signal(syscall.SIGTERM)
	if code := r.ended(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	done := p.wait(wire.CallDone, "ses_1", "call_1").Done
	if done.Status != "runner_lost" || string(done.Stdout) != "before\n" {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
}

func TestGraceEnds(t *testing.T) {
	p := newPlane(t)
	p.trust()
	r := p.runner("BIGWAVE_GRACE=500ms")
	inc := p.incarnation("")
	p.session("ses_1")
	p.call(inc, "ses_1", "call_1", "sleep 300")
	r.signal(syscall.SIGINT)
	if code := r.ended(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if done := p.wait(wire.CallDone, "ses_1", "call_1").Done; done.Status != "runner_lost" {
		t.Errorf("got %+v", done)
	}
}

func TestStopWithoutTheBusSpoolsForTheNextStart(t *testing.T) {
	p := newPlane(t)
	p.trust()
	r := p.runner("BIGWAVE_GRACE=0s")
	old := p.incarnation("")
	p.session("ses_1")
	p.call(old, "ses_1", "call_1", "echo kept; sleep 2; echo end")
	p.srv.Stop()
	time.Sleep(200 * time.Millisecond)
	r.signal(syscall.SIGTERM)
	if code := r.ended(40 * time.Second); code != 1 {
		t.Errorf("exit code %d", code)
	}
	if files, _ := filepath.Glob(filepath.Join(p.dir, "runner", "spool", "*.json")); len(files) != 2 {
		t.Fatalf("spool: %v", files)
	}
	p.srv.Restart(t)
	p.until("the bus", func() bool { return p.nc.IsConnected() })
	r = p.runner()
	inc := p.incarnation(old)
	done := p.wait(wire.CallDone, "ses_1", "call_1")
	if done.Incarnation != old || done.Done.Status != "runner_lost" || string(done.Done.Stdout) != "kept\n" {
		t.Errorf("got %+v, %+v", done, done.Done)
	}
	p.mu.Lock()
	seen := map[string]int{}
	for i, what := range p.order {
		if _, ok := seen[what]; !ok {
			seen[what] = i
		}
	}
	p.mu.Unlock()
	if seen["report call.done call_1"] > seen["beat "+inc] || seen["report session.ended "] > seen["beat "+inc] {
		t.Errorf("the first beat came before the spool: %v", seen)
	}
	if files, _ := filepath.Glob(filepath.Join(p.dir, "runner", "spool", "*")); len(files) != 0 {
		t.Errorf("spool: %v", files)
	}
	r.signal(syscall.SIGTERM)
	if code := r.ended(20 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestKilledRunnerRunsNothingAgain(t *testing.T) {
	p := newPlane(t)
	p.trust()
	r := p.runner()
	old := p.incarnation("")
	p.session("ses_1")
	sealed, reply := p.call(old, "ses_1", "call_1", "echo started; sleep 300")
	if !reply.Accepted {
		t.Fatalf("got %+v", reply)
	}
	p.until("a beat that holds the call", func() bool { return len(p.beats[len(p.beats)-1].Calls) == 1 })
	r.signal(syscall.SIGKILL)
	r.ended(5 * time.Second)
	p.runner()
	p.incarnation(old)
	if again := p.send(sealed); again.Accepted || again.Code != "audience" {
		t.Errorf("the old order: %+v", again)
	}
	if left, err := os.ReadDir(filepath.Join(p.dir, "runner", "sandboxes")); err != nil || len(left) > 1 { // a spare may be there
		t.Errorf("left of the last start: %v, %v", left, err)
	}
	p.session("ses_2")
	if n := strings.Count(strings.Join(p.order, "\n"), "report call.done"); n != 0 {
		t.Errorf("%d results", n)
	}
}

func TestOneRunnerPerDataDirectory(t *testing.T) {
	p := newPlane(t)
	p.trust()
	p.runner()
	p.incarnation("")
	cmd, log := p.command()
	if err := cmd.Run(); err == nil || !strings.Contains(log.String(), "another runner") {
		t.Errorf("got %v: %s", err, log)
	}
}

func TestWrongSettingsAndMissingPiecesAreNamed(t *testing.T) {
	p := newPlane(t)
	p.trust()
	for name, tt := range map[string]struct{ env, want string }{
		"a bad number":     {"BIGWAVE_SLOTS=none", "BIGWAVE_SLOTS must be"},
		"no init":          {"BIGWAVE_INIT=/nowhere/bigwave-init", "/nowhere/bigwave-init"},
		"an open key file": {"BIGWAVE_RUNNER_KEY_FILE=" + openFile(t), "chmod 600"},
	} {
		cmd, log := p.command(tt.env)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
		err := cmd.Run()
		stop()
		cancel()
		if err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(log.String(), tt.want) {
			t.Errorf("%s: %v: %s", name, err, log)
		}
	}
}

// openFile is a key file that others may read.
func openFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runner.key")
	if err := os.WriteFile(path, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestOutcomesOfRealCalls(t *testing.T) {
	p := newPlane(t)
	p.trust()
	p.policy.OutputBytesLimit, p.policy.MemoryMB, p.policy.PIDsLimit = 64<<10, 64, 16
	p.runner("BIGWAVE_ALLOW_WEAK=")
	inc := p.incarnation("")
	p.session("ses_1")
	p.mu.Lock()
	p.policy.WallClockSeconds = 2
	p.mu.Unlock()
	p.session("ses_short")
	for i, tt := range []struct {
		name    string
		call    wire.Call
		status  string
		code    string
		message string
		stdout  string
		check   func(*wire.Done) bool
	}{
		{name: "bash", call: wire.Call{Program: "bash", Script: []byte("printf %s \"$HOME\"")}, status: "ok", stdout: "/workspace"},
		{name: "bash in argv", call: wire.Call{Program: "bash", Script: []byte("echo $0"), InArgv: true}, status: "ok"},
		{name: "python", call: wire.Call{Program: "python3", Script: []byte("print(6*7)")}, status: "ok", stdout: "42\n"},
		{name: "exception", call: wire.Call{Program: "python3", Script: []byte("print('a')\nraise ValueError('no such thing')")}, status: "error", code: "tool_failed", message: "ValueError: no such thing", stdout: "a\n"},
		{name: "syntax error", call: wire.Call{Program: "python3", Script: []byte("print(")}, status: "error", code: "tool_failed", message: "SyntaxError: "},
		{name: "signal", call: wire.Call{Program: "bash", Script: []byte("kill -SEGV $$")}, status: "error", code: "tool_failed", message: "SIGSEGV", check: func(d *wire.Done) bool { return d.Signal == "SIGSEGV" && d.ExitCode == nil }},
		{name: "timeout", call: wire.Call{Program: "bash", Script: []byte("echo one; echo two; sleep 300 & sleep 300")}, status: "timed_out", code: "wall_clock", stdout: "one\ntwo\n", check: func(d *wire.Done) bool { return d.DurationMS < 3000 && d.DurationMS >= 2000 }},
		{name: "memory", call: wire.Call{Program: "python3", Script: []byte("x = bytearray(1 << 30)")}, status: "oom_killed", code: "memory_limit", check: func(d *wire.Done) bool { return d.OOMKills > 0 }},
		{name: "flood", call: wire.Call{Program: "bash", Script: []byte("yes")}, status: "output_limit", code: "output_flood", check: func(d *wire.Done) bool { return len(d.Stdout) <= 64<<10 && d.Truncated }},
		{name: "write", call: wire.Call{Program: "file_write", Path: "a/b.txt", Script: []byte("content")}, status: "ok"},
		{name: "read", call: wire.Call{Program: "file_read", Path: "/workspace/a/b.txt"}, status: "ok", check: func(d *wire.Done) bool { return string(d.Value) == "content" }},
		{name: "read nothing", call: wire.Call{Program: "file_read", Path: "missing"}, status: "error", code: "file_failed"},
		{name: "read elsewhere", call: wire.Call{Program: "file_read", Path: "/etc/shadow"}, status: "denied", code: "path_denied"},
		{name: "read above", call: wire.Call{Program: "file_read", Path: "../etc/passwd"}, status: "denied", code: "path_denied"},
		{name: "make a large file", call: wire.Call{Program: "bash", Script: []byte("truncate -s 10G huge")}, status: "ok"},
		{name: "read too much", call: wire.Call{Program: "file_read", Path: "huge"}, status: "error", code: "file_failed", check: func(d *wire.Done) bool { return *d.Error.Limit == 64<<10 && *d.Error.Observed == 10<<30 }},
		{name: "pids", call: wire.Call{Program: "python3", Script: []byte("import os, time\nfor i in range(50):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)\n")}, status: "pids_exhausted", code: "pids_limit"},
		{name: "after all that", call: wire.Call{Program: "bash", Script: []byte("cat a/b.txt")}, status: "ok", stdout: "content"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			session := "ses_1"
			if tt.status == "timed_out" {
				session = "ses_short"
			}
			o := p.newOrder(wire.OrderCall, inc, session)
			o.Call = &tt.call
			o.Call.ID, o.Call.Run = fmt.Sprintf("call_%d", i), "run_1"
			if reply := p.send(p.seal(o)); !reply.Accepted {
				t.Fatalf("got %+v", reply)
			}
			d := p.wait(wire.CallDone, session, o.Call.ID).Done
			if d.Status != tt.status || (tt.stdout != "" && string(d.Stdout) != tt.stdout) {
				t.Fatalf("got %+v, %+v\n%s\n%s", d, d.Error, d.Stdout[:min(len(d.Stdout), 500)], d.Stderr[:min(len(d.Stderr), 500)])
			}
			if tt.code != "" && (d.Error == nil || d.Error.Code != tt.code || !strings.Contains(d.Error.Message, tt.message)) {
				t.Errorf("got %+v", d.Error)
			}
			if tt.check != nil && !tt.check(d) {
				t.Errorf("got %+v, %+v", d, d.Error)
			}
			if tt.status != "denied" && (d.StartedAt == 0 || d.DurationMS <= 0) {
				t.Errorf("started at %d, took %v ms", d.StartedAt, d.DurationMS)
			}
		})
	}
}

func TestDoctorPrintsTheTable(t *testing.T) {
	p := newPlane(t)
	cmd, log := p.command()
	cmd.Args = append(cmd.Args, "doctor")
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, log)
	}
	for _, want := range []string{"backend: subprocess", "PIECE", "sandbox  ", "bash", "cgroup memory"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %q in:\n%s", want, log)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(p.dir, "runner")); len(left) != 0 {
		t.Errorf("doctor left %v", left)
	}
}

func TestVersion(t *testing.T) {
	p := newPlane(t)
	cmd, log := p.command()
	cmd.Args = append(cmd.Args, "version")
	if err := cmd.Run(); err != nil || strings.TrimSpace(log.String()) != version {
		t.Errorf("%v: %s", err, log)
	}
}

// BenchmarkCall is the whole path of a call on the runner's side: from its
// order on the bus to its report on the event stream.
func BenchmarkCall(b *testing.B) {
	p := newPlane(b)
	p.trust()
	p.runner("BIGWAVE_LOG_LEVEL=warn")
	inc := p.incarnation("")
	p.session("ses_1")
	done := make(chan struct{}, 1)
	p.handle(bus.AllFinals, func(*nats.Msg) { done <- struct{}{} })
	var whole, inside []float64
	for i := 0; b.Loop(); i++ {
		id := fmt.Sprintf("call_%d", i)
		o := p.newOrder(wire.OrderCall, inc, "ses_1")
		o.Call = &wire.Call{ID: id, Run: "run_1", Program: "bash", Script: []byte("true"), InArgv: true}
		sealed := p.seal(o)
		began := time.Now()
		if err := p.nc.PublishRequest(bus.Order(p.id), nats.NewInbox(), sealed); err != nil {
			b.Fatal(err)
		}
		<-done
		whole = append(whole, time.Since(began).Seconds()*1000)
		inside = append(inside, p.wait(wire.CallDone, "ses_1", id).Done.DurationMS)
	}
	slices.Sort(whole)
	slices.Sort(inside)
	b.ReportMetric(whole[len(whole)/2], "ms/whole")
	b.ReportMetric(inside[len(inside)/2], "ms/process")
}

package execution

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/bustest"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/wire"
)

// script is what a fake program does when its source is this.
type script func(ctx context.Context, p sandbox.Process, x *box) sandbox.Exit

// machine is a backend in memory: its programs are functions.
type machine struct {
	scripts map[string]script
	any     script        // for what is in no table; may be nil
	startUp time.Duration // how long a start takes
	broken  error         // what every start answers

	mu       sync.Mutex
	live     map[string]*box
	starting int
	most     int // starts at once
	execs    map[string]int
}

type box struct {
	m      *machine
	id     string
	done   chan struct{}
	once   sync.Once
	info   sandbox.Info
	closed int
}

func (m *machine) Start(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	m.mu.Lock()
	m.starting++
	m.most = max(m.most, m.starting)
	m.mu.Unlock()
	defer func() { m.mu.Lock(); m.starting--; m.mu.Unlock() }()
	select {
	case <-time.After(m.startUp):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if m.broken != nil {
		return nil, m.broken
	}
	x := &box{m: m, id: spec.ID, done: make(chan struct{}), info: sandbox.Info{Backend: "fake", Isolation: "none", Enforced: map[string]string{"base_image": "host"}}}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[spec.ID] = x
	return x, nil
}

func (x *box) Exec(ctx context.Context, p sandbox.Process) (sandbox.Exit, error) {
	select {
	case <-x.done:
		return sandbox.Exit{}, sandbox.ErrClosed
	default:
	}
	x.m.mu.Lock()
	x.m.execs[p.ID]++
	x.m.mu.Unlock()
	do := x.m.scripts[string(p.Script)]
	if do == nil {
		do = x.m.any
	}
	if do == nil {
		return sandbox.Exit{}, fmt.Errorf("no program for %q", p.Script)
	}
	if p.Started != nil {
		p.Started()
	}
	return do(ctx, p, x), nil
}

func (x *box) Done() <-chan struct{} { return x.done }
func (x *box) Info() sandbox.Info    { return x.info }
func (x *box) die()                  { x.once.Do(func() { close(x.done) }) }
func (x *box) Close(context.Context) error {
	x.die()
	x.m.mu.Lock()
	defer x.m.mu.Unlock()
	x.closed++
	delete(x.m.live, x.id)
	return nil
}

func (m *machine) left() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.live)
}

// says prints and exits.
func says(out, err string, code int) script {
	return func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		_, _ = p.Stdout.Write([]byte(out))
		_, _ = p.Stderr.Write([]byte(err))
		return sandbox.Exit{Reason: sandbox.Exited, Code: code, Duration: 2 * time.Millisecond}
	}
}

// hangs runs until something ends it, as the contract says.
func hangs(ctx context.Context, p sandbox.Process, x *box) sandbox.Exit {
	_, _ = p.Stdout.Write([]byte("begun\n"))
	var wall <-chan time.Time
	if p.Wall > 0 {
		wall = time.After(p.Wall)
	}
	select {
	case <-ctx.Done():
		return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1, Signal: "SIGKILL"}
	case <-x.done:
		return sandbox.Exit{Reason: sandbox.Died, Code: -1}
	case <-wall:
		return sandbox.Exit{Reason: sandbox.TimedOut, Code: -1, Signal: "SIGKILL", Duration: p.Wall}
	}
}

// yells writes until it is ended.
func yells(ctx context.Context, p sandbox.Process, _ *box) sandbox.Exit {
	line := []byte(strings.Repeat("y\n", 2048))
	for ctx.Err() == nil {
		_, _ = p.Stdout.Write(line)
	}
	return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1, Signal: "SIGKILL", OOMKills: 0}
}

// inbox keeps reports and frames.
type inbox struct {
	mu      sync.Mutex
	reports []wire.Report
	frames  []wire.Frame
	arrived chan struct{}
}

func (i *inbox) Send(r wire.Report) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.reports = append(i.reports, r)
	close(i.arrived)
	i.arrived = make(chan struct{})
	return nil
}

func (i *inbox) Publish(session string, f wire.Frame) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.frames = append(i.frames, f)
	return true
}

// wait returns the first report that fits.
func (i *inbox) wait(t *testing.T, kind wire.ReportKind, call string) wire.Report {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		i.mu.Lock()
		arrived := i.arrived
		for _, r := range i.reports {
			if r.Kind == kind && r.Call == call {
				i.mu.Unlock()
				return r
			}
		}
		i.mu.Unlock()
		select {
		case <-arrived:
		case <-deadline:
			t.Fatalf("no %s %s came", kind, call)
		}
	}
}

func (i *inbox) count(kind wire.ReportKind, call string) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	n := 0
	for _, r := range i.reports {
		if r.Kind == kind && r.Call == call {
			n++
		}
	}
	return n
}

// shelf keeps blobs in memory.
type shelf struct {
	mu    sync.Mutex
	blobs map[string][]byte
	err   error
}

func (s *shelf) Get(_ context.Context, b wire.Blob) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	data, ok := s.blobs[b.ID]
	if !ok {
		return nil, errors.New("no such blob")
	}
	return data, nil
}

func (s *shelf) Put(ctx context.Context, data []byte) (wire.Blob, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return wire.Blob{}, s.err
	}
	id := fmt.Sprintf("blob_%d", len(s.blobs))
	s.blobs[id] = data
	return wire.Blob{ID: id, Size: int64(len(data))}, nil
}

// rig is a service with everything in memory.
type rig struct {
	*Service
	machine *machine
	inbox   *inbox
	shelf   *shelf
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{
		machine: &machine{live: map[string]*box{}, execs: map[string]int{}, scripts: map[string]script{
			"true": says("", "", 0), "hello": says("hello\n", "", 0), "false": says("", "no\n", 1), "hang": hangs, "yes": yells,
		}},
		inbox: &inbox{arrived: make(chan struct{})},
		shelf: &shelf{blobs: map[string][]byte{}},
	}
	r.Service = &Service{
		Backend: r.machine, Reports: r.inbox, Live: r.inbox, Blobs: r.shelf,
		Runner: "r1", Incarnation: "i1", MaxCalls: 64, Now: time.Now, Log: bustest.Quiet(),
	}
	t.Cleanup(func() {
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if n := r.machine.left(); n > 0 {
			t.Errorf("%d sandboxes are left", n)
		}
		if l := r.Load(); len(l.Sessions)+len(l.Calls) > 0 {
			t.Errorf("still there: %+v", l)
		}
	})
	return r
}

func policy() wire.Policy {
	return wire.Policy{FSAllowlist: []string{"/workspace"}, CPUShares: 1024, MemoryMB: 256, PIDsLimit: 64, WallClockSeconds: 30, OutputBytesLimit: 64 << 10, BaseImage: "bigwave/sandbox-base:latest"}
}

func startOrder(session string, epoch int64) wire.Order {
	return wire.Order{V: wire.Version, Kind: wire.OrderStart, Workspace: "ws", Session: session, Epoch: epoch, Start: &wire.Start{Policy: policy(), PolicyDigest: "sha256:x"}}
}

func callOrder(session string, epoch int64, call, script string) wire.Order {
	return wire.Order{V: wire.Version, Kind: wire.OrderCall, Workspace: "ws", Session: session, Epoch: epoch, Call: &wire.Call{ID: call, Run: "run_1", Program: "bash", Script: []byte(script)}}
}

// live starts a session and waits for its report.
func (r *rig) live(t *testing.T, session string) {
	t.Helper()
	if err := r.Start(startOrder(session, 1), func() {}); err != nil {
		t.Fatal(err)
	}
	r.inbox.wait(t, wire.SessionStarted, "")
}

// begin starts a call without waiting.
func (r *rig) begin(t *testing.T, o wire.Order) {
	t.Helper()
	run, err := r.Call(o, func() {})
	if err != nil {
		t.Fatal(err)
	}
	run()
}

// do runs a call to its report.
func (r *rig) do(t *testing.T, session, call, script string) *wire.Done {
	t.Helper()
	r.begin(t, callOrder(session, 1, call, script))
	return r.inbox.wait(t, wire.CallDone, call).Done
}

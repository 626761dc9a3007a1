package dispatch

import (
	"context"
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/embeddednats"
	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// rig is a dispatcher on a real bus, with services that remember.
type rig struct {
	t      testing.TB
	dir    string
	tcp    bool // the dispatcher reaches the bus from outside, as in a cluster
	nats   *embeddednats.Server
	d      *Dispatcher
	s      *services
	stop   func()
	public ed25519.PublicKey
}

func newRig(t testing.TB, change ...func(*Dispatcher)) *rig {
	t.Helper()
	r := &rig{t: t, tcp: true, dir: t.TempDir(), s: &services{owners: map[string]session.Claim{}}}
	r.startBus()
	r.startDispatcher(change...)
	return r
}

func (r *rig) startBus() {
	r.t.Helper()
	srv, err := embeddednats.Start(embeddednats.Config{Dir: filepath.Join(r.dir, "nats"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		r.t.Fatal(err)
	}
	r.nats = srv
	r.t.Cleanup(srv.Close)
}

func (r *rig) startDispatcher(change ...func(*Dispatcher)) {
	r.t.Helper()
	connect := func() (*nats.Conn, error) { return r.nats.Connect("cp") }
	if r.tcp {
		connect = func() (*nats.Conn, error) { return bus.Connect("cp", r.nats.Access(), slog.New(slog.DiscardHandler)) }
	}
	nc, err := connect()
	if err != nil {
		r.t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		r.t.Fatal(err)
	}
	_, key, _ := ed25519.GenerateKey(rand.Reader)
	signer := envelope.NewSigner(key)
	r.public = signer.Public()
	r.d = &Dispatcher{
		Bus: nc, JS: js, Signer: signer, Keys: &KeyFolder{Dir: r.dir},
		Sessions: r.s, Runs: r.s, Fleet: r.s, Records: r.s,
		Pool: "default", Replica: "replica-" + newID(),
		Rejects: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rejects"}, []string{"what", "reason"}),
		Log:     slog.New(slog.DiscardHandler), Now: time.Now, NewID: newID,
	}
	for _, c := range change {
		c(r.d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = r.d.Run(ctx) }()
	var once sync.Once
	r.stop = func() { once.Do(func() { cancel(); <-ended; nc.Close() }) }
	r.t.Cleanup(r.stop)
	eventually(r.t, "dispatcher is ready", func() bool {
		_, hears := r.d.Hearing()
		return r.d.Ready(r.t.Context()) == nil && hears
	})
}

func newID() string { id := uuid.Must(uuid.NewV7()); return hex.EncodeToString(id[:]) }

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// services remember what they are told; one owner per session.
type services struct {
	mu       sync.Mutex
	owners   map[string]session.Claim
	claims   []session.Claim
	started  []session.Claim
	failed   []string
	ended    []string
	outcomes []run.Outcome
	heard    []run.Notice
	beats    []fleet.Beat
	audits   []audit.Event
	raise    []fleet.Held
	down     error // what Apply answers
	policy   policy.Policy
}

func (s *services) Claim(_ context.Context, c session.Claim) (session.Grant, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims = append(s.claims, c)
	if o, ok := s.owners[c.Session]; ok && o != c {
		return session.Grant{}, fault.New(fault.Conflict, "taken by another")
	}
	s.owners[c.Session] = c
	return session.Grant{Session: session.Session{ID: c.Session, Workspace: "w1", Epoch: c.Epoch}, Policy: s.policy}, nil
}

func (s *services) owned(c session.Claim) error {
	if s.owners[c.Session] != c {
		return fault.New(fault.Conflict, "not the owner")
	}
	return s.down
}

func (s *services) Started(_ context.Context, c session.Claim, _ session.Sandbox) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.owned(c); err != nil {
		return err
	}
	s.started = append(s.started, c)
	return nil
}

func (s *services) StartFailed(_ context.Context, _ session.Claim, code, field, message string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = append(s.failed, code+"|"+field+"|"+message)
	return nil
}

func (s *services) Ended(_ context.Context, c session.Claim, code, message string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = append(s.ended, c.Session+"|"+code+"|"+message)
	return nil
}

func (s *services) Apply(_ context.Context, o run.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := session.Claim{Runner: o.Runner, Incarnation: o.Incarnation, Session: o.Session, Epoch: o.Epoch}
	if err := s.owned(c); err != nil {
		return err
	}
	for _, had := range s.outcomes {
		if had.Call == o.Call && had.Status != o.Status {
			return fault.New(fault.Conflict, "the call has its result")
		}
		if had.Call == o.Call {
			return nil
		}
	}
	s.outcomes = append(s.outcomes, o)
	return nil
}

func (s *services) Heard(_ string, n run.Notice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = append(s.heard, n)
}

func (s *services) Beat(_ context.Context, b fleet.Beat) ([]fleet.Held, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beats = append(s.beats, b)
	return s.raise, nil
}

func (s *services) InsertEvent(_ context.Context, e audit.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.audits = append(s.audits, e)
	return nil
}

func (s *services) outcomesOf(call string) []run.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.outcomes), func(o run.Outcome) bool { return o.Call != call })
}

func (s *services) setDown(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = err
}

// audited counts records of an action and outcome.
func (s *services) audited(action, outcome string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, e := range s.audits {
		if e.Action == action && e.Outcome == outcome {
			n++
		}
	}
	return n
}

// runner speaks the protocol as a runner does, and may lie.
type runner struct {
	*rig
	id, incarnation string
	signer          *envelope.Signer
	key             ed25519.PrivateKey
	nc              *nats.Conn
	js              jetstream.JetStream
}

func (r *rig) runner(id string) *runner {
	r.t.Helper()
	_, key, _ := ed25519.GenerateKey(rand.Reader)
	box, _ := ecdh.X25519().GenerateKey(rand.Reader)
	p := envelope.Private{Sign: key, Box: box}
	if err := envelope.WritePublic(filepath.Join(r.dir, id+".pub"), p.Public()); err != nil {
		r.t.Fatal(err)
	}
	access, err := bus.LoadAccess(filepath.Join(r.dir, "nats", embeddednats.RunnerAccess))
	if err != nil {
		r.t.Fatal(err)
	}
	nc, err := bus.Connect(id, access, slog.New(slog.DiscardHandler))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(nc.Close)
	js, _ := jetstream.New(nc)
	return &runner{rig: r, id: id, incarnation: "inc-" + newID(), signer: envelope.NewSigner(key), key: key, nc: nc, js: js}
}

// owner makes the runner the owner of a session.
func (r *runner) own(sessionID string, epoch int64) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.s.owners[sessionID] = session.Claim{Runner: r.id, Incarnation: r.incarnation, Session: sessionID, Epoch: epoch}
}

func (r *runner) seal(payloadType string, v any) []byte {
	r.t.Helper()
	data, err := r.signer.Seal(payloadType, v)
	if err != nil {
		r.t.Fatal(err)
	}
	return data
}

func (r *runner) ask(subject string, data []byte, into any) {
	r.t.Helper()
	m, err := r.nc.Request(subject, data, 5*time.Second)
	if err != nil {
		r.t.Fatalf("ask %s: %v", subject, err)
	}
	if err := strictjson.Decode(m.Data, into); err != nil {
		r.t.Fatal(err)
	}
}

func (r *runner) claim(sessionID string, epoch int64, change ...func(*wire.Claim)) wire.ClaimReply {
	r.t.Helper()
	c := wire.Claim{V: wire.Version, Runner: r.id, Incarnation: r.incarnation, Session: sessionID, Epoch: epoch, At: time.Now().UnixMilli()}
	for _, f := range change {
		f(&c)
	}
	var reply wire.ClaimReply
	r.ask(bus.Claim(r.id), r.seal(wire.ClaimType, c), &reply)
	return reply
}

func (r *runner) beat(change ...func(*wire.Beat)) wire.BeatReply {
	r.t.Helper()
	b := wire.Beat{V: wire.Version, Runner: r.id, Incarnation: r.incarnation, At: time.Now().UnixMilli(), Pool: "default", Backend: "test", Version: "1", Slots: 4}
	for _, f := range change {
		f(&b)
	}
	var reply wire.BeatReply
	r.ask(bus.Beat(r.id), r.seal(wire.BeatType, b), &reply)
	return reply
}

func (r *runner) done(sessionID, call string, change ...func(*wire.Report)) wire.Report {
	zero := 0
	rep := wire.Report{
		V: wire.Version, Kind: wire.CallDone, Runner: r.id, Incarnation: r.incarnation, Session: sessionID, Epoch: 1,
		At: time.Now().UnixMilli(), Run: "run_1", Call: call,
		Done: &wire.Done{Status: "ok", ExitCode: &zero, Stdout: []byte("out\n"), StdoutBytes: 4, DurationMS: 1.5},
	}
	for _, f := range change {
		f(&rep)
	}
	return rep
}

// publish puts bytes on a subject of the event stream and waits for its word.
func (r *runner) publish(subject string, data []byte) {
	r.t.Helper()
	if _, err := r.js.Publish(r.t.Context(), subject, data); err != nil {
		r.t.Fatalf("publish on %s: %v", subject, err)
	}
}

func (r *runner) report(rep wire.Report) {
	r.t.Helper()
	r.publish(bus.Final(r.id, rep.Session), r.seal(wire.ReportType, rep))
}

func (r *runner) frame(f wire.Frame, sessionID string) {
	r.t.Helper()
	data, err := strictjson.Encode(f)
	if err != nil {
		r.t.Fatal(err)
	}
	m := nats.NewMsg(bus.Frame(r.id, sessionID))
	m.Header.Set(bus.HeaderRun, f.Run)
	m.Header.Set(bus.HeaderCall, f.Call)
	m.Header.Set(bus.HeaderKind, string(f.Kind))
	m.Data = data
	if _, err := r.js.PublishMsg(r.t.Context(), m); err != nil {
		r.t.Fatal(err)
	}
}

// orders answers orders and keeps what it was sent.
func (r *runner) orders(answer func(wire.Order) wire.OrderReply) *received {
	r.t.Helper()
	got := &received{}
	keys := envelope.NewKeys(r.public)
	_, err := r.nc.Subscribe(bus.Order(r.id), func(m *nats.Msg) {
		var o wire.Order
		if err := keys.Open(wire.OrderType, wire.MaxOrder, m.Data, &o); err != nil {
			r.t.Errorf("order: %v", err)
			return
		}
		got.add(o, m.Data)
		data, _ := strictjson.Encode(answer(o))
		_ = m.Respond(data)
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.nc.Flush(); err != nil {
		r.t.Fatal(err)
	}
	return got
}

type received struct {
	mu   sync.Mutex
	list []wire.Order
	raw  [][]byte
}

func (r *received) add(o wire.Order, raw []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list, r.raw = append(r.list, o), append(r.raw, raw)
}

func (r *received) all() []wire.Order {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

func accept(wire.Order) wire.OrderReply { return wire.OrderReply{Accepted: true, State: "running"} }

func big(n int) []byte { return []byte(strings.Repeat("x", n)) }

// sealRaw signs a payload that no encoder would make.
func (r *runner) sealRaw(payload string) []byte {
	r.t.Helper()
	sig := ed25519.Sign(r.key, dsse.PAE(wire.ReportType, []byte(payload)))
	data, err := strictjson.Encode(map[string]any{
		"payloadType": wire.ReportType,
		"payload":     base64.StdEncoding.EncodeToString([]byte(payload)),
		"signatures": []any{map[string]any{
			"keyid": envelope.KeyID(r.key.Public().(ed25519.PublicKey)), "sig": base64.StdEncoding.EncodeToString(sig),
		}},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return data
}

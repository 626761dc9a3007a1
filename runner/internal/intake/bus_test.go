package intake

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/bustest"
	"github.com/bigwave/bigwave/runner/internal/execution"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func signer(t testing.TB) *envelope.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return envelope.NewSigner(key)
}

// worker does what intake lets in, in memory, and counts it.
type worker struct {
	mu       sync.Mutex
	live     map[wire.Held]func()
	calls    map[string]int
	over     map[string]func()
	log      []string
	refuse   error
	failures []wire.Failure
}

func newWorker() *worker {
	return &worker{live: map[wire.Held]func(){}, calls: map[string]int{}, over: map[string]func(){}}
}

func (w *worker) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf(format, args...))
}

func (w *worker) Start(o wire.Order, over func()) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live[wire.Held{Session: o.Session, Epoch: o.Epoch}] = over
	w.note("start %s %d", o.Session, o.Epoch)
	return nil
}

func (w *worker) Fail(o wire.Order, f wire.Failure) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, f)
}

func (w *worker) Call(o wire.Order, over func()) (func(), error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuse != nil {
		return nil, w.refuse
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.calls[o.Call.ID]++
		w.over[o.Call.ID] = over
	}, nil
}

func (w *worker) Cancel(held wire.Held, call string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note("cancel %s", call)
}

func (w *worker) Stop(held wire.Held)  { w.finish(held, "stop") }
func (w *worker) Raise(held wire.Held) { w.finish(held, "raise") }

func (w *worker) finish(held wire.Held, why string) {
	w.mu.Lock()
	over := w.live[held]
	delete(w.live, held)
	w.note("%s %s %d", why, held.Session, held.Epoch)
	w.mu.Unlock()
	if over != nil {
		over()
	}
}

func (w *worker) Abandon() {
	for _, held := range w.Load().Sessions {
		w.finish(held, "abandon")
	}
}

func (w *worker) Load() execution.Load {
	w.mu.Lock()
	defer w.mu.Unlock()
	var l execution.Load
	for held := range w.live {
		l.Sessions = append(l.Sessions, held)
	}
	return l
}

func (w *worker) started(call string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls[call]
}

func (w *worker) total() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, c := range w.calls {
		n += c
	}
	return n
}

func (w *worker) did(line string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, l := range w.log {
		if l == line {
			n++
		}
	}
	return n
}

// plane is a control plane in miniature: it answers beats and claims and seals
// orders.
type plane struct {
	t      *testing.T
	nc     *nats.Conn
	js     jetstream.JetStream
	key    ed25519.PrivateKey
	signer *envelope.Signer
	next   int

	mu     sync.Mutex
	beats  []wire.Beat
	mute   bool
	raised []wire.Held
	policy wire.Policy
	answer func(wire.Claim) wire.ClaimReply // nil: grant what is claimed
	claims []wire.Claim
	owned  map[string]int64
	keys   envelope.Keys // of the runner
}

// rig is an intake on a real bus between a worker and a plane.
type rig struct {
	*plane
	srv    *bustest.Server
	in     *Intake
	worker *worker
	runner *nats.Conn
	stop   func()
}

func newRig(t *testing.T, edit func(*Intake)) *rig {
	t.Helper()
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	p := &plane{t: t, nc: nc, key: key, signer: envelope.NewSigner(key), policy: goodPolicy(), owned: map[string]int64{}}
	p.js = srv.Streams(t, nc, "default")
	r := &rig{plane: p, srv: srv, worker: newWorker(), runner: srv.Connect(t)}
	own := signer(t)
	p.keys = envelope.NewKeys(own.Public())
	r.in = &Intake{
		Conn: r.runner, Keys: envelope.NewKeys(p.signer.Public()), Signer: own, Work: r.worker,
		To: Audience{"r1", "inc1"}, Pool: "default", Slots: 4, Ceilings: ceilings,
		BeatEvery: 50 * time.Millisecond, Now: time.Now, Log: bustest.Quiet(),
	}
	if edit != nil {
		edit(r.in)
	}
	p.serve()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.in.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(r.stop)
	r.until("the first beat", func() bool { return r.in.heard.Load() != nil })
	return r
}

func (p *plane) serve() {
	for subject, answer := range map[string]func(*nats.Msg) any{bus.AllBeats: p.beat, bus.AllClaims: p.claim} {
		sub, err := p.nc.Subscribe(subject, func(m *nats.Msg) {
			if v := answer(m); v != nil {
				data, _ := strictjson.Encode(v)
				_ = m.Respond(data)
			}
		})
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Cleanup(func() { _ = sub.Unsubscribe() })
	}
	_ = p.nc.Flush()
}

func (p *plane) beat(m *nats.Msg) any {
	var b wire.Beat
	if err := p.keys.Open(wire.BeatType, 1<<20, m.Data, &b); err != nil {
		return wire.BeatReply{Reason: err.Error()}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mute {
		return nil
	}
	p.beats = append(p.beats, b)
	raised := p.raised
	p.raised = nil
	return wire.BeatReply{OK: true, Raised: raised}
}

func (p *plane) claim(m *nats.Msg) any {
	var c wire.Claim
	if err := p.keys.Open(wire.ClaimType, 1<<20, m.Data, &c); err != nil {
		return wire.ClaimReply{Taken: true, Reason: err.Error()}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claims = append(p.claims, c)
	if p.answer != nil {
		return p.answer(c)
	}
	if p.owned[c.Session] >= c.Epoch {
		return wire.ClaimReply{Taken: true}
	}
	p.owned[c.Session] = c.Epoch
	return wire.ClaimReply{Order: p.seal(p.start(c.Session, c.Epoch))}
}

func (p *plane) start(session string, epoch int64) wire.Order {
	o := p.order(wire.OrderStart, session, epoch)
	o.Start = &wire.Start{Policy: p.policy, PolicyDigest: "sha256:x"}
	return o
}

// order is a good order; tests spoil it.
func (p *plane) order(kind wire.OrderKind, session string, epoch int64) wire.Order {
	p.next++
	now := time.Now().UnixMilli()
	return wire.Order{
		V: wire.Version, JTI: fmt.Sprintf("jti_%d", p.next), Kind: kind, Runner: "r1", Incarnation: "inc1",
		IssuedAt: now, ExpiresAt: now + 30_000, Workspace: "ws", Session: session, Epoch: epoch,
	}
}

func (p *plane) call(session, id string) wire.Order {
	o := p.order(wire.OrderCall, session, 1)
	o.Call = &wire.Call{ID: id, Run: "run_1", Program: "bash", Script: []byte("true")}
	return o
}

func (p *plane) about(kind wire.OrderKind, session, id string) wire.Order {
	o := p.order(kind, session, 1)
	o.Target = id
	return o
}

func (p *plane) seal(o wire.Order) []byte {
	data, err := p.signer.Seal(wire.OrderType, o)
	if err != nil {
		p.t.Error(err)
	}
	return data
}

// ask sends bytes to the runner and returns its answer.
func (p *plane) ask(data []byte) wire.OrderReply {
	p.t.Helper()
	m, err := p.nc.Request(bus.Order("r1"), data, 5*time.Second)
	if err != nil {
		p.t.Fatal(err)
	}
	var r wire.OrderReply
	if err := strictjson.Decode(m.Data, &r); err != nil {
		p.t.Fatal(err)
	}
	return r
}

func (p *plane) tell(o wire.Order) wire.OrderReply {
	p.t.Helper()
	return p.ask(p.seal(o))
}

func (p *plane) ticket(session string, epoch int64) {
	p.t.Helper()
	data, _ := strictjson.Encode(wire.Ticket{V: wire.Version, Session: session, Epoch: epoch})
	if _, err := p.js.Publish(context.Background(), bus.Start("default"), data); err != nil {
		p.t.Fatal(err)
	}
}

func (p *plane) until(what string, ok func() bool) {
	p.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// live brings a session to the runner.
func (r *rig) live(session string) {
	r.t.Helper()
	r.ticket(session, 1)
	r.until("the start of "+session, func() bool { return r.worker.did(fmt.Sprintf("start %s 1", session)) == 1 })
}

func TestTicketBecomesASession(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	if len(r.claims) != 1 || r.claims[0].Runner != "r1" || r.claims[0].Incarnation != "inc1" || r.claims[0].Epoch != 1 {
		t.Errorf("got %+v", r.claims)
	}
	if reply := r.tell(r.call("ses_1", "call_1")); !reply.Accepted {
		t.Errorf("got %+v", reply)
	}
	r.until("the call", func() bool { return r.worker.started("call_1") == 1 })
	r.until("an empty queue", func() bool {
		s, err := r.js.Stream(t.Context(), bus.Tickets)
		return err == nil && s.CachedInfo().State.Msgs == 0
	})
	r.until("a beat that holds it", func() bool {
		r.plane.mu.Lock()
		defer r.plane.mu.Unlock()
		b := r.beats[len(r.beats)-1]
		return len(b.Sessions) == 1 && b.Sessions[0].Session == "ses_1" && b.Used == 1 && b.Slots == 4 && b.Pool == "default"
	})
}

func TestATicketTwiceIsOneSession(t *testing.T) {
	r := newRig(t, func(in *Intake) { in.Slots = 3 })
	r.live("ses_1")
	r.ticket("ses_1", 1)
	r.ticket("ses_2", 1)
	r.until("the next session", func() bool { return r.worker.did("start ses_2 1") == 1 })
	if n := r.worker.did("start ses_1 1"); n != 1 {
		t.Errorf("started %d times", n)
	}
	r.live("ses_3") // the doubled ticket's slot is free again
}

func TestNoTicketIsPulledWithoutAFreeSlot(t *testing.T) {
	r := newRig(t, func(in *Intake) { in.Slots = 2 })
	r.live("ses_1")
	r.live("ses_2")
	r.ticket("ses_3", 1)
	time.Sleep(200 * time.Millisecond)
	if r.worker.did("start ses_3 1") != 0 {
		t.Fatal("a third session on two slots")
	}
	if reply := r.tell(r.order(wire.OrderStop, "ses_1", 1)); !reply.Accepted {
		t.Errorf("got %+v", reply)
	}
	r.until("the third session", func() bool { return r.worker.did("start ses_3 1") == 1 })
}

func TestTakenSessionsFreeTheirSlot(t *testing.T) {
	r := newRig(t, func(in *Intake) { in.Slots = 1 })
	r.plane.mu.Lock()
	r.answer = func(c wire.Claim) wire.ClaimReply {
		if strings.HasPrefix(c.Session, "taken") {
			return wire.ClaimReply{Taken: true}
		}
		return wire.ClaimReply{Order: r.seal(r.start(c.Session, c.Epoch))}
	}
	r.plane.mu.Unlock()
	for i := range 5 {
		r.ticket(fmt.Sprintf("taken_%d", i), 1)
	}
	r.ticket("ses_1", 1)
	r.until("the free session", func() bool { return r.worker.did("start ses_1 1") == 1 })
}

func TestForgedStartsStartNothing(t *testing.T) {
	other := signer(t)
	for _, tt := range []struct {
		name, code string
		reply      func(r *rig, c wire.Claim) []byte
	}{
		{"unsigned", "malformed", func(r *rig, c wire.Claim) []byte {
			data, _ := strictjson.Encode(r.start(c.Session, c.Epoch))
			return data
		}},
		{"another key", "unknown_key", func(r *rig, c wire.Claim) []byte {
			data, _ := other.Seal(wire.OrderType, r.start(c.Session, c.Epoch))
			return data
		}},
		{"another session", "epoch", func(r *rig, c wire.Claim) []byte { return r.seal(r.start("ses_other", c.Epoch)) }},
		{"another epoch", "epoch", func(r *rig, c wire.Claim) []byte { return r.seal(r.start(c.Session, c.Epoch+1)) }},
		{"not a start", "epoch", func(r *rig, c wire.Claim) []byte { return r.seal(r.call(c.Session, "call_1")) }},
		{"another runner's", "audience", func(r *rig, c wire.Claim) []byte {
			o := r.start(c.Session, c.Epoch)
			o.Runner = "r2"
			return r.seal(o)
		}},
		{"expired", "expired", func(r *rig, c wire.Claim) []byte {
			o := r.start(c.Session, c.Epoch)
			o.IssuedAt, o.ExpiresAt = o.IssuedAt-120_000, o.IssuedAt-90_000
			return r.seal(o)
		}},
		{"memory over the ceiling", "ceiling", func(r *rig, c wire.Claim) []byte {
			o := r.start(c.Session, c.Epoch)
			o.Start.Policy.MemoryMB = 1_000_000
			return r.seal(o)
		}},
		{"a host path", "ceiling", func(r *rig, c wire.Claim) []byte {
			o := r.start(c.Session, c.Epoch)
			o.Start.Policy.FSAllowlist = []string{"/workspace", "/etc"}
			return r.seal(o)
		}},
		{"a field of another protocol", "payload", func(r *rig, c wire.Claim) []byte {
			return r.rawSealed(withField(t, r.start(c.Session, c.Epoch), "mounts", []string{"/etc"}))
		}},
		{"huge", "size", func(*rig, wire.Claim) []byte { return make([]byte, wire.MaxOrder+1) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, func(in *Intake) { in.Slots = 1 })
			r.plane.mu.Lock()
			r.answer = func(c wire.Claim) wire.ClaimReply {
				if c.Session == "ses_good" {
					return wire.ClaimReply{Order: r.seal(r.start(c.Session, c.Epoch))}
				}
				return wire.ClaimReply{Order: tt.reply(r, c)}
			}
			r.plane.mu.Unlock()
			r.ticket("ses_bad", 1)
			r.ticket("ses_good", 1) // comes only if the slot was freed
			r.until("the good session", func() bool { return r.worker.did("start ses_good 1") == 1 })
			if n := r.worker.did("start ses_bad 1"); n != 0 || r.in.Rejects()[tt.code] != 1 {
				t.Errorf("started %d times; rejects %v", n, r.in.Rejects())
			}
			if want := tt.code == "ceiling"; (len(r.worker.failures) == 1 && r.worker.failures[0].Code == "policy_unenforceable") != want {
				t.Errorf("reported %+v", r.worker.failures)
			}
		})
	}
}

// withField is an order's JSON with one member more.
func withField(t *testing.T, o wire.Order, name string, v any) []byte {
	t.Helper()
	data, err := strictjson.Encode(o)
	if err != nil {
		t.Fatal(err)
	}
	member, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return append(data[:len(data)-1], fmt.Appendf(nil, ",%q:%s}", name, member)...)
}

// envelopeOf is a sealed order taken apart.
type envelopeOf struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

func respell(t *testing.T, sealed []byte, edit func(*envelopeOf)) []byte {
	t.Helper()
	var e envelopeOf
	if err := json.Unmarshal(sealed, &e); err != nil {
		t.Fatal(err)
	}
	edit(&e)
	data, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestBadOrdersLeaveACodeAndNoCall(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	other := signer(t)
	edited := func(edit func(*wire.Order)) []byte {
		o := r.call("ses_1", "call_bad")
		edit(&o)
		return r.seal(o)
	}
	good := func() []byte { return edited(func(*wire.Order) {}) }
	for _, tt := range []struct {
		name, code string
		data       []byte
	}{
		{"empty", "malformed", nil},
		{"not JSON", "malformed", []byte("hello")},
		{"unsigned", "malformed", sealNone(r.call("ses_1", "call_bad"))},
		{"no signature", "malformed", respell(t, good(), func(e *envelopeOf) { e.Signatures = nil })},
		{"many signatures", "malformed", respell(t, good(), func(e *envelopeOf) {
			for range 1000 {
				e.Signatures = append(e.Signatures, e.Signatures[0])
			}
		})},
		{"an unknown key", "unknown_key", func() []byte { d, _ := other.Seal(wire.OrderType, r.call("ses_1", "call_bad")); return d }()},
		{"the runner's own key", "unknown_key", func() []byte { d, _ := r.in.Signer.Seal(wire.OrderType, r.call("ses_1", "call_bad")); return d }()},
		{"our key's name on another signature", "signature", respell(t, func() []byte { d, _ := other.Seal(wire.OrderType, r.call("ses_1", "call_bad")); return d }(), func(e *envelopeOf) {
			e.Signatures[0].KeyID = envelope.KeyID(r.signer.Public())
		})},
		{"signed as a report", "type", func() []byte { d, _ := r.signer.Seal(wire.ReportType, r.call("ses_1", "call_bad")); return d }()},
		{"a report's type put on it", "type", respell(t, good(), func(e *envelopeOf) { e.PayloadType = wire.ReportType })},
		{"an order's type put on a report", "signature", respell(t, func() []byte { d, _ := r.signer.Seal(wire.ReportType, r.call("ses_1", "call_bad")); return d }(), func(e *envelopeOf) {
			e.PayloadType = wire.OrderType
		})},
		{"no type", "type", respell(t, good(), func(e *envelopeOf) { e.PayloadType = "" })},
		{"payload in the URL alphabet", "malformed", respell(t, good(), func(e *envelopeOf) {
			raw, _ := base64.StdEncoding.DecodeString(e.Payload)
			e.Payload = base64.RawURLEncoding.EncodeToString(append(raw, '\n', '?', '>'))
		})},
		{"too large", "size", bytes.Repeat([]byte(" "), wire.MaxOrder+1)},
		{"deep JSON", "malformed", []byte(strings.Repeat("[", 100_000))},
		{"an unknown field", "payload", r.rawSealed(withField(t, r.call("ses_1", "call_bad"), "env", map[string]string{"LD_PRELOAD": "x"}))},
		{"a field twice", "payload", r.rawSealed(withField(t, r.call("ses_1", "call_bad"), "jti", "again"))},
		{"trailing bytes", "payload", r.rawSealed(append(withField(t, r.call("ses_1", "call_bad"), "target", ""), []byte("{}")...))},
		{"a field in capitals", "payload", r.rawSealed(withField(t, r.call("ses_1", "call_bad"), "JTI", "x"))},
		{"times as text", "payload", r.rawSealed(bytes.Replace(mustEncode(t, r.call("ses_1", "call_bad")), []byte(`"exp":`), []byte(`"exp":"1","x":`), 1))},
		{"times as fractions", "payload", r.rawSealed([]byte(`{"v":1,"jti":"j","kind":"call","iat":1.5}`))},
		{"audience as a list", "payload", r.rawSealed([]byte(`{"v":1,"jti":"j","kind":"call","runner":["r1"]}`))},
		{"another version", "version", edited(func(o *wire.Order) { o.V = wire.Version + 1 })},
		{"another runner", "audience", edited(func(o *wire.Order) { o.Runner = "r2" })},
		{"the last start", "audience", edited(func(o *wire.Order) { o.Incarnation = "inc0" })},
		{"no audience", "audience", edited(func(o *wire.Order) { o.Runner, o.Incarnation = "", "" })},
		{"expired", "expired", edited(func(o *wire.Order) { o.IssuedAt -= 120_000; o.ExpiresAt -= 120_000 })},
		{"in the future", "future", edited(func(o *wire.Order) { o.IssuedAt += 40_000; o.ExpiresAt += 40_000 })},
		{"an hour of life", "bad_time", edited(func(o *wire.Order) { o.ExpiresAt += 3_600_000 })},
		{"an unknown session", "unknown_session", edited(func(o *wire.Order) { o.Session = "ses_9" })},
		{"a lower epoch", "payload", edited(func(o *wire.Order) { o.Epoch = 0 })},
		{"a higher epoch", "epoch", edited(func(o *wire.Order) { o.Epoch = 2 })},
		{"a start that was not claimed", "unclaimed", r.seal(r.start("ses_7", 1))},
		{"an unknown program", "ceiling", edited(func(o *wire.Order) { o.Call.ID = "call_c1"; o.Call.Program = "/bin/sh" })},
		{"ten thousand bytes too many", "ceiling", edited(func(o *wire.Order) {
			o.Call.ID, o.Call.InArgv, o.Call.Script = "call_c2", true, make1(wire.MaxArgvElement+10_000)
		})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := r.in.Rejects()[tt.code]
			began := time.Now()
			reply := r.ask(tt.data)
			if reply.Accepted || reply.Code != tt.code || reply.Reason == "" {
				t.Errorf("got %+v", reply)
			}
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Errorf("took %v", took)
			}
			if got := r.in.Rejects()[tt.code]; got != before+1 {
				t.Errorf("counted %d times", got-before)
			}
		})
	}
	if n := r.worker.total(); n != 0 {
		t.Fatalf("%d calls ran", n)
	}
	if reply := r.tell(r.call("ses_1", "call_good")); !reply.Accepted {
		t.Errorf("a good order after all that: %+v", reply)
	}
}

func sealNone(o wire.Order) []byte { data, _ := strictjson.Encode(o); return data }

func mustEncode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := strictjson.Encode(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// rawSealed signs bytes that no encoder would write, with the plane's bare key.
func (p *plane) rawSealed(payload []byte) []byte {
	sig := ed25519.Sign(p.key, dsse.PAE(wire.OrderType, payload))
	data, _ := json.Marshal(envelopeOf{
		PayloadType: wire.OrderType,
		Payload:     base64.StdEncoding.EncodeToString(payload),
		Signatures:  []signature{{KeyID: envelope.KeyID(p.signer.Public()), Sig: base64.StdEncoding.EncodeToString(sig)}},
	})
	return data
}

func TestEveryFlippedBitIsRefused(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	sealed := r.seal(r.call("ses_1", "call_1"))
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1 << (i % 7)
		if reply := r.ask(bad); reply.Accepted {
			t.Fatalf("byte %d flipped: %+v", i, reply)
		}
	}
	if n := r.worker.total(); n != 0 {
		t.Fatalf("%d calls ran", n)
	}
	if reply := r.ask(sealed); !reply.Accepted {
		t.Errorf("the untouched order: %+v", reply)
	}
}

func TestReplaysStartNothing(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	sealed := r.seal(r.call("ses_1", "call_1"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[string]int{}
	for range 50 {
		wg.Go(func() {
			reply := r.ask(sealed)
			mu.Lock()
			defer mu.Unlock()
			if reply.Accepted {
				codes["accepted"]++
			}
			codes[reply.Code]++
		})
	}
	wg.Wait()
	if codes["accepted"] != 1 || codes["duplicate"] != 49 {
		t.Errorf("got %v", codes)
	}
	r.until("the call", func() bool { return r.worker.started("call_1") == 1 })
	r.worker.over["call_1"]()
	if reply := r.ask(sealed); reply.Code != "duplicate" {
		t.Errorf("after its end: %+v", reply)
	}
	for name, spelled := range map[string][]byte{
		"a space in front": append([]byte(" "), sealed...),
		"line breaks":      respell(t, sealed, func(e *envelopeOf) { e.Payload = e.Payload[:8] + "\r\n" + e.Payload[8:] }),
	} {
		if reply := r.ask(spelled); reply.Code != "duplicate" {
			t.Errorf("with %s: %+v", name, reply)
		}
	}
	if reply := r.tell(r.call("ses_1", "call_1")); reply.Code != "duplicate" {
		t.Errorf("the same call in another order: %+v", reply)
	}
	if n := r.worker.started("call_1"); n != 1 {
		t.Errorf("started %d times", n)
	}
}

func TestRefusedOrdersCannotBeReplayedLater(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	r.worker.mu.Lock()
	r.worker.refuse = &execution.Refused{Code: "capacity", Reason: "full"}
	r.worker.mu.Unlock()
	sealed := r.seal(r.call("ses_1", "call_1"))
	if reply := r.ask(sealed); reply.Code != "capacity" {
		t.Fatalf("got %+v", reply)
	}
	early := r.seal(r.call("ses_2", "call_2"))
	if reply := r.ask(early); reply.Code != "unknown_session" {
		t.Fatalf("got %+v", reply)
	}
	r.worker.mu.Lock()
	r.worker.refuse = nil
	r.worker.mu.Unlock()
	r.live("ses_2")
	for _, data := range [][]byte{sealed, early} {
		if reply := r.ask(data); reply.Code != "duplicate" {
			t.Errorf("got %+v", reply)
		}
	}
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); reply.State != "unknown" {
		t.Errorf("status of a refused call: %+v", reply)
	}
	if n := r.worker.total(); n != 0 {
		t.Errorf("%d calls ran", n)
	}
}

func TestAnotherRunnersOrderIsRefused(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	second := newWorker()
	in := &Intake{
		Conn: r.srv.Connect(t), Keys: r.in.Keys, Signer: r.in.Signer, Work: second,
		To: Audience{"r2", "inc2"}, Pool: "default", Slots: 1, Ceilings: ceilings, BeatEvery: time.Second, Now: time.Now, Log: bustest.Quiet(),
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- in.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	r.until("the second runner", func() bool { return in.heard.Load() != nil })
	sealed := r.seal(r.call("ses_1", "call_1"))
	m, err := r.nc.Request(bus.Order("r2"), sealed, 5*time.Second)
	if err != nil || !strings.Contains(string(m.Data), `"audience"`) {
		t.Errorf("got %s, %v", m.Data, err)
	}
	if reply := r.ask(sealed); !reply.Accepted {
		t.Errorf("got %+v", reply)
	}
	if second.total() != 0 {
		t.Error("the second runner ran it")
	}
}

func TestStatusAndCancelLeaveATombstone(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	delayed := r.seal(r.call("ses_1", "call_1"))
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); !reply.Accepted || reply.State != "unknown" {
		t.Errorf("got %+v", reply)
	}
	if reply := r.ask(delayed); reply.Accepted || reply.Code != "cancelled" {
		t.Errorf("got %+v", reply)
	}
	delayed = r.seal(r.call("ses_1", "call_2"))
	if reply := r.tell(r.about(wire.OrderCancel, "ses_1", "call_2")); !reply.Accepted || reply.State != "unknown" {
		t.Errorf("got %+v", reply)
	}
	if reply := r.ask(delayed); reply.Accepted {
		t.Errorf("got %+v", reply)
	}
	if n := r.worker.total(); n != 0 {
		t.Errorf("%d calls ran", n)
	}
}

func TestStatusFollowsTheCall(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	r.tell(r.call("ses_1", "call_1"))
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); reply.State != "running" {
		t.Errorf("got %+v", reply)
	}
	if reply := r.tell(r.about(wire.OrderCancel, "ses_1", "call_1")); !reply.Accepted || reply.State != "running" {
		t.Errorf("got %+v", reply)
	}
	r.until("the cancel", func() bool { return r.worker.did("cancel call_1") == 1 })
	r.until("the call", func() bool { return r.worker.started("call_1") == 1 })
	r.worker.over["call_1"]()
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); reply.State != "done" {
		t.Errorf("got %+v", reply)
	}
	r.tell(r.order(wire.OrderStop, "ses_1", 1))
	r.until("the stop", func() bool { return r.worker.did("stop ses_1 1") == 1 })
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); reply.State != "done" {
		t.Errorf("after the session: %+v", reply)
	}
	if reply := r.tell(r.call("ses_1", "call_2")); reply.Code != "unknown_session" {
		t.Errorf("a call after the session: %+v", reply)
	}
}

func TestDrainOrderTakesNoMoreSessions(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	if reply := r.tell(r.order(wire.OrderDrain, "", 0)); !reply.Accepted {
		t.Fatalf("got %+v", reply)
	}
	r.ticket("ses_2", 1)
	time.Sleep(300 * time.Millisecond)
	if r.worker.did("start ses_2 1") != 0 {
		t.Error("a session was started")
	}
	if reply := r.tell(r.call("ses_1", "call_1")); !reply.Accepted {
		t.Errorf("a call of a session that is here: %+v", reply)
	}
	r.until("a beat that says so", func() bool {
		r.plane.mu.Lock()
		defer r.plane.mu.Unlock()
		return r.beats[len(r.beats)-1].Draining
	})
}

func TestShutdownRefusesCallsAndSaysGoodbye(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	r.in.Drain()
	if reply := r.tell(r.call("ses_1", "call_1")); reply.Code != "draining" {
		t.Errorf("got %+v", reply)
	}
	if reply := r.tell(r.about(wire.OrderStatus, "ses_1", "call_1")); !reply.Accepted {
		t.Errorf("status while draining: %+v", reply)
	}
	r.worker.Stop(wire.Held{Session: "ses_1", Epoch: 1})
	r.stop()
	r.plane.mu.Lock()
	defer r.plane.mu.Unlock()
	if last := r.beats[len(r.beats)-1]; !last.Leaving || !last.Draining || len(last.Sessions) != 0 {
		t.Errorf("the last beat is %+v", last)
	}
}

func TestSilenceStopsNewCallsAndLaterTheSandboxes(t *testing.T) {
	r := newRig(t, func(in *Intake) { in.Unheard, in.KeepUnheard = 300*time.Millisecond, time.Second })
	r.live("ses_1")
	r.plane.mu.Lock()
	r.mute = true
	r.plane.mu.Unlock()
	time.Sleep(500 * time.Millisecond)
	if reply := r.tell(r.call("ses_1", "call_1")); reply.Code != "unheard" {
		t.Errorf("got %+v", reply)
	}
	if r.worker.did("abandon ses_1 1") != 0 {
		t.Error("the sandbox was closed too early")
	}
	r.until("the end of the sandbox", func() bool { return r.worker.did("abandon ses_1 1") == 1 })
	r.plane.mu.Lock()
	r.mute = false
	r.plane.mu.Unlock()
	r.until("a heard beat", func() bool { return r.in.silence() < 300*time.Millisecond })
	r.live("ses_2")
	if reply := r.tell(r.call("ses_2", "call_2")); !reply.Accepted {
		t.Errorf("after it was heard again: %+v", reply)
	}
}

func TestRaisedSessionsEnd(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	r.plane.mu.Lock()
	r.raised = []wire.Held{{Session: "ses_1", Epoch: 1}}
	r.plane.mu.Unlock()
	r.until("the end", func() bool { return r.worker.did("raise ses_1 1") == 1 })
}

func TestTicketsComeAgainAfterTheBusWasAway(t *testing.T) {
	r := newRig(t, nil)
	r.live("ses_1")
	r.srv.Stop()
	time.Sleep(200 * time.Millisecond)
	r.srv.Restart(t)
	r.until("the bus", func() bool { return r.nc.IsConnected() && r.runner.IsConnected() })
	r.until("the stream", func() bool { _, err := r.js.Stream(t.Context(), bus.Tickets); return err == nil })
	r.live("ses_2")
	if reply := r.tell(r.call("ses_2", "call_1")); !reply.Accepted {
		t.Errorf("got %+v", reply)
	}
}

func TestMalformedTicketsAreDropped(t *testing.T) {
	r := newRig(t, func(in *Intake) { in.Slots = 1 })
	for _, data := range []string{"", "{}", `{"v":1,"session":"ses_1","epoch":1}`, `{"v":2,"session":"a.b","epoch":1}`, `{"v":2,"session":"ses_1","epoch":1,"x":1}`} {
		if _, err := r.js.Publish(t.Context(), bus.Start("default"), []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	r.live("ses_2")
	if len(r.claims) != 1 || r.in.Rejects()["ticket"] != 5 {
		t.Errorf("%d claims, rejects %v", len(r.claims), r.in.Rejects())
	}
}

func BenchmarkDecide(b *testing.B) {
	s, own := signer(b), signer(b)
	in := &Intake{Keys: envelope.NewKeys(s.Public()), Signer: own, Work: newWorker(), To: Audience{"r1", "inc1"}, Slots: 1, Now: time.Now, Log: bustest.Quiet()}
	in.prepare()
	now := time.Now()
	in.heard.Store(&now)
	in.Unheard = time.Hour
	in.memory.open(wire.Held{Session: "ses_1", Epoch: 1})
	p := &plane{signer: s}
	sealed := make([][]byte, 0, 2000)
	for i := range 2000 {
		sealed = append(sealed, p.seal(p.call("ses_1", fmt.Sprintf("call_%d", i))))
	}
	i := 0
	for b.Loop() {
		in.decide(bus.Order("r1"), sealed[i%len(sealed)])
		i++
	}
}

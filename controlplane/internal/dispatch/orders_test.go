package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

func (r *runner) session(id string) session.Session {
	return session.Session{ID: id, Workspace: "w1", Runner: r.id, Incarnation: r.incarnation, Epoch: 1}
}

func (r *runner) call(id string) run.Call {
	return run.Call{ID: id, Run: "run_1", Session: "ses_1", Workspace: "w1", Epoch: 1, Runner: r.id, Incarnation: r.incarnation}
}

func TestATicketLeadsToASealedStart(t *testing.T) {
	r := newRig(t)
	r.s.policy = policy.Policy{FSAllowlist: []string{"/workspace"}, MemoryMB: 64, WallClockSeconds: 5, BaseImage: "img"}
	one, two := r.runner("r1"), r.runner("r2")
	if err := r.d.Announce(t.Context(), session.Session{ID: "ses_1", Epoch: 3}); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Announce(t.Context(), session.Session{ID: "ses_1", Epoch: 3}); err != nil {
		t.Fatal(err)
	}
	pool, err := one.js.Consumer(t.Context(), bus.Tickets, bus.PoolConsumer("default"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := pool.Next(jetstream.FetchMaxWait(2 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.DoubleAck(t.Context()); err != nil {
		t.Fatal(err)
	}
	var ticket wire.Ticket
	if err := strictjson.Decode(m.Data(), &ticket); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Next(jetstream.FetchMaxWait(100 * time.Millisecond)); err == nil {
		t.Error("the same epoch was announced twice and gave two tickets")
	}
	reply := one.claim(ticket.Session, ticket.Epoch)
	var o wire.Order
	if err := envelope.NewKeys(r.public).Open(wire.OrderType, wire.MaxOrder, reply.Order, &o); err != nil {
		t.Fatalf("start order: %v (%+v)", err, reply)
	}
	if o.Kind != wire.OrderStart || o.Runner != "r1" || o.Incarnation != one.incarnation || o.Session != "ses_1" || o.Epoch != 3 || o.Workspace != "w1" {
		t.Errorf("start order is for somebody else: %+v", o)
	}
	if life := o.ExpiresAt - o.IssuedAt; life <= 0 || life > wire.MaxLifeMS {
		t.Errorf("start order lives %d ms", life)
	}
	if o.Start.Policy.MemoryMB != 64 || o.Start.PolicyDigest != r.s.policy.Digest() || o.Start.Policy.NetworkAllowlist == nil {
		t.Errorf("start carries %+v", o.Start)
	}
	if got := two.claim(ticket.Session, ticket.Epoch); !got.Taken || got.Order != nil {
		t.Errorf("the second claim got %+v, want taken", got)
	}
}

func TestForgedClaimsAreRefusedAndRecorded(t *testing.T) {
	r := newRig(t)
	good, evil := r.runner("r1"), r.runner("evil")
	stranger := *good
	stranger.signer = evil.signer
	plain, _ := strictjson.Encode(wire.Claim{V: wire.Version, Runner: "r1", Session: "ses_1", Epoch: 1})
	claim := func(w *runner, change func(*wire.Claim)) []byte {
		c := wire.Claim{V: wire.Version, Runner: "r1", Incarnation: w.incarnation, Session: "ses_1", Epoch: 1, At: time.Now().UnixMilli()}
		change(&c)
		return w.seal(wire.ClaimType, c)
	}
	same := func(*wire.Claim) {}
	cases := map[string]struct {
		subject string
		data    []byte
		reason  string
	}{
		"unsigned":              {bus.Claim("r1"), plain, "malformed"},
		"empty":                 {bus.Claim("r1"), nil, "malformed"},
		"another runner's key":  {bus.Claim("r1"), claim(&stranger, same), "unknown_key"},
		"another's subject":     {bus.Claim("evil"), claim(good, same), "unknown_key"},
		"speaks as another":     {bus.Claim("evil"), claim(evil, same), "runner"},
		"unknown runner":        {bus.Claim("nobody"), claim(good, same), "unknown_key"},
		"path as a name":        {"bw.claim.nobody/x", claim(good, same), "unknown_key"},
		"sealed as a report":    {bus.Claim("r1"), good.seal(wire.ReportType, wire.Claim{V: wire.Version}), "type"},
		"other version":         {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.V = wire.Version + 1 }), "version"},
		"too old":               {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.At -= 31_000 }), "time"},
		"from the future":       {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.At += 31_000 }), "time"},
		"no time":               {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.At = 0 }), "time"},
		"epoch 0":               {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.Epoch = 0 }), "form"},
		"wildcard session":      {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.Session = "*" }), "form"},
		"no incarnation":        {bus.Claim("r1"), claim(good, func(c *wire.Claim) { c.Incarnation = "" }), "form"},
		"unknown field":         {bus.Claim("r1"), good.seal(wire.ClaimType, map[string]any{"v": 1, "root": true}), "payload"},
		"too large":             {bus.Claim("r1"), good.seal(wire.ClaimType, map[string]any{"session": string(big(maxClaim))}), "size"},
		"one byte of signature": {bus.Claim("r1"), flip(claim(good, same)), "signature"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			before := r.s.audited("claim_rejected", c.reason)
			var reply wire.ClaimReply
			evil.ask(c.subject, c.data, &reply)
			if !reply.Taken || reply.Reason != c.reason || reply.Order != nil {
				t.Errorf("answer %+v, want taken for %s", reply, c.reason)
			}
			if r.s.audited("claim_rejected", c.reason) != before+1 {
				t.Error("no record was written")
			}
		})
	}
	if n := len(r.s.claims); n != 0 {
		t.Errorf("%d forged claims reached the sessions", n)
	}
}

// flip changes one byte inside the signature.
func flip(data []byte) []byte {
	i := bytes.Index(data, []byte(`"sig":"`)) + len(`"sig":"`) + 10
	out := bytes.Clone(data)
	if out[i] == 'A' {
		out[i] = 'B'
	} else {
		out[i] = 'A'
	}
	return out
}

func TestACallOrderSaysWhatToRunAndForWhom(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	got := w.orders(accept)
	reply, err := r.d.Call(t.Context(), w.session("ses_1"), w.call("call_1"), tool.Invocation{Program: "bash", Script: "echo hi", InArgv: true})
	if err != nil || !reply.Accepted {
		t.Fatalf("call: %+v, %v", reply, err)
	}
	if _, err := r.d.Call(t.Context(), w.session("ses_1"), w.call("call_2"), tool.Invocation{Program: "file_write", Path: "/workspace/a", Content: "text"}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []func(context.Context, session.Session, string) (run.Reply, error){r.d.Cancel, r.d.Status} {
		if reply, err := f(t.Context(), w.session("ses_1"), "call_1"); err != nil || reply.State != "running" {
			t.Errorf("reply %+v, %v", reply, err)
		}
	}
	if err := r.d.Stop(t.Context(), w.session("ses_1")); err != nil {
		t.Error(err)
	}
	orders := got.all()
	kinds, ids := []wire.OrderKind{wire.OrderCall, wire.OrderCall, wire.OrderCancel, wire.OrderStatus, wire.OrderStop}, map[string]bool{}
	if len(orders) != len(kinds) {
		t.Fatalf("%d orders, want %d", len(orders), len(kinds))
	}
	for i, o := range orders {
		if o.Kind != kinds[i] || o.V != wire.Version || o.Runner != "r1" || o.Incarnation != w.incarnation || o.Session != "ses_1" || o.Epoch != 1 || o.Workspace != "w1" {
			t.Errorf("order %d: %+v", i, o)
		}
		if life := o.ExpiresAt - o.IssuedAt; life <= 0 || life > wire.MaxLifeMS {
			t.Errorf("order %d lives %d ms", i, life)
		}
		ids[o.JTI] = true
	}
	if len(ids) != len(orders) {
		t.Error("a jti was used twice")
	}
	if c := orders[0].Call; c.ID != "call_1" || c.Run != "run_1" || c.Program != "bash" || string(c.Script) != "echo hi" || !c.InArgv {
		t.Errorf("call %+v", c)
	}
	if c := orders[1].Call; c.Program != "file_write" || c.Path != "/workspace/a" || string(c.Script) != "text" {
		t.Errorf("file call %+v", c)
	}
	if orders[2].Target != "call_1" || orders[3].Target != "call_1" {
		t.Error("cancel and status do not name the call")
	}
}

func TestALargeScriptTravelsAsABlobThatOnlyItsRunnerReads(t *testing.T) {
	r := newRig(t)
	w, other := r.runner("r1"), r.runner("r2")
	got := w.orders(accept)
	script := big(wire.MaxInline*3 + 17)
	if _, err := r.d.Call(t.Context(), w.session("ses_1"), w.call("call_1"), tool.Invocation{Program: "python3", Script: string(script)}); err != nil {
		t.Fatal(err)
	}
	o := got.all()[0]
	if o.Call.Script != nil || o.Call.Blob == nil || len(got.raw[0]) > 8<<10 {
		t.Fatalf("order of %d bytes with blob %+v", len(got.raw[0]), o.Call.Blob)
	}
	var all []byte
	for n := 0; int64(len(all)) < o.Call.Blob.Size; n++ {
		var chunk wire.BlobReply
		q, _ := strictjson.Encode(wire.BlobRequest{Op: "get", ID: o.Call.Blob.ID, N: n})
		w.ask(bus.Blob("r1"), q, &chunk)
		if !chunk.OK {
			t.Fatalf("chunk %d: %s", n, chunk.Reason)
		}
		all = append(all, chunk.Data...)
		var stolen wire.BlobReply
		other.ask(bus.Blob("r2"), q, &stolen)
		if stolen.OK || stolen.Reason != "not_found" {
			t.Errorf("another runner got %+v", stolen)
		}
	}
	if sum := sha256.Sum256(all); hex.EncodeToString(sum[:]) != o.Call.Blob.SHA256 || !bytes.Equal(all, script) {
		t.Error("the blob is not the script")
	}
}

func TestBlobRequestsThatCanNotBe(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	cases := map[string]struct {
		q      wire.BlobRequest
		reason string
	}{
		"op":             {wire.BlobRequest{Op: "drop", ID: "b"}, "op"},
		"wildcard":       {wire.BlobRequest{Op: "get", ID: "*"}, "name"},
		"another's":      {wire.BlobRequest{Op: "get", ID: "r2.b"}, "name"},
		"negative chunk": {wire.BlobRequest{Op: "put", ID: "b", N: -1}, "name"},
		"past the cap":   {wire.BlobRequest{Op: "put", ID: "b", N: wire.MaxBlob / wire.BlobChunk}, "name"},
		"large chunk":    {wire.BlobRequest{Op: "put", ID: "b", Data: big(wire.BlobChunk + 1)}, "size"},
		"huge request":   {wire.BlobRequest{Op: "put", ID: "b", Data: big(wire.BlobChunk * 2)}, "size"},
		"not there":      {wire.BlobRequest{Op: "get", ID: "b"}, "not_found"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			data, _ := strictjson.Encode(c.q)
			var reply wire.BlobReply
			w.ask(bus.Blob("r1"), data, &reply)
			if reply.OK || reply.Reason != c.reason {
				t.Errorf("%+v, want %s", reply, c.reason)
			}
		})
	}
}

func TestAnOrderNobodyHeardWaitsForItsRunner(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	type answer struct {
		reply run.Reply
		err   error
	}
	back := make(chan answer, 1)
	go func() {
		reply, err := r.d.Call(t.Context(), w.session("ses_1"), w.call("call_1"), tool.Invocation{Program: "bash", Script: "true"})
		back <- answer{reply, err}
	}()
	time.Sleep(150 * time.Millisecond)
	got := w.orders(accept)
	a := <-back
	if a.err != nil || !a.reply.Accepted || len(got.all()) != 1 {
		t.Errorf("%+v, %v, %d orders; want one accepted order", a.reply, a.err, len(got.all()))
	}
}

func TestARunnerThatIsNotThereIsKnownToHaveNothing(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	reply, err := r.d.Call(ctx, w.session("ses_1"), w.call("call_1"), tool.Invocation{Program: "bash", Script: "true"})
	if err != nil || reply.Accepted || reply.Code != codeUnreachable {
		t.Errorf("%+v, %v; want unreachable", reply, err)
	}
	if _, err := r.d.Status(t.Context(), w.session("ses_1"), "call_1"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("status of a runner that is not there: %v", err)
	}
}

func TestAnAnswerThatNeverComesIsAnError(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	if _, err := w.nc.Subscribe(bus.Order("r1"), func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	if err := w.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if reply, err := r.d.Call(ctx, w.session("ses_1"), w.call("call_1"), tool.Invocation{Program: "bash", Script: "true"}); err == nil {
		t.Errorf("silence gave %+v", reply)
	}
}

func TestBeatsReachTheFleetAndBringBackWhatWasRaised(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	r.s.raise = append(r.s.raise, heldOf("ses_9", 2))
	reply := w.beat(func(b *wire.Beat) {
		b.Pool, b.Slots, b.Used, b.Draining = "gpu", 8, 3, true
		b.Sessions = []wire.Held{{Session: "ses_9", Epoch: 2}}
		b.Calls = []string{"call_1"}
	})
	if !reply.OK || len(reply.Raised) != 1 || reply.Raised[0] != (wire.Held{Session: "ses_9", Epoch: 2}) {
		t.Fatalf("beat: %+v", reply)
	}
	b := r.s.beats[0]
	if b.Runner.ID != "r1" || b.Runner.Pool != "gpu" || b.Runner.Slots != 8 || b.Runner.Used != 3 || !b.Draining || b.Sessions[0] != heldOf("ses_9", 2) {
		t.Errorf("fleet heard %+v", b)
	}
	if _, err := w.js.Consumer(t.Context(), bus.Tickets, bus.PoolConsumer("gpu")); err != nil {
		t.Errorf("the runner's pool has no consumer: %v", err)
	}
}

func TestForgedAndOldBeatsAreRefused(t *testing.T) {
	r := newRig(t)
	w, evil := r.runner("r1"), r.runner("evil")
	first := wire.Beat{V: wire.Version, Runner: "r1", Incarnation: "old", At: time.Now().UnixMilli() - 1000, Pool: "default"}
	old := w.seal(wire.BeatType, first)
	var reply wire.BeatReply
	w.ask(bus.Beat("r1"), old, &reply)
	if !reply.OK {
		t.Fatalf("first beat: %+v", reply)
	}
	if !w.beat().OK {
		t.Fatal("second beat")
	}
	evil.ask(bus.Beat("r1"), old, &reply)
	if reply.OK || reply.Reason != "replay" {
		t.Errorf("an old beat of a past start got %+v", reply)
	}
	evil.ask(bus.Beat("r1"), evil.seal(wire.BeatType, first), &reply)
	if reply.OK || reply.Reason != "unknown_key" {
		t.Errorf("a beat under another's key got %+v", reply)
	}
	if reply = w.beat(func(b *wire.Beat) { b.Slots = -1 }); reply.OK {
		t.Error("negative slots were taken")
	}
	if reply = w.beat(func(b *wire.Beat) { b.Pool = "a.b" }); reply.OK {
		t.Error("a pool with a dot was taken")
	}
	if n := len(r.s.beats); n != 2 {
		t.Errorf("fleet heard %d beats, want 2", n)
	}
}

func TestAKeyCountsFromTheMessageAfterItWasPutThere(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	if !w.beat().OK {
		t.Fatal("first key")
	}
	again := r.runner("r1") // writes a new key file
	if again.beat().OK != true {
		t.Error("the new key does not count")
	}
	if w.beat().OK {
		t.Error("the replaced key still counts")
	}
}

package e2e

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// attacker holds a connection to the bus and, for some cases, stolen keys.
type attacker struct {
	s       *stack
	nc      *nats.Conn
	cp      *envelope.Signer // the control plane's key
	runner  *envelope.Signer // the runner's own key
	nobody  *envelope.Signer
	session string
	epoch   int64
	boot    string // the runner's incarnation
	n       int
}

func newAttacker(t *testing.T, s *stack) *attacker {
	t.Helper()
	access, err := bus.LoadAccess(filepath.Join(s.data, "access.json"))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(access.URL, nats.UserInfo(access.User, access.Password))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	load := func(path string) *envelope.Signer {
		p, err := envelope.LoadPrivate(filepath.Join(s.data, path))
		if err != nil {
			t.Fatal(err)
		}
		return envelope.NewSigner(p.Sign)
	}
	_, key, _ := ed25519.GenerateKey(nil)
	a := &attacker{s: s, nc: nc, cp: load("keys/controlplane.key"), runner: load("runner/runner.key"), nobody: envelope.NewSigner(key)}
	a.session = s.session()
	wantStatus(t, s.sh(a.session, "true"), "ok")
	a.epoch = int64(s.get("/v1/agent-sessions/" + a.session).num("epoch"))
	a.boot = s.incarnation()
	return a
}

// order is a valid call order that leaves a witness.
func (a *attacker) order() wire.Order {
	a.n++
	id := fmt.Sprintf("call_attack%d", a.n)
	now := time.Now().UnixMilli()
	return wire.Order{
		V: wire.Version, JTI: fmt.Sprintf("jti-attack-%d-%d", now, a.n), Kind: wire.OrderCall, Runner: "r1", Incarnation: a.boot,
		IssuedAt: now, ExpiresAt: now + 30_000, Workspace: "default", Session: a.session, Epoch: a.epoch,
		Call: &wire.Call{ID: id, Run: "run_attack", Program: "bash", Script: []byte("echo " + id + " >> w")},
	}
}

// send delivers bytes to the runner and returns its reply.
func (a *attacker) send(t *testing.T, data []byte) wire.OrderReply {
	t.Helper()
	msg, err := a.nc.Request(bus.Order("r1"), data, 3*time.Second)
	if err != nil {
		return wire.OrderReply{Code: "no answer: " + err.Error()}
	}
	var r wire.OrderReply
	if err := json.Unmarshal(msg.Data, &r); err != nil {
		t.Fatalf("reply %q: %v", msg.Data, err)
	}
	return r
}

func seal(t *testing.T, s *envelope.Signer, typ string, v any) []byte {
	t.Helper()
	data, err := s.Seal(typ, v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestOnlyTrustedOrdersRun(t *testing.T) {
	s := start(t, options{tier: cluster})
	a := newAttacker(t, s)

	good := a.order()
	if r := a.send(t, seal(t, a.cp, wire.OrderType, good)); !r.Accepted {
		t.Fatalf("a valid order was refused: %+v", r)
	}
	eventually(t, 5*time.Second, "the valid order ran", func() error {
		if s.witnesses()[good.Call.ID] != 1 {
			return fmt.Errorf("witnesses: %v", s.witnesses())
		}
		return nil
	})

	change := func(f func(*wire.Order)) []byte {
		o := a.order()
		f(&o)
		return seal(t, a.cp, wire.OrderType, o)
	}
	plain, _ := strictjson.Encode(a.order())
	flipped := seal(t, a.cp, wire.OrderType, a.order())
	flipped[bytes.Index(flipped, []byte(`"payload":"`))+40] ^= 1
	var loose map[string]any
	_ = json.Unmarshal(plain, &loose)
	loose["host_path"] = "/etc"
	for name, data := range map[string][]byte{
		"unsigned":               plain,
		"unknown key":            seal(t, a.nobody, wire.OrderType, a.order()),
		"the runner's own key":   seal(t, a.runner, wire.OrderType, a.order()),
		"a byte changed":         flipped,
		"another type":           seal(t, a.cp, wire.ReportType, a.order()),
		"type swapped":           bytes.Replace(seal(t, a.cp, wire.ReportType, a.order()), []byte(wire.ReportType), []byte(wire.OrderType), 1),
		"an unknown field":       seal(t, a.cp, wire.OrderType, loose),
		"expired":                change(func(o *wire.Order) { o.IssuedAt -= 120_000; o.ExpiresAt -= 120_000 }),
		"from the future":        change(func(o *wire.Order) { o.IssuedAt += 120_000; o.ExpiresAt += 120_000 }),
		"a long life":            change(func(o *wire.Order) { o.ExpiresAt = o.IssuedAt + 3_600_000 }),
		"ends before it begins":  change(func(o *wire.Order) { o.ExpiresAt = o.IssuedAt - 1 }),
		"seconds for millis":     change(func(o *wire.Order) { o.IssuedAt /= 1000; o.ExpiresAt /= 1000 }),
		"negative times":         change(func(o *wire.Order) { o.IssuedAt = -1; o.ExpiresAt = -1 }),
		"another runner":         change(func(o *wire.Order) { o.Runner = "r2" }),
		"case of the runner":     change(func(o *wire.Order) { o.Runner = "R1" }),
		"no audience":            change(func(o *wire.Order) { o.Runner, o.Incarnation = "", "" }),
		"another start":          change(func(o *wire.Order) { o.Incarnation = "0123456789abcdef" }),
		"a lower epoch":          change(func(o *wire.Order) { o.Epoch-- }),
		"a higher epoch":         change(func(o *wire.Order) { o.Epoch++ }),
		"another session":        change(func(o *wire.Order) { o.Session = "ses_other" }),
		"another workspace":      change(func(o *wire.Order) { o.Workspace = "other" }),
		"another version":        change(func(o *wire.Order) { o.V = wire.Version + 1 }),
		"no id":                  change(func(o *wire.Order) { o.JTI = "" }),
		"no call":                change(func(o *wire.Order) { o.Call = nil }),
		"an unknown program":     change(func(o *wire.Order) { o.Call.Program = "/bin/sh" }),
		"the same id again":      change(func(o *wire.Order) { o.JTI = good.JTI }),
		"the same call, changed": change(func(o *wire.Order) { o.Call.ID = good.Call.ID; o.Call.Script = []byte("echo again >> w") }),
		"a start over ceilings": change(func(o *wire.Order) {
			o.Kind, o.Call, o.Session = wire.OrderStart, nil, "ses_start"
			o.Start = &wire.Start{PolicyDigest: "sha256:0", Policy: wire.Policy{FSAllowlist: []string{"/workspace"}, CPUShares: 1024, MemoryMB: 1e6, PIDsLimit: 1e6, WallClockSeconds: 60, OutputBytesLimit: 1 << 20, BaseImage: "bigwave/sandbox-base:latest"}}
		}),
		"too large":      append(seal(t, a.cp, wire.OrderType, a.order()), bytes.Repeat([]byte{' '}, wire.MaxOrder)...),
		"deep":           []byte(strings.Repeat("[", 100_000)),
		"trailing bytes": append(seal(t, a.cp, wire.OrderType, a.order()), "{}"...),
		"empty":          {},
	} {
		began := time.Now()
		r := a.send(t, data)
		if r.Accepted || r.Code == "" {
			t.Errorf("%s: got %+v", name, r)
		}
		if took := time.Since(began); took > 200*time.Millisecond {
			t.Errorf("%s: took %v", name, took)
		}
	}
	time.Sleep(500 * time.Millisecond)
	for call, n := range s.witnesses() {
		if call != good.Call.ID || n != 1 {
			t.Errorf("%s ran %d times", call, n)
		}
	}
	wantStatus(t, s.sh(a.session, "true"), "ok")
}

func TestAReplayedOrderRunsOnce(t *testing.T) {
	s := start(t, options{tier: cluster})
	a := newAttacker(t, s)
	sub, err := a.nc.SubscribeSync(bus.Order("r1"))
	if err != nil {
		t.Fatal(err)
	}
	run := s.begin(a.session, "echo real >> w; sleep 1")
	msg, err := sub.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	// Until the true one was taken, a copy may win the race; still one start.
	eventually(t, 5*time.Second, "it began", func() error {
		if n := s.witnesses()["real"]; n != 1 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	replay := func(when, code string) {
		t.Helper()
		for range 3 {
			if r := a.send(t, msg.Data); r.Accepted || r.Code != code {
				t.Errorf("%s: got %+v, want %s", when, r, code)
			}
		}
	}
	replay("while it runs", "duplicate")
	wantStatus(t, s.final(a.session, run, 10*time.Second).list("calls")[0], "ok")
	replay("after its end", "duplicate")
	if n := s.witnesses()["real"]; n != 1 {
		t.Errorf("it ran %d times", n)
	}
	s.restartRunner(syscall.SIGKILL)
	replay("after a restart", "audience")
	time.Sleep(300 * time.Millisecond)
	if n := s.witnesses()["real"]; n != 0 {
		t.Errorf("it ran again")
	}
}

func TestForgedResultsAreRefused(t *testing.T) {
	s := start(t, options{tier: cluster})
	a := newAttacker(t, s)
	run := s.begin(a.session, "sleep 3; echo real; exit 4")
	eventually(t, 5*time.Second, "it runs", func() error {
		if st := s.get("/v1/agent-sessions/" + a.session + "/runs/" + run).list("calls")[0].str("status"); st != "running" {
			return fmt.Errorf("it is %q", st)
		}
		return nil
	})
	sub, err := a.nc.SubscribeSync(bus.Frame("r1", a.session))
	if err != nil {
		t.Fatal(err)
	}
	call := s.openCall(t, a, sub, run)
	zero := 0
	report := func(f func(*wire.Report)) wire.Report {
		r := wire.Report{V: wire.Version, Kind: wire.CallDone, Runner: "r1", Incarnation: a.boot, Session: a.session, Epoch: a.epoch,
			At: time.Now().UnixMilli(), Run: run, Call: call, Done: &wire.Done{Status: "ok", ExitCode: &zero, Stdout: []byte("forged")}}
		f(&r)
		return r
	}
	for name, msg := range map[string]struct {
		subject string
		data    []byte
	}{
		"unsigned":              {bus.Final("r1", a.session), []byte(`{"kind":"call.done"}`)},
		"another key":           {bus.Final("r1", a.session), seal(t, a.nobody, wire.ReportType, report(func(*wire.Report) {}))},
		"the control plane":     {bus.Final("r1", a.session), seal(t, a.cp, wire.ReportType, report(func(*wire.Report) {}))},
		"as the control plane":  {bus.Final(bus.ControlPlane, a.session), seal(t, a.runner, wire.ReportType, report(func(*wire.Report) {}))},
		"another runner's name": {bus.Final("r2", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Runner = "r2" }))},
		"another start":         {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Incarnation = "0123" }))},
		"an old epoch":          {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Epoch-- }))},
		"another session":       {bus.Final("r1", "ses_other"), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Session = "ses_other" }))},
		"an open status":        {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Done.Status = "running" }))},
		"negative usage":        {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Done.CPUMS = -1 }))},
		"too much output":       {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) { r.Done.OutputSizes = [3]int64{1 << 40, 0, 0} }))},
		"a blob that is not there": {bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(r *wire.Report) {
			r.Call = "call_unknown"
			r.Done.Output = &wire.Blob{ID: "none", Size: 5, SHA256: strings.Repeat("0", 64)}
		}))},
	} {
		if err := a.nc.Publish(msg.subject, msg.data); err != nil {
			t.Fatal(err)
		}
		_ = a.nc.Flush()
		time.Sleep(30 * time.Millisecond)
		if got := s.get("/v1/agent-sessions/" + a.session + "/runs/" + run).list("calls")[0]; got.str("status") != "running" {
			t.Fatalf("%s: the call became %v", name, got)
		}
	}
	c := s.final(a.session, run, 10*time.Second).list("calls")[0]
	if c.str("status") != "error" || c.str("stdout") != "real\n" || c.num("exit_code") != 4 {
		t.Errorf("got %v", c)
	}
	// A second final of the true runner does not change the first.
	if err := a.nc.Publish(bus.Final("r1", a.session), seal(t, a.runner, wire.ReportType, report(func(*wire.Report) {}))); err != nil {
		t.Fatal(err)
	}
	_ = a.nc.Flush()
	time.Sleep(300 * time.Millisecond)
	if c := s.get("/v1/agent-sessions/" + a.session + "/runs/" + run).list("calls")[0]; c.str("status") != "error" {
		t.Errorf("the second final won: %v", c)
	}
}

// openCall learns our own id of a run's open call, as one who listens on the
// bus would.
func (s *stack) openCall(t *testing.T, a *attacker, sub *nats.Subscription, run string) string {
	t.Helper()
	_ = sub.Unsubscribe()
	js, err := a.nc.JetStream()
	if err != nil {
		t.Fatal(err)
	}
	old, err := js.SubscribeSync(bus.Frame("r1", a.session), nats.OrderedConsumer(), nats.DeliverAll())
	if err != nil {
		t.Fatal(err)
	}
	defer old.Unsubscribe()
	for {
		msg, err := old.NextMsg(3 * time.Second)
		if err != nil {
			t.Fatalf("no frame of run %s: %v", run, err)
		}
		if msg.Header.Get(bus.HeaderRun) == run {
			return msg.Header.Get(bus.HeaderCall)
		}
	}
}

func TestTheRunnersLoginCannotGiveOrders(t *testing.T) {
	s := start(t, options{})
	access, err := bus.LoadAccess(filepath.Join(s.data, "nats", "runner.json"))
	if err != nil {
		t.Fatal(err)
	}
	denied := make(chan error, 16)
	nc, err := nats.Connect(access.URL, nats.UserInfo(access.User, access.Password),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { denied <- err }))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	for _, subject := range []string{bus.Order("r1"), bus.Start("default"), bus.Final(bus.ControlPlane, "ses_x"), "$JS.API.STREAM.PURGE." + bus.Events, "$JS.API.STREAM.DELETE." + bus.Tickets} {
		if err := nc.Publish(subject, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		_ = nc.Flush()
		select {
		case err := <-denied:
			if !strings.Contains(strings.ToLower(err.Error()), "permissions violation") {
				t.Errorf("%s: %v", subject, err)
			}
		case <-time.After(2 * time.Second):
			t.Errorf("a runner may publish to %s", subject)
		}
	}
	if nc2, err := nats.Connect(access.URL); err == nil {
		nc2.Close()
		t.Error("the bus lets anyone in")
	}
}

package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

func heldOf(id string, epoch int64) fleet.Held { return fleet.Held{Session: id, Epoch: epoch} }

func TestReportsMoveSessionsAndRuns(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	w.report(w.done("ses_1", "", func(p *wire.Report) {
		p.Kind, p.Run, p.Done, p.Sandbox = wire.SessionStarted, "", nil, &wire.Sandbox{Backend: "subprocess"}
	}))
	limit := int64(64)
	w.report(w.done("ses_1", "call_1", func(p *wire.Report) {
		p.Done.Status, p.Done.ExitCode = "oom_killed", nil
		p.Done.Stderr, p.Done.OOMKills, p.Done.MemoryPeak, p.Done.CPUMS = []byte{0xff, 0}, 2, 99, 0.5
		p.Done.Error = &wire.Error{Code: "memory_limit", Message: "too much", Limit: &limit}
		p.Done.Denials = []wire.Denial{{Kind: "file", Target: "/etc", Reason: "no"}}
	}))
	w.report(w.done("ses_1", "", func(p *wire.Report) {
		p.Kind, p.Run, p.Done, p.Failure = wire.SessionEnded, "", nil, &wire.Failure{Code: "stopped", Message: "as asked"}
	}))
	w.report(w.done("ses_2", "", func(p *wire.Report) {
		p.Kind, p.Run, p.Done = wire.SessionFailed, "", nil
		p.Failure = &wire.Failure{Code: "policy_unenforceable", Field: "network_allowlist", Message: "can't"}
	}))
	eventually(t, "all four are told", func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return len(r.s.started) == 1 && len(r.s.outcomes) == 1 && len(r.s.ended) == 1 && len(r.s.failed) == 1
	})
	if r.s.ended[0] != "ses_1|stopped|as asked" || r.s.failed[0] != "policy_unenforceable|network_allowlist|can't" {
		t.Errorf("ended %q, failed %q", r.s.ended, r.s.failed)
	}
	o := r.s.outcomes[0]
	if o.Runner != "r1" || o.Incarnation != w.incarnation || o.Session != "ses_1" || o.Epoch != 1 || o.Run != "run_1" || o.Call != "call_1" || o.Status != run.OOMKilled {
		t.Errorf("outcome %+v", o)
	}
	res := o.Result
	if string(res.Stdout) != "out\n" || !bytes.Equal(res.Stderr, []byte{0xff, 0}) || res.ExitCode != nil || res.OOMKills != 2 || res.MemoryPeak != 99 ||
		res.CPUMS != 0.5 || *res.Error.Limit != 64 || res.Denials[0].Target != "/etc" || res.Retryable {
		t.Errorf("result %+v", res)
	}
	eventually(t, "all are acknowledged", r.settled)
}

// settled reports whether all reports were dealt with.
func (r *rig) settled() bool {
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
	defer cancel()
	return r.d.Settled(ctx) == nil
}

func TestForgedReportsAreNotApplied(t *testing.T) {
	r := newRig(t)
	w, evil := r.runner("r1"), r.runner("evil")
	w.own("ses_1", 2)
	at := func(change func(*wire.Report)) wire.Report {
		return w.done("ses_1", "call_x", func(p *wire.Report) { p.Epoch = 2; change(p) })
	}
	same := func(*wire.Report) {}
	signed := func(change func(*wire.Report)) []byte { return w.seal(wire.ReportType, at(change)) }
	final := bus.Final("r1", "ses_1")
	unsigned, _ := strictjson.Encode(at(same))
	raw := func(done string) []byte {
		return w.sealRaw(`{"v":1,"kind":"call.done","runner":"r1","incarnation":"` + w.incarnation +
			`","session":"ses_1","epoch":2,"at":1,"run":"run_1","call":"call_x","done":` + done + `}`)
	}
	cases := map[string]struct {
		subject string
		data    []byte
		action  string // "" when the services record it
		reason  string
	}{
		"unsigned":              {final, unsigned, "result_rejected", "malformed"},
		"wrong key":             {final, evil.seal(wire.ReportType, at(same)), "result_rejected", "unknown_key"},
		"one byte of signature": {final, flip(signed(same)), "result_rejected", "signature"},
		"sealed as a beat":      {final, w.seal(wire.BeatType, at(same)), "result_rejected", "type"},
		"on another's subject":  {bus.Final("evil", "ses_1"), evil.seal(wire.ReportType, at(same)), "result_rejected", "runner"},
		"on another session's":  {bus.Final("r1", "ses_2"), signed(same), "result_rejected", "form"},
		"other version":         {final, signed(func(p *wire.Report) { p.V = 9 }), "result_rejected", "version"},
		"old epoch":             {final, signed(func(p *wire.Report) { p.Epoch = 1 }), "", ""},
		"other incarnation":     {final, signed(func(p *wire.Report) { p.Incarnation = "other" }), "", ""},
		"not final":             {final, signed(func(p *wire.Report) { p.Done.Status = "running" }), "result_rejected", "status"},
		"invented status":       {final, signed(func(p *wire.Report) { p.Done.Status = "great" }), "result_rejected", "status"},
		"invented code":         {final, signed(func(p *wire.Report) { p.Done.Error = &wire.Error{Code: "<b>"} }), "result_rejected", "form"},
		"negative bytes":        {final, signed(func(p *wire.Report) { p.Done.StdoutBytes = -1 }), "result_rejected", "usage"},
		"negative peak":         {final, signed(func(p *wire.Report) { p.Done.MemoryPeak = -1 }), "result_rejected", "usage"},
		"negative time":         {final, signed(func(p *wire.Report) { p.Done.CPUMS = -0.1 }), "result_rejected", "usage"},
		"endless time":          {final, signed(func(p *wire.Report) { p.Done.DurationMS = 1e300 }), "result_rejected", "usage"},
		"NaN":                   {final, w.sealRaw(`{"v":1,"done":{"cpu_ms":NaN}}`), "result_rejected", "payload"},
		"overflowing number":    {final, raw(`{"status":"ok","output_sizes":[0,0,0],"stdout_bytes":1e400,"stderr_bytes":0,"duration_ms":0,"cpu_ms":0,"memory_peak_bytes":0,"oom_kills":0}`), "result_rejected", "payload"},
		"unknown field":         {final, raw(`{"status":"ok","verified":true}`), "result_rejected", "payload"},
		"duplicate field":       {final, raw(`{"status":"ok","status":"error"}`), "result_rejected", "payload"},
		"too much inline":       {final, signed(func(p *wire.Report) { p.Done.Stdout = big(wire.MaxInlineDone + 1) }), "result_rejected", "output_size"},
		"a blob over the cap":   {final, signed(blobOf(wire.Blob{ID: "b", Size: wire.MaxBlob + 1})), "result_rejected", "output_size"},
		"parts beyond the whole": {final, signed(func(p *wire.Report) {
			blobOf(wire.Blob{ID: "b", Size: 4})(p)
			p.Done.OutputSizes = [3]int64{1 << 62, 1 << 62, 1 << 62}
		}), "result_rejected", "output_size"},
		"parts of nothing":        {final, signed(func(p *wire.Report) { p.Done.OutputSizes = [3]int64{1 << 40, 0, 0} }), "result_rejected", "output_size"},
		"another runner's blob":   {final, signed(blobOf(wire.Blob{ID: "evil.b", Size: 4})), "result_rejected", "output_size"},
		"a start with a result":   {final, signed(func(p *wire.Report) { p.Kind = wire.SessionStarted }), "result_rejected", "form"},
		"a result without result": {final, signed(func(p *wire.Report) { p.Done = nil }), "result_rejected", "form"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			before := r.s.audited(c.action, c.reason)
			evil.publish(c.subject, c.data)
			eventually(t, "the report is settled", r.settled)
			if c.action != "" && r.s.audited(c.action, c.reason) != before+1 {
				t.Errorf("no %s record for %s; records: %+v", c.action, c.reason, r.s.audits)
			}
			if got := r.s.outcomesOf("call_x"); len(got) != 0 {
				t.Fatalf("it was applied: %+v", got)
			}
		})
	}
	evil.publish(final, signed(same)) // whoever carries it, the signature counts
	eventually(t, "the true report is applied", func() bool { return len(r.s.outcomesOf("call_x")) == 1 })
	w.report(at(func(p *wire.Report) { p.Done.Status = "error" }))
	w.report(at(same))
	eventually(t, "second finals are settled", r.settled)
	if got := r.s.outcomesOf("call_x"); len(got) != 1 || got[0].Status != run.OK {
		t.Errorf("a second final changed the result: %+v", got)
	}
}

func blobOf(b wire.Blob) func(*wire.Report) {
	return func(p *wire.Report) {
		p.Done.Stdout, p.Done.Output, p.Done.OutputSizes = nil, &b, [3]int64{b.Size, 0, 0}
	}
}

func (r *runner) put(id string, data []byte) wire.Blob {
	r.t.Helper()
	for n := range chunks(int64(len(data))) {
		q, _ := strictjson.Encode(wire.BlobRequest{Op: "put", ID: id, N: n, Data: data[n*wire.BlobChunk : min((n+1)*wire.BlobChunk, len(data))]})
		var reply wire.BlobReply
		r.ask(bus.Blob(r.id), q, &reply)
		if !reply.OK {
			r.t.Fatalf("put chunk %d: %s", n, reply.Reason)
		}
	}
	sum := sha256.Sum256(data)
	return wire.Blob{ID: id, Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
}

func TestLargeOutputComesAsABlob(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	out, errs, value := big(600<<10), []byte("warning"), big(3)
	b := w.put("out-1", append(append(bytes.Clone(out), errs...), value...))
	w.report(w.done("ses_1", "call_1", func(p *wire.Report) {
		p.Done.Stdout, p.Done.Output, p.Done.OutputSizes = nil, &b, [3]int64{int64(len(out)), int64(len(errs)), int64(len(value))}
	}))
	eventually(t, "the outcome is applied", func() bool { return len(r.s.outcomesOf("call_1")) == 1 })
	res := r.s.outcomesOf("call_1")[0].Result
	if !bytes.Equal(res.Stdout, out) || !bytes.Equal(res.Stderr, errs) || !bytes.Equal(res.Value, value) || !res.HasValue {
		t.Errorf("output of %d, %d and %d bytes", len(res.Stdout), len(res.Stderr), len(res.Value))
	}
	eventually(t, "the blob is dropped", func() bool {
		s, err := r.d.JS.Stream(t.Context(), bus.Blobs)
		return err == nil && s.CachedInfo().State.Msgs == 0
	})
}

func TestOutputThatIsNotWhatWasSignedIsNeverShown(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	for call, spoil := range map[string]func(wire.Blob) wire.Blob{
		"call_hash":    func(b wire.Blob) wire.Blob { b.SHA256 = hex.EncodeToString(make([]byte, 32)); return b },
		"call_short":   func(b wire.Blob) wire.Blob { b.Size--; return b },
		"call_long":    func(b wire.Blob) wire.Blob { b.Size++; return b },
		"call_missing": func(b wire.Blob) wire.Blob { b.ID = "nothing"; return b },
	} {
		w.report(w.done("ses_1", call, blobOf(spoil(w.put("out-"+call, []byte("true output"))))))
		eventually(t, "the outcome is known", func() bool { return len(r.s.outcomesOf(call)) == 1 })
		o := r.s.outcomesOf(call)[0]
		if o.Status != run.Error || o.Result.Error.Code != string(fault.ResultUnavailable) || len(o.Result.Stdout) != 0 {
			t.Errorf("%s: %+v", call, o)
		}
	}
	if n := r.s.audited("result_rejected", "output_hash"); n != 4 {
		t.Errorf("%d records, want 4", n)
	}
}

func TestReportsWaitForTheDatabase(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	r.s.setDown(fault.New(fault.Unavailable, "the database is away"))
	for _, call := range []string{"call_1", "call_2", "call_3"} {
		w.report(w.done("ses_1", call))
	}
	time.Sleep(300 * time.Millisecond)
	if n := len(r.s.outcomes); n != 0 {
		t.Fatalf("%d outcomes while the database was away", n)
	}
	r.s.setDown(nil)
	eventually(t, "all three are applied", func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return len(r.s.outcomes) == 3
	})
	for i, call := range []string{"call_1", "call_2", "call_3"} {
		if r.s.outcomes[i].Call != call {
			t.Errorf("outcome %d is %s", i, r.s.outcomes[i].Call)
		}
	}
}

func TestReportsThatCameWhileNobodyListenedAreTakenLater(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	r.s.setDown(fault.New(fault.Unavailable, "the database is away"))
	w.report(w.done("ses_1", "call_1"))
	time.Sleep(100 * time.Millisecond)
	r.stop() // with a report in hand
	w.report(w.done("ses_1", "call_2"))
	r.s.setDown(nil)
	r.startDispatcher()
	eventually(t, "both are applied", func() bool {
		return len(r.s.outcomesOf("call_1")) == 1 && len(r.s.outcomesOf("call_2")) == 1
	})
}

func TestTheBusMayBeRestarted(t *testing.T) {
	for name, wipe := range map[string]bool{"with its store": false, "with an empty store": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			w := r.runner("r1")
			w.own("ses_1", 1)
			w.report(w.done("ses_1", "call_1"))
			eventually(t, "the first is applied", func() bool { return len(r.s.outcomesOf("call_1")) == 1 })
			r.nats.Close()
			eventually(t, "the break is noticed", func() bool { _, hears := r.d.Hearing(); return !hears && r.d.Ready(t.Context()) != nil })
			if wipe {
				if err := os.RemoveAll(filepath.Join(r.dir, "nats", "jetstream")); err != nil {
					t.Fatal(err)
				}
			}
			r.startBus()
			eventually(t, "dispatcher is ready again", func() bool {
				_, hears := r.d.Hearing()
				return hears && r.d.Ready(t.Context()) == nil && w.nc.IsConnected()
			})
			eventually(t, "streams are there again", r.settled)
			w.report(w.done("ses_1", "call_2"))
			eventually(t, "the second is applied", func() bool { return len(r.s.outcomesOf("call_2")) == 1 })
			if err := r.d.Announce(t.Context(), w.session("ses_1")); err != nil {
				t.Errorf("announce: %v", err)
			}
			if !w.beat().OK {
				t.Error("beat")
			}
			if n := len(r.s.outcomes); n != 2 {
				t.Errorf("%d outcomes, want 2", n)
			}
		})
	}
}

func TestNoticesReachTheOtherReplicas(t *testing.T) {
	r := newRig(t)
	first, heardByFirst := r.d, r.s
	r.s = &services{owners: heardByFirst.owners}
	r.startDispatcher()
	first.Notify("ses_1", run.Notice{Kind: run.RunFinished, Run: "run_1"})
	eventually(t, "the other replica hears it", func() bool {
		r.s.mu.Lock()
		defer r.s.mu.Unlock()
		return len(r.s.heard) == 1 && r.s.heard[0] == run.Notice{Kind: run.RunFinished, Run: "run_1"}
	})
	if len(heardByFirst.heard) != 0 {
		t.Error("a replica heard its own notice")
	}
}

func TestAFloodOfForgeriesDoesNotFloodTheRecord(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	const forgeries = 5 * recordsPerSenderMinute
	for range forgeries {
		w.publish(bus.Final("r1", "ses_1"), []byte("junk"))
	}
	eventually(t, "all are settled", r.settled)
	if n := r.s.audited("result_rejected", "malformed"); n < recordsPerSenderMinute || n > 2*recordsPerSenderMinute { // a minute may begin
		t.Errorf("%d records of %d forgeries", n, forgeries)
	}
	all := prometheus.NewRegistry()
	all.MustRegister(r.d.Rejects)
	families, err := all.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if n := families[0].Metric[0].Counter.GetValue(); n != forgeries {
		t.Errorf("counted %v of %d", n, forgeries)
	}
}

func TestSettledWaitsForWhatIsOnTheStream(t *testing.T) {
	r := newRig(t)
	w := r.runner("r1")
	w.own("ses_1", 1)
	if err := r.d.Settled(t.Context()); err != nil {
		t.Fatalf("on an empty stream: %v", err)
	}
	r.s.setDown(fault.New(fault.Unavailable, "the database is away"))
	w.report(w.done("ses_1", "call_1"))
	w.frame(wire.Frame{Run: "run_1", Call: "call_1", Kind: wire.FrameOutput, N: 1}, "ses_1")
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := r.d.Settled(short); err == nil {
		t.Error("settled while a report waits for the database")
	}
	r.s.setDown(nil)
	if err := r.d.Settled(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(r.s.outcomesOf("call_1")); n != 1 {
		t.Errorf("settled with %d outcomes", n)
	}
}

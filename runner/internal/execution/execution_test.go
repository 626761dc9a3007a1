package execution

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/bustest"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/stream"
	"github.com/bigwave/bigwave/shared/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSessionStartsRunsAndStops(t *testing.T) {
	r := newRig(t)
	over := make(chan struct{})
	if err := r.Start(startOrder("ses_1", 1), func() { close(over) }); err != nil {
		t.Fatal(err)
	}
	started := r.inbox.wait(t, wire.SessionStarted, "")
	if started.Runner != "r1" || started.Incarnation != "i1" || started.Epoch != 1 || started.V != wire.Version || started.At == 0 ||
		started.Sandbox.PolicyDigest != "sha256:x" || started.Sandbox.Backend != "fake" || started.Sandbox.Enforced["base_image"] != "host" {
		t.Errorf("got %+v, %+v", started, started.Sandbox)
	}
	done := r.do(t, "ses_1", "call_1", "hello")
	if done.Status != "ok" || string(done.Stdout) != "hello\n" || done.ExitCode == nil || *done.ExitCode != 0 || done.StdoutBytes != 6 || done.StartedAt == 0 || done.DurationMS != 2 {
		t.Errorf("got %+v", done)
	}
	if err := r.Start(startOrder("ses_1", 1), func() {}); err == nil {
		t.Error("the session was started twice")
	}
	r.Stop(wire.Held{Session: "ses_1", Epoch: 1})
	if ended := r.inbox.wait(t, wire.SessionEnded, ""); ended.Failure.Code != "stopped" {
		t.Errorf("got %+v", ended.Failure)
	}
	<-over
	if _, err := r.Call(callOrder("ses_1", 1, "call_2", "true"), func() {}); refusedCode(err) != "unknown_session" {
		t.Errorf("a call after the end: %v", err)
	}
}

func refusedCode(err error) string {
	if r, ok := errors.AsType[*Refused](err); ok {
		return r.Code
	}
	return ""
}

func TestFramesGoLiveBeforeTheReport(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.do(t, "ses_1", "call_1", "hello")
	r.inbox.mu.Lock()
	defer r.inbox.mu.Unlock()
	if len(r.inbox.frames) != 2 || r.inbox.frames[0].Kind != wire.FrameStarted || string(r.inbox.frames[1].Data) != "hello\n" {
		t.Errorf("got %+v", r.inbox.frames)
	}
}

func TestFailedStartSaysWhyAndCounts(t *testing.T) {
	for _, tt := range []struct {
		name        string
		err         error
		code, field string
		secret      string
		counts      int
	}{
		{"policy", &sandbox.StartError{Code: "policy_unenforceable", Field: "fs_allowlist", Message: "no mount for /data", Cause: errors.New("hidden")}, "policy_unenforceable", "fs_allowlist", "hidden", 0}, // asked for wrongly, not failed
		{"other", errors.New("/var/lib/secret: broken"), "start_failed", "", "/var/lib", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			r.machine.broken = tt.err
			over := make(chan struct{})
			if err := r.Start(startOrder("ses_1", 1), func() { close(over) }); err != nil {
				t.Fatal(err)
			}
			f := r.inbox.wait(t, wire.SessionFailed, "").Failure
			<-over
			if f.Code != tt.code || f.Field != tt.field || strings.Contains(f.Message, tt.secret) || f.Message == "" {
				t.Errorf("got %+v", f)
			}
			if l := r.Load(); l.StartFailures != tt.counts || (l.StartFailure == f.Message) != (tt.counts > 0) {
				t.Errorf("%d failures, %q", l.StartFailures, l.StartFailure)
			}
			r.machine.broken = nil
			r.live(t, "ses_2")
			if l := r.Load(); l.StartFailures != 0 || l.StartFailure != "" {
				t.Error("failures in a row are counted on after a success")
			}
		})
	}
}

func TestStopWhileStarting(t *testing.T) {
	for range 100 {
		r := newRig(t)
		r.machine.startUp = time.Duration(rand.IntN(2000)) * time.Microsecond
		over := make(chan struct{})
		if err := r.Start(startOrder("ses_1", 1), func() { close(over) }); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		r.Stop(wire.Held{Session: "ses_1", Epoch: 1})
		<-over
		if n := r.inbox.count(wire.SessionEnded, "") + r.inbox.count(wire.SessionFailed, ""); n != 1 {
			t.Fatalf("%d ends", n)
		}
	}
}

func TestCancelEndsTheCallOnceAndKeepsItsOutput(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.begin(t, callOrder("ses_1", 1, "call_1", "hang"))
	time.Sleep(10 * time.Millisecond)
	for range 3 {
		r.Cancel(wire.Held{Session: "ses_1", Epoch: 1}, "call_1")
	}
	done := r.inbox.wait(t, wire.CallDone, "call_1").Done
	if done.Status != "cancelled" || done.Error.Code != "cancelled" || string(done.Stdout) != "begun\n" {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
	if r.do(t, "ses_1", "call_2", "hello").Status != "ok" {
		t.Error("the session does not go on")
	}
}

func TestCancelAtAnyMomentGivesExactlyOneReport(t *testing.T) {
	r := newRig(t)
	r.MaxCalls = 1000
	r.machine.scripts["short"] = func(ctx context.Context, _ sandbox.Process, _ *box) sandbox.Exit {
		select {
		case <-time.After(time.Duration(rand.IntN(1000)) * time.Microsecond):
			return sandbox.Exit{Reason: sandbox.Exited}
		case <-ctx.Done():
			return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1}
		}
	}
	r.live(t, "ses_1")
	const calls = 300
	var wg sync.WaitGroup
	for i := range calls {
		id := fmt.Sprintf("call_%d", i)
		run, err := r.Call(callOrder("ses_1", 1, id, "short"), wg.Done)
		if err != nil {
			t.Fatal(err)
		}
		wg.Add(1)
		run()
		wg.Go(func() {
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
			r.Cancel(wire.Held{Session: "ses_1", Epoch: 1}, id)
		})
	}
	wg.Wait()
	for i := range calls {
		id := fmt.Sprintf("call_%d", i)
		if n := r.inbox.count(wire.CallDone, id); n != 1 {
			t.Fatalf("%s has %d reports", id, n)
		}
		if s := r.inbox.wait(t, wire.CallDone, id).Done.Status; s != "ok" && s != "cancelled" {
			t.Fatalf("%s is %s", id, s)
		}
	}
}

func TestFloodIsEndedAndBounded(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	done := r.do(t, "ses_1", "call_1", "yes")
	if done.Status != "output_limit" || done.Error.Code != "output_flood" || *done.Error.Limit != 64<<10 || !done.Truncated {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
	if len(done.Stdout) > 64<<10 || done.StdoutBytes <= 16*64<<10 || done.StdoutBytes > 32*64<<10 {
		t.Errorf("kept %d of %d", len(done.Stdout), done.StdoutBytes)
	}
	r.inbox.mu.Lock()
	defer r.inbox.mu.Unlock()
	live := 0
	for _, f := range r.inbox.frames {
		live += len(f.Data)
	}
	if live != 64<<10 {
		t.Errorf("%d bytes went live", live)
	}
}

func TestNoiseOnStderrLeavesStdoutAlone(t *testing.T) {
	r := newRig(t)
	r.machine.scripts["noise"] = func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		for range 15 {
			_, _ = p.Stderr.Write(make([]byte, 64<<10))
		}
		_, _ = p.Stdout.Write([]byte("ok\n"))
		return sandbox.Exit{Reason: sandbox.Exited}
	}
	r.live(t, "ses_1")
	done := r.do(t, "ses_1", "call_1", "noise")
	if done.Status != "ok" || string(done.Stdout) != "ok\n" || !done.Truncated || !bytes.Contains(done.Stderr, []byte("bytes dropped")) {
		t.Errorf("got %s, %q, %v, %d", done.Status, done.Stdout, done.Truncated, len(done.Stderr))
	}
}

func TestDeadSandboxEndsItsCalls(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	for i := range 5 {
		r.begin(t, callOrder("ses_1", 1, fmt.Sprintf("call_%d", i), "hang"))
	}
	time.Sleep(10 * time.Millisecond)
	r.machine.mu.Lock()
	x := r.machine.live["ses_1-1"]
	r.machine.mu.Unlock()
	x.die()
	for i := range 5 {
		done := r.inbox.wait(t, wire.CallDone, fmt.Sprintf("call_%d", i)).Done
		if done.Status != "runner_lost" || done.Error.Code != "sandbox_died" {
			t.Errorf("got %+v, %+v", done, done.Error)
		}
	}
	if f := r.inbox.wait(t, wire.SessionEnded, "").Failure; f.Code != "sandbox_died" {
		t.Errorf("got %+v", f)
	}
	r.inbox.mu.Lock()
	defer r.inbox.mu.Unlock()
	if last := r.inbox.reports[len(r.inbox.reports)-1]; last.Kind != wire.SessionEnded {
		t.Errorf("the last report is %s", last.Kind)
	}
	if x.closed != 1 {
		t.Errorf("closed %d times", x.closed)
	}
}

func TestNewerEpochEndsTheOlder(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.begin(t, callOrder("ses_1", 1, "call_1", "hang"))
	if err := r.Start(startOrder("ses_1", 2), func() {}); err != nil {
		t.Fatal(err)
	}
	if done := r.inbox.wait(t, wire.CallDone, "call_1"); done.Done.Status != "runner_lost" || done.Epoch != 1 {
		t.Errorf("got %+v", done)
	}
	if ended := r.inbox.wait(t, wire.SessionEnded, ""); ended.Epoch != 1 {
		t.Errorf("epoch %d ended", ended.Epoch)
	}
}

func TestCallsAreBounded(t *testing.T) {
	r := newRig(t)
	r.MaxCalls = 2
	r.live(t, "ses_1")
	r.begin(t, callOrder("ses_1", 1, "call_1", "hang"))
	r.begin(t, callOrder("ses_1", 1, "call_2", "hang"))
	if _, err := r.Call(callOrder("ses_1", 1, "call_3", "true"), func() {}); refusedCode(err) != "capacity" {
		t.Errorf("got %v", err)
	}
	r.Cancel(wire.Held{Session: "ses_1", Epoch: 1}, "call_1")
	r.inbox.wait(t, wire.CallDone, "call_1")
	for len(r.Load().Calls) > 1 {
		time.Sleep(time.Millisecond)
	}
	if r.do(t, "ses_1", "call_4", "true").Status != "ok" {
		t.Error("a free place is not used")
	}
}

func TestScriptComesAsABlob(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.shelf.blobs["script"] = []byte("hello")
	o := callOrder("ses_1", 1, "call_1", "")
	o.Call.Script, o.Call.Blob = nil, &wire.Blob{ID: "script"}
	r.begin(t, o)
	if done := r.inbox.wait(t, wire.CallDone, "call_1").Done; done.Status != "ok" || string(done.Stdout) != "hello\n" {
		t.Errorf("got %+v", done)
	}
	r.shelf.err = fmt.Errorf("%w: its hash is another", stream.ErrBlob)
	o.Call.ID = "call_2"
	r.begin(t, o)
	if done := r.inbox.wait(t, wire.CallDone, "call_2").Done; done.Status != "start_failed" || done.Error.Code != "start_failed" || done.StartedAt != 0 {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
	if r.machine.execs["call_2"] != 0 {
		t.Error("it was started")
	}
}

func TestLargeOutputGoesBesideTheReport(t *testing.T) {
	r := newRig(t)
	big := strings.Repeat("0123456789", 60_000)
	r.machine.scripts["big"] = says(big, "err", 0)
	o := startOrder("ses_1", 1)
	o.Start.Policy.OutputBytesLimit = 1 << 20
	if err := r.Start(o, func() {}); err != nil {
		t.Fatal(err)
	}
	r.inbox.wait(t, wire.SessionStarted, "")
	done := r.do(t, "ses_1", "call_1", "big")
	if done.Output == nil || len(done.Stdout)+len(done.Stderr) != 0 || done.OutputSizes != [3]int64{600_000, 3, 0} || done.Truncated || done.StdoutBytes != 600_000 {
		t.Fatalf("got %+v", done)
	}
	if got := string(r.shelf.blobs[done.Output.ID]); got != big+"err" {
		t.Errorf("%d bytes were uploaded", len(got))
	}
	r.shelf.err = fmt.Errorf("%w: full", stream.ErrBlob)
	done = r.do(t, "ses_1", "call_2", "big")
	if done.Status != "ok" || done.Output != nil || !done.Truncated || len(done.Stdout) > wire.MaxInlineDone/2 || len(done.Stdout) < wire.MaxInlineDone/4 || string(done.Stderr) != "err" {
		t.Errorf("got %s, %d, %v", done.Status, len(done.Stdout), done.Truncated)
	}
}

func TestFileContentIsTheValue(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	var got sandbox.Process
	r.machine.scripts[""] = func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		got = p
		return sandbox.Exit{Reason: sandbox.Exited, Code: -1, File: &sandbox.FileResult{Content: []byte("inside"), Size: 6}}
	}
	o := callOrder("ses_1", 1, "call_1", "")
	o.Call.Program, o.Call.Path = "file_read", "a.txt"
	r.begin(t, o)
	done := r.inbox.wait(t, wire.CallDone, "call_1").Done
	if done.Status != "ok" || string(done.Value) != "inside" || done.ExitCode != nil {
		t.Errorf("got %+v", done)
	}
	if got.Path != "a.txt" || got.MaxRead != 64<<10 || got.Program != sandbox.FileRead {
		t.Errorf("got %+v", got)
	}
	o.Call.ID, o.Call.Program, o.Call.Script = "call_2", "file_write", []byte("content")
	r.machine.scripts[""] = func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		got = p
		return sandbox.Exit{Reason: sandbox.Exited, Code: -1, File: &sandbox.FileResult{Size: 7}}
	}
	r.begin(t, o)
	if done := r.inbox.wait(t, wire.CallDone, "call_2").Done; done.Status != "ok" || string(got.Input) != "content" || got.Script != nil {
		t.Errorf("got %+v of %+v", done, got)
	}
}

func TestDrainWaitsAndThenEndsWithAReason(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.machine.scripts["soon"] = func(ctx context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		select {
		case <-time.After(50 * time.Millisecond):
			return sandbox.Exit{Reason: sandbox.Exited}
		case <-ctx.Done():
			return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1}
		}
	}
	r.begin(t, callOrder("ses_1", 1, "call_1", "soon"))
	r.begin(t, callOrder("ses_1", 1, "call_2", "hang"))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	r.Drain(ctx)
	if _, err := r.Call(callOrder("ses_1", 1, "call_3", "true"), func() {}); refusedCode(err) != "draining" {
		t.Errorf("a call while draining: %v", err)
	}
	if err := r.Start(startOrder("ses_2", 1), func() {}); refusedCode(err) != "draining" {
		t.Errorf("a session while draining: %v", err)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if done := r.inbox.wait(t, wire.CallDone, "call_1").Done; done.Status != "ok" {
		t.Errorf("the call that ended in time is %s", done.Status)
	}
	if done := r.inbox.wait(t, wire.CallDone, "call_2").Done; done.Status != "runner_lost" || !strings.Contains(done.Error.Message, "shut down") {
		t.Errorf("the call that hung: %+v", done.Error)
	}
	if f := r.inbox.wait(t, wire.SessionEnded, "").Failure; f.Code != "runner_stopped" {
		t.Errorf("got %+v", f)
	}
}

func TestDrainOfAnIdleRunnerReturnsAtOnce(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	began := time.Now()
	r.Drain(t.Context())
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %v", took)
	}
}

func TestSilenceAndRaisedEpochsEndSessions(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	r.Raise(wire.Held{Session: "ses_1", Epoch: 9})
	if len(r.Load().Sessions) != 1 {
		t.Error("another epoch's end ended this one")
	}
	r.Raise(wire.Held{Session: "ses_1", Epoch: 1})
	if f := r.inbox.wait(t, wire.SessionEnded, "").Failure; f.Code != "runner_lost" {
		t.Errorf("got %+v", f)
	}
	if err := r.Start(startOrder("ses_2", 1), func() {}); err != nil {
		t.Fatal(err)
	}
	for r.inbox.count(wire.SessionStarted, "") < 2 {
		time.Sleep(time.Millisecond)
	}
	r.Abandon()
	for r.inbox.count(wire.SessionEnded, "") < 2 {
		time.Sleep(time.Millisecond)
	}
}

func TestCallIntoASandboxThatEndedDidNotRun(t *testing.T) {
	r := newRig(t)
	r.live(t, "ses_1")
	run, err := r.Call(callOrder("ses_1", 1, "call_1", "true"), func() {})
	if err != nil {
		t.Fatal(err)
	}
	r.machine.live["ses_1-1"].die()
	run()
	done := r.inbox.wait(t, wire.CallDone, "call_1").Done
	if done.Status != "start_failed" || done.Error.Code != "session_lost" {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
}

func BenchmarkCallAroundExec(b *testing.B) {
	m := &machine{live: map[string]*box{}, execs: map[string]int{}, scripts: map[string]script{"hello": says("hello\n", "", 0)}}
	in := &inbox{arrived: make(chan struct{})}
	s := &Service{Backend: m, Reports: in, Live: in, Blobs: &shelf{}, MaxCalls: 8, Now: time.Now, Log: bustest.Quiet()}
	defer func() { _ = s.Close(context.Background()) }()
	if err := s.Start(startOrder("ses_1", 1), func() {}); err != nil {
		b.Fatal(err)
	}
	for in.count(wire.SessionStarted, "") == 0 {
		time.Sleep(time.Millisecond)
	}
	for b.Loop() {
		over := make(chan struct{})
		run, err := s.Call(callOrder("ses_1", 1, "call_1", "hello"), func() { close(over) })
		if err != nil {
			b.Fatal(err)
		}
		run()
		<-over
		in.mu.Lock()
		in.reports, in.frames = nil, nil
		in.mu.Unlock()
	}
}

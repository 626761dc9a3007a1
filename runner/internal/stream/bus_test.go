package stream

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/bustest"
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

// finals is a Finals that runs until the test ends or stop is called.
func finals(t *testing.T, nc *nats.Conn, s *envelope.Signer, spool string) (f *Finals, stop func()) {
	t.Helper()
	f = &Finals{Conn: nc, Signer: s, Runner: "r1", Spool: spool, Log: bustest.Quiet()}
	if err := f.Open(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		_ = f.Close()
	})
	t.Cleanup(stop)
	return f, stop
}

func report(call string) wire.Report {
	return wire.Report{V: wire.Version, Kind: wire.CallDone, Runner: "r1", Incarnation: "i1", Session: "ses_1", Epoch: 1, At: 1, Run: "run_1", Call: call, Done: &wire.Done{Status: "ok"}}
}

// stored are the messages that the event stream holds, in order.
func stored(t *testing.T, js jetstream.JetStream) []*jetstream.RawStreamMsg {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := js.Stream(ctx, bus.Events)
	if err != nil {
		t.Fatal(err)
	}
	var out []*jetstream.RawStreamMsg
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

func TestReportIsSignedNumberedAndForgotten(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	js := srv.Streams(t, nc, "default")
	s := signer(t)
	f, _ := finals(t, nc, s, t.TempDir())
	if err := f.Send(report("call_1")); err != nil {
		t.Fatal(err)
	}
	if left := f.Wait(t.Context()); left != 0 {
		t.Fatalf("%d left", left)
	}
	got := stored(t, js)
	if len(got) != 1 || got[0].Subject != "bw.event.r1.ses_1.final" || got[0].Header.Get(bus.HeaderCall) != "call_1" || got[0].Header.Get(bus.HeaderRun) != "run_1" || got[0].Header.Get(bus.HeaderKind) != "call.done" {
		t.Fatalf("got %+v", got)
	}
	var r wire.Report
	if err := envelope.NewKeys(s.Public()).Open(wire.ReportType, 1<<20, got[0].Data, &r); err != nil || r.Call != "call_1" {
		t.Errorf("got %+v, %v", r, err)
	}
}

func TestReportsOutliveTheBus(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	js := srv.Streams(t, nc, "default")
	f, _ := finals(t, nc, signer(t), t.TempDir())
	srv.Stop()
	for i := range 20 {
		if err := f.Send(report(fmt.Sprintf("call_%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(700 * time.Millisecond)
	if f.Left() != 20 {
		t.Fatalf("%d left while the bus is away", f.Left())
	}
	srv.Restart(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if left := f.Wait(ctx); left != 0 {
		t.Fatalf("%d left", left)
	}
	calls := map[string]int{}
	for _, m := range stored(t, js) {
		calls[m.Header.Get(bus.HeaderCall)]++
	}
	if len(calls) != 20 {
		t.Errorf("%d reports came", len(calls))
	}
	for call, n := range calls {
		if n != 1 {
			t.Errorf("%s is there %d times", call, n)
		}
	}
}

func TestReportsWaitForTheStream(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	f, _ := finals(t, nc, signer(t), t.TempDir())
	if err := f.Send(report("call_1")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	if f.Left() != 1 {
		t.Fatal("a report was forgotten though no stream took it")
	}
	srv.Streams(t, nc, "default")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if left := f.Wait(ctx); left != 0 {
		t.Fatalf("%d left", left)
	}
}

func TestSpoolIsPublishedByTheNextStartAsItIs(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	js := srv.Streams(t, nc, "default")
	spool := filepath.Join(t.TempDir(), "spool")
	old := signer(t)
	f, stop := finals(t, nc, old, spool)
	srv.Stop()
	for _, call := range []string{"call_1", "call_2", "call_3"} {
		if err := f.Send(report(call)); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if n, err := f.Save(); n != 3 || err != nil {
		t.Fatalf("Save: %d, %v", n, err)
	}
	files, _ := filepath.Glob(filepath.Join(spool, "*"))
	if len(files) != 3 {
		t.Fatalf("spool holds %v", files)
	}
	for _, file := range files {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", file, st.Mode(), err)
		}
	}
	if err := os.WriteFile(filepath.Join(spool, "00000000000000000000-damaged.json"), []byte(`{"subject":`), 0o600); err != nil {
		t.Fatal(err)
	}

	srv.Restart(t)
	next, _ := finals(t, srv.Connect(t), signer(t), spool)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if n, err := next.Recover(ctx); n != 3 || err != nil {
		t.Fatalf("Recover: %d, %v", n, err)
	}
	got := stored(t, js)
	if len(got) != 3 {
		t.Fatalf("%d reports came", len(got))
	}
	for i, m := range got {
		var r wire.Report
		if err := envelope.NewKeys(old.Public()).Open(wire.ReportType, 1<<20, m.Data, &r); err != nil || r.Call != fmt.Sprintf("call_%d", i+1) {
			t.Errorf("report %d: %+v, %v", i, r, err)
		}
	}
	if files, _ := filepath.Glob(filepath.Join(spool, "*.json")); len(files) != 0 {
		t.Errorf("still in the spool: %v", files)
	}
	if n, err := next.Recover(ctx); n != 0 || err != nil {
		t.Errorf("a second Recover: %d, %v", n, err)
	}
}

func TestFramesOfACallComeBeforeItsReport(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	js := srv.Streams(t, nc, "default")
	live, err := NewLive(nc, "r1", bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	f, _ := finals(t, nc, signer(t), t.TempDir())
	const calls = 50
	for i := range calls {
		call := fmt.Sprintf("call_%d", i)
		frames := &Frames{Run: "run_1", Call: call, Publish: func(f wire.Frame) bool { return live.Publish("ses_1", f) }}
		frames.Started()
		_, _ = frames.Stream("stdout").Write(bytes.Repeat([]byte("x"), 100<<10))
		frames.Close()
		if err := f.Send(report(call)); err != nil {
			t.Fatal(err)
		}
		if left := f.Wait(t.Context()); left != 0 { // a bus that is behind may drop frames
			t.Fatalf("%d left", left)
		}
	}
	done, n := map[string]bool{}, map[string]int{}
	for _, m := range stored(t, js) {
		call := m.Header.Get(bus.HeaderCall)
		if strings.HasSuffix(m.Subject, ".final") {
			done[call] = true
			continue
		}
		var frame wire.Frame
		if err := strictjson.Decode(m.Data, &frame); err != nil {
			t.Fatal(err)
		}
		if done[call] {
			t.Fatalf("frame %d of %s came after its report", frame.N, call)
		}
		n[call] += len(frame.Data)
	}
	for call := range done {
		if n[call] != 100<<10 {
			t.Errorf("%s: %d bytes came live", call, n[call])
		}
	}
	if len(done) != calls {
		t.Errorf("%d reports", len(done))
	}
}

func TestLiveStreamDropsWhileTheBusIsAway(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	srv.Streams(t, nc, "default")
	live, err := NewLive(nc, "r1", bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	srv.Stop()
	for nc.IsConnected() {
		time.Sleep(time.Millisecond)
	}
	began := time.Now()
	if live.Publish("ses_1", wire.Frame{Call: "c", Kind: wire.FrameStarted}) {
		t.Error("a frame was taken without a bus")
	}
	if took := time.Since(began); took > 100*time.Millisecond {
		t.Errorf("took %v", took)
	}
}

// keeper is the control plane's side of blobs, in memory. It answers the first
// request of each chunk as being unavailable.
func keeper(t *testing.T, nc *nats.Conn, chunks map[string][]byte) {
	t.Helper()
	seen := map[string]bool{}
	sub, err := nc.Subscribe(bus.Blob("r1"), func(m *nats.Msg) {
		var q wire.BlobRequest
		if err := strictjson.Decode(m.Data, &q); err != nil {
			t.Error(err)
		}
		key := fmt.Sprintf("%s.%d", q.ID, q.N)
		var r wire.BlobReply
		switch data, ok := chunks[key]; {
		case !seen[q.Op+key]:
			seen[q.Op+key] = true
			r.Reason = "unavailable"
		case q.Op == "put":
			chunks[key] = q.Data
			r.OK = true
		case ok:
			r.OK, r.Data = true, data
		default:
			r.Reason = "not_found"
		}
		data, _ := strictjson.Encode(r)
		_ = m.Respond(data)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
}

func TestBlobsGoThereAndBack(t *testing.T) {
	srv := bustest.Start(t)
	nc := srv.Connect(t)
	chunks := map[string][]byte{}
	keeper(t, nc, chunks)
	b := &Blobs{Conn: nc, Runner: "r1", NewID: func() string { return "blob_1" }}
	whole := bytes.Repeat([]byte("0123456789abcdef"), wire.BlobChunk/16+100)
	named, err := b.Put(t.Context(), whole)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(whole)
	if named.ID != "blob_1" || named.Size != int64(len(whole)) || named.SHA256 != hex.EncodeToString(sum[:]) || len(chunks) != 2 {
		t.Errorf("got %+v in %d chunks", named, len(chunks))
	}
	got, err := b.Get(t.Context(), named)
	if err != nil || !bytes.Equal(got, whole) {
		t.Fatalf("got %d bytes, %v", len(got), err)
	}
	for name, bad := range map[string]wire.Blob{
		"another hash": {ID: named.ID, Size: named.Size, SHA256: strings.Repeat("0", 64)},
		"shorter":      {ID: named.ID, Size: named.Size - 1, SHA256: named.SHA256},
		"longer":       {ID: named.ID, Size: named.Size + 1, SHA256: named.SHA256},
		"unknown":      {ID: "other", Size: 1, SHA256: named.SHA256},
		"huge":         {ID: named.ID, Size: wire.MaxBlob + 1, SHA256: named.SHA256},
	} {
		if _, err := b.Get(t.Context(), bad); !errors.Is(err, ErrBlob) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestBlobWithoutAnAnswerSaysWhich(t *testing.T) {
	srv := bustest.Start(t)
	b := &Blobs{Conn: srv.Connect(t), Runner: "r1", NewID: func() string { return "blob_1" }}
	_, err := b.Put(t.Context(), []byte("x"))
	if err == nil || errors.Is(err, ErrBlob) || !strings.Contains(err.Error(), "put chunk 0 of blob blob_1") {
		t.Errorf("got %v", err)
	}
}

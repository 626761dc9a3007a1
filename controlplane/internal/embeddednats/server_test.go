package embeddednats_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/controlplane/internal/embeddednats"
	"github.com/bigwave/bigwave/shared/bus"
)

func start(t *testing.T, dir string) *embeddednats.Server {
	t.Helper()
	s, err := embeddednats.Start(embeddednats.Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func asRunner(t *testing.T, dir string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	a, err := bus.LoadAccess(filepath.Join(dir, embeddednats.RunnerAccess))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := bus.Connect("runner", a, slog.New(slog.DiscardHandler), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func TestItKeepsPortPasswordsAndStreamsOverARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "nats")
	first := start(t, dir)
	nc, err := first.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "s", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	nc.Close()
	first.Close()

	second := start(t, dir)
	if first.Access() != second.Access() {
		t.Error("the second start has another address or password")
	}
	nc, err = second.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, _ = jetstream.New(nc)
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.CachedInfo().State.Msgs; got != 1 {
		t.Errorf("messages after the restart: %d, want 1", got)
	}
	for _, name := range []string{embeddednats.ControlPlaneAccess, embeddednats.RunnerAccess} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %04o", name, st.Mode().Perm())
		}
	}
}

func TestNobodyEntersWithoutAPassword(t *testing.T) {
	s := start(t, t.TempDir())
	_, err := nats.Connect(s.Access().URL)
	if !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("connect without credentials: %v", err)
	}
}

func TestARunnerMayOnlySpeakAsARunner(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	own, err := s.Connect("cp")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	js, _ := jetstream.New(own)
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: bus.Tickets, Subjects: []string{bus.AllTickets}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateConsumer(t.Context(), bus.Tickets, jetstream.ConsumerConfig{Durable: bus.PoolConsumer("p"), AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
		t.Fatal(err)
	}
	heard, err := own.SubscribeSync("bw.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Flush(); err != nil {
		t.Fatal(err)
	}
	var denied atomic.Int64
	runner := asRunner(t, dir, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { denied.Add(1) }))

	forbidden := []string{
		bus.Order("r1"), bus.Start("p"), bus.Notice("ses_1"), "bw.event.cp.ses_1.final", "bw.chunk.r1.b.0",
		"$JS.API.STREAM.DELETE." + bus.Tickets, "$JS.API.STREAM.CREATE.X", "$JS.API.CONSUMER.DELETE." + bus.Tickets + "." + bus.PoolConsumer("p"),
		"$JS.API.STREAM.PURGE." + bus.Events, "$SYS.REQ.SERVER.PING", "_CP.x.y", "_INBOX.x.y",
	}
	for _, subject := range forbidden {
		if err := runner.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	for _, subject := range []string{"_CP.>", "bw.event.>", "bw.claim.>", "bw.chunk.>", ">"} {
		if _, err := runner.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
	}
	if err := runner.Publish(bus.Frame("r1", "ses_1"), []byte("frame")); err != nil {
		t.Fatal(err)
	}
	if err := runner.Flush(); err != nil {
		t.Fatal(err)
	}
	m, err := heard.NextMsg(time.Second)
	if err != nil || m.Subject != bus.Frame("r1", "ses_1") {
		t.Fatalf("heard %v, %v; want the frame alone", m, err)
	}
	for end := time.Now().Add(2 * time.Second); denied.Load() < int64(len(forbidden)+5) && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
	if got, want := denied.Load(), int64(len(forbidden)+5); got != want {
		t.Errorf("%d attempts were denied, want %d", got, want)
	}
}

func TestARunnerPullsTicketsAndAnswersOrders(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir)
	own, err := s.Connect("cp")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	js, _ := jetstream.New(own)
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: bus.Tickets, Subjects: []string{bus.AllTickets}, Retention: jetstream.WorkQueuePolicy}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateConsumer(t.Context(), bus.Tickets, jetstream.ConsumerConfig{Durable: bus.PoolConsumer("p"), AckPolicy: jetstream.AckExplicitPolicy, FilterSubject: bus.Start("p")}); err != nil {
		t.Fatal(err)
	}
	runner := asRunner(t, dir)
	if _, err := runner.Subscribe(bus.Order("r1"), func(m *nats.Msg) { _ = m.Respond([]byte("accepted")) }); err != nil {
		t.Fatal(err)
	}
	if err := runner.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), bus.Start("p"), []byte("ticket")); err != nil {
		t.Fatal(err)
	}
	rjs, _ := jetstream.New(runner)
	pool, err := rjs.Consumer(t.Context(), bus.Tickets, bus.PoolConsumer("p"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := pool.Next(jetstream.FetchMaxWait(2 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.DoubleAck(t.Context()); err != nil {
		t.Error(err)
	}
	reply, err := own.Request(bus.Order("r1"), []byte("order"), 2*time.Second)
	if err != nil || string(reply.Data) != "accepted" {
		t.Errorf("order: %v, %v", reply, err)
	}
}

func TestReadyQuickly(t *testing.T) {
	began := time.Now()
	start(t, t.TempDir())
	if took := time.Since(began); took > 2*time.Second { // 100 ms on a quiet machine
		t.Errorf("the bus took %v to be ready", took)
	} else {
		t.Logf("ready in %v", took)
	}
}

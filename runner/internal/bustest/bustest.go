// Package bustest runs a real message bus in the process of a test, with the
// streams that the control plane makes.
package bustest

import (
	"context"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/shared/bus"
)

// Server is a bus that can be stopped and started again with what it keeps.
type Server struct {
	opts *server.Options
	srv  *server.Server
}

// Start runs a server with JetStream until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{opts: &server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true, MaxPayload: 2 << 20,
	}}
	s.run(t)
	s.opts.Port = s.srv.Addr().(*net.TCPAddr).Port
	t.Cleanup(s.Stop)
	return s
}

func (s *Server) run(t testing.TB) {
	t.Helper()
	srv, err := server.NewServer(s.opts)
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(10 * time.Second) {
		t.Fatal("the bus is not ready")
	}
	s.srv = srv
}

// Stop ends the server as a crash would: connections break.
func (s *Server) Stop() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
}

// Restart starts it again on the same port with what it kept.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.run(t)
}

// Connect is a connection as the daemons have it, closed when the test ends.
func (s *Server) Connect(t testing.TB) *nats.Conn {
	t.Helper()
	nc, err := bus.Connect("test", bus.Access{URL: s.srv.ClientURL()}, Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// Streams makes the streams and the consumer of one pool.
func (s *Server) Streams(t testing.TB, nc *nats.Conn, pool string) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: bus.Events, Subjects: []string{bus.AllEvents}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: bus.Tickets, Subjects: []string{bus.AllTickets}, Retention: jetstream.WorkQueuePolicy}); err != nil {
		t.Fatal(err)
	}
	_, err = js.CreateConsumer(ctx, bus.Tickets, jetstream.ConsumerConfig{
		Durable: bus.PoolConsumer(pool), FilterSubject: bus.Start(pool), AckPolicy: jetstream.AckExplicitPolicy, AckWait: 2 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// Quiet is a logger that says nothing.
func Quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

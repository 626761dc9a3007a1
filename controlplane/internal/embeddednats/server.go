// Package embeddednats runs the message bus inside the control plane: a NATS
// server with JetStream on a loopback port, for one machine.
package embeddednats

import (
	"cmp"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/bus"
)

// Names of the access files in the server's folder.
const (
	ControlPlaneAccess = "controlplane.json"
	RunnerAccess       = "runner.json"
)

// The port is drawn below the range from which the kernel takes the source
// ports of outgoing connections, or one of those could hold it at a restart.
const (
	lowestPort  = 15000
	highestPort = 32000
)

// MaxPayload is the largest message, in bytes: a report with its inline output.
const MaxPayload = 2 << 20

// Config says where the server keeps its things and where it listens.
type Config struct {
	Dir      string // access files, the chosen port and the JetStream store; made with mode 0700
	Listen   string // host:port; port 0 (or "") means one that is drawn once and kept in Dir
	MaxStore int64  // bytes of the JetStream store; 0 means 8 GiB
	Log      *slog.Logger
}

// Server is a running server.
type Server struct {
	cfg     Config
	options server.Options
	access  bus.Access

	failed  atomic.Bool // the store could not be written
	closing chan struct{}
	once    sync.Once
	healed  chan struct{} // closed when heal has ended

	mu  sync.Mutex
	srv *server.Server
}

// Start starts the server and returns when it takes connections. The access
// files are made at the first start and kept; Close ends the server.
func Start(cfg Config) (*Server, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the bus folder: %w", err)
	}
	host, port, err := address(cfg)
	if err != nil {
		return nil, err
	}
	url := "nats://" + net.JoinHostPort(host, strconv.Itoa(port))
	own, err := access(filepath.Join(cfg.Dir, ControlPlaneAccess), "controlplane", url)
	if err != nil {
		return nil, err
	}
	runner, err := access(filepath.Join(cfg.Dir, RunnerAccess), "runner", url)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg:    cfg,
		access: own,
		options: server.Options{
			ServerName:        "bigwave",
			Host:              host,
			Port:              port,
			Users:             users(own, runner),
			MaxPayload:        MaxPayload,
			JetStream:         true,
			StoreDir:          cfg.Dir,
			JetStreamMaxStore: cmp.Or(cfg.MaxStore, 8<<30),
			NoSigs:            true,
			NoSystemAccount:   true,
		},
		closing: make(chan struct{}),
		healed:  make(chan struct{}),
	}
	if s.srv, err = s.launch(); err != nil {
		return nil, err
	}
	go s.heal()
	return s, nil
}

// launch makes a server and waits until it takes connections.
func (s *Server) launch() (*server.Server, error) {
	options := s.options // the server writes into what it gets
	srv, err := server.NewServer(&options)
	if err != nil {
		return nil, fmt.Errorf("set up the bus: %w", err)
	}
	srv.SetLogger(quiet{log: s.cfg.Log, failed: &s.failed}, false, false)
	srv.Start()
	if !srv.ReadyForConnections(10 * time.Second) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("the bus did not start on %s", s.access.URL)
	}
	return srv, nil
}

// Connect opens the control plane's own connection, in memory.
func (s *Server) Connect(name string) (*nats.Conn, error) {
	return bus.Connect(name, s.access, s.cfg.Log, nats.InProcessServer(s), nats.CustomInboxPrefix(inboxes), nats.NoEcho())
}

// InProcessConn is a connection to the server that runs now; it serves Connect.
func (s *Server) InProcessConn() (net.Conn, error) { return s.current().InProcessConn() }

func (s *Server) current() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.srv
}

// Access is how the control plane reaches the server from another process.
func (s *Server) Access() bus.Access { return s.access }

// Close ends the server and waits until its store is on disk.
func (s *Server) Close() {
	s.once.Do(func() { close(s.closing) })
	<-s.healed
	srv := s.current()
	srv.Shutdown()
	srv.WaitForShutdown()
}

// inboxes is the control plane's own inbox prefix, which runners can't hear.
const inboxes = "_CP"

// users gives the control plane everything and a runner what it needs.
func users(own, runner bus.Access) []*server.User {
	return []*server.User{
		{Username: own.User, Password: own.Password},
		{Username: runner.User, Password: runner.Password, Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{
				Allow: []string{
					"bw.claim.>", "bw.beat.>", "bw.blob.>", "bw.event.*.*.frame", "bw.event.*.*.final",
					"$JS.API.CONSUMER.INFO." + bus.Tickets + ".>",
					"$JS.API.CONSUMER.MSG.NEXT." + bus.Tickets + ".>",
					"$JS.ACK." + bus.Tickets + ".>",
				},
				Deny: []string{"bw.event." + bus.ControlPlane + ".>"},
			},
			Subscribe: &server.SubjectPermission{Allow: []string{"bw.order.>", "_INBOX.>"}},
			Response:  &server.ResponsePermission{MaxMsgs: 1, Expires: 30 * time.Second},
		}},
	}
}

// access reads the access file at path, or makes one with a random password;
// the URL is brought up to date.
func access(path, user, url string) (bus.Access, error) {
	a, err := bus.LoadAccess(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		secret := make([]byte, 32)
		_, _ = rand.Read(secret) // never fails
		a = bus.Access{User: user, Password: base64.RawURLEncoding.EncodeToString(secret)}
	case err != nil:
		return a, err
	case a.URL == url:
		return a, nil
	}
	a.URL = url
	if err := bus.WriteAccess(path, a); err != nil {
		return a, fmt.Errorf("write access file: %w", err)
	}
	return a, nil
}

// address is where to listen: the port of the last start when none is set.
func address(cfg Config) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(cmp.Or(cfg.Listen, "127.0.0.1:0"))
	if err != nil {
		return "", 0, fmt.Errorf("listen address of the bus: %w", err)
	}
	port, err = strconv.Atoi(p)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("listen address of the bus: %q is not a port", p)
	}
	if port != 0 {
		return host, port, nil
	}
	file := filepath.Join(cfg.Dir, "port")
	if kept := keptPort(file); kept != 0 {
		if waitFree(host, kept, 3*time.Second) {
			return host, kept, nil
		}
		cfg.Log.Warn("bus port of the last start is taken: drawing another, runners must be restarted", "port", kept)
	}
	port, err = drawPort(host)
	if err != nil {
		return "", 0, err
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(port)+"\n"), 0o600); err != nil {
		return "", 0, fmt.Errorf("keep the bus port: %w", err)
	}
	return host, port, nil
}

func keptPort(file string) int {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	port, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || port < 1 || port > 65535 {
		return 0
	}
	return port
}

func drawPort(host string) (int, error) {
	for range 200 {
		n, err := rand.Int(rand.Reader, big.NewInt(highestPort-lowestPort))
		if err != nil {
			return 0, err
		}
		if port := lowestPort + int(n.Int64()); free(host, port) {
			return port, nil
		}
	}
	return 0, fmt.Errorf("no free port for the bus on %s", host)
}

func waitFree(host string, port int, atMost time.Duration) bool {
	for end := time.Now().Add(atMost); ; time.Sleep(50 * time.Millisecond) {
		if free(host, port) {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

func free(host string, port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// quiet passes on what the server warns of and drops its chatter.
type quiet struct {
	log    *slog.Logger
	failed *atomic.Bool
}

func (q quiet) Noticef(format string, v ...any) {
	q.log.Debug("bus", "says", fmt.Sprintf(format, v...))
}
func (q quiet) Debugf(string, ...any) {}
func (q quiet) Tracef(string, ...any) {}
func (q quiet) Errorf(format string, v ...any) {
	if failure(format) {
		q.failed.Store(true)
	}
	q.log.Error("bus", "says", fmt.Sprintf(format, v...))
}
func (q quiet) Fatalf(format string, v ...any) { q.log.Error("bus", "says", fmt.Sprintf(format, v...)) }

// Warnf hides the one warning that does not fit: passwords are random and in
// memory only, so hashing them would gain nothing and slow each connection.
func (q quiet) Warnf(format string, v ...any) {
	if strings.HasPrefix(format, "Plaintext passwords") {
		return
	}
	q.log.Warn("bus", "says", fmt.Sprintf(format, v...))
}

// Package containerd is the backend of clusters: each sandbox is a container
// of the policy's base_image, made by containerd and a runtime of its own.
// Calls do not go through either: they run through the init that is the
// container's only process, so that a sandbox outlives a restart of containerd.
package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/namespaces"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// Config is what the operator decides.
type Config struct {
	box.Config

	InitPath    string // the bigwave-init program
	Address     string // containerd's socket; /run/containerd/containerd.sock if empty
	Namespace   string // of everything that is made; bigwave if empty
	Snapshotter string // overlayfs if empty
	Runtime     string // io.containerd.runc.v2 if empty
	Image       string // the base_image that sandboxes are kept ready for; bigwave/sandbox-base:latest if empty
	UIDBase     int    // first host id for sandboxes; see box.SandboxIDs

	Registries []string // hosts that images may be pulled from; none: only what is there
	PlainHTTP  []string // those among them that are spoken to without TLS
	AuthFile   string   // their credentials, as docker login writes them; none if empty
	MaxImageMB int64    // largest image to pull, compressed; 10240 if 0
}

const (
	dialTimeout   = 3 * time.Second
	answerTimeout = 4 * time.Second // of what containerd only has to look up
	createsAtOnce = 16              // at most; four for each core, since more makes all slower
	refillAfter   = 50 * time.Millisecond
	ownerLabel    = "io.bigwave.owner"
	gcRootLabel   = "containerd.io/gc.root"
)

// New returns the backend; see box.New. A containerd that does not answer is
// not an error here: Check reports it and Start refuses.
func New(cfg Config) (*box.Backend, error) {
	cfg.Address = cmp.Or(cfg.Address, "/run/containerd/containerd.sock")
	cfg.Namespace = cmp.Or(cfg.Namespace, "bigwave")
	cfg.Snapshotter = cmp.Or(cfg.Snapshotter, "overlayfs")
	cfg.Runtime = cmp.Or(cfg.Runtime, "io.containerd.runc.v2")
	cfg.Image = cmp.Or(cfg.Image, "bigwave/sandbox-base:latest")
	cfg.MaxImageMB = cmp.Or(cfg.MaxImageMB, 10240)
	cfg.AtOnce = min(cmp.Or(cfg.AtOnce, 4*runtime.NumCPU()), createsAtOnce)
	cfg.RefillAfter = cmp.Or(cfg.RefillAfter, refillAfter)
	if os.Geteuid() != 0 {
		return nil, errors.New("the containerd backend needs root; as an ordinary user take the subprocess backend")
	}
	init, err := filepath.Abs(cfg.InitPath)
	if err == nil {
		_, err = os.Stat(init)
	}
	if err != nil {
		return nil, fmt.Errorf("the init program: %w", err)
	}
	if cfg.DataDir, err = filepath.Abs(cfg.DataDir); err != nil { // containerd has a directory of its own
		return nil, err
	}
	m := &maker{
		cfg:   cfg,
		init:  init,
		owner: box.Owner(cfg.Config),
		log:   cmp.Or(cfg.Log, slog.Default()),
		ready: map[string]ready{},
		pulls: map[string]*pull{},
	}
	m.life, m.end = context.WithCancel(context.Background())
	m.pulling, m.endPulls = context.WithCancel(m.life)
	return box.New(cfg.Config, m)
}

// maker implements box.Maker.
type maker struct {
	cfg   Config
	init  string
	owner string // the label on all that is made
	log   *slog.Logger

	life     context.Context // of removals: ends some time after Close began
	end      context.CancelFunc
	pulling  context.Context // ends when Close begins
	endPulls context.CancelFunc
	working  sync.WaitGroup     // pulls and removals
	removing singleflight.Group // by name

	mu     sync.Mutex
	client *containerd.Client // nil until containerd has answered once
	ready  map[string]ready   // by an image's digest
	pulls  map[string]*pull   // by an image's name
}

// connect returns a client of a containerd that takes connections, or says at
// once that there is none: callers don't wait for one to come back, and don't
// wait out what the connection would, either, once it has.
func (m *maker) connect() (*containerd.Client, error) {
	if err := m.probe(); err != nil {
		return nil, m.silent(err)
	}
	client, err := m.dial()
	if err == nil {
		err = wake(client.Conn())
	}
	if err != nil {
		return nil, m.silent(err)
	}
	return client, nil
}

func (m *maker) silent(err error) error {
	return &sandbox.StartError{Code: "start_failed", Message: "containerd does not answer on this runner", Cause: fmt.Errorf("%s: %w", m.cfg.Address, err)}
}

func (m *maker) probe() error {
	conn, err := net.DialTimeout("unix", strings.TrimPrefix(m.cfg.Address, "unix://"), dialTimeout)
	if err != nil {
		return err
	}
	return conn.Close()
}

func (m *maker) dial() (*containerd.Client, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.client != nil {
		return m.client, nil
	}
	client, err := containerd.New(m.cfg.Address, containerd.WithTimeout(dialTimeout), containerd.WithDefaultRuntime(m.cfg.Runtime))
	if err == nil {
		m.client = client
	}
	return client, err
}

// wake has a connection that was lost made again now.
func wake(conn *grpc.ClientConn) error {
	state := conn.GetState()
	if state == connectivity.Ready {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	conn.ResetConnectBackoff()
	for ; state != connectivity.Ready; state = conn.GetState() {
		conn.Connect()
		if !conn.WaitForStateChange(ctx, state) {
			return fmt.Errorf("the connection is %v: %w", state, os.ErrDeadlineExceeded)
		}
	}
	return nil
}

// scope puts a context in our namespace.
func (m *maker) scope(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, m.cfg.Namespace)
}

func (m *maker) About() box.About {
	return box.About{
		Backend:   "containerd",
		Isolation: isolation(m.cfg.Runtime),
		BaseImage: "container image",
		Help:      "look at containerd's log; the runtime " + m.cfg.Runtime + " and the snapshotter " + m.cfg.Snapshotter + " must work on this host, and share its kernel with the runner",
	}
}

// isolation is the runtime's short name: runc of io.containerd.runc.v2.
func isolation(name string) string {
	parts := strings.Split(name, ".")
	if len(parts) < 2 {
		return name
	}
	return parts[len(parts)-2]
}

// IDs have no user namespace: user code has the same id inside and outside,
// and no other sandbox has it.
func (m *maker) IDs(slot int) box.IDs {
	ids := box.SandboxIDs(m.cfg.UIDBase, slot)
	return box.IDs{First: 0, Count: 1, User: ids.Host, Host: ids.Host}
}

func (m *maker) Standard() string { return m.cfg.Image }

// Check asks containerd for its version and for the standard image.
func (m *maker) Check(ctx context.Context) []sandbox.Piece {
	daemon := sandbox.Piece{Name: "containerd", State: "ok", Fatal: true}
	image := sandbox.Piece{Name: "base image", State: "ok", Fatal: true}
	version, err := m.version(ctx)
	if err != nil {
		daemon.State, daemon.Detail = "missing", err.Error()
		daemon.Means = "start containerd, or name its socket in BIGWAVE_CONTAINERD_ADDRESS"
		return []sandbox.Piece{daemon}
	}
	daemon.Detail = fmt.Sprintf("%s at %s, namespace %s, snapshotter %s, runtime %s", version, m.cfg.Address, m.cfg.Namespace, m.cfg.Snapshotter, m.cfg.Runtime)
	found, err := m.Image(ctx, m.cfg.Image)
	if err != nil {
		image.State, image.Detail = "missing", err.Error()
		image.Means = "import it (make image), or let it be pulled: BIGWAVE_REGISTRIES"
	} else {
		image.Detail = found.Name + " is " + found.Digest
	}
	return []sandbox.Piece{daemon, image}
}

func (m *maker) version(ctx context.Context) (string, error) {
	client, err := m.connect()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(m.scope(ctx), dialTimeout)
	defer cancel()
	v, err := client.Version(ctx)
	return v.Version, err
}

// Close waits for what is being removed, or for ctx, and leaves the rest to
// the next start.
func (m *maker) Close(ctx context.Context) error {
	m.endPulls()
	gone := make(chan struct{})
	go func() { // ends with the work
		m.working.Wait()
		close(gone)
	}()
	select {
	case <-gone:
	case <-time.After(closeGrace):
	case <-ctx.Done():
	}
	m.end()
	<-gone
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.client == nil {
		return nil
	}
	return m.client.Close()
}

// closeGrace is how long Close waits for a containerd that does not answer.
const closeGrace = 10 * time.Second

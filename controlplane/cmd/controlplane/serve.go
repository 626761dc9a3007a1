package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/bigwave/bigwave/controlplane/internal/config"
	"github.com/bigwave/bigwave/controlplane/internal/dispatch"
	"github.com/bigwave/bigwave/controlplane/internal/embeddednats"
	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	runs "github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
)

// run is the life of the control plane: until ctx ends, then two steps down.
func run(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	if err := cfg.Prepare(); err != nil {
		return err
	}
	unlock, err := lock(filepath.Join(cfg.DataDir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen for the API: %w", err)
	}
	defer listener.Close()
	signer, err := keys(cfg)
	if err != nil {
		return err
	}
	db, err := store.New(store.Config{URL: cfg.DatabaseURL.Reveal()})
	if err != nil {
		return err
	}
	defer db.Close()
	nc, closeBus, err := connect(cfg, log)
	if err != nil {
		return err
	}
	defer closeBus()
	parts, err := wire(cfg, log, signer, db, nc)
	if err != nil {
		return err
	}
	return parts.serve(ctx, listener, cfg.ShutdownGrace, log)
}

// parts is everything that runs.
type parts struct {
	db         *store.DB
	dispatcher *dispatch.Dispatcher
	sessions   *session.Service
	runs       *runs.Service
	fleet      *fleet.Service
	api        http.Handler
}

// wire connects the services; they name each other here and nowhere else.
func wire(cfg config.Config, log *slog.Logger, signer *envelope.Signer, db *store.DB, nc *nats.Conn) (*parts, error) {
	fallback, err := policy.Default(cfg.SandboxDefaultPolicy)
	if err != nil {
		return nil, fmt.Errorf("BIGWAVE_SANDBOX_DEFAULT_POLICY: %w", err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	metrics := prometheus.NewRegistry()
	rejects := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bigwave_messages_rejected_total", Help: "Messages of runners that were not taken.",
	}, []string{"what", "reason"})
	metrics.MustRegister(rejects)

	policies := &policy.Service{
		Store: db, Default: fallback, Enabled: cfg.SandboxEnabled, Now: time.Now, NewID: newID,
		Ceilings: policy.Ceilings{
			MemoryMB: cfg.SandboxMaxMemoryMB, PIDsLimit: cfg.SandboxMaxPIDs,
			WallClockSeconds: cfg.SandboxMaxWallClockSeconds, OutputBytesLimit: cfg.SandboxMaxOutputBytes,
		},
	}
	tools := &tool.Service{Store: db, Now: time.Now, NewID: newID}
	sources := []tool.Source{builtin.New(), tools}
	users := &identity.Service{Store: db, AdminToken: identity.Digest(cfg.AdminToken.Reveal()), Now: time.Now, NewID: newID}

	replica := newID()
	d := &dispatch.Dispatcher{
		Bus: nc, JS: js, Signer: signer, Keys: &dispatch.KeyFolder{Dir: cfg.RunnerKeysDir}, Records: db,
		Senders: senders(db), Pool: cfg.Pool, Replica: replica, Rejects: rejects, Log: log, Now: time.Now, NewID: newID,
	}
	machines := &fleet.Service{
		Store: db, LostAfter: cfg.RunnerLostAfter, Hearing: d.Hearing, Settled: d.Settled, Now: time.Now, Log: log,
	}
	run := &runs.Service{
		Store: db, Tools: sources, Dispatcher: d, Fleet: machines, Pool: cfg.Pool, Replica: replica, Sole: personal(cfg),
		MaxOpen: cfg.MaxRunsPerSession, StartWait: cfg.StartWait, ClaimWait: cfg.ClaimWait, Now: time.Now, NewID: newID, Log: log,
	}
	sessions := &session.Service{
		Store: db, Policies: policies, Runs: run, Stopper: d,
		IdleTTL: cfg.SessionIdleTTL, TTL: cfg.SessionTTL, Now: time.Now, NewID: newID, Log: log,
	}
	d.Sessions, d.Runs, d.Fleet = newStartTimer(sessions, metrics), run, machines
	machines.Runs, machines.Sessions = run, sessions

	return &parts{
		db: db, dispatcher: d, sessions: sessions, runs: run, fleet: machines,
		api: httpapi.New(httpapi.Server{
			Identity: users, Tools: tools, Policies: policies, Sessions: sessions, Runs: run, Fleet: machines, Audit: db,
			Registry: func(ctx context.Context, workspace string) (tool.Registry, error) {
				return tool.Merge(ctx, workspace, sources...)
			},
			Events: events(d),
			Ready: func(ctx context.Context) map[string]error {
				return map[string]error{"database": db.Ready(ctx), "bus": d.Ready(ctx)}
			},
			Counts: db.Counts, Log: log, Metrics: metrics,
		}),
	}, nil
}

// serve runs everything. When ctx ends the API takes no more and its open
// requests get grace; then the rest ends, and what is unfinished stays in the
// database for the next start.
func (p *parts) serve(ctx context.Context, listener net.Listener, grace time.Duration, log *slog.Logger) error {
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	group, work := errgroup.WithContext(work)
	group.Go(func() error { return p.dispatcher.Run(work) })
	group.Go(func() error {
		if !p.migrate(work, log) { // who asks before that is told to come again
			return nil
		}
		group.Go(func() error { return p.sessions.Run(work) })
		group.Go(func() error { return p.runs.Run(work) })
		group.Go(func() error { return p.fleet.Run(work) })
		return nil
	})

	server := &http.Server{
		Handler: p.api, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve the API: %w", err)
		}
		return nil
	})
	log.Info("control plane is up", "url", "http://"+listener.Addr().String())
	select {
	case <-ctx.Done():
		log.Info("stopping", "grace", grace)
	case <-work.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if server.Shutdown(last) != nil {
		_ = server.Close() // what is still open has had its time
	}
	stopWork()
	err := group.Wait()
	log.Info("stopped")
	return err
}

// migrate brings the schema up to date, as soon as the database is there;
// false when ctx ends before.
func (p *parts) migrate(ctx context.Context, log *slog.Logger) bool {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := p.db.Migrate(ctx)
		if err == nil || ctx.Err() != nil {
			return err == nil
		}
		log.Warn("database is not ready", "err", err, "again_in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// personal reports whether this control plane brings its own bus, and with it
// is the only one.
func personal(cfg config.Config) bool { return cfg.NATSURL == "" && cfg.NATSAccessFile == "" }

// connect reaches the cluster's bus, or starts one of our own.
func connect(cfg config.Config, log *slog.Logger) (*nats.Conn, func(), error) {
	const name = "bigwave-controlplane"
	if personal(cfg) {
		srv, err := embeddednats.Start(embeddednats.Config{Dir: filepath.Join(cfg.DataDir, "nats"), Listen: cfg.NATSListen, Log: log})
		if err != nil {
			return nil, nil, err
		}
		nc, err := srv.Connect(name)
		if err != nil {
			srv.Close()
			return nil, nil, err
		}
		return nc, func() { nc.Close(); srv.Close() }, nil
	}
	var access bus.Access
	if cfg.NATSAccessFile != "" {
		var err error
		if access, err = bus.LoadAccess(cfg.NATSAccessFile); err != nil {
			return nil, nil, err
		}
	}
	if cfg.NATSURL != "" {
		access.URL = cfg.NATSURL.Reveal()
	}
	nc, err := bus.Connect(name, access, log)
	if err != nil {
		return nil, nil, err
	}
	return nc, nc.Close, nil
}

// keys loads or makes the signing key and puts its public half beside it.
func keys(cfg config.Config) (*envelope.Signer, error) {
	private, err := envelope.LoadOrMake(cfg.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	public := strings.TrimSuffix(cfg.KeyFile, filepath.Ext(cfg.KeyFile)) + ".pub"
	if err := envelope.WritePublic(public, private.Public()); err != nil && !errors.Is(err, os.ErrPermission) && !errors.Is(err, syscall.EROFS) {
		return nil, fmt.Errorf("public key: %w", err)
	}
	return envelope.NewSigner(private.Sign), nil
}

// lock makes sure that the data directory is ours alone until unlock.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another control plane runs on %s; stop it or set BIGWAVE_DATA_DIR", filepath.Dir(path))
	}
	return func() { f.Close() }, nil
}

// senders lists the runners to which a run's calls were sent.
func senders(db *store.DB) func(context.Context, string) ([]string, error) {
	return func(ctx context.Context, id string) ([]string, error) {
		r, err := db.RunState(ctx, id)
		var list []string
		for _, c := range r.Calls {
			list = append(list, c.Runner)
		}
		return list, err
	}
}

// events is a run's stream as the API calls it.
func events(d *dispatch.Dispatcher) func(context.Context, string, string, uint64) iter.Seq2[httpapi.Event, error] {
	return func(ctx context.Context, session, run string, after uint64) iter.Seq2[httpapi.Event, error] {
		return func(yield func(httpapi.Event, error) bool) {
			for e, err := range d.Watch(ctx, session, run, after) {
				if !yield(httpapi.Event(e), err) {
					return
				}
			}
		}
	}
}

// newID is a UUIDv7 in hex: ids sort by their time.
func newID() string {
	id := uuid.Must(uuid.NewV7())
	return hex.EncodeToString(id[:])
}

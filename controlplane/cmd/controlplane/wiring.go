package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/config"
	"github.com/bigwave/bigwave/controlplane/internal/dispatch"
	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	runs "github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
	"github.com/bigwave/bigwave/controlplane/internal/toolurl"
	"github.com/bigwave/bigwave/shared/envelope"
)

// parts is everything that runs.
type parts struct {
	db         *store.DB
	dispatcher *dispatch.Dispatcher
	sessions   *session.Service
	runs       *runs.Service
	fleet      *fleet.Service
	renewal    *pytool.Renewal
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
	tools := &tool.Service{Store: db, Sole: cfg.Personal(), Now: time.Now, NewID: newID}
	sources := []tool.Source{builtin.New(), tools}
	users := &identity.Service{Store: db, AdminToken: identity.Digest(cfg.AdminToken.Reveal()), Now: time.Now, NewID: newID, Gone: tools.Forget}
	vault, err := vault(cfg)
	if err != nil {
		return nil, err
	}
	pythonTools := &pytool.Service{
		Store: db, People: users, Vault: vault, Format: dispatch.DescriptionFormat, AdminsAsked: !cfg.AdminToolAccess,
		Loader: &toolurl.Loader{Hosts: cfg.ToolURLHosts, GitHub: cfg.ToolURLGitHub, Raw: cfg.ToolURLRaw},
		Now:    time.Now, NewID: newID, NewUUID: newUUID, Log: log,
	}

	replica := newID()
	keys := &dispatch.KeyFolder{Dir: cfg.RunnerKeysDir}
	d := &dispatch.Dispatcher{
		Bus: nc, JS: js, Signer: signer, Keys: keys, Boxes: keys, Settings: pythonTools, Records: db,
		Senders: senders(db), Pool: cfg.Pool, Replica: replica, Rejects: rejects, Log: log, Now: time.Now, NewID: newID,
	}
	machines := &fleet.Service{
		Store: db, LostAfter: cfg.RunnerLostAfter, Hearing: d.Hearing, Settled: d.Settled, Now: time.Now, Log: log,
	}
	run := &runs.Service{
		Store: db, Tools: sources, Python: pythonTools, Dispatcher: d, Fleet: machines, Pool: cfg.Pool, Replica: replica, Sole: cfg.Personal(),
		MaxOpen: cfg.MaxRunsPerSession, StartWait: cfg.StartWait, ClaimWait: cfg.ClaimWait, Now: time.Now, NewID: newID, Log: log,
	}
	sessions := &session.Service{
		Store: db, Policies: policies, Runs: run, Stopper: d,
		IdleTTL: cfg.SessionIdleTTL, TTL: cfg.SessionTTL, Now: time.Now, NewID: newID, Log: log,
	}
	pythonTools.Describer = &dispatch.Describer{Sessions: sessions, Runs: run, Fleet: machines, Pool: cfg.Pool}
	d.Sessions, d.Runs, d.Fleet = newStartTimer(sessions, metrics), run, machines
	machines.Runs, machines.Sessions = run, sessions

	return &parts{
		db: db, dispatcher: d, sessions: sessions, runs: run, fleet: machines,
		renewal: &pytool.Renewal{Tools: pythonTools, Log: log},
		api: httpapi.New(httpapi.Server{
			Identity: users, Tools: tools, Policies: policies, Sessions: sessions, Runs: run, Fleet: machines, Audit: db,
			PythonTools: pythonTools, Registry: registry(sources, pythonTools),
			Events: events(d),
			Ready: func(ctx context.Context) map[string]error {
				return map[string]error{"database": db.Ready(ctx), "bus": d.Ready(ctx)}
			},
			Counts: db.Counts, Log: log, Metrics: metrics,
		}),
	}, nil
}

// registry is what a run sees that p starts with Python tools.
func registry(sources []tool.Source, python *pytool.Service) func(context.Context, identity.Principal, []string) (tool.Registry, error) {
	return func(ctx context.Context, p identity.Principal, ids []string) (tool.Registry, error) {
		merged, err := tool.Merge(ctx, p.Workspace, sources...)
		if err != nil {
			return merged, err
		}
		_, functions, err := python.Pin(ctx, p, ids)
		return merged.With(functions), err
	}
}

// vault is what seals valves; nil without a key.
func vault(cfg config.Config) (*pytool.Vault, error) {
	if cfg.SecretKey == "" {
		return nil, nil
	}
	return pytool.NewVault(cfg.SecretKey.Reveal())
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

// newUUID is a UUIDv7 as text.
func newUUID() string { return uuid.Must(uuid.NewV7()).String() }

// newID is a UUIDv7 in hex: ids sort by their time.
func newID() string {
	id := uuid.Must(uuid.NewV7())
	return hex.EncodeToString(id[:])
}

package run_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
)

// instant is a runner whose every call has ended when its order is answered.
type instant struct {
	*runner
	runs     *run.Service
	sessions *session.Service
}

func (r *instant) Announce(ctx context.Context, s session.Session) error {
	c := session.Claim{Runner: "r1", Incarnation: "i", Session: s.ID, Epoch: s.Epoch}
	g, err := r.sessions.Claim(ctx, c)
	if err != nil {
		return err
	}
	return r.sessions.Started(ctx, c, session.Sandbox{PolicyDigest: g.Policy.Digest()})
}

func (r *instant) Call(ctx context.Context, s session.Session, c run.Call, _ tool.Invocation) (run.Reply, error) {
	err := r.runs.Apply(ctx, run.Outcome{Runner: s.Runner, Incarnation: s.Incarnation, Session: s.ID, Epoch: s.Epoch, Run: c.Run, Call: c.ID, Status: run.OK})
	return run.Reply{Accepted: true}, err
}

func (r *instant) Notify(string, run.Notice) {}

// BenchmarkOneCall is a run of one call in a live session: from Start until
// the caller has the result, without bus and runner.
func BenchmarkOneCall(b *testing.B) {
	for _, kind := range []storetest.Kind{storetest.SQLite, storetest.Postgres} {
		b.Run(string(kind), func(b *testing.B) {
			db := storetest.Open(b, storetest.URL(b, kind))
			r := &instant{runner: &runner{ready: 1}}
			r.sessions = &session.Service{Store: db, Policies: policies{}, Stopper: r, IdleTTL: time.Hour, TTL: time.Hour, Now: time.Now, NewID: newID, Log: slog.New(slog.DiscardHandler)}
			r.runs = &run.Service{
				Store: db, Tools: []tool.Source{builtin.New()}, Dispatcher: r, Fleet: r, Pool: "default", Replica: "a", MaxOpen: 8,
				StartWait: 10 * time.Second, ClaimWait: time.Second, Now: time.Now, NewID: newID, Log: slog.New(slog.DiscardHandler),
			}
			r.sessions.Runs = r.runs
			ctx, cancel := context.WithCancel(b.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); r.runs.Run(ctx) }()
			defer func() { cancel(); <-ended }()
			s, err := r.sessions.Create(ctx, alice, session.NewSession{})
			if err != nil {
				b.Fatal(err)
			}
			call := func() {
				for {
					started, err := r.runs.Start(ctx, alice, s.ID, calls("shell_exec"))
					if err != nil {
						time.Sleep(time.Millisecond)
						continue
					}
					if got, err := r.runs.Wait(ctx, alice, s.ID, started.ID); err != nil || got.Calls[0].Status != run.OK {
						b.Fatal(statuses(got), err)
					}
					return
				}
			}
			call()
			for b.Loop() {
				call()
			}
		})
	}
}

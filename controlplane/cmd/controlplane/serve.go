package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bigwave/bigwave/controlplane/internal/config"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/shared/fault"
)

// farewell is what a request whose time is over has for its answer.
const farewell = time.Second

var errStopping = fault.New(fault.Unavailable, "the control plane is stopping; ask again")

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

// serve runs everything. When ctx ends the API takes no more and its open
// requests get grace, then farewell to say how far they are; then the rest ends,
// and what is unfinished stays in the database for the next start.
func (p *parts) serve(ctx context.Context, listener net.Listener, grace time.Duration, log *slog.Logger) error {
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	group, work := errgroup.WithContext(work)
	group.Go(func() error { return p.dispatcher.Run(work) })
	group.Go(func() error {
		if ok, err := p.migrate(work, log); !ok { // who asks before that is told to come again
			return err
		}
		group.Go(func() error { return p.sessions.Run(work) })
		group.Go(func() error { return p.runs.Run(work) })
		group.Go(func() error { return p.fleet.Run(work) })
		group.Go(func() error { return p.renewal.Run(work) })
		return nil
	})

	requests, endRequests := context.WithCancelCause(context.WithoutCancel(ctx))
	defer endRequests(nil)
	server := &http.Server{
		BaseContext: func(net.Listener) context.Context { return requests },
		Handler:     p.api, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
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
	shutdown := func(within time.Duration) error {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
		defer cancel()
		return server.Shutdown(last)
	}
	if shutdown(grace) != nil { // what is still open has had its time
		endRequests(errStopping)
		if shutdown(farewell) != nil {
			_ = server.Close()
		}
	}
	stopWork()
	err := group.Wait()
	log.Info("stopped")
	return err
}

// migrate brings the schema up to date, as soon as the database is there;
// false when ctx ends before, or with the error that no waiting mends.
func (p *parts) migrate(ctx context.Context, log *slog.Logger) (bool, error) {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := p.db.Migrate(ctx)
		switch {
		case err == nil || ctx.Err() != nil:
			return err == nil, nil
		case store.Damaged(err):
			return false, fmt.Errorf("the database file is damaged, or is no SQLite database; put a copy in its place or move it away: %w", err)
		}
		log.Warn("database is not ready", "error", err, "again_in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

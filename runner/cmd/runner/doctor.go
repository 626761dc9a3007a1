package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"github.com/bigwave/bigwave/runner/internal/config"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// doctor prints what this machine has of the fence. It needs no control plane
// and no key.
func doctor(ctx context.Context, cfg config.Config, w io.Writer) error {
	// The runner may be alive and own its directory. Ours is the same each time:
	// that makes us the owner of what a doctor that was killed has left.
	dir := cfg.RunnerDataDir + "-doctor"
	cfg.WarmCount = 0
	backend, err := newBackend(cfg, dir, "doctor", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	_ = backend.Sweep(ctx) // where that fails, the table says why
	report := backend.Check(ctx)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := backend.Close(closing); err != nil {
		return fmt.Errorf("close the backend: %w", err)
	}
	if ctx.Err() != nil {
		return errors.New("stopped before everything was looked at")
	}
	if err := table(w, report); err != nil {
		return err
	}
	if missing := report.Missing(); len(missing) > 0 {
		_, err := fmt.Fprintf(w, "\n%d missing without which no sandbox starts.\n", len(missing))
		if err != nil {
			return err
		}
		return errUnclean
	}
	return nil
}

func table(w io.Writer, r sandbox.Report) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "backend: %s\n\nPIECE\tSTATE\tFOUND\tWHAT IT MEANS\n", r.Backend)
	for _, p := range r.Pieces {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", p.Name, p.State, p.Detail, p.Means)
	}
	return t.Flush()
}

// Command bigwave-controlplane decides and remembers: it serves the HTTP API,
// keeps the database, and tells runners what to do. It never runs user code.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/bigwave/bigwave/controlplane/internal/config"
	"github.com/bigwave/bigwave/shared/telemetry"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := command().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bigwave-controlplane:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	serve := func(cmd *cobra.Command, _ []string) error {
		cfg, err := config.Load(os.Environ())
		if err != nil {
			return err
		}
		return run(cmd.Context(), cfg, telemetry.Logger(os.Stderr, cfg.LogFormat, cfg.LogLevel.String()))
	}
	root := &cobra.Command{
		Use: "bigwave-controlplane", Short: "Decides and remembers; settings are BIGWAVE_… variables",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, RunE: serve,
	}
	root.AddCommand(
		&cobra.Command{Use: "serve", Short: "Serve the API (the default)", Args: cobra.NoArgs, RunE: serve},
		&cobra.Command{Use: "version", Short: "Print the version", Args: cobra.NoArgs, Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), version)
		}},
	)
	return root
}

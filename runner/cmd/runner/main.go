// Command bigwave-runner carries out the orders of a Bigwave control plane in
// sandboxes on this machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/bigwave/bigwave/runner/internal/config"
	"github.com/bigwave/bigwave/shared/telemetry"
)

// version is set when a release is built.
var version = "dev"

// errUnclean ends the program with status 1 after everything was said.
var errUnclean = errors.New("not clean")

func main() {
	if err := command().Execute(); err != nil {
		if !errors.Is(err, errUnclean) {
			fmt.Fprintln(os.Stderr, "bigwave-runner:", err)
		}
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:           "bigwave-runner",
		Short:         "Run tool calls in sandboxes on this machine",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(*cobra.Command, []string) error { return run() },
	}
	root.AddCommand(
		&cobra.Command{
			Use:   "doctor",
			Short: "Say what this machine has for sandboxes, and what is missing",
			Args:  cobra.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error {
				cfg, err := config.Load(os.Environ())
				if err != nil {
					return err
				}
				ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
				defer stop()
				return doctor(ctx, cfg, c.OutOrStdout())
			},
		},
		&cobra.Command{
			Use:   "version",
			Short: "Print the version",
			Args:  cobra.NoArgs,
			Run:   func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), version) },
		},
	)
	return root
}

// run is the daemon. The first SIGTERM or SIGINT stops the intake, a second
// one ends the calls that are still open.
func run() error {
	cfg, err := config.Load(os.Environ())
	if err != nil {
		return err
	}
	log := telemetry.Logger(os.Stderr, cfg.LogFormat, cfg.LogLevel.String()).With("runner", cfg.RunnerID)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)

	stop, stopped := context.WithCancel(context.Background())
	hurry, hurried := context.WithCancel(context.Background())
	defer stopped()
	defer hurried()
	go func() { // ends with the program
		<-signals
		log.Info("stopping; send the signal again to end open calls at once")
		stopped()
		<-signals
		log.Info("ending open calls")
		hurried()
	}()
	return (&daemon{cfg: cfg, log: log}).run(stop, hurry)
}

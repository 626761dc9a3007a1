package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/controlplane/internal/config"
	"github.com/bigwave/bigwave/controlplane/internal/embeddednats"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
)

// connect reaches the cluster's bus, or starts one of our own.
func connect(cfg config.Config, log *slog.Logger) (*nats.Conn, func(), error) {
	const name = "bigwave-controlplane"
	if cfg.Personal() {
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
	nc, err := bus.Connect(name, access, log, nats.NoEcho()) // our own notices tell us nothing
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

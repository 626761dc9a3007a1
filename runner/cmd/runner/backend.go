package main

import (
	"fmt"
	"log/slog"

	"github.com/bigwave/bigwave/runner/internal/config"
	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/layer"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd"
	"github.com/bigwave/bigwave/runner/internal/sandbox/subprocess"
)

// newBackend makes the backend that the settings name, with its files in dir.
func newBackend(cfg config.Config, dir, id string, log *slog.Logger) (sandbox.Backend, error) {
	common, err := boxConfig(cfg, dir, id, log)
	if err != nil {
		return nil, err
	}
	if cfg.Backend == "containerd" {
		return containerd.New(containerd.Config{
			Config:      common,
			InitPath:    cfg.Init,
			Address:     cfg.ContainerdAddress,
			Namespace:   cfg.ContainerdNamespace,
			Snapshotter: cfg.ContainerdSnapshotter,
			Runtime:     cfg.ContainerdRuntime,
			Image:       cfg.HostImage,
			Registries:  cfg.Registries,
			PlainHTTP:   cfg.RegistriesPlain,
			AuthFile:    cfg.RegistryAuthFile,
			MaxImageMB:  cfg.MaxImageMB,
		})
	}
	return subprocess.New(subprocess.Config{
		Config:    common,
		InitPath:  cfg.Init,
		Python:    cfg.Python,
		HostImage: cfg.HostImage,
	})
}

// boxConfig is what every backend is told.
func boxConfig(cfg config.Config, dir, id string, log *slog.Logger) (box.Config, error) {
	var mounts []box.Mount
	for _, s := range cfg.Mounts {
		m, err := box.ParseMount(s)
		if err != nil {
			return box.Config{}, fmt.Errorf("BIGWAVE_MOUNTS: %w", err)
		}
		mounts = append(mounts, m)
	}
	if err := egress.ParsePrivateAllow(cfg.EgressPrivateAllow); err != nil {
		return box.Config{}, fmt.Errorf("BIGWAVE_EGRESS_PRIVATE_ALLOW: %w", err)
	}
	packages := ""
	if cfg.PackageIndex != "" {
		packages = layer.Dir(dir)
		if err := layer.Prepare(dir); err != nil {
			return box.Config{}, err
		}
	}
	spares := cfg.WarmCount
	if spares == 0 {
		spares = -1
	}
	return box.Config{
		Spares:      spares,
		Follow:      cfg.WarmPolicy == "recent",
		WarmPython:  cfg.WarmPython,
		DataDir:     dir,
		RunnerID:    id,
		AllowWeak:   cfg.AllowWeak,
		Require:     cfg.Require,
		WorkspaceMB: cfg.WorkspaceMB,
		RoomOf:      cfg.RunnerDataDir,
		Mounts:      mounts,
		Packages:    packages,
		OwnFiles:    []string{cfg.DataDir, cfg.RunnerDataDir},
		Egress: egress.Config{
			Resolver:     cfg.EgressResolver,
			PrivateAllow: cfg.EgressPrivateAllow,
			Connections:  cfg.EgressConnections,
			IdleTimeout:  cfg.EgressIdle,
			MaxBytes:     cfg.EgressBytes,
		},
		Log: log,
	}, nil
}

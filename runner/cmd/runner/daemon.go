package main

import (
	"context"
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/bigwave/bigwave/runner/internal/config"
	"github.com/bigwave/bigwave/runner/internal/execution"
	"github.com/bigwave/bigwave/runner/internal/intake"
	"github.com/bigwave/bigwave/runner/internal/layer"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/stream"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
)

// Times of starting and stopping.
const (
	lookAgain    = 200 * time.Millisecond // between looks for a file that is waited for
	finalsGrace  = 5 * time.Second        // for the stream to take the last reports
	workGrace    = 40 * time.Second       // for sandboxes to go
	backendGrace = 20 * time.Second
)

// daemon is one start of the runner.
type daemon struct {
	cfg config.Config
	log *slog.Logger
}

// trust is what the control plane and this runner know each other by.
type trust struct {
	keys   envelope.Keys
	signer *envelope.Signer
	box    *ecdh.PrivateKey
	access bus.Access
}

// run works until stop ends, then lets open calls end within the grace or until
// hurry ends, and says goodbye.
func (d *daemon) run(stop, hurry context.Context) error {
	backend, about, err := d.backend(stop)
	if err != nil && stop.Err() != nil {
		d.log.Info("stopped while starting")
		return nil
	}
	if err != nil {
		return err
	}
	defer d.close(backend)
	packages, err := d.packages()
	if err != nil {
		return err
	}
	if packages != nil {
		defer packages.Layers.Close()
	}
	t, err := d.trust(stop)
	if err != nil || stop.Err() != nil {
		return err
	}
	nc, err := bus.Connect("runner "+d.cfg.RunnerID, t.access, d.log, nats.IgnoreAuthErrorAbort()) // a password may come back
	if err != nil {
		return err
	}
	defer nc.Close()
	live, err := stream.NewLive(nc, d.cfg.RunnerID, d.log)
	if err != nil {
		return err
	}

	incarnation := newID()
	finals := &stream.Finals{Conn: nc, Signer: t.signer, Runner: d.cfg.RunnerID, Spool: filepath.Join(d.cfg.RunnerDataDir, "spool"), Log: d.log}
	work := &execution.Service{
		Backend:     backend,
		Reports:     finals,
		Live:        live,
		Blobs:       &stream.Blobs{Conn: nc, Runner: d.cfg.RunnerID, NewID: newID},
		Box:         t.box,
		Runner:      d.cfg.RunnerID,
		Incarnation: incarnation,
		MaxCalls:    d.cfg.MaxCalls,
		Packages:    packages,
		Now:         time.Now,
		Log:         d.log,
	}
	orders := &intake.Intake{
		Conn:   nc,
		Keys:   t.keys,
		Signer: t.signer,
		Work:   work,
		To:     intake.Audience{Runner: d.cfg.RunnerID, Incarnation: incarnation},
		Pool:   d.cfg.Pool,
		Slots:  d.cfg.Slots,
		Ceilings: intake.Ceilings{
			MemoryMB:         d.cfg.MaxMemoryMB,
			PIDs:             d.cfg.MaxPIDs,
			WallClockSeconds: d.cfg.MaxWallClockSeconds,
			OutputBytes:      d.cfg.MaxOutputBytes,
		},
		About:       about,
		BeatEvery:   d.cfg.BeatEvery,
		KeepUnheard: d.cfg.KeepUnheard,
		Now:         time.Now,
		Log:         d.log,
	}
	d.log.Info("runner starts", "incarnation", incarnation, "pool", d.cfg.Pool, "slots", d.cfg.Slots, "backend", about.Backend, "version", version)
	return d.serve(stop, hurry, finals, work, orders)
}

// serve is the order in which things start and stop: the reports of the last
// start go before the first beat, and the last beat after the last report.
func (d *daemon) serve(stop, hurry context.Context, finals *stream.Finals, work *execution.Service, orders *intake.Intake) error {
	if err := finals.Open(); err != nil {
		return err
	}
	retries, endRetries := context.WithCancel(context.Background())
	listen, endListen := context.WithCancel(context.Background())
	defer endListen()
	var g errgroup.Group
	g.Go(func() error { return finals.Run(retries) })
	defer func() {
		endRetries()
		_ = g.Wait() // Run ends without an error
		if err := finals.Close(); err != nil {
			d.log.Warn("answers of the event stream are still listened for", "error", err)
		}
	}()
	if _, err := finals.Recover(stop); err != nil {
		if stop.Err() != nil {
			d.log.Warn("stopped before the last start's reports were published; they stay in the spool")
			return errUnclean
		}
		return err
	}

	intakeEnded := make(chan error, 1)
	go func() { intakeEnded <- orders.Run(listen) }() // received below
	var failed error
	select {
	case <-stop.Done():
	case failed = <-intakeEnded:
		intakeEnded <- nil
	}
	orders.Drain()
	d.drain(hurry, work)
	d.closeWork(work)
	last, cancel := context.WithTimeout(context.Background(), finalsGrace)
	defer cancel()
	finals.Wait(last)
	endListen()
	err := errors.Join(failed, <-intakeEnded)
	return errors.Join(err, d.save(finals))
}

// drain lets the open calls end by themselves for a while.
func (d *daemon) drain(hurry context.Context, work *execution.Service) {
	ctx, cancel := context.WithTimeout(hurry, d.cfg.Grace)
	defer cancel()
	work.Drain(ctx)
}

// closeWork ends what is left. A sandbox that hangs must not keep the reports
// of the others from the spool.
func (d *daemon) closeWork(work *execution.Service) {
	ctx, cancel := context.WithTimeout(context.Background(), workGrace)
	defer cancel()
	if err := work.Close(ctx); err != nil {
		d.log.Error("work did not end", "error", err)
	}
}

// save puts what the stream did not take into the spool.
func (d *daemon) save(finals *stream.Finals) error {
	n, err := finals.Save()
	if err != nil {
		d.log.Error("reports could not be spooled", "count", n, "error", err)
		return errUnclean
	}
	if n > 0 {
		d.log.Warn("reports were spooled for the next start", "count", n)
		return errUnclean
	}
	d.log.Info("runner stopped")
	return nil
}

// backend makes the sandboxes' backend, removes what an earlier start left and
// refuses to go on where a fatal piece of the fence is missing.
func (d *daemon) backend(ctx context.Context) (sandbox.Backend, intake.About, error) {
	if err := os.MkdirAll(d.cfg.RunnerDataDir, 0o700); err != nil {
		return nil, intake.About{}, fmt.Errorf("make the runner's data directory: %w", err)
	}
	backend, err := newBackend(d.cfg, d.cfg.RunnerDataDir, d.cfg.RunnerID, d.log)
	if err != nil {
		return nil, intake.About{}, err
	}
	report := backend.Check(ctx)
	var missing []string
	for _, p := range report.Missing() {
		missing = append(missing, fmt.Sprintf("%s (%s: %s)", p.Name, p.Detail, p.Means))
	}
	if len(missing) > 0 {
		d.close(backend)
		return nil, intake.About{}, fmt.Errorf("this machine can't hold a sandbox; missing: %s; `bigwave-runner doctor` prints the whole table", strings.Join(missing, "; "))
	}
	if err := backend.Sweep(ctx); err != nil {
		d.close(backend)
		return nil, intake.About{}, fmt.Errorf("remove what the last start left: %w", err)
	}
	about := intake.About{Version: version, Backend: report.Backend, Labels: d.cfg.Labels, Enforces: map[string]string{}}
	for _, p := range report.Pieces {
		about.Enforces[p.Name] = p.State
	}
	return backend, about, nil
}

// packages is what installs the requirements of Python tools, if the operator
// has named an index.
func (d *daemon) packages() (*execution.Packages, error) {
	if d.cfg.PackageIndex == "" {
		return nil, nil
	}
	index, err := url.Parse(d.cfg.PackageIndex)
	if err != nil {
		return nil, fmt.Errorf("BIGWAVE_PACKAGE_INDEX: %w", err)
	}
	ca, err := authorities(d.cfg.PackageIndexCA)
	if err != nil {
		return nil, fmt.Errorf("BIGWAVE_PACKAGE_INDEX_CA: %w", err)
	}
	layers := &layer.Store{Max: d.cfg.PackagesMB << 20, Time: execution.MakeTime, Now: time.Now, Log: d.log}
	if err := layers.Open(d.cfg.RunnerDataDir); err != nil {
		return nil, err
	}
	return &execution.Packages{
		Layers: layers, Index: index, Hosts: d.cfg.PackageHosts, CA: ca,
		MaxMemoryMB: d.cfg.MaxMemoryMB, MaxPIDs: d.cfg.MaxPIDs,
	}, nil
}

// maxAuthorities fit into a variable of an environment.
const maxAuthorities = 64 << 10

// authorities is the certificates of a PEM file and nothing else of it; none
// without a path.
func authorities(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	var out []byte
	for block, rest := pem.Decode(raw); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})...)
	}
	if len(out) == 0 || len(out) > maxAuthorities {
		return "", fmt.Errorf("%s must have certificates in PEM, and at most %d KiB of them", path, maxAuthorities>>10)
	}
	return string(out), nil
}

func (d *daemon) close(b sandbox.Backend) {
	ctx, cancel := context.WithTimeout(context.Background(), backendGrace)
	defer cancel()
	if err := b.Close(ctx); err != nil {
		d.log.Error("backend did not close cleanly", "error", err)
	}
}

// trust makes the runner's key, leaves its public half, and waits for what the
// control plane has to write first.
func (d *daemon) trust(ctx context.Context) (trust, error) {
	private, err := envelope.LoadOrMake(d.cfg.RunnerKeyFile)
	if err != nil {
		return trust{}, fmt.Errorf("runner key: %w", err)
	}
	d.publish(private.Public())
	var pubs []ed25519.PublicKey
	for _, path := range d.cfg.ControlPlaneKeys() {
		pub, err := await(ctx, d.log, path, envelope.LoadPublic)
		if err != nil {
			return trust{}, fmt.Errorf("control plane's key: %w", err)
		}
		pubs = append(pubs, pub.Sign)
	}
	t := trust{keys: envelope.NewKeys(pubs...), signer: envelope.NewSigner(private.Sign), box: private.Box}
	if d.cfg.NATSAccessFile != "" {
		if t.access, err = await(ctx, d.log, d.cfg.NATSAccessFile, bus.LoadAccess); err != nil {
			return trust{}, fmt.Errorf("access to the bus: %w", err)
		}
	}
	if d.cfg.NATSURL != "" {
		t.access.URL = d.cfg.NATSURL.Reveal()
	}
	d.publish(private.Public()) // the folder may have come while we waited
	return t, nil
}

// publish leaves the public key where the control plane looks, if that folder
// is here and ours to write.
func (d *daemon) publish(p envelope.Public) {
	path := filepath.Join(d.cfg.RunnerKeysDir, d.cfg.RunnerID+".pub")
	if err := envelope.WritePublic(path, p); err != nil {
		d.log.Debug("public key was not left for the control plane", "path", path, "error", err)
	}
}

// await loads a file that somebody else may still have to write.
func await[T any](ctx context.Context, log *slog.Logger, path string, load func(string) (T, error)) (T, error) {
	said := false
	for {
		v, err := load(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return v, err
		}
		if !said {
			said = true
			log.Info("waiting for a file of the control plane", "path", path)
		}
		select {
		case <-time.After(lookAgain):
		case <-ctx.Done():
			var zero T
			return zero, context.Cause(ctx)
		}
	}
}

func newID() string { return strings.ReplaceAll(uuid.NewString(), "-", "") }

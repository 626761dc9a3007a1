package containerd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/errdefs"
	"github.com/containerd/containerd/snapshots"
	"golang.org/x/sync/errgroup"
)

const (
	removeTimeout = 20 * time.Second // of one try
	removeAgain   = time.Second      // after a try that failed
	removesAtOnce = 8
	sweepTries    = 5 // of one name
)

// remove frees a sandbox's container, shim and snapshot in the background,
// trying until it is done or we close; then the next start sweeps.
func (m *maker) remove(name string) {
	m.working.Go(func() {
		for told := false; ; told = true {
			err := m.removeNow(m.life, name)
			if err == nil {
				return
			}
			if !told {
				m.log.Warn("a container is not gone yet", "container", name, "error", err)
			}
			select {
			case <-time.After(removeAgain):
			case <-m.life.Done():
				m.log.Warn("a container is left to the next start", "container", name)
				return
			}
		}
	})
}

// removeNow succeeds also when there is nothing of that name. Two at once for
// one name would have a shim stop under the other's hands: they share one try.
func (m *maker) removeNow(ctx context.Context, name string) error {
	_, err, _ := m.removing.Do(name, func() (any, error) { return nil, m.removeOnce(ctx, name) })
	return err
}

func (m *maker) removeOnce(ctx context.Context, name string) error {
	client, err := m.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(m.scope(ctx), removeTimeout)
	defer cancel()
	c, err := client.LoadContainer(ctx, name)
	switch {
	case errdefs.IsNotFound(err):
	case err != nil:
		return err
	default:
		if err := removeTask(ctx, c); err != nil {
			return fmt.Errorf("task: %w", err)
		}
		if err := c.Delete(ctx); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("container: %w", err)
		}
	}
	err = client.SnapshotService(m.cfg.Snapshotter).Remove(ctx, name)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

func removeTask(ctx context.Context, c containerd.Container) error {
	task, err := c.Task(ctx, nil)
	if err == nil {
		_, err = task.Delete(ctx, containerd.WithProcessKill)
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Sweep removes what carries our label.
func (m *maker) Sweep(ctx context.Context) error {
	client, err := m.connect()
	if err != nil {
		return err
	}
	filter := fmt.Sprintf("labels.%q==%q", ownerLabel, m.owner)
	left, err := client.Containers(m.scope(ctx), filter)
	if err != nil {
		return err
	}
	var names []string
	for _, c := range left {
		names = append(names, c.ID())
	}
	err = client.SnapshotService(m.cfg.Snapshotter).Walk(m.scope(ctx), func(_ context.Context, s snapshots.Info) error {
		names = append(names, s.Name) // of a container too, mostly
		return nil
	}, filter)
	if err != nil {
		return fmt.Errorf("snapshots: %w", err)
	}
	if len(names) > 0 {
		m.log.Info("removing what the last start left", "containers", len(left), "names", len(names))
	}
	return m.removeAll(ctx, names)
}

func (m *maker) removeAll(ctx context.Context, names []string) error {
	errs := make([]error, len(names))
	var g errgroup.Group
	g.SetLimit(removesAtOnce)
	seen := map[string]bool{}
	for i, name := range names {
		if seen[name] {
			continue
		}
		seen[name] = true
		g.Go(func() error {
			if err := m.removeSoon(ctx, name); err != nil {
				errs[i] = fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	_ = g.Wait() // each has its own
	return errors.Join(errs...)
}

// removeSoon tries a few times: a shim that is just stopping refuses to delete.
func (m *maker) removeSoon(ctx context.Context, name string) error {
	for try := 1; ; try++ {
		err := m.removeNow(ctx, name)
		if err == nil || try == sweepTries {
			return err
		}
		select {
		case <-time.After(removeAgain):
		case <-ctx.Done():
			return err
		}
	}
}

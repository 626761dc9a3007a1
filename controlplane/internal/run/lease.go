package run

import (
	"context"
	"sync"
	"time"
)

// Run drives this replica's runs, keeps their leases and takes over those
// whose replica is gone, until ctx ends. Then it lets go of them unchanged, so
// that another replica, or the next start of this one, goes on.
func (s *Service) Run(ctx context.Context) error {
	var drivers sync.WaitGroup
	s.mu.Lock()
	s.mine = map[string]*driver{}
	s.begin = func(d *driver) { drivers.Go(func() { d.drive(ctx) }) }
	s.mu.Unlock()

	s.keepLeases(ctx)

	s.mu.Lock()
	s.begin = nil
	s.mu.Unlock()
	drivers.Wait()
	return s.release(ctx)
}

func (s *Service) keepLeases(ctx context.Context) {
	pace := s.Pace.withDefaults()
	tick := time.NewTicker(pace.Renew)
	defer tick.Stop()
	all := s.Sole
	for {
		if err := s.adopt(ctx, all); err == nil {
			all = false
		} else if ctx.Err() == nil {
			s.Log.WarnContext(ctx, "renew the leases of runs", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// adopt renews leases and drives every run that is this replica's from now on.
func (s *Service) adopt(ctx context.Context, all bool) error {
	now := s.Now()
	until := now.Add(s.Pace.withDefaults().Lease)
	runs, err := s.Store.RenewLeases(ctx, s.Replica, until)
	if err != nil {
		return err
	}
	taken, err := s.Store.TakeRuns(ctx, s.Replica, now, until, all, 1000)
	if err != nil {
		return err
	}
	for _, id := range append(runs, taken...) {
		if err := s.resume(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// resume drives a run that this replica owns and does not drive.
func (s *Service) resume(ctx context.Context, id string) error {
	s.mu.Lock()
	driven := s.mine[id] != nil
	s.mu.Unlock()
	if driven {
		return nil
	}
	r, err := s.Store.RunState(ctx, id)
	if err != nil || r.Status.Final() {
		return err
	}
	d := s.driver(id, r.Session)
	d.owner, d.workspace = r.Owner, r.Workspace
	if !s.enlist(d) {
		s.hub.drop(d.l, d.id, d.session)
		return nil
	}
	s.Log.InfoContext(ctx, "run taken over", "run", id)
	s.launch(d)
	return nil
}

// release ends the leases, so that nobody has to wait for that.
func (s *Service) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	_, err := s.Store.RenewLeases(ctx, s.Replica, s.Now())
	return err
}

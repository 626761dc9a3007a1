package pytool

import (
	"context"
	"log/slog"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/shared/fault"
)

// Key is the place of a tool among those of all workspaces that wait to be
// described again.
type Key struct {
	Format        int // of the description that it has
	Workspace, ID string
}

// Renewal has the tools described again that an older platform described:
// what it said of them is not what this one says. It does so one by one, as
// there are runners; until then what is stored is what is shown.
type Renewal struct {
	Tools *Service
	Every time.Duration // a round; 0: 10 s
	Log   *slog.Logger

	after  Key           // the tool at which the last round stopped
	failed map[Key]int64 // revisions that no round can describe; the next start tries again
}

// Run repeats Sweep until ctx ends.
func (r *Renewal) Run(ctx context.Context) error {
	every := r.Every
	if every <= 0 {
		every = 10 * time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := r.Sweep(ctx); err != nil && ctx.Err() == nil {
			r.Log.WarnContext(ctx, "describe Python tools again", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Sweep is one round of what Run repeats. It ends at a tool that no runner
// describes now, and the next one goes on behind it.
func (r *Renewal) Sweep(ctx context.Context) error {
	for {
		t, err := r.Tools.Store.OutdatedPythonTool(ctx, r.Tools.Format, r.after)
		switch {
		case fault.Is(err, fault.NotFound):
			r.after = Key{}
			return nil
		case err != nil:
			return err
		}
		r.after = Key{t.Format, t.Workspace, t.ID}
		if tried, ok := r.failed[r.after]; ok && tried == t.Revision {
			continue
		}
		if err := r.Tools.renew(ctx, t); err != nil {
			switch f := fault.From(err); {
			case f.Code == string(fault.NoRunner):
				return nil
			case f.Kind == fault.Unavailable || f.Kind == fault.Internal:
				return err
			case f.Kind != fault.Conflict && f.Kind != fault.NotFound: // those were changed meanwhile
				r.fail(ctx, t, err)
			}
		}
	}
}

func (r *Renewal) fail(ctx context.Context, t Tool, err error) {
	if r.failed == nil {
		r.failed = map[Key]int64{}
	}
	r.failed[r.after] = t.Revision
	r.Log.WarnContext(ctx, "a Python tool can't be described again; what it said of itself before stays",
		"workspace", t.Workspace, "tool", t.ID, "error", err)
}

// renew has t described as it is, and stores only that.
func (s *Service) renew(ctx context.Context, t Tool) error {
	t, err := s.describe(ctx, t)
	if err != nil {
		return err
	}
	if t.Sealed.Spoken, err = s.spokenWith(ctx, t, s.valvesOf(ctx, t)); err != nil {
		return err
	}
	return s.Store.RenewPythonTool(ctx, t, audit.Event{
		ID: audit.ID(s.NewID()), At: s.now(), Workspace: t.Workspace, Actor: audit.ControlPlane,
		Action: audit.PythonToolDescribe, Object: t.ID, Outcome: audit.OK, Detail: t.Digest(),
	})
}

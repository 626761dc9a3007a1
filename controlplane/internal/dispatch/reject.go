package dispatch

import (
	"context"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// auditsPerMinute bounds the records of refused messages: whoever floods the
// bus with them must not flood the database. The counter sees them all.
const auditsPerMinute = 120

// quota lets a number of things through in each minute.
type quota struct {
	mu     sync.Mutex
	minute time.Time
	used   int
}

func (q *quota) take(now time.Time, perMinute int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m := now.Truncate(time.Minute); !m.Equal(q.minute) {
		q.minute, q.used = m, 0
	}
	q.used++
	return q.used <= perMinute
}

// reject records that a runner's message was not taken. what is "claim",
// "beat" or "result".
func (d *Dispatcher) reject(ctx context.Context, what, runner, object string, err error) {
	why := reason(err)
	if d.Rejects != nil {
		d.Rejects.WithLabelValues(what, why).Inc()
	}
	if !d.audits.take(d.Now(), auditsPerMinute) {
		return
	}
	runner, object = clip(runner, 100), clip(object, 200)
	d.Log.WarnContext(ctx, "message of a runner rejected", "what", what, "reason", why, "runner", runner, "object", object, "err", clip(err.Error(), 500))
	e := audit.Event{
		ID:        "aud_" + d.NewID(),
		At:        d.Now(),
		Workspace: identity.DefaultWorkspace,
		Actor:     "runner:" + runner,
		Action:    what + "_rejected",
		Object:    object,
		Outcome:   why,
		Detail:    clip(err.Error(), 500),
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	if err := d.Records.InsertEvent(ctx, e); err != nil {
		d.Log.WarnContext(ctx, "reject record not written", "err", err)
	}
}

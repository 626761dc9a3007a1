package dispatch

import (
	"context"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// Records of refused messages are bounded, in all and for one sender and
// reason: whoever floods the bus must not flood the database. The counter
// sees every one.
const (
	recordsPerMinute       = 240
	recordsPerSenderMinute = 20
)

// quota counts the records of the current minute.
type quota struct {
	mu     sync.Mutex
	minute time.Time
	all    int
	of     map[string]int
}

func (q *quota) take(now time.Time, sender string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m := now.Truncate(time.Minute); q.of == nil || !m.Equal(q.minute) {
		q.minute, q.all, q.of = m, 0, map[string]int{}
	}
	if q.all >= recordsPerMinute || q.of[sender] >= recordsPerSenderMinute {
		return false
	}
	q.all++
	q.of[sender]++
	return true
}

// rejected are the messages of runners that may not be taken, as they are counted.
var rejected = map[string]string{
	audit.ClaimRejected:  "claim",
	audit.BeatRejected:   "beat",
	audit.ResultRejected: "result",
}

// reject records that a runner's message was not taken; action is one of the
// three that say so.
func (d *Dispatcher) reject(ctx context.Context, action, runner, object string, err error) {
	why, what := reason(err), rejected[action]
	if d.Rejects != nil {
		d.Rejects.WithLabelValues(what, why).Inc()
	}
	runner, object = clip(runner, 100), clip(object, 200)
	if !d.records.take(d.Now(), what+" "+runner+" "+why) {
		return
	}
	d.Log.WarnContext(ctx, "message of a runner rejected", "what", what, "reason", why, "runner", runner, "object", object, "error", clip(err.Error(), 500))
	e := audit.Event{
		ID:        audit.ID(d.NewID()),
		At:        d.Now(),
		Workspace: identity.DefaultWorkspace,
		Actor:     audit.Runner(runner),
		Action:    action,
		Object:    object,
		Outcome:   why,
		Detail:    clip(err.Error(), 500),
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	if err := d.Records.InsertEvent(ctx, e); err != nil {
		d.Log.WarnContext(ctx, "reject record not written", "error", err)
	}
}

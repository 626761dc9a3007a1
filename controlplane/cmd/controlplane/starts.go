package main

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/dispatch"
	"github.com/bigwave/bigwave/controlplane/internal/session"
)

// startTimer measures how long sandboxes take from a granted claim to their
// first sign of life, as far as both came to this replica.
type startTimer struct {
	dispatch.Sessions
	seconds prometheus.Histogram
	now     func() time.Time

	mu      sync.Mutex
	granted map[string]time.Time // by session; one claim at a time holds it
}

func newStartTimer(next dispatch.Sessions, reg prometheus.Registerer) *startTimer {
	t := &startTimer{Sessions: next, now: time.Now, granted: map[string]time.Time{}, seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bigwave_session_start_seconds", Help: "From a granted claim to a live sandbox.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
	})}
	reg.MustRegister(t.seconds)
	return t
}

func (t *startTimer) Claim(ctx context.Context, c session.Claim) (session.Grant, error) {
	g, err := t.Sessions.Claim(ctx, c)
	if err == nil {
		t.mu.Lock()
		t.granted[c.Session] = t.now()
		t.mu.Unlock()
	}
	return g, err
}

func (t *startTimer) Started(ctx context.Context, c session.Claim, s session.Sandbox) error {
	err := t.Sessions.Started(ctx, c, s)
	if began, ok := t.forget(c.Session); ok && err == nil {
		t.seconds.Observe(t.now().Sub(began).Seconds())
	}
	return err
}

func (t *startTimer) StartFailed(ctx context.Context, c session.Claim, code, field, message string) error {
	t.forget(c.Session)
	return t.Sessions.StartFailed(ctx, c, code, field, message)
}

func (t *startTimer) forget(id string) (began time.Time, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Claims whose runner was never heard of again must not pile up.
	for other, at := range t.granted {
		if t.now().Sub(at) > time.Hour {
			delete(t.granted, other)
		}
	}
	began, ok = t.granted[id]
	delete(t.granted, id)
	return began, ok
}

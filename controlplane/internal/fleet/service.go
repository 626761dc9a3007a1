package fleet

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// Why a runner's start is lost; the record names it.
const (
	LostBeat       = "lost_beat"       // its beats stopped
	NewIncarnation = "new_incarnation" // it started anew
	Goodbye        = "left"            // it said goodbye and left something open
	Superseded     = "superseded"      // it holds sessions, but is not the runner's current start
)

// Held is a session's epoch that a runner holds.
type Held struct {
	Session string
	Epoch   int64
}

// Beat is a runner's sign of life.
type Beat struct {
	Runner   Runner // LastBeat is not read
	Sessions []Held
	Leaving  bool
	Draining bool
}

// Start is one start of a runner.
type Start struct{ Runner, Incarnation string }

// Store keeps runners. Every method is one transaction.
type Store interface {
	// Runner fails with fault.NotFound.
	Runner(ctx context.Context, id string) (Runner, error)
	Runners(ctx context.Context) ([]Runner, error)
	// PutRunner inserts or replaces r; FirstSeen stays while it is the same start.
	PutRunner(ctx context.Context, r Runner) error
	// LoseRunnerRow marks a runner as lost if it still is that start and was not heard since lastBeat.
	LoseRunnerRow(ctx context.Context, s Start, lastBeat time.Time) error
	// SilentRunners lists those not lost whose last beat is before t.
	SilentRunners(ctx context.Context, t time.Time) ([]Runner, error)
	// OrphanStarts lists starts that hold sessions although they are not, or no longer, current.
	OrphanStarts(ctx context.Context) ([]Start, error)
	// HeldBy lists what the start owns; true where the sandbox is up.
	HeldBy(ctx context.Context, s Start) (map[Held]bool, error)
}

// Sessions is told of a sandbox that is gone without a word.
type Sessions interface {
	Ended(ctx context.Context, c session.Claim, code, message string) error
}

// Runs is told which start of a runner is gone. It may be told twice.
type Runs interface {
	RunnerLost(ctx context.Context, runner, incarnation, reason string) error
}

// Service keeps track of runners. Any replica may answer any beat.
type Service struct {
	Store     Store
	Runs      Runs
	Sessions  Sessions
	LostAfter time.Duration // from the last beat; 0: 45 s
	// Hearing says since when this replica has been able to hear the bus
	// without a break; false: it can't now, and nobody is called lost.
	Hearing func() (since time.Time, ok bool)
	// Settled waits until the reports that have reached the event stream by
	// now are applied, so that what a runner told before it ended counts. May be nil.
	Settled    func(ctx context.Context) error
	SweepEvery time.Duration // 0: 2 s
	Now        func() time.Time
	Log        *slog.Logger

	mu         sync.Mutex
	missing    map[Start]map[Held]int // live sessions that so many beats in a row did not name
	superseded map[Start]time.Time
	clear      time.Time // since when nothing kept this replica from noticing beats
	swept      time.Time // the last sweep
}

// Beat takes a sign of life and answers which of the runner's sessions it no
// longer owns. A beat of an earlier start is refused with fault.Conflict; the
// first beat of a new start makes the one before it lost.
func (s *Service) Beat(ctx context.Context, b Beat) ([]Held, error) {
	now := s.Now()
	start := Start{b.Runner.ID, b.Runner.Incarnation}
	if s.isSuperseded(start) {
		return nil, fault.New(fault.Conflict, "a later start of runner %q is known", b.Runner.ID).WithCode(Superseded)
	}
	known, err := s.Store.Runner(ctx, b.Runner.ID)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, s.deaf(err)
	}
	if err == nil && known.Incarnation != b.Runner.Incarnation {
		if err := s.replace(ctx, Start{known.ID, known.Incarnation}); err != nil {
			return nil, s.deaf(err)
		}
	}
	r := b.Runner
	r.FirstSeen, r.LastBeat, r.State = now, now, Ready
	switch {
	case b.Leaving:
		r.State = Left
	case b.Draining:
		r.State = Draining
	}
	if err := s.Store.PutRunner(ctx, r); err != nil {
		return nil, s.deaf(err)
	}
	owned, err := s.Store.HeldBy(ctx, start)
	if err != nil {
		return nil, err
	}
	for _, h := range s.unnamed(start, owned, b.Sessions) {
		s.gone(ctx, start, h)
	}
	var raised []Held
	for _, h := range b.Sessions {
		if _, ok := owned[h]; !ok {
			raised = append(raised, h)
		}
	}
	return raised, nil
}

// unnamedBeats is how many beats in a row must not name a live session before
// it counts as gone: its report may be on the way.
const unnamedBeats = 5

// unnamed counts the live sessions that a beat does not name, and returns
// those for which it is time to stop hoping.
func (s *Service) unnamed(start Start, owned map[Held]bool, named []Held) []Held {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := map[Held]int{}
	var gone []Held
	for h, live := range owned {
		if !live || slices.Contains(named, h) {
			continue
		}
		if now[h] = s.missing[start][h] + 1; now[h] >= unnamedBeats {
			gone = append(gone, h)
		}
	}
	delete(s.missing, start)
	if len(now) > 0 {
		if s.missing == nil {
			s.missing = map[Start]map[Held]int{}
		}
		s.missing[start] = now
	}
	return gone
}

// gone ends a session whose sandbox the runner no longer has.
func (s *Service) gone(ctx context.Context, start Start, h Held) {
	s.settle(ctx)
	c := session.Claim{Runner: start.Runner, Incarnation: start.Incarnation, Session: h.Session, Epoch: h.Epoch}
	err := s.Sessions.Ended(ctx, c, string(fault.SandboxDied), "its runner no longer names it")
	if err != nil && !fault.Is(err, fault.Conflict) {
		s.Log.WarnContext(ctx, "end a session that its runner no longer names", "session", h.Session, "error", err)
	}
}

// replace makes an earlier start lost once what it had reported is applied.
func (s *Service) replace(ctx context.Context, old Start) error {
	s.settle(ctx)
	if err := s.Runs.RunnerLost(ctx, old.Runner, old.Incarnation, NewIncarnation); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.superseded == nil {
		s.superseded = map[Start]time.Time{}
	}
	for k, at := range s.superseded {
		if s.Now().Sub(at) > time.Hour {
			delete(s.superseded, k)
		}
	}
	s.superseded[old] = s.Now()
	return nil
}

func (s *Service) isSuperseded(start Start) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.superseded[start]
	return ok
}

func (s *Service) settle(ctx context.Context) {
	if s.Settled == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := s.Settled(ctx); err != nil {
		s.Log.WarnContext(ctx, "reports not settled before a runner is called lost", "error", err)
	}
}

// Runners lists every runner that was ever seen.
func (s *Service) Runners(ctx context.Context) ([]Runner, error) { return s.Store.Runners(ctx) }

// Any counts the runners of pool that take sessions.
func (s *Service) Any(ctx context.Context, pool string) (ready int, err error) {
	all, err := s.Store.Runners(ctx)
	if err != nil {
		return 0, err
	}
	for _, r := range all {
		if r.Pool == pool && r.State == Ready && s.Now().Sub(r.LastBeat) < s.lostAfter() {
			ready++
		}
	}
	return ready, nil
}

// Run calls runners lost whose beats have stopped, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(s.sweepEvery())
	defer tick.Stop()
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.Log.WarnContext(ctx, "runner sweep", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Sweep is one round of what Run repeats.
func (s *Service) Sweep(ctx context.Context) error {
	orphans, err := s.Store.OrphanStarts(ctx)
	if err != nil {
		return s.deaf(err)
	}
	for _, o := range orphans {
		if err := s.Runs.RunnerLost(ctx, o.Runner, o.Incarnation, Superseded); err != nil {
			return s.deaf(err)
		}
	}
	if !s.mayJudge() {
		return nil
	}
	silent, err := s.Store.SilentRunners(ctx, s.Now().Add(-s.lostAfter()))
	if err != nil {
		return s.deaf(err)
	}
	for _, r := range silent {
		if err := s.lose(ctx, r); err != nil {
			return s.deaf(err)
		}
	}
	return nil
}

func (s *Service) lose(ctx context.Context, r Runner) error {
	s.settle(ctx)
	reason := LostBeat
	if r.State == Left {
		reason = Goodbye
	}
	if err := s.Store.LoseRunnerRow(ctx, Start{r.ID, r.Incarnation}, r.LastBeat); err != nil {
		if fault.Is(err, fault.Conflict) {
			return nil // it was heard again
		}
		return err
	}
	return s.Runs.RunnerLost(ctx, r.ID, r.Incarnation, reason)
}

// mayJudge reports whether this replica has been able to notice beats for
// long enough to miss one: it heard the bus, reached the database, and was not
// itself asleep.
func (s *Service) mayJudge() bool {
	now := s.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	asleep := s.swept.IsZero() || now.Sub(s.swept) > 2*s.sweepEvery()+5*time.Second
	s.swept = now
	if asleep || s.clear.IsZero() {
		s.clear = now
	}
	since, ok := s.Hearing()
	if !ok {
		return false
	}
	if since.After(s.clear) {
		s.clear = since
	}
	return now.Sub(s.clear) >= s.lostAfter()
}

// deaf notes that beats may have gone unnoticed, and passes err on.
func (s *Service) deaf(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clear = s.Now()
	return err
}

func (s *Service) lostAfter() time.Duration {
	if s.LostAfter > 0 {
		return s.LostAfter
	}
	return 45 * time.Second
}

func (s *Service) sweepEvery() time.Duration {
	if s.SweepEvery > 0 {
		return s.SweepEvery
	}
	return 2 * time.Second
}

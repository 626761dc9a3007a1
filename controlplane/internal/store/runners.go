package store

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/fleet"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

type runnerRow struct {
	ID            string `db:"id"`
	Incarnation   string `db:"incarnation"`
	Pool          string `db:"pool"`
	State         string `db:"state"`
	Backend       string `db:"backend"`
	Version       string `db:"version"`
	Labels        string `db:"labels"`
	Enforces      string `db:"enforces"`
	Slots         int    `db:"slots"`
	Used          int    `db:"used"`
	StartFailures int    `db:"start_failures"`
	StartFailure  string `db:"start_failure"`
	FirstSeen     int64  `db:"first_seen"`
	LastBeat      int64  `db:"last_beat"`
}

func (r runnerRow) runner() fleet.Runner {
	return fleet.Runner{
		ID: r.ID, Incarnation: r.Incarnation, Pool: r.Pool, State: fleet.State(r.State), Backend: r.Backend,
		Version: r.Version, Labels: pairs(r.Labels), Enforces: pairs(r.Enforces), Slots: r.Slots, Used: r.Used,
		StartFailures: r.StartFailures, StartFailure: r.StartFailure, FirstSeen: instant(r.FirstSeen), LastBeat: instant(r.LastBeat),
	}
}

const (
	runnerColumns = `id, incarnation, pool, state, backend, version, labels, enforces, slots, used, start_failures,
		start_failure, first_seen, last_beat`
	runnerByID = `SELECT ` + runnerColumns + ` FROM runners WHERE id = $1`
	allRunners = `SELECT ` + runnerColumns + ` FROM runners ORDER BY id`
	putRunner  = `
		INSERT INTO runners (` + runnerColumns + `) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
		ON CONFLICT (id) DO UPDATE SET
			first_seen = CASE WHEN runners.incarnation = excluded.incarnation THEN runners.first_seen ELSE excluded.first_seen END,
			incarnation = excluded.incarnation, pool = excluded.pool, state = excluded.state, backend = excluded.backend,
			version = excluded.version, labels = excluded.labels, enforces = excluded.enforces, slots = excluded.slots,
			used = excluded.used, start_failures = excluded.start_failures,
			start_failure = excluded.start_failure, last_beat = excluded.last_beat`
	loseRunner = `
		UPDATE runners SET state = CASE WHEN state = 'left' THEN 'left' ELSE 'lost' END
		WHERE id = $1 AND incarnation = $2 AND last_beat <= $3`
	// One that said goodbye counts as silent while it has left something open.
	silentRunners = `
		SELECT ` + runnerColumns + ` FROM runners
		WHERE last_beat < $1 AND (state IN ('ready', 'draining') OR (state = 'left' AND EXISTS (
			SELECT 1 FROM agent_sessions s WHERE s.runner = runners.id AND s.incarnation = runners.incarnation
				AND (s.status IN ('live', 'starting') OR EXISTS (
					SELECT 1 FROM runs JOIN calls c ON c.run_id = runs.id
					WHERE runs.session_id = s.id AND runs.finished_at = 0 AND c.status IN (` + sentStatuses + `))))))
		ORDER BY id`
	orphanStarts = `
		SELECT DISTINCT s.runner AS id, s.incarnation FROM agent_sessions s JOIN runners r ON r.id = s.runner
		WHERE s.status IN ('live', 'starting') AND (r.incarnation <> s.incarnation OR r.state = 'lost')`
	sessionsOfStart = `
		SELECT ` + sessionColumns + ` FROM agent_sessions
		WHERE runner = $1 AND incarnation = $2 AND status IN ('live', 'starting')`
)

// Runner finds a runner by its name.
func (db *DB) Runner(ctx context.Context, id string) (fleet.Runner, error) {
	var row runnerRow
	err := db.get(ctx, &row, runnerByID, session.Text(id))
	if errors.Is(err, sql.ErrNoRows) {
		return fleet.Runner{}, fault.New(fault.NotFound, "no such runner")
	}
	return row.runner(), err
}

// Runners lists every runner that was ever seen.
func (db *DB) Runners(ctx context.Context) ([]fleet.Runner, error) {
	var rows []runnerRow
	if err := db.all(ctx, &rows, allRunners); err != nil {
		return nil, err
	}
	return convert(rows, runnerRow.runner), nil
}

// PutRunner inserts or replaces a runner.
func (db *DB) PutRunner(ctx context.Context, r fleet.Runner) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, putRunner, session.Text(r.ID), session.Text(r.Incarnation), session.Text(r.Pool),
			string(r.State), session.Text(r.Backend), session.Text(r.Version), pairsText(r.Labels), pairsText(r.Enforces),
			r.Slots, r.Used, r.StartFailures, session.Text(r.StartFailure), micros(r.FirstSeen), micros(r.LastBeat))
		return err
	})
}

// LoseRunnerRow marks a runner as lost unless it was heard since lastBeat.
func (db *DB) LoseRunnerRow(ctx context.Context, s fleet.Start, lastBeat time.Time) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		n, err := affected(tx.ExecContext(ctx, loseRunner, s.Runner, s.Incarnation, micros(lastBeat)))
		if err == nil && n == 0 {
			return fault.New(fault.Conflict, "the runner was heard again")
		}
		return err
	})
}

// SilentRunners lists those not lost whose last beat is before t.
func (db *DB) SilentRunners(ctx context.Context, t time.Time) ([]fleet.Runner, error) {
	var rows []runnerRow
	if err := db.all(ctx, &rows, silentRunners, micros(t)); err != nil {
		return nil, err
	}
	return convert(rows, runnerRow.runner), nil
}

// OrphanStarts lists starts that hold sessions although they are not current.
func (db *DB) OrphanStarts(ctx context.Context) ([]fleet.Start, error) {
	var rows []struct {
		ID          string `db:"id"`
		Incarnation string `db:"incarnation"`
	}
	if err := db.all(ctx, &rows, orphanStarts); err != nil {
		return nil, err
	}
	starts := make([]fleet.Start, len(rows))
	for i, r := range rows {
		starts[i] = fleet.Start{Runner: r.ID, Incarnation: r.Incarnation}
	}
	return starts, nil
}

// HeldBy lists what the start owns; true where the sandbox is up.
func (db *DB) HeldBy(ctx context.Context, s fleet.Start) (map[fleet.Held]bool, error) {
	var rows []sessionRow
	if err := db.all(ctx, &rows, sessionsOfStart, s.Runner, s.Incarnation); err != nil {
		return nil, err
	}
	held := make(map[fleet.Held]bool, len(rows))
	for _, r := range rows {
		held[fleet.Held{Session: r.ID, Epoch: r.Epoch}] = session.Status(r.Status) == session.Live
	}
	return held, nil
}

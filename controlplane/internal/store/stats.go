package store

import "context"

const runsByStatus = `SELECT status, COUNT(*) AS n FROM runs GROUP BY status`

const sessionsByStatus = `SELECT status, COUNT(*) AS n FROM agent_sessions GROUP BY status`

type countRow struct {
	Status string `db:"status"`
	N      int64  `db:"n"`
}

// Counts returns how many runs and sessions of all workspaces there are, by
// status: for the metrics.
func (db *DB) Counts(ctx context.Context) (runs, sessions map[string]int64, err error) {
	if runs, err = db.counts(ctx, runsByStatus); err != nil {
		return nil, nil, err
	}
	sessions, err = db.counts(ctx, sessionsByStatus)
	return runs, sessions, err
}

func (db *DB) counts(ctx context.Context, query string) (map[string]int64, error) {
	var rows []countRow
	if err := db.all(ctx, &rows, query); err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for _, r := range rows {
		out[r.Status] = r.N
	}
	return out, nil
}

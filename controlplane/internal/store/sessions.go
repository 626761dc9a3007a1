package store

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

type sessionRow struct {
	ID               string `db:"id"`
	Workspace        string `db:"workspace_id"`
	Owner            string `db:"owner"`
	Status           string `db:"status"`
	Reason           string `db:"reason"`
	Epoch            int64  `db:"epoch"`
	Runner           string `db:"runner"`
	Incarnation      string `db:"incarnation"`
	Backend          string `db:"backend"`
	Isolation        string `db:"isolation"`
	ImageDigest      string `db:"image_digest"`
	Enforced         string `db:"enforced"`
	PolicyDigest     string `db:"policy_digest"`
	WallClockSeconds int64  `db:"wall_clock_seconds"`
	OutputBytesLimit int64  `db:"output_bytes_limit"`
	StartDeadline    int64  `db:"start_deadline"`
	IdleTTL          int64  `db:"idle_ttl"`
	CreatedAt        int64  `db:"created_at"`
	LastUsedAt       int64  `db:"last_used_at"`
	ExpiresAt        int64  `db:"expires_at"`
}

// listedSessionRow is a session with what its runs say about its use.
type listedSessionRow struct {
	sessionRow
	LastFinish int64 `db:"last_finish"`
}

func (r sessionRow) session() session.Session {
	return session.Session{
		ID: r.ID, Workspace: r.Workspace, Owner: r.Owner, Status: session.Status(r.Status), Reason: r.Reason,
		Epoch: r.Epoch, Runner: r.Runner, Incarnation: r.Incarnation, StartBy: instant(r.StartDeadline),
		Backend: r.Backend, Isolation: r.Isolation, ImageDigest: r.ImageDigest, Enforced: pairs(r.Enforced),
		PolicyDigest: r.PolicyDigest, WallClockSeconds: r.WallClockSeconds, OutputBytesLimit: r.OutputBytesLimit,
		IdleTTL: time.Duration(r.IdleTTL) * time.Microsecond, CreatedAt: instant(r.CreatedAt),
		LastUsedAt: instant(r.LastUsedAt), ExpiresAt: instant(r.ExpiresAt),
	}
}

// pairs reads a JSON object of strings; nil when it is empty.
func pairs(text string) map[string]string {
	if text == "" || text == "{}" {
		return nil
	}
	var m map[string]string
	if json.Unmarshal([]byte(text), &m) != nil {
		return nil
	}
	return m
}

// pairsText is m as a JSON object that any database can keep.
func pairsText(m map[string]string) string {
	if len(m) == 0 {
		return "{}"
	}
	clean := make(map[string]string, len(m))
	for k, v := range m {
		clean[session.Text(k)] = session.Text(v)
	}
	b, _ := json.Marshal(clean) // strings always do
	return string(b)
}

const (
	sessionColumns = `id, workspace_id, owner, status, reason, epoch, runner, incarnation, backend, isolation,
		image_digest, enforced, policy_digest, wall_clock_seconds, output_bytes_limit, start_deadline, idle_ttl,
		created_at, last_used_at, expires_at`
	insertSession = `
		INSERT INTO agent_sessions (id, workspace_id, owner, status, idle_ttl, created_at, last_used_at, expires_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`
	// insertRecorded is the same with its audit event, in one statement.
	insertRecorded = `
		WITH s AS (` + insertSession + ` RETURNING id)
		INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
		SELECT CAST($9 AS TEXT), CAST($10 AS BIGINT), CAST($11 AS TEXT), CAST($12 AS TEXT), CAST($13 AS TEXT),
			CAST($14 AS TEXT), CAST($15 AS TEXT), CAST($16 AS TEXT), CAST($17 AS TEXT)
		FROM s RETURNING id`
	sessionByID       = `SELECT ` + sessionColumns + ` FROM agent_sessions WHERE id = $1`
	sessionListColumn = sessionColumns + `,
		COALESCE((SELECT MAX(finished_at) FROM runs WHERE runs.session_id = agent_sessions.id), 0) AS last_finish`
	sessionWithUse      = `SELECT ` + sessionListColumn + ` FROM agent_sessions WHERE id = $1`
	sessionsOfWorkspace = `
		SELECT ` + sessionListColumn + ` FROM agent_sessions
		WHERE workspace_id = $1 AND ($2 = '' OR id < $2) AND owner <> 'controlplane' ORDER BY id DESC LIMIT $3`
	sessionsOfOwner = `
		SELECT ` + sessionListColumn + ` FROM agent_sessions
		WHERE workspace_id = $1 AND ($2 = '' OR id < $2) AND owner = $4 ORDER BY id DESC LIMIT $3`
	claimSession = `
		UPDATE agent_sessions SET runner = $3, incarnation = $4, policy_digest = $5, wall_clock_seconds = $6,
			output_bytes_limit = $7, start_deadline = $8, reason = ''
		WHERE id = $1 AND epoch = $2 AND status = 'starting'
			AND (runner = '' OR (runner = $3 AND incarnation = $4))
			AND NOT EXISTS (SELECT 1 FROM runners WHERE id = $3 AND (incarnation <> $4 OR state IN ('lost', 'left')))
		RETURNING ` + sessionColumns
	startSession = `
		UPDATE agent_sessions SET status = 'live', backend = $5, isolation = $6, image_digest = $7, enforced = $8,
			start_deadline = 0, reason = ''
		WHERE id = $1 AND epoch = $2 AND runner = $3 AND incarnation = $4 AND status = 'starting' AND policy_digest = $9
		RETURNING ` + sessionColumns
	// The two with their audit event, in one statement.
	claimRecorded = `
		WITH s AS (` + claimSession + `), a AS (
			INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
			SELECT CAST($9 AS TEXT), CAST($10 AS BIGINT), COALESCE(NULLIF(CAST($11 AS TEXT), ''), s.workspace_id),
				CAST($12 AS TEXT), CAST($13 AS TEXT), CAST($14 AS TEXT), CAST($15 AS TEXT), CAST($16 AS TEXT),
				CAST($17 AS TEXT)
			FROM s
		)
		SELECT ` + sessionColumns + ` FROM s`
	startRecorded = `
		WITH s AS (` + startSession + `), a AS (
			INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
			SELECT CAST($10 AS TEXT), CAST($11 AS BIGINT), COALESCE(NULLIF(CAST($12 AS TEXT), ''), s.workspace_id),
				CAST($13 AS TEXT), CAST($14 AS TEXT), CAST($15 AS TEXT), CAST($16 AS TEXT), CAST($17 AS TEXT),
				CAST($18 AS TEXT)
			FROM s
		)
		SELECT ` + sessionColumns + ` FROM s`
	endSession = `
		UPDATE agent_sessions SET status = $2, reason = $3, epoch = epoch + $4,
			runner = CASE WHEN $2 = 'idle' THEN '' ELSE runner END,
			incarnation = CASE WHEN $2 = 'idle' THEN '' ELSE incarnation END,
			start_deadline = 0
		WHERE id = $1 AND (CAST($5 AS BIGINT) = 0 OR epoch = CAST($5 AS BIGINT))
			AND ($6 = '' OR (runner = $6 AND incarnation = $7))
			AND (CAST($8 AS BIGINT) = 0 OR last_used_at = CAST($8 AS BIGINT))
			AND status IN ($9, $10, $11, $12, $13)
		RETURNING ` + sessionColumns
	beginStart = `
		UPDATE agent_sessions SET status = 'starting', epoch = epoch + 1, runner = '', incarnation = '', start_deadline = $4
		WHERE id = $1 AND epoch = $2 AND (status IN ('new', 'idle') OR (status = 'starting' AND start_deadline <= $3))
		RETURNING ` + sessionColumns
	// A session outlives its idle TTL only while no run of it is open and
	// counted from the end of the last one.
	expiredSessions = `
		SELECT ` + sessionColumns + `, CASE WHEN expires_at <= $1 THEN 1 ELSE 0 END AS last_finish
		FROM agent_sessions
		WHERE status IN ('new', 'starting', 'live', 'idle', 'lost') AND (expires_at <= $1 OR (last_used_at + idle_ttl <= $1
			AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.session_id = agent_sessions.id AND runs.finished_at = 0)
			AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.session_id = agent_sessions.id
				AND runs.finished_at > $1 - agent_sessions.idle_ttl)))
		ORDER BY id LIMIT $2`
	staleStarts = `
		SELECT ` + sessionColumns + ` FROM agent_sessions
		WHERE status = 'starting' AND start_deadline <= $1
			AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.session_id = agent_sessions.id AND runs.finished_at = 0)
		ORDER BY id LIMIT $2`
)

// InsertSession adds a new session.
func (db *DB) InsertSession(ctx context.Context, s session.Session, e audit.Event) error {
	args := []any{
		s.ID, s.Workspace, s.Owner, string(s.Status), s.IdleTTL.Microseconds(), micros(s.CreatedAt), micros(s.LastUsedAt),
		micros(s.ExpiresAt),
	}
	known := func(err error) error {
		if unreferenced(err) {
			return fault.Wrap(err, fault.NotFound, "no workspace %q", s.Workspace)
		}
		return err
	}
	if db.oneStatement() {
		var id string
		return unanswered(known(db.get(ctx, &id, insertRecorded, append(args, auditArgs(e)...)...)))
	}
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, insertSession, args...)
		return recorded(ctx, tx, known(err), e)
	})
}

// Session finds a session; its last use counts the end of its last run.
func (db *DB) Session(ctx context.Context, id string) (session.Session, error) {
	if plain("id", id) != nil {
		return session.Session{}, session.NotFound(id)
	}
	var row listedSessionRow
	err := db.get(ctx, &row, sessionWithUse, id)
	if errors.Is(err, sql.ErrNoRows) {
		return session.Session{}, session.NotFound(id)
	}
	return row.used(), err
}

// used is the session with the later of its own last use and the end of its last run.
func (r listedSessionRow) used() session.Session {
	r.LastUsedAt = max(r.LastUsedAt, r.LastFinish)
	return r.session()
}

// Sessions lists a workspace's sessions, newest first; owner "" means everybody's.
func (db *DB) Sessions(ctx context.Context, workspace, owner string, p page.Page) ([]session.Session, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []listedSessionRow
	if owner == "" {
		err = db.all(ctx, &rows, sessionsOfWorkspace, workspace, after, limit+1)
	} else {
		err = db.all(ctx, &rows, sessionsOfOwner, workspace, after, limit+1, owner)
	}
	if err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r listedSessionRow) string { return r.ID })
	return convert(rows, listedSessionRow.used), next, nil
}

// ClaimSession gives a starting session's epoch to its claimant.
func (db *DB) ClaimSession(ctx context.Context, c session.Claim, t session.Terms, e audit.Event) (session.Session, error) {
	return db.moveSession(ctx, e, "the session is taken or no longer wants this ticket", "taken", claimSession, claimRecorded,
		c.Session, c.Epoch, c.Runner, c.Incarnation, t.PolicyDigest, t.WallClockSeconds, t.OutputBytesLimit, micros(t.StartBy))
}

// SessionStarted makes a claimed session live.
func (db *DB) SessionStarted(ctx context.Context, c session.Claim, b session.Sandbox, e audit.Event) (session.Session, error) {
	return db.moveSession(ctx, e, "the session no longer waits for this start, or the sandbox has another policy", "", startSession, startRecorded,
		c.Session, c.Epoch, c.Runner, c.Incarnation, session.Text(b.Backend), session.Text(b.Isolation),
		session.Text(b.ImageDigest), pairsText(b.Enforced), b.PolicyDigest)
}

// moveSession updates one session and writes the event, which is its
// workspace's when it names none; no row is a Conflict.
// recorded is query that writes the event itself.
func (db *DB) moveSession(ctx context.Context, e audit.Event, otherwise, code, query, recorded string, args ...any) (session.Session, error) {
	var row sessionRow
	if db.oneStatement() {
		err := db.get(ctx, &row, recorded, append(args, auditArgs(e)...)...)
		if errors.Is(err, sql.ErrNoRows) {
			err = fault.New(fault.Conflict, "%s", otherwise).WithCode(code)
		}
		return row.session(), err
	}
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &row, query, args...)
		if errors.Is(err, sql.ErrNoRows) {
			return fault.New(fault.Conflict, "%s", otherwise).WithCode(code)
		}
		if err != nil {
			return err
		}
		e.Workspace = cmp.Or(e.Workspace, row.Workspace)
		return auditInsert(ctx, tx, e)
	})
	return row.session(), err
}

// EndSession moves a session on and ends calls with it. Like everything that
// changes a session and its calls, it takes the session's row first.
func (db *DB) EndSession(ctx context.Context, e session.Ending) (session.Session, []session.EndedCall, error) {
	var row sessionRow
	var ended []session.EndedCall
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		ended = nil
		err := sqlx.GetContext(ctx, tx, &row, endSession, endSessionArgs(e)...)
		if errors.Is(err, sql.ErrNoRows) {
			return fault.New(fault.Conflict, "the session has changed meanwhile")
		}
		if err != nil {
			return err
		}
		f := ending{at: e.At, actor: e.Event.Actor, detail: strings.TrimSpace(e.Event.Action + " " + e.Reason), newID: e.NewID}
		if e.Cancel != "" {
			if _, err := tx.ExecContext(ctx, cancelRunsOfSession, e.Session, e.Cancel); err != nil {
				return err
			}
		}
		for _, group := range []struct {
			verdict  session.Verdict
			statuses string
		}{{e.Sent, sentStatuses}, {e.Pending, pendingStatus}} {
			if group.verdict.Status == "" {
				continue
			}
			more, err := endCalls(ctx, tx, group.verdict, f, ofSession+group.statuses+`)`, e.Session)
			if err != nil {
				return err
			}
			ended = append(ended, more...)
		}
		return auditInsert(ctx, tx, e.Event)
	})
	return row.session(), ended, err
}

func endSessionArgs(e session.Ending) []any {
	raise, lastUsed := 0, int64(0)
	if e.Raise {
		raise = 1
	}
	if e.Unused {
		lastUsed = micros(e.LastUsed)
	}
	epoch, runner, incarnation := e.Epoch, "", ""
	if e.Holder != nil {
		epoch, runner, incarnation = e.Holder.Epoch, e.Holder.Runner, e.Holder.Incarnation
	}
	args := []any{e.Session, string(e.To), e.Reason, raise, epoch, runner, incarnation, lastUsed}
	from := slices.Clone(e.From)
	for len(from) < 5 {
		from = append(from, from[0])
	}
	for _, s := range from {
		args = append(args, string(s))
	}
	return args
}

// BeginStart gives a session without a sandbox a new epoch.
func (db *DB) BeginStart(ctx context.Context, id string, epoch int64, now, startBy time.Time) (session.Session, bool, error) {
	var row sessionRow
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		return sqlx.GetContext(ctx, tx, &row, beginStart, id, epoch, micros(now), micros(startBy))
	})
	if errors.Is(err, sql.ErrNoRows) {
		return session.Session{}, false, nil
	}
	return row.session(), err == nil, err
}

// ExpiredSessions lists sessions that outlived a TTL, each with the reason in
// Reason and its own last use, not its runs'.
func (db *DB) ExpiredSessions(ctx context.Context, now time.Time, limit int) ([]session.Session, error) {
	var rows []listedSessionRow
	if err := db.all(ctx, &rows, expiredSessions, micros(now), limit); err != nil {
		return nil, err
	}
	return convert(rows, func(r listedSessionRow) session.Session {
		s := r.session()
		s.Reason = session.ClosedByIdle
		if r.LastFinish == 1 {
			s.Reason = session.ClosedByTTL
		}
		return s
	}), nil
}

// StaleStarts lists starting sessions that are late and for which no run waits.
func (db *DB) StaleStarts(ctx context.Context, t time.Time, limit int) ([]session.Session, error) {
	var rows []sessionRow
	if err := db.all(ctx, &rows, staleStarts, micros(t), limit); err != nil {
		return nil, err
	}
	return convert(rows, sessionRow.session), nil
}

// InsertEvent records an event that changes nothing else.
func (db *DB) InsertEvent(ctx context.Context, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error { return auditInsert(ctx, tx, e) })
}

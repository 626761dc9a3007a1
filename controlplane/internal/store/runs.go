package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

type runRow struct {
	ID              string  `db:"id"`
	Session         string  `db:"session_id"`
	Workspace       string  `db:"workspace_id"`
	Owner           string  `db:"owner"`
	Status          string  `db:"status"`
	Parallel        bool    `db:"parallel"`
	Output          string  `db:"output"`
	UsageCalls      int     `db:"usage_calls"`
	UsageCPUMS      float64 `db:"usage_cpu_ms"`
	UsageDurationMS float64 `db:"usage_duration_ms"`
	CreatedAt       int64   `db:"created_at"`
	StartedAt       int64   `db:"started_at"`
	FinishedAt      int64   `db:"finished_at"`
	OpenCalls       int     `db:"open_calls"`
	CancelReason    string  `db:"cancel_reason"`
	Replica         string  `db:"replica"`
	LeaseUntil      int64   `db:"lease_until"`
	Tools           string  `db:"tools"`
}

func (r runRow) run() run.Run {
	return run.Run{
		ID: r.ID, Session: r.Session, Workspace: r.Workspace, Owner: r.Owner, Status: run.Status(r.Status),
		Parallel: r.Parallel, Output: r.Output,
		Usage:     run.Usage{Calls: r.UsageCalls, CPUMS: r.UsageCPUMS, DurationMS: r.UsageDurationMS},
		CreatedAt: instant(r.CreatedAt), StartedAt: instant(r.StartedAt), FinishedAt: instant(r.FinishedAt),
		OpenCalls: r.OpenCalls, CancelReason: r.CancelReason, Replica: r.Replica, LeaseUntil: instant(r.LeaseUntil),
		Tools: pins(r.Tools),
	}
}

// callState is a call without its output.
type callState struct {
	ID          string `db:"call_id"`
	ClientID    string `db:"client_id"`
	Run         string `db:"call_run"`
	Session     string `db:"call_session"`
	Workspace   string `db:"call_workspace"`
	Index       int    `db:"idx"`
	Name        string `db:"name"`
	Arguments   string `db:"arguments"`
	Status      string `db:"call_status"`
	Epoch       int64  `db:"epoch"`
	Runner      string `db:"runner"`
	Incarnation string `db:"incarnation"`
	SentAt      int64  `db:"sent_at"`

	ErrorCode     string          `db:"error_code"`
	ErrorMessage  string          `db:"error_message"`
	ErrorField    string          `db:"error_field"`
	ErrorLimit    sql.Null[int64] `db:"error_limit"`
	ErrorObserved sql.Null[int64] `db:"error_observed"`
	ExitCode      sql.Null[int64] `db:"exit_code"`
	Signal        string          `db:"signal"`
	Encoding      string          `db:"encoding"`
	HasValue      bool            `db:"has_value"`
	StdoutBytes   int64           `db:"stdout_bytes"`
	StderrBytes   int64           `db:"stderr_bytes"`
	Truncated     bool            `db:"truncated"`
	DurationMS    float64         `db:"duration_ms"`
	CPUMS         float64         `db:"cpu_ms"`
	MemoryPeak    int64           `db:"memory_peak"`
	OOMKills      int64           `db:"oom_kills"`
	Denials       string          `db:"denials"`
	Backend       string          `db:"backend"`
	Isolation     string          `db:"isolation"`
	ImageDigest   string          `db:"image_digest"`
	PolicyDigest  string          `db:"policy_digest"`
	Enforced      string          `db:"enforced"`
	Retryable     bool            `db:"retryable"`
}

func (c callState) call() run.Call {
	out := run.Call{
		ID: c.ID, ClientID: c.ClientID, Run: c.Run, Session: c.Session, Workspace: c.Workspace, Index: c.Index,
		Name: c.Name, Arguments: json.RawMessage(c.Arguments), Status: run.CallStatus(c.Status),
		Epoch: c.Epoch, Runner: c.Runner, Incarnation: c.Incarnation, SentAt: instant(c.SentAt),
		Result: run.Result{
			Signal: c.Signal, Encoding: c.Encoding, HasValue: c.HasValue,
			StdoutBytes: c.StdoutBytes, StderrBytes: c.StderrBytes, Truncated: c.Truncated,
			DurationMS: c.DurationMS, CPUMS: c.CPUMS, MemoryPeak: c.MemoryPeak, OOMKills: c.OOMKills,
			Denials: denials(c.Denials), Backend: c.Backend, Isolation: c.Isolation, ImageDigest: c.ImageDigest,
			PolicyDigest: c.PolicyDigest, Enforced: pairs(c.Enforced), Retryable: c.Retryable,
		},
	}
	if c.ErrorCode != "" {
		out.Result.Error = &run.Failure{
			Code: c.ErrorCode, Message: c.ErrorMessage, Field: c.ErrorField,
			Limit: pointer(c.ErrorLimit), Observed: pointer(c.ErrorObserved),
		}
	}
	if c.ExitCode.Valid {
		code := int(c.ExitCode.V)
		out.Result.ExitCode = &code
	}
	return out
}

// runStateRow is a run beside one of its calls; a run has at least one.
type runStateRow struct {
	runRow
	callState
}

// runWholeRow has the output as well.
type runWholeRow struct {
	runRow
	callState
	Stdout []byte `db:"stdout"`
	Stderr []byte `db:"stderr"`
	Value  []byte `db:"value"`
}

func (c runWholeRow) call() run.Call {
	out := c.callState.call()
	out.Result.Stdout, out.Result.Stderr, out.Result.Value = c.Stdout, c.Stderr, c.Value
	return out
}

func pointer(n sql.Null[int64]) *int64 {
	if !n.Valid {
		return nil
	}
	return &n.V
}

func nullable(n *int64) sql.Null[int64] {
	if n == nil {
		return sql.Null[int64]{}
	}
	return sql.Null[int64]{V: *n, Valid: true}
}

type pinText struct {
	ID       string `json:"id"`
	Revision int64  `json:"revision"`
}

func pins(text string) []tool.Pin {
	if text == "" || text == "[]" {
		return nil
	}
	var rows []pinText
	if json.Unmarshal([]byte(text), &rows) != nil {
		return nil
	}
	return convert(rows, func(p pinText) tool.Pin { return tool.Pin(p) })
}

func pinsText(pins []tool.Pin) string {
	if len(pins) == 0 {
		return "[]"
	}
	b, _ := json.Marshal(convert(pins, func(p tool.Pin) pinText { return pinText(p) })) // strings and numbers always do
	return string(b)
}

type denialText struct {
	Kind   string `json:"kind"`
	Target string `json:"target"`
	Reason string `json:"reason"`
}

func denials(text string) []run.Denial {
	if text == "" || text == "[]" {
		return nil
	}
	var rows []denialText
	if json.Unmarshal([]byte(text), &rows) != nil {
		return nil
	}
	return convert(rows, func(d denialText) run.Denial { return run.Denial(d) })
}

func denialsText(ds []run.Denial) string {
	if len(ds) == 0 {
		return "[]"
	}
	b, _ := json.Marshal(convert(ds, func(d run.Denial) denialText { return denialText(d) })) // strings always do
	return string(b)
}

const (
	pendingStatus = `'pending'`
	sentStatuses  = `'sent', 'accepted', 'running'`

	runColumns = `runs.id, runs.session_id, runs.workspace_id, runs.owner, runs.status, runs.parallel, runs.output, runs.usage_calls,
		runs.usage_cpu_ms, runs.usage_duration_ms, runs.created_at, runs.started_at, runs.finished_at, runs.open_calls, runs.cancel_reason,
		runs.replica, runs.lease_until, runs.tools`
	callColumns = `calls.id AS call_id, calls.client_id, calls.run_id AS call_run, calls.session_id AS call_session,
		calls.workspace_id AS call_workspace, calls.idx, calls.name, calls.arguments, calls.status AS call_status, calls.epoch, calls.runner,
		calls.incarnation, calls.sent_at, calls.error_code, calls.error_message, calls.error_field, calls.error_limit, calls.error_observed,
		calls.exit_code, calls.signal, calls.encoding, calls.has_value, calls.stdout_bytes, calls.stderr_bytes, calls.truncated, calls.duration_ms,
		calls.cpu_ms, calls.memory_peak, calls.oom_kills, calls.denials, calls.backend, calls.isolation, calls.image_digest, calls.policy_digest,
		calls.enforced, calls.retryable`
	runWhole = `
		SELECT ` + runColumns + `, ` + callColumns + `, calls.stdout, calls.stderr, calls.value
		FROM runs JOIN calls ON calls.run_id = runs.id WHERE runs.id = $1 ORDER BY calls.idx`
	runState = `
		SELECT ` + runColumns + `, ` + callColumns + `
		FROM runs JOIN calls ON calls.run_id = runs.id WHERE runs.id = $1 ORDER BY calls.idx`
	runsOfSession = `
		SELECT ` + runColumns + `, ` + callColumns + `
		FROM (SELECT * FROM runs WHERE session_id = $1 AND ($2 = '' OR id < $2) ORDER BY id DESC LIMIT $3) runs
		JOIN calls ON calls.run_id = runs.id ORDER BY runs.id DESC, calls.idx`
	sentCallsOfSession = `
		SELECT ` + callColumns + ` FROM calls
		WHERE calls.run_id IN (SELECT id FROM runs WHERE session_id = $1 AND finished_at = 0)
			AND calls.status IN (` + sentStatuses + `) ORDER BY calls.id`

	// admitSession takes the session's row and begins its start when $3 says
	// that the run wants a sandbox and there is none.
	admitSession = `
		UPDATE agent_sessions SET last_used_at = $2,
			epoch = CASE WHEN $3 = 1 AND status IN ('new', 'idle') THEN epoch + 1 ELSE epoch END,
			runner = CASE WHEN $3 = 1 AND status IN ('new', 'idle') THEN '' ELSE runner END,
			incarnation = CASE WHEN $3 = 1 AND status IN ('new', 'idle') THEN '' ELSE incarnation END,
			start_deadline = CASE WHEN $3 = 1 AND status IN ('new', 'idle') THEN $4 ELSE start_deadline END,
			status = CASE WHEN $3 = 1 AND status IN ('new', 'idle') THEN 'starting' ELSE status END
		WHERE id = $1 AND workspace_id = $5 AND ($6 = '' OR owner = $6) AND status IN ('new', 'starting', 'live', 'idle')
			AND expires_at > $2
		RETURNING ` + sessionColumns
	insertRun = `
		INSERT INTO runs (id, session_id, workspace_id, owner, status, parallel, usage_calls, created_at, started_at,
			finished_at, open_calls, replica, lease_until, tools)
		SELECT CAST($1 AS TEXT), CAST($2 AS TEXT), CAST($3 AS TEXT), CAST($4 AS TEXT), CAST($5 AS TEXT),
			CAST($6 AS BOOLEAN), CAST($7 AS BIGINT), CAST($8 AS BIGINT), CAST($9 AS BIGINT), CAST($10 AS BIGINT),
			CAST($11 AS BIGINT), CAST($12 AS TEXT), CAST($13 AS BIGINT), CAST($15 AS TEXT)
		WHERE (SELECT COUNT(*) FROM runs WHERE session_id = $2 AND finished_at = 0) < $14`
	insertCalls = `
		INSERT INTO calls (id, client_id, run_id, session_id, workspace_id, idx, name, arguments, status, epoch,
			runner, incarnation, sent_at, error_code, error_message, error_field, retryable) VALUES `
	insertCallWidth = 17

	// admitOne is admitSession, insertRun, insertCalls and the audit event in
	// one statement, for a run of one call that wants a sandbox. A session whose
	// row changes meanwhile gives no row: the runs are counted as they were
	// before that.
	admitOne = `
		WITH s AS (
			UPDATE agent_sessions SET last_used_at = GREATEST($1, agent_sessions.last_used_at + 1),
				epoch = CASE WHEN status IN ('new', 'idle') THEN epoch + 1 ELSE epoch END,
				runner = CASE WHEN status IN ('new', 'idle') THEN '' ELSE runner END,
				incarnation = CASE WHEN status IN ('new', 'idle') THEN '' ELSE incarnation END,
				start_deadline = CASE WHEN status IN ('new', 'idle') THEN $2 ELSE start_deadline END,
				status = CASE WHEN status IN ('new', 'idle') THEN 'starting' ELSE status END
			FROM (SELECT id, last_used_at FROM agent_sessions WHERE id = $3) seen
			WHERE agent_sessions.id = seen.id AND agent_sessions.last_used_at = seen.last_used_at
				AND workspace_id = $4 AND ($5 = '' OR owner = $5) AND status IN ('new', 'starting', 'live', 'idle')
				AND expires_at > $1
			RETURNING agent_sessions.*
		), r AS (
			INSERT INTO runs (id, session_id, workspace_id, owner, status, parallel, usage_calls, created_at, started_at,
				open_calls, replica, lease_until)
			SELECT CAST($6 AS TEXT), s.id, s.workspace_id, CAST($7 AS TEXT),
				CASE WHEN s.status = 'live' THEN 'running' ELSE 'queued' END, CAST($8 AS BOOLEAN), 1, CAST($9 AS BIGINT),
				CASE WHEN s.status = 'live' THEN CAST($9 AS BIGINT) ELSE 0 END, 1, CAST($10 AS TEXT), CAST($11 AS BIGINT)
			FROM s WHERE (SELECT COUNT(*) FROM runs WHERE session_id = $3 AND finished_at = 0) < $12
			RETURNING id
		), c AS (
			INSERT INTO calls (id, client_id, run_id, session_id, workspace_id, idx, name, arguments, status, epoch,
				runner, incarnation, sent_at)
			SELECT CAST($13 AS TEXT), CAST($14 AS TEXT), r.id, s.id, s.workspace_id, 0, CAST($15 AS TEXT), CAST($16 AS TEXT),
				CASE WHEN s.status = 'live' THEN 'sent' ELSE 'pending' END,
				CASE WHEN s.status = 'live' THEN s.epoch ELSE 0 END,
				CASE WHEN s.status = 'live' THEN s.runner ELSE '' END,
				CASE WHEN s.status = 'live' THEN s.incarnation ELSE '' END,
				CASE WHEN s.status = 'live' THEN CAST($9 AS BIGINT) ELSE 0 END
			FROM s, r
		), a AS (
			INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
			SELECT CAST($17 AS TEXT), CAST($18 AS BIGINT), CAST($19 AS TEXT), CAST($20 AS TEXT), CAST($21 AS TEXT),
				CAST($22 AS TEXT), CAST($23 AS TEXT), CAST($24 AS TEXT), CAST($25 AS TEXT)
			FROM r
		)
		SELECT ` + sessionColumns + ` FROM s WHERE EXISTS (SELECT 1 FROM r)`

	// finishCall is the one way in which a report reaches a call: the sender
	// holds the session's epoch, the call was sent to it under that epoch and
	// has not ended, and the output fits.
	finishCall = `
		UPDATE calls SET status = $1, error_code = $2, error_message = $3, error_field = $4, error_limit = $5,
			error_observed = $6, exit_code = $7, signal = $8, stdout = $9, stderr = $10, value = $11, encoding = $12,
			has_value = $13, stdout_bytes = $14, stderr_bytes = $15, truncated = $16, duration_ms = $17, cpu_ms = $18,
			memory_peak = $19, oom_kills = $20, denials = $21, retryable = $22, backend = s.backend,
			isolation = s.isolation, image_digest = s.image_digest, policy_digest = s.policy_digest, enforced = s.enforced
		FROM agent_sessions s
		WHERE calls.id = $23 AND calls.run_id = $24 AND calls.session_id = $25 AND calls.epoch = $26
			AND calls.runner = $27 AND calls.incarnation = $28 AND calls.status IN (` + sentStatuses + `)
			AND s.id = $25 AND s.epoch = $26 AND s.runner = $27 AND s.incarnation = $28
			AND s.output_bytes_limit >= $29
		RETURNING calls.id AS call_id, calls.run_id AS call_run, calls.workspace_id AS call_workspace,
			calls.status AS call_status, calls.policy_digest`
	// settleRun counts $2 calls of the run as ended and ends it with the last.
	settleRun = `
		UPDATE runs SET open_calls = runs.open_calls - $2, usage_cpu_ms = runs.usage_cpu_ms + $3,
			usage_duration_ms = runs.usage_duration_ms + $4,
			finished_at = CASE WHEN runs.open_calls = $2 THEN $5 ELSE runs.finished_at END,
			status = CASE WHEN runs.open_calls <> $2 THEN runs.status WHEN runs.cancel_reason <> '' THEN 'cancelled' ELSE 'finished' END
		WHERE runs.id = $1 AND runs.open_calls >= $2
		RETURNING runs.status`
	// finishAndSettle is finishCall, settleRun and the audit event in one
	// statement, and so in one round trip to PostgreSQL.
	finishAndSettle = `
		WITH c AS (` + finishCall + `
		), r AS (
			UPDATE runs SET open_calls = runs.open_calls - 1, usage_cpu_ms = runs.usage_cpu_ms + $18,
				usage_duration_ms = runs.usage_duration_ms + $17,
				finished_at = CASE WHEN runs.open_calls = 1 THEN $30 ELSE runs.finished_at END,
				status = CASE WHEN runs.open_calls <> 1 THEN runs.status WHEN runs.cancel_reason <> '' THEN 'cancelled' ELSE 'finished' END
			FROM c WHERE runs.id = c.call_run
			RETURNING runs.status
		), a AS (
			INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
			SELECT CAST($31 AS TEXT), CAST($30 AS BIGINT), c.call_workspace, CAST($32 AS TEXT), CAST($33 AS TEXT),
				c.call_id, c.call_status, c.policy_digest, CAST($34 AS TEXT)
			FROM c
		)
		SELECT status FROM r`
	// endTheCalls ends calls by our own word; which ones, is added.
	endTheCalls = `
		UPDATE calls SET status = $1, error_code = $2, error_message = $3, error_field = $4, retryable = $5,
			backend = CASE WHEN calls.status = 'pending' THEN calls.backend ELSE s.backend END,
			isolation = CASE WHEN calls.status = 'pending' THEN calls.isolation ELSE s.isolation END,
			policy_digest = s.policy_digest,
			duration_ms = CASE WHEN calls.sent_at = 0 THEN 0 ELSE ($6 - calls.sent_at) / 1000.0 END
		FROM agent_sessions s
		WHERE s.id = calls.session_id AND `
	endedColumns = ` RETURNING calls.id, calls.run_id, calls.session_id, calls.workspace_id, calls.policy_digest`

	cancelRun = `
		UPDATE runs SET cancel_reason = CASE WHEN cancel_reason = '' THEN $2 ELSE cancel_reason END
		WHERE id = $1 AND status IN ('queued', 'running')`
	cancelRunsOfSession = `
		UPDATE runs SET cancel_reason = CASE WHEN cancel_reason = '' THEN $2 ELSE cancel_reason END
		WHERE session_id = $1 AND finished_at = 0 AND status IN ('queued', 'running')`
	sendCall = `
		UPDATE calls SET status = 'sent', epoch = $2, runner = $3, incarnation = $4, sent_at = $5
		WHERE id = $1 AND run_id = $6 AND status = 'pending'`
	// heldSession takes the session's row if its holder is still the same.
	heldSession = `
		UPDATE agent_sessions SET last_used_at = $5
		WHERE id = $1 AND epoch = $2 AND runner = $3 AND incarnation = $4 AND status = 'live'`
	// runRunning takes the run's row if it still is this replica's and wanted.
	runRunning = `
		UPDATE runs SET status = 'running', started_at = CASE WHEN started_at = 0 THEN $2 ELSE started_at END
		WHERE id = $1 AND replica = $3 AND cancel_reason = '' AND status IN ('queued', 'running')`
	// sendOne is these three in one statement, for one call.
	sendOne = `
		WITH s AS (` + heldSession + ` RETURNING id
		), r AS (
			UPDATE runs SET status = 'running', started_at = CASE WHEN started_at = 0 THEN $5 ELSE started_at END
			FROM s WHERE runs.id = $6 AND replica = $7 AND cancel_reason = '' AND status IN ('queued', 'running')
			RETURNING runs.id
		), c AS (
			UPDATE calls SET status = 'sent', epoch = $2, runner = $3, incarnation = $4, sent_at = $5
			FROM r WHERE calls.id = $8 AND run_id = r.id AND status = 'pending'
			RETURNING calls.id
		)
		SELECT id FROM c`
	forgetValue = `UPDATE calls SET value = NULL, has_value = FALSE WHERE run_id = $1 AND id = $2`
	markStarted = `UPDATE calls SET status = 'running' WHERE run_id = $1 AND id = $2 AND status IN ('sent', 'accepted')`

	loseSessions = `
		UPDATE agent_sessions SET reason = 'runner_lost', epoch = epoch + 1, start_deadline = 0,
			status = CASE WHEN status = 'live' THEN 'lost' ELSE 'idle' END
		WHERE runner = $1 AND incarnation = $2 AND status IN ('live', 'starting')
		RETURNING ` + sessionColumns
	sentOfRunner = `calls.runner = $7 AND calls.incarnation = $8 AND calls.status IN (` + sentStatuses + `)
		AND calls.run_id IN (SELECT id FROM runs WHERE finished_at = 0 AND session_id IN
			(SELECT id FROM agent_sessions WHERE runner = $7 AND incarnation = $8))`
	pendingOfRunner = `calls.status IN (` + pendingStatus + `)
		AND calls.run_id IN (SELECT id FROM runs WHERE finished_at = 0 AND session_id IN
			(SELECT id FROM agent_sessions WHERE runner = $7 AND incarnation = $8 AND status = 'lost'))`
	ofSession = `calls.run_id IN (SELECT id FROM runs WHERE finished_at = 0 AND session_id = $7) AND calls.status IN (`

	renewLeases = `
		UPDATE runs SET lease_until = $2 WHERE replica = $1 AND status IN ('queued', 'running') RETURNING id`
	takeRuns = `
		UPDATE runs SET replica = $1, lease_until = $3
		WHERE status IN ('queued', 'running') AND replica <> $1 AND ($4 = 1 OR lease_until < $2)
			AND id IN (SELECT id FROM runs WHERE status IN ('queued', 'running') AND replica <> $1
				AND ($4 = 1 OR lease_until < $2) ORDER BY id LIMIT $5)
		RETURNING id`
)

// AdmitRun inserts a run as its session allows; see run.Store.
func (db *DB) AdmitRun(ctx context.Context, a run.Admission) (run.Run, session.Session, error) {
	if plain("id", a.Run.Session) != nil {
		return run.Run{}, session.Session{}, session.NotFound(a.Run.Session)
	}
	if r, c, err := db.admitOne(ctx, a); settled(err) {
		return r, c, err
	}
	var r run.Run
	var row sessionRow
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &row, admitSession, a.Run.Session, micros(a.Run.CreatedAt), wantsSandbox(a.Run),
			micros(a.StartBy), a.Principal.Workspace, onlyOwner(a))
		if errors.Is(err, sql.ErrNoRows) {
			return refusedSession(ctx, tx, a)
		}
		if err != nil {
			return err
		}
		r = a.Run.Admit(row.session(), a.Run.CreatedAt)
		if err := insertTheRun(ctx, tx, r, a.MaxOpen); err != nil {
			return err
		}
		if err := auditInsert(ctx, tx, a.Event); err != nil {
			return err
		}
		return auditRefused(ctx, tx, r, a.Event)
	})
	return r, row.session(), unanswered(err)
}

// admitOne tries the usual case in one statement.
func (db *DB) admitOne(ctx context.Context, a run.Admission) (run.Run, session.Session, error) {
	if !db.oneStatement() || len(a.Run.Calls) != 1 || len(a.Run.Tools) > 0 || a.Run.Calls[0].Status != run.Pending {
		return run.Run{}, session.Session{}, sql.ErrNoRows
	}
	r, call := a.Run, a.Run.Calls[0]
	args := append([]any{
		micros(r.CreatedAt), micros(a.StartBy), r.Session, a.Principal.Workspace, onlyOwner(a),
		r.ID, r.Owner, r.Parallel, micros(r.CreatedAt), r.Replica, micros(r.LeaseUntil), a.MaxOpen,
		call.ID, call.ClientID, call.Name, string(call.Arguments),
	}, auditArgs(a.Event)...)
	var row sessionRow
	if err := db.get(ctx, &row, admitOne, args...); err != nil {
		return run.Run{}, session.Session{}, unanswered(err)
	}
	c := row.session()
	return r.Admit(c, r.CreatedAt), c, nil
}

// unanswered is err, but Unavailable when the row that was to be inserted is
// there: it was inserted, and the answer was lost.
func unanswered(err error) error {
	if duplicate(err) {
		return fault.Wrap(err, fault.Unavailable, "the database did not answer in time; try again")
	}
	return err
}

// settled reports whether one statement was all that it took. Else a
// transaction does it, or says why not: no row means that this is not the
// usual case, and after a break of the connection nobody knows.
func settled(err error) bool {
	return !errors.Is(err, sql.ErrNoRows) && !fault.Is(err, fault.Unavailable)
}

func wantsSandbox(r run.Run) int {
	if slices.ContainsFunc(r.Calls, func(c run.Call) bool { return c.Status == run.Pending }) {
		return 1
	}
	return 0
}

func onlyOwner(a run.Admission) string {
	if a.Principal.IsAdmin() {
		return ""
	}
	return a.Principal.UserID
}

// refusedSession says why a session admits no run.
func refusedSession(ctx context.Context, tx statements, a run.Admission) error {
	var row sessionRow
	err := sqlx.GetContext(ctx, tx, &row, sessionByID, a.Run.Session)
	if errors.Is(err, sql.ErrNoRows) || err == nil && !row.session().VisibleTo(a.Principal) {
		return session.NotFound(a.Run.Session)
	}
	if err != nil {
		return err
	}
	if session.Status(row.Status) == session.Lost {
		return fault.New(fault.Conflict, "the session's sandbox and its files are gone (%s); open a new session", row.Reason).WithCode("session_lost")
	}
	return fault.New(fault.Conflict, "the session is closed; open a new one").WithCode("session_closed")
}

func insertTheRun(ctx context.Context, tx statements, r run.Run, maxOpen int) error {
	result, err := tx.ExecContext(ctx, insertRun, r.ID, r.Session, r.Workspace, r.Owner, string(r.Status), r.Parallel,
		r.Usage.Calls, micros(r.CreatedAt), micros(r.StartedAt), micros(r.FinishedAt), r.OpenCalls, r.Replica,
		micros(r.LeaseUntil), maxOpen, pinsText(r.Tools))
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, fault.New(fault.Busy, "the session already has %d open runs; wait for one to end", maxOpen).WithCode("session_busy"))
	}
	args := make([]any, 0, len(r.Calls)*insertCallWidth)
	for _, c := range r.Calls {
		f := run.Failure{}
		if c.Result.Error != nil {
			f = *c.Result.Error
		}
		args = append(args, c.ID, c.ClientID, c.Run, c.Session, c.Workspace, c.Index, c.Name, string(c.Arguments),
			string(c.Status), c.Epoch, c.Runner, c.Incarnation, micros(c.SentAt), f.Code, f.Message, f.Field, c.Result.Retryable)
	}
	_, err = tx.ExecContext(ctx, insertCalls+tuples(len(r.Calls), insertCallWidth), args...)
	return err
}

// tuples is "($1, $2), ($3, $4)" for n tuples of the given width.
func tuples(n, width int) string {
	var b strings.Builder
	for i := range n {
		for j := range width {
			sep := ", "
			switch {
			case i == 0 && j == 0:
				sep = "("
			case j == 0:
				sep = "), ("
			}
			fmt.Fprintf(&b, "%s$%d", sep, i*width+j+1)
		}
	}
	b.WriteByte(')')
	return b.String()
}

// auditRefused records the calls that ended before they were inserted.
func auditRefused(ctx context.Context, tx statements, r run.Run, e audit.Event) error {
	for _, c := range r.Calls {
		if !c.Status.Final() {
			continue
		}
		e.ID, e.Action, e.Object, e.Outcome = audit.ID(strings.TrimPrefix(c.ID, "call_")), audit.CallFinished, c.ID, string(c.Status)
		e.Detail = "refused before dispatch"
		if err := auditInsert(ctx, tx, e); err != nil {
			return err
		}
	}
	return nil
}

// Run finds a run with its calls and their output.
func (db *DB) Run(ctx context.Context, id string) (run.Run, error) {
	var rows []runWholeRow
	if err := db.runRows(ctx, &rows, runWhole, id); err != nil {
		return run.Run{}, err
	}
	if len(rows) == 0 {
		return run.Run{}, fault.New(fault.NotFound, "no such run")
	}
	r := rows[0].run()
	r.Calls = convert(rows, runWholeRow.call)
	return r, nil
}

// RunState finds a run with its calls, without their output.
func (db *DB) RunState(ctx context.Context, id string) (run.Run, error) {
	var rows []runStateRow
	if err := db.runRows(ctx, &rows, runState, id); err != nil {
		return run.Run{}, err
	}
	if len(rows) == 0 {
		return run.Run{}, fault.New(fault.NotFound, "no such run")
	}
	r := rows[0].run()
	r.Calls = convert(rows, func(r runStateRow) run.Call { return r.call() })
	return r, nil
}

func (db *DB) runRows(ctx context.Context, rows any, query, id string) error {
	if plain("id", id) != nil {
		return nil
	}
	return db.all(ctx, rows, query, id)
}

// Runs lists a session's runs, newest first, without the output of their calls.
func (db *DB) Runs(ctx context.Context, sessionID string, p page.Page) ([]run.Run, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []runStateRow
	if err := db.all(ctx, &rows, runsOfSession, sessionID, after, limit+1); err != nil {
		return nil, "", err
	}
	runs := []run.Run{}
	for _, row := range rows {
		if len(runs) == 0 || runs[len(runs)-1].ID != row.runRow.ID {
			runs = append(runs, row.run())
		}
		last := &runs[len(runs)-1]
		last.Calls = append(last.Calls, row.call())
	}
	runs, next := page.Cut(runs, limit, func(r run.Run) string { return r.ID })
	return runs, next, nil
}

// SentCalls lists the session's calls that a runner may be running.
func (db *DB) SentCalls(ctx context.Context, sessionID string) ([]run.Call, error) {
	var rows []callState
	if err := db.all(ctx, &rows, sentCallsOfSession, sessionID); err != nil {
		return nil, err
	}
	return convert(rows, callState.call), nil
}

// SendCalls marks pending calls as sent to the session's holder.
func (db *DB) SendCalls(ctx context.Context, r run.Run, s session.Session, calls []string, replica string, at time.Time) ([]string, error) {
	var marked []string
	if db.oneStatement() && len(calls) == 1 {
		err := db.all(ctx, &marked, sendOne, s.ID, s.Epoch, s.Runner, s.Incarnation, micros(at), r.ID, replica, calls[0])
		return marked, err
	}
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		marked = nil
		n, err := affected(tx.ExecContext(ctx, heldSession, s.ID, s.Epoch, s.Runner, s.Incarnation, micros(at)))
		if err != nil || n == 0 {
			return err
		}
		if n, err = affected(tx.ExecContext(ctx, runRunning, r.ID, micros(at), replica)); err != nil || n == 0 {
			return err
		}
		for _, id := range calls {
			n, err := affected(tx.ExecContext(ctx, sendCall, id, s.Epoch, s.Runner, s.Incarnation, micros(at), r.ID))
			if err != nil {
				return err
			}
			if n == 1 {
				marked = append(marked, id)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return marked, nil
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// MarkStarted shows a call as running.
func (db *DB) MarkStarted(ctx context.Context, runID, call string) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, markStarted, runID, call)
		return err
	})
}

// ForgetValue drops the value of a call that has ended.
func (db *DB) ForgetValue(ctx context.Context, runID, call string) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, forgetValue, runID, call)
		return err
	})
}

// ending is what every end of a call has in common.
type ending struct {
	at     time.Time
	actor  string
	detail string
	newID  func() string
}

func endingOf(f run.Finish) ending {
	return ending{at: f.At, actor: f.Actor, detail: f.Detail, newID: f.NewID}
}

// event is the record of a call's end.
func (e ending) event(call, workspace, outcome, digest string) audit.Event {
	return audit.Event{
		ID: audit.ID(e.newID()), At: e.at, Workspace: workspace, Actor: e.actor, Action: audit.CallFinished,
		Object: call, Outcome: outcome, PolicyDigest: digest, Detail: e.detail,
	}
}

// FinishCall stores an outcome; false when it may not be.
func (db *DB) FinishCall(ctx context.Context, o run.Outcome, f run.Finish) (run.Ended, bool, error) {
	if ended, err := db.finishAndSettle(ctx, o, f); settled(err) {
		return ended, err == nil, err
	}
	var row finishedRow
	var status run.Status
	found := false
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &row, finishCall, finishArgs(o)...)
		if errors.Is(err, sql.ErrNoRows) {
			found = false
			return nil
		}
		if err != nil {
			return err
		}
		found = true
		if status, err = settle(ctx, tx, o.Run, 1, o.Result.CPUMS, o.Result.DurationMS, f.At); err != nil {
			return err
		}
		return auditInsert(ctx, tx, endingOf(f).event(o.Call, row.Workspace, string(o.Status), row.PolicyDigest))
	})
	if err != nil || !found {
		return run.Ended{}, false, err
	}
	return ended(o, status), true, nil
}

// finishedRow is what finishCall says of its call.
type finishedRow struct {
	ID           string `db:"call_id"`
	Run          string `db:"call_run"`
	Workspace    string `db:"call_workspace"`
	Status       string `db:"call_status"`
	PolicyDigest string `db:"policy_digest"`
}

// finishAndSettle is FinishCall in one statement, where that is possible.
func (db *DB) finishAndSettle(ctx context.Context, o run.Outcome, f run.Finish) (run.Ended, error) {
	if !db.oneStatement() {
		return run.Ended{}, sql.ErrNoRows
	}
	var status run.Status
	args := append(finishArgs(o), micros(f.At), audit.ID(f.NewID()), f.Actor, audit.CallFinished, f.Detail)
	if err := db.get(ctx, &status, finishAndSettle, args...); err != nil {
		return run.Ended{}, err
	}
	return ended(o, status), nil
}

func ended(o run.Outcome, status run.Status) run.Ended {
	return run.Ended{
		EndedCall: session.EndedCall{Session: o.Session, Run: o.Run, Call: o.Call, RunFinal: status.Final()},
		RunStatus: status,
	}
}

func finishArgs(o run.Outcome) []any {
	r, f := o.Result, run.Failure{}
	if r.Error != nil {
		f = *r.Error
	}
	exit := sql.Null[int64]{}
	if r.ExitCode != nil {
		exit = sql.Null[int64]{V: int64(*r.ExitCode), Valid: true}
	}
	return []any{
		string(o.Status), f.Code, f.Message, f.Field, nullable(f.Limit), nullable(f.Observed), exit, r.Signal,
		r.Stdout, r.Stderr, r.Value, r.Encoding, r.HasValue, r.StdoutBytes, r.StderrBytes, r.Truncated, r.DurationMS,
		r.CPUMS, r.MemoryPeak, r.OOMKills, denialsText(r.Denials), r.Retryable,
		o.Call, o.Run, o.Session, o.Epoch, o.Runner, o.Incarnation, max(len(r.Stdout), len(r.Stderr)),
	}
}

// settle counts n calls of a run as ended; the run ends with the last.
func settle(ctx context.Context, tx statements, id string, n int, cpu, duration float64, at time.Time) (run.Status, error) {
	var status run.Status
	if err := sqlx.GetContext(ctx, tx, &status, settleRun, id, n, cpu, duration, micros(at)); err != nil {
		return status, fmt.Errorf("settle run %s: %w", id, hideNoRows(err))
	}
	return status, nil
}

// hideNoRows makes a missing row an error of ours: the counts are wrong.
func hideNoRows(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return errors.New("its count of open calls is wrong")
	}
	return err
}

// endCalls ends the calls that where selects, whose arguments are $7 and on,
// and settles their runs. RunFinal is set on the last call of a run.
func endCalls(ctx context.Context, tx statements, v session.Verdict, e ending, where string, args ...any) ([]session.EndedCall, error) {
	var rows []struct {
		ID        string `db:"id"`
		Run       string `db:"run_id"`
		Session   string `db:"session_id"`
		Workspace string `db:"workspace_id"`
		Digest    string `db:"policy_digest"`
	}
	code := fault.Codes[v.Code]
	args = append([]any{v.Status, string(v.Code), v.Message, v.Field, code.Retryable, micros(e.at)}, args...)
	if err := sqlx.SelectContext(ctx, tx, &rows, endTheCalls+where+endedColumns, args...); err != nil {
		return nil, err
	}
	left := map[string]int{}
	var ended []session.EndedCall
	for _, r := range rows {
		left[r.Run]++
		ended = append(ended, session.EndedCall{Session: r.Session, Run: r.Run, Call: r.ID})
		if err := auditInsert(ctx, tx, e.event(r.ID, r.Workspace, v.Status, r.Digest)); err != nil {
			return nil, err
		}
	}
	final := map[string]bool{}
	for _, id := range slices.Sorted(maps.Keys(left)) {
		status, err := settle(ctx, tx, id, left[id], 0, 0, e.at)
		if err != nil {
			return nil, err
		}
		final[id] = status.Final()
	}
	for i, r := range rows {
		left[r.Run]--
		ended[i].RunFinal = final[r.Run] && left[r.Run] == 0
	}
	return ended, nil
}

// EndCalls ends those of the named calls that are still in one of from.
func (db *DB) EndCalls(ctx context.Context, r run.Run, calls []string, from []run.CallStatus, v session.Verdict, f run.Finish) ([]session.EndedCall, error) {
	statuses := pendingStatus
	if !slices.Contains(from, run.Pending) {
		statuses = sentStatuses
	}
	var ended []session.EndedCall
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		ended = nil
		for _, id := range calls {
			more, err := endCalls(ctx, tx, v, endingOf(f), `calls.id = $7 AND calls.run_id = $8 AND calls.status IN (`+statuses+`)`, id, r.ID)
			if err != nil {
				return err
			}
			ended = append(ended, more...)
		}
		return nil
	})
	return ended, err
}

// CancelRun ends the run's pending calls and marks it as cancelled.
func (db *DB) CancelRun(ctx context.Context, r run.Run, reason string, v session.Verdict, f run.Finish) ([]session.EndedCall, error) {
	var ended []session.EndedCall
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		// A call that is being sent meanwhile is seen by whoever gives the cancel orders.
		n, err := affected(tx.ExecContext(ctx, cancelRun, r.ID, reason))
		if err != nil || n == 0 {
			return err
		}
		ended, err = endCalls(ctx, tx, v, endingOf(f), `calls.run_id = $7 AND calls.status IN (`+pendingStatus+`)`, r.ID)
		if err != nil {
			return err
		}
		return auditInsert(ctx, tx, audit.Event{
			ID: audit.ID(f.NewID()), At: f.At, Workspace: r.Workspace, Actor: f.Actor, Action: audit.RunCancelled,
			Object: r.ID, Outcome: audit.OK, Detail: f.Detail,
		})
	})
	if err != nil {
		return nil, err
	}
	return ended, nil
}

// LoseRunner ends what one start of a runner held. It returns the calls that
// ended and the sessions that changed.
func (db *DB) LoseRunner(ctx context.Context, l run.Loss) ([]session.EndedCall, []string, error) {
	var ended []session.EndedCall
	var sessions []string
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		ended, sessions = nil, nil
		var rows []sessionRow
		if err := sqlx.SelectContext(ctx, tx, &rows, loseSessions, l.Runner, l.Incarnation); err != nil {
			return err
		}
		for _, r := range rows {
			sessions = append(sessions, r.ID)
			action := audit.SessionLost
			if session.Status(r.Status) == session.Idle {
				action = audit.SessionIdle
			}
			err := auditInsert(ctx, tx, audit.Event{
				ID: audit.ID(l.NewID()), At: l.At, Workspace: r.Workspace, Actor: l.Actor, Action: action,
				Object: r.ID, Outcome: string(fault.RunnerLost), PolicyDigest: r.PolicyDigest, Detail: l.Detail + " of " + l.Runner,
			})
			if err != nil {
				return err
			}
		}
		sent, err := endCalls(ctx, tx, l.Sent, endingOf(l.Finish), sentOfRunner, l.Runner, l.Incarnation)
		if err != nil {
			return err
		}
		waiting, err := endCalls(ctx, tx, l.Pending, endingOf(l.Finish), pendingOfRunner, l.Runner, l.Incarnation)
		ended = append(sent, waiting...)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return ended, sessions, nil
}

// RenewLeases lists the open runs of replica and renews their leases.
func (db *DB) RenewLeases(ctx context.Context, replica string, until time.Time) ([]string, error) {
	var ids []string
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		ids = nil
		return sqlx.SelectContext(ctx, tx, &ids, renewLeases, replica, micros(until))
	})
	return ids, err
}

// TakeRuns gives open runs whose lease has ended to replica.
func (db *DB) TakeRuns(ctx context.Context, replica string, now, until time.Time, all bool, limit int) ([]string, error) {
	every := 0
	if all {
		every = 1
	}
	var ids []string
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		ids = nil
		return sqlx.SelectContext(ctx, tx, &ids, takeRuns, replica, micros(now), micros(until), every, limit)
	})
	return ids, err
}

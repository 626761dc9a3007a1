package store

import (
	"context"
	"fmt"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
)

type auditRow struct {
	ID           string `db:"id"`
	At           int64  `db:"at"`
	Workspace    string `db:"workspace_id"`
	Actor        string `db:"actor"`
	Action       string `db:"action"`
	Object       string `db:"object"`
	Outcome      string `db:"outcome"`
	PolicyDigest string `db:"policy_digest"`
	Detail       string `db:"detail"`
}

func (r auditRow) event() audit.Event {
	return audit.Event{
		ID: r.ID, At: instant(r.At), Workspace: r.Workspace, Actor: r.Actor, Action: r.Action,
		Object: r.Object, Outcome: r.Outcome, PolicyDigest: r.PolicyDigest, Detail: r.Detail,
	}
}

const (
	insertAudit = `
		INSERT INTO audit_events (id, at, workspace_id, actor, action, object, outcome, policy_digest, detail)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)`
	auditOfWorkspace = `
		SELECT id, at, workspace_id, actor, action, object, outcome, policy_digest, detail
		FROM audit_events WHERE workspace_id = $1 AND ($2 = '' OR id < $2) ORDER BY id DESC LIMIT $3`
)

// auditInsert writes one event into the transaction of the change it tells of.
func auditInsert(ctx context.Context, tx statements, e audit.Event) error {
	_, err := tx.ExecContext(ctx, insertAudit, auditArgs(e)...)
	if err != nil {
		return fmt.Errorf("write audit event: %w", err)
	}
	return nil
}

func auditArgs(e audit.Event) []any {
	return []any{e.ID, micros(e.At), e.Workspace, e.Actor, e.Action, e.Object, e.Outcome, e.PolicyDigest, e.Detail}
}

// recorded writes e when the change that it tells of has not failed with err.
func recorded(ctx context.Context, tx statements, err error, e audit.Event) error {
	if err != nil {
		return err
	}
	return auditInsert(ctx, tx, e)
}

// AuditEvents lists a workspace's record, newest first.
func (db *DB) AuditEvents(ctx context.Context, workspace string, p page.Page) ([]audit.Event, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []auditRow
	if err := db.all(ctx, &rows, auditOfWorkspace, workspace, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r auditRow) string { return r.ID })
	return convert(rows, auditRow.event), next, nil
}

// convert turns rows into what the domain calls them.
func convert[Row, Domain any](rows []Row, to func(Row) Domain) []Domain {
	out := make([]Domain, len(rows))
	for i, r := range rows {
		out[i] = to(r)
	}
	return out
}

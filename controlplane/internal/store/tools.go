package store

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"slices"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

type toolRow struct {
	Name        string `db:"name"`
	Description string `db:"description"`
	Parameters  string `db:"parameters"`
	Kind        string `db:"handler_kind"`
	Payload     string `db:"handler_payload"`
	Revision    int64  `db:"revision"`
}

func (r toolRow) spec() tool.Spec {
	return tool.Spec{
		Name: r.Name, Description: r.Description, Parameters: json.RawMessage(r.Parameters),
		Payload: json.RawMessage(r.Payload), Kind: tool.Kind(r.Kind), Revision: r.Revision,
	}
}

const (
	toolsOfWorkspace = `
		SELECT name, description, parameters, handler_kind, handler_payload, revision
		FROM workspace_tools WHERE workspace_id = $1`
	toolByName = `
		SELECT name, description, parameters, handler_kind, handler_payload, revision
		FROM workspace_tools WHERE workspace_id = $1 AND name = $2`
	revisionOfTool = `SELECT revision FROM workspace_tools WHERE workspace_id = $1 AND name = $2`
	// Revisions are counted for the whole workspace, so that a tool that is
	// deleted and put again never has an old one; the row is also the lock
	// under which a workspace's tools change.
	nextToolRevision = `UPDATE workspaces SET tool_revision = tool_revision + 1 WHERE id = $1 RETURNING tool_revision`
	putTool          = `
		INSERT INTO workspace_tools (workspace_id, name, description, parameters, handler_kind, handler_payload,
			revision, created_at, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8)
		ON CONFLICT (workspace_id, name) DO UPDATE SET
			description = excluded.description, parameters = excluded.parameters,
			handler_kind = excluded.handler_kind, handler_payload = excluded.handler_payload,
			revision = excluded.revision, updated_at = excluded.updated_at`
	deleteTool = `DELETE FROM workspace_tools WHERE workspace_id = $1 AND name = $2`
)

// WorkspaceTools lists the tools of a workspace by name.
func (db *DB) WorkspaceTools(ctx context.Context, workspace string) ([]tool.Spec, error) {
	var rows []toolRow
	if err := db.all(ctx, &rows, toolsOfWorkspace, workspace); err != nil {
		return nil, err
	}
	// Not ORDER BY: databases differ in how they order letters.
	slices.SortFunc(rows, func(a, b toolRow) int { return cmp.Compare(a.Name, b.Name) })
	return convert(rows, toolRow.spec), nil
}

// WorkspaceTool returns one tool of a workspace; NotFound when there is none.
func (db *DB) WorkspaceTool(ctx context.Context, workspace, name string) (tool.Spec, error) {
	var r toolRow
	if err := db.get(ctx, &r, toolByName, workspace, name); err != nil {
		return tool.Spec{}, missing(err, "tool", name)
	}
	return r.spec(), nil
}

// PutWorkspaceTool adds or replaces a tool and gives it a revision higher
// than any that a tool of the workspace had.
func (db *DB) PutWorkspaceTool(ctx context.Context, workspace string, s tool.Spec, ifRevision int64, e audit.Event) (tool.Spec, error) {
	for field, text := range map[string]string{
		"name": s.Name, "description": s.Description, "parameters": string(s.Parameters), "handler_payload": string(s.Payload),
	} {
		if err := plain(field, text); err != nil {
			return tool.Spec{}, err
		}
	}
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &s.Revision, nextToolRevision, workspace)
		if err != nil {
			return missing(err, "workspace", workspace)
		}
		found, err := toolRevision(ctx, tx, workspace, s.Name)
		if err != nil {
			return err
		}
		if err := expect(found, ifRevision); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, putTool, workspace, s.Name, s.Description, string(s.Parameters),
			string(s.Kind), string(s.Payload), s.Revision, micros(e.At))
		return recorded(ctx, tx, err, e)
	})
	if err != nil {
		return tool.Spec{}, err
	}
	return s, nil
}

// DeleteWorkspaceTool removes a tool; NotFound when there is none.
func (db *DB) DeleteWorkspaceTool(ctx context.Context, workspace, name string, ifRevision int64, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		var next int64
		if err := sqlx.GetContext(ctx, tx, &next, nextToolRevision, workspace); err != nil {
			return missing(err, "tool", name)
		}
		found, err := toolRevision(ctx, tx, workspace, name)
		if err != nil {
			return err
		}
		if found == 0 {
			return fault.New(fault.NotFound, "no tool %q", name)
		}
		if err := expect(found, ifRevision); err != nil {
			return err
		}
		err = changed(ctx, tx, "tool", name, deleteTool, workspace, name)
		return recorded(ctx, tx, err, e)
	})
}

// toolRevision is the revision of a tool, 0 when there is none.
func toolRevision(ctx context.Context, tx statements, workspace, name string) (int64, error) {
	var revision int64
	err := sqlx.GetContext(ctx, tx, &revision, revisionOfTool, workspace, name)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return revision, err
}

// expect refuses a change of a tool that is not as the caller believes.
func expect(found, ifRevision int64) error {
	switch {
	case ifRevision == tool.AnyRevision, ifRevision == found, ifRevision == tool.NoRevision && found == 0:
		return nil
	}
	return fault.New(fault.PreconditionFailed, "the tool was changed meanwhile; read it again")
}

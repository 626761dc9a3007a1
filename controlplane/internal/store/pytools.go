package store

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

type pythonToolRow struct {
	Workspace   string           `db:"workspace_id"`
	ID          string           `db:"id"`
	Owner       string           `db:"user_id"`
	Name        string           `db:"name"`
	Content     string           `db:"content"`
	Specs       string           `db:"specs"`
	Spoken      string           `db:"spoken"`
	Description sql.Null[string] `db:"description"`
	Manifest    string           `db:"manifest"`
	Valves      sql.Null[string] `db:"valves_schema"`
	UserValves  sql.Null[string] `db:"user_valves_schema"`
	Citation    bool             `db:"citation"`
	FileHandler bool             `db:"file_handler"`
	DescribedBy int              `db:"described_by"`
	Revision    int64            `db:"revision"`
	CreatedAt   int64            `db:"created_at"`
	UpdatedAt   int64            `db:"updated_at"`
	Set         []byte           `db:"valves"`
	SpokenSet   []byte           `db:"spoken_set"`
	OwnerName   sql.Null[string] `db:"owner_name"`
	OwnerRole   sql.Null[string] `db:"owner_role"`
}

func (r pythonToolRow) tool() pytool.Tool {
	t := pytool.Tool{
		Workspace: r.Workspace, ID: r.ID, Owner: r.Owner, Name: r.Name, Content: r.Content,
		Specs: json.RawMessage(r.Specs), Spoken: pairs(r.Spoken), Manifest: json.RawMessage(r.Manifest),
		Valves: optional(r.Valves), UserValves: optional(r.UserValves),
		Citation: r.Citation, FileHandler: r.FileHandler, Sealed: pytool.Sealed{Valves: r.Set, Spoken: r.SpokenSet},
		Format: r.DescribedBy, Revision: r.Revision, Grants: []pytool.Grant{},
		CreatedAt: instant(r.CreatedAt), UpdatedAt: instant(r.UpdatedAt),
	}
	if r.Description.Valid {
		t.Description = &r.Description.V
	}
	if r.OwnerName.Valid {
		t.OwnedBy = &pytool.User{ID: r.Owner, Name: r.OwnerName.V, Admin: r.OwnerRole.V != "member"}
	}
	return t
}

func optional(text sql.Null[string]) json.RawMessage {
	if !text.Valid {
		return nil
	}
	return json.RawMessage(text.V)
}

// orNull is raw as a column keeps it: NULL when there is none.
func orNull(raw json.RawMessage) *string {
	if raw == nil {
		return nil
	}
	text := string(raw)
	return &text
}

type grantRow struct {
	ID            string `db:"id"`
	Tool          string `db:"tool_id"`
	PrincipalType string `db:"principal_type"`
	PrincipalID   string `db:"principal_id"`
	Permission    string `db:"permission"`
	CreatedAt     int64  `db:"created_at"`
}

func (r grantRow) grant() pytool.Grant {
	return pytool.Grant{
		ID: r.ID, PrincipalType: r.PrincipalType, PrincipalID: r.PrincipalID, Permission: r.Permission, CreatedAt: instant(r.CreatedAt),
	}
}

const (
	pythonToolColumns = `
		t.workspace_id, t.id, t.user_id, t.name, t.specs, t.description, t.manifest, t.valves_schema, t.user_valves_schema,
		t.citation, t.file_handler, t.described_by, t.revision, t.created_at, t.updated_at, u.name AS owner_name, u.role AS owner_role`
	allPythonTools = `
		FROM tools t LEFT JOIN users u ON u.id = t.user_id AND u.workspace_id = t.workspace_id`
	fromPythonTools             = allPythonTools + ` WHERE t.workspace_id = $1`
	pythonToolsOfWorkspace      = `SELECT '' AS content,` + pythonToolColumns + fromPythonTools + ` ORDER BY t.updated_at DESC, t.id`
	pythonToolsWholeOfWorkspace = `SELECT t.content,` + pythonToolColumns + fromPythonTools + ` ORDER BY t.updated_at DESC, t.id`
	pythonToolByID              = `SELECT t.content, t.spoken, t.valves, t.spoken_set,` + pythonToolColumns + fromPythonTools + ` AND t.id = $2`
	outdatedPythonTool          = `SELECT t.content, t.spoken, t.valves, t.spoken_set,` + pythonToolColumns + allPythonTools + `
		WHERE t.described_by < $1 AND (t.described_by, t.workspace_id, t.id) > ($2, $3, $4)
		ORDER BY t.described_by, t.workspace_id, t.id LIMIT 1`
	countOfPythonTools = `SELECT COUNT(*) FROM tools WHERE workspace_id = $1`
	insertPythonTool   = `
		INSERT INTO tools (workspace_id, id, user_id, name, content, specs, description, manifest, valves_schema,
			user_valves_schema, citation, file_handler, revision, created_at, updated_at, spoken, described_by)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)`
	updatePythonTool = `
		UPDATE tools SET name = $3, content = $4, specs = $5, description = $6, manifest = $7, valves_schema = $8,
			user_valves_schema = $9, citation = $10, file_handler = $11, revision = $12, updated_at = $13, spoken = $14,
			spoken_set = $15, described_by = $16
		WHERE workspace_id = $1 AND id = $2 AND revision = $17 AND valves IS NOT DISTINCT FROM $18`
	renewPythonTool = `
		UPDATE tools SET specs = $3, spoken = $4, manifest = $5, valves_schema = $6, user_valves_schema = $7, citation = $8,
			file_handler = $9, spoken_set = $10, described_by = $11
		WHERE workspace_id = $1 AND id = $2 AND revision = $12 AND valves IS NOT DISTINCT FROM $13`
	lockPythonTool       = `UPDATE tools SET revision = revision WHERE workspace_id = $1 AND id = $2 AND revision = $3`
	revisionOfPythonTool = `SELECT revision FROM tools WHERE workspace_id = $1 AND id = $2`
	deletePythonTool     = `DELETE FROM tools WHERE workspace_id = $1 AND id = $2`

	grantsOfWorkspace = `
		SELECT id, tool_id, principal_type, principal_id, permission, created_at
		FROM access_grants WHERE workspace_id = $1 ORDER BY id`
	grantsOfTool = `
		SELECT id, tool_id, principal_type, principal_id, permission, created_at
		FROM access_grants WHERE workspace_id = $1 AND tool_id = $2 ORDER BY id`
	insertGrant = `
		INSERT INTO access_grants (id, workspace_id, tool_id, principal_type, principal_id, permission, created_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`
	deleteGrants = `DELETE FROM access_grants WHERE workspace_id = $1 AND tool_id = $2`

	valvesOfTool = `SELECT valves, valves_revision AS revision FROM tools WHERE workspace_id = $1 AND id = $2`
	putValves    = `
		UPDATE tools SET valves = $3, updated_at = $4, spoken_set = $5, valves_revision = $6
		WHERE workspace_id = $1 AND id = $2 AND revision = $6`
	valvesOfUser  = `SELECT valves, revision FROM tool_user_valves WHERE workspace_id = $1 AND tool_id = $2 AND user_id = $3`
	putUserValves = `
		INSERT INTO tool_user_valves (workspace_id, tool_id, user_id, valves, updated_at, revision) VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT (workspace_id, tool_id, user_id) DO UPDATE
		SET valves = excluded.valves, updated_at = excluded.updated_at, revision = excluded.revision`
)

// PythonTools lists a workspace's Python tools without their content and what
// models are told of them, the last changed first.
func (db *DB) PythonTools(ctx context.Context, workspace string) ([]pytool.Tool, error) {
	return db.pythonTools(ctx, workspace, pythonToolsOfWorkspace)
}

// PythonToolsWhole is PythonTools with the content.
func (db *DB) PythonToolsWhole(ctx context.Context, workspace string) ([]pytool.Tool, error) {
	return db.pythonTools(ctx, workspace, pythonToolsWholeOfWorkspace)
}

func (db *DB) pythonTools(ctx context.Context, workspace, query string) ([]pytool.Tool, error) {
	var rows []pythonToolRow
	if err := db.all(ctx, &rows, query, workspace); err != nil {
		return nil, err
	}
	var grants []grantRow
	if err := db.all(ctx, &grants, grantsOfWorkspace, workspace); err != nil {
		return nil, err
	}
	byTool := map[string][]pytool.Grant{}
	for _, g := range grants {
		byTool[g.Tool] = append(byTool[g.Tool], g.grant())
	}
	tools := convert(rows, pythonToolRow.tool)
	for i := range tools {
		tools[i].Grants = append(tools[i].Grants, byTool[tools[i].ID]...)
	}
	return tools, nil
}

// CountPythonTools returns how many Python tools a workspace has.
func (db *DB) CountPythonTools(ctx context.Context, workspace string) (int, error) {
	var n int
	err := db.get(ctx, &n, countOfPythonTools, workspace)
	return n, err
}

// PythonTool returns one tool of a workspace; NotFound when there is none.
func (db *DB) PythonTool(ctx context.Context, workspace, id string) (pytool.Tool, error) {
	var r pythonToolRow
	if err := db.get(ctx, &r, pythonToolByID, workspace, id); err != nil {
		return pytool.Tool{}, missing(err, "Python tool", id)
	}
	var grants []grantRow
	if err := db.all(ctx, &grants, grantsOfTool, workspace, id); err != nil {
		return pytool.Tool{}, err
	}
	t := r.tool()
	t.Grants = append(t.Grants, convert(grants, grantRow.grant)...)
	return t, nil
}

// InsertPythonTool adds a tool; Conflict when its id is taken.
func (db *DB) InsertPythonTool(ctx context.Context, t pytool.Tool, e audit.Event) (pytool.Tool, error) {
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		if err := sqlx.GetContext(ctx, tx, &t.Revision, nextToolRevision, t.Workspace); err != nil {
			return missing(err, "workspace", t.Workspace)
		}
		_, err := tx.ExecContext(ctx, insertPythonTool, t.Workspace, t.ID, t.Owner, t.Name, t.Content, string(t.Specs), t.Description,
			string(t.Manifest), orNull(t.Valves), orNull(t.UserValves), t.Citation, t.FileHandler, t.Revision, micros(t.CreatedAt), micros(t.UpdatedAt),
			pairsText(t.Spoken), t.Format)
		if duplicate(err) {
			return fault.Wrap(err, fault.Conflict, "a Python tool %q exists already", t.ID).On("id")
		}
		if err != nil {
			return err
		}
		return recorded(ctx, tx, grant(ctx, tx, t.Workspace, t.ID, t.Grants), e)
	})
	return t, err
}

// UpdatePythonTool replaces a tool, and its grants unless they are nil, when
// it is of before's revision and set to before's valves; else it is a Conflict.
func (db *DB) UpdatePythonTool(ctx context.Context, t, before pytool.Tool, e audit.Event) (pytool.Tool, error) {
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		var err error
		if t.Revision, err = lockTools(ctx, tx, t.Workspace, t.ID); err != nil {
			return err
		}
		err = unchanged(ctx, tx, t, updatePythonTool, t.Workspace, t.ID, t.Name, t.Content, string(t.Specs), t.Description,
			string(t.Manifest), orNull(t.Valves), orNull(t.UserValves), t.Citation, t.FileHandler, t.Revision, micros(t.UpdatedAt),
			pairsText(t.Spoken), t.Sealed.Spoken, t.Format, before.Revision, before.Sealed.Valves)
		if err != nil {
			return err
		}
		if t.Grants != nil {
			err = regrant(ctx, tx, t.Workspace, t.ID, t.Grants)
		}
		return recorded(ctx, tx, err, e)
	})
	return t, err
}

// OutdatedPythonTool returns the first tool behind after, by format, workspace
// and id, whose description is older than format; NotFound when there is none.
func (db *DB) OutdatedPythonTool(ctx context.Context, format int, after pytool.Key) (pytool.Tool, error) {
	var r pythonToolRow
	if err := db.get(ctx, &r, outdatedPythonTool, format, after.Format, after.Workspace, after.ID); err != nil {
		return pytool.Tool{}, missing(err, "outdated Python tool behind", after.ID)
	}
	return r.tool(), nil
}

// RenewPythonTool replaces what t says of itself, which is no change of it;
// Conflict when it, or what it is set to, has changed since t was read.
func (db *DB) RenewPythonTool(ctx context.Context, t pytool.Tool, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := unchanged(ctx, tx, t, renewPythonTool, t.Workspace, t.ID, string(t.Specs), pairsText(t.Spoken), string(t.Manifest),
			orNull(t.Valves), orNull(t.UserValves), t.Citation, t.FileHandler, t.Sealed.Spoken, t.Format, t.Revision, t.Sealed.Valves)
		return recorded(ctx, tx, err, e)
	})
}

// lockTools takes the lock under which a workspace's tools change and returns
// the next revision; the tool is not there when the workspace isn't.
func lockTools(ctx context.Context, tx statements, workspace, id string) (next int64, err error) {
	err = sqlx.GetContext(ctx, tx, &next, nextToolRevision, workspace)
	return next, missing(err, "Python tool", id)
}

// unchanged is changed for a statement that finds t only as the caller read
// it: else it is a Conflict.
func unchanged(ctx context.Context, tx statements, t pytool.Tool, statement string, args ...any) error {
	n, err := affected(tx.ExecContext(ctx, statement, args...))
	if err != nil || n > 0 {
		return err
	}
	var now int64
	if err := sqlx.GetContext(ctx, tx, &now, revisionOfPythonTool, t.Workspace, t.ID); err != nil {
		return missing(err, "Python tool", t.ID)
	}
	return fault.New(fault.Conflict, "the tool was changed meanwhile; read it again")
}

// PutGrants replaces the grants of a tool.
func (db *DB) PutGrants(ctx context.Context, workspace, id string, grants []pytool.Grant, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		if _, err := lockTools(ctx, tx, workspace, id); err != nil {
			return err
		}
		var revision int64
		if err := sqlx.GetContext(ctx, tx, &revision, revisionOfPythonTool, workspace, id); err != nil {
			return missing(err, "Python tool", id)
		}
		return recorded(ctx, tx, regrant(ctx, tx, workspace, id, grants), e)
	})
}

func regrant(ctx context.Context, tx statements, workspace, id string, grants []pytool.Grant) error {
	if _, err := tx.ExecContext(ctx, deleteGrants, workspace, id); err != nil {
		return err
	}
	return grant(ctx, tx, workspace, id, grants)
}

func grant(ctx context.Context, tx statements, workspace, id string, grants []pytool.Grant) error {
	for _, g := range grants {
		if _, err := tx.ExecContext(ctx, insertGrant, g.ID, workspace, id, g.PrincipalType, g.PrincipalID, g.Permission, micros(g.CreatedAt)); err != nil {
			return err
		}
	}
	return nil
}

// DeletePythonTool removes a tool with its grants and valves; NotFound when
// there is none.
func (db *DB) DeletePythonTool(ctx context.Context, workspace, id string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		// Else one that is given grants at this moment would go from under them.
		if _, err := lockTools(ctx, tx, workspace, id); err != nil {
			return err
		}
		err := changed(ctx, tx, "Python tool", id, deletePythonTool, workspace, id)
		return recorded(ctx, tx, err, e)
	})
}

// keptRow is what a tool is set to.
type keptRow struct {
	Sealed   []byte `db:"valves"`
	Revision int64  `db:"revision"`
}

// Valves returns what a tool is set to.
func (db *DB) Valves(ctx context.Context, workspace, id string) (pytool.Kept, error) {
	var row keptRow
	if err := db.get(ctx, &row, valvesOfTool, workspace, id); err != nil {
		return pytool.Kept{}, missing(err, "Python tool", id)
	}
	return pytool.Kept(row), nil
}

// PutValves sets a tool to t.Sealed, which counts as a change of it at e.At,
// when it is of t's revision; else it is a Conflict.
func (db *DB) PutValves(ctx context.Context, t pytool.Tool, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := unchanged(ctx, tx, t, putValves, t.Workspace, t.ID, t.Sealed.Valves, micros(e.At), t.Sealed.Spoken, t.Revision)
		return recorded(ctx, tx, err, e)
	})
}

// UserValves returns what a user has set a tool to.
func (db *DB) UserValves(ctx context.Context, workspace, id, user string) (pytool.Kept, error) {
	var rows []keptRow
	if err := db.all(ctx, &rows, valvesOfUser, workspace, id, user); err != nil || len(rows) == 0 {
		return pytool.Kept{}, err
	}
	return pytool.Kept(rows[0]), nil
}

// PutUserValves sets a tool for one user, when it is of t's revision; else it
// is a Conflict.
func (db *DB) PutUserValves(ctx context.Context, t pytool.Tool, user string, sealed []byte, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		if err := unchanged(ctx, tx, t, lockPythonTool, t.Workspace, t.ID, t.Revision); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, putUserValves, t.Workspace, t.ID, user, sealed, micros(e.At), t.Revision)
		return recorded(ctx, tx, err, e)
	})
}

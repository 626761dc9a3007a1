package store

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/shared/fault"
)

type workspaceRow struct {
	ID        string `db:"id"`
	Name      string `db:"name"`
	CreatedAt int64  `db:"created_at"`
}

func (r workspaceRow) workspace() identity.Workspace {
	return identity.Workspace{ID: r.ID, Name: r.Name, CreatedAt: instant(r.CreatedAt)}
}

type userRow struct {
	ID        string `db:"id"`
	Workspace string `db:"workspace_id"`
	Name      string `db:"name"`
	Role      string `db:"role"`
	Disabled  bool   `db:"disabled"`
	CreatedAt int64  `db:"created_at"`
}

func (r userRow) user() identity.User {
	return identity.User{
		ID: r.ID, Workspace: r.Workspace, Name: r.Name, Role: identity.Role(r.Role),
		Disabled: r.Disabled, CreatedAt: instant(r.CreatedAt),
	}
}

type keyRow struct {
	ID        string `db:"id"`
	Workspace string `db:"workspace_id"`
	UserID    string `db:"user_id"`
	Name      string `db:"name"`
	Hint      string `db:"hint"`
	CreatedAt int64  `db:"created_at"`
	ExpiresAt int64  `db:"expires_at"`
	RevokedAt int64  `db:"revoked_at"`
}

func (r keyRow) key() identity.APIKey {
	return identity.APIKey{
		ID: r.ID, Workspace: r.Workspace, UserID: r.UserID, Name: r.Name, Hint: r.Hint,
		CreatedAt: instant(r.CreatedAt), ExpiresAt: instant(r.ExpiresAt), RevokedAt: instant(r.RevokedAt),
	}
}

type credentialRow struct {
	keyRow
	Hash     []byte `db:"hash"`
	Role     string `db:"role"`
	Disabled bool   `db:"disabled"`
}

func (r credentialRow) credential() identity.Credential {
	return identity.Credential{Key: r.key(), Hash: r.Hash, Role: identity.Role(r.Role), Disabled: r.Disabled}
}

// An empty workspace in a query means every workspace.
const (
	allWorkspaces   = `SELECT id, name, created_at FROM workspaces WHERE id > $1 ORDER BY id LIMIT $2`
	workspaceByID   = `SELECT id, name, created_at FROM workspaces WHERE id = $1`
	insertWorkspace = `INSERT INTO workspaces (id, name, created_at) VALUES ($1, $2, $3)`
	deleteWorkspace = `DELETE FROM workspaces WHERE id = $1`

	openSessionsOfWorkspace   = `SELECT COUNT(*) FROM agent_sessions WHERE workspace_id = $1 AND status <> 'closed'`
	deleteCallsOfWorkspace    = `DELETE FROM calls WHERE workspace_id = $1`
	deleteRunsOfWorkspace     = `DELETE FROM runs WHERE workspace_id = $1`
	deleteSessionsOfWorkspace = `DELETE FROM agent_sessions WHERE workspace_id = $1 AND status = 'closed'`

	usersOfWorkspace = `
		SELECT id, workspace_id, name, role, disabled, created_at
		FROM users WHERE workspace_id = $1 AND id > $2 ORDER BY id LIMIT $3`
	userByID = `
		SELECT id, workspace_id, name, role, disabled, created_at
		FROM users WHERE id = $1 AND ($2 = '' OR workspace_id = $2)`
	insertUser = `
		INSERT INTO users (id, workspace_id, name, role, disabled, created_at)
		VALUES ($1, $2, $3, $4, $5, $6)`
	updateUser = `
		UPDATE users SET name = COALESCE($3, name), role = COALESCE($4, role), disabled = COALESCE($5, disabled)
		WHERE id = $1 AND ($2 = '' OR workspace_id = $2)
		RETURNING id, workspace_id, name, role, disabled, created_at`
	deleteUser         = `DELETE FROM users WHERE id = $1 AND ($2 = '' OR workspace_id = $2)`
	deleteValvesOfUser = `DELETE FROM tool_user_valves WHERE user_id = $1`

	keysOfWorkspace = `
		SELECT id, workspace_id, user_id, name, hint, created_at, expires_at, revoked_at
		FROM api_keys WHERE workspace_id = $1 AND id > $2 ORDER BY id LIMIT $3`
	keyByID = `
		SELECT id, workspace_id, user_id, name, hint, created_at, expires_at, revoked_at
		FROM api_keys WHERE id = $1 AND ($2 = '' OR workspace_id = $2)`
	insertKey = `
		INSERT INTO api_keys (id, workspace_id, user_id, name, hint, hash, created_at, expires_at, revoked_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 0)`
	revokeKey = `
		UPDATE api_keys SET revoked_at = CASE WHEN revoked_at = 0 THEN $3 ELSE revoked_at END
		WHERE id = $1 AND ($2 = '' OR workspace_id = $2)`
	credentialByHash = `
		SELECT k.id, k.workspace_id, k.user_id, k.name, k.hint, k.created_at, k.expires_at, k.revoked_at,
			k.hash, u.role, u.disabled
		FROM api_keys k JOIN users u ON u.id = k.user_id
		WHERE k.hash = $1`
)

// Workspaces lists all workspaces by id.
func (db *DB) Workspaces(ctx context.Context, p page.Page) ([]identity.Workspace, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []workspaceRow
	if err := db.all(ctx, &rows, allWorkspaces, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r workspaceRow) string { return r.ID })
	return convert(rows, workspaceRow.workspace), next, nil
}

// Workspace returns one workspace; NotFound when there is none.
func (db *DB) Workspace(ctx context.Context, id string) (identity.Workspace, error) {
	var r workspaceRow
	if err := db.get(ctx, &r, workspaceByID, id); err != nil {
		return identity.Workspace{}, missing(err, "workspace", id)
	}
	return r.workspace(), nil
}

// InsertWorkspace adds a workspace; Conflict when its id is taken.
func (db *DB) InsertWorkspace(ctx context.Context, w identity.Workspace, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, insertWorkspace, w.ID, w.Name, micros(w.CreatedAt))
		if duplicate(err) {
			return fault.Wrap(err, fault.Conflict, "workspace %q exists already", w.ID).On("id")
		}
		return recorded(ctx, tx, err, e)
	})
}

// DeleteWorkspace removes a workspace and all that is in it, but not its audit
// record; Conflict while one of its sessions is not closed.
func (db *DB) DeleteWorkspace(ctx context.Context, id string, e audit.Event) error {
	busy := fault.New(fault.Conflict, "workspace %q has open sessions; close them first", id)
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		var open int
		if err := sqlx.GetContext(ctx, tx, &open, openSessionsOfWorkspace, id); err != nil {
			return err
		}
		if open > 0 {
			return busy
		}
		for _, query := range []string{deleteCallsOfWorkspace, deleteRunsOfWorkspace, deleteSessionsOfWorkspace} {
			if _, err := tx.ExecContext(ctx, query, id); err != nil {
				return err
			}
		}
		err := changed(ctx, tx, "workspace", id, deleteWorkspace, id)
		if unreferenced(err) { // a session was opened meanwhile
			return busy
		}
		return recorded(ctx, tx, err, e)
	})
}

// Users lists the users of a workspace by id.
func (db *DB) Users(ctx context.Context, workspace string, p page.Page) ([]identity.User, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []userRow
	if err := db.all(ctx, &rows, usersOfWorkspace, workspace, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r userRow) string { return r.ID })
	return convert(rows, userRow.user), next, nil
}

// User returns one user of a workspace ("": of any).
func (db *DB) User(ctx context.Context, workspace, id string) (identity.User, error) {
	var r userRow
	if err := db.get(ctx, &r, userByID, id, workspace); err != nil {
		return identity.User{}, missing(err, "user", id)
	}
	return r.user(), nil
}

// InsertUser adds a user; Conflict when its name is taken in its workspace.
func (db *DB) InsertUser(ctx context.Context, u identity.User, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, insertUser, u.ID, u.Workspace, u.Name, string(u.Role), u.Disabled, micros(u.CreatedAt))
		switch {
		case duplicate(err):
			return nameTaken(err, u.Name)
		case unreferenced(err):
			return fault.Wrap(err, fault.NotFound, "no workspace %q", u.Workspace)
		}
		return recorded(ctx, tx, err, e)
	})
}

// UpdateUser changes a user of a workspace and returns what it is now.
func (db *DB) UpdateUser(ctx context.Context, workspace, id string, c identity.Change, e audit.Event) (identity.User, error) {
	var r userRow
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &r, updateUser, id, workspace, c.Name, (*string)(c.Role), c.Disabled)
		if duplicate(err) && c.Name != nil {
			return nameTaken(err, *c.Name)
		}
		return recorded(ctx, tx, missing(err, "user", id), e)
	})
	return r.user(), err
}

// DeleteUser removes a user of a workspace, its keys, and what it has set
// Python tools to.
func (db *DB) DeleteUser(ctx context.Context, workspace, id string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		if err := changed(ctx, tx, "user", id, deleteUser, id, workspace); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, deleteValvesOfUser, id)
		return recorded(ctx, tx, err, e)
	})
}

// Keys lists the API keys of a workspace by id.
func (db *DB) Keys(ctx context.Context, workspace string, p page.Page) ([]identity.APIKey, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []keyRow
	if err := db.all(ctx, &rows, keysOfWorkspace, workspace, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r keyRow) string { return r.ID })
	return convert(rows, keyRow.key), next, nil
}

// Key returns one API key of a workspace ("": of any).
func (db *DB) Key(ctx context.Context, workspace, id string) (identity.APIKey, error) {
	var r keyRow
	if err := db.get(ctx, &r, keyByID, id, workspace); err != nil {
		return identity.APIKey{}, missing(err, "API key", id)
	}
	return r.key(), nil
}

// InsertKey adds a key under the hash of its secret.
func (db *DB) InsertKey(ctx context.Context, k identity.APIKey, hash []byte, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, insertKey, k.ID, k.Workspace, k.UserID, k.Name, k.Hint, hash,
			micros(k.CreatedAt), micros(k.ExpiresAt))
		if unreferenced(err) {
			return fault.Wrap(err, fault.NotFound, "no user %q", k.UserID)
		}
		return recorded(ctx, tx, err, e)
	})
}

// RevokeKey marks a key as revoked at e.At; a second time changes nothing.
func (db *DB) RevokeKey(ctx context.Context, workspace, id string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := changed(ctx, tx, "API key", id, revokeKey, id, workspace, micros(e.At))
		return recorded(ctx, tx, err, e)
	})
}

// Credential returns the key whose secret has that hash, in one look-up.
func (db *DB) Credential(ctx context.Context, hash []byte) (identity.Credential, error) {
	var r credentialRow
	if err := db.get(ctx, &r, credentialByHash, hash); err != nil {
		return identity.Credential{}, missing(err, "API key", "")
	}
	return r.credential(), nil
}

// missing turns the absence of a row into NotFound.
func missing(err error, what, id string) error {
	if errors.Is(err, sql.ErrNoRows) {
		return fault.New(fault.NotFound, "no %s %q", what, id)
	}
	return err
}

// changed runs a statement that must touch a row: NotFound when it doesn't.
func changed(ctx context.Context, tx statements, what, id, query string, args ...any) error {
	res, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return fault.New(fault.NotFound, "no %s %q", what, id)
	}
	return err
}

func nameTaken(cause error, name string) error {
	return fault.Wrap(cause, fault.Conflict, "the name %q is taken", name).On("name")
}

package store

import (
	"context"
	"maps"
	"slices"

	"github.com/jmoiron/sqlx"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/shared/fault"
)

type groupRow struct {
	ID        string `db:"id"`
	Workspace string `db:"workspace_id"`
	Name      string `db:"name"`
	CreatedAt int64  `db:"created_at"`
}

func (r groupRow) group() identity.Group {
	return identity.Group{ID: r.ID, Workspace: r.Workspace, Name: r.Name, CreatedAt: instant(r.CreatedAt)}
}

type permissionsRow struct {
	Group       string `db:"group_id"` // empty: every member's
	Tools       bool   `db:"tools"`
	ToolsImport bool   `db:"tools_import"`
	ToolsExport bool   `db:"tools_export"`
	PublicTools bool   `db:"public_tools"`
}

func (r permissionsRow) permissions() identity.Permissions {
	return identity.Permissions{Tools: r.Tools, ToolsImport: r.ToolsImport, ToolsExport: r.ToolsExport, PublicTools: r.PublicTools}
}

const (
	groupsOfWorkspace = `
		SELECT id, workspace_id, name, created_at FROM groups WHERE workspace_id = $1 AND id > $2 ORDER BY id LIMIT $3`
	groupByID = `
		SELECT id, workspace_id, name, created_at FROM groups WHERE id = $1 AND ($2 = '' OR workspace_id = $2)`
	insertGroup = `INSERT INTO groups (id, workspace_id, name, created_at) VALUES ($1, $2, $3, $4)`
	renameGroup = `
		UPDATE groups SET name = $3 WHERE id = $1 AND workspace_id = $2
		RETURNING id, workspace_id, name, created_at`
	deleteGroup = `DELETE FROM groups WHERE id = $1 AND workspace_id = $2`

	membersOfGroup = `
		SELECT u.id, u.workspace_id, u.name, u.role, u.disabled, u.created_at
		FROM group_members m JOIN users u ON u.id = m.user_id
		WHERE m.group_id = $1 AND u.id > $2 ORDER BY u.id LIMIT $3`
	insertMember = `INSERT INTO group_members (group_id, user_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`
	deleteMember = `DELETE FROM group_members WHERE group_id = $1 AND user_id = $2`
	groupsOfUser = `
		SELECT g.id FROM group_members m JOIN groups g ON g.id = m.group_id
		WHERE m.user_id = $2 AND g.workspace_id = $1 ORDER BY g.id`

	permissionsOfWorkspace = `
		SELECT '' AS group_id, p.tools, p.tools_import, p.tools_export, p.public_tools
		FROM permissions p WHERE p.workspace_id = $1 AND p.group_id = ''
		UNION ALL
		SELECT g.id, COALESCE(p.tools, FALSE), COALESCE(p.tools_import, FALSE), COALESCE(p.tools_export, FALSE),
			COALESCE(p.public_tools, FALSE)
		FROM groups g LEFT JOIN permissions p ON p.workspace_id = g.workspace_id AND p.group_id = g.id
		WHERE g.workspace_id = $1`
	permissionsOfUser = `
		SELECT p.group_id, p.tools, p.tools_import, p.tools_export, p.public_tools
		FROM permissions p
		WHERE p.workspace_id = $1 AND (p.group_id = '' OR p.group_id IN
			(SELECT m.group_id FROM group_members m JOIN groups g ON g.id = m.group_id WHERE m.user_id = $2 AND g.workspace_id = $1))`
	putPermissions = `
		INSERT INTO permissions (workspace_id, group_id, tools, tools_import, tools_export, public_tools)
		VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT (workspace_id, group_id) DO UPDATE SET tools = excluded.tools, tools_import = excluded.tools_import,
			tools_export = excluded.tools_export, public_tools = excluded.public_tools`
	deleteGroupPermissions  = `DELETE FROM permissions WHERE workspace_id = $1 AND group_id = $2`
	deleteGroupsPermissions = `DELETE FROM permissions WHERE workspace_id = $1 AND group_id <> ''`
)

// Groups lists the groups of a workspace by id.
func (db *DB) Groups(ctx context.Context, workspace string, p page.Page) ([]identity.Group, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []groupRow
	if err := db.all(ctx, &rows, groupsOfWorkspace, workspace, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r groupRow) string { return r.ID })
	return convert(rows, groupRow.group), next, nil
}

// Group returns one group of a workspace ("": of any).
func (db *DB) Group(ctx context.Context, workspace, id string) (identity.Group, error) {
	var r groupRow
	if err := db.get(ctx, &r, groupByID, id, workspace); err != nil {
		return identity.Group{}, missing(err, "group", id)
	}
	return r.group(), nil
}

// InsertGroup adds a group; Conflict when its name is taken in its workspace.
func (db *DB) InsertGroup(ctx context.Context, g identity.Group, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, insertGroup, g.ID, g.Workspace, g.Name, micros(g.CreatedAt))
		switch {
		case duplicate(err):
			return nameTaken(err, g.Name)
		case unreferenced(err):
			return fault.Wrap(err, fault.NotFound, "no workspace %q", g.Workspace)
		}
		return recorded(ctx, tx, err, e)
	})
}

// RenameGroup names a group of a workspace anew; Conflict when that is taken.
func (db *DB) RenameGroup(ctx context.Context, workspace, id, name string, e audit.Event) (identity.Group, error) {
	var r groupRow
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := sqlx.GetContext(ctx, tx, &r, renameGroup, id, workspace, name)
		if duplicate(err) {
			return nameTaken(err, name)
		}
		return recorded(ctx, tx, missing(err, "group", id), e)
	})
	return r.group(), err
}

// DeleteGroup removes a group of a workspace, its membership and permissions.
func (db *DB) DeleteGroup(ctx context.Context, workspace, id string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		if err := changed(ctx, tx, "group", id, deleteGroup, id, workspace); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, deleteGroupPermissions, workspace, id)
		return recorded(ctx, tx, err, e)
	})
}

// Members lists the users of a group by id.
func (db *DB) Members(ctx context.Context, group string, p page.Page) ([]identity.User, string, error) {
	limit, after, err := p.Bounds()
	if err != nil {
		return nil, "", err
	}
	var rows []userRow
	if err := db.all(ctx, &rows, membersOfGroup, group, after, limit+1); err != nil {
		return nil, "", err
	}
	rows, next := page.Cut(rows, limit, func(r userRow) string { return r.ID })
	return convert(rows, userRow.user), next, nil
}

// AddMember puts a user of the group's workspace into it; NotFound when there
// is no such user, or no such group any more.
func (db *DB) AddMember(ctx context.Context, g identity.Group, user string, e audit.Event) (identity.User, error) {
	var r userRow
	err := db.tx(ctx, func(ctx context.Context, tx statements) error {
		if err := sqlx.GetContext(ctx, tx, &r, userByID, user, g.Workspace); err != nil {
			return missing(err, "user", user)
		}
		res, err := tx.ExecContext(ctx, insertMember, g.ID, user)
		if unreferenced(err) {
			return fault.Wrap(err, fault.NotFound, "no group %q with a user %q", g.ID, user)
		}
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return err // it is one already
		}
		return auditInsert(ctx, tx, e)
	})
	return r.user(), err
}

// RemoveMember takes a user out of a group; NotFound when it is not in it.
func (db *DB) RemoveMember(ctx context.Context, g identity.Group, user string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		err := changed(ctx, tx, "member", user, deleteMember, g.ID, user)
		return recorded(ctx, tx, err, e)
	})
}

// GroupsOf lists the ids of a user's groups.
func (db *DB) GroupsOf(ctx context.Context, workspace, user string) ([]string, error) {
	var ids []string
	err := db.all(ctx, &ids, groupsOfUser, workspace, user)
	return ids, err
}

// Permissions returns what the members of a workspace may, and each of its
// groups.
func (db *DB) Permissions(ctx context.Context, workspace string) (identity.PermissionSet, error) {
	set := identity.PermissionSet{Groups: map[string]identity.Permissions{}}
	var rows []permissionsRow
	if err := db.all(ctx, &rows, permissionsOfWorkspace, workspace); err != nil {
		return set, err
	}
	for _, r := range rows {
		if r.Group == "" {
			set.Defaults = r.permissions()
			continue
		}
		set.Groups[r.Group] = r.permissions()
	}
	return set, nil
}

// PutPermissions replaces the permissions of a workspace; those of its groups
// stay when set.Groups is nil. NotFound names a group that is not there.
func (db *DB) PutPermissions(ctx context.Context, workspace string, set identity.PermissionSet, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		put := func(group string, p identity.Permissions) error {
			_, err := tx.ExecContext(ctx, putPermissions, workspace, group, p.Tools, p.ToolsImport, p.ToolsExport, p.PublicTools)
			if unreferenced(err) {
				return fault.Wrap(err, fault.NotFound, "no workspace %q", workspace)
			}
			return err
		}
		if set.Groups != nil {
			if _, err := tx.ExecContext(ctx, deleteGroupsPermissions, workspace); err != nil {
				return err
			}
		}
		for _, id := range slices.Sorted(maps.Keys(set.Groups)) {
			var r groupRow
			if err := sqlx.GetContext(ctx, tx, &r, groupByID, id, workspace); err != nil {
				return missing(err, "group", id)
			}
			if err := put(id, set.Groups[id]); err != nil {
				return err
			}
		}
		return recorded(ctx, tx, put("", set.Defaults), e)
	})
}

// PermissionsOf returns what a user may by its workspace and its groups.
func (db *DB) PermissionsOf(ctx context.Context, workspace, user string) (identity.Permissions, error) {
	var rows []permissionsRow
	var all identity.Permissions
	if err := db.all(ctx, &rows, permissionsOfUser, workspace, user); err != nil {
		return all, err
	}
	for _, r := range rows {
		all = all.Or(r.permissions())
	}
	return all, nil
}

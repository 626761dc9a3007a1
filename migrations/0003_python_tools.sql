-- Python tools, who may use them, and what they are set to. Valid on
-- PostgreSQL and SQLite; see 0001 for how values are kept.

-- +goose Up
CREATE TABLE permissions (
	workspace_id TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	group_id     TEXT NOT NULL, -- '' is every member; no reference: an id never comes again
	tools        BOOLEAN NOT NULL,
	tools_import BOOLEAN NOT NULL,
	tools_export BOOLEAN NOT NULL,
	public_tools BOOLEAN NOT NULL,
	PRIMARY KEY (workspace_id, group_id)
);

CREATE TABLE tools (
	workspace_id       TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	id                 TEXT NOT NULL,
	user_id            TEXT NOT NULL, -- no reference: a tool outlives its owner
	name               TEXT NOT NULL,
	content            TEXT NOT NULL,
	specs              TEXT NOT NULL,
	spoken             TEXT NOT NULL, -- by function, what models are told of it
	description        TEXT,          -- NULL: none was given
	manifest           TEXT NOT NULL,
	valves_schema      TEXT,          -- NULL: the tool has no such class
	user_valves_schema TEXT,
	citation           BOOLEAN NOT NULL,
	file_handler       BOOLEAN NOT NULL,
	valves             BYTEA,         -- encrypted; NULL: never set
	revision           BIGINT NOT NULL, -- of workspaces.tool_revision
	created_at         BIGINT NOT NULL,
	updated_at         BIGINT NOT NULL,
	PRIMARY KEY (workspace_id, id)
);

CREATE TABLE access_grants (
	id             TEXT PRIMARY KEY,
	workspace_id   TEXT NOT NULL,
	tool_id        TEXT NOT NULL,
	principal_type TEXT NOT NULL, -- user or group
	principal_id   TEXT NOT NULL, -- no reference: nobody checks that it exists; * is every user
	permission     TEXT NOT NULL, -- read or write
	created_at     BIGINT NOT NULL,
	UNIQUE (workspace_id, tool_id, principal_type, principal_id, permission),
	FOREIGN KEY (workspace_id, tool_id) REFERENCES tools (workspace_id, id) ON DELETE CASCADE
);

CREATE TABLE tool_user_valves (
	workspace_id TEXT NOT NULL,
	tool_id      TEXT NOT NULL,
	user_id      TEXT NOT NULL, -- no reference: the bootstrap admin is no row
	valves       BYTEA NOT NULL, -- encrypted
	updated_at   BIGINT NOT NULL,
	PRIMARY KEY (workspace_id, tool_id, user_id),
	FOREIGN KEY (workspace_id, tool_id) REFERENCES tools (workspace_id, id) ON DELETE CASCADE
);
CREATE INDEX tool_user_valves_user ON tool_user_valves (user_id);

ALTER TABLE runs ADD COLUMN tools TEXT NOT NULL DEFAULT '[]'; -- the Python tools that it names, as they were when it started

-- +goose Down
ALTER TABLE runs DROP COLUMN tools;
DROP TABLE tool_user_valves;
DROP TABLE access_grants;
DROP TABLE tools;
DROP TABLE permissions;

-- Valid on PostgreSQL and SQLite. Ids are TEXT; instants are BIGINT Unix
-- microseconds, 0 where there is none; JSON is TEXT; bytes are BYTEA.

-- +goose Up
CREATE TABLE workspaces (
	id            TEXT PRIMARY KEY,
	name          TEXT NOT NULL,
	tool_revision BIGINT NOT NULL DEFAULT 0, -- the last revision given to a tool; never goes back
	created_at    BIGINT NOT NULL
);
INSERT INTO workspaces (id, name, created_at) VALUES ('default', 'default', 0);

CREATE TABLE users (
	id           TEXT PRIMARY KEY,
	workspace_id TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	name         TEXT NOT NULL,
	role         TEXT NOT NULL,
	disabled     BOOLEAN NOT NULL,
	created_at   BIGINT NOT NULL,
	UNIQUE (workspace_id, name)
);

CREATE TABLE groups (
	id           TEXT PRIMARY KEY,
	workspace_id TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	name         TEXT NOT NULL,
	created_at   BIGINT NOT NULL,
	UNIQUE (workspace_id, name)
);

CREATE TABLE group_members (
	group_id TEXT NOT NULL REFERENCES groups (id) ON DELETE CASCADE,
	user_id  TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
	PRIMARY KEY (group_id, user_id)
);
CREATE INDEX group_members_user ON group_members (user_id);

CREATE TABLE api_keys (
	id           TEXT PRIMARY KEY,
	workspace_id TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	user_id      TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
	name         TEXT NOT NULL,
	hint         TEXT NOT NULL,
	hash         BYTEA NOT NULL UNIQUE, -- SHA-256 of the secret
	created_at   BIGINT NOT NULL,
	expires_at   BIGINT NOT NULL,
	revoked_at   BIGINT NOT NULL
);
CREATE INDEX api_keys_workspace ON api_keys (workspace_id, id);
CREATE INDEX api_keys_user ON api_keys (user_id);

CREATE TABLE workspace_tools (
	workspace_id    TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
	name            TEXT NOT NULL,
	description     TEXT NOT NULL,
	parameters      TEXT NOT NULL,
	handler_kind    TEXT NOT NULL,
	handler_payload TEXT NOT NULL,
	revision        BIGINT NOT NULL,
	created_at      BIGINT NOT NULL,
	updated_at      BIGINT NOT NULL,
	PRIMARY KEY (workspace_id, name)
);

CREATE TABLE sandbox_policies (
	workspace_id       TEXT PRIMARY KEY REFERENCES workspaces (id) ON DELETE CASCADE,
	fs_allowlist       TEXT NOT NULL,
	network_allowlist  TEXT NOT NULL,
	cpu_shares         BIGINT NOT NULL,
	memory_mb          BIGINT NOT NULL,
	pids_limit         BIGINT NOT NULL,
	wall_clock_seconds BIGINT NOT NULL,
	output_bytes_limit BIGINT NOT NULL,
	base_image         TEXT NOT NULL,
	updated_at         BIGINT NOT NULL
);

CREATE TABLE agent_sessions (
	id                 TEXT PRIMARY KEY,
	workspace_id       TEXT NOT NULL REFERENCES workspaces (id), -- a workspace with open sessions stays
	owner              TEXT NOT NULL,
	status             TEXT NOT NULL,
	reason             TEXT NOT NULL DEFAULT '',
	epoch              BIGINT NOT NULL DEFAULT 0,
	runner             TEXT NOT NULL DEFAULT '',
	incarnation        TEXT NOT NULL DEFAULT '',
	backend            TEXT NOT NULL DEFAULT '',
	isolation          TEXT NOT NULL DEFAULT '',
	image_digest       TEXT NOT NULL DEFAULT '',
	enforced           TEXT NOT NULL DEFAULT '{}',
	policy_digest      TEXT NOT NULL DEFAULT '',
	wall_clock_seconds BIGINT NOT NULL DEFAULT 0,
	output_bytes_limit BIGINT NOT NULL DEFAULT 0,
	start_deadline     BIGINT NOT NULL DEFAULT 0, -- a starting session past it gets a new epoch and ticket
	idle_ttl           BIGINT NOT NULL,           -- microseconds
	created_at         BIGINT NOT NULL,
	last_used_at       BIGINT NOT NULL,
	expires_at         BIGINT NOT NULL
);
CREATE INDEX agent_sessions_owner ON agent_sessions (workspace_id, owner, id);
CREATE INDEX agent_sessions_status ON agent_sessions (status, start_deadline);
CREATE INDEX agent_sessions_runner ON agent_sessions (runner, incarnation);

CREATE TABLE runs (
	id                TEXT PRIMARY KEY,
	session_id        TEXT NOT NULL,
	workspace_id      TEXT NOT NULL,
	owner             TEXT NOT NULL,
	status            TEXT NOT NULL,
	parallel          BOOLEAN NOT NULL,
	output            TEXT NOT NULL DEFAULT '',
	usage_calls       BIGINT NOT NULL DEFAULT 0,
	usage_cpu_ms      DOUBLE PRECISION NOT NULL DEFAULT 0,
	usage_duration_ms DOUBLE PRECISION NOT NULL DEFAULT 0,
	created_at        BIGINT NOT NULL,
	started_at        BIGINT NOT NULL DEFAULT 0,
	finished_at       BIGINT NOT NULL DEFAULT 0,
	open_calls        BIGINT NOT NULL DEFAULT 0,
	cancel_reason     TEXT NOT NULL DEFAULT '',
	replica           TEXT NOT NULL DEFAULT '',
	lease_until       BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX runs_session ON runs (session_id, id);
CREATE INDEX runs_open ON runs (lease_until) WHERE status IN ('queued', 'running');
CREATE INDEX runs_finished ON runs (session_id, finished_at); -- 0 while open

CREATE TABLE calls (
	id             TEXT NOT NULL,
	client_id      TEXT NOT NULL,
	run_id         TEXT NOT NULL,
	session_id     TEXT NOT NULL,
	workspace_id   TEXT NOT NULL,
	idx            BIGINT NOT NULL,
	name           TEXT NOT NULL,
	arguments      TEXT NOT NULL,
	status         TEXT NOT NULL,
	epoch          BIGINT NOT NULL DEFAULT 0,
	runner         TEXT NOT NULL DEFAULT '',
	incarnation    TEXT NOT NULL DEFAULT '',
	sent_at        BIGINT NOT NULL DEFAULT 0,

	error_code     TEXT NOT NULL DEFAULT '',
	error_message  TEXT NOT NULL DEFAULT '',
	error_field    TEXT NOT NULL DEFAULT '',
	error_limit    BIGINT,
	error_observed BIGINT,
	exit_code      BIGINT,
	signal         TEXT NOT NULL DEFAULT '',
	stdout         BYTEA,
	stderr         BYTEA,
	value          BYTEA,
	encoding       TEXT NOT NULL DEFAULT '',
	has_value      BOOLEAN NOT NULL DEFAULT FALSE,
	stdout_bytes   BIGINT NOT NULL DEFAULT 0,
	stderr_bytes   BIGINT NOT NULL DEFAULT 0,
	truncated      BOOLEAN NOT NULL DEFAULT FALSE,
	duration_ms    DOUBLE PRECISION NOT NULL DEFAULT 0,
	cpu_ms         DOUBLE PRECISION NOT NULL DEFAULT 0,
	memory_peak    BIGINT NOT NULL DEFAULT 0,
	oom_kills      BIGINT NOT NULL DEFAULT 0,
	denials        TEXT NOT NULL DEFAULT '[]',
	backend        TEXT NOT NULL DEFAULT '',
	isolation      TEXT NOT NULL DEFAULT '',
	image_digest   TEXT NOT NULL DEFAULT '',
	policy_digest  TEXT NOT NULL DEFAULT '',
	enforced       TEXT NOT NULL DEFAULT '{}',
	retryable      BOOLEAN NOT NULL DEFAULT FALSE,
	PRIMARY KEY (run_id, idx) -- found by their run, a session's by its open runs: an index costs on every call
);

CREATE TABLE runners (
	id             TEXT PRIMARY KEY,
	incarnation    TEXT NOT NULL,
	pool           TEXT NOT NULL,
	state          TEXT NOT NULL,
	backend        TEXT NOT NULL,
	version        TEXT NOT NULL,
	labels         TEXT NOT NULL,
	enforces       TEXT NOT NULL,
	slots          BIGINT NOT NULL,
	used           BIGINT NOT NULL,
	start_failures BIGINT NOT NULL,
	first_seen     BIGINT NOT NULL,
	last_beat      BIGINT NOT NULL
);
CREATE INDEX runners_pool ON runners (pool, state);

CREATE TABLE audit_events (
	id            TEXT NOT NULL,
	at            BIGINT NOT NULL,
	workspace_id  TEXT NOT NULL, -- no reference: the record outlives the workspace
	actor         TEXT NOT NULL,
	action        TEXT NOT NULL,
	object        TEXT NOT NULL,
	outcome       TEXT NOT NULL,
	policy_digest TEXT NOT NULL,
	detail        TEXT NOT NULL,
	PRIMARY KEY (workspace_id, id)
);

-- +goose Down
DROP TABLE audit_events;
DROP TABLE runners;
DROP TABLE calls;
DROP TABLE runs;
DROP TABLE agent_sessions;
DROP TABLE sandbox_policies;
DROP TABLE workspace_tools;
DROP TABLE api_keys;
DROP TABLE group_members;
DROP TABLE groups;
DROP TABLE users;
DROP TABLE workspaces;

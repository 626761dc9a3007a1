-- A run goes on with the source that it began with; what is set later, when the
-- tool has another source, is not for that one.

-- +goose Up
ALTER TABLE tools ADD COLUMN valves_revision BIGINT NOT NULL DEFAULT 0; -- the tool's when valves were set
UPDATE tools SET valves_revision = revision WHERE valves IS NOT NULL;
ALTER TABLE tool_user_valves ADD COLUMN revision BIGINT NOT NULL DEFAULT 0; -- the tool's when they were set
UPDATE tool_user_valves SET revision = (
	SELECT t.revision FROM tools t WHERE t.workspace_id = tool_user_valves.workspace_id AND t.id = tool_user_valves.tool_id
);

-- +goose Down
ALTER TABLE tool_user_valves DROP COLUMN revision;
ALTER TABLE tools DROP COLUMN valves_revision;

-- +goose Up
ALTER TABLE tools ADD COLUMN described_by INTEGER NOT NULL DEFAULT 0; -- the version of what described it; an older one than the platform's is described again
CREATE INDEX tools_described_by ON tools (described_by, workspace_id, id);

-- +goose Down
DROP INDEX tools_described_by;
ALTER TABLE tools DROP COLUMN described_by;

-- +goose Up
ALTER TABLE tools ADD COLUMN described_by INTEGER NOT NULL DEFAULT 0; -- the version of what described it; an older one than the platform's is described again

-- +goose Down
ALTER TABLE tools DROP COLUMN described_by;

-- +goose Up
ALTER TABLE runners ADD COLUMN start_failure TEXT NOT NULL DEFAULT ''; -- why the last start failed, while they do

-- +goose Down
ALTER TABLE runners DROP COLUMN start_failure;

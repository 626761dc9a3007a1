-- What models are told of a tool that is set to valves may hold them, so it is
-- sealed as they are. Texts of before are dropped: what specs say holds until
-- the tool is described again, see 0005.

-- +goose Up
ALTER TABLE tools ADD COLUMN spoken_set BYTEA; -- encrypted; takes the place of spoken; NULL: nothing does
UPDATE tools SET spoken = '{}' WHERE valves IS NOT NULL;

-- +goose Down
ALTER TABLE tools DROP COLUMN spoken_set;

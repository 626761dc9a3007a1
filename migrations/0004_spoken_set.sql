-- What models are told of a tool that is set to valves may hold them, so it is
-- sealed as they are. Texts of before are dropped: the specs' own hold until
-- the tool or its valves change.

-- +goose Up
ALTER TABLE tools ADD COLUMN spoken_set BYTEA; -- encrypted; takes the place of spoken; NULL: nothing does
UPDATE tools SET spoken = '{}' WHERE valves IS NOT NULL;

-- +goose Down
ALTER TABLE tools DROP COLUMN spoken_set;

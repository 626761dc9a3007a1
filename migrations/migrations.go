// Package migrations carries the database schema: goose files that are valid
// on both PostgreSQL and SQLite.
package migrations

import "embed"

// FS holds the files NNNN_name.sql.
//
//go:embed *.sql
var FS embed.FS

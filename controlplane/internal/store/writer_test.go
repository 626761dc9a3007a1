package store

import (
	"context"
	"fmt"
	"testing"

	"github.com/jmoiron/sqlx"
)

// TestMoreQueriesThanAreKept reads rows of queries that come after the last
// one that is kept prepared.
func TestMoreQueriesThanAreKept(t *testing.T) {
	db, err := Open(t.Context(), Config{URL: "sqlite://" + t.TempDir() + "/test.db"})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	const rows = 50
	err = db.tx(t.Context(), func(ctx context.Context, tx statements) error {
		for i := range maxPrepared + 50 {
			var got []int
			query := fmt.Sprintf(`WITH RECURSIVE c(x) AS (SELECT %d UNION ALL SELECT x + 1 FROM c) SELECT x FROM c LIMIT %d`, i, rows)
			if err := sqlx.SelectContext(ctx, tx, &got, query); err != nil {
				return fmt.Errorf("query %d: %w", i, err)
			}
			if len(got) != rows || got[0] != i || got[rows-1] != i+rows-1 {
				return fmt.Errorf("query %d: got %v", i, got)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(db.writer.stmts); n != maxPrepared {
		t.Errorf("%d are kept, want %d", n, maxPrepared)
	}
}

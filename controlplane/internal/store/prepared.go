package store

import (
	"context"
	"database/sql"
	"maps"
	"sync"

	"github.com/jmoiron/sqlx"
	"github.com/lib/pq/pqerror"
)

// prepared keeps queries prepared, since to parse and plan one costs as much
// as to run it. database/sql prepares each anew on every connection.
type prepared struct {
	mu      sync.RWMutex
	byQuery map[string]*sqlx.Stmt
	off     bool // a pooler stands between us and PostgreSQL
}

// maxPrepared bounds what queries of varying text can take.
const maxPrepared = 256

// find returns the prepared form of query, nil when there is none.
func (p *prepared) find(query string) *sqlx.Stmt {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.byQuery[query]
}

// learn prepares a query, if it can. The caller must hold no connection: it
// could be the last one.
func (p *prepared) learn(ctx context.Context, db *sqlx.DB, query string) *sqlx.Stmt {
	if s := p.find(query); s != nil {
		return s
	}
	p.mu.RLock()
	full := p.off || len(p.byQuery) >= maxPrepared
	p.mu.RUnlock()
	if full {
		return nil
	}
	s, err := db.PreparexContext(ctx, query)
	if err != nil {
		return nil // run as it is, it tells the error
	}
	if first := p.keep(query, s); first != s {
		s.Close() // waits for the connection, which may be busy: never under the lock
		return first
	}
	return s
}

// keep keeps s as the prepared form of query, unless there is one, and returns
// the one that is kept.
func (p *prepared) keep(query string, s *sqlx.Stmt) *sqlx.Stmt {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first := p.byQuery[query]; first != nil {
		return first
	}
	if p.byQuery == nil {
		p.byQuery = map[string]*sqlx.Stmt{}
	}
	p.byQuery[query] = s
	return s
}

// forget drops everything after an error that prepared queries may have
// caused, and reports whether it is worth another try.
func (p *prepared) forget(err error) bool {
	migrated := postgres(err, pqerror.FeatureNotSupported) // "cached plan must not change result type"
	pooled := postgres(err, pqerror.InvalidSQLStatementName, pqerror.DuplicatePstatement)
	if !migrated && !pooled {
		return false
	}
	p.mu.Lock()
	old := p.byQuery
	p.byQuery, p.off = nil, p.off || pooled
	p.mu.Unlock()
	for s := range maps.Values(old) {
		s.Close()
	}
	return len(old) > 0
}

// transaction finds what is prepared for a sqlx.Tx and notes what is not.
type transaction struct {
	*sqlx.Tx
	prepared *prepared
	missed   []string
}

func (t *transaction) stmt(ctx context.Context, query string) *sqlx.Stmt {
	s := t.prepared.find(query)
	if s == nil {
		t.missed = append(t.missed, query)
		return nil
	}
	return t.StmtxContext(ctx, s)
}

// preparing runs queries in their prepared form, and as they are where there
// is none.
type preparing struct {
	plain statements
	stmt  func(ctx context.Context, query string) *sqlx.Stmt // nil: there is none
}

// QueryContext implements statements, as the next three do.
func (p preparing) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if s := p.stmt(ctx, query); s != nil {
		return s.QueryContext(ctx, args...)
	}
	return p.plain.QueryContext(ctx, query, args...)
}

// QueryxContext is QueryContext with sqlx's rows.
func (p preparing) QueryxContext(ctx context.Context, query string, args ...any) (*sqlx.Rows, error) {
	if s := p.stmt(ctx, query); s != nil {
		return s.QueryxContext(ctx, args...)
	}
	return p.plain.QueryxContext(ctx, query, args...)
}

// QueryRowxContext is QueryxContext for one row.
func (p preparing) QueryRowxContext(ctx context.Context, query string, args ...any) *sqlx.Row {
	if s := p.stmt(ctx, query); s != nil {
		return s.QueryRowxContext(ctx, args...)
	}
	return p.plain.QueryRowxContext(ctx, query, args...)
}

// ExecContext runs a statement without rows.
func (p preparing) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if s := p.stmt(ctx, query); s != nil {
		return s.ExecContext(ctx, args...)
	}
	return p.plain.ExecContext(ctx, query, args...)
}

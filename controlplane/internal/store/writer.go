package store

import (
	"context"

	"github.com/jmoiron/sqlx"
)

// writer is the one connection on which SQLite is written, with its statements
// prepared. database/sql's own transactions start a goroutine for themselves
// and one for each query, and that costs as much as the writing.
//
// Who holds turn has the rest to itself.
type writer struct {
	turn  chan struct{}
	conn  *sqlx.Conn // nil: not yet, or lost
	stmts map[string]*sqlx.Stmt
}

func newWriter() *writer { return &writer{turn: make(chan struct{}, 1)} }

// take waits for the turn, at most until ctx ends; give it back with leave.
func (w *writer) take(ctx context.Context) error {
	select {
	case w.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case w.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *writer) leave() { <-w.turn }

// once tries work in a transaction once; committing tells an error of the commit.
func (w *writer) once(ctx context.Context, db *sqlx.DB, work func(context.Context, statements) error) (committing bool, err error) {
	if w.conn == nil {
		if w.conn, err = db.Connx(ctx); err != nil {
			return false, err
		}
		w.stmts = map[string]*sqlx.Stmt{}
	}
	tx := preparing{w.conn, w.stmt}
	if _, err := tx.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		w.drop()
		return false, err
	}
	open := true
	defer func() {
		if open {
			w.rollback(ctx, tx)
		}
	}()
	if err := work(ctx, tx); err != nil {
		return false, err
	}
	if _, err := tx.ExecContext(ctx, "COMMIT"); err != nil {
		return true, err
	}
	open = false
	return false, nil
}

// rollback undoes what is open; a connection that can't is of no use any more.
func (w *writer) rollback(ctx context.Context, tx statements) {
	if _, err := tx.ExecContext(ctx, "ROLLBACK"); err != nil {
		w.drop()
	}
}

// drop closes the connection; the next transaction opens another.
func (w *writer) drop() {
	if w.conn == nil {
		return
	}
	for _, s := range w.stmts {
		_ = s.Close() // goes with its connection
	}
	_ = w.conn.Raw(func(any) error { return errDrop })
	_ = w.conn.Close()
	w.conn, w.stmts = nil, nil
}

// stmt is the prepared form of query, nil when there is none: then it runs as
// it is, and tells the error if that is why. What is prepared is kept, since
// to close it would pull it from under rows that are still read.
func (w *writer) stmt(ctx context.Context, query string) *sqlx.Stmt {
	if s := w.stmts[query]; s != nil || len(w.stmts) >= maxPrepared {
		return s
	}
	s, err := w.conn.PreparexContext(ctx, query)
	if err != nil {
		return nil
	}
	w.stmts[query] = s
	return s
}

// close waits for the transaction that is open and closes the connection.
func (w *writer) close() {
	w.turn <- struct{}{}
	defer w.leave()
	w.drop()
}

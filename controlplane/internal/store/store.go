// Package store keeps everything that must survive a restart, on PostgreSQL
// or in an SQLite file, with one set of queries for both.
package store

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"
	"github.com/pressly/goose/v3"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/bigwave/bigwave/migrations"
	"github.com/bigwave/bigwave/shared/fault"
)

// Config says where the database is.
type Config struct {
	URL      string        // "sqlite:///abs/path.db" or "postgres://…"; may hold a password, so it is never shown
	MaxConns int           // connections kept; 0: 4 for SQLite, 16 for PostgreSQL
	Timeout  time.Duration // the longest that PostgreSQL may take to answer; 0: 10 s
}

// DB is the database. All methods may be called from several goroutines.
// Their errors are faults: NotFound, Conflict and the like where a method says
// so, Unavailable when the database can't be reached, Internal otherwise.
type DB struct {
	db       *sqlx.DB
	dialect  goose.Dialect
	timeout  time.Duration
	migrated atomic.Bool
	prepared prepared
	writer   *writer       // of SQLite; nil on PostgreSQL
	places   chan struct{} // PostgreSQL: one for each connection, so that nobody waits for one without an end
}

// Open connects and brings the schema up to date. The file and the folder of
// an SQLite database are made when they are missing.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	db, err := New(cfg)
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// New prepares a DB without reaching for the database; until Migrate has
// succeeded, every other method answers Unavailable.
func New(cfg Config) (*DB, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil {
		return nil, fault.New(fault.Invalid, "the database URL can't be read") // the cause would quote a password
	}
	db := &DB{timeout: cfg.Timeout}
	if db.timeout == 0 {
		db.timeout = 10 * time.Second
	}
	switch u.Scheme {
	case "sqlite":
		err = db.openSQLite(u)
	case "postgres", "postgresql":
		err = db.openPostgres(u)
	default:
		err = fault.New(fault.Invalid, "the database URL must start with sqlite:// or postgres://")
	}
	if err != nil {
		return nil, err
	}
	if cfg.MaxConns > 0 {
		db.limit(max(2, cfg.MaxConns)) // a migration takes two
	}
	return db, nil
}

func (db *DB) limit(conns int) {
	db.db.SetMaxOpenConns(conns)
	db.db.SetMaxIdleConns(conns)
	if db.writer == nil {
		db.places = make(chan struct{}, conns)
	}
}

func (db *DB) openSQLite(u *url.URL) error {
	if u.Host != "" || !filepath.IsAbs(u.Path) {
		return fault.New(fault.Invalid, "the database URL must name an absolute path: sqlite:///path/to/file.db")
	}
	if err := os.MkdirAll(filepath.Dir(u.Path), 0o700); err != nil {
		return fault.Wrap(err, fault.Unavailable, "the folder of the database can't be made")
	}
	// SQLite gives its other files the mode of this one.
	f, err := os.OpenFile(u.Path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "the database file can't be opened")
	}
	f.Close()
	settings := url.Values{
		// A checkpoint waits for the disk, and one commit in so many waits for it: 4000 pages are about 250 calls.
		"_pragma": {"busy_timeout(5000)", "journal_mode(WAL)", "synchronous(NORMAL)", "wal_autocheckpoint(4000)", "foreign_keys(1)"},
	}
	dsn := url.URL{Scheme: "file", Path: u.Path, RawQuery: settings.Encode()}
	sqlite, err := sqlx.Open("sqlite", dsn.String())
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "the database file can't be opened")
	}
	db.db, db.dialect, db.writer = sqlite, goose.DialectSQLite3, newWriter()
	db.limit(4)
	return nil
}

func (db *DB) openPostgres(u *url.URL) error {
	q := u.Query()
	q.Set("binary_parameters", "yes") // a statement with arguments takes one round trip
	for key, value := range map[string]string{"connect_timeout": "5", "fallback_application_name": "bigwave"} {
		if !q.Has(key) {
			q.Set(key, value)
		}
	}
	dsn := *u
	dsn.RawQuery = q.Encode()
	connector, err := pq.NewConnector(dsn.String())
	if err != nil {
		return fault.New(fault.Invalid, "the database URL can't be read") // the cause would quote a password
	}
	connector.Dialer(patient{db.timeout})
	db.db, db.dialect = sqlx.NewDb(sql.OpenDB(connector), "postgres"), goose.DialectPostgres
	db.limit(16)
	db.db.SetConnMaxLifetime(30 * time.Minute)
	return nil
}

// Migrate brings the schema up to date. Several replicas may call it at once.
func (db *DB) Migrate(ctx context.Context) error {
	unlock, err := db.lockMigration(ctx)
	if err != nil {
		return border(err)
	}
	defer unlock()
	p, err := goose.NewProvider(db.dialect, db.db.DB, migrations.FS, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return border(err)
	}
	if _, err := p.Up(ctx); err != nil {
		return border(err)
	}
	db.migrated.Store(true)
	return nil
}

const lockSchema = `SELECT pg_advisory_lock(hashtext(current_schema()))`

// lockMigration keeps other replicas from migrating the same schema.
func (db *DB) lockMigration(ctx context.Context) (unlock func(), err error) {
	if db.dialect != goose.DialectPostgres {
		return func() {}, nil
	}
	conn, err := db.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	unlock = func() {
		// The lock lives as long as its connection, so that one is dropped.
		_ = conn.Raw(func(any) error { return errDrop })
		_ = conn.Close()
	}
	if _, err := conn.ExecContext(ctx, lockSchema); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// Ready reports, by its error, whether the database answers and is migrated.
func (db *DB) Ready(ctx context.Context) error {
	var one int
	return db.get(ctx, &one, `SELECT 1`)
}

// Close lets go of every connection.
func (db *DB) Close() error {
	if db.writer != nil {
		db.writer.close()
	}
	return db.db.Close()
}

// statements runs them, in a transaction or outside of one.
type statements interface {
	sqlx.QueryerContext
	sqlx.ExecerContext
}

// enter admits a read or a transaction, and returns the context to do it
// under, which never ends: a connection bounds how long its server may take
// (see patient), and SQLite how long it waits for its lock.
func (db *DB) enter(ctx context.Context) (context.Context, func(), error) {
	if !db.migrated.Load() {
		return nil, nil, fault.New(fault.Unavailable, "the database is not ready yet; try again")
	}
	if ctx.Err() != nil {
		return nil, nil, border(ctx.Err())
	}
	free := context.WithoutCancel(ctx)
	if db.places == nil {
		return free, func() {}, nil
	}
	leave := func() { <-db.places }
	select {
	case db.places <- struct{}{}:
		return free, leave, nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, db.timeout)
	defer cancel()
	select {
	case db.places <- struct{}{}:
		return free, leave, nil
	case <-ctx.Done():
		return nil, nil, border(ctx.Err())
	}
}

// get reads one row into dest; sql.ErrNoRows when there is none.
func (db *DB) get(ctx context.Context, dest any, query string, args ...any) error {
	return db.read(ctx, func(ctx context.Context) error {
		if s := db.prepared.learn(ctx, db.db, query); s != nil {
			return s.GetContext(ctx, dest, args...)
		}
		return db.db.GetContext(ctx, dest, query, args...)
	})
}

// all reads every row into dest, a pointer to an empty slice.
func (db *DB) all(ctx context.Context, dest any, query string, args ...any) error {
	err := db.read(ctx, func(ctx context.Context) error {
		if s := db.prepared.learn(ctx, db.db, query); s != nil {
			return s.SelectContext(ctx, dest, args...)
		}
		return db.db.SelectContext(ctx, dest, query, args...)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return err
}

func (db *DB) read(ctx context.Context, query func(context.Context) error) error {
	ctx, leave, err := db.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	err = query(ctx)
	for range staleRetries {
		if !stale(err) && !db.prepared.forget(err) {
			break
		}
		err = query(ctx)
	}
	if untextual(err) {
		return sql.ErrNoRows // nothing has that name
	}
	return border(err)
}

// How often a read or a transaction is done again: on each connection of the
// pool that turns out to be dead, and when the database asks for it.
const (
	staleRetries    = 3
	conflictRetries = 8
)

// oneStatement reports whether a statement may change several tables: each
// costs a round trip to PostgreSQL, and SQLite knows none.
func (db *DB) oneStatement() bool { return db.dialect == goose.DialectPostgres }

// tx runs work in one transaction. work may run more than once, so it must
// set what it returns anew each time. On SQLite the transaction is the only
// one that writes from its start; on PostgreSQL it is READ COMMITTED, so what
// must not change in between belongs into the WHERE of an UPDATE. work must
// not call methods of db.
func (db *DB) tx(ctx context.Context, work func(ctx context.Context, tx statements) error) error {
	asked := ctx
	ctx, leave, err := db.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if db.writer != nil {
		if err := db.writer.take(asked); err != nil {
			return border(err)
		}
		defer db.writer.leave()
	}
	dead, conflicts := 0, 0
	for {
		committing, err := db.once(ctx, work)
		switch {
		case conflicted(err) && conflicts < conflictRetries:
			conflicts++
			pause(ctx, conflicts)
		case committing: // it may have happened
			return border(err)
		case dead < staleRetries && (stale(err) || db.prepared.forget(err)):
			dead++
		default:
			return border(err)
		}
	}
}

// once tries the transaction once; committing tells an error of the commit.
func (db *DB) once(ctx context.Context, work func(context.Context, statements) error) (committing bool, err error) {
	if db.writer != nil {
		return db.writer.once(ctx, db.db, work)
	}
	begun, err := db.db.BeginTxx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer begun.Rollback() // nothing to do after the commit
	tx := &transaction{Tx: begun, prepared: &db.prepared}
	if err := work(ctx, preparing{tx.Tx, tx.stmt}); err != nil {
		return false, err
	}
	if err := tx.Commit(); err != nil {
		return true, err
	}
	for _, query := range tx.missed {
		db.prepared.learn(ctx, db.db, query)
	}
	return true, nil
}

// pause waits a few milliseconds, longer and by chance with each attempt.
func pause(ctx context.Context, attempt int) {
	select {
	case <-time.After(time.Duration(rand.IntN(1<<attempt)+1) * time.Millisecond):
	case <-ctx.Done():
	}
}

// micros is t as the database keeps it; 0 for the zero time.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// instant is the time that micros made us.
func instant(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// plain refuses what PostgreSQL can't keep as text, on both databases alike.
func plain(field, text string) error {
	if strings.ContainsRune(text, 0) || strings.ToValidUTF8(text, "") != text {
		return fault.New(fault.Invalid, "%s holds a NUL byte or is not valid UTF-8", field).On(field)
	}
	return nil
}

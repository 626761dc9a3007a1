package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"slices"
	"syscall"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/bigwave/bigwave/shared/fault"
)

// errDrop makes database/sql forget a connection instead of keeping it.
var errDrop = driver.ErrBadConn

// border turns what a driver says into a fault. Faults and sql.ErrNoRows pass.
func border(err error) error {
	if err == nil || errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.Unavailable, "the database did not answer in time; try again")
	case conflicted(err), stale(err), down(err):
		return fault.Wrap(err, fault.Unavailable, "the database is not available; try again")
	case untextual(err):
		return fault.Wrap(err, fault.Invalid, "a text holds a NUL byte or is not valid UTF-8")
	}
	return fault.Wrap(err, fault.Internal, "something went wrong on our side")
}

// conflicted reports whether the database undid a transaction and asks to try
// it again.
func conflicted(err error) bool {
	return postgres(err, pqerror.TRSerializationFailure, pqerror.TRDeadlockDetected) ||
		lite(err, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
}

// stale reports whether the connection had died, which says nothing about the
// database: another one may work.
func stale(err error) bool {
	return postgres(err, pqerror.AdminShutdown, pqerror.CrashShutdown) ||
		errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// Classes of PostgreSQL's errors that mean "not now": connection, authorization,
// no such database, resources, operator.
var downClasses = []pqerror.Class{"08", "28", "3D", "53", "57", "58"}

// down reports whether the database can't be reached or can't work.
func down(err error) bool {
	if p, ok := errors.AsType[*pq.Error](err); ok {
		return slices.Contains(downClasses, p.Code.Class()) || p.Code == pqerror.ReadOnlySQLTransaction
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, sql.ErrConnDone) ||
		lite(err, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
			sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
}

// Damaged reports whether err says that the database file is damaged, or is
// none at all.
func Damaged(err error) bool { return lite(err, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) }

// untextual reports whether an argument was a text that can't exist in
// PostgreSQL: with a NUL byte, or not UTF-8.
func untextual(err error) bool {
	return postgres(err, pqerror.CharacterNotInRepertoire, pqerror.UntranslatableCharacter)
}

// duplicate reports whether a row with the same unique key is there.
func duplicate(err error) bool {
	return postgres(err, pqerror.UniqueViolation) ||
		extended(err, sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
}

// unreferenced reports whether a row refers to one that is not there, or one
// that is going still has rows that refer to it.
func unreferenced(err error) bool {
	return postgres(err, pqerror.ForeignKeyViolation, pqerror.RestrictViolation) ||
		extended(err, sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY)
}

func postgres(err error, codes ...pqerror.Code) bool {
	p, ok := errors.AsType[*pq.Error](err)
	return ok && slices.Contains(codes, p.Code)
}

func lite(err error, codes ...int) bool {
	s, ok := errors.AsType[*sqlite.Error](err)
	return ok && slices.Contains(codes, s.Code()&0xff)
}

func extended(err error, codes ...int) bool {
	s, ok := errors.AsType[*sqlite.Error](err)
	return ok && slices.Contains(codes, s.Code())
}

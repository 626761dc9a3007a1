// Package storetest gives tests a fresh database of each kind that the store
// supports. Missing PostgreSQL is a failure, never a skip.
package storetest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"

	_ "github.com/lib/pq" // the driver "postgres"

	"github.com/bigwave/bigwave/controlplane/internal/store"
)

// Kind is a kind of database.
type Kind string

// The kinds.
const (
	SQLite   Kind = "sqlite"
	Postgres Kind = "postgres"
)

// Run runs test on a fresh, migrated database of each kind.
func Run(t *testing.T, test func(t *testing.T, db *store.DB)) {
	Each(t, func(t *testing.T, url string) { test(t, Open(t, url)) })
}

// Each runs test with the URL of a fresh, empty database of each kind.
func Each(t *testing.T, test func(t *testing.T, url string)) {
	for _, kind := range []Kind{SQLite, Postgres} {
		t.Run(string(kind), func(t *testing.T) { test(t, URL(t, kind)) })
	}
}

// Open opens the database at url until the test ends.
func Open(t testing.TB, url string) *store.DB {
	t.Helper()
	db, err := store.Open(t.Context(), store.Config{URL: url})
	if err != nil {
		t.Fatalf("open the database: %v", err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// URL is a fresh, empty database of that kind, gone when the test has ended:
// a file, or a schema of its own on the PostgreSQL server that
// BIGWAVE_TEST_POSTGRES_URL names, or on one that this process starts.
func URL(t testing.TB, kind Kind) string {
	t.Helper()
	if kind == SQLite {
		return "sqlite://" + filepath.Join(t.TempDir(), "bigwave.db")
	}
	server, err := shared()
	if err != nil {
		t.Fatalf("PostgreSQL for tests: %v", err)
	}
	return schema(t, server)
}

// shared is the URL of the server that all tests of this process use.
var shared = sync.OnceValues(func() (string, error) {
	if u := os.Getenv("BIGWAVE_TEST_POSTGRES_URL"); u != "" {
		return u, nil
	}
	s, err := StartServer()
	if err != nil {
		return "", err
	}
	return s.URL, nil
})

// schema makes a schema of its own for t and returns the URL that leads there.
func schema(t testing.TB, server string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal("BIGWAVE_TEST_POSTGRES_URL is not a URL")
	}
	b := make([]byte, 8)
	rand.Read(b)
	name := "test_" + hex.EncodeToString(b)
	execute(t, server, "CREATE SCHEMA "+name)
	t.Cleanup(func() { execute(t, server, "DROP SCHEMA "+name+" CASCADE") })
	q := u.Query()
	q.Set("search_path", name)
	u.RawQuery = q.Encode()
	return u.String()
}

func execute(t testing.TB, server, statement string) {
	t.Helper()
	db, err := sql.Open("postgres", server)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(context.Background(), statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

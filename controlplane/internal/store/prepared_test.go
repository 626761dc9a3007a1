package store_test

import (
	"context"
	"database/sql"
	"sync"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
)

// TestPreparedQueriesSurviveAMigration changes a column's type under prepared
// queries, as the migration of a newer replica does.
func TestPreparedQueriesSurviveAMigration(t *testing.T) {
	url := storetest.URL(t, storetest.Postgres)
	s, _ := people(storetest.Open(t, url))
	ctx, admin := t.Context(), root(t, s)
	u, err := s.CreateUser(ctx, admin, identity.User{Name: "ann"})
	if err != nil {
		t.Fatal(err)
	}
	rename := func(name string) {
		t.Helper()
		if _, err := s.UpdateUser(ctx, admin, u.ID, identity.Change{Name: &name}); err != nil {
			t.Error(err)
		}
		if got, err := s.User(ctx, admin, u.ID); err != nil || got.Name != name {
			t.Errorf("got %+v, %v", got, err)
		}
	}
	rename("a")
	rename("b")
	raw, err := sql.Open("postgres", url)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := raw.ExecContext(ctx, `ALTER TABLE users ALTER COLUMN name TYPE VARCHAR(300)`); err != nil {
		t.Fatal(err)
	}
	rename("c")
	rename("d")
}

// TestFewConnectionsAreEnough would hang if a transaction needed a second
// connection to prepare what it runs.
func TestFewConnectionsAreEnough(t *testing.T) {
	storetest.Each(t, func(t *testing.T, url string) {
		db, err := store.Open(t.Context(), store.Config{URL: url, MaxConns: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		s, _ := people(db)
		admin := root(t, s)
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				u, err := s.CreateUser(context.Background(), admin, identity.User{Name: newID()})
				if err == nil {
					err = s.DeleteUser(context.Background(), admin, u.ID)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

package store_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

func TestRestartKeepsEverything(t *testing.T) {
	storetest.Each(t, func(t *testing.T, url string) {
		first := storetest.Open(t, url)
		s, _ := people(first)
		workspace(t, s, "acme")
		_, secret := join(t, s, "acme", "ann", identity.Admin)
		if err := first.PutPolicy(t.Context(), somePolicy("acme"), event("acme", "policy.put")); err != nil {
			t.Fatal(err)
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		again := storetest.Open(t, url)
		s, _ = people(again)
		p, err := s.Authenticate(t.Context(), secret)
		if err != nil || p.Workspace != "acme" {
			t.Errorf("got %+v, %v", p, err)
		}
		if _, err := again.Policy(t.Context(), "acme"); err != nil {
			t.Error(err)
		}
	})
}

// TestPostgresCrash ends the server in the middle of commits, as pg_ctl stop
// -m immediate does: what was answered is there afterwards, the rest is
// refused plainly, and the same DB works again by itself.
func TestPostgresCrash(t *testing.T) {
	server, err := storetest.StartServer()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	db := storetest.Open(t, server.URL)
	s, _ := people(db)
	admin := root(t, s)
	ctx := context.Background()

	var stop atomic.Bool
	var mu sync.Mutex
	made := map[string]bool{}
	refused := 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for !stop.Load() {
				u, err := s.CreateUser(ctx, admin, identity.User{Name: newID()})
				mu.Lock()
				switch {
				case err == nil:
					made[u.ID] = true
				case !fault.Is(err, fault.Unavailable):
					t.Errorf("got %v", err)
				case strings.Contains(fault.From(err).Message, "pq") || strings.Contains(fault.From(err).Message, "socket"):
					t.Errorf("the sentence %q tells too much", fault.From(err).Message)
				default:
					refused++
				}
				mu.Unlock()
				if err != nil {
					time.Sleep(5 * time.Millisecond)
				}
			}
		})
	}
	for range 3 {
		time.Sleep(150 * time.Millisecond)
		if err := server.Crash(); err != nil {
			t.Fatal(err)
		}
		if err := db.Ready(ctx); !fault.Is(err, fault.Unavailable) {
			t.Errorf("while it is down: got %v", err)
		}
		time.Sleep(30 * time.Millisecond)
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(150 * time.Millisecond)
	stop.Store(true)
	wg.Wait()
	if err := db.Ready(ctx); err != nil {
		t.Fatalf("after it came back: %v", err)
	}
	if refused == 0 || len(made) < 10 {
		t.Errorf("%d were made and %d refused: the crash hit nothing", len(made), refused)
	}
	there := map[string]bool{}
	pg := page.Page{Limit: page.Max}
	for {
		users, next, err := s.Users(ctx, admin, "", pg)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range users {
			there[u.ID] = true
		}
		if pg.Cursor = next; next == "" {
			break
		}
	}
	for id := range made {
		if !there[id] {
			t.Errorf("%s was answered and is gone", id)
		}
	}
}

func TestADatabaseThatIsDownIsUnavailable(t *testing.T) {
	for name, url := range map[string]string{
		"refused":   "postgres://u:hunter2@127.0.0.1:1/x?sslmode=disable",
		"no socket": "postgres:///x?host=/does/not/exist&password=hunter2",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := store.Open(t.Context(), store.Config{URL: url})
			if !fault.Is(err, fault.Unavailable) {
				t.Fatalf("got %v", err)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Error("the error holds the password")
			}
			db, err := store.New(store.Config{URL: url})
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if err := db.Ready(t.Context()); !fault.Is(err, fault.Unavailable) {
				t.Errorf("before migration: got %v", err)
			}
		})
	}
}

func TestABadURLIsInvalidAndNotShown(t *testing.T) {
	for _, url := range []string{
		"", "mysql://u:hunter2@x/y", "sqlite://relative/hunter2.db", "postgres://u:hunter2@[::1",
		"postgres://u:hunter2@x/y?sslmode=maybe", "hunter2",
	} {
		_, err := store.Open(t.Context(), store.Config{URL: url})
		if !fault.Is(err, fault.Invalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: got %v", url, err)
		}
	}
}

func TestACallerWhoLeavesEndsItsTransaction(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.CreateUser(ctx, root(t, s), identity.User{Name: "ann"}); !fault.Is(err, fault.Unavailable) {
			t.Errorf("got %v", err)
		}
		if _, err := s.CreateUser(t.Context(), root(t, s), identity.User{Name: "ann"}); err != nil {
			t.Errorf("the next one: %v", err)
		}
	})
}

func TestSQLiteFilesAreTheOwnersOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a b?#%", "x")
	u := "sqlite://" + strings.NewReplacer("%", "%25", "?", "%3F", "#", "%23", " ", "%20").Replace(dir) + "/bigwave.db"
	db := storetest.Open(t, u)
	if err := db.PutPolicy(t.Context(), somePolicy("default"), event("default", "policy.put")); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) < 2 {
		t.Fatalf("got %v, %v", entries, err)
	}
	for _, e := range entries {
		if st, err := e.Info(); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v (%v)", e.Name(), st.Mode(), err)
		}
	}
}

// TestSQLiteSurvivesKill kills a process of its own that commits without end,
// and looks for the last row that it said was committed.
func TestSQLiteSurvivesKill(t *testing.T) {
	url := storetest.URL(t, storetest.SQLite)
	if os.Getenv("BIGWAVE_TEST_VICTIM") != "" {
		victim(t)
		return
	}
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestSQLiteSurvivesKill$")
		cmd.Env = append(os.Environ(), "BIGWAVE_TEST_VICTIM="+url)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var said []byte
		buf := make([]byte, 4096)
		for len(said) < 2000 {
			n, err := out.Read(buf)
			said = append(said, buf[:n]...)
			if err != nil {
				t.Fatalf("the victim ended: %v: %s", err, said)
			}
		}
		cmd.Process.Kill()
		cmd.Wait()
		ids := strings.Split(string(said), "\n")
		db := storetest.Open(t, url)
		for _, id := range ids[:len(ids)-1] {
			if _, err := db.User(t.Context(), "", id); err != nil {
				t.Errorf("%s was committed: %v", id, err)
			}
		}
		db.Close()
	}
}

func victim(t *testing.T) {
	s, _ := people(storetest.Open(t, os.Getenv("BIGWAVE_TEST_VICTIM")))
	admin := root(t, s)
	for {
		u, err := s.CreateUser(t.Context(), admin, identity.User{Name: newID()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stdout.WriteString(u.ID + "\n"); err != nil {
			return
		}
	}
}

func TestAFileThatIsNoDatabaseIsTold(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bigwave.db")
	if err := os.WriteFile(file, []byte(strings.Repeat("this is no database\n", 300)), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := store.New(store.Config{URL: "sqlite://" + file})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Migrate(t.Context()); !store.Damaged(err) {
		t.Errorf("got %v", err)
	}
}

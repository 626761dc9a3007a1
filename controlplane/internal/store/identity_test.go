package store_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

const adminToken = "an admin token of the tests"

// clock is a time that tests move.
type clock struct{ now atomic.Int64 }

func (c *clock) Now() time.Time          { return time.Unix(0, c.now.Load()) }
func (c *clock) Pass(d time.Duration)    { c.now.Add(int64(d)) }
func newClock() *clock                   { c := &clock{}; c.now.Store(time.Now().UnixNano()); return c }
func newID() string                      { return strings.ReplaceAll(uuid.Must(uuid.NewV7()).String(), "-", "") }
func ptr[T any](v T) *T                  { return &v }
func wants(err error, k fault.Kind) bool { return fault.Is(err, k) }

func people(db *store.DB) (*identity.Service, *clock) {
	c := newClock()
	return &identity.Service{Store: db, AdminToken: sha256.Sum256([]byte(adminToken)), Now: c.Now, NewID: newID}, c
}

func root(t *testing.T, s *identity.Service) identity.Principal {
	t.Helper()
	p, err := s.Authenticate(t.Context(), adminToken)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// join makes a user with a key and returns its principal, by that key.
func join(t *testing.T, s *identity.Service, workspace, name string, role identity.Role) (identity.Principal, string) {
	t.Helper()
	ctx, admin := t.Context(), root(t, s)
	u, err := s.CreateUser(ctx, admin, identity.User{Workspace: workspace, Name: name, Role: role})
	if err != nil {
		t.Fatal(err)
	}
	_, secret, err := s.CreateKey(ctx, admin, identity.APIKey{UserID: u.ID, Name: "laptop"})
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Authenticate(ctx, secret)
	if err != nil {
		t.Fatal(err)
	}
	return p, secret
}

func workspace(t *testing.T, s *identity.Service, id string) {
	t.Helper()
	if _, err := s.CreateWorkspace(t.Context(), root(t, s), identity.Workspace{ID: id}); err != nil {
		t.Fatal(err)
	}
}

func TestBearers(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, clock := people(db)
		ctx, admin := t.Context(), root(t, s)
		if admin != (identity.Principal{Workspace: "default", UserID: "bootstrap", Role: identity.InstanceAdmin}) {
			t.Errorf("the admin token stands for %+v", admin)
		}
		workspace(t, s, "acme")
		member, secret := join(t, s, "acme", "mia", identity.Member)
		if member.Workspace != "acme" || member.Role != identity.Member || member.KeyID == "" {
			t.Errorf("the key stands for %+v", member)
		}
		if !strings.HasPrefix(secret, "bw_") || len(secret) != 46 {
			t.Errorf("the secret has %d characters", len(secret))
		}

		good := func() bool { _, err := s.Authenticate(ctx, secret); return err == nil }
		if _, err := s.UpdateUser(ctx, admin, member.UserID, identity.Change{Disabled: ptr(true)}); err != nil || good() {
			t.Errorf("the key of a disabled user is good (%v)", err)
		}
		if _, err := s.UpdateUser(ctx, admin, member.UserID, identity.Change{Disabled: ptr(false)}); err != nil || !good() {
			t.Errorf("the key of an enabled user is not good (%v)", err)
		}
		short, shortSecret, err := s.CreateKey(ctx, admin, identity.APIKey{UserID: member.UserID, ExpiresAt: clock.Now().Add(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Authenticate(ctx, shortSecret); err != nil {
			t.Errorf("a key before its end: %v", err)
		}
		clock.Pass(time.Minute)
		if short.ExpiresAt.IsZero() {
			t.Error("the key has no end")
		}
		if err := s.RevokeKey(ctx, admin, member.KeyID); err != nil {
			t.Fatal(err)
		}

		var first string
		for name, bearer := range map[string]string{
			"revoked": secret, "expired": shortSecret, "empty": "", "unknown": "bw_" + strings.Repeat("A", 43),
			"almost": secret[:len(secret)-1], "longer": secret + "A", "huge": strings.Repeat("x", 1<<20),
			"NUL": "bw_\x00", "not UTF-8": "\xff\xfe", "almost admin": adminToken + " ", "SQL": "' OR 1=1 --",
		} {
			p, err := s.Authenticate(ctx, bearer)
			if !wants(err, fault.Unauthenticated) || p != (identity.Principal{}) {
				t.Errorf("%s: got %+v, %v", name, p, err)
				continue
			}
			if first == "" {
				first = err.Error()
			}
			if err.Error() != first {
				t.Errorf("%s: the answer %q tells more than %q", name, err, first)
			}
		}
	})
}

func TestNobodyIsAdminWithoutAnAdminToken(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s := &identity.Service{Store: db, Now: time.Now, NewID: newID}
		if _, err := s.Authenticate(t.Context(), ""); !wants(err, fault.Unauthenticated) {
			t.Errorf("got %v", err)
		}
	})
}

func TestARevokedKeyIsRefusedByTheNextRequestOfEveryReplica(t *testing.T) {
	storetest.Each(t, func(t *testing.T, url string) {
		a, _ := people(storetest.Open(t, url))
		b, _ := people(storetest.Open(t, url))
		p, secret := join(t, a, "", "mia", identity.Member)
		if _, err := b.Authenticate(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		for range 2 { // a second time is fine
			if err := a.RevokeKey(t.Context(), root(t, a), p.KeyID); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := b.Authenticate(t.Context(), secret); !wants(err, fault.Unauthenticated) {
			t.Errorf("the other replica answers %v", err)
		}
	})
}

func TestSecretsAreNotKept(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		_, secret := join(t, s, "", "mia", identity.Member)
		keys, _, err := s.Keys(t.Context(), root(t, s), "", page.Page{})
		if err != nil || len(keys) != 1 {
			t.Fatalf("got %v, %v", keys, err)
		}
		if strings.Contains(fmt.Sprintf("%+v", keys), secret) || keys[0].Hint != secret[:7] {
			t.Errorf("the list shows %+v", keys[0])
		}
		events, _, err := db.AuditEvents(t.Context(), "default", page.Page{})
		if err != nil || strings.Contains(fmt.Sprintf("%+v", events), secret) {
			t.Errorf("the record holds the secret (%v)", err)
		}
	})
}

func TestAnotherWorkspaceIsNotThere(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		workspace(t, s, "acme")
		workspace(t, s, "bolt")
		mine, _ := join(t, s, "acme", "ann", identity.Admin)
		other, _ := join(t, s, "bolt", "bob", identity.Admin)
		ctx := t.Context()
		for name, do := range map[string]func(user, key, workspace string) error{
			"workspace": func(_, _, w string) error { _, err := s.Workspace(ctx, mine, w); return err },
			"users":     func(_, _, w string) error { _, _, err := s.Users(ctx, mine, w, page.Page{}); return err },
			"keys":      func(_, _, w string) error { _, _, err := s.Keys(ctx, mine, w, page.Page{}); return err },
			"user":      func(u, _, _ string) error { _, err := s.User(ctx, mine, u); return err },
			"update": func(u, _, _ string) error {
				_, err := s.UpdateUser(ctx, mine, u, identity.Change{Name: ptr("x")})
				return err
			},
			"delete": func(u, _, _ string) error { return s.DeleteUser(ctx, mine, u) },
			"revoke": func(_, k, _ string) error { return s.RevokeKey(ctx, mine, k) },
			"create user": func(_, _, w string) error {
				_, err := s.CreateUser(ctx, mine, identity.User{Workspace: w, Name: "n"})
				return err
			},
			"create key": func(u, _, _ string) error {
				_, _, err := s.CreateKey(ctx, mine, identity.APIKey{UserID: u})
				return err
			},
			"create key there": func(u, _, w string) error {
				_, _, err := s.CreateKey(ctx, mine, identity.APIKey{UserID: u, Workspace: w})
				return err
			},
		} {
			foreign := do(other.UserID, other.KeyID, "bolt")
			unknown := do("usr_none", "key_none", "none")
			if !wants(foreign, fault.NotFound) || !wants(unknown, fault.NotFound) {
				t.Errorf("%s: another's is %v, an unknown one %v", name, foreign, unknown)
				continue
			}
			hide := strings.NewReplacer(other.UserID, "X", other.KeyID, "X", "bolt", "X", "usr_none", "X", "key_none", "X", "none", "X")
			if hide.Replace(foreign.Error()) != hide.Replace(unknown.Error()) {
				t.Errorf("%s: %q tells it from %q", name, foreign, unknown)
			}
		}
		ws, _, err := s.Workspaces(ctx, mine, page.Page{})
		if err != nil || len(ws) != 1 || ws[0].ID != "acme" {
			t.Errorf("a workspace admin sees %v (%v)", ws, err)
		}
		if u, err := s.User(ctx, other, other.UserID); err != nil || u.Name != "bob" {
			t.Errorf("the other was changed: %+v (%v)", u, err)
		}
	})
}

func TestAWorkspaceAdminCannotBecomeMore(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		workspace(t, s, "acme")
		ann, _ := join(t, s, "acme", "ann", identity.Admin)
		boss, _ := join(t, s, "acme", "boss", identity.InstanceAdmin)
		ctx := t.Context()
		for name, err := range map[string]error{
			"create workspace": second(s.CreateWorkspace(ctx, ann, identity.Workspace{ID: "mine"})),
			"delete workspace": s.DeleteWorkspace(ctx, ann, "acme"),
			"create one":       second(s.CreateUser(ctx, ann, identity.User{Name: "n", Role: identity.InstanceAdmin})),
			"key of one":       third(s.CreateKey(ctx, ann, identity.APIKey{UserID: boss.UserID})),
			"change one":       second(s.UpdateUser(ctx, ann, boss.UserID, identity.Change{Disabled: ptr(true)})),
			"delete one":       s.DeleteUser(ctx, ann, boss.UserID),
			"revoke one's key": s.RevokeKey(ctx, ann, boss.KeyID),
		} {
			if !wants(err, fault.Forbidden) {
				t.Errorf("%s: got %v", name, err)
			}
		}
		if err := second(s.UpdateUser(ctx, ann, ann.UserID, identity.Change{Role: ptr(identity.InstanceAdmin)})); !wants(err, fault.Invalid) {
			t.Errorf("become one: got %v", err)
		}
	})
}

func second[T any](_ T, err error) error        { return err }
func third[T, U any](_ T, _ U, err error) error { return err }

func TestBadNamesAndRolesNameTheField(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, clock := people(db)
		ctx, admin := t.Context(), root(t, s)
		u, err := s.CreateUser(ctx, admin, identity.User{Name: strings.Repeat("é", 200)})
		if err != nil || u.Role != identity.Member {
			t.Fatalf("got %+v, %v", u, err)
		}
		user := func(u identity.User) error { return second(s.CreateUser(ctx, admin, u)) }
		for name, c := range map[string]struct {
			err   error
			field string
		}{
			"no name":         {user(identity.User{}), "name"},
			"blank":           {user(identity.User{Name: "  "}), "name"},
			"NUL":             {user(identity.User{Name: "a\x00b"}), "name"},
			"newline":         {user(identity.User{Name: "a\nb"}), "name"},
			"not UTF-8":       {user(identity.User{Name: "a\xff"}), "name"},
			"long":            {user(identity.User{Name: strings.Repeat("x", 201)}), "name"},
			"role":            {user(identity.User{Name: "x", Role: "root"}), "role"},
			"change name":     {second(s.UpdateUser(ctx, admin, u.ID, identity.Change{Name: ptr("")})), "name"},
			"change role":     {second(s.UpdateUser(ctx, admin, u.ID, identity.Change{Role: ptr(identity.Role(""))})), "role"},
			"key name":        {third(s.CreateKey(ctx, admin, identity.APIKey{UserID: u.ID, Name: "\x1b[2J"})), "name"},
			"key for nobody":  {third(s.CreateKey(ctx, admin, identity.APIKey{})), "user_id"},
			"key in the past": {third(s.CreateKey(ctx, admin, identity.APIKey{UserID: u.ID, ExpiresAt: clock.Now()})), "expires_at"},
			"workspace id":    {second(s.CreateWorkspace(ctx, admin, identity.Workspace{ID: "../x"})), "id"},
			"workspace none":  {second(s.CreateWorkspace(ctx, admin, identity.Workspace{})), "id"},
			"workspace name":  {second(s.CreateWorkspace(ctx, admin, identity.Workspace{ID: "w", Name: "\x00"})), "name"},
			"cursor":          {third(s.Users(ctx, admin, "", page.Page{Cursor: "%"})), "cursor"},
			"limit":           {third(s.Keys(ctx, admin, "", page.Page{Limit: 1000})), "limit"},
		} {
			if !wants(c.err, fault.Invalid) || fault.From(c.err).Field != c.field {
				t.Errorf("%s: got %v, want an invalid %s", name, c.err, c.field)
			}
		}
		users, _, err := s.Users(ctx, admin, "", page.Page{})
		if err != nil || len(users) != 1 {
			t.Errorf("refusals left %d users (%v)", len(users), err)
		}
	})
}

func TestTakenNamesAreConflicts(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		workspace(t, s, "acme")
		ann, _ := join(t, s, "acme", "ann", identity.Member)
		join(t, s, "acme", "bob", identity.Member)
		join(t, s, "", "ann", identity.Member) // another workspace's name is free
		for name, err := range map[string]error{
			"workspace": second(s.CreateWorkspace(ctx, admin, identity.Workspace{ID: "acme"})),
			"user":      second(s.CreateUser(ctx, admin, identity.User{Workspace: "acme", Name: "ann"})),
			"rename":    second(s.UpdateUser(ctx, admin, ann.UserID, identity.Change{Name: ptr("bob")})),
		} {
			if !wants(err, fault.Conflict) {
				t.Errorf("%s: got %v", name, err)
			}
		}
		u, err := s.UpdateUser(ctx, admin, ann.UserID, identity.Change{Role: ptr(identity.Admin), Name: ptr("Ann")})
		if err != nil || u.Role != identity.Admin || u.Name != "Ann" || u.Disabled {
			t.Errorf("got %+v, %v", u, err)
		}
	})
}

func TestHostileNamesAreText(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		for _, name := range []string{`'); DROP TABLE users; --`, `" OR ""="`, `%`, `_`, `\`, `$1`, `{x}`, "\u202e", "😀"} {
			u, err := s.CreateUser(ctx, admin, identity.User{Name: name})
			if err != nil {
				t.Fatalf("%q: %v", name, err)
			}
			if got, err := s.User(ctx, admin, u.ID); err != nil || got != u {
				t.Errorf("%q came back as %+v, want %+v (%v)", name, got, u, err)
			}
		}
		for _, id := range []string{"", "x\x00", "\xff", "' OR 1=1", strings.Repeat("x", 1<<16)} {
			_, err := s.User(ctx, admin, id)
			if !wants(err, fault.NotFound) {
				t.Errorf("user %.20q: got %v", id, err)
			}
		}
	})
}

func TestPagesAreStableWhileUsersComeAndGo(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		var want []string
		for i := range 7 {
			u, err := s.CreateUser(ctx, admin, identity.User{Name: fmt.Sprint("user ", i)})
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, u.ID)
		}
		var got []string
		pg := page.Page{Limit: 3}
		for {
			users, next, err := s.Users(ctx, admin, "", pg)
			if err != nil {
				t.Fatal(err)
			}
			for _, u := range users {
				got = append(got, u.ID)
			}
			if next == "" {
				break
			}
			pg.Cursor = next
			// The one that the cursor names may go.
			if err := s.DeleteUser(ctx, admin, users[len(users)-1].ID); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestDeletingAWorkspaceTakesItsPeople(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		workspace(t, s, "acme")
		ann, secret := join(t, s, "acme", "ann", identity.Admin)
		if err := s.DeleteWorkspace(ctx, admin, "default"); !wants(err, fault.Conflict) {
			t.Errorf("default: got %v", err)
		}
		if err := s.DeleteWorkspace(ctx, admin, "none"); !wants(err, fault.NotFound) {
			t.Errorf("unknown: got %v", err)
		}
		if err := s.DeleteWorkspace(ctx, admin, "acme"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Authenticate(ctx, secret); !wants(err, fault.Unauthenticated) {
			t.Errorf("a key of it: got %v", err)
		}
		// A request that was let in just before.
		if _, err := s.CreateUser(ctx, ann, identity.User{Name: "late"}); !wants(err, fault.NotFound) {
			t.Errorf("a late user: got %v", err)
		}
		events, _, err := db.AuditEvents(ctx, "acme", page.Page{})
		if err != nil || len(events) != 4 || events[0].Action != "workspace.delete" {
			t.Errorf("the record is %+v (%v)", events, err)
		}
	})
}

func TestOneOfManyGetsAName(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		admin := root(t, s)
		var made, taken atomic.Int64
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				switch _, err := s.CreateUser(context.Background(), admin, identity.User{Name: "ann"}); {
				case err == nil:
					made.Add(1)
				case wants(err, fault.Conflict):
					taken.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if made.Load() != 1 || taken.Load() != 31 {
			t.Errorf("%d were made and %d refused", made.Load(), taken.Load())
		}
	})
}

func TestAWorkspaceWithAnOpenSessionStays(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		workspace(t, s, "acme")
		open := session.Session{ID: "ses_1", Workspace: "acme", Owner: "usr_1", Status: session.New, CreatedAt: time.Now(), ExpiresAt: time.Now()}
		if err := db.InsertSession(ctx, open, event("acme", "session.created")); err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteWorkspace(ctx, admin, "acme"); !wants(err, fault.Conflict) {
			t.Errorf("with an open session: got %v", err)
		}
		closed := open
		closed.ID, closed.Status = "ses_2", session.Closed
		workspace(t, s, "bolt")
		closed.Workspace = "bolt"
		if err := db.InsertSession(ctx, closed, event("bolt", "session.created")); err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteWorkspace(ctx, admin, "bolt"); err != nil {
			t.Errorf("with a closed session: got %v", err)
		}
		if _, err := db.Session(ctx, "ses_2"); !wants(err, fault.NotFound) {
			t.Errorf("the closed session of a workspace that is gone: got %v", err)
		}
		if err := db.InsertSession(ctx, closed, event("bolt", "session.created")); !wants(err, fault.NotFound) {
			t.Errorf("a session in a workspace that is gone: got %v", err)
		}
	})
}

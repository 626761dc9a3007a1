package store_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

func grep(name string) tool.Spec {
	return tool.Spec{
		Name: name, Description: "Search — “files” 😀 '; DROP TABLE workspace_tools; --",
		Parameters: json.RawMessage(`{ "type":"object",  "properties":{"pattern":{"type":"string","default":"\u0000"}}}`),
		Payload:    json.RawMessage(`{"command":"grep -rn {pattern} /workspace", "note": 1.50}`),
		Kind:       tool.ShellTemplate,
	}
}

func TestToolsComeBackAsPut(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		for _, name := range []string{"b", "B", "_a", "a-1"} {
			put, err := db.PutWorkspaceTool(ctx, "default", grep(name), tool.AnyRevision, event("default", "tool.put"))
			if err != nil {
				t.Fatal(err)
			}
			want := grep(name)
			want.Revision = put.Revision
			if got, err := db.WorkspaceTool(ctx, "default", name); err != nil || !reflect.DeepEqual(got, want) || !reflect.DeepEqual(put, want) {
				t.Errorf("got %+v, want %+v (%v)", got, want, err)
			}
		}
		list, err := db.WorkspaceTools(ctx, "default")
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range list {
			names = append(names, s.Name)
		}
		if !slices.Equal(names, []string{"B", "_a", "a-1", "b"}) {
			t.Errorf("listed as %v", names)
		}
	})
}

func TestToolsOfAnotherWorkspaceAreNotThere(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		workspace(t, s, "acme")
		ctx := t.Context()
		if _, err := db.PutWorkspaceTool(ctx, "acme", grep("grep_repo"), 0, event("acme", "tool.put")); err != nil {
			t.Fatal(err)
		}
		if _, err := db.WorkspaceTool(ctx, "default", "grep_repo"); !fault.Is(err, fault.NotFound) {
			t.Errorf("get: %v", err)
		}
		if err := db.DeleteWorkspaceTool(ctx, "default", "grep_repo", 0, event("default", "tool.delete")); !fault.Is(err, fault.NotFound) {
			t.Errorf("delete: %v", err)
		}
		if list, err := db.WorkspaceTools(ctx, "default"); err != nil || len(list) > 0 {
			t.Errorf("list: %v, %v", list, err)
		}
		other := grep("grep_repo")
		other.Description = "other"
		if _, err := db.PutWorkspaceTool(ctx, "default", other, tool.NoRevision, event("default", "tool.put")); err != nil {
			t.Errorf("the same name in another workspace: %v", err)
		}
		if got, err := db.WorkspaceTool(ctx, "acme", "grep_repo"); err != nil || got.Description == "other" {
			t.Errorf("acme's is now %+v (%v)", got, err)
		}
		if _, err := db.PutWorkspaceTool(ctx, "none", grep("x"), 0, event("none", "tool.put")); !fault.Is(err, fault.NotFound) {
			t.Errorf("no workspace: %v", err)
		}
		if err := s.DeleteWorkspace(ctx, root(t, s), "acme"); err != nil {
			t.Fatal(err)
		}
		workspace(t, s, "acme")
		if list, err := db.WorkspaceTools(ctx, "acme"); err != nil || len(list) > 0 {
			t.Errorf("a workspace made again has %v (%v)", list, err)
		}
	})
}

func TestStaleRevisionsAreRefused(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		put := func(ifRevision int64) (int64, error) {
			s, err := db.PutWorkspaceTool(ctx, "default", grep("x"), ifRevision, event("default", "tool.put"))
			return s.Revision, err
		}
		del := func(ifRevision int64) error {
			return db.DeleteWorkspaceTool(ctx, "default", "x", ifRevision, event("default", "tool.delete"))
		}
		refused := func(what string, err error) {
			t.Helper()
			if !fault.Is(err, fault.PreconditionFailed) {
				t.Errorf("%s: got %v", what, err)
			}
		}
		refused("put over one that is not there", second(put(7)))
		first, err := put(tool.NoRevision)
		if err != nil {
			t.Fatal(err)
		}
		refused("put a second new one", second(put(tool.NoRevision)))
		next, err := put(first)
		if err != nil || next <= first {
			t.Fatalf("got %d after %d, %v", next, first, err)
		}
		refused("put with an old revision", second(put(first)))
		refused("delete with an old revision", del(first))
		if err := del(next); err != nil {
			t.Fatal(err)
		}
		again, err := put(0)
		if err != nil || again <= next {
			t.Errorf("after a delete the revision %d follows %d (%v)", again, next, err)
		}
		refused("put with the revision of the deleted one", second(put(next)))
		events, _, err := db.AuditEvents(ctx, "default", page.Page{})
		if err != nil || len(events) != 4 {
			t.Errorf("%d changes are on record, want 4 (%v)", len(events), err)
		}
	})
}

func TestTextThatPostgresCannotKeepIsInvalid(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		for _, bad := range []string{"a\x00b", "a\xffb"} {
			s := grep("x")
			s.Description = bad
			_, err := db.PutWorkspaceTool(t.Context(), "default", s, 0, event("default", "tool.put"))
			if !fault.Is(err, fault.Invalid) || fault.From(err).Field != "description" {
				t.Errorf("%q: got %v", bad, err)
			}
		}
	})
}

// TestManyAtOneTool puts, deletes and lists one tool from many sides: nothing
// fails, every revision is given once and never goes back.
func TestManyAtOneTool(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := context.Background()
		type given struct {
			revision    int64
			began, done time.Time
		}
		var mu sync.Mutex
		var all []given
		deleted := 0
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				began := time.Now()
				s := grep("x")
				s.Description = fmt.Sprint(i)
				s, err := db.PutWorkspaceTool(ctx, "default", s, tool.AnyRevision, event("default", "tool.put"))
				if err != nil {
					t.Errorf("put: %v", err)
					return
				}
				mu.Lock()
				all = append(all, given{s.Revision, began, time.Now()})
				mu.Unlock()
			})
			wg.Go(func() {
				switch err := db.DeleteWorkspaceTool(ctx, "default", "x", tool.AnyRevision, event("default", "tool.delete")); {
				case err == nil:
					mu.Lock()
					deleted++
					mu.Unlock()
				case !fault.Is(err, fault.NotFound):
					t.Errorf("delete: %v", err)
				}
			})
			wg.Go(func() {
				if list, err := db.WorkspaceTools(ctx, "default"); err != nil || len(list) > 1 {
					t.Errorf("list: %v, %v", list, err)
				}
			})
		}
		wg.Wait()
		slices.SortFunc(all, func(a, b given) int { return cmp.Compare(a.revision, b.revision) })
		for i := 1; i < len(all); i++ {
			if all[i].revision == all[i-1].revision {
				t.Errorf("revision %d was given twice", all[i].revision)
			}
		}
		earliest := time.Unix(math.MaxInt32, 0)
		for _, g := range slices.Backward(all) { // one that ended before another began has the lower revision
			if earliest.Before(g.began) {
				t.Errorf("revision %d was given after a higher one", g.revision)
			}
			if g.done.Before(earliest) {
				earliest = g.done
			}
		}
		events, _, err := db.AuditEvents(ctx, "default", page.Page{Limit: page.Max})
		if err != nil || len(events) != 64+deleted {
			t.Errorf("%d changes are on record, want %d (%v)", len(events), 64+deleted, err)
		}
	})
}

// TestOneOfManyReplacesARevision lets many replace the same revision: exactly
// one may.
func TestOneOfManyReplacesARevision(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := context.Background()
		s, err := db.PutWorkspaceTool(ctx, "default", grep("x"), tool.NoRevision, event("default", "tool.put"))
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		won := 0
		var wg sync.WaitGroup
		for i := range 32 {
			wg.Go(func() {
				var err error
				if i%2 == 0 {
					_, err = db.PutWorkspaceTool(ctx, "default", grep("x"), s.Revision, event("default", "tool.put"))
				} else {
					err = db.DeleteWorkspaceTool(ctx, "default", "x", s.Revision, event("default", "tool.delete"))
				}
				switch {
				case err == nil:
					mu.Lock()
					won++
					mu.Unlock()
				case !fault.Is(err, fault.PreconditionFailed) && !fault.Is(err, fault.NotFound):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if won != 1 {
			t.Errorf("%d replaced it", won)
		}
	})
}

func TestTheToolServiceOnADatabase(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s := &tool.Service{Store: db, Now: time.Now, NewID: newID}
		ctx, p := t.Context(), identity.Principal{Workspace: "default", UserID: "usr_1", Role: identity.Admin}
		put, err := s.Put(ctx, p, "grep_repo", grep(""), "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Put(ctx, p, "grep_repo", grep(""), `"999"`); !fault.Is(err, fault.PreconditionFailed) {
			t.Errorf("a stale ETag: %v", err)
		}
		if _, err := s.Put(ctx, p, "grep_repo", grep(""), tool.ETag(put)); err != nil {
			t.Errorf("its ETag: %v", err)
		}
		tools, err := s.Tools(ctx, "default")
		if err != nil || len(tools) != 1 {
			t.Fatalf("got %v, %v", tools, err)
		}
		inv, err := tools[0].Prepare(json.RawMessage(`{"pattern":"a b"}`))
		if err != nil || !strings.Contains(inv.Script, "'a b'") {
			t.Errorf("got %+v, %v", inv, err)
		}
	})
}

package store_test

import (
	"context"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

func event(workspace, action string) audit.Event {
	return audit.Event{ID: "aud_" + newID(), At: time.Now(), Workspace: workspace, Actor: "usr_1", Action: action, Outcome: "ok"}
}

func somePolicy(workspace string) policy.Policy {
	return policy.Policy{
		WorkspaceID: workspace, FSAllowlist: []string{"/workspace", "/data/<&>é"}, NetworkAllowlist: []string{"api.example.com:443"},
		CPUShares: 262144, MemoryMB: 1 << 40, PIDsLimit: 4, WallClockSeconds: 600, OutputBytesLimit: 1024, BaseImage: "i:latest",
	}
}

func TestPoliciesComeBackAsPut(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		if _, err := db.Policy(ctx, "default"); !fault.Is(err, fault.NotFound) {
			t.Errorf("none: got %v", err)
		}
		want := somePolicy("default")
		for range 2 {
			if err := db.PutPolicy(ctx, want, event("default", "policy.put")); err != nil {
				t.Fatal(err)
			}
			if got, err := db.Policy(ctx, "default"); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, want %+v (%v)", got, want, err)
			}
			want.NetworkAllowlist, want.MemoryMB = []string{}, 16
		}
		for range 2 {
			if err := db.DeletePolicy(ctx, "default", event("default", "policy.delete")); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := db.Policy(ctx, "default"); !fault.Is(err, fault.NotFound) {
			t.Errorf("deleted: got %v", err)
		}
		events, _, err := db.AuditEvents(ctx, "default", page.Page{})
		if err != nil || len(events) != 4 || events[3].Action != "policy.put" || events[0].Action != "policy.delete" {
			t.Errorf("the record is %+v (%v)", events, err)
		}
	})
}

func TestAPolicyThatIsRefusedLeavesNoRecord(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		if err := db.PutPolicy(ctx, somePolicy("none"), event("none", "policy.put")); !fault.Is(err, fault.NotFound) {
			t.Errorf("unknown workspace: got %v", err)
		}
		p := somePolicy("default")
		p.BaseImage = "a\x00b"
		if err := db.PutPolicy(ctx, p, event("default", "policy.put")); !fault.Is(err, fault.Invalid) {
			t.Errorf("NUL: got %v", err)
		}
		for _, w := range []string{"none", "default"} {
			if events, _, err := db.AuditEvents(ctx, w, page.Page{}); err != nil || len(events) > 0 {
				t.Errorf("the record of %s is %+v (%v)", w, events, err)
			}
		}
	})
}

func TestPoliciesReplaceEachOtherWhole(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		a, b := somePolicy("default"), somePolicy("default")
		b.MemoryMB, b.PIDsLimit, b.FSAllowlist = 99, 99, []string{"/workspace"}
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				ctx := context.Background()
				if i%2 == 0 {
					if err := db.PutPolicy(ctx, []policy.Policy{a, b}[i/2%2], event("default", "policy.put")); err != nil {
						t.Error(err)
					}
					return
				}
				got, err := db.Policy(ctx, "default")
				if !fault.Is(err, fault.NotFound) && (err != nil || !reflect.DeepEqual(got, a) && !reflect.DeepEqual(got, b)) {
					t.Errorf("got %+v, %v", got, err)
				}
			})
		}
		wg.Wait()
	})
}

package store_test

import (
	"slices"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

func TestGroupsHoldMembersAndPermissions(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		s, _ := people(db)
		ctx, admin := t.Context(), root(t, s)
		workspace(t, s, "acme")
		mia, _ := join(t, s, "acme", "mia", identity.Member)
		outsider, _ := join(t, s, "", "otto", identity.Member)
		group := func(w, name string) identity.Group {
			g, err := s.CreateGroup(ctx, admin, identity.Group{Workspace: w, Name: name})
			if err != nil {
				t.Fatal(err)
			}
			return g
		}
		one, two, elsewhere := group("acme", "one"), group("acme", "two"), group("default", "one")
		for name, got := range map[string]struct {
			err  error
			kind fault.Kind
		}{
			"taken":                {second(s.CreateGroup(ctx, admin, identity.Group{Workspace: "acme", Name: "two"})), fault.Conflict},
			"rename to taken":      {second(s.RenameGroup(ctx, admin, one.ID, "two")), fault.Conflict},
			"member from outside":  {second(s.AddMember(ctx, admin, one.ID, outsider.UserID)), fault.NotFound},
			"no such member":       {s.RemoveMember(ctx, admin, one.ID, mia.UserID), fault.NotFound},
			"permissions of a far": {second(s.PutPermissions(ctx, admin, "acme", identity.PermissionSet{Groups: map[string]identity.Permissions{elsewhere.ID: {}}})), fault.NotFound},
		} {
			if !wants(got.err, got.kind) {
				t.Errorf("%s: got %v, want %s", name, got.err, got.kind)
			}
		}
		for _, g := range []identity.Group{one, two} {
			if _, err := s.AddMember(ctx, admin, g.ID, mia.UserID); err != nil {
				t.Fatal(err)
			}
		}
		if ids, err := s.GroupsOf(ctx, mia); err != nil || !slices.Equal(ids, []string{one.ID, two.ID}) {
			t.Errorf("got %v, %v", ids, err)
		}
		set := identity.PermissionSet{
			Defaults: identity.Permissions{ToolsExport: true},
			Groups:   map[string]identity.Permissions{one.ID: {Tools: true}, two.ID: {PublicTools: true}},
		}
		if _, err := s.PutPermissions(ctx, admin, "acme", set); err != nil {
			t.Fatal(err)
		}
		if p, err := s.Allowed(ctx, mia); err != nil || p != (identity.Permissions{Tools: true, ToolsExport: true, PublicTools: true}) {
			t.Errorf("got %+v, %v", p, err)
		}
		if err := s.DeleteGroup(ctx, admin, two.ID); err != nil {
			t.Fatal(err)
		}
		if kept, err := s.Permissions(ctx, admin, "acme"); err != nil || len(kept.Groups) != 1 || kept.Groups[one.ID] != (identity.Permissions{Tools: true}) {
			t.Errorf("got %+v, %v", kept, err)
		}
		if members, _, err := s.Members(ctx, admin, one.ID, page.Page{}); err != nil || len(members) != 1 || members[0].Name != "mia" {
			t.Errorf("got %+v, %v", members, err)
		}
		if err := s.DeleteWorkspace(ctx, admin, "acme"); err != nil {
			t.Errorf("a workspace with groups: %v", err)
		}
		if p, err := db.PermissionsOf(ctx, "acme", mia.UserID); err != nil || p != (identity.Permissions{}) {
			t.Errorf("its permissions stay: %+v, %v", p, err)
		}
	})
}

package session_test

import (
	"slices"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
	"github.com/bigwave/bigwave/shared/fault"
)

func TestInternalSessionsAreBareAndNobodys(t *testing.T) {
	storetest.Run(t, func(t *testing.T, db *store.DB) {
		w := newWorld(t, db)
		w.policies.shared = []string{"/data", "/workspace"}
		c, err := w.s.CreateInternal(t.Context(), "default")
		if err != nil || !session.Internal(c.ID) {
			t.Fatal(c.ID, err)
		}
		admin := identity.Principal{Workspace: "default", UserID: "usr_admin", Role: identity.Admin}
		for _, p := range []identity.Principal{alice, admin} {
			if _, err := w.s.Get(t.Context(), p, c.ID); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s gets it: %v", p.UserID, err)
			}
			if err := w.s.Close(t.Context(), p, c.ID); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s closes it: %v", p.UserID, err)
			}
			if list, _, err := w.s.List(t.Context(), p, page.Page{Limit: 200}); err != nil || slices.ContainsFunc(list, func(s session.Session) bool { return s.ID == c.ID }) {
				t.Errorf("%s lists it: %v", p.UserID, err)
			}
		}
		if _, err := w.s.Get(t.Context(), session.Platform("default"), c.ID); err != nil {
			t.Errorf("its owner does not get it: %v", err)
		}
		begun, ok, err := db.BeginStart(t.Context(), c.ID, c.Epoch, time.Now(), time.Now().Add(time.Minute))
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		holder := session.Claim{Runner: "r1", Incarnation: "a", Session: c.ID, Epoch: begun.Epoch}
		g, err := w.s.Claim(t.Context(), holder)
		if err != nil {
			t.Fatal(err)
		}
		if p := g.Policy; len(p.NetworkAllowlist) != 0 || !slices.Equal(p.FSAllowlist, []string{"/workspace"}) || p.WallClockSeconds != 9 || p.MemoryMB != 64 || g.Session.PolicyDigest != p.Digest() {
			t.Errorf("granted %+v", p)
		}
		if err := w.s.Started(t.Context(), holder, session.Sandbox{PolicyDigest: g.Policy.Digest()}); err != nil {
			t.Errorf("started: %v", err)
		}
		for range 2 {
			w.s.CloseInternal(t.Context(), c)
		}
		if got, err := db.Session(t.Context(), c.ID); err != nil || got.Status != session.Closed || !slices.Equal(w.runner.stopped, []string{c.ID}) {
			t.Errorf("got %s, %v; stopped %v", got.Status, err, w.runner.stopped)
		}
	})
}

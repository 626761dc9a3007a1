package policy

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

// memory is a store of policies by workspace.
type memory struct {
	kept   map[string]Policy
	events []audit.Event
}

func (m *memory) Policy(_ context.Context, workspace string) (Policy, error) {
	p, ok := m.kept[workspace]
	if !ok {
		return p, fault.New(fault.NotFound, "no policy")
	}
	return p, nil
}

func (m *memory) PutPolicy(_ context.Context, p Policy, e audit.Event) error {
	m.kept[p.WorkspaceID], m.events = p, append(m.events, e)
	return nil
}

func (m *memory) DeletePolicy(_ context.Context, workspace string, e audit.Event) error {
	delete(m.kept, workspace)
	m.events = append(m.events, e)
	return nil
}

func newService() (*Service, *memory) {
	m, n := &memory{kept: map[string]Policy{}}, 0
	return &Service{
		Store: m, Default: inTree(), Ceilings: DefaultCeilings(), Enabled: true,
		Now: func() time.Time { return time.Unix(1, 0) }, NewID: func() string { n++; return fmt.Sprint(n) },
	}, m
}

func TestPolicyOfAWorkspace(t *testing.T) {
	s, m := newService()
	p := identity.Principal{Workspace: "default", UserID: "u", Role: identity.Admin}
	if got, err := s.Get(t.Context(), p); err != nil || got.WorkspaceID != "default" || got.Digest() != inTree().Digest() {
		t.Errorf("without one of its own: %+v, %v", got, err)
	}
	if got, err := s.Put(t.Context(), p, example()); err != nil || got.MemoryMB != 2048 {
		t.Fatalf("put: %+v, %v", got, err)
	}
	if got, err := s.Resolve(t.Context(), "default"); err != nil || got.Digest() != example().Digest() {
		t.Errorf("resolve: %+v, %v", got, err)
	}
	if got, err := s.Resolve(t.Context(), "other"); err != nil || got.WorkspaceID != "other" || got.Digest() != inTree().Digest() {
		t.Errorf("another workspace: %+v, %v", got, err)
	}
	stranger := identity.Principal{Workspace: "other", UserID: "v", Role: identity.Admin}
	if _, err := s.Put(t.Context(), stranger, example()); !fault.Is(err, fault.Forbidden) {
		t.Errorf("put into another workspace: %v", err)
	}
	bad := example()
	bad.PIDsLimit = 0
	if _, err := s.Put(t.Context(), p, bad); fault.From(err).Field != "pids_limit" {
		t.Errorf("put of a bad one: %v", err)
	}
	if m.kept["default"].Digest() != example().Digest() || len(m.kept) != 1 || len(m.events) != 1 {
		t.Errorf("refused puts changed something: %+v", m)
	}
	for range 2 {
		if err := s.Delete(t.Context(), p); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	if got, _ := s.Get(t.Context(), p); got.Digest() != inTree().Digest() {
		t.Errorf("after delete: %+v", got)
	}
	if e := m.events[0]; e.Action != audit.PolicyPut || e.Actor != "u" || e.Workspace != "default" || e.PolicyDigest != example().Digest() || e.ID == "" || e.At.IsZero() || e.Outcome != audit.OK {
		t.Errorf("recorded %+v", e)
	}
}

func TestDisabled(t *testing.T) {
	s, _ := newService()
	s.Enabled = false
	p := identity.Principal{Workspace: "default"}
	_, getErr := s.Get(t.Context(), p)
	_, putErr := s.Put(t.Context(), p, example())
	_, resolveErr := s.Resolve(t.Context(), "default")
	for _, err := range []error{getErr, putErr, resolveErr, s.Delete(t.Context(), p)} {
		if !fault.Is(err, fault.Unavailable) || fault.From(err).Message != "sandbox_policy_registry not initialised" {
			t.Errorf("got %v", err)
		}
	}
}

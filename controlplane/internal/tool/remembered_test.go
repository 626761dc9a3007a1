package tool_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
)

// counted counts how often the tools are read, and may hold a reader up.
type counted struct {
	*memory
	reads atomic.Int64
	held  func()
}

func (c *counted) WorkspaceTools(ctx context.Context, workspace string) ([]tool.Spec, error) {
	c.reads.Add(1)
	specs, err := c.memory.WorkspaceTools(ctx, workspace)
	if c.held != nil {
		c.held()
	}
	return specs, err
}

func TestASoleServiceReadsToolsOnceBetweenChanges(t *testing.T) {
	store := &counted{memory: &memory{specs: map[string]tool.Spec{}}}
	s := &tool.Service{Store: store, Sole: true, Now: time.Now, NewID: func() string { return "1" }}
	admin := identity.Principal{Workspace: "w", UserID: "u", Role: identity.Admin}
	spec := tool.Spec{Kind: tool.ShellTemplate, Payload: []byte(`{"command":"true"}`)}
	count := func(want int) {
		t.Helper()
		found, err := s.Tools(t.Context(), "w")
		if err != nil || len(found) != want {
			t.Fatalf("got %d tools, %v; want %d", len(found), err, want)
		}
	}
	put := func(name string) {
		t.Helper()
		if _, err := s.Put(t.Context(), admin, name, spec, ""); err != nil {
			t.Fatal(err)
		}
	}
	count(0)
	put("a")
	count(1)
	count(1)
	if n := store.reads.Load(); n != 2 {
		t.Errorf("%d reads, want 2", n)
	}
	if err := s.Delete(t.Context(), admin, "a", ""); err != nil {
		t.Fatal(err)
	}
	count(0)

	// What was read before a change and comes back after it is not kept.
	put("b")
	store.held = func() { store.held = nil; put("c") }
	count(1)
	count(2)
}

package tool_test

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// memory is one workspace's store, "w"; any other workspace is empty.
type memory struct {
	specs    map[string]tool.Spec
	revision int64
	events   []audit.Event
}

func (m *memory) WorkspaceTools(_ context.Context, workspace string) ([]tool.Spec, error) {
	if workspace != "w" {
		return nil, nil
	}
	return slices.SortedFunc(maps.Values(m.specs), func(a, b tool.Spec) int { return strings.Compare(a.Name, b.Name) }), nil
}

func (m *memory) WorkspaceTool(_ context.Context, workspace, name string) (tool.Spec, error) {
	s, ok := m.specs[name]
	if !ok || workspace != "w" {
		return s, fault.New(fault.NotFound, "no such tool")
	}
	return s, nil
}

func (m *memory) matches(name string, ifRevision int64) error {
	s, ok := m.specs[name]
	switch {
	case ifRevision == tool.NoRevision && ok, ifRevision > 0 && s.Revision != ifRevision:
		return fault.New(fault.PreconditionFailed, "stale")
	}
	return nil
}

func (m *memory) PutWorkspaceTool(_ context.Context, _ string, s tool.Spec, ifRevision int64, e audit.Event) (tool.Spec, error) {
	if err := m.matches(s.Name, ifRevision); err != nil {
		return s, err
	}
	m.revision++
	s.Revision = m.revision
	m.specs[s.Name] = s
	m.events = append(m.events, e)
	return s, nil
}

func (m *memory) DeleteWorkspaceTool(ctx context.Context, workspace, name string, ifRevision int64, e audit.Event) error {
	if _, err := m.WorkspaceTool(ctx, workspace, name); err != nil {
		return err
	}
	if err := m.matches(name, ifRevision); err != nil {
		return err
	}
	delete(m.specs, name)
	m.events = append(m.events, e)
	return nil
}

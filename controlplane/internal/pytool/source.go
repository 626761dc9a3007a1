package pytool

import (
	"context"
	"slices"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// MaxToolIDs is how many tools a run may name.
const MaxToolIDs = 64

// Pin returns the functions of the tools that p names, for one run, with what
// they are bound to: a tool that is changed afterwards is not changed for this
// run. A tool that is not there, or that p may not use, is NotFound by name.
func (s *Service) Pin(ctx context.Context, p identity.Principal, ids []string) ([]tool.Pin, []tool.Tool, error) {
	if len(ids) == 0 {
		return nil, nil, nil
	}
	if len(ids) > MaxToolIDs {
		return nil, nil, fault.New(fault.Invalid, "tool_ids may name at most %d tools", MaxToolIDs).On("tool_ids")
	}
	v, err := s.viewer(ctx, p)
	if err != nil {
		return nil, nil, err
	}
	var pins []tool.Pin
	var offered []tool.Tool
	for i, id := range ids {
		if slices.Contains(ids[:i], id) {
			continue
		}
		t, err := s.Store.PythonTool(ctx, p.Workspace, id)
		if fault.Is(err, fault.NotFound) || err == nil && !s.lists(v, t) {
			return nil, nil, fault.New(fault.NotFound, "no Python tool %q", id).On("tool_ids")
		}
		if err != nil {
			return nil, nil, err
		}
		more, err := t.offer(s.told(ctx, t))
		if err != nil {
			return nil, nil, err
		}
		pins = append(pins, t.pin())
		offered = append(offered, more...)
	}
	return pins, offered, nil
}

// Pinned returns the functions of pins again, for a run that another replica
// began. Those of a tool that was changed since, or is gone, are not there:
// what the run is bound to can't be had any more.
func (s *Service) Pinned(ctx context.Context, workspace string, pins []tool.Pin) ([]tool.Tool, error) {
	var offered []tool.Tool
	for _, pin := range pins {
		t, err := s.Store.PythonTool(ctx, workspace, pin.ID)
		if fault.Is(err, fault.NotFound) || err == nil && t.pin() != pin {
			continue
		}
		if err != nil {
			return nil, err
		}
		more, err := t.offer(s.told(ctx, t))
		if err != nil {
			return nil, err
		}
		offered = append(offered, more...)
	}
	return offered, nil
}

func (t Tool) pin() tool.Pin { return tool.Pin{ID: t.ID, Revision: t.Revision} }

// offer is t's functions as tools, described as told says. Of two with one
// name the source's own attribute of that name is called, so there is one.
func (t Tool) offer(told map[string]string) ([]tool.Tool, error) {
	all, err := functions(t.Specs)
	if err != nil {
		return nil, err
	}
	digest := t.Digest()
	var out []tool.Tool
	for i, f := range all {
		if slices.ContainsFunc(all[:i], func(o Function) bool { return o.Name == f.Name }) {
			continue
		}
		description, ok := told[f.Name]
		if !ok {
			description = f.Description
		}
		out = append(out, tool.NewFunction(tool.Function{Pin: t.pin(), Digest: digest, Content: t.Content, Name: f.Name}, description, f.Parameters))
	}
	return out, nil
}

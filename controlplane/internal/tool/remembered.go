package tool

import (
	"context"
	"sync"
)

// remembered keeps the tools of workspaces between their changes, for a
// control plane that is the only one to change them. The zero one is ready.
type remembered struct {
	mu      sync.Mutex
	changes int // counts them: what was read before the last one is not kept
	tools   map[string][]Tool
}

// maxRemembered bounds the workspaces whose tools are kept; beyond it all are read anew.
const maxRemembered = 256

// get returns a workspace's tools, from read when they are not known. What it
// returns must not be changed.
func (r *remembered) get(ctx context.Context, workspace string, read func(context.Context, string) ([]Tool, error)) ([]Tool, error) {
	r.mu.Lock()
	tools, ok := r.tools[workspace]
	before := r.changes
	r.mu.Unlock()
	if ok {
		return tools, nil
	}
	tools, err := read(ctx, workspace)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changes == before {
		if r.tools == nil || len(r.tools) >= maxRemembered {
			r.tools = map[string][]Tool{}
		}
		r.tools[workspace] = tools
	}
	return tools, nil
}

// changed is called once a change is made, and also when nobody knows.
func (r *remembered) changed(workspace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changes++
	delete(r.tools, workspace)
}

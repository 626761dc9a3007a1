package execution

import (
	"context"
	"sync"
)

// turns lets installsAtOnce go on, and only one of each workspace, so that one
// workspace's long installations leave room for another's. Its methods may be called
// from several goroutines.
type turns struct {
	mu  sync.Mutex
	all chan struct{}
	of  map[string]*turn // by workspace; those that have or want one
}

// turn is a workspace's.
type turn struct {
	free  chan struct{}
	users int
}

// take waits for a workspace's turn until ctx ends. Who has waited for longest
// goes first.
func (t *turns) take(ctx context.Context, workspace string) (leave func(), err error) {
	own := t.join(workspace)
	if err := enter(ctx, own.free); err != nil {
		t.quit(workspace, own)
		return nil, err
	}
	if err := enter(ctx, t.all); err != nil {
		<-own.free
		t.quit(workspace, own)
		return nil, err
	}
	return func() {
		<-t.all
		<-own.free
		t.quit(workspace, own)
	}, nil
}

func enter(ctx context.Context, free chan struct{}) error {
	select {
	case free <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *turns) join(workspace string) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.all, t.of = make(chan struct{}, installsAtOnce), map[string]*turn{}
	}
	own := t.of[workspace]
	if own == nil {
		own = &turn{free: make(chan struct{}, 1)}
		t.of[workspace] = own
	}
	own.users++
	return own
}

func (t *turns) quit(workspace string, own *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if own.users--; own.users == 0 {
		delete(t.of, workspace)
	}
}

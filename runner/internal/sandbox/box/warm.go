package box

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Sandboxes that are kept ready. One has everything but its limits, its mounts
// and its way out, which a claim brings; so it fits every policy that has its
// image. Once claimed it never comes back.

// takeSpare returns a sandbox that has no spec yet, ready or made on the spot,
// and has the next one made.
func (b *Backend) takeSpare(ctx context.Context, image Image) (*box, error) {
	for {
		x, err := b.spare(image)
		if err != nil {
			return nil, err
		}
		if x == nil {
			defer b.fill()
			return b.prepareInTurn(ctx, image)
		}
		b.fill()
		if x.alive() {
			return x, nil
		}
		_ = x.Close(context.WithoutCancel(ctx))
	}
}

// spare takes one of that image off the stock; nil: there is none.
func (b *Backend) spare(image Image) (*box, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, sandbox.ErrClosed
	}
	if b.cfg.Follow || image.Name == b.maker.Standard() {
		b.want(image)
	}
	i := slices.IndexFunc(b.spares, func(x *box) bool { return x.image == image })
	if i < 0 {
		return nil, nil
	}
	x := b.spares[i]
	b.spares = slices.Delete(b.spares, i, i+1)
	return x, nil
}

// want says what spares are made of from now on; those of something else go.
// mu is held.
func (b *Backend) want(image Image) {
	if b.wanted == image {
		return
	}
	b.wanted = image
	for _, x := range b.spares {
		b.drop(x)
	}
	b.spares = nil
}

// drop closes a spare that nobody wants any more.
func (b *Backend) drop(x *box) {
	b.working.Go(func() {
		if err := x.Close(context.Background()); err != nil {
			b.log.Error("a spare sandbox did not close cleanly", "sandbox", x.name, "error", err)
		}
	})
}

// prepareInTurn is prepare for one of the few that are made at once, and not
// for ever: an image can keep a runtime from coming to its end.
func (b *Backend) prepareInTurn(ctx context.Context, image Image) (*box, error) {
	select {
	case b.making <- struct{}{}:
		defer func() { <-b.making }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.cfg.MakeWithin, &sandbox.StartError{
		Code: "start_failed", Message: fmt.Sprintf("the sandbox did not come up within %v", b.cfg.MakeWithin),
	})
	defer cancel()
	x, err := b.prepare(ctx, image)
	if err != nil && ctx.Err() != nil {
		return nil, errors.Join(context.Cause(ctx), err)
	}
	return x, err
}

// fill makes spares in the background until there are enough, one at a time.
func (b *Backend) fill() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.refill || len(b.spares) >= b.cfg.Spares {
		return
	}
	b.refill = true
	b.filling.Go(b.fillUp)
}

func (b *Backend) fillUp() {
	for again := true; again; {
		select {
		case <-time.After(b.cfg.RefillAfter):
		case <-b.closing:
		}
		x, err := b.makeSpare()
		if again = b.stock(x, err); err != nil {
			b.log.Error("no spare sandbox", "error", err)
		}
	}
}

// makeSpare makes one of what is wanted.
func (b *Backend) makeSpare() (*box, error) {
	ctx, cancel := context.WithTimeout(context.Background(), b.cfg.MakeWithin)
	defer cancel()
	b.mu.Lock()
	wanted := b.wanted
	b.mu.Unlock()
	if wanted == (Image{}) { // nothing was started yet
		var err error
		if wanted, err = b.maker.Image(ctx, b.maker.Standard()); err != nil {
			return nil, err
		}
		b.mu.Lock()
		if b.wanted == (Image{}) {
			b.wanted = wanted
		}
		wanted = b.wanted
		b.mu.Unlock()
	}
	return b.prepareInTurn(ctx, wanted)
}

// stock takes a new spare in and reports whether there is another to make. One
// that is not wanted any more goes.
func (b *Backend) stock(x *box, err error) (again bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed || err != nil:
		b.refill = false
		if x != nil {
			b.drop(x)
		}
		return false
	case x.image != b.wanted:
		b.drop(x)
	default:
		b.spares = append(b.spares, x)
	}
	b.refill = len(b.spares) < b.cfg.Spares
	return b.refill
}

// Settle returns once no spare is in the making. It is for measuring, and for
// one goroutine that calls nothing else meanwhile.
func (b *Backend) Settle() { b.filling.Wait() }

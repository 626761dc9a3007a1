package box

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"syscall"

	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// openGate lets the sandbox reach what the policy lists. With an empty list
// there is nothing to set up: the network namespace has no way out.
func (x *box) openGate(ctx context.Context, fence *egress.Fence, list, private []string) error {
	if len(list) == 0 {
		return nil
	}
	gate, err := fence.Open(list, func(sockets []egress.Socket) ([]*os.File, error) {
		return x.sockets(ctx, sockets)
	}, private...)
	if entry, ok := errors.AsType[*egress.EntryError](err); ok {
		return &sandbox.StartError{Code: "policy_unenforceable", Field: "network_allowlist", Message: "this runner can't enforce network_allowlist: " + entry.Error()}
	}
	if err != nil {
		return &sandbox.StartError{Code: "start_failed", Field: "network_allowlist", Message: "the sandbox's way out could not be made", Cause: err}
	}
	x.gate = gate
	x.info.Enforced = maps.Clone(x.info.Enforced)
	x.info.Enforced["network_allowlist"] = "network namespace with lo only, runner's gate"
	if gate.Filtered() {
		x.info.Enforced["network_allowlist"] += ", nf_tables"
	}
	return nil
}

func (x *box) closeGate() {
	select {
	case m := <-x.made: // for one that did not wait
		closeFDs(m.fds)
	default:
	}
	if x.gate == nil {
		return
	}
	x.gate.Close()
	for to, c := range x.gate.Counters() {
		x.b.log.Debug("egress", "sandbox", x.name, "to", to, "connections", c.Connections,
			"refusals", c.Refusals, "sent", c.Sent, "received", c.Received)
	}
}

// mark and denials are for what the gate refuses while a call runs.
func (x *box) mark() uint64 {
	if x.gate == nil {
		return 0
	}
	return x.gate.Mark()
}

func (x *box) denials(mark uint64) []sandbox.Denial {
	if x.gate == nil {
		return nil
	}
	var all []sandbox.Denial
	for _, d := range x.gate.Denials(mark) {
		all = append(all, sandbox.Denial(d))
	}
	return all
}

// made is the init's answer to a wish for sockets.
type made struct {
	trouble inside.Trouble
	fds     []int
}

// handOver gives sockets to whoever waits for them.
func (x *box) handOver(m made) bool {
	select {
	case x.made <- m:
		return true
	default: // nobody asked
		return false
	}
}

// sockets has the init make sockets. They come in the order of the wishes.
func (x *box) sockets(ctx context.Context, wishes []egress.Socket) ([]*os.File, error) {
	var files []*os.File
	for len(wishes) > 0 {
		some := make([]inside.Socket, min(len(wishes), inside.MaxFDs))
		for i := range some {
			some[i] = inside.Socket(wishes[i])
		}
		wishes = wishes[len(some):]
		if err := x.guest.Control.send(inside.AppendSockets(nil, some)); err != nil {
			return files, err
		}
		more, err := x.hearSockets(ctx)
		if err == nil && len(more) != len(some) {
			err = fmt.Errorf("%d sockets came, not %d", len(more), len(some))
		}
		files = append(files, more...)
		if err != nil {
			return files, err
		}
	}
	return files, nil
}

func (x *box) hearSockets(ctx context.Context) ([]*os.File, error) {
	select {
	case m := <-x.made:
		var files []*os.File
		for _, fd := range m.fds {
			files = append(files, os.NewFile(uintptr(fd), "socket"))
		}
		if m.trouble.Step != "" {
			return files, fmt.Errorf("in the sandbox: %s: %w", m.trouble.Step, syscall.Errno(m.trouble.Errno))
		}
		return files, nil
	case <-x.done:
		return nil, sandbox.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// checkGate opens a gate in a sandbox that nobody gets.
func (b *Backend) checkGate(ctx context.Context) []sandbox.Piece {
	gate := sandbox.Piece{Name: "egress", State: "ok", Detail: "names, addresses and ranges on TCP", Fatal: true}
	filter := sandbox.Piece{Name: "nf_tables", State: "ok", Detail: "refuses and notes what is not listed"}
	x, err := b.prepareStandard(ctx)
	if err == nil {
		err = x.openGate(ctx, b.fence, []string{"canary.invalid:443"}, nil)
		if err == nil && !x.gate.Filtered() {
			filter.State, filter.Detail = "weak", "the kernel has none"
			filter.Means = "attempts on what no entry of a network_allowlist has still fail, but are not in a call's denials; load the modules nf_tables and nft_reject_inet"
		}
		err = errors.Join(err, x.Close(context.WithoutCancel(ctx)))
	}
	if err != nil {
		gate.State, gate.Detail = "missing", err.Error()
		gate.Means = "no sandbox could get a network_allowlist: the kernel must let the runner set up lo in a sandbox's network namespace"
		return []sandbox.Piece{gate}
	}
	return []sandbox.Piece{gate, filter}
}

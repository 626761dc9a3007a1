package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// checkCanary proves that the network fence holds what it says: an address
// that answers from this host is out of reach for a sandbox, and within reach
// of one whose list names it.
func (b *Backend) checkCanary(ctx context.Context) sandbox.Piece {
	p := sandbox.Piece{Name: "canary", State: "ok", Detail: "a local address answers the host, not a sandbox, and one that lists it", Fatal: true}
	if err := b.sing(ctx); err != nil {
		p.State, p.Detail = "missing", err.Error()
		p.Means = "what a network_allowlist says would not be what happens; nothing is run like this"
	}
	return p
}

const song = "canary\n"

func (b *Backend) sing(ctx context.Context) error {
	canary, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen on this host: %w", err)
	}
	heard := make(chan struct{}, 16) // more than connect here
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := canary.Accept()
			if err != nil {
				return
			}
			heard <- struct{}{}
			_, _ = io.WriteString(c, song) // who does not hear it says so
			_ = c.Close()
		}
	}()
	defer func() {
		_ = canary.Close()
		<-ended
	}()
	address := canary.Addr().String()

	if err := dialed(ctx, address); err != nil {
		return fmt.Errorf("the canary does not answer this host: %w", err)
	}
	<-heard
	switch ok, err := b.hears(ctx, address, nil); {
	case err != nil:
		return err
	case ok || len(heard) > 0:
		return errors.New("a sandbox with an empty network_allowlist reached an address of this host")
	}
	// This one address may be listed although it is this machine's.
	fence, err := egress.New(egress.Config{PrivateAllow: []string{"127.0.0.1"}, NoFilter: true, Log: b.log})
	if err != nil {
		return err
	}
	switch ok, err := b.hears(ctx, address, fence); {
	case err != nil:
		return err
	case !ok:
		return errors.New("a sandbox did not reach the address that its network_allowlist names")
	}
	return nil
}

func dialed(ctx context.Context, address string) error {
	c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return c.Close()
}

// hears reports whether a sandbox of its own gets an answer from address; with
// a fence its list names it.
func (b *Backend) hears(ctx context.Context, address string, fence *egress.Fence) (bool, error) {
	x, err := b.prepareStandard(ctx)
	if err != nil {
		return false, err
	}
	defer x.Close(context.WithoutCancel(ctx))
	if fence != nil {
		if err := x.openGate(ctx, fence, []string{address}, nil); err != nil {
			return false, err
		}
	}
	host, port, _ := net.SplitHostPort(address) // the listener's own
	script := fmt.Sprintf("exec 3<>/dev/tcp/%s/%s && cat <&3", host, port)
	var out contentWriter
	exit, err := x.Exec(ctx, sandbox.Process{ID: "canary", Program: sandbox.Bash, Script: []byte(script), InArgv: true, Stdout: &out, Wall: closeTimeout})
	if err != nil {
		return false, err
	}
	if exit.Reason != sandbox.Exited {
		return false, fmt.Errorf("the canary's program ended as %s", exit.Reason)
	}
	return string(out.bytes) == song, nil
}

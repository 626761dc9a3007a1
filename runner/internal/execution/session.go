package execution

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// closeTime is how long a sandbox may take to go.
const closeTime = 15 * time.Second

// session is one epoch of a session on this runner. Its fields below box are
// guarded by the service's lock.
type session struct {
	held      wire.Held
	workspace string
	start     wire.Start
	ctx       context.Context // ends when the session has to go; the cause is an *ending
	cancel    context.CancelCauseFunc

	running sync.WaitGroup // open calls

	box  sandbox.Sandbox // nil: not yet
	gone bool            // takes no calls any more
	open map[string]*call

	looks map[[sha256.Size]byte]harness.Lacking // by a tool's source
}

func newSession(held wire.Held, o wire.Order) *session {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &session{
		held: held, workspace: o.Workspace, start: *o.Start, ctx: ctx, cancel: cancel, open: map[string]*call{},
		looks: map[[sha256.Size]byte]harness.Lacking{},
	}
}

// live reports whether the session takes calls.
func (ses *session) live() bool { return ses.box != nil && !ses.gone && ses.ctx.Err() == nil }

// host is a session's life: start, wait for its end, clean up, report.
func (s *Service) host(ses *session) {
	defer ses.cancel(nil)
	box, err := s.begin(ses)
	if err != nil {
		s.drop(ses)
		s.reportUnstarted(ses, err)
		return
	}
	info := box.Info()
	s.mu.Lock()
	ses.box = box
	s.failures, s.failure = 0, ""
	s.mu.Unlock()
	s.report(ses.held, wire.Report{Kind: wire.SessionStarted, Sandbox: &wire.Sandbox{
		Backend: info.Backend, Isolation: info.Isolation, ImageDigest: info.ImageDigest,
		PolicyDigest: ses.start.PolicyDigest, Enforced: info.Enforced,
	}})
	s.Log.Info("session started", "session", ses.held.Session, "epoch", ses.held.Epoch)

	why := died
	select {
	case <-box.Done():
	case <-ses.ctx.Done():
		why = endingOf(context.Cause(ses.ctx))
	}
	s.finish(ses, why)
}

// begin makes the sandbox. The backend knows how many it can make at once.
func (s *Service) begin(ses *session) (sandbox.Sandbox, error) {
	box, err := s.Backend.Start(ses.ctx, spec(ses))
	if err == nil && ses.ctx.Err() != nil { // it was stopped in the same moment
		s.remove(ses, box)
		return nil, context.Cause(ses.ctx)
	}
	return box, err
}

func spec(ses *session) sandbox.Spec {
	p := ses.start.Policy
	return sandbox.Spec{
		ID:        fmt.Sprintf("%s-%d", ses.held.Session, ses.held.Epoch),
		Workspace: ses.workspace,
		Policy: sandbox.Policy{
			FSAllowlist:      p.FSAllowlist,
			NetworkAllowlist: p.NetworkAllowlist,
			CPUShares:        p.CPUShares,
			MemoryMB:         p.MemoryMB,
			PIDsLimit:        p.PIDsLimit,
			BaseImage:        p.BaseImage,
		},
	}
}

// finish ends the calls, then the sandbox, then says so.
func (s *Service) finish(ses *session, why *ending) {
	s.mu.Lock()
	ses.gone = true
	s.mu.Unlock()
	if why != died {
		ses.running.Wait() // they were cancelled with the session, and say why
	}
	s.remove(ses, ses.box)
	ses.running.Wait()
	s.drop(ses)
	s.report(ses.held, wire.Report{Kind: wire.SessionEnded, Failure: &why.session})
	s.Log.Info("session ended", "session", ses.held.Session, "epoch", ses.held.Epoch, "code", why.session.Code)
}

// remove closes a sandbox on a time of its own, whoever asked for it.
func (s *Service) remove(ses *session, box sandbox.Sandbox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ses.ctx), closeTime)
	defer cancel()
	if err := box.Close(ctx); err != nil {
		s.Log.Error("sandbox did not close cleanly", "session", ses.held.Session, "error", err)
	}
}

func (s *Service) drop(ses *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, ses.held)
}

// reportUnstarted says why there is no sandbox.
func (s *Service) reportUnstarted(ses *session, err error) {
	if why, ok := errors.AsType[*ending](context.Cause(ses.ctx)); ok { // asked for, not failed
		s.report(ses.held, wire.Report{Kind: wire.SessionEnded, Failure: &why.session})
		return
	}
	if refused(err) {
		s.Log.Info("sandbox refused", "session", ses.held.Session, "why", err)
	} else {
		s.mu.Lock()
		s.failures++
		s.failure = startFailure(err).Message
		s.mu.Unlock()
		s.Log.Error("sandbox could not be made", "session", ses.held.Session, "error", err)
	}
	s.report(ses.held, wire.Report{Kind: wire.SessionFailed, Failure: startFailure(err)})
}

// refused reports whether a start failed by what was asked for, and not here.
func refused(err error) bool {
	se, ok := errors.AsType[*sandbox.StartError](err)
	return ok && se.Code == string(fault.PolicyUnenforceable)
}

// startFailure shows a StartError's public part and hides any other error.
func startFailure(err error) *wire.Failure {
	if se, ok := errors.AsType[*sandbox.StartError](err); ok {
		return &wire.Failure{Code: se.Code, Field: se.Field, Message: se.Message}
	}
	return &wire.Failure{Code: string(fault.StartFailed), Message: "The sandbox could not be made; the runner's log says why."}
}

// Fail reports that a session's start order was refused here: for policies
// that are over this runner's own ceilings.
func (s *Service) Fail(o wire.Order, f wire.Failure) {
	s.report(wire.Held{Session: o.Session, Epoch: o.Epoch}, wire.Report{Kind: wire.SessionFailed, Failure: &f})
}

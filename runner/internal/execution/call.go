package execution

import (
	"context"
	"errors"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/stream"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// floodFactor times output_bytes_limit is what a call may write before it is
// ended.
const floodFactor = 16

// maxKept is what is kept of one stream whatever the policy says: the streams
// and a file's content share a blob.
const maxKept = wire.MaxBlob / 3

// call is one open call.
type call struct {
	wire.Call
	session *session
	ctx     context.Context
	cancel  context.CancelCauseFunc
	started time.Time // zero: the program never ran
}

func newCall(ses *session, c wire.Call) *call {
	ctx, cancel := context.WithCancelCause(ses.ctx)
	return &call{Call: c, session: ses, ctx: ctx, cancel: cancel}
}

// output is what a call's two streams go through.
type output struct {
	frames         *stream.Frames
	stdout, stderr *stream.Limit
}

// run carries a call from its order to its report.
func (s *Service) run(c *call) {
	out := s.output(c)
	done := s.perform(c, out)
	out.frames.Close() // every frame goes before the report
	s.attach(c, out, done)
	s.report(c.session.held, wire.Report{Kind: wire.CallDone, Run: c.Run, Call: c.ID, Done: done})
	s.Log.Info("call ended", "session", c.session.held.Session, "call", c.ID, "status", done.Status, "ms", done.DurationMS)
}

func (o output) flooded() bool { return o.stdout.Flooded() || o.stderr.Flooded() }

func (s *Service) output(c *call) output {
	limit := c.session.start.Policy.OutputBytesLimit
	f := &stream.Frames{Run: c.Run, Call: c.ID, Publish: func(f wire.Frame) bool {
		return s.Live.Publish(c.session.held.Session, f)
	}}
	flood := func() { c.cancel(flooded) }
	return output{
		frames: f,
		stdout: &stream.Limit{Max: limit, Flood: floodFactor * limit, OnFlood: flood, Next: f.Stream(wire.Stdout)},
		stderr: &stream.Limit{Max: limit, Flood: floodFactor * limit, OnFlood: flood, Next: f.Stream(wire.Stderr)},
	}
}

// perform runs the call and says how it ended, without its output.
func (s *Service) perform(c *call, out output) *wire.Done {
	script := c.Script
	if c.Blob != nil {
		var err error
		if script, err = s.Blobs.Get(c.ctx, *c.Blob); err != nil {
			return s.unstarted(c, err)
		}
	}
	if c.Program == wire.PythonTool {
		return s.performTool(c, script, out)
	}
	p := s.process(c, out)
	switch p.Program {
	case sandbox.FileWrite:
		p.Input = script
	case sandbox.FileRead:
		p.MaxRead = min(c.session.start.Policy.OutputBytesLimit, maxKept)
	default:
		p.Script, p.InArgv = script, c.InArgv
	}
	exit, err := c.session.box.Exec(c.ctx, p)
	if err != nil {
		return s.unstarted(c, err)
	}
	done := outcome(verdict{
		exit:    exit,
		program: p.Program,
		path:    c.Path,
		policy:  c.session.start.Policy,
		flooded: out.flooded(),
		stderr:  func() []byte { kept, _ := out.stderr.Kept(); return kept },
	})
	c.began(done)
	return done
}

// began adds when the program started, if it did.
func (c *call) began(done *wire.Done) {
	if !c.started.IsZero() {
		done.StartedAt = c.started.UnixMilli()
	}
}

// process is the call as the sandbox takes it, without its script.
func (s *Service) process(c *call, out output) sandbox.Process {
	policy := c.session.start.Policy
	return sandbox.Process{
		ID:      c.ID,
		Program: sandbox.Program(c.Program),
		Path:    c.Path,
		Wall:    time.Duration(policy.WallClockSeconds) * time.Second,
		Stdout:  out.stdout,
		Stderr:  out.stderr,
		Started: func() {
			c.started = s.Now()
			out.frames.Started()
		},
	}
}

// unstarted is the outcome of a call whose program never ran.
func (s *Service) unstarted(c *call, err error) *wire.Done {
	if c.ctx.Err() != nil {
		return end(endingOf(context.Cause(c.ctx)))
	}
	if errors.Is(err, sandbox.ErrClosed) {
		return failed("start_failed", fault.SessionLost, "The session's sandbox had ended before the call could start; nothing ran.")
	}
	s.Log.Error("call could not be started", "session", c.session.held.Session, "call", c.ID, "error", err)
	if errors.Is(err, errSecrets) {
		return failed("start_failed", fault.StartFailed, "The tool's valves are sealed to another key than this runner's; nothing ran. Check the runner's key file.")
	}
	if se, ok := errors.AsType[*sandbox.StartError](err); ok { // of the sandbox that installs packages
		return failed("start_failed", fault.Code(se.Code), "What the tool requires could not be installed now: %s. Nothing ran; try again.", short(se.Message))
	}
	if c.Blob != nil && errors.Is(err, stream.ErrBlob) {
		return failed("start_failed", fault.StartFailed, "The call's script or content could not be fetched whole; nothing ran.")
	}
	return failed("start_failed", fault.StartFailed, "The call could not be started; the runner's log says why.")
}

// attach puts the kept output into done, or beside it when it is large.
func (s *Service) attach(c *call, out output, done *wire.Done) {
	var cutOut, cutErr bool
	done.Stdout, cutOut = out.stdout.Fit(maxKept)
	done.Stderr, cutErr = out.stderr.Fit(maxKept)
	done.Truncated = done.Truncated || cutOut || cutErr
	done.StdoutBytes, done.StderrBytes = out.stdout.Total(), out.stderr.Total()
	if len(done.Stdout)+len(done.Stderr)+len(done.Value) <= wire.MaxInlineDone {
		return
	}
	all := make([]byte, 0, len(done.Stdout)+len(done.Stderr)+len(done.Value))
	all = append(append(append(all, done.Stdout...), done.Stderr...), done.Value...)
	blob, err := s.upload(c, all)
	if err != nil {
		s.shrink(c, out, done, err)
		return
	}
	done.Output = &blob
	done.OutputSizes = [3]int64{int64(len(done.Stdout)), int64(len(done.Stderr)), int64(len(done.Value))}
	done.Stdout, done.Stderr, done.Value = nil, nil, nil
}

// upload tries until it works or the runner shuts down: a call that was
// cancelled keeps its output.
func (s *Service) upload(c *call, data []byte) (wire.Blob, error) {
	for wait := 200 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		blob, err := s.Blobs.Put(s.uploads, data)
		if err == nil || s.uploads.Err() != nil || errors.Is(err, stream.ErrBlob) {
			return blob, err
		}
		s.Log.Warn("output could not be uploaded yet", "call", c.ID, "error", err)
		select {
		case <-time.After(wait):
		case <-s.uploads.Done():
		}
	}
}

// shrink keeps what fits into the report itself.
func (s *Service) shrink(c *call, out output, done *wire.Done, err error) {
	s.Log.Error("output could not be uploaded; the report carries a part of it", "call", c.ID, "error", err)
	done.Stdout, _ = out.stdout.Fit(wire.MaxInlineDone / 2)
	done.Stderr, _ = out.stderr.Fit(wire.MaxInlineDone / 2)
	done.Truncated = true
	if len(done.Value) > 0 {
		done.Value, done.HasValue, done.ValueKind = nil, false, ""
		done.Status = "error"
		done.Error = failed("", fault.ResultUnavailable, "The call has ended but its result could not be handed over.").Error
	}
}

package execution

import (
	"crypto/ecdh"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// tool is a call of a Python tool, opened.
type tool struct {
	wire.ToolRequest
	secrets wire.ToolSecrets
	replyTo *ecdh.PublicKey // describe, validate_valves
}

// Why a request is not carried out.
var (
	errRequest = errors.New("the request for the tool is malformed")
	errSecrets = errors.New("the tool's secrets are sealed to another key")
)

// openTool reads a call's request and opens what is sealed in it.
func (s *Service) openTool(call string, script []byte) (tool, error) {
	var t tool
	if err := strictjson.Decode(script, &t.ToolRequest); err != nil {
		return t, fmt.Errorf("%w: %w", errRequest, err)
	}
	if t.Op != wire.ToolCall {
		key, err := ecdh.X25519().NewPublicKey(t.ReplyTo)
		if err != nil {
			return t, fmt.Errorf("%w: %w", errRequest, err)
		}
		t.replyTo = key
	}
	if t.Sealed == nil {
		return t, nil
	}
	if s.Box == nil {
		return t, errSecrets
	}
	plain, err := envelope.OpenBox(s.Box, call, t.Sealed)
	if err != nil {
		return t, fmt.Errorf("%w: %w", errSecrets, err)
	}
	if strictjson.Decode(plain, &t.secrets) != nil { // its error could quote them
		return t, errRequest
	}
	return t, nil
}

// toolLimits keep what a tool returns within the policy.
func toolLimits(p wire.Policy) harness.Limits {
	return harness.Limits{Text: min(p.OutputBytesLimit, 1<<20), Attachments: min(p.OutputBytesLimit, 8<<20)}
}

// maxAnswer is more than the control plane keeps of what a source says of itself.
const maxAnswer = 6 << 20

// request is what the harness reads for c; paths are folders with packages. A
// function takes the session for the chat that it serves, and the run for the
// message.
func (t tool) request(c *call, l harness.Limits, paths []string) ([]byte, error) {
	source := harness.Tool{ID: t.ID, Content: t.Content, Paths: paths}
	switch t.Op {
	case wire.ToolDescribe:
		return harness.Describe{Tool: source, Valves: t.secrets.Valves}.Request(l)
	case wire.ToolValidate:
		return harness.ValidateValves{Tool: source, Which: harness.Which(t.Which), Values: t.secrets.Values}.Request(l)
	case wire.ToolCall:
		asked := harness.Call{
			Tool: source, Function: t.Function, Arguments: t.Arguments,
			Valves: t.secrets.Valves, UserValves: t.secrets.UserValves,
			ChatID: c.session.held.Session, MessageID: c.Run,
		}
		if u := t.secrets.User; u != nil {
			asked.User = harness.User{ID: u.ID, Name: u.Name, Role: u.Role}
		}
		var err error
		if asked.Metadata, err = strictjson.Encode(metadata{
			User: asked.User.ID, Chat: asked.ChatID, Message: asked.MessageID, Session: asked.ChatID,
		}); err != nil {
			return nil, err
		}
		return asked.Request(l)
	}
	return nil, errRequest
}

// metadata is what a function is told as __metadata__.
type metadata struct {
	User    string `json:"user_id"`
	Chat    string `json:"chat_id"`
	Message string `json:"message_id"`
	Session string `json:"session_id"`
}

// performTool carries out a call of a Python tool. What a source prints while
// it is described or validated is nobody's, and is dropped.
func (s *Service) performTool(c *call, script []byte, out output) *wire.Done {
	t, err := s.openTool(c.ID, script)
	if err != nil {
		return s.unstarted(c, err)
	}
	policy := c.session.start.Policy
	limits := toolLimits(policy)
	if t.Op != wire.ToolCall {
		limits.Line = maxAnswer
	}
	packages, err := s.packages(c, t)
	defer packages.Release()
	if e, ok := errors.AsType[*harness.Error](err); ok && c.ctx.Err() == nil {
		done, err := t.refused(c.ID, e)
		if err != nil {
			return s.unstarted(c, err)
		}
		return done
	}
	if l, ok := errors.AsType[*limited](err); ok && c.ctx.Err() == nil {
		done, err := t.ended(c.ID, l.exit, policy)
		if err != nil {
			return s.unstarted(c, err)
		}
		return done
	}
	if err != nil {
		return s.unstarted(c, err)
	}
	body, err := t.request(c, limits, folder(packages))
	if err != nil {
		return s.unstarted(c, err)
	}
	results := &harness.Results{Limits: limits}
	p := s.process(c, out)
	p.Program, p.Script, p.Results = sandbox.Harness, body, results
	if t.Op == wire.ToolCall {
		results.OnEvent = func(event json.RawMessage) { out.frames.Event(event) }
	} else {
		p.Stdout, p.Stderr = nil, nil
	}
	exit, err := c.session.box.Exec(c.ctx, p)
	if err != nil {
		return s.unstarted(c, err)
	}
	done := interpreted(exit, policy, out.flooded())
	if t.Op == wire.ToolCall {
		returned(done, results.Call(toolEnding(exit, policy)), out)
	} else if err := t.reply(c.ID, done, results, toolEnding(exit, policy)); err != nil {
		return s.unstarted(c, err)
	}
	c.began(done)
	return done
}

// toolEnding is how an interpreter ended, for a tool that said nothing itself.
func toolEnding(e sandbox.Exit, p wire.Policy) harness.Ending {
	return harness.Ending{
		Cancelled: e.Reason == sandbox.Killed || e.Reason == sandbox.Died,
		OOM:       e.OOM, MemoryMB: p.MemoryMB,
		PIDs: e.PIDsHit, PIDsLimit: p.PIDsLimit,
		TimedOut: e.Reason == sandbox.TimedOut, Wall: time.Duration(p.WallClockSeconds) * time.Second,
		DiskFull: e.DiskFull, Signal: e.Signal, Code: e.Code,
	}
}

// interpreted is the outcome of an interpreter of a tool; the tool's own word
// may follow.
func interpreted(e sandbox.Exit, p wire.Policy, flooded bool) *wire.Done {
	return outcome(verdict{exit: e, program: sandbox.Harness, policy: p, flooded: flooded, stderr: func() []byte { return nil }})
}

// byItself reports whether no limit and nobody else ended the call, so that
// the tool's own word counts.
func byItself(d *wire.Done) bool {
	return d.Status == "ok" || d.Status == "error" && d.Error.Code == string(fault.ToolFailed)
}

// returned puts what a function returned, or why it did not, into d.
func returned(d *wire.Done, r harness.CallResult, out output) {
	d.ExitCode = nil // of the interpreter: it says nothing more
	if !byItself(d) {
		return
	}
	if e := r.Error; e != nil {
		*d = *withUsage(toolFailed(e), d)
		if e.Traceback != "" {
			_, _ = fmt.Fprintf(out.stderr, "Traceback (most recent call last):\n%s\n%s\n", strings.TrimRight(e.Traceback, "\n"), e.Line())
		}
		return
	}
	result := wire.ToolResult{Type: r.Type, Text: &r.Text, Value: r.Value, Files: []wire.ToolFile{}, Embeds: r.Embeds, EventsDropped: r.EventsDropped}
	if r.Type == "NoneType" {
		result.Text = nil
	}
	if result.Embeds == nil {
		result.Embeds = []string{}
	}
	for _, f := range r.Files {
		result.Files = append(result.Files, wire.ToolFile(f))
	}
	value, err := strictjson.Encode(result)
	if err != nil {
		*d = *withUsage(failed("error", fault.ToolFailed, "What the tool returned can't be passed on."), d)
		return
	}
	d.Status, d.Error = "ok", nil
	d.Value, d.HasValue, d.ValueKind, d.Truncated = value, true, wire.PythonTool, r.Truncated
}

// toolFailed is the outcome of a function that raised, or never ran.
func toolFailed(e *harness.Error) *wire.Done {
	switch e.Kind {
	case harness.BadArguments:
		d := failed("invalid_arguments", fault.InvalidArguments, "%s", long(e.Sentence()))
		d.Error.Field = short(e.Argument)
		return d
	case harness.NoFunction:
		return failed("invalid_arguments", fault.UnknownTool, "%s", long(e.Sentence()))
	}
	return failed("error", fault.ToolFailed, "%s", long(e.Line()))
}

// withUsage is d with what the kernel counted for the call.
func withUsage(d, counted *wire.Done) *wire.Done {
	d.Signal, d.DurationMS, d.CPUMS, d.MemoryPeak = counted.Signal, counted.DurationMS, counted.CPUMS, counted.MemoryPeak
	d.OOMKills, d.Denials = counted.OOMKills, counted.Denials
	return d
}

// reply boxes the answer to describe or validate_valves into d.
func (t tool) reply(call string, d *wire.Done, results *harness.Results, e harness.Ending) error {
	var answer wire.ToolAnswer
	var failure error
	if t.Op == wire.ToolDescribe {
		var found harness.Description
		if found, failure = results.Description(e); failure == nil {
			var err error
			if answer.Description, err = description(found); err != nil {
				return err
			}
		}
	} else {
		answer.Values, failure = results.Values(e)
	}
	if !byItself(d) { // whatever it said before: a limit was reached
		answer, failure = wire.ToolAnswer{}, e.Reason()
	}
	if he, ok := errors.AsType[*harness.Error](failure); ok {
		answer.Error = answered(he)
	}
	if byItself(d) {
		d.Status, d.Error = "ok", nil
	}
	return t.box(call, d, answer)
}

func answered(e *harness.Error) *wire.ToolError {
	return &wire.ToolError{Kind: string(e.Kind), Message: e.Sentence(), Module: e.Module}
}

// ended is the outcome of a tool that was not loaded, since a limit or somebody
// ended its interpreter before.
func (t tool) ended(call string, e sandbox.Exit, p wire.Policy) (*wire.Done, error) {
	d := interpreted(e, p, false)
	d.ExitCode = nil
	if t.Op == wire.ToolCall {
		return d, nil
	}
	return d, t.reply(call, d, &harness.Results{}, toolEnding(e, p))
}

// box puts an answer into d, to be read by who asked.
func (t tool) box(call string, d *wire.Done, answer wire.ToolAnswer) error {
	plain, err := strictjson.Encode(answer)
	if err != nil {
		return err
	}
	d.Value, err = envelope.SealBox(t.replyTo, call, plain)
	d.HasValue, d.ExitCode = true, nil
	return err
}

func description(d harness.Description) (*wire.ToolDescription, error) {
	specs, err := strictjson.Encode(d.Specs)
	if err != nil {
		return nil, err
	}
	if d.Specs == nil {
		specs = []byte("[]")
	}
	return &wire.ToolDescription{
		Specs: specs, Spoken: d.LiveDescriptions, Manifest: d.Manifest, Requirements: d.Requirements,
		Valves: d.ValvesSchema, UserValves: d.UserValvesSchema, Citation: d.Flags.Citation, FileHandler: d.Flags.FileHandler,
	}, nil
}

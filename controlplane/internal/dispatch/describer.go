package dispatch

import (
	"cmp"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// Throwaway makes the sandboxes in which sources are described.
type Throwaway interface {
	CreateInternal(ctx context.Context, workspace string) (session.Session, error)
	CloseInternal(ctx context.Context, c session.Session)
}

// Asker runs one invocation in such a sandbox.
type Asker interface {
	Ask(ctx context.Context, c session.Session, inv tool.Invocation) (run.Call, error)
}

// Runners counts the runners of a pool that take sessions.
type Runners interface {
	Any(ctx context.Context, pool string) (ready int, err error)
}

// DescriptionFormat is the version of what Describer says of sources.
const DescriptionFormat = wire.ToolDescriptions

// Describer runs the sources of Python tools, each in a sandbox of its own
// that is thrown away. It may be used from several goroutines.
type Describer struct {
	Sessions Throwaway
	Runs     Asker
	Fleet    Runners
	Pool     string
	Each     int           // at once for one workspace; 0: 4. More wait
	Wait     time.Duration // for an answer, with the wait for a sandbox; 0: 75 s

	mu    sync.Mutex
	slots map[string]*slots
}

// slots bounds what one workspace has described at once.
type slots struct {
	free  chan struct{}
	users int
}

// Describe implements pytool.Describer.
func (d *Describer) Describe(ctx context.Context, src pytool.Source, valves json.RawMessage) (pytool.Description, error) {
	a, err := d.ask(ctx, src, tool.Inquiry{Ask: tool.Describe, Values: valves})
	if err != nil {
		return pytool.Description{}, err
	}
	if a.Description == nil {
		return pytool.Description{}, errAnswer
	}
	return describedTool(*a.Description)
}

// ValidateValves implements pytool.Describer.
func (d *Describer) ValidateValves(ctx context.Context, src pytool.Source, v pytool.ValvesCheck) (json.RawMessage, error) {
	a, err := d.ask(ctx, src, tool.Inquiry{Ask: tool.ValidateValves, Which: v.Which, Values: v.Values})
	if err == nil && a.Values == nil {
		err = errAnswer
	}
	return a.Values, err
}

// errAnswer is the answer to a runner whose word on a tool makes no sense.
var errAnswer = errors.New("a runner's answer about a Python tool can't be read")

// ask runs a source once and returns what was found out. Only this process can
// read the answer: values are secrets, and it passes the bus and the database.
func (d *Describer) ask(ctx context.Context, src pytool.Source, q tool.Inquiry) (wire.ToolAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(d.Wait, 75*time.Second))
	defer cancel()
	leave, err := d.enter(ctx, src.Workspace)
	if err != nil {
		return wire.ToolAnswer{}, err
	}
	defer leave()
	if ready, err := d.Fleet.Any(ctx, d.Pool); err != nil || ready == 0 {
		if err == nil {
			err = fault.New(fault.Unavailable, "no runner can run the tool's source; nothing was stored").WithCode(string(fault.NoRunner))
		}
		return wire.ToolAnswer{}, err
	}
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return wire.ToolAnswer{}, fmt.Errorf("make a reply key: %w", err)
	}
	q.ID, q.Content, q.ReplyTo = src.ID, src.Content, key.PublicKey().Bytes()
	c, err := d.Sessions.CreateInternal(ctx, src.Workspace)
	if err != nil {
		return wire.ToolAnswer{}, err
	}
	defer d.Sessions.CloseInternal(ctx, c)
	call, err := d.Runs.Ask(ctx, c, tool.Invocation{Program: tool.PythonTool, Inquiry: &q})
	if err != nil {
		return wire.ToolAnswer{}, err
	}
	return answer(key, call)
}

// enter waits until the workspace may have one more source described.
func (d *Describer) enter(ctx context.Context, workspace string) (leave func(), err error) {
	d.mu.Lock()
	if d.slots == nil {
		d.slots = map[string]*slots{}
	}
	s := d.slots[workspace]
	if s == nil {
		s = &slots{free: make(chan struct{}, cmp.Or(d.Each, 4))}
		d.slots[workspace] = s
	}
	s.users++
	d.mu.Unlock()
	gone := func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if s.users--; s.users == 0 {
			delete(d.slots, workspace)
		}
	}
	select {
	case s.free <- struct{}{}:
		return func() { <-s.free; gone() }, nil
	case <-ctx.Done():
		gone()
		return nil, fault.New(fault.Unavailable, "too many tools of the workspace are being described; try again").WithCode(string(fault.Capacity))
	}
}

// answer is what a final call says of a source. A fault of kind Invalid is
// the source's, of Unavailable ours.
func answer(key *ecdh.PrivateKey, c run.Call) (wire.ToolAnswer, error) {
	var a wire.ToolAnswer
	if !c.Result.HasValue {
		return a, unasked(c)
	}
	plain, err := envelope.OpenBox(key, c.ID, c.Result.Value)
	if err != nil || strictjson.Decode(plain, &a) != nil {
		return wire.ToolAnswer{}, errAnswer
	}
	switch c.Status {
	case run.OK:
	case run.TimedOut, run.OOMKilled, run.PIDsExhausted, run.DiskFull, run.OutputLimit:
		if a.Error == nil {
			return wire.ToolAnswer{}, errAnswer
		}
	default: // it was ended from outside, whatever it looks like
		return wire.ToolAnswer{}, unasked(c)
	}
	if a.Error != nil {
		return wire.ToolAnswer{}, fault.New(fault.Invalid, "%s", clip(a.Error.Message, maxText)).WithCode(toolCode(a.Error.Kind))
	}
	return a, nil
}

// toolCode is a kind of failure as a code; a strange one is left out.
func toolCode(kind string) string {
	if !codeToken.MatchString(kind) {
		return ""
	}
	return "tool_" + kind
}

// unasked is why a source could not be described, which says nothing of it.
func unasked(c run.Call) error {
	code, why := "", "the sandbox ended first"
	if e := c.Result.Error; e != nil {
		code, why = e.Code, e.Message
	}
	if !c.Status.Final() {
		code, why = string(fault.Capacity), "no runner answered in time"
	}
	return fault.New(fault.Unavailable, "the tool's source could not be run, nothing was stored; try again: %s", clip(why, 500)).WithCode(code)
}

func describedTool(d wire.ToolDescription) (pytool.Description, error) {
	manifest := d.Manifest
	if manifest == nil {
		manifest = map[string]string{}
	}
	raw, err := strictjson.Encode(manifest)
	if err != nil {
		return pytool.Description{}, errAnswer
	}
	return pytool.Description{
		Specs: d.Specs, Spoken: d.Spoken, Manifest: raw, Valves: d.Valves, UserValves: d.UserValves,
		Citation: d.Citation, FileHandler: d.FileHandler,
	}, nil
}

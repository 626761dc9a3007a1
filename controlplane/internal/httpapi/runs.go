package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

const (
	maxWait = time.Hour

	firstWait = 10 * time.Second // before the policy is asked how long a call may take
	waitGrace = 30 * time.Second // over the policy's wall clock
)

// Runs starts runs and tells how they go; another's are not found.
type Runs interface {
	// Start returns once the run can no longer be lost.
	Start(ctx context.Context, p identity.Principal, session string, r run.Request) (run.Run, error)
	// Wait returns the run once it is final, or as it is when ctx ends.
	Wait(ctx context.Context, p identity.Principal, session, id string) (run.Run, error)
	Get(ctx context.Context, p identity.Principal, session, id string) (run.Run, error)
	List(ctx context.Context, p identity.Principal, session string, pg page.Page) ([]run.Run, string, error)
	Cancel(ctx context.Context, p identity.Principal, session, id string) (run.Run, error)
}

type startRunRequest struct {
	ToolCalls given[callList] `json:"tool_calls"`
	ToolIDs   given[[]string] `json:"tool_ids"`
	Parallel  given[bool]     `json:"parallel"`
	Stream    given[bool]     `json:"stream"`
}

// callList keeps at most one call too many.
type callList []given[toolCall]

// UnmarshalJSONFrom skips what is past the cap.
func (l *callList) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() != '[' {
		return &jsonv2.SemanticError{JSONKind: dec.PeekKind(), JSONPointer: dec.StackPointer(), GoType: reflect.TypeFor[[]toolCall]()}
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	for dec.PeekKind() != ']' {
		if len(*l) > run.MaxCalls {
			if err := dec.SkipValue(); err != nil {
				return err
			}
			continue
		}
		var c given[toolCall]
		if err := jsonv2.UnmarshalDecode(dec, &c); err != nil {
			return err
		}
		*l = append(*l, c)
	}
	_, err := dec.ReadToken()
	return err
}

type toolCall struct {
	ID        given[string]         `json:"id"`
	Name      given[string]         `json:"name"`
	Arguments given[jsontext.Value] `json:"arguments"`
}

func (in startRunRequest) run() (run.Request, error) {
	if err := required("", named{"tool_calls", in.ToolCalls.Set}); err != nil {
		return run.Request{}, err
	}
	if n := len(in.ToolCalls.Value); n < 1 || n > run.MaxCalls {
		return run.Request{}, fault.New(fault.Invalid, "tool_calls must hold from 1 to %d calls", run.MaxCalls).On("tool_calls")
	}
	out := run.Request{Parallel: in.Parallel.Value, ToolIDs: in.ToolIDs.Value}
	seen := map[string]bool{}
	for i, g := range in.ToolCalls.Value {
		at := fmt.Sprintf("tool_calls[%d].", i)
		call, err := g.Value.call(at)
		if err != nil {
			return run.Request{}, err
		}
		if seen[call.ID] {
			return run.Request{}, fault.New(fault.Invalid, "%sid is used by an earlier call of this run", at).On(at + "id")
		}
		seen[call.ID] = true
		out.Calls = append(out.Calls, call)
	}
	return out, nil
}

func (t toolCall) call(at string) (run.ToolCall, error) {
	err := required(at, named{"id", t.ID.Set}, named{"name", t.Name.Set}, named{"arguments", t.Arguments.Set})
	if err != nil {
		return run.ToolCall{}, err
	}
	if err := shortText(at+"id", t.ID.Value, run.MaxClientID); err != nil {
		return run.ToolCall{}, err
	}
	if err := shortText(at+"name", t.Name.Value, run.MaxName); err != nil {
		return run.ToolCall{}, err
	}
	args, err := object(t.Arguments.Value)
	if err != nil {
		return run.ToolCall{}, fault.Wrap(err, fault.Invalid, "%sarguments must be an object, or a string that holds one", at).On(at + "arguments")
	}
	return run.ToolCall{ID: t.ID.Value, Name: t.Name.Value, Arguments: args}, nil
}

func shortText(field, s string, limit int) error {
	if s == "" || len(s) > limit || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return fault.New(fault.Invalid, "%s must be 1 to %d bytes without control characters", field, limit).On(field)
	}
	return nil
}

// object admits arguments as models send them: an object, or a string that
// holds one or, for a function that takes none, nothing.
func object(v jsontext.Value) (json.RawMessage, error) {
	if v.Kind() == '"' {
		var s string
		if err := strictjson.Decode(v, &s); err != nil {
			return nil, err
		}
		v = jsontext.Value(or(s, "{}"))
		if err := strictjson.Decode(v, new(jsontext.Value)); err != nil {
			return nil, err
		}
	}
	if v.Kind() != '{' {
		return nil, fmt.Errorf("kind %s", v.Kind())
	}
	return json.RawMessage(v), nil
}

func (s *Server) startRun(c echo.Context) error {
	var in startRunRequest
	if err := decode(c, maxRunBody, &in); err != nil {
		return err
	}
	req, err := in.run()
	if err != nil {
		return err
	}
	wait, err := waitOf(c)
	if err != nil {
		return err
	}
	// The run outlives its client from here on.
	ctx := context.WithoutCancel(c.Request().Context())
	started, err := s.Runs.Start(ctx, principal(c), c.Param("session"), req)
	if err != nil {
		return err
	}
	if in.Stream.Value || wantsStream(c.Request()) {
		return s.stream(c, started, resume{})
	}
	return s.answerRun(c, started, wait)
}

// answerRun waits for the run's end and writes it, or 202 with the run so far
// when the wait is over.
func (s *Server) answerRun(c echo.Context, r run.Run, wait *time.Duration) error {
	r, err := s.waitFor(c, r, wait)
	if err != nil {
		return err
	}
	s.observer.ended(r)
	if r.Status.Final() {
		return write(c, http.StatusOK, newRunResponse(r))
	}
	c.Response().Header().Set("Location", "/v1/agent-sessions/"+r.Session+"/runs/"+r.ID)
	return write(c, http.StatusAccepted, newRunResponse(r))
}

func (s *Server) waitFor(c echo.Context, r run.Run, wait *time.Duration) (run.Run, error) {
	ctx, p := c.Request().Context(), principal(c)
	if r.Status.Final() || wait != nil && *wait == 0 {
		return r, nil
	}
	if wait != nil {
		return s.wait(ctx, p, r, *wait)
	}
	// Most runs end long before it matters what the policy says.
	r, err := s.wait(ctx, p, r, firstWait)
	if err != nil || r.Status.Final() || ctx.Err() != nil {
		return r, err
	}
	pol, err := s.Policies.Get(ctx, p)
	if err != nil {
		return r, err
	}
	whole := time.Duration(pol.WallClockSeconds)*time.Second + waitGrace
	return s.wait(ctx, p, r, min(whole, maxWait)-firstWait)
}

func (s *Server) wait(ctx context.Context, p identity.Principal, r run.Run, d time.Duration) (run.Run, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return s.Runs.Wait(ctx, p, r.Session, r.ID)
}

// waitOf reads ?wait, a number of seconds; nil when it is absent.
func waitOf(c echo.Context) (*time.Duration, error) {
	raw, err := query(c, "wait")
	if err != nil || raw == "" {
		return nil, err
	}
	n, err := strconv.ParseFloat(raw, 64)
	if err != nil || !(n >= 0 && n <= maxWait.Seconds()) {
		return nil, fault.New(fault.Invalid, "wait must be a number of seconds from 0 to %.0f", maxWait.Seconds()).On("wait")
	}
	d := time.Duration(n * float64(time.Second))
	return &d, nil
}

func wantsStream(r *http.Request) bool {
	for _, part := range strings.Split(strings.Join(r.Header.Values("Accept"), ","), ",") {
		media, params, err := mime.ParseMediaType(part)
		if err != nil || media != "text/event-stream" {
			continue
		}
		if q, err := strconv.ParseFloat(or(params["q"], "1"), 64); err == nil && q > 0 {
			return true
		}
	}
	return false
}

func (s *Server) listRuns(c echo.Context) error {
	pg, err := pageOf(c)
	if err != nil {
		return err
	}
	found, next, err := s.Runs.List(c.Request().Context(), principal(c), c.Param("session"), pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newListedRun))
}

func (s *Server) getRun(c echo.Context) error {
	found, err := s.Runs.Get(c.Request().Context(), principal(c), c.Param("session"), c.Param("run"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newRunResponse(found))
}

func (s *Server) cancelRun(c echo.Context) error {
	ctx := context.WithoutCancel(c.Request().Context())
	r, err := s.Runs.Cancel(ctx, principal(c), c.Param("session"), c.Param("run"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newRunResponse(r))
}

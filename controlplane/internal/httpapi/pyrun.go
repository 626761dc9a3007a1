package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// runFunctionRequest asks for one call of one function of a Python tool.
type runFunctionRequest struct {
	Name      given[string]  `json:"name"`
	Arguments jsontext.Value `json:"arguments"` // what is missing, null or "" is {}
	Session   given[string]  `json:"session_id"`
	Stream    given[bool]    `json:"stream"`
}

// A call without a session has one of its own, for as long as it takes.
const ownSessionIdle = time.Minute

// runPythonTool runs one function for who may use the tool. It answers with
// the call, or streams what it does.
func (s *Server) runPythonTool(c echo.Context) error {
	var in runFunctionRequest
	if err := decode(c, maxRunBody, &in); err != nil {
		return err
	}
	req, err := s.functionRun(c, in)
	if err != nil {
		return err
	}
	wait, err := waitOf(c)
	if err != nil {
		return err
	}
	ctx, p := context.WithoutCancel(c.Request().Context()), principal(c)
	id := in.Session.Value
	if !in.Session.Set {
		own, err := s.Sessions.Create(ctx, p, session.NewSession{IdleTTL: ownSessionIdle})
		if err != nil {
			return err
		}
		id = own.ID
	}
	r, err := s.Runs.Start(ctx, p, id, req)
	switch {
	case err != nil:
	case in.Stream.Value || wantsStream(c.Request()):
		err = s.stream(c, r, resume{})
		if got, getErr := s.Runs.Get(ctx, p, r.Session, r.ID); getErr == nil {
			r = got
		}
	default:
		r, err = s.answerCall(c, r, wait)
	}
	// What still runs goes on; then the session's idle time ends it.
	if !in.Session.Set && (r.ID == "" || r.Status.Final()) {
		if closeErr := s.Sessions.Close(ctx, p, id); closeErr != nil {
			s.Log.WarnContext(ctx, "session of a call stays until it is idle", "session", id, "error", closeErr)
		}
	}
	return err
}

// functionRun is the run that in asks for.
func (s *Server) functionRun(c echo.Context, in runFunctionRequest) (run.Request, error) {
	ctx, p, id := c.Request().Context(), principal(c), c.Param("id")
	if _, err := s.PythonTools.Get(ctx, p, id); err != nil {
		return run.Request{}, err
	}
	if err := required("", named{"name", in.Name.Set}); err != nil {
		return run.Request{}, err
	}
	arguments := in.Arguments
	if len(arguments) == 0 || arguments.Kind() == 'n' {
		arguments = jsontext.Value("{}")
	}
	args, err := object(arguments)
	if err != nil {
		return run.Request{}, fault.Wrap(err, fault.Invalid, "arguments must be an object, or a string that holds one").On("arguments")
	}
	registry, err := s.Registry(ctx, p, []string{id})
	if err != nil {
		return run.Request{}, err
	}
	t, ok := registry.Function(id, in.Name.Value)
	if !ok {
		return run.Request{}, fault.New(fault.Invalid, "the tool %q has no function %.100q", id, in.Name.Value).On("name").WithCode(string(fault.UnknownTool))
	}
	call := run.ToolCall{ID: in.Name.Value, Name: t.Name, Arguments: args}
	if shortText("name", call.ID, run.MaxClientID) != nil {
		call.ID = "call"
	}
	return run.Request{Calls: []run.ToolCall{call}, ToolIDs: []string{id}}, nil
}

// answerCall waits for the run of one call and writes the call, or 202 with
// the run so far.
func (s *Server) answerCall(c echo.Context, r run.Run, wait *time.Duration) (run.Run, error) {
	r, err := s.waitFor(c, r, wait)
	if err != nil {
		return r, err
	}
	s.observer.ended(r)
	if r.Status.Final() {
		return r, write(c, http.StatusOK, newCallResponse(r.Calls[0]))
	}
	c.Response().Header().Set("Location", "/v1/agent-sessions/"+r.Session+"/runs/"+r.ID)
	return r, write(c, http.StatusAccepted, newRunResponse(r))
}

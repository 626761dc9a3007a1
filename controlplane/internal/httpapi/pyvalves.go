package httpapi

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
)

// pythonValves is what tools are set to, for all and by each user.
type pythonValves interface {
	Valves(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error)
	ValvesSchema(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error)
	SetValves(ctx context.Context, p identity.Principal, id string, v pytool.Values) (json.RawMessage, error)
	UserValves(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error)
	UserValvesSchema(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error)
	SetUserValves(ctx context.Context, p identity.Principal, id string, v pytool.Values) (json.RawMessage, error)
}

// answerValves writes what read returns for the tool of the path.
func (s *Server) answerValves(c echo.Context, read func(context.Context, identity.Principal, string) (json.RawMessage, error)) error {
	found, err := read(c.Request().Context(), principal(c), c.Param("id"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, rawOrNull(found))
}

// takeValves hands the values of the body to set and writes what was set.
func (s *Server) takeValves(c echo.Context, set func(context.Context, identity.Principal, string, pytool.Values) (json.RawMessage, error)) error {
	var in map[string]jsontext.Value
	if err := decodeKnown(c, &in); err != nil {
		return err
	}
	values := pytool.Values{}
	for name, v := range in {
		values[name] = json.RawMessage(v)
	}
	kept, err := set(c.Request().Context(), principal(c), c.Param("id"), values)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, rawOrNull(kept))
}

func (s *Server) getPythonValves(c echo.Context) error {
	return s.answerValves(c, s.PythonTools.Valves)
}

func (s *Server) getPythonValvesSchema(c echo.Context) error {
	return s.answerValves(c, s.PythonTools.ValvesSchema)
}

func (s *Server) setPythonValves(c echo.Context) error {
	return s.takeValves(c, s.PythonTools.SetValves)
}

func (s *Server) getPythonUserValves(c echo.Context) error {
	return s.answerValves(c, s.PythonTools.UserValves)
}

func (s *Server) getPythonUserValvesSchema(c echo.Context) error {
	return s.answerValves(c, s.PythonTools.UserValvesSchema)
}

func (s *Server) setPythonUserValves(c echo.Context) error {
	return s.takeValves(c, s.PythonTools.SetUserValves)
}

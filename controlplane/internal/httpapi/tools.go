package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// Tools keeps the caller's workspace's own tools. A match is the value of an
// If-Match header, empty when there was none.
type Tools interface {
	List(ctx context.Context, p identity.Principal) ([]tool.Spec, error)
	Get(ctx context.Context, p identity.Principal, name string) (tool.Spec, error)
	Put(ctx context.Context, p identity.Principal, name string, spec tool.Spec, match string) (tool.Spec, error)
	Delete(ctx context.Context, p identity.Principal, name, match string) error
}

// putToolRequest has exactly the members of toolResponse, so that what GET
// gives PUT takes. The name of the path wins over the body's.
type putToolRequest struct {
	Name        given[string]         `json:"name"`
	Description given[string]         `json:"description"`
	Parameters  given[jsontext.Value] `json:"parameters"`
	Kind        given[string]         `json:"handler_kind"`
	Payload     given[jsontext.Value] `json:"handler_payload"`
}

type toolResponse struct {
	Name        string         `json:"name"`
	Description string         `json:"description"`
	Parameters  jsontext.Value `json:"parameters"`
	Kind        string         `json:"handler_kind"`
	Payload     jsontext.Value `json:"handler_payload"`
}

func newToolResponse(s tool.Spec) toolResponse {
	return toolResponse{
		Name: s.Name, Description: s.Description, Kind: string(s.Kind),
		Parameters: orEmpty(s.Parameters), Payload: orEmpty(s.Payload),
	}
}

func orEmpty(raw json.RawMessage) jsontext.Value {
	if len(raw) == 0 {
		return jsontext.Value("{}")
	}
	return jsontext.Value(raw)
}

func (in putToolRequest) spec() (tool.Spec, error) {
	if err := required("", named{"handler_kind", in.Kind.Set}); err != nil {
		return tool.Spec{}, err
	}
	for name, g := range map[string]given[jsontext.Value]{"parameters": in.Parameters, "handler_payload": in.Payload} {
		if g.Set && g.Value.Kind() != '{' {
			return tool.Spec{}, fault.New(fault.Invalid, "%s must be an object", name).On(name)
		}
	}
	return tool.Spec{
		Description: in.Description.Value, Kind: tool.Kind(in.Kind.Value),
		Parameters: json.RawMessage(in.Parameters.Value), Payload: json.RawMessage(in.Payload.Value),
	}, nil
}

func (s *Server) listWorkspaceTools(c echo.Context) error {
	found, err := s.Tools.List(c.Request().Context(), principal(c))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, "", newToolResponse).Items)
}

func (s *Server) getWorkspaceTool(c echo.Context) error {
	found, err := s.Tools.Get(c.Request().Context(), principal(c), c.Param("name"))
	if err != nil {
		return err
	}
	return writeTool(c, found)
}

func (s *Server) putWorkspaceTool(c echo.Context) error {
	var in putToolRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	spec, err := in.spec()
	if err != nil {
		return err
	}
	kept, err := s.Tools.Put(c.Request().Context(), principal(c), c.Param("name"), spec, ifMatch(c))
	if err != nil {
		return err
	}
	return writeTool(c, kept)
}

func (s *Server) deleteWorkspaceTool(c echo.Context) error {
	if err := s.Tools.Delete(c.Request().Context(), principal(c), c.Param("name"), ifMatch(c)); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

func writeTool(c echo.Context, spec tool.Spec) error {
	c.Response().Header().Set("ETag", tool.ETag(spec))
	return write(c, http.StatusOK, newToolResponse(spec))
}

func ifMatch(c echo.Context) string { return c.Request().Header.Get("If-Match") }

type registryResponse struct {
	Tools []registryTool `json:"tools"`
}

type registryTool struct {
	Type             string           `json:"type"` // always "function"
	Function         registryFunction `json:"function"`
	Source           string           `json:"source"`
	OverridesBuiltin bool             `json:"overrides_builtin"`
}

type registryFunction struct {
	Name        string         `json:"name"`
	Description string         `json:"description"`
	Parameters  jsontext.Value `json:"parameters"`
}

func newRegistryTool(t tool.Tool) registryTool {
	return registryTool{
		Type:     "function",
		Function: registryFunction{Name: t.Name, Description: t.Description, Parameters: orEmpty(t.Parameters)},
		Source:   t.Source, OverridesBuiltin: t.OverridesBuiltin,
	}
}

func (s *Server) listTools(c echo.Context) error {
	named, err := query(c, "tool_ids")
	if err != nil {
		return err
	}
	var ids []string
	if named != "" {
		ids = strings.Split(named, ",")
	}
	reg, err := s.Registry(c.Request().Context(), principal(c), ids)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, registryResponse{Tools: newList(reg.List(), "", newRegistryTool).Items})
}

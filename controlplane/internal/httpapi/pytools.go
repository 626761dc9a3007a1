package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// PythonTools keeps the Python tools of the caller's workspace, as clients of
// Open WebUI know them.
type PythonTools interface {
	List(ctx context.Context, p identity.Principal) ([]pytool.Seen, error)
	Export(ctx context.Context, p identity.Principal) ([]pytool.Seen, error)
	Get(ctx context.Context, p identity.Principal, id string) (pytool.Seen, error)
	Create(ctx context.Context, p identity.Principal, f pytool.Form) (pytool.Tool, error)
	Update(ctx context.Context, p identity.Principal, id string, f pytool.Form) (pytool.Tool, error)
	SetAccess(ctx context.Context, p identity.Principal, id string, grants []pytool.Grant) (pytool.Tool, error)
	Delete(ctx context.Context, p identity.Principal, id string) error
	LoadURL(ctx context.Context, p identity.Principal, url string) (name, content string, err error)
	pythonValves
}

// asOpenWebUI answers as its clients expect: what the caller may not is 401.
func asOpenWebUI(handle func(*Server, echo.Context) error) func(*Server, echo.Context) error {
	return func(s *Server, c echo.Context) error {
		err := handle(s, c)
		if fault.Is(err, fault.Forbidden) {
			return fault.Wrap(err, fault.Unauthenticated, "%s", fault.From(err).Message).WithCode("not_permitted")
		}
		return err
	}
}

// pythonTool is what every answer tells of a tool. Content is left out, null
// in lists, or the source.
type pythonTool struct {
	ID        string         `json:"id"`
	UserID    string         `json:"user_id"`
	Name      string         `json:"name"`
	Content   jsontext.Value `json:"content,omitzero"`
	Specs     jsontext.Value `json:"specs"`
	Meta      pythonToolMeta `json:"meta"`
	Grants    []accessGrant  `json:"access_grants"`
	UpdatedAt int64          `json:"updated_at"` // Unix seconds
	CreatedAt int64          `json:"created_at"`
}

type pythonToolMeta struct {
	Description   *string        `json:"description"`
	Manifest      jsontext.Value `json:"manifest"`
	HasUserValves bool           `json:"has_user_valves"`
}

type accessGrant struct {
	ID            string `json:"id"`
	ResourceType  string `json:"resource_type"` // always "tool"
	ResourceID    string `json:"resource_id"`
	PrincipalType string `json:"principal_type"`
	PrincipalID   string `json:"principal_id"`
	Permission    string `json:"permission"`
	CreatedAt     int64  `json:"created_at"`
}

// usablePythonTool is what a tool's users are told.
type usablePythonTool struct {
	pythonTool
	User          *pythonToolUser `json:"user"`
	HasUserValves bool            `json:"has_user_valves"`
}

// accessPythonTool says as well whether the caller may change it.
type accessPythonTool struct {
	usablePythonTool
	WriteAccess bool `json:"write_access"`
}

type pythonToolUser struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Role  string `json:"role"`
	Email string `json:"email"` // always empty: none is known
}

func newPythonTool(t pytool.Tool) pythonTool {
	return pythonTool{
		ID: t.ID, UserID: t.Owner, Name: t.Name, Specs: jsontext.Value(t.Specs),
		Meta:      pythonToolMeta{Description: t.Description, Manifest: jsontext.Value(t.Manifest), HasUserValves: t.UserValves != nil},
		Grants:    newList(t.Grants, "", func(g pytool.Grant) accessGrant { return newAccessGrant(t.ID, g) }).Items,
		UpdatedAt: unix(t.UpdatedAt), CreatedAt: unix(t.CreatedAt),
	}
}

func newAccessGrant(tool string, g pytool.Grant) accessGrant {
	return accessGrant{
		ID: g.ID, ResourceType: "tool", ResourceID: tool, PrincipalType: g.PrincipalType, PrincipalID: g.PrincipalID,
		Permission: g.Permission, CreatedAt: unix(g.CreatedAt),
	}
}

// newWholePythonTool has the source.
func newWholePythonTool(t pytool.Tool) (pythonTool, error) {
	out := newPythonTool(t)
	content, err := marshal(t.Content)
	out.Content = content
	return out, err
}

// newExportedPythonTool has it when the caller may change the tool.
func newExportedPythonTool(t pytool.Seen) (pythonTool, error) {
	if !t.Write {
		return newPythonTool(t.Tool), nil
	}
	return newWholePythonTool(t.Tool)
}

func newListedPythonTool(t pytool.Seen) usablePythonTool {
	out := newUsablePythonTool(newPythonTool(t.Tool), t)
	out.Content = jsontext.Value("null")
	if t.OwnedBy != nil {
		out.User = &pythonToolUser{ID: t.OwnedBy.ID, Name: t.OwnedBy.Name, Role: "user"}
		if t.OwnedBy.Admin {
			out.User.Role = "admin"
		}
	}
	return out
}

func newUsablePythonTool(out pythonTool, t pytool.Seen) usablePythonTool {
	return usablePythonTool{pythonTool: out, HasUserValves: t.UserValves != nil}
}

func unix(t time.Time) int64 { return t.Unix() }

func (s *Server) listPythonTools(c echo.Context) error {
	found, err := s.PythonTools.List(c.Request().Context(), principal(c))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, "", newListedPythonTool).Items)
}

func (s *Server) listPythonToolAccess(c echo.Context) error {
	found, err := s.PythonTools.List(c.Request().Context(), principal(c))
	if err != nil {
		return err
	}
	access := func(t pytool.Seen) accessPythonTool { return accessPythonTool{newListedPythonTool(t), t.Write} }
	return write(c, http.StatusOK, newList(found, "", access).Items)
}

func (s *Server) exportPythonTools(c echo.Context) error {
	found, err := s.PythonTools.Export(c.Request().Context(), principal(c))
	if err != nil {
		return err
	}
	out := make([]pythonTool, len(found))
	for i, t := range found {
		if out[i], err = newExportedPythonTool(t); err != nil {
			return err
		}
	}
	return write(c, http.StatusOK, out)
}

func (s *Server) getPythonTool(c echo.Context) error {
	found, err := s.PythonTools.Get(c.Request().Context(), principal(c), c.Param("id"))
	if err != nil {
		return err
	}
	out, err := newExportedPythonTool(found)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, accessPythonTool{newUsablePythonTool(out, found), found.Write})
}

func (s *Server) createPythonTool(c echo.Context) error {
	form, err := pythonToolForm(c)
	if err != nil {
		return err
	}
	made, err := s.PythonTools.Create(c.Request().Context(), principal(c), form)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newPythonTool(made))
}

func (s *Server) updatePythonTool(c echo.Context) error {
	form, err := pythonToolForm(c)
	if err != nil {
		return err
	}
	changed, err := s.PythonTools.Update(c.Request().Context(), principal(c), c.Param("id"), form)
	return writePythonTool(c, changed, err)
}

func (s *Server) updatePythonToolAccess(c echo.Context) error {
	var in accessRequest
	if err := decodeKnown(c, &in); err != nil {
		return err
	}
	grants, err := in.grants()
	if err != nil {
		return err
	}
	changed, err := s.PythonTools.SetAccess(c.Request().Context(), principal(c), c.Param("id"), grants)
	return writePythonTool(c, changed, err)
}

func writePythonTool(c echo.Context, t pytool.Tool, err error) error {
	if err != nil {
		return err
	}
	out, err := newWholePythonTool(t)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, out)
}

func (s *Server) deletePythonTool(c echo.Context) error {
	if err := s.PythonTools.Delete(c.Request().Context(), principal(c), c.Param("id")); err != nil {
		return err
	}
	return write(c, http.StatusOK, true)
}

type loadedTool struct {
	Name    string `json:"name"`
	Content string `json:"content"`
}

func (s *Server) loadPythonTool(c echo.Context) error {
	var in loadURLRequest
	if err := decodeKnown(c, &in); err != nil {
		return err
	}
	if err := required("", named{"url", in.URL.Set}); err != nil {
		return err
	}
	name, content, err := s.PythonTools.LoadURL(c.Request().Context(), principal(c), in.URL.Value)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, loadedTool{Name: name, Content: content})
}

// rawOrNull is stored JSON, or null.
func rawOrNull(raw json.RawMessage) jsontext.Value {
	if raw == nil {
		return jsontext.Value("null")
	}
	return jsontext.Value(raw)
}

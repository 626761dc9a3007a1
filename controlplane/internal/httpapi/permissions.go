package httpapi

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// putPermissionsRequest has the members of permissionsResponse, so that what
// GET gives PUT takes. Without groups theirs stay.
type putPermissionsRequest struct {
	Defaults given[permissionsDocument]                   `json:"defaults"`
	Groups   given[map[string]given[permissionsDocument]] `json:"groups"`
}

// permissionsDocument must have all its members.
type permissionsDocument struct {
	Tools       given[bool] `json:"workspace.tools"`
	ToolsImport given[bool] `json:"workspace.tools_import"`
	ToolsExport given[bool] `json:"workspace.tools_export"`
	PublicTools given[bool] `json:"sharing.public_tools"`
}

type permissionsResponse struct {
	Defaults permissionsAnswer            `json:"defaults"`
	Groups   map[string]permissionsAnswer `json:"groups"` // by group id
}

type permissionsAnswer struct {
	Tools       bool `json:"workspace.tools"`
	ToolsImport bool `json:"workspace.tools_import"`
	ToolsExport bool `json:"workspace.tools_export"`
	PublicTools bool `json:"sharing.public_tools"`
}

func newPermissionsAnswer(p identity.Permissions) permissionsAnswer {
	return permissionsAnswer{Tools: p.Tools, ToolsImport: p.ToolsImport, ToolsExport: p.ToolsExport, PublicTools: p.PublicTools}
}

func newPermissionsResponse(set identity.PermissionSet) permissionsResponse {
	out := permissionsResponse{Defaults: newPermissionsAnswer(set.Defaults), Groups: map[string]permissionsAnswer{}}
	for id, p := range set.Groups {
		out.Groups[id] = newPermissionsAnswer(p)
	}
	return out
}

func (in permissionsDocument) permissions(at string) (identity.Permissions, error) {
	err := required(at, named{"workspace.tools", in.Tools.Set}, named{"workspace.tools_import", in.ToolsImport.Set},
		named{"workspace.tools_export", in.ToolsExport.Set}, named{"sharing.public_tools", in.PublicTools.Set})
	return identity.Permissions{
		Tools: in.Tools.Value, ToolsImport: in.ToolsImport.Value,
		ToolsExport: in.ToolsExport.Value, PublicTools: in.PublicTools.Value,
	}, err
}

func (in putPermissionsRequest) set() (identity.PermissionSet, error) {
	var out identity.PermissionSet
	err := required("", named{"defaults", in.Defaults.Set})
	if err != nil {
		return out, err
	}
	if out.Defaults, err = in.Defaults.Value.permissions("defaults."); err != nil {
		return out, err
	}
	if !in.Groups.Set {
		return out, nil
	}
	out.Groups = map[string]identity.Permissions{}
	for id, doc := range in.Groups.Value {
		if out.Groups[id], err = doc.Value.permissions("groups." + id + "."); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (s *Server) getPermissions(c echo.Context) error {
	workspace, err := query(c, "workspace_id")
	if err != nil {
		return err
	}
	set, err := s.Identity.Permissions(c.Request().Context(), principal(c), workspace)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newPermissionsResponse(set))
}

func (s *Server) putPermissions(c echo.Context) error {
	workspace, err := query(c, "workspace_id")
	if err != nil {
		return err
	}
	var in putPermissionsRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	set, err := in.set()
	if err != nil {
		return err
	}
	kept, err := s.Identity.PutPermissions(c.Request().Context(), principal(c), workspace, set)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newPermissionsResponse(kept))
}

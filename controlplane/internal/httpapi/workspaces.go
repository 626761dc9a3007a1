package httpapi

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

type createWorkspaceRequest struct {
	ID   given[string] `json:"id"`
	Name given[string] `json:"name"`
}

type workspaceResponse struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	CreatedAt *time.Time `json:"created_at"`
}

func newWorkspaceResponse(w identity.Workspace) workspaceResponse {
	return workspaceResponse{ID: w.ID, Name: w.Name, CreatedAt: instant(w.CreatedAt)}
}

func (s *Server) listWorkspaces(c echo.Context) error {
	pg, err := pageOf(c)
	if err != nil {
		return err
	}
	found, next, err := s.Identity.Workspaces(c.Request().Context(), principal(c), pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newWorkspaceResponse))
}

func (s *Server) createWorkspace(c echo.Context) error {
	var in createWorkspaceRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	if err := required("", named{"id", in.ID.Set}); err != nil {
		return err
	}
	w := identity.Workspace{ID: in.ID.Value, Name: or(in.Name.Value, in.ID.Value)}
	made, err := s.Identity.CreateWorkspace(c.Request().Context(), principal(c), w)
	if err != nil {
		return err
	}
	return write(c, http.StatusCreated, newWorkspaceResponse(made))
}

func (s *Server) getWorkspace(c echo.Context) error {
	found, err := s.Identity.Workspace(c.Request().Context(), principal(c), c.Param("workspace"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newWorkspaceResponse(found))
}

func (s *Server) deleteWorkspace(c echo.Context) error {
	if err := s.Identity.DeleteWorkspace(c.Request().Context(), principal(c), c.Param("workspace")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

package httpapi

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

type createGroupRequest struct {
	WorkspaceID given[string] `json:"workspace_id"`
	Name        given[string] `json:"name"`
}

type updateGroupRequest struct {
	Name given[string] `json:"name"`
}

type addMemberRequest struct {
	UserID given[string] `json:"user_id"`
}

type groupResponse struct {
	ID          string     `json:"id"`
	WorkspaceID string     `json:"workspace_id"`
	Name        string     `json:"name"`
	CreatedAt   *time.Time `json:"created_at"`
}

func newGroupResponse(g identity.Group) groupResponse {
	return groupResponse{ID: g.ID, WorkspaceID: g.Workspace, Name: g.Name, CreatedAt: instant(g.CreatedAt)}
}

func (s *Server) listGroups(c echo.Context) error {
	pg, workspace, err := pageIn(c)
	if err != nil {
		return err
	}
	found, next, err := s.Identity.Groups(c.Request().Context(), principal(c), workspace, pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newGroupResponse))
}

func (s *Server) createGroup(c echo.Context) error {
	var in createGroupRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	if err := required("", named{"name", in.Name.Set}); err != nil {
		return err
	}
	g := identity.Group{Workspace: in.WorkspaceID.Value, Name: in.Name.Value}
	made, err := s.Identity.CreateGroup(c.Request().Context(), principal(c), g)
	if err != nil {
		return err
	}
	return write(c, http.StatusCreated, newGroupResponse(made))
}

func (s *Server) getGroup(c echo.Context) error {
	found, err := s.Identity.Group(c.Request().Context(), principal(c), c.Param("group"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newGroupResponse(found))
}

func (s *Server) updateGroup(c echo.Context) error {
	var in updateGroupRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	if err := required("", named{"name", in.Name.Set}); err != nil {
		return err
	}
	changed, err := s.Identity.RenameGroup(c.Request().Context(), principal(c), c.Param("group"), in.Name.Value)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newGroupResponse(changed))
}

func (s *Server) deleteGroup(c echo.Context) error {
	if err := s.Identity.DeleteGroup(c.Request().Context(), principal(c), c.Param("group")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

func (s *Server) listMembers(c echo.Context) error {
	pg, err := pageOf(c)
	if err != nil {
		return err
	}
	found, next, err := s.Identity.Members(c.Request().Context(), principal(c), c.Param("group"), pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newUserResponse))
}

func (s *Server) addMember(c echo.Context) error {
	var in addMemberRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	if err := required("", named{"user_id", in.UserID.Set}); err != nil {
		return err
	}
	added, err := s.Identity.AddMember(c.Request().Context(), principal(c), c.Param("group"), in.UserID.Value)
	if err != nil {
		return err
	}
	return write(c, http.StatusCreated, newUserResponse(added))
}

func (s *Server) removeMember(c echo.Context) error {
	if err := s.Identity.RemoveMember(c.Request().Context(), principal(c), c.Param("group"), c.Param("user")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

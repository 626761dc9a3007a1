package httpapi

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

type createUserRequest struct {
	WorkspaceID given[string] `json:"workspace_id"`
	Name        given[string] `json:"name"`
	Role        given[string] `json:"role"`
}

type updateUserRequest struct {
	Name     given[string] `json:"name"`
	Role     given[string] `json:"role"`
	Disabled given[bool]   `json:"disabled"`
}

type userResponse struct {
	ID          string     `json:"id"`
	WorkspaceID string     `json:"workspace_id"`
	Name        string     `json:"name"`
	Role        string     `json:"role"`
	Disabled    bool       `json:"disabled"`
	CreatedAt   *time.Time `json:"created_at"`
}

func newUserResponse(u identity.User) userResponse {
	return userResponse{
		ID: u.ID, WorkspaceID: u.Workspace, Name: u.Name, Role: string(u.Role),
		Disabled: u.Disabled, CreatedAt: instant(u.CreatedAt),
	}
}

func (in createUserRequest) user() (identity.User, error) {
	if err := required("", named{"name", in.Name.Set}); err != nil {
		return identity.User{}, err
	}
	return identity.User{Workspace: in.WorkspaceID.Value, Name: in.Name.Value, Role: identity.Role(in.Role.Value)}, nil
}

func (in updateUserRequest) change() identity.Change {
	var out identity.Change
	if in.Name.Set {
		out.Name = &in.Name.Value
	}
	if in.Disabled.Set {
		out.Disabled = &in.Disabled.Value
	}
	if in.Role.Set {
		role := identity.Role(in.Role.Value)
		out.Role = &role
	}
	return out
}

func (s *Server) listUsers(c echo.Context) error {
	pg, workspace, err := pageIn(c)
	if err != nil {
		return err
	}
	found, next, err := s.Identity.Users(c.Request().Context(), principal(c), workspace, pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newUserResponse))
}

func (s *Server) createUser(c echo.Context) error {
	var in createUserRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	u, err := in.user()
	if err != nil {
		return err
	}
	made, err := s.Identity.CreateUser(c.Request().Context(), principal(c), u)
	if err != nil {
		return err
	}
	return write(c, http.StatusCreated, newUserResponse(made))
}

func (s *Server) getUser(c echo.Context) error {
	found, err := s.Identity.User(c.Request().Context(), principal(c), c.Param("user"))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newUserResponse(found))
}

func (s *Server) updateUser(c echo.Context) error {
	var in updateUserRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	changed, err := s.Identity.UpdateUser(c.Request().Context(), principal(c), c.Param("user"), in.change())
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newUserResponse(changed))
}

func (s *Server) deleteUser(c echo.Context) error {
	if err := s.Identity.DeleteUser(c.Request().Context(), principal(c), c.Param("user")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

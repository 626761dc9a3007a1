package httpapi

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

type createKeyRequest struct {
	WorkspaceID given[string] `json:"workspace_id"`
	UserID      given[string] `json:"user_id"`
	Name        given[string] `json:"name"`
	ExpiresAt   given[string] `json:"expires_at"` // RFC 3339; absent: never
}

type keyResponse struct {
	ID          string     `json:"id"`
	WorkspaceID string     `json:"workspace_id"`
	UserID      string     `json:"user_id"`
	Name        string     `json:"name"`
	Hint        string     `json:"hint"`
	CreatedAt   *time.Time `json:"created_at"`
	ExpiresAt   *time.Time `json:"expires_at"`
	RevokedAt   *time.Time `json:"revoked_at"`
}

// newKey is the one answer that shows the secret.
type newKey struct {
	keyResponse
	Secret string `json:"secret"`
}

func newKeyResponse(k identity.APIKey) keyResponse {
	return keyResponse{
		ID: k.ID, WorkspaceID: k.Workspace, UserID: k.UserID, Name: k.Name, Hint: k.Hint,
		CreatedAt: instant(k.CreatedAt), ExpiresAt: instant(k.ExpiresAt), RevokedAt: instant(k.RevokedAt),
	}
}

func (in createKeyRequest) key() (identity.APIKey, error) {
	if err := required("", named{"user_id", in.UserID.Set}, named{"name", in.Name.Set}); err != nil {
		return identity.APIKey{}, err
	}
	k := identity.APIKey{Workspace: in.WorkspaceID.Value, UserID: in.UserID.Value, Name: in.Name.Value}
	if !in.ExpiresAt.Set {
		return k, nil
	}
	at, err := time.Parse(time.RFC3339, in.ExpiresAt.Value)
	if err != nil || at.IsZero() {
		return k, fault.New(fault.Invalid, "expires_at must be a time such as 2030-01-31T12:00:00Z").On("expires_at")
	}
	k.ExpiresAt = at
	return k, nil
}

func (s *Server) listKeys(c echo.Context) error {
	pg, workspace, err := pageIn(c)
	if err != nil {
		return err
	}
	found, next, err := s.Identity.Keys(c.Request().Context(), principal(c), workspace, pg)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newList(found, next, newKeyResponse))
}

func (s *Server) createKey(c echo.Context) error {
	var in createKeyRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	k, err := in.key()
	if err != nil {
		return err
	}
	made, secret, err := s.Identity.CreateKey(c.Request().Context(), principal(c), k)
	if err != nil {
		return err
	}
	return write(c, http.StatusCreated, newKey{newKeyResponse(made), secret})
}

func (s *Server) revokeKey(c echo.Context) error {
	if err := s.Identity.RevokeKey(c.Request().Context(), principal(c), c.Param("key")); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

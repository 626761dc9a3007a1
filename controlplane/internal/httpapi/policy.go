package httpapi

import (
	"context"
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
)

// Policies keeps the caller's workspace's sandbox policy.
type Policies interface {
	Get(ctx context.Context, p identity.Principal) (policy.Policy, error)
	Put(ctx context.Context, p identity.Principal, pol policy.Policy) (policy.Policy, error)
	Delete(ctx context.Context, p identity.Principal) error
}

// putPolicyRequest is the whole document: a policy is replaced, not amended.
type putPolicyRequest struct {
	WorkspaceID      given[string]          `json:"workspace_id"`
	FSAllowlist      given[[]given[string]] `json:"fs_allowlist"`
	NetworkAllowlist given[[]given[string]] `json:"network_allowlist"`
	CPUShares        given[int64]           `json:"cpu_shares"`
	MemoryMB         given[int64]           `json:"memory_mb"`
	PIDsLimit        given[int64]           `json:"pids_limit"`
	WallClockSeconds given[int64]           `json:"wall_clock_seconds"`
	OutputBytesLimit given[int64]           `json:"output_bytes_limit"`
	BaseImage        given[string]          `json:"base_image"`
}

type policyResponse struct {
	WorkspaceID      string   `json:"workspace_id"`
	FSAllowlist      []string `json:"fs_allowlist"`
	NetworkAllowlist []string `json:"network_allowlist"`
	CPUShares        int64    `json:"cpu_shares"`
	MemoryMB         int64    `json:"memory_mb"`
	PIDsLimit        int64    `json:"pids_limit"`
	WallClockSeconds int64    `json:"wall_clock_seconds"`
	OutputBytesLimit int64    `json:"output_bytes_limit"`
	BaseImage        string   `json:"base_image"`
}

func newPolicyResponse(p policy.Policy) policyResponse {
	return policyResponse{
		WorkspaceID: p.WorkspaceID, FSAllowlist: p.FSAllowlist, NetworkAllowlist: p.NetworkAllowlist,
		CPUShares: p.CPUShares, MemoryMB: p.MemoryMB, PIDsLimit: p.PIDsLimit,
		WallClockSeconds: p.WallClockSeconds, OutputBytesLimit: p.OutputBytesLimit, BaseImage: p.BaseImage,
	}
}

func (in putPolicyRequest) policy() (policy.Policy, error) {
	err := required("",
		named{"workspace_id", in.WorkspaceID.Set}, named{"fs_allowlist", in.FSAllowlist.Set},
		named{"network_allowlist", in.NetworkAllowlist.Set}, named{"cpu_shares", in.CPUShares.Set},
		named{"memory_mb", in.MemoryMB.Set}, named{"pids_limit", in.PIDsLimit.Set},
		named{"wall_clock_seconds", in.WallClockSeconds.Set}, named{"output_bytes_limit", in.OutputBytesLimit.Set},
		named{"base_image", in.BaseImage.Set})
	return policy.Policy{
		WorkspaceID: in.WorkspaceID.Value,
		FSAllowlist: values(in.FSAllowlist.Value), NetworkAllowlist: values(in.NetworkAllowlist.Value),
		CPUShares: in.CPUShares.Value, MemoryMB: in.MemoryMB.Value, PIDsLimit: in.PIDsLimit.Value,
		WallClockSeconds: in.WallClockSeconds.Value, OutputBytesLimit: in.OutputBytesLimit.Value,
		BaseImage: in.BaseImage.Value,
	}, err
}

func values[T any](in []given[T]) []T {
	out := make([]T, 0, len(in))
	for _, g := range in {
		out = append(out, g.Value)
	}
	return out
}

func (s *Server) getPolicy(c echo.Context) error {
	found, err := s.Policies.Get(c.Request().Context(), principal(c))
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newPolicyResponse(found))
}

func (s *Server) putPolicy(c echo.Context) error {
	var in putPolicyRequest
	if err := decode(c, maxBody, &in); err != nil {
		return err
	}
	p, err := in.policy()
	if err != nil {
		return err
	}
	kept, err := s.Policies.Put(c.Request().Context(), principal(c), p)
	if err != nil {
		return err
	}
	return write(c, http.StatusOK, newPolicyResponse(kept))
}

func (s *Server) deletePolicy(c echo.Context) error {
	if err := s.Policies.Delete(c.Request().Context(), principal(c)); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

package store

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/shared/fault"
)

type policyRow struct {
	Workspace        string `db:"workspace_id"`
	FSAllowlist      string `db:"fs_allowlist"`      // JSON
	NetworkAllowlist string `db:"network_allowlist"` // JSON
	CPUShares        int64  `db:"cpu_shares"`
	MemoryMB         int64  `db:"memory_mb"`
	PIDsLimit        int64  `db:"pids_limit"`
	WallClockSeconds int64  `db:"wall_clock_seconds"`
	OutputBytesLimit int64  `db:"output_bytes_limit"`
	BaseImage        string `db:"base_image"`
}

func (r policyRow) policy() (policy.Policy, error) {
	p := policy.Policy{
		WorkspaceID: r.Workspace, CPUShares: r.CPUShares, MemoryMB: r.MemoryMB, PIDsLimit: r.PIDsLimit,
		WallClockSeconds: r.WallClockSeconds, OutputBytesLimit: r.OutputBytesLimit, BaseImage: r.BaseImage,
	}
	if err := json.Unmarshal([]byte(r.FSAllowlist), &p.FSAllowlist); err != nil {
		return policy.Policy{}, fmt.Errorf("read fs_allowlist of %s: %w", r.Workspace, err)
	}
	if err := json.Unmarshal([]byte(r.NetworkAllowlist), &p.NetworkAllowlist); err != nil {
		return policy.Policy{}, fmt.Errorf("read network_allowlist of %s: %w", r.Workspace, err)
	}
	return p, nil
}

const (
	policyOfWorkspace = `
		SELECT workspace_id, fs_allowlist, network_allowlist, cpu_shares, memory_mb, pids_limit,
			wall_clock_seconds, output_bytes_limit, base_image
		FROM sandbox_policies WHERE workspace_id = $1`
	putPolicy = `
		INSERT INTO sandbox_policies (workspace_id, fs_allowlist, network_allowlist, cpu_shares, memory_mb,
			pids_limit, wall_clock_seconds, output_bytes_limit, base_image, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
		ON CONFLICT (workspace_id) DO UPDATE SET
			fs_allowlist = excluded.fs_allowlist, network_allowlist = excluded.network_allowlist,
			cpu_shares = excluded.cpu_shares, memory_mb = excluded.memory_mb, pids_limit = excluded.pids_limit,
			wall_clock_seconds = excluded.wall_clock_seconds, output_bytes_limit = excluded.output_bytes_limit,
			base_image = excluded.base_image, updated_at = excluded.updated_at`
	deletePolicy = `DELETE FROM sandbox_policies WHERE workspace_id = $1`
)

// Policy returns the policy that a workspace has set; NotFound when it has none.
func (db *DB) Policy(ctx context.Context, workspace string) (policy.Policy, error) {
	var r policyRow
	if err := db.get(ctx, &r, policyOfWorkspace, workspace); err != nil {
		return policy.Policy{}, missing(err, "policy of workspace", workspace)
	}
	p, err := r.policy()
	return p, border(err)
}

// PutPolicy replaces the policy of p.WorkspaceID.
func (db *DB) PutPolicy(ctx context.Context, p policy.Policy, e audit.Event) error {
	files, err := list(p.FSAllowlist)
	if err != nil {
		return err
	}
	hosts, err := list(p.NetworkAllowlist)
	if err != nil {
		return err
	}
	if err := plain("base_image", p.BaseImage); err != nil {
		return err
	}
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, putPolicy, p.WorkspaceID, files, hosts, p.CPUShares, p.MemoryMB,
			p.PIDsLimit, p.WallClockSeconds, p.OutputBytesLimit, p.BaseImage, micros(e.At))
		if unreferenced(err) {
			return fault.Wrap(err, fault.NotFound, "no workspace %q", p.WorkspaceID)
		}
		return recorded(ctx, tx, err, e)
	})
}

// DeletePolicy drops the policy of a workspace; it need not have one.
func (db *DB) DeletePolicy(ctx context.Context, workspace string, e audit.Event) error {
	return db.tx(ctx, func(ctx context.Context, tx statements) error {
		_, err := tx.ExecContext(ctx, deletePolicy, workspace)
		return recorded(ctx, tx, err, e)
	})
}

// list is a list as a JSON array, never null.
func list(items []string) (string, error) {
	if len(items) == 0 {
		return "[]", nil
	}
	b, err := json.Marshal(items)
	return string(b), border(err)
}

package containerd

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/snapshots"

	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd/containerdtest"
)

// ownedBy counts the containers and snapshots that carry an owner's label.
func ownedBy(owner string) (int, error) {
	client, err := daemon.Client()
	if err != nil {
		return 0, err
	}
	defer client.Close()
	ctx := namespaces.WithNamespace(context.Background(), containerdtest.Namespace)
	filter := fmt.Sprintf("labels.%q==%q", ownerLabel, owner)
	containers, err := client.Containers(ctx, filter)
	if err != nil {
		return 0, err
	}
	n := len(containers)
	err = client.SnapshotService(daemon.Snapshotter).Walk(ctx, func(context.Context, snapshots.Info) error { n++; return nil }, filter)
	return n, err
}

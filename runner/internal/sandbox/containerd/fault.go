package containerd

import (
	"context"
	"errors"
	"strings"
	"syscall"

	"github.com/containerd/containerd/errdefs"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

const unknownFailure = "the sandbox could not be made"

// startError says in public words why a container could not be made. What
// containerd said goes to the runner's log.
func startError(err error) error {
	if e, ok := errors.AsType[*sandbox.StartError](err); ok {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	text := err.Error()
	failed := func(message string) error {
		return &sandbox.StartError{Code: "start_failed", Message: message, Cause: err}
	}
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	switch {
	case errdefs.IsUnavailable(err):
		return failed("containerd does not answer on this runner")
	case errors.Is(err, syscall.ENOSPC), has("no space left on device"):
		return failed("the disk that holds this runner's containers is full")
	case has("failed to start shim", "executable file not found"):
		return failed("the container runtime that this runner's settings name can't be started")
	case has("snapshotter not loaded"):
		return failed("containerd does not have the snapshotter that this runner's settings name")
	case strings.HasPrefix(text, "snapshot: "):
		return failed("the snapshotter could not give the sandbox a root")
	case strings.HasPrefix(text, "container: "):
		return failed("containerd could not make the sandbox's container")
	case strings.HasPrefix(text, "task: "), strings.HasPrefix(text, "start: "):
		return failed("the container runtime could not make the sandbox")
	case strings.HasPrefix(text, "meet the init: "):
		return failed("the sandbox's first process did not come up")
	}
	return failed(unknownFailure)
}

// forget drops what is remembered of an image when a start failed over it: it
// may have been removed since.
func (m *maker) forget(image box.Image, err error) {
	if errdefs.IsNotFound(err) {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.ready, image.Digest)
	}
}

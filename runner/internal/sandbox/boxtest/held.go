package boxtest

import (
	"fmt"

	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// Held says what of a backend's sandboxes the host still has: loop devices,
// files, cgroups; empty: nothing.
func Held(cfg box.Config) string {
	h := holdingsOf(cfg)
	if h.loops == 0 && h.files == 0 && h.groups == 0 {
		return ""
	}
	return fmt.Sprintf("%d loop devices, %d files, %d cgroups", h.loops, h.files, h.groups)
}

// Running are the host's processes `sleep arg`.
func Running(arg string) []int { return withArgument(arg) }

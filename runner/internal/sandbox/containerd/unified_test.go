package containerd

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd/containerdtest"
	"github.com/bigwave/bigwave/runner/internal/umltest"
)

// onUnified are the tests, and their parts, that run where there is only
// cgroup v2: on two machines side by side, which have one processor each.
var onUnified = map[string]string{
	"the contract":               "^(TestBackend|TestInitIsKilled|TestShimIsKilled)$/^(Ends|Limits|with containerd there)?$",
	"hostile code, disks, crash": "^(TestHostile|TestDisks|TestCrash)$/^(Identity|SystemCalls|OtherArchitectures|Writes|Proc|Descriptors|Score|Full|Bounds)?$",
}

// TestOnUnified runs the heart of the suites where there is only cgroup v2 and
// no Landlock, when this host has v1: with a containerd that has its files in
// memory, below overlayfs.
func TestOnUnified(t *testing.T) {
	for name, tests := range onUnified {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := time.Now()
			out := umltest.Run(t, umltest.Machine{
				Memory:  "4G",
				Modules: []string{"fs/overlayfs/overlay", "drivers/block/loop"},
				Files: map[string]string{
					"bigwave-init":    initProgram,
					"containerd.test": os.Args[0],
					"image.tar":       os.Getenv(containerdtest.ImageEnv),
				},
				Script: fmt.Sprintf("export %s=/tmp/bigwave-init %s=/tmp/image.tar\n/tmp/containerd.test -test.short -test.v -test.run '%s'",
					initEnv, containerdtest.ImageEnv, tests),
			})
			t.Logf("took %v", time.Since(begun).Round(time.Second))
			if testing.Verbose() {
				t.Log(out)
			}
		})
	}
}

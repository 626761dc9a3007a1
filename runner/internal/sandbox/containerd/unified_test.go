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
// cgroup v2; notOnUnified is what of them is left out there to save minutes.
const (
	onUnified    = "^(TestBackend|TestHostile|TestDisks|TestInitIsKilled|TestShimIsKilled|TestCrash)$/^(Ends|Limits|Identity|SystemCalls|OtherArchitectures|Mounts|Proc|Descriptors|Score|Full|Bounds|with containerd there)?$"
	notOnUnified = "^TestDisks$/^Mounts$"
)

// TestOnUnified runs the heart of the suites where there is only cgroup v2 and
// no Landlock, when this host has v1: with a containerd that has its files in
// memory, below overlayfs.
func TestOnUnified(t *testing.T) {
	begun := time.Now()
	out := umltest.Run(t, umltest.Machine{
		Memory:  "4G",
		Modules: []string{"fs/overlayfs/overlay", "drivers/block/loop"},
		Files: map[string]string{
			"bigwave-init":    initProgram,
			"containerd.test": os.Args[0],
			"image.tar":       os.Getenv(containerdtest.ImageEnv),
		},
		Script: fmt.Sprintf("export %s=/tmp/bigwave-init %s=/tmp/image.tar\n/tmp/containerd.test -test.short -test.v -test.run '%s' -test.skip '%s'",
			initEnv, containerdtest.ImageEnv, onUnified, notOnUnified),
	})
	t.Logf("took %v", time.Since(begun).Round(time.Second))
	if testing.Verbose() {
		t.Log(out)
	}
}

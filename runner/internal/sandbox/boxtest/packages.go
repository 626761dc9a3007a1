package boxtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/sandboxtest"
)

// Packages is a folder that every sandbox sees: what comes into it later is
// there, to be read by its name and not to be listed or written.
func Packages(t *testing.T, make New) {
	dir := filepath.Join(t.TempDir(), "packages")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b := Make(t, make, func(c *box.Config) { c.Packages = dir })
	s := start(t, b)
	if err := os.Mkdir(filepath.Join(dir, "token"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "token", "x"), []byte("later"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o311); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(dir, 0o700) })
	r := sandboxtest.Exec(t, s, sandbox.Process{Program: sandbox.Bash, Script: []byte(`cd ` + sandbox.Packages + ` && cat token/x && echo .
ls . && echo listed
chmod 777 . token && echo opened
echo y >token/x && echo wrote
echo y >z && echo made
rm token/x && echo removed
true`)})
	if r.Stdout != "later.\n" {
		t.Errorf("got %q, %q", r.Stdout, r.Stderr)
	}
}

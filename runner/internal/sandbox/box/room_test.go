package box

import (
	"path/filepath"
	"testing"
)

func TestSpaceOfWhatIsNotThereYet(t *testing.T) {
	dir := t.TempDir()
	here, err := spaceOf(dir)
	if err != nil || here.Total == 0 || here.Free > here.Total {
		t.Errorf("got %+v, %v", here, err)
	}
	if later, err := spaceOf(filepath.Join(dir, "a", "b")); err != nil || later.Total != here.Total {
		t.Errorf("got %+v, %v, want %+v", later, err, here)
	}
}

func TestSmallWorkspacesLeaveAGiB(t *testing.T) {
	if s := (Space{Free: 1<<30 - 1}); s.Free >= s.least(16<<20) {
		t.Error("small workspaces may use the last GiB")
	}
}

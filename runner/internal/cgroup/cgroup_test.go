package cgroup

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestWeight(t *testing.T) {
	for shares, want := range map[int64]int64{2: 1, 10: 1, 1024: 100, 2048: 200, 256: 25, 102400: 10000, 262144: 10000} {
		if got := Weight(shares); got != want {
			t.Errorf("%d shares: got weight %d, want %d", shares, got, want)
		}
	}
}

func TestReadMounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mountinfo")
	content := `22 1 0:20 / /sys rw - sysfs sysfs rw
30 22 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 22 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 22 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
33 22 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
broken
`
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readMounts(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.unified != "/sys/fs/cgroup/unified" || got.legacy[CPU] != "/sys/fs/cgroup/cpu,cpuacct" || got.legacy[Memory] != "/sys/fs/cgroup/memory" || got.legacy[PIDs] != "" {
		t.Errorf("got %+v", got)
	}
}

// manager needs root, as the tests of the whole runner do.
func manager(t *testing.T) *Manager {
	t.Helper()
	m, err := Find("bigwave-test", "cgroup-"+strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range controllers {
		if !m.Has(c) {
			t.Fatalf("no controller %s: %s", c, m.Why(c))
		}
	}
	t.Cleanup(m.Close)
	return m
}

// child waits in a group until it is told to go on.
func child(t *testing.T, g *Group, script string) (*exec.Cmd, func()) {
	t.Helper()
	cmd := exec.Command("bash", "-c", "read -r; "+script)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dirs := g.leaves()
	if g.m.version == V1 {
		if err := g.Join(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	} else if err := write(filepath.Join(dirs[0], "cgroup.procs"), strconv.Itoa(cmd.Process.Pid)); err != nil {
		t.Fatal(err)
	}
	return cmd, func() { _, _ = in.Write([]byte("\n")) }
}

func TestGroup(t *testing.T) {
	m := manager(t)
	g, err := m.Create("box")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Create("box"); err == nil {
		t.Error("the same group twice")
	}
	if err := g.Set(Limits{MemoryBytes: 32 << 20, PIDs: 10, CPUShares: 2}); err != nil {
		t.Fatal(err)
	}
	cmd, start := child(t, g, "head -c 100M /dev/zero | tail -c 99M >/dev/null; for i in $(seq 20); do sleep 1 & done; wait")
	if pids := g.Processes(); len(pids) != 1 || pids[0] != cmd.Process.Pid {
		t.Errorf("processes %v, want %d", pids, cmd.Process.Pid)
	}
	g.ResetPeak()
	start()
	_ = cmd.Wait()
	c, err := g.Counters()
	if err != nil || c.OOMKills < 1 || c.PIDsHits < 1 {
		t.Errorf("got %+v, %v", c, err)
	}
	if peak := g.Peak(); peak < 16<<20 || peak > 32<<20 {
		t.Errorf("the peak is %d", peak)
	}
	cmd, start = child(t, g, "sleep 60 & sleep 60")
	start()
	begin := time.Now()
	if err := g.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	_ = cmd.Wait()
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("removed twice: %v", err)
	}
}

func TestSweep(t *testing.T) {
	m := manager(t)
	g, err := m.Create("left")
	if err != nil {
		t.Fatal(err)
	}
	cmd, start := child(t, g, "sleep 60")
	start()
	go func() { _ = cmd.Wait() }() // or it stays as a zombie
	again, err := Find("bigwave-test", "cgroup-"+strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range g.leaves() {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is still there", dir)
		}
	}
}

// Two runners on one host have parents of their own.
func TestSweepTouchesOnlyItsOwn(t *testing.T) {
	m := manager(t)
	other, err := Find("bigwave-test", "other-"+strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)
	g, err := other.Create("box")
	if err != nil {
		t.Fatal(err)
	}
	cmd, start := child(t, g, "echo alive; sleep 60")
	_ = start
	if err := m.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if pids := g.Processes(); len(pids) != 1 {
		t.Errorf("another runner's processes are %v", pids)
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}

func TestOwnUnified(t *testing.T) {
	file, err := os.Open("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	want := ""
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "0::"); ok {
			want = rest
		}
	}
	if got, err := ownUnified(); want != "" && (err != nil || got != want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

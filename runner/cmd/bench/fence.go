package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bigwave/bigwave/runner/internal/egress"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/subprocess"
)

// Bars of the section, as they stand in its text.
const (
	startBar = 6 * time.Millisecond // of fence, disk and egress in a session's start
	execBar  = 1.5                  // × bare
	flowBar  = 0.5                  // × a direct connection's throughput
	idleBar  = 2.0                  // × the first starts
)

var fiveEntries = []string{"ok.test:443", "*.ex.test:443", "a.test:80", "8.8.8.8:53", "10.0.0.0/8:5432"}

// fenceCosts prints what each part of the fence costs.
func fenceCosts(ctx context.Context, bin string, n int) error {
	fmt.Printf("\n## What the fence costs\n")
	time.Sleep(500 * time.Millisecond) // what the sections before left to be removed
	before := held()
	for _, part := range []func(context.Context, string, int) error{fenceStarts, fenceCalls, fenceFlow, fenceIdle} {
		if err := part(ctx, bin, n); err != nil {
			return err
		}
	}
	after := held()
	for range 100 { // the kernel frees disks and cgroups in its own time
		if after == before {
			break
		}
		time.Sleep(100 * time.Millisecond)
		after = held()
	}
	fmt.Printf("\nLeft by this section: %d loop devices, %d cgroups, %d mounts, %d directories.\n",
		after.loops-before.loops, after.cgroups-before.cgroups, after.mounts-before.mounts, after.dirs-before.dirs)
	return nil
}

// variant is a backend that lacks parts of the fence, and the list that its
// sandboxes may reach.
type variant struct {
	name    string
	without []string
	list    []string
}

var everything = []string{"seccomp", "landlock", "disk"}

var startVariants = []variant{
	{"all of it", nil, fiveEntries},
	{"without the seccomp filter", []string{"seccomp"}, fiveEntries},
	{"without Landlock", []string{"landlock"}, fiveEntries},
	{"the workspace as tmpfs, not ext4", []string{"disk"}, fiveEntries},
	{"without an egress list (else 5 entries)", nil, nil},
	{"without all four", everything, nil},
}

// fenceBackend is one for measuring, with what removes it.
func fenceBackend(bin string, spares int, without []string, way egress.Config) (*box.Backend, func(), error) {
	dir, err := os.MkdirTemp("", "bigwave-bench-")
	if err != nil {
		return nil, nil, err
	}
	b, err := subprocess.New(subprocess.Config{
		Config:   box.Config{DataDir: dir, RunnerID: "bench", Spares: spares, Without: without, Egress: way},
		InitPath: filepath.Join(bin, "bigwave-init"),
	})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return b, func() { b.Close(context.Background()); os.RemoveAll(dir) }, nil
}

func fenceSpec(list []string) sandbox.Spec {
	s := spec("bench-fence")
	s.Policy.NetworkAllowlist = list
	return s
}

// started are the times of one way to start.
type started struct{ start, first []time.Duration }

func (s *started) once(ctx context.Context, b *box.Backend, list []string) error {
	b.Settle() // the spare is ready, or there is none in the making
	began := time.Now()
	x, err := b.Start(ctx, fenceSpec(list))
	if err != nil {
		return err
	}
	defer x.Close(context.WithoutCancel(ctx))
	took := time.Since(began)
	if err := inSandbox(ctx, x, work{name: "true", program: "bash", script: "true"}); err != nil {
		return err
	}
	s.start, s.first = append(s.start, took), append(s.first, time.Since(began))
	return nil
}

// fenceStarts takes turns between the variants, each with and without a spare.
func fenceStarts(ctx context.Context, bin string, n int) error {
	type pair struct {
		spare, none     *box.Backend
		withSpare, asIs started
	}
	pairs := make([]pair, len(startVariants))
	for i, v := range startVariants {
		for spares, to := range map[int]**box.Backend{1: &pairs[i].spare, -1: &pairs[i].none} {
			b, remove, err := fenceBackend(bin, spares, v.without, egress.Config{})
			if err != nil {
				return err
			}
			defer remove()
			if err := b.Sweep(ctx); err != nil { // has the first spare made
				return err
			}
			*to = b
		}
	}
	began := time.Now()
	for round := range n + 3 {
		if round > 10 && time.Since(began) > 3*rowTime {
			break
		}
		for i, v := range startVariants {
			p := &pairs[i]
			if err := p.withSpare.once(ctx, p.spare, v.list); err != nil {
				return fmt.Errorf("start %s: %w", v.name, err)
			}
			if err := p.asIs.once(ctx, p.none, v.list); err != nil {
				return fmt.Errorf("start %s: %w", v.name, err)
			}
			if round == 2 { // those warmed up
				p.withSpare, p.asIs = started{}, started{}
			}
		}
	}
	fmt.Printf("\nStart of a sandbox (`Backend.Start`), and start to the end of its first `bash -c true`: median / p99 in ms\n\n")
	fmt.Println("| the fence | start, a spare taken | to the first result | start, no spare | to the first result |\n|---|---|---|---|---|")
	for i, v := range startVariants {
		p := pairs[i]
		fmt.Printf("| %s |", v.name)
		for _, d := range [][]time.Duration{p.withSpare.start, p.withSpare.first, p.asIs.start, p.asIs.first} {
			fmt.Printf(" %.2f / %.2f |", ms(median(d)), ms(p99(d)))
		}
		fmt.Println()
	}
	all, noList, bare := &pairs[0], &pairs[4], &pairs[len(pairs)-1]
	fmt.Printf("\nEgress set-up for a sandbox (5 entries): %.2f ms.\n", ms(more(all.withSpare.start, noList.withSpare.start)))
	warm, cold := more(all.withSpare.first, bare.withSpare.first), more(all.asIs.first, bare.asIs.first)
	fmt.Printf("Fence, disk and egress in a session's start, bar ≤ %.0f ms: %.2f ms with a spare — %s; %.2f ms without — %s.\n",
		ms(startBar), ms(warm), verdict(warm <= startBar), ms(cold), verdict(cold <= startBar))
	return nil
}

// more is what a took above b, turn by turn: others use this machine as well.
func more(a, b []time.Duration) time.Duration {
	var d []time.Duration
	for i := range a {
		d = append(d, a[i]-b[i])
	}
	return median(d)
}

func verdict(held bool) string {
	if held {
		return "held"
	}
	return "missed"
}

// fenceCalls compares calls in sandboxes that live, and bare.
func fenceCalls(ctx context.Context, bin string, n int) error {
	what := work{name: "true", program: "bash", bare: "bash", script: "true"}
	names := []string{"bare"}
	ways := []func(int) error{func(int) error { return bare(what) }}
	for _, v := range []variant{
		{"all of it", nil, fiveEntries},
		{"without an egress list", nil, nil},
		{"without the seccomp filter", []string{"seccomp"}, nil},
		{"without Landlock", []string{"landlock"}, nil},
		{"without all of it", everything, nil},
	} {
		b, remove, err := fenceBackend(bin, -1, v.without, egress.Config{})
		if err != nil {
			return err
		}
		defer remove()
		box, err := b.Start(ctx, fenceSpec(v.list))
		if err != nil {
			return err
		}
		names = append(names, v.name)
		ways = append(ways, func(int) error { return inSandbox(ctx, box, what) })
	}
	took := make([][]time.Duration, len(ways))
	began := time.Now()
	for round := range 10*n + 20 {
		if round > 100 && time.Since(began) > 2*rowTime {
			break
		}
		for i, way := range ways {
			d, err := together(1, 1, way)
			if err != nil {
				return err
			}
			if round >= 20 {
				took[i] = append(took[i], d...)
			}
		}
	}
	fmt.Printf("\n`bash -c true` in a live sandbox (`sandbox.Exec`), one caller: median / p99 in ms\n\n| the fence | took | against bare |\n|---|---|---|\n")
	ratio := func(i int) float64 { return float64(median(took[i])) / float64(median(took[0])) }
	for i, name := range names {
		fmt.Printf("| %s | %.2f / %.2f | %.2f× |\n", name, ms(median(took[i])), ms(p99(took[i])), ratio(i))
	}
	fmt.Printf("\n`sandbox.Exec` with all of it: %.2f × bare; bar: ≤ %.1f × — %s.\n", ratio(1), execBar, verdict(ratio(1) <= execBar))
	return nil
}

// client downloads and prints how long that took; without a size it prints how
// long each of many connections waited for its first byte. In seconds.
const client = `
import socket, time
host, port, size, times = %q, %d, %d, %d
data = bytearray(1 << 20)
for _ in range(times):
    began = time.perf_counter()
    with socket.create_connection((host, port)) as s:
        s.sendall(b"d" if size > 1 else b"1")
        left = size
        while left > 0:
            n = s.recv_into(data)
            if n == 0: raise SystemExit("cut short")
            left -= n
        print(time.perf_counter() - began)
`

const download = 64 << 20

// fenceFlow compares connections through a gate with direct ones, made by the
// same program.
func fenceFlow(ctx context.Context, bin string, n int) error {
	to, err := listenOutside()
	if err != nil {
		return err
	}
	defer to.close()
	b, remove, err := fenceBackend(bin, -1, nil, egress.Config{Resolver: to.resolver(), PrivateAllow: []string{outsideAddress}})
	if err != nil {
		return err
	}
	defer remove()
	box, err := b.Start(ctx, fenceSpec([]string{
		fmt.Sprintf("%s:%d", outsideName, to.port()), fmt.Sprintf("%s:%d", outsideAddress, to.port()),
	}))
	if err != nil {
		return err
	}
	python, err := interpreter()
	if err != nil {
		return err
	}
	direct := func(script string) ([]byte, error) { return exec.CommandContext(ctx, python, "-c", script).Output() }
	gate := func(script string) ([]byte, error) { return pythonIn(ctx, box, script) }
	ways := []struct {
		name, host  string
		run         func(script string) ([]byte, error)
		flow, first []time.Duration
	}{
		{name: "direct", host: outsideAddress, run: direct},
		{name: "through the gate, to an address", host: outsideAddress, run: gate},
		{name: "through the gate, to a name", host: outsideName, run: gate},
	}
	for range max(n/6, 3) {
		for i := range ways {
			w := &ways[i]
			for _, what := range []struct {
				size, times int
				into        *[]time.Duration
			}{{1, 20, &w.first}, {download, 1, &w.flow}} {
				out, err := w.run(fmt.Sprintf(client, w.host, to.port(), what.size, what.times))
				if err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				if *what.into, err = seconds(*what.into, out); err != nil {
					return err
				}
			}
		}
	}
	fmt.Printf("\nNetwork: %d MiB downloaded, and the wait for a connection's first byte, with look-up: median / p99, × against direct\n\n", download>>20)
	fmt.Println("| the way | download in ms | MiB/s | throughput | first byte in ms | |\n|---|---|---|---|---|---|")
	flow := func(i int) float64 { return float64(median(ways[0].flow)) / float64(median(ways[i].flow)) }
	for i, w := range ways {
		fmt.Printf("| %s | %.1f / %.1f | %.0f | %.2f× | %.2f / %.2f | %.2f× |\n", w.name, ms(median(w.flow)), ms(p99(w.flow)),
			float64(download>>20)/median(w.flow).Seconds(), flow(i), ms(median(w.first)), ms(p99(w.first)),
			float64(median(w.first))/float64(median(ways[0].first)))
	}
	worst := min(flow(1), flow(2))
	fmt.Printf("\nThroughput through the gate: %.2f × direct; bar: ≥ %.1f × — %s.\n", worst, flowBar, verdict(worst >= flowBar))
	return nil
}

func pythonIn(ctx context.Context, box sandbox.Sandbox, script string) ([]byte, error) {
	var out, errs bytes.Buffer
	exit, err := box.Exec(ctx, sandbox.Process{
		ID: nextID(), Program: sandbox.Python, Script: []byte(script), InArgv: true,
		Stdout: &out, Stderr: &errs, Wall: time.Minute,
	})
	if err == nil && (exit.Reason != sandbox.Exited || exit.Code != 0) {
		err = fmt.Errorf("it ended as %+v: %s", exit, errs.String())
	}
	return out.Bytes(), err
}

func seconds(to []time.Duration, lines []byte) ([]time.Duration, error) {
	for line := range strings.FieldsSeq(string(lines)) {
		s, err := strconv.ParseFloat(line, 64)
		if err != nil {
			return nil, err
		}
		to = append(to, time.Duration(s*float64(time.Second)))
	}
	return to, nil
}

// fenceIdle fills one backend with sandboxes that do nothing.
func fenceIdle(ctx context.Context, bin string, _ int) error {
	const boxes, some = 300, 10
	b, remove, err := fenceBackend(bin, 1, nil, egress.Config{})
	if err != nil {
		return err
	}
	defer remove()
	own := children(os.Getpid())
	if err := b.Sweep(ctx); err != nil {
		return err
	}
	b.Settle()
	ourselves, groups := field(os.Getpid(), "status", "VmRSS:"), groupBytes()
	var starts, ready []time.Duration
	var live []sandbox.Sandbox
	for i := range boxes {
		s := spec(fmt.Sprint("bench-idle-", i))
		s.Policy.NetworkAllowlist = fiveEntries
		began := time.Now()
		box, err := b.Start(ctx, s)
		if err != nil {
			return fmt.Errorf("sandbox %d of %d: %w", i+1, boxes, err)
		}
		starts = append(starts, time.Since(began))
		b.Settle()
		ready = append(ready, time.Since(began))
		live = append(live, box)
	}
	time.Sleep(500 * time.Millisecond)
	pss := 0
	for _, pid := range children(os.Getpid()) {
		pss += field(pid, "smaps_rollup", "Pss:")
	}
	for _, pid := range own {
		pss -= field(pid, "smaps_rollup", "Pss:")
	}
	ourselves, groups = field(os.Getpid(), "status", "VmRSS:")-ourselves, groupBytes()-groups
	began := time.Now()
	if err := closeAll(ctx, live); err != nil {
		return err
	}
	closed := time.Since(began)
	fmt.Printf("\n%d idle sandboxes on one backend, each with 5 entries to reach: median / p99 in ms\n\n", boxes)
	fmt.Printf("| | first %d | last %d | |\n|---|---|---|---|\n", some, some)
	ratio := func(took []time.Duration) float64 {
		return float64(median(took[boxes-some:])) / float64(median(took[:some]))
	}
	for _, row := range []struct {
		name string
		took []time.Duration
	}{{"start", starts}, {"start, and the next spare made", ready}} {
		first, last := row.took[:some], row.took[boxes-some:]
		fmt.Printf("| %s | %.2f / %.2f | %.2f / %.2f | %.2f× |\n", row.name, ms(median(first)), ms(p99(first)), ms(median(last)), ms(p99(last)), ratio(row.took))
	}
	fmt.Printf("\nThe last starts against the first: %.2f ×; bar: ≤ %.0f × — %s. All were closed in %.0f ms.\n",
		ratio(starts), idleBar, verdict(ratio(starts) <= idleBar), ms(closed))
	fmt.Printf("Memory of one: %.2f MiB (PSS of its init and its waiting supervisor), %.2f MiB charged to its cgroup, %.2f MiB of this process.\n",
		float64(pss)/1024/(boxes+1), float64(groups)/(1<<20)/boxes, float64(ourselves)/1024/boxes)
	return nil
}

// closeAll closes some at a time: each has only so long to end.
func closeAll(ctx context.Context, boxes []sandbox.Sandbox) error {
	var next atomic.Int64
	_, err := together(8, len(boxes), func(int) error { return boxes[next.Add(1)-1].Close(ctx) })
	return err
}

// groupBytes is the memory that all sandboxes of backends like ours are charged.
func groupBytes() int {
	total := 0
	for _, pattern := range []string{"/sys/fs/cgroup/memory/bigwave/bench-*/memory.usage_in_bytes", "/sys/fs/cgroup/bigwave/bench-*/memory.current"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				continue
			}
			n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
			total += n
		}
	}
	return total
}

// holding is what backends of ours could leave on the host.
type holding struct{ loops, cgroups, mounts, dirs int }

func held() holding {
	var h holding
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && bytes.Contains(data, []byte("/bigwave-bench-")) {
			h.loops++
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/bigwave/bench-*", "/sys/fs/cgroup/bigwave/bench-*"} {
		found, _ := filepath.Glob(pattern)
		h.cgroups += len(found)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	h.mounts = bytes.Count(mounts, []byte{'\n'})
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), "bigwave-bench-*"))
	h.dirs = len(dirs)
	return h
}

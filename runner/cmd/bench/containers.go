package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	ctrd "github.com/containerd/containerd"
	"github.com/containerd/containerd/cio"
	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/oci"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/containerd"
)

const (
	imageName  = "docker.io/bigwave/sandbox-base:latest"
	benchSpace = "bigwave"
	burst      = 50
	idleBoxes  = 100
)

// container is the containerd that scripts/with-containerd.sh has started.
type container struct{ address, snapshotter string }

func thisContainerd() (container, error) {
	c := container{os.Getenv("CONTAINERD_ADDRESS"), os.Getenv("CONTAINERD_SNAPSHOTTER")}
	if c.address == "" {
		return c, errors.New("CONTAINERD_ADDRESS must name a containerd with the base image; make bench starts one")
	}
	return c, nil
}

// containerCosts compares the containerd backend with containerd's own ways.
func containerCosts(ctx context.Context, bin string, n int) error {
	c, err := thisContainerd()
	if err != nil {
		return err
	}
	fmt.Printf("\n## The containerd backend\n\nsnapshotter %s, runtime io.containerd.runc.v2\n", c.snapshotter)
	cold, stop, err := c.backend(bin, -1, false)
	if err != nil {
		return err
	}
	defer stop()
	warm, stop, err := c.backend(bin, 1, false)
	if err != nil {
		return err
	}
	defer stop()
	if err := errors.Join(cold.Sweep(ctx), warm.Sweep(ctx)); err != nil {
		return err
	}
	one, err := c.starts(ctx, cold, warm, n)
	if err != nil {
		return err
	}
	if err := c.calls(ctx, warm, 5*n); err != nil {
		return err
	}
	if err := c.burst(ctx, cold, one); err != nil {
		return err
	}
	return c.idle(ctx, cold)
}

func (c container) backend(bin string, spares int, python bool) (*box.Backend, func(), error) {
	dir, err := os.MkdirTemp("", "bigwave-bench-")
	if err != nil {
		return nil, nil, err
	}
	b, err := containerd.New(containerd.Config{
		Config:      box.Config{DataDir: dir, RunnerID: "bench", Spares: spares, RefillAfter: time.Millisecond, WarmPython: python},
		InitPath:    filepath.Join(bin, "bigwave-init"),
		Address:     c.address,
		Snapshotter: c.snapshotter,
	})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return b, func() { b.Close(context.Background()); os.RemoveAll(dir) }, nil
}

var firstWork = work{name: "true", program: "bash", script: "true"}

// firstResult is the time from a start to the end of its first call, and of
// the next call.
func firstResult(ctx context.Context, b *box.Backend) (first, next time.Duration, err error) {
	b.Settle()
	began := time.Now()
	s, err := b.Start(ctx, spec("bench"))
	if err != nil {
		return 0, 0, err
	}
	defer s.Close(context.WithoutCancel(ctx))
	if err := inSandbox(ctx, s, firstWork); err != nil {
		return 0, 0, err
	}
	first = time.Since(began)
	began = time.Now()
	err = inSandbox(ctx, s, firstWork)
	return first, time.Since(began), err
}

// starts takes turns between ctr run and both ways to start.
func (c container) starts(ctx context.Context, cold, warm *box.Backend, n int) (time.Duration, error) {
	var ctr, made, taken, next []time.Duration
	for i := range n + 1 {
		began := time.Now()
		if err := c.ctrRun(ctx, fmt.Sprintf("bench-ctr-%d", i)); err != nil {
			return 0, err
		}
		ran := time.Since(began)
		first, _, err := firstResult(ctx, cold)
		if err != nil {
			return 0, err
		}
		ready, then, err := firstResult(ctx, warm)
		if err != nil {
			return 0, err
		}
		if i == 0 {
			continue // the first one warms up
		}
		ctr, made, taken, next = append(ctr, ran), append(made, first), append(taken, ready), append(next, then)
	}
	fmt.Printf("\nFrom nothing to the end of `bash -c true`: median / p99 in ms, × is against `ctr run --rm` of the same image\n\n| way | took | |\n|---|---|---|\n")
	row := func(name string, d []time.Duration) {
		fmt.Printf("| %s | %.1f / %.1f | %.2f× |\n", name, ms(median(d)), ms(p99(d)), float64(median(d))/float64(median(ctr)))
	}
	row("`ctr run --rm`", ctr)
	row("start and first call, cold", made)
	row("start and first call, from a warm sandbox", taken)
	row("the next call", next)
	ratio := float64(median(made)) / float64(median(ctr))
	over := ms(median(taken)) - ms(median(next))
	fmt.Printf("\nCold start: %.2f × ctr run; bar: ≤ 1.0 × — %s.\n", ratio, verdict(ratio <= 1.0))
	fmt.Printf("From warm: %.1f ms over the warm path; bar: ≤ 15 ms — %s.\n", over, verdict(over <= 15))
	return median(made), nil
}

func (c container) ctrRun(ctx context.Context, id string) error {
	cmd := exec.CommandContext(ctx, "ctr", "-a", c.address, "-n", benchSpace, "run", "--rm", "--snapshotter", c.snapshotter, imageName, id, "bash", "-c", "true")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ctr run: %w: %s", err, out)
	}
	return nil
}

// calls compares a call in a live sandbox with containerd's exec and with none.
func (c container) calls(ctx context.Context, b *box.Backend, n int) error {
	s, err := b.Start(ctx, spec("bench-calls"))
	if err != nil {
		return err
	}
	defer s.Close(context.WithoutCancel(ctx))
	task, remove, err := c.task(ctx)
	if err != nil {
		return err
	}
	defer remove()
	b.Settle()
	var alone, inside, exec []time.Duration
	for i := range n + 1 {
		a, err := timed(func() error { return bare(work{bare: "bash", script: "true"}) })
		if err != nil {
			return err
		}
		in, err := timed(func() error { return inSandbox(ctx, s, firstWork) })
		if err != nil {
			return err
		}
		var e time.Duration
		if i%5 == 0 {
			if e, err = timed(func() error { return taskExec(namespaces.WithNamespace(ctx, benchSpace), task, strconv.Itoa(i)) }); err != nil {
				return err
			}
		}
		if i == 0 {
			continue
		}
		alone, inside = append(alone, a), append(inside, in)
		if e > 0 {
			exec = append(exec, e)
		}
	}
	fmt.Printf("\n`bash -c true` in a live sandbox, one caller: median / p99 in ms\n\n| way | took | against bare |\n|---|---|---|\n")
	for _, w := range []struct {
		name string
		d    []time.Duration
	}{{"bare", alone}, {"sandbox.Exec", inside}, {"containerd's task.Exec", exec}} {
		fmt.Printf("| %s | %.2f / %.2f | %.2f× |\n", w.name, ms(median(w.d)), ms(p99(w.d)), float64(median(w.d))/float64(median(alone)))
	}
	over, faster := float64(median(inside))/float64(median(alone)), float64(median(exec))/float64(median(inside))
	fmt.Printf("\nWarm call: %.2f × bare; bar: ≤ 1.5 × — %s. It is %.1f × faster than task.Exec; bar: ≥ 8 × — %s.\n", over, verdict(over <= 1.5), faster, verdict(faster >= 8))
	return nil
}

func timed(f func() error) (time.Duration, error) {
	began := time.Now()
	err := f()
	return time.Since(began), err
}

// task is a container that waits, made with containerd's defaults.
func (c container) task(ctx context.Context) (ctrd.Task, func(), error) {
	client, err := ctrd.New(c.address)
	if err != nil {
		return nil, nil, err
	}
	ctx = namespaces.WithNamespace(ctx, benchSpace)
	image, err := client.GetImage(ctx, imageName)
	if err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	made, err := client.NewContainer(ctx, "bench-task", ctrd.WithSnapshotter(c.snapshotter), ctrd.WithNewSnapshot("bench-task", image),
		ctrd.WithNewSpec(oci.WithImageConfig(image), oci.WithProcessArgs("sleep", "3600")))
	if err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	remove := func() {
		ctx := context.WithoutCancel(ctx)
		if task, err := made.Task(ctx, nil); err == nil {
			_, _ = task.Delete(ctx, ctrd.WithProcessKill)
		}
		_ = made.Delete(ctx, ctrd.WithSnapshotCleanup)
		_ = client.Close()
	}
	task, err := made.NewTask(ctx, cio.NullIO)
	if err == nil {
		err = task.Start(ctx)
	}
	if err != nil {
		remove()
		return nil, nil, err
	}
	return task, remove, nil
}

func taskExec(ctx context.Context, task ctrd.Task, id string) error {
	spec, err := task.Spec(ctx)
	if err != nil {
		return err
	}
	process := *spec.Process
	process.Args = []string{"bash", "-c", "true"}
	p, err := task.Exec(ctx, "exec-"+id, &process, cio.NullIO)
	if err != nil {
		return err
	}
	ended, err := p.Wait(ctx)
	if err == nil {
		err = p.Start(ctx)
	}
	if err != nil {
		return err
	}
	<-ended
	_, err = p.Delete(ctx)
	return err
}

// burst starts many at once, from nothing.
func (c container) burst(ctx context.Context, b *box.Backend, one time.Duration) error {
	all := make([]sandbox.Sandbox, burst)
	errs := make([]error, burst)
	var wait sync.WaitGroup
	began := time.Now()
	for i := range burst {
		wait.Go(func() {
			if all[i], errs[i] = b.Start(ctx, spec(fmt.Sprint("bench-burst-", i))); errs[i] == nil {
				errs[i] = inSandbox(ctx, all[i], firstWork)
			}
		})
	}
	wait.Wait()
	took := time.Since(began)
	for _, s := range all {
		if s != nil {
			wait.Go(func() { _ = s.Close(context.WithoutCancel(ctx)) })
		}
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	share := burst * one / time.Duration(runtime.NumCPU())
	ratio := float64(took) / float64(share)
	fmt.Printf("\nA burst of %d starts: %.0f ms to the last first result, %.2f × (%d × one cold start / %d cores); bar: ≤ 1.2 × — %s.\n",
		burst, ms(took), ratio, burst, runtime.NumCPU(), verdict(ratio <= 1.2))
	return nil
}

// idle adds up what sandboxes hold that do nothing.
func (c container) idle(ctx context.Context, b *box.Backend) error {
	var all []sandbox.Sandbox
	defer func() {
		var wait sync.WaitGroup
		for _, s := range all {
			wait.Go(func() { _ = s.Close(context.WithoutCancel(ctx)) })
		}
		wait.Wait()
	}()
	for i := range idleBoxes {
		s, err := b.Start(ctx, spec(fmt.Sprint("bench-idle-", i)))
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	var init, shim int
	for _, s := range all {
		pid := box.InitPID(s)
		for _, p := range append(children(pid), pid) {
			init += field(p, "smaps_rollup", "Pss:")
		}
		shim += field(parent(pid), "smaps_rollup", "Pss:")
	}
	n := float64(len(all)) * 1024
	fmt.Printf("\n%d idle sandboxes, PSS of each: %.2f MiB init and waiting supervisor, %.2f MiB shim.\n", len(all), float64(init)/n, float64(shim)/n)
	return nil
}

// parent is a process's, which for an init is its shim.
func parent(pid int) int { return field(pid, "status", "PPid:") }

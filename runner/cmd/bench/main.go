// Command bench prints what a call costs next to an unsandboxed process: the
// same thing run bare, in a live sandbox, and over the whole path through the
// built daemons, interleaved in one run. Only the ratios mean something.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func main() {
	n := flag.Int("n", 300, "measured operations of each kind")
	callers := flag.String("callers", "1,8,32", "numbers of callers at once")
	sequential := flag.Int("sequential", 1000, "calls in a row for the leak check")
	only := flag.String("only", "", "calls, fence, containers or python: one part of it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := all(ctx, *only, *n, *callers, *sequential)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func all(ctx context.Context, only string, n int, callers string, sequential int) error {
	bin, err := filepath.Abs(filepath.Dir(os.Args[0]))
	if err != nil {
		return err
	}
	fmt.Printf("%d cores, %s, %s\n", runtime.NumCPU(), runtime.Version(), time.Now().Format(time.DateOnly))
	if only == "" || only == "calls" {
		if err := calls(ctx, bin, n, callers, sequential); err != nil {
			return err
		}
	}
	if only == "" || only == "fence" {
		if err := fenceCosts(ctx, bin, min(n, fenceRounds)); err != nil {
			return err
		}
	}
	if only == "" || only == "containers" {
		if err := containerCosts(ctx, bin, min(n, fenceRounds)); err != nil {
			return err
		}
	}
	if only == "" || only == "python" {
		return pythonCosts(ctx, bin, n)
	}
	return nil
}

const fenceRounds = 40

// calls compares calls, bare and in sandboxes, alone and over the whole path.
func calls(ctx context.Context, bin string, n int, callers string, sequential int) error {
	backend, stop, err := newBackend(bin)
	if err != nil {
		return err
	}
	defer stop()
	local, err := backend.Start(ctx, spec("bench-local"))
	if err != nil {
		return err
	}
	defer local.Close(context.WithoutCancel(ctx))

	sqlite, err := startDaemons(ctx, bin, "SQLite", "")
	if err != nil {
		return err
	}
	defer sqlite.stop()
	paths := []*daemons{sqlite}
	if dsn := os.Getenv("BIGWAVE_TEST_POSTGRES_URL"); dsn != "" {
		pg, err := startDaemons(ctx, bin, "PostgreSQL", dsn)
		if err != nil {
			return err
		}
		defer pg.stop()
		paths = append(paths, pg)
	}

	python, err := interpreter()
	if err != nil {
		return err
	}
	for _, what := range []work{
		{name: "`bash -c true`", program: "bash", bare: "bash", script: "true", tool: "shell_exec", args: `{"command":"true"}`},
		{name: "`python3 -c pass`", program: "python3", bare: python, script: "pass", tool: "python_exec", args: `{"code":"pass"}`},
	} {
		fmt.Printf("\n%s: median / p99 in ms; × is the median against bare at the same number of callers\n\n", what.name)
		fmt.Printf("| callers | bare | sandbox.Exec |%s one flush of the disk |\n|---|---|---|%s\n", header(paths), strings.Repeat("---|", len(paths)+1))
		for c := range strings.SplitSeq(callers, ",") {
			var k int
			if _, err := fmt.Sscan(c, &k); err != nil {
				return err
			}
			if err := compare(ctx, what, n, k, local, paths); err != nil {
				return err
			}
		}
	}
	if err := starts(ctx, min(n, 100), paths); err != nil {
		return err
	}
	if err := leaks(ctx, sequential, backend, sqlite); err != nil {
		return err
	}
	return idle(ctx, backend, sqlite)
}

// work is one thing to run, bare and as a tool.
type work struct {
	name    string
	program string // of a sandbox
	bare    string // the same on this host
	script  string
	tool    string
	args    string
}

// interpreter is the Python that sandboxes run: the one on PATH may be a
// script that only finds it, and costs more than it does.
func interpreter() (string, error) {
	out, err := exec.Command("python3", "-I", "-c", "import sys; print(sys.executable)").Output()
	if err != nil {
		return "", fmt.Errorf("ask python3 where it lives: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

func header(paths []*daemons) string {
	var b strings.Builder
	for _, p := range paths {
		b.WriteString(" whole path, " + p.name + " |")
	}
	return b.String()
}

// rowTime is about the most that one row of a table may take, so that all of
// it ends within six minutes on a busy machine too.
const rowTime = 10 * time.Second

// compare measures every way to run what, turn by turn.
func compare(ctx context.Context, what work, n, callers int, local sandbox.Sandbox, paths []*daemons) error {
	ways := []func(worker int) error{
		func(int) error { return bare(what) },
		func(int) error { return inSandbox(ctx, local, what) },
	}
	for _, p := range paths {
		sessions, err := p.sessions(ctx, callers)
		if err != nil {
			return err
		}
		defer p.closeSessions(ctx, sessions)
		ways = append(ways, func(worker int) error { return p.call(ctx, sessions[worker], what) })
	}
	took := make([][]time.Duration, len(ways))
	var flushed []time.Duration
	const rounds = 10
	began := time.Now()
	for round := range rounds + 1 {
		d, err := flushes(max(n/rounds/10, 1))
		if err != nil {
			return err
		}
		flushed = append(flushed, d...)
		if round > 2 && time.Since(began) > rowTime {
			break // a machine that does much else
		}
		for i, way := range ways {
			d, err := together(callers, max(n/rounds, callers), way)
			if err != nil {
				return err
			}
			if round > 0 { // the first one warms up
				took[i] = append(took[i], d...)
			}
		}
	}
	row := fmt.Sprintf("| %d |", callers)
	base := median(took[0])
	for i := range took {
		row += fmt.Sprintf(" %.2f / %.2f", ms(median(took[i])), ms(p99(took[i])))
		if i > 0 {
			row += fmt.Sprintf(" (%.2f×)", float64(median(took[i]))/float64(base))
		}
		row += " |"
	}
	fmt.Printf("%s %.2f / %.2f |\n", row, ms(median(flushed)), ms(p99(flushed)))
	return nil
}

// flushes measures what PostgreSQL waits for twice in each call: that 8 KiB
// more of a file are on the disk.
func flushes(n int) ([]time.Duration, error) {
	f, err := os.CreateTemp("", "bigwave-bench-*")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	page := make([]byte, 8<<10)
	if _, err := f.Write(make([]byte, 1<<20)); err != nil { // as PostgreSQL's log is there before it is written
		return nil, err
	}
	if err := f.Sync(); err != nil {
		return nil, err
	}
	var took []time.Duration
	for i := range n {
		began := time.Now()
		if _, err := f.WriteAt(page, int64(i%128)*int64(len(page))); err != nil {
			return nil, err
		}
		if err := syscall.Fdatasync(int(f.Fd())); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// together runs n operations by so many workers and returns each one's time.
func together(workers, n int, op func(worker int) error) ([]time.Duration, error) {
	var (
		mu   sync.Mutex
		took []time.Duration
		fail error
		wg   sync.WaitGroup
	)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n; i += workers {
				began := time.Now()
				err := op(w)
				d := time.Since(began)
				mu.Lock()
				took = append(took, d)
				if err != nil && fail == nil {
					fail = err
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return took, fail
}

// bare runs the program with three pipes and reads them to their ends.
func bare(what work) error { return bareCommand(what.bare, "-c", what.script) }

func bareCommand(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	in.Close()
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(io.Discard, errs) })
	_, _ = io.Copy(io.Discard, out)
	wg.Wait()
	return cmd.Wait()
}

func inSandbox(ctx context.Context, s sandbox.Sandbox, what work) error {
	exit, err := s.Exec(ctx, sandbox.Process{
		ID: nextID(), Program: sandbox.Program(what.program), Script: []byte(what.script), InArgv: true,
		Stdout: io.Discard, Stderr: io.Discard, Wall: time.Minute,
	})
	if err == nil && (exit.Reason != sandbox.Exited || exit.Code != 0) {
		err = fmt.Errorf("%s in the sandbox ended as %+v", what.name, exit)
	}
	return err
}

// starts measures from opening a session to its first result.
func starts(ctx context.Context, n int, paths []*daemons) error {
	fmt.Printf("\nSession start to first result (`shell_exec true`), one caller, against the next call of the same session: median / p99 in ms\n\n")
	fmt.Println("| database | first result | next result | over the warm path |\n|---|---|---|---|")
	what := work{tool: "shell_exec", args: `{"command":"true"}`}
	for _, p := range paths {
		var first, next, over []time.Duration
		end := time.Now().Add(rowTime)
		for i := 0; i < n && (i < 10 || time.Now().Before(end)); i++ {
			began := time.Now()
			s, err := p.sessions(ctx, 1)
			if err != nil {
				return err
			}
			if err := p.call(ctx, s[0], what); err != nil {
				return err
			}
			a := time.Since(began)
			began = time.Now()
			if err := p.call(ctx, s[0], what); err != nil {
				return err
			}
			b := time.Since(began)
			first, next, over = append(first, a), append(next, b), append(over, a-b)
			p.closeSessions(ctx, s)
		}
		fmt.Printf("| %s | %.2f / %.2f | %.2f / %.2f | %.2f / %.2f |\n", p.name, ms(median(first)), ms(p99(first)),
			ms(median(next)), ms(p99(next)), ms(median(over)), ms(p99(over)))
	}
	return nil
}

func median(d []time.Duration) time.Duration { return quantile(d, 0.5) }
func p99(d []time.Duration) time.Duration    { return quantile(d, 0.99) }

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	return s[min(len(s)-1, int(q*float64(len(s))))]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

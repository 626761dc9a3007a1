package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// pythonTool is called with and without a sandbox.
const pythonTool = `
from pydantic import BaseModel, Field

class Tools:
    class Valves(BaseModel):
        factor: int = Field(2, description="what is multiplied by")

    def __init__(self):
        self.valves = self.Valves()

    def scale(self, n: int) -> int:
        """
        Multiplies.
        :param n: a number
        """
        return n * self.valves.factor
`

// pythonCosts compares Python in a sandbox that keeps an interpreter warm with
// the image's own Python run bare.
func pythonCosts(ctx context.Context, bin string, n int) error {
	c, err := thisContainerd()
	if err != nil {
		return err
	}
	root := os.Getenv("BIGWAVE_BENCH_ROOT")
	if root == "" {
		return errors.New("BIGWAVE_BENCH_ROOT must name a folder with the base image's files; make bench makes one")
	}
	fmt.Printf("\n## Python\n\nIn a live sandbox of the base image, one caller, against the image's Python run bare: median / p99 in ms\n\n")
	fmt.Println("| | bare | a warm interpreter | | one started for each call | |\n|---|---|---|---|---|---|")
	warm, stop, err := c.backend(bin, 1, true)
	if err != nil {
		return err
	}
	defer stop()
	cold, stop, err := c.backend(bin, 1, false)
	if err != nil {
		return err
	}
	defer stop()
	forked, err := warm.Start(ctx, spec("bench-warm"))
	if err != nil {
		return err
	}
	defer forked.Close(context.WithoutCancel(ctx))
	started, err := cold.Start(ctx, spec("bench-cold"))
	if err != nil {
		return err
	}
	defer started.Close(context.WithoutCancel(ctx))
	if err := awaitWarm(ctx, forked); err != nil {
		return err
	}
	call := harness.Call{
		Tool: harness.Tool{ID: "scale", Content: pythonTool}, Function: "scale",
		Arguments: json.RawMessage(`{"n": 21}`), Valves: json.RawMessage(`{"factor": 3}`),
	}
	body, err := call.Request(harness.Limits{})
	if err != nil {
		return err
	}
	for _, row := range []struct {
		name, script string
		bar          float64
		inside       func(sandbox.Sandbox) error
	}{
		{"`python_exec` of `pass`, against `python3 -c pass`", "pass", 0.4, func(s sandbox.Sandbox) error { return pythonExec(ctx, s, "pass") }},
		{"a Python tool's call, against one `python3 -c` with the same class", pythonTool + "print(Tools().scale(21))\n", 0.2, func(s sandbox.Sandbox) error { return toolCall(ctx, s, body) }},
	} {
		var alone, fast, slow []time.Duration
		for i := range n + 1 {
			a, err := timed(func() error { return bareIn(root, row.script) })
			if err != nil {
				return err
			}
			f, err := timed(func() error { return row.inside(forked) })
			if err != nil {
				return err
			}
			s, err := timed(func() error { return row.inside(started) })
			if err != nil {
				return err
			}
			if i > 0 {
				alone, fast, slow = append(alone, a), append(fast, f), append(slow, s)
			}
		}
		ratio := func(d []time.Duration) float64 { return float64(median(d)) / float64(median(alone)) }
		fmt.Printf("| %s | %.1f / %.1f | %.1f / %.1f | %.2f×, bar ≤ %.1f×: %s | %.1f / %.1f | %.2f× |\n", row.name,
			ms(median(alone)), ms(p99(alone)), ms(median(fast)), ms(p99(fast)), ratio(fast), row.bar, verdict(ratio(fast) <= row.bar),
			ms(median(slow)), ms(p99(slow)), ratio(slow))
	}
	var rest []time.Duration
	for range n {
		d, err := timed(func() error { return pythonExec(ctx, forked, "pass") })
		if err != nil {
			return err
		}
		rest = append(rest, d)
	}
	fmt.Printf("\n%d calls of `python_exec` in a row, without a pause: %.1f / %.1f each.\n", n, ms(median(rest)), ms(p99(rest)))
	return nil
}

// bareIn runs a script with the Python of a root file system, unsandboxed.
func bareIn(root, script string) error {
	return bareCommand("chroot", root, "/usr/bin/python3", "-c", script)
}

func pythonExec(ctx context.Context, s sandbox.Sandbox, script string) error {
	return ended(s.Exec(ctx, sandbox.Process{
		ID: nextID(), Program: sandbox.Python, Script: []byte(script), Stdout: io.Discard, Stderr: io.Discard, Wall: time.Minute,
	}))
}

func toolCall(ctx context.Context, s sandbox.Sandbox, body []byte) error {
	var results harness.Results
	exit, err := s.Exec(ctx, sandbox.Process{
		ID: nextID(), Program: sandbox.Harness, Script: body, Stdout: io.Discard, Stderr: io.Discard, Results: &results, Wall: time.Minute,
	})
	if err := ended(exit, err); err != nil {
		return err
	}
	if got := results.Call(harness.Ending{}); got.Error != nil || got.Text != "63" {
		return fmt.Errorf("the tool answered %+v", got)
	}
	return nil
}

func ended(exit sandbox.Exit, err error) error {
	if err == nil && (exit.Reason != sandbox.Exited || exit.Code != 0) {
		err = fmt.Errorf("Python in the sandbox ended as %+v", exit)
	}
	return err
}

// awaitWarm returns once calls are forked.
func awaitWarm(ctx context.Context, s sandbox.Sandbox) error {
	for range 500 {
		var out strings.Builder
		_, err := s.Exec(ctx, sandbox.Process{
			ID: nextID(), Program: sandbox.Python, Script: []byte("import sys; print('asyncio' in sys.modules)"), Stdout: &out, Wall: time.Minute,
		})
		if err != nil {
			return err
		}
		if out.String() == "True\n" {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return errors.New("the warm interpreter did not come up")
}

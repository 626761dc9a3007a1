package subprocess

import (
	"bytes"
	"context"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// BenchmarkExec compares a call in a live sandbox with the same program
// without one, in turns, so that both see the same machine.
func BenchmarkExec(b *testing.B) {
	backend, err := New(config(b))
	if err != nil {
		b.Fatal(err)
	}
	defer backend.Close(context.Background())
	s, err := backend.Start(b.Context(), sandbox.Spec{ID: "a", Policy: sandbox.Policy{FSAllowlist: []string{"/workspace"}, BaseImage: "bigwave/sandbox-base:latest", MemoryMB: 256, PIDsLimit: 64, CPUShares: 262144}})
	if err != nil {
		b.Fatal(err)
	}
	var sandboxed, inside, bare []time.Duration
	for b.Loop() {
		begin := time.Now()
		var out, errs bytes.Buffer
		e, err := s.Exec(b.Context(), sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("true"), Stdout: &out, Stderr: &errs})
		if err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		sandboxed = append(sandboxed, time.Since(begin))
		inside = append(inside, e.Duration)
		begin = time.Now()
		c := exec.Command("bash", "-c", "true")
		c.Stdin, c.Stdout, c.Stderr = new(bytes.Buffer), &out, &errs
		if err := c.Run(); err != nil {
			b.Fatal(err)
		}
		bare = append(bare, time.Since(begin))
	}
	b.ReportMetric(median(sandboxed), "exec-µs")
	b.ReportMetric(median(inside), "inside-µs")
	b.ReportMetric(median(bare), "bare-µs")
	b.ReportMetric(median(sandboxed)/median(bare), "ratio")
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Microseconds())
}

// BenchmarkGate is what a network_allowlist of five entries adds to a start,
// and to a call.
func BenchmarkGate(b *testing.B) {
	backend, err := New(config(b))
	if err != nil {
		b.Fatal(err)
	}
	defer backend.Close(context.Background())
	var opened, read []time.Duration
	for b.Loop() {
		x, err := backend.prepare(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		begin := time.Now()
		if err := x.openGate(b.Context(), x.b.fence, []string{"ok.test:443", "*.ex.test:443", "a.test:80", "8.8.8.8:53", "10.0.0.0/8:5432"}); err != nil {
			b.Fatal(err)
		}
		opened = append(opened, time.Since(begin))
		begin = time.Now()
		x.denials(x.mark())
		read = append(read, time.Since(begin))
		if err := x.Close(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(median(opened), "open-µs")
	b.ReportMetric(median(read), "denials-µs")
}

package subprocess

import (
	"bytes"
	"context"
	"testing"
	"time"
	"os/exec"
	"fmt"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func TestQuick(t *testing.T) {
	b, err := New(Config{DataDir: t.TempDir(), RunnerID: "quick", InitPath: "/tmp/bwinit-dbg"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range b.Check(t.Context()).Pieces {
		t.Logf("%+v", p)
	}
	time.Sleep(100 * time.Millisecond)
	begin := time.Now()
	s, err := b.Start(t.Context(), sandbox.Spec{ID: "a", Policy: sandbox.Policy{FSAllowlist: []string{"/workspace"}, BaseImage: "bigwave/sandbox-base:latest", MemoryMB: 256, PIDsLimit: 64, CPUShares: 1024}})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("start", time.Since(begin))
	run := func(p sandbox.Process) {
		t.Helper()
		var out, errb bytes.Buffer
		p.Stdout, p.Stderr = &out, &errb
		begin := time.Now()
		e, err := s.Exec(t.Context(), p)
		fmt.Printf("%v: %+v %v file=%+v\nOUT %s\nERR %s\n", time.Since(begin), e, err, e.File, out.String(), errb.String())
	}
	run(sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("id; echo hi $0; ls -la / /workspace /proc/self/fd; mount; cat /proc/self/status; env; cat /proc/self/cgroup; ps aux")})
	run(sandbox.Process{Program: sandbox.Bash, Script: []byte("echo $0\nfoo; ls /proc/self/fd; echo $REPLY; return 3")})
	run(sandbox.Process{Program: sandbox.Python, Script: []byte("import sys,os\nprint(sys.argv, os.getcwd(), globals())\ndef f():\n  raise ValueError(1)\nf()\n")})
	run(sandbox.Process{Program: sandbox.Python, InArgv: true, Script: []byte("print(1); x=bytearray(500<<20); print(2)")})
	run(sandbox.Process{Program: sandbox.FileWrite, Path: "a/b/c.txt", Input: []byte("hello")})
	run(sandbox.Process{Program: sandbox.FileRead, Path: "a/b/c.txt", MaxRead: 100})
	run(sandbox.Process{Program: sandbox.FileRead, Path: "/etc/passwd", MaxRead: 100})
	run(sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("sleep 300 & sleep 300"), Wall: time.Second})
	run(sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte(":(){ :|:& };:"), Wall: time.Second})
	run(sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("echo ok")})
	for range 3 {
		var sum, bare time.Duration
		for range 200 {
			begin := time.Now()
			if _, err := s.Exec(t.Context(), sandbox.Process{Program: sandbox.Bash, InArgv: true, Script: []byte("true"), Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}); err != nil {
				t.Fatal(err)
			}
			sum += time.Since(begin)
			begin = time.Now()
			c := exec.Command("bash", "-c", "true")
			c.Stdout, c.Stderr = &bytes.Buffer{}, &bytes.Buffer{}
			c.Run()
			bare += time.Since(begin)
		}
		fmt.Println("exec", sum/200, "bare", bare/200)
	}
	begin = time.Now()
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	t.Log("close", time.Since(begin))
}

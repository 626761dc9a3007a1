package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestImports keeps the init small: it is in every sandbox and before every
// call. The listed ones are too large, or start goroutines that a fork can't have.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		if !strings.HasSuffix(path, "/runner/cmd/init") && !strings.HasSuffix(path, "/runner/internal/inside") {
			t.Errorf("the init imports %s", path)
		}
	}
	out, err = exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		switch path {
		case "encoding/json", "net", "log", "log/slog", "os/exec", "os/signal":
			t.Errorf("the init imports %s", path)
		}
	}
}

// TestForksDoNotAllocate asks the compiler: in a fork nothing may come from
// the heap.
func TestForksDoNotAllocate(t *testing.T) {
	out, err := exec.Command("go", "build", "-o", "/dev/null", "-gcflags=-m", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "main.go") {
		t.Fatal("the compiler said nothing")
	}
	for line := range strings.Lines(string(out)) {
		if !strings.Contains(line, "escapes to heap") && !strings.Contains(line, "moved to heap") {
			continue
		}
		for _, file := range []string{"./call.go", "./supervise.go", "./file.go", "./fork.go", "./borrow.go"} {
			if strings.HasPrefix(line, file) {
				t.Errorf("in a fork: %s", line)
			}
		}
	}
}

package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// testpython is the command of an interpreter with pydantic 2: what
// BIGWAVE_TEST_PYTHON names, else the host's.
func testpython(t *testing.T) []string {
	t.Helper()
	command, err := findPython()
	if err != nil {
		t.Fatalf("no python3 with pydantic 2 (%v): install python3-pydantic, or set BIGWAVE_TEST_PYTHON to a command that runs one, such as \"chroot ROOTFS python3\"", err)
	}
	return command
}

var findPython = sync.OnceValues(func() ([]string, error) {
	command := strings.Fields(os.Getenv("BIGWAVE_TEST_PYTHON"))
	if len(command) == 0 {
		command = []string{"python3"}
	}
	const probe = "import sys, pydantic; assert pydantic.VERSION.split('.')[0] == '2', pydantic.VERSION; print(sys.executable)"
	out, err := exec.Command(command[0], append(command[1:], "-I", "-c", probe)...).Output()
	if err != nil {
		return nil, err
	}
	if len(command) == 1 { // python3 may be a script that looks for the real one each time
		command[0] = strings.TrimSpace(string(out))
	}
	return command, nil
})

// session is one run of the program and what came of it.
type session struct {
	*Results
	Events         []json.RawMessage
	Ending         Ending
	Stdout, Stderr string
	Took           time.Duration
}

type requester interface {
	Request(l Limits) ([]byte, error)
}

// play runs the program with a request as a sandbox would, for at most wall.
type play struct {
	limits Limits
	wall   time.Duration // default 30 s
	env    []string
	dir    string
	python []string // default testpython
	argv   func(python string) []string
	reads  func(io.Reader) // instead of Results
}

func (p play) run(t *testing.T, r requester) *session {
	t.Helper()
	body, err := r.Request(p.limits)
	if err != nil {
		t.Fatal(err)
	}
	return p.raw(t, body)
}

func (p play) raw(t *testing.T, body []byte) *session {
	t.Helper()
	if p.python == nil {
		p.python = testpython(t)
	}
	if p.wall == 0 {
		p.wall = 30 * time.Second
	}
	if p.argv == nil {
		p.argv = Command
	}
	last := len(p.python) - 1
	argv := append(append([]string(nil), p.python[:last]...), p.argv(p.python[last])...)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), p.wall) // clean-up runs it too
	defer cancel()
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/tmp", "LANG=C.UTF-8"}, p.env...)
	c.Dir = p.dir
	c.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	requestRead, requestWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	resultRead, resultWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.ExtraFiles = []*os.File{requestRead, resultWrite}
	begun := time.Now()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	requestRead.Close()
	resultWrite.Close()

	s := &session{Results: &Results{Limits: p.limits}}
	s.OnEvent = func(event json.RawMessage) { s.Events = append(s.Events, event) }
	var wg sync.WaitGroup
	wg.Go(func() {
		requestWrite.Write(body)
		requestWrite.Close()
	})
	read := make(chan struct{})
	go func() {
		defer close(read)
		if p.reads != nil {
			p.reads(resultRead)
			return
		}
		io.Copy(s.Results, resultRead)
	}()
	c.Wait()
	s.Took = time.Since(begun)
	wg.Wait()
	select {
	case <-read:
	case <-time.After(2 * time.Second): // a child that outlives it has the descriptor
		t.Error("the result's descriptor is still open after the program's end")
	}
	resultRead.Close()
	s.Stdout, s.Stderr = stdout.String(), stderr.String()
	s.Ending = Ending{Code: c.ProcessState.ExitCode(), TimedOut: ctx.Err() != nil, Wall: p.wall}
	if !c.ProcessState.Exited() {
		s.Ending.Signal = "SIGKILL"
	}
	return s
}

func describe(t *testing.T, source string) (Description, *Error) {
	t.Helper()
	return described(t, play{}.run(t, Describe{Tool: Tool{ID: "case", Content: source}}))
}

func described(t *testing.T, s *session) (Description, *Error) {
	t.Helper()
	d, err := s.Description(s.Ending)
	if err != nil {
		return d, err.(*Error)
	}
	return d, nil
}

func call(t *testing.T, source, function, arguments string) called {
	t.Helper()
	s := play{}.run(t, Call{Tool: Tool{ID: "case", Content: source}, Function: function, Arguments: raw(arguments)})
	return s.called()
}

// called is the answer to Call with what was heard on the way.
type called struct {
	CallResult
	Events []json.RawMessage
}

func (s *session) called() called { return called{s.Call(s.Ending), s.Events} }

func raw(text string) json.RawMessage {
	if text == "" {
		return nil
	}
	return json.RawMessage(text)
}

// same reports whether two JSON texts say the same.
func same(t *testing.T, got, want []byte) bool {
	t.Helper()
	var a, b any
	if err := json.Unmarshal(got, &a); err != nil {
		t.Fatalf("%s: %v", got, err)
	}
	if err := json.Unmarshal(want, &b); err != nil {
		t.Fatalf("%s: %v", want, err)
	}
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}

package box

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

const (
	// How often a call that never got to start is tried, and how long apart:
	// what another call of the sandbox does to memory and pids can end a
	// supervisor before user code is anywhere near.
	startAttempts = 5
	startPause    = 20 * time.Millisecond
	// How long an end that we asked for may take before the whole sandbox goes.
	killTimeout = 5 * time.Second
	// How long a supervisor may take to end its call before it goes itself.
	askTimeout = time.Second
)

// call is one Exec under way.
type call struct {
	x       *box
	p       sandbox.Process
	request request
	before  cgroup.Counters
	mark    uint64 // of the gate's denials
	shared  bool   // another call ran meanwhile
	started time.Time
	origin  int64 // started on the sandbox's clock

	mu      sync.Mutex
	sup     *supervisor
	reason  sandbox.Reason // why we killed it; empty: we did not
	cause   error
	oomThen bool // the limit had already struck when we did
	again   *time.Timer

	file   *sandbox.FileResult
	exited inside.Note  // Kind is 0 until the tree is gone by itself
	ended  inside.Ended // else this
}

// Exec implements sandbox.Sandbox.
func (x *box) Exec(ctx context.Context, p sandbox.Process) (sandbox.Exit, error) {
	if !x.alive() {
		return sandbox.Exit{}, sandbox.ErrClosed
	}
	if ctx.Err() != nil {
		return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1}, nil
	}
	request, body, refusal, err := x.request(p)
	if err != nil {
		return sandbox.Exit{}, err
	}
	if refusal != nil {
		return sandbox.Exit{Reason: sandbox.Refused, Code: -1, File: refusal}, nil
	}
	c := &call{x: x, p: p}
	if x.warmable(p) {
		c.request.fork = forkPacket(request, p)
		defer x.warmUp()
	}
	c.request.packet, c.request.body = inside.AppendRequest(nil, request), body
	return c.run(ctx)
}

// request is what a call's process is asked: as a packet, and its descriptor 3.
type request struct {
	packet, body []byte
	fork         []byte // the packet for a process of the warm interpreter's; nil: not for this call
}

// run tries until the program has started once, and never after.
func (c *call) run(ctx context.Context) (sandbox.Exit, error) {
	c.enter()
	defer c.leave()
	for attempt := 1; ; attempt++ {
		err := c.attempt(ctx, attempt == 1)
		var again *notStartedError
		switch {
		case err == nil:
			return c.exit(), nil
		case !errors.As(err, &again):
			return sandbox.Exit{}, err
		case c.ourReason() != "":
			return c.exit(), nil
		case !c.x.alive():
			return sandbox.Exit{Reason: sandbox.Died, Code: -1}, nil
		case attempt == startAttempts:
			return c.neverStarted(err)
		}
		select {
		case <-time.After(startPause * time.Duration(attempt)):
		case <-ctx.Done():
			return sandbox.Exit{Reason: sandbox.Killed, Cause: context.Cause(ctx), Code: -1}, nil
		}
	}
}

// notStartedError says that user code did not run, so that another try is safe.
type notStartedError struct{ cause error }

func (e *notStartedError) Error() string { return "the call did not start: " + e.cause.Error() }
func (e *notStartedError) Unwrap() error { return e.cause }

// neverStarted blames a limit of the sandbox when its counter says so.
func (c *call) neverStarted(err error) (sandbox.Exit, error) {
	e := sandbox.Exit{Reason: sandbox.Exited, Code: -1, Signal: "SIGKILL"}
	after := c.counters()
	e.OOMKills = after.OOMKills - c.before.OOMKills
	e.OOM = e.OOMKills > 0 || errors.Is(err, syscall.ENOMEM)
	e.PIDsHit = after.PIDsHits > c.before.PIDsHits || errors.Is(err, syscall.EAGAIN)
	if e.OOM || e.PIDsHit {
		return e, nil
	}
	return sandbox.Exit{}, err
}

// enter joins the calls under way and reads the counters to compare with.
func (c *call) enter() {
	c.x.mu.Lock()
	for other := range c.x.calls {
		other.shared, c.shared = true, true
	}
	c.x.calls[c] = true
	alone := len(c.x.calls) == 1
	c.x.mu.Unlock()
	if c.x.group != nil && alone {
		c.x.group.ResetPeak()
	}
	c.before = c.counters()
	c.mark = c.x.mark()
}

func (c *call) leave() {
	c.x.mu.Lock()
	defer c.x.mu.Unlock()
	delete(c.x.calls, c)
}

func (c *call) wasShared() bool {
	c.x.mu.Lock()
	defer c.x.mu.Unlock()
	return c.shared
}

// counters are the sandbox's. A group that can't be read is being removed, and
// the call then ends as Died.
func (c *call) counters() cgroup.Counters {
	if c.x.group == nil {
		return cgroup.Counters{}
	}
	counters, err := c.x.group.Counters()
	if err != nil && c.x.alive() {
		c.x.b.log.Error("no counters", "sandbox", c.x.name, "error", err)
	}
	return counters
}

// attempt hands the request to a supervisor and stays until its tree is gone.
// The first one may find its process forked from the warm interpreter.
func (c *call) attempt(ctx context.Context, first bool) error {
	sup, packet, err := c.supervisor(first)
	if err != nil {
		return &notStartedError{err}
	}
	defer sup.sock.Close()
	files, err := c.x.newFiles(packet, c.request.body, c.p.Program == sandbox.Harness)
	if err != nil {
		c.x.dismiss(sup)
		return err
	}
	defer files.close()
	c.mu.Lock()
	c.sup = sup
	c.mu.Unlock()
	err = sup.sock.send(files.packet, files.theirs()...)
	files.closeTheirs()
	c.x.stockUp()
	if err != nil {
		_ = c.x.kill(sup)
		return &notStartedError{err}
	}
	var content contentWriter
	var copying sync.WaitGroup
	c.copyOutput(&copying, files, &content)
	stop := context.AfterFunc(ctx, func() { c.kill(sandbox.Killed, context.Cause(ctx)) })
	err = c.follow()
	stop()
	c.settle()
	files.drain(&copying)
	if c.file != nil {
		c.file.Content = content.bytes
	}
	return err
}

// supervisor returns one for the call, and the packet that its process takes.
func (c *call) supervisor(first bool) (*supervisor, []byte, error) {
	if first && c.request.fork != nil {
		if sup := c.x.takeFork(); sup != nil {
			return sup, c.request.fork, nil
		}
	}
	sup, err := c.x.take()
	return sup, c.request.packet, err
}

// follow reads the notes of the call to their end.
func (c *call) follow() error {
	var wall *time.Timer
	defer func() {
		if wall != nil {
			wall.Stop()
		}
	}()
	for {
		note, err := c.sup.note()
		if err != nil {
			return c.lost(err)
		}
		switch note.Kind {
		case inside.NoteStarted:
			c.started, c.origin = time.Now(), note.A
			if c.p.Wall > 0 {
				wall = time.AfterFunc(c.p.Wall, func() { c.kill(sandbox.TimedOut, nil) })
			}
			if c.p.Started != nil {
				c.p.Started()
			}
		case inside.NoteFile:
			c.file = fileResult(c.p, note, c.x.roots)
		case inside.NoteFailed:
			if note.B == inside.FailExec {
				return failure(note)
			}
			return &notStartedError{failure(note)}
		case inside.NoteExited:
			if c.started.IsZero() {
				return &notStartedError{errors.New("its process was killed first")}
			}
			c.exited = note
			return nil
		}
	}
}

// lost waits for the end of a tree whose supervisor said nothing more: we
// killed it, or something else did.
func (c *call) lost(cause error) error {
	select {
	case c.ended = <-c.sup.ended:
	case <-c.x.done:
	case <-time.After(killTimeout):
		// It can't be ended by itself; the sandbox goes as a whole.
		_ = c.x.guest.Process.Kill()
		<-c.x.done
	}
	if c.started.IsZero() {
		if c.ended.Errno != 0 {
			cause = syscall.Errno(c.ended.Errno)
		}
		return &notStartedError{cause}
	}
	return nil
}

// kill ends the tree, once, for the first reason that comes.
func (c *call) kill(reason sandbox.Reason, cause error) {
	struck := c.counters().OOMKills > c.before.OOMKills
	c.mu.Lock()
	first := c.reason == ""
	if first {
		c.reason, c.cause, c.oomThen = reason, cause, struck
		// One that does not come back has a process that can't die yet.
		c.again = time.AfterFunc(askTimeout, c.order)
	}
	c.mu.Unlock()
	if first {
		c.order()
	}
}

func (c *call) order() {
	c.mu.Lock()
	sup := c.sup
	c.mu.Unlock()
	if err := c.x.kill(sup); err != nil {
		_ = c.x.guest.Process.Kill() // an init that hears nothing
	}
}

// settle stops what kill has started.
func (c *call) settle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.again != nil {
		c.again.Stop()
	}
}

func (c *call) ourReason() sandbox.Reason {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reason
}

// exit is what the call came to.
func (c *call) exit() sandbox.Exit {
	e := sandbox.Exit{Code: -1, File: c.file}
	switch {
	case c.exited.Kind != 0 && c.exited.B == 0:
		e.Reason = sandbox.Exited
		status := syscall.WaitStatus(c.exited.Status)
		if status.Signaled() {
			e.Signal = unix.SignalName(status.Signal())
		} else {
			e.Code = status.ExitStatus()
		}
	case c.ourReason() != "":
		e.Reason, e.Cause = c.reason, c.cause
	default:
		e.Reason = c.unexplained()
	}
	e.CPU = time.Duration(c.ended.CPU)
	if c.exited.Kind != 0 {
		e.Duration = time.Duration(c.exited.A - c.origin)
		e.CPU = time.Duration(c.exited.CPU)
	} else if !c.started.IsZero() {
		e.Duration = time.Since(c.started)
	}
	if c.file != nil && c.file.Errno != "" && e.Reason == sandbox.Exited {
		e.Reason = sandbox.Refused
	}
	c.count(&e)
	e.Denials = c.x.denials(c.mark)
	return e
}

// unexplained is a supervisor's end that neither it nor we brought about: the
// sandbox died, or the kernel chose the supervisor when memory ran out.
func (c *call) unexplained() sandbox.Reason {
	if c.ended.ID == 0 && c.exited.Kind == 0 {
		return sandbox.Died
	}
	return sandbox.Exited
}

// count adds the kernel's counters and says whom they blame.
func (c *call) count(e *sandbox.Exit) {
	after := c.counters()
	e.OOMKills = max(after.OOMKills-c.before.OOMKills, 0)
	e.PIDsHit = after.PIDsHits > c.before.PIDsHits
	shared := c.wasShared()
	e.OOM = blamed(verdict{
		kills:    e.OOMKills,
		alone:    !shared,
		byUs:     c.ourReason() != "" && e.Reason != sandbox.Exited,
		before:   c.oomThen,
		killed:   e.Signal == "SIGKILL" || e.Code == 128+int(syscall.SIGKILL) || c.exited.Killed > 0,
		unspoken: (c.exited.Kind == 0 || c.exited.B != 0) && e.Reason == sandbox.Exited,
	})
	if c.x.group != nil && !shared {
		e.MemoryPeak = c.x.group.Peak()
	}
	e.MemoryPeak = cmp.Or(e.MemoryPeak, c.exited.MaxRSS) // of the largest process, files included
	if e.Reason == sandbox.Exited && e.Code == -1 && e.Signal == "" {
		e.Signal = "SIGKILL"
	}
	e.DiskFull = c.diskFull(e)
}

// diskFull blames the workspace for a failure when it has no room left.
func (c *call) diskFull(e *sandbox.Exit) bool {
	switch {
	case e.File != nil:
		root, _, ok := beneathRoots(c.p.Path, c.x.roots)
		return e.File.Errno == "ENOSPC" && ok && root == workspace
	case e.Reason == sandbox.Exited && (e.Code != 0 || e.Signal != ""):
		return full(c.x.workspace)
	}
	return false
}

// verdict is what decides whether the memory limit hit a call.
type verdict struct {
	kills    int64 // by the limit while the call ran
	alone    bool  // no other call ran meanwhile
	byUs     bool  // we killed the call
	before   bool  // the limit had struck before we did
	killed   bool  // a process of the call, that we know of, died of a SIGKILL
	unspoken bool  // its supervisor was killed, not by us
}

// blamed is true when one of the limit's kills was this call's: always when it
// ran alone, and with others at its side when it shows the wound.
func blamed(v verdict) bool {
	switch {
	case v.kills == 0:
		return false
	case v.byUs:
		return v.before && v.alone
	default:
		return v.alone || v.killed || v.unspoken
	}
}

// request is what the process that becomes the program has to know, and what
// it gets on its descriptor 3. A FileResult is a refusal without asking.
func (x *box) request(p sandbox.Process) (r inside.Request, body []byte, refusal *sandbox.FileResult, err error) {
	switch p.Program {
	case sandbox.Bash:
		if err := x.guest.Programs.BashErr; err != nil {
			return r, nil, nil, err
		}
		r, body = bashRequest(x.guest.Programs.Bash, p)
	case sandbox.Python:
		if err := x.guest.Programs.PythonErr; err != nil {
			return r, nil, nil, err
		}
		r, body = pythonRequest(x.guest.Programs.Python, p)
	case sandbox.Harness:
		if err := x.guest.Programs.PythonErr; err != nil {
			return r, nil, nil, err
		}
		r, body = harnessRequest(x.guest.Programs.Python, p)
	case sandbox.FileRead, sandbox.FileWrite:
		r, body, refusal = fileRequest(p, x.roots)
		if refusal != nil {
			return r, nil, refusal, nil
		}
	default:
		return r, nil, nil, fmt.Errorf("no program %q", p.Program)
	}
	if p.InArgv {
		if len(p.Script) > maxArgument || slices.Contains(p.Script, 0) {
			return r, nil, nil, fmt.Errorf("a script of %d bytes does not fit in an argument", len(p.Script))
		}
	}
	if r.Env, err = x.environment(p.Env); err != nil {
		return r, nil, nil, err
	}
	return r, body, nil, nil
}

// maxArgument is the kernel's: 32 pages with the NUL.
const maxArgument = 131071

// environment is a sandbox's own small one with more on top.
func (x *box) environment(more map[string]string) ([]string, error) {
	env := map[string]string{
		"PATH":             x.guest.Programs.Path,
		"HOME":             workspace,
		"PWD":              workspace,
		"USER":             "sandbox",
		"LOGNAME":          "sandbox",
		"SHELL":            x.guest.Programs.Bash,
		"LANG":             "C.UTF-8",
		"TMPDIR":           "/tmp",
		"PYTHONUNBUFFERED": "1", // what a killed program printed is kept
	}
	for _, variable := range x.guest.Programs.Env {
		name, value, _ := strings.Cut(variable, "=")
		if _, own := env[name]; !own {
			env[name] = value
		}
	}
	size := 0
	for name, value := range more {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return nil, fmt.Errorf("the environment variable %q can't be passed", name)
		}
		env[name] = value
		size += len(name) + len(value) + 2
	}
	if len(env) > inside.MaxStrings || size > 1<<20 {
		return nil, fmt.Errorf("an environment of %d variables and %d bytes is too large", len(env), size)
	}
	list := make([]string, 0, len(env))
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list, nil
}

// fromDescriptor reads the whole script before it runs a line of it, closes
// the descriptor, and leaves $0, line numbers and variables as bash -c would.
const fromDescriptor = `mapfile -d '' -u 3 REPLY; exec 3<&-; eval "unset REPLY; ${REPLY[0]}"`

func bashRequest(bash string, p sandbox.Process) (inside.Request, []byte) {
	if p.InArgv {
		return inside.Request{Op: inside.OpExec, Path: bash, Argv: []string{"bash", "-c", string(p.Script)}}, nil
	}
	return inside.Request{Op: inside.OpExec, Path: bash, Argv: []string{"bash", "-c", fromDescriptor}, Body: true}, p.Script
}

func pythonRequest(python string, p sandbox.Process) (inside.Request, []byte) {
	if p.InArgv {
		return inside.Request{Op: inside.OpExec, Path: python, Argv: []string{python, "-c", string(p.Script)}}, nil
	}
	return inside.Request{Op: inside.OpExec, Path: python, Argv: []string{python, "-c", bootstrap}, Body: true}, p.Script
}

func harnessRequest(python string, p sandbox.Process) (inside.Request, []byte) {
	body := p.Script
	if body == nil {
		body = []byte{}
	}
	return inside.Request{Op: inside.OpExec, Path: python, Argv: harness.Command(python), Body: true}, body
}

// contentWriter keeps what a file operation sends back.
type contentWriter struct{ bytes []byte }

func (w *contentWriter) Write(p []byte) (int, error) {
	w.bytes = append(w.bytes, p...)
	return len(p), nil
}

// closeFile is for paths on which an error has nobody to tell.
func closeFile(f *os.File) {
	if f != nil {
		_ = f.Close()
	}
}

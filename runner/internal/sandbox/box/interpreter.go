package box

import (
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"strings"
	"time"

	"github.com/bigwave/bigwave/runner/internal/cgroup"
	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// A sandbox that has run Python gets a warm interpreter: a Python that has
// imported what Python tools need, runs nothing of the user's, and forks the
// process of each later call into the call's own namespaces; see warm.py. Where
// it does not come up, or would not do the same, a call has its own started.

//go:embed warm.py
var warmProgram string

// warmStub finds what else it is made of on its descriptor. What it leaves in
// __main__ is what a call's process runs there.
const warmStub = `def _run():
    import sys

    fresh = list(sys.modules)
    import json

    with open(4, "rb") as file:
        config = json.load(file)
    config["fresh"] = fresh
    module = type(sys)("bigwave_warm")
    exec(compile(config["warm"], "<string>", "exec", dont_inherit=True), module.__dict__)
    return module.begin(config)


_run = _run()
_run()
`

const (
	warmAfter    = 20 * time.Millisecond  // the end of the first Python call: the sandbox may be closing
	warmWait     = 100 * time.Millisecond // how long a call waits for its process to be forked
	warmMemory   = 256 << 20              // what a sandbox must have at least: the interpreter takes some 21 MiB of it
	warmFailures = 3                      // forks that failed, after which there are no more
)

// interpreter is the warm one of a sandbox; the box's mu guards it.
type interpreter struct {
	asked    bool // to be started, soon
	started  bool
	up       bool        // it has forked a call
	fork     *supervisor // has no call yet; nil: none
	failures int
}

// warmable reports whether p may be forked from a warm interpreter here. It
// has the init's rights when it starts, so its image must be the operator's own.
func (x *box) warmable(p sandbox.Process) bool {
	if !x.b.cfg.WarmPython || x.image.Name != x.b.maker.Standard() || x.guest.Programs.PythonErr != nil {
		return false
	}
	for _, variable := range x.guest.Programs.Env {
		if strings.HasPrefix(variable, "PYTHON") || strings.HasPrefix(variable, "LD_") {
			return false
		}
	}
	return p.Program == sandbox.Harness || p.Program == sandbox.Python && !p.InArgv
}

// warmUp starts the interpreter, once, soon after the first call that could
// have used it.
func (x *box) warmUp() {
	x.mu.Lock()
	first := !x.python.asked && x.memory >= warmMemory
	x.python.asked = true
	x.mu.Unlock()
	if !first {
		return
	}
	time.AfterFunc(warmAfter, func() {
		select {
		case <-x.done:
		default:
			if err := x.startWarm(); err != nil && !x.ending() {
				x.b.log.Warn("no warm interpreter", "sandbox", x.name, "error", err)
			}
		}
	})
}

// ending reports whether the sandbox is on its way out, where a failure means
// nothing.
func (x *box) ending() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.dead || x.leaving
}

func (x *box) startWarm() error {
	address := int64(0)
	if !x.b.cgroups.Has(cgroup.Memory) {
		address = x.memory
	}
	config, err := json.Marshal(map[string]any{
		"warm":          warmProgram,
		"harness":       harness.Source(),
		"bootstrap":     bootstrap,
		"uid":           x.ids.User,
		"groups":        x.b.root,
		"address_space": address,
		"filter":        hex.EncodeToString(x.b.kernel.Filter),
	})
	if err != nil {
		return err
	}
	program, err := memoryFile("warm", config)
	if err != nil {
		return err
	}
	defer closeFile(program)
	python := x.guest.Programs.Python
	packet := inside.AppendWarm(nil, inside.Warm{
		Path: python,
		Argv: []string{python, "-c", warmStub},
		Env:  []string{"PATH=" + x.guest.Programs.Path, "HOME=/nonexistent", "LANG=C.UTF-8", "PYTHONUNBUFFERED=1"},
	})
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.dead || x.leaving {
		return sandbox.ErrClosed
	}
	x.python.started = true
	if err := x.limitPIDs(); err != nil {
		return err
	}
	if err := x.guest.Control.send(packet, int(program.Fd())); err != nil {
		return err
	}
	x.stockFork()
	return nil
}

// takeFork returns a supervisor whose call the warm interpreter has forked; nil
// when there is none soon.
func (x *box) takeFork() *supervisor {
	late := time.After(warmWait)
	for {
		x.mu.Lock()
		s, up, dead := x.python.fork, x.python.up, x.dead
		x.mu.Unlock()
		if s == nil || dead {
			return nil
		}
		if !up {
			select {
			case <-s.ready:
			default:
				return nil
			}
		}
		select {
		case <-s.ready:
		case <-late:
			return nil
		}
		x.mu.Lock()
		if x.python.fork == s && !x.dead { // else another call has taken it
			x.python.fork = nil
			s.taken = true
			err := x.limitPIDs()
			x.stockFork()
			x.mu.Unlock()
			if err != nil {
				x.b.log.Error("no pids limit", "sandbox", x.name, "error", err)
			}
			return s
		}
		x.mu.Unlock()
	}
}

// stockFork has the next call's process forked, if none waits. mu is held.
func (x *box) stockFork() {
	if x.dead || x.python.fork != nil || x.python.failures >= warmFailures {
		return
	}
	s, err := x.spawnAs(inside.KindFork)
	if err != nil {
		return
	}
	s.ready = make(chan struct{})
	x.python.fork = s
	x.b.working.Go(func() { x.awaitFork(s) })
}

// awaitFork hears whether a call's process was forked.
func (x *box) awaitFork(s *supervisor) {
	note, err := s.note()
	x.mu.Lock()
	defer x.mu.Unlock()
	defer close(s.ready)
	if err == nil && note.Kind == inside.NoteReady {
		x.python.up, x.python.failures = true, 0
		s.forked = true
		_ = x.limitPIDs() // it only gets lower
		return
	}
	if x.python.fork == s {
		x.python.fork = nil
	}
	if x.dead || x.leaving {
		return
	}
	x.python.failures++
	x.dismiss(s)
	if err == nil {
		err = failure(note)
	}
	x.b.log.Warn("the warm interpreter did not fork a call", "sandbox", x.name, "error", err)
}

// forkPacket is r for a process of the warm interpreter's, which becomes another
// one by itself where that would find other modules.
func forkPacket(r inside.Request, p sandbox.Process) []byte {
	r.Op = inside.OpScript
	if p.Program == sandbox.Harness {
		r.Op = inside.OpHarness
	}
	return inside.AppendRequest(nil, r)
}

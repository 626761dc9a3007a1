package sandboxtest

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

func TestFake(t *testing.T) {
	f := &Fake{StartErr: func(s sandbox.Spec) error {
		if s.Policy.BaseImage != Image {
			return &sandbox.StartError{Code: "image_unavailable", Message: "no"}
		}
		return nil
	}}
	if err := f.Sweep(t.Context()); err != nil || !f.Swept() {
		t.Fatal("not swept")
	}
	if _, err := f.Start(t.Context(), sandbox.Spec{ID: "x"}); err == nil {
		t.Error("StartErr was not asked")
	}
	s := Start(t, f)
	for script, want := range map[string]sandbox.Exit{
		"":                {Reason: sandbox.Exited},
		"exit 3":          {Reason: sandbox.Exited, Code: 3},
		"oom":             {Reason: sandbox.Exited, Code: -1, Signal: "SIGKILL", OOM: true, OOMKills: 1},
		"sleep 1h\nnever": {Reason: sandbox.TimedOut, Code: -1},
	} {
		r := Exec(t, s, within(50*time.Millisecond, Bash(script)))
		r.Duration = 0
		if !reflect.DeepEqual(r.Exit, want) {
			t.Errorf("%q: got %+v", script, r.Exit)
		}
	}
	r := Exec(t, s, Bash("echo a b\nwarn c\nflood 3"))
	if r.Stdout != "a b\nxxx" || r.Stderr != "c\n" {
		t.Errorf("got %q, %q", r.Stdout, r.Stderr)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	time.AfterFunc(10*time.Millisecond, func() { cancel(why) })
	if r, err := exec(ctx, s, Bash("sleep 1h")); err != nil || r.Reason != sandbox.Killed || r.Cause != why {
		t.Errorf("got %+v, %v", r.Exit, err)
	}
	Exec(t, s, write("a/b", "x"))
	if r := Exec(t, s, read("/workspace/a/b", 9)); string(r.File.Content) != "x" {
		t.Errorf("got %+v", r.File)
	}
	if r := Exec(t, s, read("/etc/passwd", 9)); r.Reason != sandbox.Refused || !r.File.Denied {
		t.Errorf("got %+v", r.File)
	}
	if r := Exec(t, s, Bash("die")); r.Reason != sandbox.Died {
		t.Errorf("got %+v", r.Exit)
	}
	if _, err := exec(t.Context(), s, Bash("")); !errors.Is(err, sandbox.ErrClosed) || f.Live() != 0 {
		t.Errorf("got %v", err)
	}
}

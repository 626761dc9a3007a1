package run_test

import (
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

func TestAskRunsOneInvocationWhereNobodyElseMay(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		c, err := w.sessions.CreateInternal(t.Context(), "default")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []identity.Principal{alice, admin} {
			if _, err := w.runs.Start(t.Context(), p, c.ID, calls("shell_exec")); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s started a run: %v", p.UserID, err)
			}
		}
		w.runner.set(func(r *runner) {
			r.result = func(run.Call) (run.CallStatus, run.Result) {
				return run.OK, run.Result{Value: []byte("answer"), HasValue: true}
			}
		})
		got, err := w.runs.Ask(t.Context(), c, tool.Invocation{Program: tool.PythonTool, Inquiry: &tool.Inquiry{Ask: tool.Describe, ID: "t"}})
		if err != nil || got.Status != run.OK || string(got.Result.Value) != "answer" {
			t.Fatalf("got %+v, %v", got, err)
		}
		if inv := w.runner.invocation(); inv.Inquiry == nil || inv.Inquiry.ID != "t" {
			t.Errorf("the runner got %+v", inv)
		}
		kept, err := w.db.Run(t.Context(), got.Run)
		if err != nil || kept.Calls[0].Result.HasValue || kept.Calls[0].Result.Value != nil {
			t.Errorf("the answer is kept: %+v, %v", kept.Calls, err)
		}
		for _, p := range []identity.Principal{alice, admin} {
			if _, err := w.runs.Get(t.Context(), p, c.ID, got.Run); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s gets the run: %v", p.UserID, err)
			}
			if _, _, err := w.runs.List(t.Context(), p, c.ID, pageOf(10)); !fault.Is(err, fault.NotFound) {
				t.Errorf("%s lists its runs: %v", p.UserID, err)
			}
		}
	})
}

func TestAnotherReplicaDoesNotAskAgain(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		w.runner.set(func(r *runner) { r.ignore = true })
		c, err := w.sessions.CreateInternal(t.Context(), "default")
		if err != nil {
			t.Fatal(err)
		}
		asked, runs := make(chan struct{}), w.runs
		go func() {
			defer close(asked)
			_, _ = runs.Ask(t.Context(), c, tool.Invocation{Program: tool.PythonTool, Inquiry: &tool.Inquiry{Ask: tool.Describe}})
		}()
		w.until("it waits for a sandbox", func() bool { return w.runner.announced.Load() > 0 })
		w.runner.set(func(r *runner) { r.ignore = false })
		w.replica("replica-2", false)
		w.until("it has ended", func() bool {
			runs, _, err := w.db.Runs(t.Context(), c.ID, pageOf(10))
			return err == nil && len(runs) == 1 && runs[0].Status.Final()
		})
		<-asked
		ended, _, err := w.db.Runs(t.Context(), c.ID, pageOf(10))
		if got := ended[0].Calls[0]; err != nil || got.Status != run.InvalidArguments && got.Status != run.StartFailed || w.runner.startedAny() {
			t.Errorf("got %s, %v", got.Status, err)
		}
	})
}

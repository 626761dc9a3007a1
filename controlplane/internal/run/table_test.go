package run

import (
	"slices"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/session"
	"github.com/bigwave/bigwave/shared/fault"
)

// reachable are the states that moves lead to from one.
func reachable[S comparable](from S, all []S, may func(S, S) bool) map[S]bool {
	seen := map[S]bool{from: true}
	for more := true; more; {
		more = false
		for _, a := range all {
			for _, b := range all {
				if seen[a] && !seen[b] && may(a, b) {
					seen[b], more = true, true
				}
			}
		}
	}
	return seen
}

func TestTheTablesOfStatesAreComplete(t *testing.T) {
	t.Run("run", func(t *testing.T) {
		check(t, Queued, Statuses(), May, Status.Final)
	})
	t.Run("call", func(t *testing.T) {
		all := append(OpenCallStatuses(), Finals()...)
		check(t, Pending, all, MayCall, CallStatus.Final)
		for _, s := range Finals() {
			if !MayCall(Sent, s) || !MayCall(Accepted, s) || !MayCall(Started, s) {
				t.Errorf("a call in flight can't end as %s", s)
			}
			if s != OK && usual[s] == "" {
				t.Errorf("%s has no usual code", s)
			}
		}
		if MayCall(Pending, OK) || MayCall(Sent, Pending) || MayCall(Started, Sent) {
			t.Error("a call may go back, or end well without having been sent")
		}
	})
	t.Run("session", func(t *testing.T) {
		check(t, session.New, session.Statuses(), session.May, session.Status.Final)
		if session.May(session.Lost, session.Live) || session.May(session.Closed, session.Starting) {
			t.Error("what is lost or closed may live again")
		}
	})
}

func check[S comparable](t *testing.T, first S, all []S, may func(S, S) bool, final func(S) bool) {
	t.Helper()
	seen := reachable(first, all, may)
	for _, s := range all {
		if !seen[s] {
			t.Errorf("%v can't be reached", s)
		}
		out := slices.ContainsFunc(all, func(to S) bool { return may(s, to) })
		if out == final(s) {
			t.Errorf("%v: final is %v, a way out %v", s, final(s), out)
		}
		ends := false
		for to := range reachable(s, all, may) {
			ends = ends || final(to)
		}
		if !ends {
			t.Errorf("%v leads to no end", s)
		}
	}
}

func TestWhatMayBeSentNow(t *testing.T) {
	call := func(states ...CallStatus) []Call {
		var cs []Call
		for _, s := range states {
			cs = append(cs, Call{Status: s})
		}
		return cs
	}
	for name, tc := range map[string]struct {
		run  Run
		want []int
	}{
		"the first":                       {Run{Calls: call(Pending, Pending)}, []int{0}},
		"none while one runs":             {Run{Calls: call(Sent, Pending)}, nil},
		"the next after an end":           {Run{Calls: call(Error, Pending, Pending)}, []int{1}},
		"past what was refused":           {Run{Calls: call(InvalidArguments, Pending)}, []int{1}},
		"all at once":                     {Run{Parallel: true, Calls: call(Pending, OK, Pending)}, []int{0, 2}},
		"the rest, while others run":      {Run{Parallel: true, Calls: call(Started, Pending)}, []int{1}},
		"nothing when everything is over": {Run{Calls: call(OK, OK)}, nil},
	} {
		if got := tc.run.sendable(); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}

func TestEveryUsualCodeIsKnown(t *testing.T) {
	for s, code := range usual {
		if _, ok := fault.Codes[code]; !ok {
			t.Errorf("%s: %s has no advice", s, code)
		}
	}
}

// Package fleet knows the runners: who was seen, with what load, who drains
// and who is lost.
package fleet

import "time"

// State says whether a runner may be relied on.
type State string

// The states of a runner.
const (
	Ready    State = "ready"
	Draining State = "draining" // finishes what it has, takes nothing new
	Lost     State = "lost"     // its beats stopped, or it started anew
	Left     State = "left"     // said goodbye
)

// Runner is one runner as its last accepted beat told.
type Runner struct {
	ID            string
	Incarnation   string
	Pool          string
	State         State
	Backend       string
	Version       string
	Labels        map[string]string
	Enforces      map[string]string
	Slots, Used   int
	StartFailures int    // in a row, up to the last beat
	StartFailure  string // why the last of them failed
	FirstSeen     time.Time
	LastBeat      time.Time
}

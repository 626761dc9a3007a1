// Package session owns agent sessions: each is one sandbox's worth of state,
// held by one runner at a time under an epoch.
package session

import (
	"slices"
	"time"
)

// Status is a session's state.
type Status string

// The states.
const (
	New      Status = "new"      // never had a sandbox
	Starting Status = "starting" // a ticket is out under the current epoch
	Live     Status = "live"     // its sandbox is up on Runner
	Idle     Status = "idle"     // no sandbox, nothing lost: the next run starts one
	Lost     Status = "lost"     // its sandbox and files are gone
	Closed   Status = "closed"   // ended by its owner or by its TTL
)

// next is the state table.
var next = map[Status][]Status{
	New:      {Starting, Closed},
	Starting: {Starting, Live, Idle, Lost, Closed},
	Live:     {Idle, Lost, Closed},
	Idle:     {Starting, Closed},
	Lost:     {Closed},
	Closed:   {},
}

// Statuses lists every state.
func Statuses() []Status { return []Status{New, Starting, Live, Idle, Lost, Closed} }

// May reports whether a session may go from one state to another.
func May(from, to Status) bool { return slices.Contains(next[from], to) }

// Final reports whether nothing follows s.
func (s Status) Final() bool { return len(next[s]) == 0 }

// Session is one agent session.
type Session struct {
	ID        string
	Workspace string
	Owner     string // user id of its creator
	Status    Status
	Reason    string // why it is idle, lost or closed; a code
	Epoch     int64  // rises with every ticket and every loss

	Runner      string // who claimed the epoch; empty until then
	Incarnation string
	StartBy     time.Time // starting: when this attempt is given up and the epoch rises
	Backend     string    // what the live sandbox says about itself
	Isolation   string
	ImageDigest string
	Enforced    map[string]string

	// The policy as resolved when the epoch was claimed.
	PolicyDigest     string
	WallClockSeconds int64
	OutputBytesLimit int64

	IdleTTL    time.Duration
	CreatedAt  time.Time
	LastUsedAt time.Time
	ExpiresAt  time.Time // hard end, whatever it does
}

// Package run owns runs and their calls: it starts them, moves them forward
// exactly once by what the runners report, and finishes what a lost runner or
// a lost replica left open.
package run

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/tool"
)

// Status is a run's state.
type Status string

// The states of a run.
const (
	Queued         Status = "queued"
	Running        Status = "running"
	Finished       Status = "finished" // every call is final, whatever their statuses
	Failed         Status = "failed"   // the model or we failed
	Cancelled      Status = "cancelled"
	BudgetExceeded Status = "budget_exceeded"
)

var nextRun = map[Status][]Status{
	Queued:         {Running, Finished, Failed, Cancelled},
	Running:        {Finished, Failed, Cancelled, BudgetExceeded},
	Finished:       {},
	Failed:         {},
	Cancelled:      {},
	BudgetExceeded: {},
}

// Statuses lists every state of a run.
func Statuses() []Status {
	return []Status{Queued, Running, Finished, Failed, Cancelled, BudgetExceeded}
}

// May reports whether a run may go from one state to another.
func May(from, to Status) bool { return slices.Contains(nextRun[from], to) }

// Final reports whether nothing follows s.
func (s Status) Final() bool { return len(nextRun[s]) == 0 }

// CallStatus is a call's state.
type CallStatus string

// The states of a call: four on the way, then the finals.
const (
	Pending  CallStatus = "pending"
	Sent     CallStatus = "sent"     // an order may be on its way; never sent to another incarnation
	Accepted CallStatus = "accepted" // the runner said so
	Started  CallStatus = "running"

	OK               CallStatus = "ok"
	Error            CallStatus = "error"
	InvalidArguments CallStatus = "invalid_arguments"
	TimedOut         CallStatus = "timed_out"
	OOMKilled        CallStatus = "oom_killed"
	PIDsExhausted    CallStatus = "pids_exhausted"
	DiskFull         CallStatus = "disk_full"
	OutputLimit      CallStatus = "output_limit"
	Denied           CallStatus = "denied"
	CallCancelled    CallStatus = "cancelled"
	StartFailed      CallStatus = "start_failed"
	RunnerLost       CallStatus = "runner_lost"
)

// Finals lists the final states of a call.
func Finals() []CallStatus {
	return []CallStatus{OK, Error, InvalidArguments, TimedOut, OOMKilled, PIDsExhausted, DiskFull,
		OutputLimit, Denied, CallCancelled, StartFailed, RunnerLost}
}

// byRunner are the finals that a runner's report may carry.
var byRunner = Finals()

var nextCall = map[CallStatus][]CallStatus{
	Pending:  {Sent, InvalidArguments, Denied, CallCancelled, StartFailed, RunnerLost},
	Sent:     append([]CallStatus{Accepted, Started}, byRunner...),
	Accepted: append([]CallStatus{Started}, byRunner...),
	Started:  byRunner,
}

// MayCall reports whether a call may go from one state to another.
func MayCall(from, to CallStatus) bool { return slices.Contains(nextCall[from], to) }

// inFlight are the states of a call that a runner may be running.
var inFlight = []CallStatus{Sent, Accepted, Started}

// OpenCallStatuses lists the states of a call that is not final.
func OpenCallStatuses() []CallStatus { return []CallStatus{Pending, Sent, Accepted, Started} }

// sent reports whether a runner may be running c.
func (c Call) sent() bool { return slices.Contains(inFlight, c.Status) }

// Final reports whether nothing follows s.
func (s CallStatus) Final() bool { return len(nextCall[s]) == 0 }

// Run is one POST …/run.
type Run struct {
	ID         string
	Session    string
	Workspace  string
	Owner      string // user id of the caller
	Status     Status
	Parallel   bool
	Tools      []tool.Pin // the Python tools that it may call, as they were when it began
	Calls      []Call
	Output     string
	Usage      Usage
	CreatedAt  time.Time
	StartedAt  time.Time // zero: not yet
	FinishedAt time.Time // zero: not yet

	OpenCalls    int    // calls that are not final
	CancelReason string // who asked for its end: "client", "session_closed", "ttl"; empty: nobody

	Replica    string    // which replica drives it
	LeaseUntil time.Time // until when no other may
}

// Usage sums up a run.
type Usage struct {
	Calls      int
	CPUMS      float64
	DurationMS float64
}

// Call is one tool call of a run.
type Call struct {
	ID        string // ours, globally unique; in orders and events
	ClientID  string // the client's own, echoed
	Run       string
	Session   string
	Workspace string
	Index     int
	Name      string
	Arguments json.RawMessage
	Status    CallStatus

	Epoch       int64  // under which it was sent
	Runner      string // to whom it was sent
	Incarnation string
	SentAt      time.Time

	Result Result // meaningful once Status is final
}

// Result is how a call ended.
type Result struct {
	Error       *Failure
	ExitCode    *int
	Signal      string
	Stdout      []byte // kept bytes, exact
	Stderr      []byte
	Value       []byte // file_read: the content; Returned: an object
	Encoding    string // file_read: "base64" when the client asked for it; or Returned
	HasValue    bool
	StdoutBytes int64 // as written by the tool
	StderrBytes int64
	Truncated   bool
	DurationMS  float64
	CPUMS       float64
	MemoryPeak  int64
	OOMKills    int64
	Denials     []Denial

	Backend      string
	Isolation    string
	ImageDigest  string
	PolicyDigest string
	Enforced     map[string]string
	Retryable    bool
}

// Returned is the Encoding of what a function of a Python tool returned: an
// object with type, text, value, files, embeds and events_dropped.
const Returned = "returned"

// Failure is why a call did not end well: one of fault's codes and a sentence.
type Failure struct {
	Code     string
	Message  string
	Field    string
	Limit    *int64
	Observed *int64
}

// Denial is something that the fence refused while a call ran.
type Denial struct{ Kind, Target, Reason string }

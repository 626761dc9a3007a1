// Package wire is the protocol between the control plane and the runners: the
// payloads that travel inside signed envelopes, and the frames beside them.
// Every change of a field raises Version.
package wire

// Version is the protocol's version; an order of another version is refused.
const Version = 2

// Payload types of the signed envelopes. The type is inside the signature.
const (
	OrderType  = "application/vnd.bigwave.order+json"
	ClaimType  = "application/vnd.bigwave.claim+json"
	BeatType   = "application/vnd.bigwave.beat+json"
	ReportType = "application/vnd.bigwave.report+json"
)

// Size caps in bytes.
const (
	MaxOrder       = 512 << 10 // a sealed order as it travels
	MaxInline      = 256 << 10 // a script or file content inside an order; beyond: a blob
	MaxInlineDone  = 512 << 10 // kept output inside a report, in total; beyond: a blob
	MaxArgvElement = 131071    // a rendered template: one argv element
	BlobChunk      = 256 << 10
	MaxBlob        = 64 << 20
)

// OrderKind says what a runner is told to do.
type OrderKind string

// The kinds of orders.
const (
	OrderStart  OrderKind = "start"
	OrderCall   OrderKind = "call"
	OrderCancel OrderKind = "cancel"
	OrderStop   OrderKind = "stop"
	OrderStatus OrderKind = "status"
	OrderDrain  OrderKind = "drain"
)

// Order is the signed instruction to one start of one runner. No host paths,
// devices, capabilities or hooks exist as fields.
type Order struct {
	V           int       `json:"v"`
	JTI         string    `json:"jti"` // never used twice
	Kind        OrderKind `json:"kind"`
	Runner      string    `json:"runner"`      // audience: the runner
	Incarnation string    `json:"incarnation"` // audience: this start of it
	IssuedAt    int64     `json:"iat"`         // Unix milliseconds
	ExpiresAt   int64     `json:"exp"`         // Unix milliseconds, at most MaxLifeMS after IssuedAt
	Workspace   string    `json:"workspace"`
	Session     string    `json:"session"`
	Epoch       int64     `json:"epoch"`
	Start       *Start    `json:"start,omitempty"`
	Call        *Call     `json:"call,omitempty"`
	Target      string    `json:"target,omitempty"` // cancel, status: the call id
}

// MaxLifeMS is the longest life of an order, SkewMS the clock skew that is
// forgiven, in milliseconds.
const (
	MaxLifeMS = 60_000
	SkewMS    = 30_000
)

// Codes of refused orders, beside those of an envelope that can't be opened.
const (
	RefusedVersion        = "version"         // of another protocol
	RefusedSubject        = "subject"         // it came on another subject
	RefusedPayload        = "payload"         // its fields do not fit its kind
	RefusedAudience       = "audience"        // for another runner or another start
	RefusedBadTime        = "bad_time"        // times that can't be
	RefusedFuture         = "future"          // issued later than now
	RefusedExpired        = "expired"         // its life is over
	RefusedUnclaimed      = "unclaimed"       // a start that answers no claim
	RefusedEpoch          = "epoch"           // of an epoch that the runner does not hold
	RefusedUnknownSession = "unknown_session" // the runner holds nothing of the session
	RefusedDuplicate      = "duplicate"       // the order or its call was seen before
	RefusedCancelled      = "cancelled"       // the call was cancelled or asked for before it came
	RefusedMemoryFull     = "memory_full"     // no more can be remembered
	RefusedCeiling        = "ceiling"         // over the runner's own bounds
	RefusedCapacity       = "capacity"        // as many calls as it may carry
	RefusedDraining       = "draining"        // it is shutting down
	RefusedUnheard        = "unheard"         // its beats are not answered
	RefusedError          = "error"           // it could not be carried out
	RefusedTicket         = "ticket"          // counted only: a ticket that is malformed
)

// States of a call, in answers to cancel and status.
const (
	CallUnknown = "unknown" // never came, and can't come any more
	CallRunning = "running"
	CallEnded   = "done"
)

// Start makes the session's sandbox.
type Start struct {
	Policy       Policy `json:"policy"`
	PolicyDigest string `json:"policy_digest"`
}

// Policy is the resolved sandbox policy.
type Policy struct {
	FSAllowlist      []string `json:"fs_allowlist"`
	NetworkAllowlist []string `json:"network_allowlist"`
	CPUShares        int64    `json:"cpu_shares"`
	MemoryMB         int64    `json:"memory_mb"`
	PIDsLimit        int64    `json:"pids_limit"`
	WallClockSeconds int64    `json:"wall_clock_seconds"`
	OutputBytesLimit int64    `json:"output_bytes_limit"`
	BaseImage        string   `json:"base_image"`
}

// Programs that a call may name.
const (
	Bash      = "bash"
	Python    = "python3"
	FileRead  = "file_read"
	FileWrite = "file_write"

	PythonTool = "python_tool" // describes, validates or calls a Python tool: Script is a ToolRequest
)

// Call runs one thing in the session's sandbox. Wall clock and output limit
// are the sandbox's own, from its Start.
type Call struct {
	ID       string `json:"id"`
	Run      string `json:"run"`
	Program  string `json:"program"`            // one of the programs
	InArgv   bool   `json:"in_argv"`            // a rendered template: the script is `-c`'s argument
	Script   []byte `json:"script,omitempty"`   // bash, python3: the source; file_write: the content; python_tool: the request
	Blob     *Blob  `json:"blob,omitempty"`     // instead of Script when that is larger than MaxInline
	Path     string `json:"path,omitempty"`     // file_read, file_write
	Encoding string `json:"encoding,omitempty"` // file_read: "base64" to always answer so; else text when it is UTF-8
}

// Blob names bytes that travel beside an order or a report.
type Blob struct {
	ID     string `json:"id"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"` // lower-case hex
}

// OrderReply answers an order. An order that was accepted is remembered; one
// that was refused has left no process.
type OrderReply struct {
	Accepted bool   `json:"accepted"`
	Code     string `json:"code,omitempty"`   // why refused
	Reason   string `json:"reason,omitempty"` // for people
	State    string `json:"state,omitempty"`  // cancel, status: of the call
}

// Ticket says that a session wants a sandbox; it is not an order.
type Ticket struct {
	V       int    `json:"v"`
	Session string `json:"session"`
	Epoch   int64  `json:"epoch"`
}

// Claim is a runner's wish to own a session's epoch.
type Claim struct {
	V           int    `json:"v"`
	Runner      string `json:"runner"`
	Incarnation string `json:"incarnation"`
	Session     string `json:"session"`
	Epoch       int64  `json:"epoch"`
	At          int64  `json:"at"` // Unix milliseconds
}

// ClaimReply answers a claim: the sealed start order, or taken.
type ClaimReply struct {
	Taken  bool   `json:"taken,omitempty"`
	Reason string `json:"reason,omitempty"`
	Order  []byte `json:"order,omitempty"`
}

// ReportKind says what a report ends.
type ReportKind string

// The kinds of reports. Each is published once, on the event stream's final
// subject, and kept by the runner until the stream has it.
const (
	SessionStarted ReportKind = "session.started"
	SessionFailed  ReportKind = "session.failed" // no sandbox
	SessionEnded   ReportKind = "session.ended"  // stopped, or died
	CallDone       ReportKind = "call.done"
)

// Report is a runner's signed word on how something ended.
type Report struct {
	V           int        `json:"v"`
	Kind        ReportKind `json:"kind"`
	Runner      string     `json:"runner"`
	Incarnation string     `json:"incarnation"`
	Session     string     `json:"session"`
	Epoch       int64      `json:"epoch"`
	At          int64      `json:"at"`                // Unix milliseconds
	Sandbox     *Sandbox   `json:"sandbox,omitempty"` // session.started
	Failure     *Failure   `json:"failure,omitempty"` // session.failed, session.ended
	Run         string     `json:"run,omitempty"`
	Call        string     `json:"call,omitempty"`
	Done        *Done      `json:"done,omitempty"` // call.done
}

// Sandbox is what a live sandbox says about itself.
type Sandbox struct {
	Backend      string            `json:"backend"`
	Isolation    string            `json:"isolation"`
	ImageDigest  string            `json:"image_digest,omitempty"`
	PolicyDigest string            `json:"policy_digest"`
	Enforced     map[string]string `json:"enforced,omitempty"`
}

// Failure is why there is no sandbox, or no longer one. Code is one of
// fault's codes or one of the two below.
type Failure struct {
	Code    string `json:"code"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

// Why a session ended on its runner without a fault.
const (
	Stopped       = "stopped"        // it was asked for
	RunnerStopped = "runner_stopped" // the runner was shut down
)

// Done is the outcome of a call. Status is one of the final call statuses.
type Done struct {
	Status      string   `json:"status"`
	Error       *Error   `json:"error,omitempty"`
	ExitCode    *int     `json:"exit_code,omitempty"`
	Signal      string   `json:"signal,omitempty"`
	Stdout      []byte   `json:"stdout,omitempty"` // kept bytes, exact
	Stderr      []byte   `json:"stderr,omitempty"`
	Value       []byte   `json:"value,omitempty"`      // file_read: the content; python_tool: see ToolAnswer and ToolResult
	HasValue    bool     `json:"has_value,omitempty"`  // there is a value, which may be empty
	ValueKind   string   `json:"value_kind,omitempty"` // PythonTool when Value is a ToolResult
	Output      *Blob    `json:"output,omitempty"`     // instead of the three when they are large: Output holds them in this order
	OutputSizes [3]int64 `json:"output_sizes"`         // lengths of stdout, stderr, value within Output
	StdoutBytes int64    `json:"stdout_bytes"`         // as written by the tool
	StderrBytes int64    `json:"stderr_bytes"`
	Truncated   bool     `json:"truncated,omitempty"`
	StartedAt   int64    `json:"started_at,omitempty"` // Unix milliseconds; 0: never started
	DurationMS  float64  `json:"duration_ms"`
	CPUMS       float64  `json:"cpu_ms"`
	MemoryPeak  int64    `json:"memory_peak_bytes"`
	OOMKills    int64    `json:"oom_kills"`
	Denials     []Denial `json:"denials,omitempty"`
}

// Error is why a call did not end well.
type Error struct {
	Code     string `json:"code"`
	Message  string `json:"message"`
	Field    string `json:"field,omitempty"`
	Limit    *int64 `json:"limit,omitempty"`
	Observed *int64 `json:"observed,omitempty"`
}

// Denial is something that the fence refused while a call ran.
type Denial struct {
	Kind   string `json:"kind"`
	Target string `json:"target"`
	Reason string `json:"reason"`
}

// Beat is a runner's sign of life.
type Beat struct {
	V             int               `json:"v"`
	Runner        string            `json:"runner"`
	Incarnation   string            `json:"incarnation"`
	At            int64             `json:"at"` // Unix milliseconds
	Pool          string            `json:"pool"`
	Version       string            `json:"version"`
	Backend       string            `json:"backend"`
	Labels        map[string]string `json:"labels,omitempty"`
	Enforces      map[string]string `json:"enforces,omitempty"`
	Slots         int               `json:"slots"`
	Used          int               `json:"used"`
	Draining      bool              `json:"draining,omitempty"`
	StartFailures int               `json:"start_failures,omitempty"` // in a row, up to now
	StartFailure  string            `json:"start_failure,omitempty"`  // why the last of them failed, for people
	Sessions      []Held            `json:"sessions,omitempty"`
	Calls         []string          `json:"calls,omitempty"`
	Leaving       bool              `json:"leaving,omitempty"` // the last beat of this start
}

// Held is a session's epoch that a runner holds.
type Held struct {
	Session string `json:"session"`
	Epoch   int64  `json:"epoch"`
}

// BeatReply answers a beat. Raised are sessions that the runner no longer
// owns and has to end.
type BeatReply struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"`
	Raised []Held `json:"raised,omitempty"`
}

// FrameKind says what an unsigned frame of the live stream is.
type FrameKind string

// The kinds of frames.
const (
	FrameStarted FrameKind = "call.started"
	FrameOutput  FrameKind = "call.output"
	FrameEvent   FrameKind = "call.event"
)

// The streams of a call's output.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// Frame is one piece of the live stream of a call. It feeds watchers only;
// the truth is in the report.
type Frame struct {
	Run    string    `json:"run"`
	Call   string    `json:"call"`
	Kind   FrameKind `json:"kind"`
	N      int64     `json:"n"`                // counts from 1 in each call
	Stream string    `json:"stream,omitempty"` // output: one of the two
	Data   []byte    `json:"data,omitempty"`
}

// Notice is what the control plane itself puts on the event stream; readers
// load the object from the database.
type Notice struct {
	Kind string `json:"kind"` // "run.started" "call.finished" "run.finished" "session.changed"
	Run  string `json:"run,omitempty"`
	Call string `json:"call,omitempty"`
}

// What a BlobRequest asks for.
const (
	BlobPut = "put"
	BlobGet = "get"
)

// BlobRequest moves one chunk of a blob.
type BlobRequest struct {
	Op   string `json:"op"`
	ID   string `json:"id"`
	N    int    `json:"n"` // the chunk's number, from 0
	Data []byte `json:"data,omitempty"`
}

// BlobReply answers a BlobRequest.
type BlobReply struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"`
	Data   []byte `json:"data,omitempty"`
}

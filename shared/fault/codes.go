package fault

// Code is why a call or a sandbox start ended as it did: the `error.code` of
// a result. Codes are part of the API.
type Code string

// The codes of call results.
const (
	ToolFailed          Code = "tool_failed"          // the tool exited with a code other than 0, or by a signal
	InvalidArguments    Code = "invalid_arguments"    // refused before dispatch
	UnknownTool         Code = "unknown_tool"         // no tool of that name in the registry of this run
	ArgumentTooLarge    Code = "argument_too_large"   // rendered or inline size over its cap
	NULByte             Code = "nul_byte"             // a NUL where argv has to carry the value
	WallClock           Code = "wall_clock"           // ran past wall_clock_seconds
	MemoryLimit         Code = "memory_limit"         // the cgroup killed for memory
	PIDsLimit           Code = "pids_limit"           // the cgroup refused a fork
	DiskFull            Code = "disk_full"            // the workspace is full
	OutputFlood         Code = "output_flood"         // wrote more than 16 × output_bytes_limit
	PathDenied          Code = "path_denied"          // a path outside fs_allowlist
	FileFailed          Code = "file_failed"          // file_read or file_write failed inside the sandbox
	Cancelled           Code = "cancelled"            // the client cancelled
	NoRunner            Code = "no_runner"            // no runner of the pool is there
	Capacity            Code = "capacity"             // runners are there, all are full
	ImageUnavailable    Code = "image_unavailable"    // the base image can't be had
	PolicyUnenforceable Code = "policy_unenforceable" // the runner can't enforce a field of the policy
	StartFailed         Code = "start_failed"         // the sandbox could not be made
	OrderRefused        Code = "order_refused"        // the runner refused the order
	SandboxDied         Code = "sandbox_died"         // the sandbox ended under a living runner
	RunnerLost          Code = "runner_lost"          // the runner's beats stopped, or it started anew
	ResultUnavailable   Code = "result_unavailable"   // the outcome is known, its output could not be fetched
	SessionLost         Code = "session_lost"         // the session's sandbox is gone
)

// Advice is what a person is told about a code.
type Advice struct {
	Meaning   string
	Remedy    string
	Retryable bool // the same call may succeed later without a change
}

// Codes is every code with its advice; the documentation is checked against it.
var Codes = map[Code]Advice{
	ToolFailed:          {"The tool ended with a non-zero exit code or by a signal.", "Read stderr, if there is any; the tool's own failure is its answer.", false},
	InvalidArguments:    {"The arguments do not fit the tool; nothing ran.", "Correct the argument that the message names.", false},
	UnknownTool:         {"No tool of that name is registered for this run.", "List the tools with GET /v1/tools.", false},
	ArgumentTooLarge:    {"The rendered command or an argument is over its size cap; nothing ran.", "Write the data to a file with file_write and pass its path.", false},
	NULByte:             {"A value holds a NUL byte, which no argument vector can carry; nothing ran.", "Remove the NUL byte or write the data to a file.", false},
	WallClock:           {"The call ran longer than wall_clock_seconds and was ended.", "Make the tool faster or raise wall_clock_seconds in the policy.", false},
	MemoryLimit:         {"The kernel ended a process of the call because memory_mb was reached.", "Use less memory or raise memory_mb in the policy.", false},
	PIDsLimit:           {"A fork or thread was refused because pids_limit was reached.", "Start fewer processes or raise pids_limit in the policy.", false},
	DiskFull:            {"The workspace is full.", "Delete files or ask the operator for a larger workspace.", false},
	OutputFlood:         {"The call wrote more than 16 times output_bytes_limit and was ended.", "Print less, or write to a file.", false},
	PathDenied:          {"The path is outside the policy's fs_allowlist.", "Use a path under /workspace or add the path to fs_allowlist.", false},
	FileFailed:          {"The file could not be read or written.", "Check that the path exists and is a regular file.", false},
	Cancelled:           {"The client cancelled the call.", "Start it again if it is still wanted.", false},
	NoRunner:            {"No runner of the pool is connected.", "Start a runner, or check its log and its connection to NATS.", true},
	Capacity:            {"Every runner of the pool is full.", "Try again later, close sessions or add a runner.", true},
	ImageUnavailable:    {"The base image is not on the runner and may not be pulled.", "Import the image or allow its registry in the runner's settings.", false},
	PolicyUnenforceable: {"No runner could enforce a field of the policy, so nothing was started.", "Change the field that the message names, or have the operator offer it.", false},
	StartFailed:         {"The sandbox could not be made.", "Read the runner's log; bigwave-runner doctor names what is missing.", true},
	OrderRefused:        {"The runner refused the order.", "Read the runner's log for the reason; check keys and clocks.", false},
	SandboxDied:         {"The sandbox ended while the call was open; it may or may not have run to its end.", "Open a new session. Repeat the call only if repeating it is harmless.", false},
	RunnerLost:          {"The runner was lost while the call was open; it may or may not have run.", "Open a new session. Repeat the call only if repeating it is harmless.", false},
	ResultUnavailable:   {"The call ended but its output could not be fetched.", "Repeat the call only if repeating it is harmless.", false},
	SessionLost:         {"The session's sandbox and its files are gone.", "Open a new session.", false},
}

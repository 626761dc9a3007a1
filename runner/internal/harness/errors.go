package harness

import (
	"fmt"
	"time"
)

// Kind says what kept a request from its answer.
type Kind string

// What the program says.
const (
	Load          Kind = "load"           // the source does not load, or what it offers can't be described
	MissingModule Kind = "missing_module" // a package is not there: Module
	Pydantic      Kind = "pydantic"       // the sandbox's Python has pydantic 1 or none
	BadValves     Kind = "valves"         // values don't fit the tool's class
	NoValves      Kind = "no_valves"      // the tool has no such class
	NoFunction    Kind = "function"       // the tool has no such function
	BadArguments  Kind = "arguments"      // the arguments don't fit the function: Argument, when it is one
	Exception     Kind = "exception"      // the function raised
	Exit          Kind = "exit"           // SystemExit
	TooLarge      Kind = "too_large"      // a description past the limits
	BadRequest    Kind = "request"        // the request itself
)

// What is concluded when the program said nothing, or nonsense.
const (
	Disturbed     Kind = "disturbed" // the tool wrote to the result's descriptor itself
	TimedOut      Kind = "timed_out"
	OOMKilled     Kind = "oom_killed"
	PIDsExhausted Kind = "pids_exhausted"
	DiskFull      Kind = "disk_full"
	Cancelled     Kind = "cancelled"
	Died          Kind = "died" // the interpreter ended without a word: os._exit, a crash, a signal
)

// said reports whether k is one that the program itself gives.
func (k Kind) said() bool {
	switch k {
	case Load, MissingModule, Pydantic, BadValves, NoValves, NoFunction, BadArguments, Exception, Exit, TooLarge, BadRequest:
		return true
	}
	return false
}

// Error is why there is no answer. Message is for people: what str() makes of
// the exception where one was raised, so it may be empty; Sentence never is.
type Error struct {
	Kind      Kind
	Type      string // the exception's class, when there is one
	Message   string
	Traceback string            // from the tool's first frame on, without lines of its source
	Module    string            // MissingModule
	Argument  string            // BadArguments: which one; may be empty
	Manifest  map[string]string // the frontmatter, when a description failed
}

// Error is the sentence.
func (e *Error) Error() string { return e.Sentence() }

// Sentence is the message, or what is known without one.
func (e *Error) Sentence() string {
	switch {
	case e.Kind == Exit:
		return fmt.Sprintf("The tool ended its interpreter: %s(%s).", e.Type, e.Message)
	case e.Message != "":
		return e.Message
	case e.Type != "":
		return "The tool raised " + e.Type + "."
	}
	return "The tool failed."
}

// Line is the sentence after the exception's name, as Python ends a traceback.
func (e *Error) Line() string {
	if e.Kind != Exception || e.Type == "" {
		return e.Sentence()
	}
	if e.Message == "" {
		return e.Type
	}
	return e.Type + ": " + e.Message
}

// disturbed is the answer to a final line that the program would not write.
func disturbed() *Error {
	return &Error{Kind: Disturbed, Message: "The tool disturbed its own result: it is not what it should be."}
}

// Ending is how the interpreter's process ended, by whoever ran it. It counts
// only when the program itself gave no answer. The first cause that is set wins,
// in the order of the fields.
type Ending struct {
	Cancelled bool // somebody stopped it
	OOM       bool // it ran into the memory limit
	MemoryMB  int64
	PIDs      bool // it ran into the pids limit
	PIDsLimit int64
	TimedOut  bool
	Wall      time.Duration
	DiskFull  bool
	Signal    string // "SIGSEGV", …; empty: it exited by itself
	Code      int
}

// Reason is what kept the program from an answer, going by how it ended alone.
func (e Ending) Reason() *Error {
	say := func(k Kind, format string, args ...any) *Error {
		return &Error{Kind: k, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case e.Cancelled:
		return say(Cancelled, "The tool was stopped before it had finished.")
	case e.OOM && e.MemoryMB > 0:
		return say(OOMKilled, "The tool needed more memory than it may have (%d MiB).", e.MemoryMB)
	case e.OOM:
		return say(OOMKilled, "The tool needed more memory than it may have.")
	case e.PIDs && e.PIDsLimit > 0:
		return say(PIDsExhausted, "The tool started more processes and threads than it may have (%d).", e.PIDsLimit)
	case e.PIDs:
		return say(PIDsExhausted, "The tool started more processes and threads than it may have.")
	case e.TimedOut && e.Wall > 0:
		return say(TimedOut, "The tool was still running after %s.", e.Wall)
	case e.TimedOut:
		return say(TimedOut, "The tool was still running when its time was over.")
	case e.DiskFull:
		return say(DiskFull, "The tool filled its disk.")
	case e.Signal != "":
		return say(Died, "The tool's interpreter was ended by %s before it had finished.", e.Signal)
	}
	return say(Died, "The tool ended its interpreter with exit code %d before it had finished.", e.Code)
}

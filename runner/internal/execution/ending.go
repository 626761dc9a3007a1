package execution

import (
	"errors"

	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// ending is why we end a call or a session ourselves; it travels as the cause
// of a context.
type ending struct {
	status  string // of the calls that it ends
	code    fault.Code
	message string
	session wire.Failure // of the session that it ends, if it does
}

// Error is for logs.
func (e *ending) Error() string { return e.message }

// The endings.
var (
	cancelled = &ending{status: "cancelled", code: fault.Cancelled, message: "The client cancelled the call."}
	flooded   = &ending{status: "output_limit", code: fault.OutputFlood, message: "The call wrote more than 16 times output_bytes_limit and was ended; print less or write to a file."}
	stopped   = &ending{status: "cancelled", code: fault.Cancelled, message: "The session was closed while the call ran.",
		session: wire.Failure{Code: wire.Stopped, Message: "The session was closed."}}
	raised = &ending{status: "runner_lost", code: fault.RunnerLost, message: "The session went to another runner while the call ran.",
		session: wire.Failure{Code: string(fault.RunnerLost), Message: "The session no longer belongs to this runner."}}
	unheard = &ending{status: "runner_lost", code: fault.RunnerLost, message: "The runner could not reach the control plane for too long and ended the call.",
		session: wire.Failure{Code: string(fault.RunnerLost), Message: "The runner could not reach the control plane for too long and closed the sandbox."}}
	shutdown = &ending{status: "runner_lost", code: fault.RunnerLost, message: "The runner was shut down before the call ended by itself; the call was ended.",
		session: wire.Failure{Code: wire.RunnerStopped, Message: "The runner was shut down."}}
	died = &ending{status: "runner_lost", code: fault.SandboxDied, message: "The sandbox ended while the call was open; it may or may not have run to its end.",
		session: wire.Failure{Code: string(fault.SandboxDied), Message: "The sandbox ended by itself."}}
)

// endingOf finds the ending in a cause; a cause of another kind is a shutdown.
func endingOf(err error) *ending {
	if e, ok := errors.AsType[*ending](err); ok {
		return e
	}
	return shutdown
}

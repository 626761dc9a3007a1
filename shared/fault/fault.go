// Package fault names the kinds of error that cross a border of the system:
// each has one kind, one public sentence and one hidden cause.
package fault

import (
	"errors"
	"fmt"
)

// Kind says what sort of thing went wrong. Each border maps kinds to its own
// statuses in one table.
type Kind string

// The kinds, from the caller's mistakes to ours.
const (
	Invalid            Kind = "invalid"             // malformed or out of range; Field names what
	Unauthenticated    Kind = "unauthenticated"     // no bearer, or one that is not known
	Forbidden          Kind = "forbidden"           // known, but may not
	NotFound           Kind = "not_found"           // unknown, or another workspace's
	Conflict           Kind = "conflict"            // the state does not allow it
	PreconditionFailed Kind = "precondition_failed" // a stale If-Match
	TooLarge           Kind = "too_large"           // the body is over its cap
	Unsupported        Kind = "unsupported"         // a media type or encoding we do not read
	Busy               Kind = "busy"                // try again later
	Timeout            Kind = "timeout"             // the client was too slow to send
	Gone               Kind = "gone"                // it was here and is no longer kept
	Unavailable        Kind = "unavailable"         // a part we need is not ready
	Internal           Kind = "internal"            // our own failure
)

// Error is a fault with its public sentence. Message is safe to show to the
// caller; Cause is for the log only.
type Error struct {
	Kind    Kind
	Code    string // machine-readable, finer than Kind; empty means the kind itself
	Field   string // the field or parameter that is wrong, when one is
	Message string
	Cause   error
}

// New returns a fault with a public sentence.
func New(kind Kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Wrap returns a fault that hides err behind a public sentence.
func Wrap(err error, kind Kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...), Cause: err}
}

// On names the field that is wrong and returns e.
func (e *Error) On(field string) *Error {
	e.Field = field
	return e
}

// WithCode sets the machine-readable code and returns e.
func (e *Error) WithCode(code string) *Error {
	e.Code = code
	return e
}

// Error is the public sentence followed by the hidden cause: for logs.
func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

// Unwrap returns the hidden cause.
func (e *Error) Unwrap() error { return e.Cause }

// PublicCode is the code to show: Code, or the kind when there is none.
func (e *Error) PublicCode() string {
	if e.Code != "" {
		return e.Code
	}
	return string(e.Kind)
}

// From returns the fault inside err; any other error becomes an Internal
// fault that hides it.
func From(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return Wrap(err, Internal, "something went wrong on our side")
}

// Is reports whether err is a fault of that kind.
func Is(err error, kind Kind) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Kind == kind
}

package harness

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// maxDepth is how deeply a line may nest; the program's own stay well below.
const maxDepth = 128

// Results takes what the program writes to its result descriptor. Write is
// for one goroutine; the answer is asked for after the last Write. The first
// final line counts, and what follows it is dropped.
type Results struct {
	Limits  Limits                      // those of the request
	OnEvent func(event json.RawMessage) // gets each event within the limits, a JSON object, as it comes, and may keep it; nil: nobody hears them

	pending []byte
	events  int   // passed on
	bytes   int64 // of those
	dropped int64 // events past the limits
	answer  *line
	broken  *Error
}

// line is one line of the program: exactly one of the first three.
type line struct {
	Event         json.RawMessage `json:"event"`
	Result        json.RawMessage `json:"result"`
	Error         *toolError      `json:"error"`
	EventsDropped int64           `json:"events_dropped"`
}

type toolError struct {
	Kind      Kind              `json:"kind"`
	Type      string            `json:"type"`
	Message   string            `json:"message"`
	Traceback string            `json:"traceback"`
	Module    string            `json:"module"`
	Argument  string            `json:"argument"`
	Manifest  map[string]string `json:"manifest"`
}

// Write takes the next bytes, whole lines or not. It never fails: after the
// final line or a broken one it drops what comes.
func (r *Results) Write(p []byte) (int, error) {
	n := len(p)
	limits := r.Limits.orDefault()
	for len(p) > 0 && r.answer == nil && r.broken == nil {
		end := bytes.IndexByte(p, '\n')
		part := p
		if end >= 0 {
			part = p[:end]
		}
		if int64(len(r.pending)+len(part)) > limits.Line {
			r.giveUp("a line is too long")
			break
		}
		r.pending = append(r.pending, part...)
		if end < 0 {
			break
		}
		p = p[end+1:]
		r.take(r.pending, limits)
		r.pending = r.pending[:0]
	}
	if r.answer != nil || r.broken != nil {
		r.pending = nil
	}
	return n, nil
}

func (r *Results) take(raw []byte, limits Limits) {
	if err := scan(raw); err != nil {
		r.giveUp(err.Error())
		return
	}
	var l line
	if err := strictjson.Decode(raw, &l); err != nil {
		r.giveUp("a line is not what it should be")
		return
	}
	given := 0
	for _, has := range []bool{l.Event != nil, l.Result != nil, l.Error != nil} {
		if has {
			given++
		}
	}
	switch {
	case given != 1, l.Result != nil && !object(l.Result):
		r.giveUp("a line is not what it should be")
	case l.Event != nil:
		r.event(l.Event, limits)
	default:
		r.answer = &l
	}
}

func (r *Results) event(event json.RawMessage, limits Limits) {
	if event[0] != '{' {
		r.giveUp("an event is not an object")
		return
	}
	size := int64(len(event))
	if r.events >= limits.Events || size > limits.EventBytes || r.bytes+size > limits.EventTotal {
		r.dropped++
		return
	}
	r.events++
	r.bytes += size
	if r.OnEvent != nil {
		r.OnEvent(bytes.Clone(event))
	}
}

// giveUp gives the stream up: somebody else than the program wrote to it.
func (r *Results) giveUp(why string) {
	r.broken = &Error{
		Kind:    Disturbed,
		Message: "The tool disturbed its own result: " + why + ".",
	}
}

var (
	errDeep = errors.New("a line nests too deeply")
	errNUL  = errors.New("a text holds a NUL character")
)

// scan refuses what a decoder or a database would choke on, in one pass:
// nesting without end and NUL characters.
func scan(raw []byte) error {
	depth, quoted := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case quoted && c == '\\':
			if bytes.HasPrefix(raw[i+1:], []byte("u0000")) {
				return errNUL
			}
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return errDeep
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

// final is the result's JSON, or why there is none.
func (r *Results) final(e Ending) (json.RawMessage, *Error) {
	switch {
	case r.broken != nil:
		return nil, r.broken
	case r.answer == nil:
		return nil, e.Reason()
	case r.answer.Error != nil:
		return nil, r.answer.Error.error()
	}
	return r.answer.Result, nil
}

// Bounds of an error's texts; the program's own are shorter.
const (
	maxText = 32 << 10
	maxWord = 1 << 10
)

func (t *toolError) error() *Error {
	if !t.Kind.said() || len(t.Manifest) > maxKeys {
		return disturbed()
	}
	return &Error{
		Kind:      t.Kind,
		Type:      shorten(t.Type, maxName),
		Message:   shorten(t.Message, maxText),
		Traceback: shorten(t.Traceback, maxText),
		Module:    shorten(t.Module, maxWord),
		Argument:  shorten(t.Argument, maxWord),
		Manifest:  t.Manifest,
	}
}

// Package harness describes, validates and calls Python tools (a source with
// a class Tools) through a program that runs inside a sandbox.
//
// It runs nothing itself. Who wants an answer makes a request (Describe,
// ValidateValves or Call), runs Command in a sandbox with the request's bytes
// on RequestFD, lets a Results take what is written to ResultFD, and asks it
// for the answer once the process has ended:
//
//	body, err := harness.Call{Tool: t, Function: "add", …}.Request(limits)
//	results := &harness.Results{Limits: limits, OnEvent: publish}
//	// … run harness.Command("python3"), body on 3, results on 4, stdout and stderr as output …
//	answer := results.Call(harness.Ending{Code: exit.Code})
//
// The lines are {"event": {…}} as a function emits them, and at the end one
// {"result": {…}} or {"error": {"kind", "type", "message", "traceback", …}}
// with "events_dropped" beside it. Exit code 0 goes with a result, 1 with an error.
//
// The tool runs in the same process as the program and can write to the
// result's descriptor like it. So whatever arrives is a stranger's: it is
// bounded, decoded strictly, and says nothing that the tool's author could
// not have said by other means.
package harness

import (
	_ "embed"
	"encoding/json"
	"fmt"
)

// source is the program; the first comment in it says how it works.
//
//go:embed harness.py
var source string

// The descriptors of the program.
const (
	RequestFD = 3 // the request, read to its end and closed before the tool is loaded
	ResultFD  = 4 // result lines
)

// Source is the program's text: what python3 -c takes.
func Source() string { return source }

// Command is the argv that runs the program with an interpreter. -I keeps the
// working directory and the environment from standing in for modules: what
// lies in a session's files must not get at a tool's valves. The request is
// not in it, since argv is readable to others.
func Command(python string) []string {
	return []string{python, "-I", "-X", "utf8", "-c", source}
}

// Limits bound what a tool may say. Zero fields take their default. The
// program keeps honest tools within them; Results enforces them.
type Limits struct {
	Text        int64 // bytes of a result's text, and of its value as JSON; past it the text keeps head and tail; default 1 MiB
	Attachments int64 // bytes of files and embeds; default 8 MiB
	Line        int64 // bytes of the final line; default 16 MiB
	Events      int   // how many events; default 1000
	EventBytes  int64 // bytes of one event; default 256 KiB
	EventTotal  int64 // bytes of all events; default 4 MiB
}

func (l Limits) orDefault() Limits {
	fill := func(n *int64, d int64) {
		if *n <= 0 {
			*n = d
		}
	}
	fill(&l.Text, 1<<20)
	fill(&l.Attachments, 8<<20)
	fill(&l.Line, 16<<20)
	fill(&l.EventBytes, 256<<10)
	fill(&l.EventTotal, 4<<20)
	if l.Events <= 0 {
		l.Events = 1000
	}
	return l
}

// Tool is a source and how it is loaded.
type Tool struct {
	ID      string   // the module is named tool_<ID>; also __id__
	Content string   // Python source
	Paths   []string // folders in the sandbox with more packages; looked through after the interpreter's own
}

// Describe asks what a tool offers. Results.Description has the answer.
type Describe struct {
	Tool
	Valves json.RawMessage // an object: set first, for tools whose descriptions depend on it; may be nil
}

// Lacks asks which of a tool's requirements the interpreter does not have.
// Nothing of the tool is loaded. Results.Lacking has the answer.
type Lacks struct{ Tool }

// Which names one of a tool's two sets of values.
type Which string

// The sets.
const (
	Valves     Which = "valves"      // the tool's, set by who may write it
	UserValves Which = "user_valves" // each user's own
)

// ValidateValves asks for values as the tool's class takes them.
// Results.Values has the answer.
type ValidateValves struct {
	Tool
	Which  Which
	Values json.RawMessage // an object; keys with null are dropped
}

// User is what a tool learns of the one who calls it, as __user__.
type User struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Email string `json:"email"`
	Role  string `json:"role"`
}

// Call asks to run one function. Results.Call has the answer.
type Call struct {
	Tool
	Function   string
	Arguments  json.RawMessage // an object, or a string that holds one; nil, null and "" mean none
	Valves     json.RawMessage // stored values; nil: none
	UserValves json.RawMessage // this user's; nil: none
	User       User
	Metadata   json.RawMessage // __metadata__; may be nil
	Model      json.RawMessage // __model__; may be nil
	Messages   json.RawMessage // __messages__, an array; may be nil
	Files      json.RawMessage // __files__, an array; may be nil
	ChatID     string          // __chat_id__
	MessageID  string          // __message_id__
}

// request is what the program reads.
type request struct {
	Op         string            `json:"op"`
	ID         string            `json:"id"`
	Content    string            `json:"content"`
	Paths      []string          `json:"paths,omitempty"`
	Limits     limits            `json:"limits"`
	Which      Which             `json:"which,omitempty"`
	Values     json.RawMessage   `json:"values,omitempty"`
	Function   string            `json:"function,omitempty"`
	Arguments  json.RawMessage   `json:"arguments,omitempty"`
	Valves     json.RawMessage   `json:"valves,omitempty"`
	UserValves json.RawMessage   `json:"user_valves,omitempty"`
	User       *User             `json:"user,omitempty"`
	Metadata   json.RawMessage   `json:"metadata,omitempty"`
	Model      json.RawMessage   `json:"model,omitempty"`
	Messages   json.RawMessage   `json:"messages,omitempty"`
	Files      json.RawMessage   `json:"files,omitempty"`
	IDs        map[string]string `json:"ids,omitempty"`
}

type limits struct {
	Text        int64 `json:"text"`
	Attachments int64 `json:"attachments"`
	Line        int64 `json:"line"`
	Events      int   `json:"events"`
	EventBytes  int64 `json:"event_bytes"`
	EventTotal  int64 `json:"event_total"`
}

// Request is the body that the program reads, with the limits that the
// Results must have too. It fails when a raw field is not JSON.
func (d Describe) Request(l Limits) ([]byte, error) {
	r := d.request("describe", l)
	r.Valves = d.Valves
	return r.encode()
}

// Request is the body that the program reads.
func (l Lacks) Request(limits Limits) ([]byte, error) {
	return l.request("lacks", limits).encode()
}

// Request is the body that the program reads. It holds values in clear.
func (v ValidateValves) Request(l Limits) ([]byte, error) {
	r := v.request("validate_valves", l)
	r.Which, r.Values = v.Which, v.Values
	return r.encode()
}

// Request is the body that the program reads. It holds values in clear.
func (c Call) Request(l Limits) ([]byte, error) {
	r := c.request("call", l)
	r.Function, r.Arguments = c.Function, c.Arguments
	r.Valves, r.UserValves = c.Valves, c.UserValves
	r.User, r.Metadata, r.Model = &c.User, c.Metadata, c.Model
	r.Messages, r.Files = c.Messages, c.Files
	r.IDs = map[string]string{}
	if c.ChatID != "" {
		r.IDs["chat"] = c.ChatID
	}
	if c.MessageID != "" {
		r.IDs["message"] = c.MessageID
	}
	return r.encode()
}

func (t Tool) request(op string, l Limits) *request {
	return &request{Op: op, ID: t.ID, Content: t.Content, Paths: t.Paths, Limits: limits(l.orDefault())}
}

func (r *request) encode() ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the request to %s a tool: %w", r.Op, err)
	}
	return body, nil
}

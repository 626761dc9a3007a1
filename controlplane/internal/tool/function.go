package tool

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/bigwave/bigwave/controlplane/internal/render"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// Pin names a Python tool as it was when a run began.
type Pin struct {
	ID       string
	Revision int64
}

// Function is a call of a function of a Python tool. It is bound to the
// source that the run began with. It holds no valves: those are fetched, and
// sealed, when the order is given.
type Function struct {
	Pin
	Digest    string          // of Content, "sha256:…"
	Content   string          // the source
	Name      string          // of the function in the source, whatever it is advertised as
	Arguments json.RawMessage // an object of what the function's parameters name
	User      string          // id of who calls it; known once the order is given
}

// What an Inquiry asks. The words are the protocol's.
const (
	Describe       = "describe"
	ValidateValves = "validate_valves"
)

// Inquiry runs the source of a Python tool to find something out about it. It
// is made where nothing else runs, by the platform alone.
type Inquiry struct {
	Ask     string // Describe or ValidateValves
	ID      string // of the tool
	Content string // the source
	Which   string // ValidateValves: which class
	Values  []byte // secret; Describe: what the tool is set to, nil: nothing
	ReplyTo []byte // the X25519 key that the answer is sealed to
}

// CalledBy is inv for the user who makes the call.
func (inv Invocation) CalledBy(user string) Invocation {
	if inv.Function != nil {
		f := *inv.Function
		f.User = user
		inv.Function = &f
	}
	return inv
}

// pythonSource is what the source of a Python tool's functions starts with.
const pythonSource = "python:"

// NewFunction returns the tool that calls f with a call's arguments. Which
// values fit is for the function to say, since it takes "5" for 5 and the
// like; names that parameters does not have are dropped, so that nobody sets
// what the platform passes.
func NewFunction(f Function, description string, parameters json.RawMessage) Tool {
	return Tool{Name: f.Name, Description: description, Source: pythonSource + f.ID, Parameters: parameters, function: &f}
}

// prepare binds f to the arguments that parameters name.
func (f Function) prepare(args, parameters json.RawMessage) (Invocation, error) {
	args = orObject(args)
	if _, err := render.ParseArguments(args); err != nil {
		return Invocation{}, err
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(args, &given); err != nil {
		return Invocation{}, fault.Wrap(err, fault.Invalid, "arguments must be a JSON object").WithCode(string(fault.InvalidArguments))
	}
	var known struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	if err := json.Unmarshal(parameters, &known); err != nil {
		return Invocation{}, fmt.Errorf("parameters of %s of %s: %w", f.Name, f.ID, err)
	}
	maps.DeleteFunc(given, func(name string, _ json.RawMessage) bool {
		_, ok := known.Properties[name]
		return !ok
	})
	var err error
	if f.Arguments, err = strictjson.Encode(given); err != nil {
		return Invocation{}, fmt.Errorf("arguments of %s of %s: %w", f.Name, f.ID, err)
	}
	return Invocation{Program: PythonTool, Function: &f}, nil
}

// With is r with functions beside what is there. A function never hides
// another tool: when its name is taken it is advertised as
// <tool id>_<function>, and when that is taken too, with a number.
func (r Registry) With(functions []Tool) Registry {
	merged := maps.Clone(r.byName)
	for _, t := range functions {
		t.Name = free(merged, strings.TrimPrefix(t.Source, pythonSource), t.Name)
		merged[t.Name] = t
	}
	return Registry{byName: merged}
}

// free is the first name that is not taken.
func free(taken map[string]Tool, id, function string) string {
	name := advertised(function)
	for n := 2; ; n++ {
		if _, ok := taken[name]; !ok {
			return name
		}
		if name = advertised(id + "_" + function); n > 2 {
			name = advertised(fmt.Sprintf("%s_%s_%d", id, function, n-1))
		}
	}
}

// maxAdvertised is how long a name may be that models take.
const maxAdvertised = 64

// advertised is s as a name that models take: letters, digits, _ and -, and
// not too long. What is cut off lives on in a hash.
func advertised(s string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '_'
	}, s)
	if len(name) > maxAdvertised {
		sum := sha256.Sum256([]byte(s))
		name = name[:maxAdvertised-9] + "_" + hex.EncodeToString(sum[:4])
	}
	return name
}

// Package tool is the registry of what a run may call: the built-ins, the
// tools of the workspace on top of them, and the functions of Python tools
// beside both.
package tool

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/bigwave/bigwave/controlplane/internal/render"
)

// Tool is one callable entry of a registry. Its methods may be called from
// several goroutines.
type Tool struct {
	Name             string
	Description      string
	Parameters       json.RawMessage // the JSON Schema of the arguments, as its author sent it
	Source           string          // "builtin", "workspace" or "python:<id>"
	OverridesBuiltin bool            // a built-in of the same name is hidden behind it

	handler  *handler
	function *Function // of a Python tool, in place of a handler
}

// Builtin is the source of the tools that every workspace has.
const Builtin = "builtin"

// What an Invocation runs. The words are the protocol's.
const (
	Bash      = render.ProgramBash
	Python    = render.ProgramPython
	FileRead  = "file_read"  // no program: the file is read as the call's user would
	FileWrite = "file_write" // written, likewise

	PythonTool = "python_tool" // Function of a Python tool is called, or Inquiry made
)

// Invocation is what a runner is told to carry out.
type Invocation struct {
	Program  string // Bash, Python, FileRead, FileWrite or PythonTool
	Script   string // bash and python3: the source
	InArgv   bool   // Script follows -c as an argument; else it travels on a descriptor
	Path     string // file_read and file_write
	Content  string // file_write: the bytes
	Encoding string // file_read: "base64" to be answered so, whatever the file holds

	Function *Function // python_tool: what to call
	Inquiry  *Inquiry  // python_tool: what to find out; no run can ask for it
}

// Prepare checks args against the tool's parameters and renders the call.
// Nothing is dispatched by it. Every error is a fault of kind Invalid whose
// code is one of the call codes and whose field names the argument.
func (t Tool) Prepare(args json.RawMessage) (Invocation, error) {
	if t.function != nil {
		return t.function.prepare(args, t.Parameters)
	}
	h, err := t.handler.compiled()
	if err != nil {
		return Invocation{}, err
	}
	values, err := render.ParseArguments(orObject(args))
	if err != nil {
		return Invocation{}, err
	}
	if err := h.schema.check(values); err != nil {
		return Invocation{}, err
	}
	return h.prepare(values)
}

// Source offers tools to the runs of a workspace.
type Source interface {
	Tools(ctx context.Context, workspace string) ([]Tool, error)
}

// Registry is what one run may call.
type Registry struct{ byName map[string]Tool }

// Merge asks the sources in turn; a tool of a later one hides a tool of the
// same name of an earlier one.
func Merge(ctx context.Context, workspace string, sources ...Source) (Registry, error) {
	merged := map[string]Tool{}
	for _, s := range sources {
		tools, err := s.Tools(ctx, workspace)
		if err != nil {
			return Registry{}, err
		}
		for _, t := range tools {
			if hidden, ok := merged[t.Name]; ok {
				t.OverridesBuiltin = hidden.Source == Builtin || hidden.OverridesBuiltin
			}
			merged[t.Name] = t
		}
	}
	return Registry{byName: merged}, nil
}

// Lookup finds a tool by its exact name.
func (r Registry) Lookup(name string) (Tool, bool) {
	t, ok := r.byName[name]
	return t, ok
}

// Function finds the function of a Python tool, whatever it is advertised as.
func (r Registry) Function(id, name string) (Tool, bool) {
	for _, t := range r.byName {
		if t.function != nil && t.function.ID == id && t.function.Name == name {
			return t, true
		}
	}
	return Tool{}, false
}

// List returns every tool, by name.
func (r Registry) List() []Tool {
	return slices.SortedFunc(maps.Values(r.byName), func(a, b Tool) int { return cmp.Compare(a.Name, b.Name) })
}

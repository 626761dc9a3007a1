// Package builtin is the four tools that every workspace has.
package builtin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"

	"github.com/bigwave/bigwave/controlplane/internal/render"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

// Source offers the built-ins; New makes it.
type Source struct{ tools []tool.Tool }

// New returns the built-ins.
func New() Source {
	return Source{tools: []tool.Tool{
		tool.New("python_exec", pythonExec, tool.Builtin, json.RawMessage(pythonExecParameters), script(tool.Python, "code")),
		tool.New("shell_exec", shellExec, tool.Builtin, json.RawMessage(shellExecParameters), script(tool.Bash, "command")),
		tool.New("file_read", fileRead, tool.Builtin, json.RawMessage(fileReadParameters), readFile),
		tool.New("file_write", fileWrite, tool.Builtin, json.RawMessage(fileWriteParameters), writeFile),
	}}
}

// Tools returns the built-ins, the same for every workspace.
func (s Source) Tools(context.Context, string) ([]tool.Tool, error) { return s.tools, nil }

const (
	pythonExec = "Run Python 3 code and return what it prints. " +
		"Each call is a new process in /workspace: variables do not carry over, files do, to every later call of the same session. " +
		"Print the results you need; a non-zero exit or an exception is reported with what was printed."
	shellExec = "Run a bash command line and return its output and exit code. " +
		"Each call is a new shell in /workspace: variables and background processes do not carry over, files do, to every later call of the same session."
	fileRead = "Read a file and return its content. A relative path starts at /workspace, " +
		"where files stay for every later call of the same session. A file that is not UTF-8 text comes back as base64, and so does any with encoding base64."
	fileWrite = "Write a file, replacing what was there and making missing directories. A relative path starts at /workspace, " +
		"where files stay for every later call of the same session. With encoding base64, content is decoded first."

	pythonExecParameters = `{"type":"object","properties":{"code":{"type":"string","description":"Python 3 source code"}},"required":["code"],"additionalProperties":false}`
	shellExecParameters  = `{"type":"object","properties":{"command":{"type":"string","description":"a bash command line or script"}},"required":["command"],"additionalProperties":false}`
	fileReadParameters   = `{"type":"object","properties":{"path":{"type":"string","minLength":1,"maxLength":4096,"description":"path of the file"},` +
		`"encoding":{"type":"string","enum":["utf-8","base64"],"description":"base64 to get the exact bytes"}},"required":["path"],"additionalProperties":false}`
	fileWriteParameters = `{"type":"object","properties":{"path":{"type":"string","minLength":1,"maxLength":4096,"description":"path of the file"},` +
		`"content":{"type":"string","description":"what to write"},` +
		`"encoding":{"type":"string","enum":["utf-8","base64"],"description":"how content is encoded"}},"required":["path","content"],"additionalProperties":false}`
)

// script runs the named argument. It travels on a descriptor, so its size is
// not bounded by what an argument vector carries.
func script(program, name string) func(render.Arguments) (tool.Invocation, error) {
	return func(args render.Arguments) (tool.Invocation, error) {
		source, err := text(args, name)
		return tool.Invocation{Program: program, Script: source}, err
	}
}

func readFile(args render.Arguments) (tool.Invocation, error) {
	path, err := text(args, "path")
	return tool.Invocation{Program: tool.FileRead, Path: path, Encoding: encoding(args)}, err
}

func writeFile(args render.Arguments) (tool.Invocation, error) {
	path, err := text(args, "path")
	if err != nil {
		return tool.Invocation{}, err
	}
	content, _ := args["content"].Text()
	if encoding(args) == "base64" {
		raw, err := base64.StdEncoding.DecodeString(content)
		if err != nil {
			return tool.Invocation{}, fault.Wrap(err, fault.Invalid, "argument content is not base64").
				WithCode(string(fault.InvalidArguments)).On("content")
		}
		content = string(raw)
	}
	return tool.Invocation{Program: tool.FileWrite, Path: path, Content: content}, nil
}

// encoding is "base64" or empty.
func encoding(args render.Arguments) string {
	if e, _ := args["encoding"].Text(); e == "base64" {
		return e
	}
	return ""
}

// text is a string argument that may not hold a NUL byte.
func text(args render.Arguments, name string) (string, error) {
	s, _ := args[name].Text()
	if strings.IndexByte(s, 0) >= 0 {
		return "", fault.New(fault.Invalid, "argument %s holds a NUL byte", name).WithCode(string(fault.NULByte)).On(name)
	}
	return s, nil
}

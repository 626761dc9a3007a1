// Package render turns a tool's template and a call's arguments into the
// program to run. It is pure: templates come in as text, arguments as JSON,
// and what goes out is exactly what Python's str.format_map would make of
// them, with every value of a shell template quoted for bash.
package render

import (
	"strings"

	"github.com/bigwave/bigwave/shared/fault"
)

const (
	// MaxTemplate is the largest template, in bytes.
	MaxTemplate = 64 << 10
	// MaxRendered is the largest rendered text, in bytes: Linux takes one
	// argv element of 128 KiB with its closing NUL.
	MaxRendered = 128<<10 - 1
)

// The codes of a refused template.
const (
	BadTemplate       = "bad_template"       // Python would not take it, or bash would not
	UnsupportedField  = "unsupported_field"  // Python would take it, we do not
	UnsafePlaceholder = "unsafe_placeholder" // bash might evaluate the value
)

// TemplateField is the field that the faults of a template name.
const TemplateField = "handler_payload.command"

// The programs that templates are for.
const (
	ProgramBash   = "bash"
	ProgramPython = "python3"
)

// Invocation is a program and the script that follows its -c.
type Invocation struct {
	Program string // ProgramBash or ProgramPython
	Script  string
}

// Python is a checked python_template. It may be used from several goroutines.
type Python struct{ t template }

// ParsePython checks code. Every error is a fault of kind Invalid that says
// where the template is wrong and what to write instead.
func ParsePython(code string) (*Python, error) {
	t, err := parse(code, pythonTemplate)
	if err != nil {
		return nil, err
	}
	return &Python{t: t}, nil
}

// Render fills in args. Values are not quoted: {x!r} is the safe way to embed
// one. Every error is a fault of kind Invalid that names the argument.
func (p *Python) Render(args Arguments) (Invocation, error) {
	script, err := p.t.render(args, func(s string) string { return s })
	if err != nil {
		return Invocation{}, err
	}
	return Invocation{Program: ProgramPython, Script: script}, nil
}

// Shell is a checked shell_template. It may be used from several goroutines.
type Shell struct{ t template }

// ParseShell checks command: only plain {name} fields, each where bash takes
// a word as data. Every error is a fault of kind Invalid that says where the
// template is unsafe and what to write instead.
func ParseShell(command string) (*Shell, error) {
	t, err := parse(command, shellTemplate)
	if err != nil {
		return nil, err
	}
	if err := checkShell(t); err != nil {
		return nil, err
	}
	return &Shell{t: t}, nil
}

// Fields returns the names of the arguments that the template uses, each once.
func (s *Shell) Fields() []string { return s.t.names() }

// Render fills in args, each value quoted so that bash takes it as one word
// of data. Every error is a fault of kind Invalid that names the argument.
func (s *Shell) Render(args Arguments) (Invocation, error) {
	script, err := s.t.render(args, Quote)
	if err != nil {
		return Invocation{}, err
	}
	return Invocation{Program: ProgramBash, Script: script}, nil
}

// Quote makes one bash word of s, byte for byte as Python's shlex.quote does.
func Quote(s string) string {
	if s == "" {
		return "''"
	}
	for i := range len(s) {
		if !unquoted(s[i]) {
			return "'" + strings.ReplaceAll(s, "'", `'"'"'`) + "'"
		}
	}
	return s
}

// unquoted reports whether bash takes c as itself wherever it stands.
func unquoted(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.IndexByte("_@%+=:,./-", c) >= 0
}

// checkNUL refuses a value that no argument vector can carry.
func checkNUL(name, s string) error {
	if strings.IndexByte(s, 0) < 0 {
		return nil
	}
	return fault.New(fault.Invalid, "argument %q holds a NUL byte, which no command line can carry", name).
		WithCode(string(fault.NULByte)).On(name)
}

func tooLarge(name string) *fault.Error {
	return fault.New(fault.Invalid, "with argument %q the rendered command is larger than %d bytes; write the data to a file and pass its path", name, MaxRendered).
		WithCode(string(fault.ArgumentTooLarge)).On(name)
}

func badArgument(name, format string, args ...any) *fault.Error {
	return fault.New(fault.Invalid, format, args...).WithCode(string(fault.InvalidArguments)).On(name)
}

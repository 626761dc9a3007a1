package tool

import (
	"encoding/json"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/render"
	"github.com/bigwave/bigwave/shared/fault"
)

// Kind says how a workspace tool runs.
type Kind string

// The kinds of workspace tool.
const (
	ShellTemplate  Kind = "shell_template"  // the rendered command runs as bash -c
	PythonTemplate Kind = "python_template" // the rendered code runs as python3 -c
)

// Spec is a workspace's own tool as it was registered.
type Spec struct {
	Name        string
	Description string
	Parameters  json.RawMessage // a JSON Schema object, {} when left out
	Payload     json.RawMessage // an object with command, or code in its place
	Kind        Kind
	Revision    int64 // rises with every change of the workspace's tool of that name
}

const (
	maxDescription = 16 << 10
	maxPayload     = 256 << 10 // the template inside has its own, smaller bound

	commandField = render.TemplateField
	codeField    = "handler_payload.code"
)

var validName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]{0,63}$`)

// CheckName refuses what can't be a tool's name.
func CheckName(name string) error {
	if validName.MatchString(name) {
		return nil
	}
	return fault.New(fault.Invalid, "a tool's name is a letter or _ and then letters, digits, _ and -, at most 64 in all").On("name")
}

// Check refuses a spec that could not run. Every error is a fault of kind
// Invalid that names the field.
func Check(s Spec) error {
	if err := CheckName(s.Name); err != nil {
		return err
	}
	if len(s.Description) > maxDescription || !utf8.ValidString(s.Description) || strings.ContainsRune(s.Description, 0) {
		return fault.New(fault.Invalid, "description must be text of at most %d bytes without NUL", maxDescription).On("description")
	}
	if _, err := compileSchema(s.Parameters); err != nil {
		return err
	}
	field, template, err := s.template()
	if err != nil {
		return err
	}
	switch s.Kind {
	case ShellTemplate:
		_, err = parseShell(template)
	case PythonTemplate:
		_, err = parsePython(template)
	default:
		return fault.New(fault.Invalid, "handler_kind must be %s or %s", ShellTemplate, PythonTemplate).On("handler_kind")
	}
	if err != nil && field == codeField {
		f := *fault.From(err)
		return f.On(codeField)
	}
	return err
}

// template finds the template in the payload and the field it stands in, both
// empty when there is none.
func (s Spec) template() (field, text string, err error) {
	if len(s.Payload) == 0 {
		return "", "", nil
	}
	if len(s.Payload) > maxPayload {
		return "", "", fault.New(fault.Invalid, "handler_payload is larger than %d bytes", maxPayload).On("handler_payload")
	}
	payload, err := render.ParseArguments(s.Payload)
	if err != nil {
		return "", "", fault.Wrap(err, fault.Invalid, "handler_payload is not a JSON object without repeated names, at most 1000 levels deep").On("handler_payload")
	}
	for key, name := range map[string]string{"command": commandField, "code": codeField} {
		v, ok := payload[key]
		if !ok {
			continue
		}
		if field != "" {
			return "", "", fault.New(fault.Invalid, "handler_payload takes command or code, not both").On(codeField)
		}
		if text, ok = v.Text(); !ok {
			return "", "", fault.New(fault.Invalid, "%s must be a string", name).On(name)
		}
		field = name
	}
	return field, text, nil
}

// Package pytooltest stands in for the sandbox that describes Python tools in
// tests: it reads as much of a source as tests write.
package pytooltest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// Describer reads sources without running them. Its zero value is ready; its
// methods may be called from several goroutines.
type Describer struct {
	Err         error                              // what every call answers; nil: what the source says
	Description func(*pytool.Description)          // edits what was read; nil: nothing
	Fails       func(valves json.RawMessage) error // what describing with these valves answers; nil: what the source says
	Values      func(raw string) json.RawMessage   // what validation answers; nil: what the class says

	mu       sync.Mutex
	contents []string
}

// Seen lists the sources that were run, in order.
func (d *Describer) Seen() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.contents)
}

func (d *Describer) ran(content string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.contents = append(d.contents, content)
}

var (
	method     = regexp.MustCompile(`(?m)^    (?:async )?def ([a-zA-Z]\w*)\(self((?:, *\w+(?:: *\w+)?)*)\)`)
	parameter  = regexp.MustCompile(`(\w+)(?:: *(\w+))?`)
	class      = regexp.MustCompile(`(?m)^( *)class (Valves|UserValves)\b`)
	field      = regexp.MustCompile(`^ +(\w+): (str|int|bool|SecretStr)( = (.*))?$`)
	manifest   = regexp.MustCompile(`(?m)^([A-Za-z_]+): (.*)$`)
	says       = regexp.MustCompile(`(?m)^# says (\w+): (.*)$`)
	raised     = regexp.MustCompile(`(?m)^raise \w+\("(.*)"\)$`)
	importing  = regexp.MustCompile(`(?m)^import (missing_\w+)$`)
	schemaType = map[string]string{"str": "string", "int": "integer", "bool": "boolean", "SecretStr": "string"}
)

// Describe implements pytool.Describer.
func (d *Describer) Describe(_ context.Context, src pytool.Source, valves json.RawMessage) (pytool.Description, error) {
	content := src.Content
	d.ran(content)
	if d.Err != nil {
		return pytool.Description{}, d.Err
	}
	if d.Fails != nil {
		if err := d.Fails(valves); err != nil {
			return pytool.Description{}, err
		}
	}
	if err := broken(content); err != nil {
		return pytool.Description{}, err
	}
	out := pytool.Description{
		Specs: specs(content), Spoken: spoken(content, valves), Manifest: frontmatter(content),
		Valves: schema(content, "Valves"), UserValves: schema(content, "UserValves"),
		Citation: strings.Contains(content, "self.citation = True"), FileHandler: strings.Contains(content, "self.file_handler = True"),
	}
	if d.Description != nil {
		d.Description(&out)
	}
	return out, nil
}

func broken(content string) error {
	if m := raised.FindStringSubmatch(content); m != nil {
		return fault.New(fault.Invalid, "%s", m[1])
	}
	if m := importing.FindStringSubmatch(content); m != nil {
		return fault.New(fault.Invalid, "No module named '%s'", m[1])
	}
	if !strings.Contains(content, "class Tools") {
		return fault.New(fault.Invalid, "No Tools class found in the module")
	}
	return nil
}

func specs(content string) json.RawMessage {
	type spec struct {
		Name        string         `json:"name"`
		Description string         `json:"description"`
		Parameters  map[string]any `json:"parameters"`
	}
	out := []spec{}
	for _, m := range method.FindAllStringSubmatch(content, -1) {
		properties, required := map[string]any{}, []string{}
		for _, p := range parameter.FindAllStringSubmatch(m[2], -1) {
			if strings.HasPrefix(p[1], "_") {
				continue
			}
			kind, ok := schemaType[p[2]]
			if !ok {
				kind = "string"
			}
			properties[p[1]] = map[string]any{"type": kind}
			required = append(required, p[1])
		}
		parameters := map[string]any{"type": "object", "properties": properties}
		if len(required) > 0 {
			parameters["required"] = required
		}
		out = append(out, spec{m[1], "about " + m[1], parameters})
	}
	return encoded(out)
}

// spoken follows lines such as "# says forecast: {unit}", in which valves stand
// for themselves.
func spoken(content string, valves json.RawMessage) map[string]string {
	values := map[string]any{}
	_ = json.Unmarshal(valves, &values) // none, when nothing is set
	out := map[string]string{}
	for _, m := range says.FindAllStringSubmatch(content, -1) {
		text := m[2]
		for name, v := range values {
			text = strings.ReplaceAll(text, "{"+name+"}", fmt.Sprint(v))
		}
		out[m[1]] = text
	}
	return out
}

func frontmatter(content string) json.RawMessage {
	out := map[string]string{}
	if rest, ok := strings.CutPrefix(content, "\"\"\"\n"); ok {
		head, _, _ := strings.Cut(rest, `"""`)
		for _, m := range manifest.FindAllStringSubmatch(head, -1) {
			out[m[1]] = m[2]
		}
	}
	return encoded(out)
}

// fields are those of a class in the source, with type and default.
func fields(content, name string) (all map[string][2]string, ok bool) {
	all = map[string][2]string{}
	for _, at := range class.FindAllStringSubmatchIndex(content, -1) {
		if content[at[4]:at[5]] != name {
			continue
		}
		ok = true
		_, body, _ := strings.Cut(content[at[0]:], "\n")
		for line := range strings.SplitSeq(body, "\n") {
			m := field.FindStringSubmatch(line)
			if m == nil {
				break
			}
			all[m[1]] = [2]string{m[2], m[4]}
		}
	}
	return all, ok
}

func schema(content, name string) json.RawMessage {
	all, ok := fields(content, name)
	if !ok {
		return nil
	}
	properties := map[string]any{}
	for f, kind := range all {
		property := map[string]any{"type": schemaType[kind[0]], "title": f}
		if kind[0] == "SecretStr" {
			property["format"], property["writeOnly"] = "password", true
		}
		properties[f] = property
	}
	return encoded(map[string]any{"title": name, "type": "object", "properties": properties})
}

// ValidateValves implements pytool.Describer: as a pydantic class of plain
// fields would, in its lax mode.
func (d *Describer) ValidateValves(_ context.Context, src pytool.Source, v pytool.ValvesCheck) (json.RawMessage, error) {
	d.ran(src.Content)
	if d.Err != nil {
		return nil, d.Err
	}
	if d.Values != nil {
		return d.Values(string(v.Values)), nil
	}
	name := map[string]string{pytool.WhichValves: "Valves", pytool.WhichUserValves: "UserValves"}[v.Which]
	all, _ := fields(src.Content, name)
	var given map[string]any
	if err := json.Unmarshal(v.Values, &given); err != nil {
		return nil, err
	}
	set := map[string]any{}
	for _, f := range slices.Sorted(maps.Keys(all)) {
		value, ok := given[f]
		if !ok && all[f][1] == "" {
			return nil, invalid(name, f, "Field required [type=missing, input_value=%s, input_type=dict]", encoded(given))
		}
		if !ok {
			continue
		}
		taken, ok := lax(all[f][0], value)
		if !ok {
			return nil, invalid(name, f, "Input should be a valid %s [type=%s_type, input_value='%v', input_type=str]", schemaType[all[f][0]], all[f][0], value)
		}
		set[f] = taken
	}
	return encoded(set), nil
}

func lax(kind string, value any) (any, bool) {
	switch v := value.(type) {
	case string:
		if kind == "int" {
			n, err := strconv.Atoi(v)
			return n, err == nil
		}
		if kind == "bool" {
			return v == "yes" || v == "true", v == "yes" || v == "no" || v == "true" || v == "false"
		}
		return v, kind == "str" || kind == "SecretStr"
	case float64:
		return int(v), kind == "int" && v == float64(int(v))
	case bool:
		return v, kind == "bool"
	}
	return nil, false
}

func invalid(class, field, why string, args ...any) error {
	return fault.New(fault.Invalid, "1 validation error for %s\n%s\n  %s", class, field, fmt.Sprintf(why, args...))
}

func encoded(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain maps and lists
	}
	return raw
}

package harness

import (
	"encoding/json"
	"strings"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// Bounds of a description.
const (
	maxSpecs = 512
	maxName  = 256 // bytes of a function's name
	maxKeys  = 256 // keys of the frontmatter
)

// Description is what a tool offers. Everything in it is the author's word.
type Description struct {
	Specs            []Spec
	LiveDescriptions map[string]string // by spec name: what a model is told, from the docstring as it is now
	Manifest         map[string]string // the frontmatter
	Requirements     []string          // packages that the frontmatter names, as written
	ValvesSchema     json.RawMessage   // JSON schema of Valves, or null
	UserValvesSchema json.RawMessage   // JSON schema of UserValves, or null
	HasUserValves    bool
	Flags            Flags
	Content          string // the source with its old imports rewritten
}

// Spec is one function. Names need not be unique, nor be identifiers: a
// lambda is called "<lambda>".
type Spec struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"` // JSON schema, an object
}

// Flags are what the tool's object says of itself.
type Flags struct {
	Citation    bool `json:"citation"`
	FileHandler bool `json:"file_handler"`
	Valves      bool `json:"valves"` // it has an attribute valves, so that stored values reach it
}

type description struct {
	Specs            []Spec            `json:"specs"`
	LiveDescriptions map[string]string `json:"live_descriptions"`
	Manifest         map[string]string `json:"manifest"`
	Requirements     []string          `json:"requirements"`
	ValvesSchema     json.RawMessage   `json:"valves_schema"`
	UserValvesSchema json.RawMessage   `json:"user_valves_schema"`
	HasUserValves    bool              `json:"has_user_valves"`
	Flags            Flags             `json:"flags"`
	Content          string            `json:"content"`
}

// Description is the answer to Describe. An error is always an *Error.
func (r *Results) Description(e Ending) (Description, error) {
	raw, failed := r.final(e)
	if failed != nil {
		return Description{}, failed
	}
	var d description
	if err := strictjson.Decode(raw, &d); err != nil {
		return Description{}, disturbed()
	}
	d.ValvesSchema, d.UserValvesSchema = orNull(d.ValvesSchema), orNull(d.UserValvesSchema)
	if !d.plausible() {
		return Description{}, disturbed()
	}
	return Description(d), nil
}

// plausible reports whether the program could have written d.
func (d *description) plausible() bool {
	if len(d.Specs) > maxSpecs || len(d.Manifest) > maxKeys || len(d.Requirements) > maxKeys {
		return false
	}
	for _, s := range d.Specs {
		if s.Name == "" || len(s.Name) > maxName || !object(s.Parameters) {
			return false
		}
	}
	return schema(d.ValvesSchema) && schema(d.UserValvesSchema) &&
		d.HasUserValves == object(d.UserValvesSchema)
}

func orNull(raw json.RawMessage) json.RawMessage {
	if raw == nil {
		return json.RawMessage("null")
	}
	return raw
}

func schema(raw json.RawMessage) bool { return object(raw) || string(raw) == "null" }

func object(raw json.RawMessage) bool { return len(raw) > 0 && raw[0] == '{' }

// Requirement is a package that a tool requires: Name is how Text begins, or
// all of it where no name could be read.
type Requirement struct {
	Name string `json:"name"`
	Text string `json:"text"` // as written
}

// Lacking is what an interpreter does not have of a tool's requirements.
type Lacking struct {
	Missing     []Requirement `json:"missing"`
	Interpreter string        `json:"interpreter"` // what packages are made for: implementation, version, ABI, platform
}

// Lacking is the answer to Lacks. An error is always an *Error.
func (r *Results) Lacking(e Ending) (Lacking, error) {
	raw, failed := r.final(e)
	if failed != nil {
		return Lacking{}, failed
	}
	var l Lacking
	if err := strictjson.Decode(raw, &l); err != nil || len(l.Missing) > maxKeys || len(l.Interpreter) > maxWord {
		return Lacking{}, disturbed()
	}
	for _, m := range l.Missing {
		if m.Name == "" || !strings.HasPrefix(m.Text, m.Name) {
			return Lacking{}, disturbed()
		}
	}
	return l, nil
}

// Values is the answer to ValidateValves: the fields that were set, as the
// tool's class took them, secrets in clear. An error is always an *Error; its
// message does not repeat the values.
func (r *Results) Values(e Ending) (json.RawMessage, error) {
	raw, failed := r.final(e)
	if failed != nil {
		return nil, failed
	}
	var v struct {
		Values json.RawMessage `json:"values"`
	}
	if err := strictjson.Decode(raw, &v); err != nil || !object(v.Values) {
		return nil, disturbed()
	}
	return v.Values, nil
}

// CallResult is the answer to Call. With an Error only EventsDropped is set
// beside it.
type CallResult struct {
	Type          string          // the returned value's Python type
	Text          string          // what a model is told; empty for None
	Value         json.RawMessage // the value as JSON; null for None, or when it was larger than Limits.Text
	Files         []File          // data URIs that were returned
	Embeds        []string        // HTML to be shown beside the result
	Truncated     bool            // something is missing
	EventsDropped int64           // events past the limits
	Error         *Error
}

// File is a data URI that a function returned.
type File struct {
	Type string `json:"type"` // "image" or "file"
	URL  string `json:"url"`
}

type callResult struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	Value     json.RawMessage `json:"value"`
	Same      bool            `json:"same"` // the value is the text
	Files     []File          `json:"files"`
	Embeds    []string        `json:"embeds"`
	Truncated bool            `json:"truncated"`
}

// Call is the answer to Call: how the function ended and what it returned.
func (r *Results) Call(e Ending) CallResult {
	c := CallResult{EventsDropped: r.dropped}
	if r.answer != nil {
		c.EventsDropped += max(r.answer.EventsDropped, 0)
	}
	raw, failed := r.final(e)
	if failed != nil {
		c.Error = failed
		return c
	}
	var got callResult
	if err := strictjson.Decode(raw, &got); err != nil || !got.within(r.Limits.orDefault()) {
		c.Error = disturbed()
		return c
	}
	c.Type, c.Text, c.Value = got.Type, got.Text, got.Value
	c.Files, c.Embeds, c.Truncated = got.Files, got.Embeds, got.Truncated
	if got.Same {
		c.Value, _ = json.Marshal(got.Text) // a string
	}
	c.Value = orNull(c.Value)
	return c
}

func (c *callResult) within(l Limits) bool {
	room := l.Attachments
	for _, f := range c.Files {
		room -= int64(len(f.URL))
		if (f.Type != "image" && f.Type != "file") || !strings.HasPrefix(f.URL, "data:") {
			return false
		}
	}
	for _, e := range c.Embeds {
		room -= int64(len(e))
	}
	return room >= 0 && int64(len(c.Text)) <= l.Text && int64(len(c.Value)) <= l.Text+1 && len(c.Type) <= maxName
}

// shorten cuts a stranger's text to at most n bytes, at a character's border.
func shorten(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

package pytool

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// Describer runs a tool's source in a throw-away sandbox of the workspace,
// without network. A fault of kind Invalid says what is wrong with the source
// or the values: its sentence is the exception's own text. Without a runner
// it is Unavailable. What it returns was made by the source, and is believed
// no further than Service checks it.
type Describer interface {
	// Describe loads a source and asks what is in it. With valves (nil: none)
	// they are set first, as for a call: they may change what models are told.
	Describe(ctx context.Context, src Source, valves json.RawMessage) (Description, error)
	// ValidateValves returns the values that were set, as the class in the
	// source takes them.
	ValidateValves(ctx context.Context, src Source, v ValvesCheck) (json.RawMessage, error)
}

// Source is what a Describer runs.
type Source struct {
	Workspace string // whose sandbox it is, and whose policy holds there
	ID        string // of the tool; its module is named after it
	Content   string
}

// Description is what a source says of itself.
type Description struct {
	Specs       json.RawMessage   // [{name, description, parameters}]
	Spoken      map[string]string // by function: what models are told of it; may be nil
	Manifest    json.RawMessage   // object of strings; nil: {}
	Valves      json.RawMessage   // JSON schema; nil or null: no class Valves
	UserValves  json.RawMessage   // likewise of UserValves
	Citation    bool
	FileHandler bool
}

// What ValvesCheck.Which names. The words are the protocol's.
const (
	WhichValves     = "valves"
	WhichUserValves = "user_valves"
)

// ValvesCheck asks whether values fit a class of a source.
type ValvesCheck struct {
	Which  string
	Values json.RawMessage // an object without nulls
}

// Function is one entry of a tool's specs.
type Function struct {
	Name        string
	Description string
	Parameters  json.RawMessage
}

// Bounds of what a source may say of itself.
const (
	maxFunctions    = 512
	maxFunctionName = 256
	maxSpecs        = 1 << 20
	maxSpoken       = 1 << 20
	maxManifest     = 64 << 10
	maxSchema       = 256 << 10
	maxValves       = 256 << 10
	maxMessage      = 4 << 10
)

// describe asks for the description of t's content and takes it into t.
func (s *Service) describe(ctx context.Context, t Tool) (Tool, error) {
	d, err := s.Describer.Describe(ctx, t.source(), nil)
	if err != nil {
		return t, failed(err)
	}
	if t.Specs, err = checked(d.Specs, "specs", '[', maxSpecs); err != nil {
		return t, err
	}
	offered, err := functions(t.Specs)
	if err != nil {
		return t, err
	}
	for _, f := range offered {
		if !named(f.Parameters) {
			return t, said("specs")
		}
	}
	if t.Spoken, err = spoken(d.Spoken); err != nil {
		return t, err
	}
	if len(d.Manifest) == 0 {
		d.Manifest = json.RawMessage("{}")
	}
	if t.Manifest, err = checked(d.Manifest, "manifest", '{', maxManifest); err != nil {
		return t, err
	}
	if strictjson.Decode(t.Manifest, new(map[string]string)) != nil {
		return t, said("manifest")
	}
	if t.Valves, err = schema(d.Valves, "schema of Valves"); err != nil {
		return t, err
	}
	t.UserValves, err = schema(d.UserValves, "schema of UserValves")
	t.Citation, t.FileHandler, t.Format = d.Citation, d.FileHandler, s.Format
	return t, err
}

func (t Tool) source() Source { return Source{Workspace: t.Workspace, ID: t.ID, Content: t.Content} }

// spoken admits what models are told.
func spoken(by map[string]string) (map[string]string, error) {
	out, size := map[string]string{}, 0
	for name, text := range by {
		size += len(name) + len(text)
		out[sentence(name)] = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	}
	if len(by) > maxFunctions || size > maxSpoken {
		return nil, said("descriptions")
	}
	return out, nil
}

// spokenWith is what models are told of t's functions once it is set to
// valves, sealed as those are, for it may hold them; nil when nothing takes
// the place of t.Spoken. A source may not load then: it may need what a
// sandbox does not have, and that is for a call to say. An error is ours.
func (s *Service) spokenWith(ctx context.Context, t Tool, valves json.RawMessage) ([]byte, error) {
	if t.Valves == nil || string(valves) == string(noValues) {
		return nil, nil
	}
	d, err := s.Describer.Describe(ctx, t.source(), valves)
	switch {
	case bySource(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	with, err := spoken(d.Spoken)
	secret := passwords(t.Valves, valves)
	if err != nil || len(secret) > maxPasswords {
		return nil, nil
	}
	for name, text := range with {
		with[name] = masked(text, secret)
	}
	raw, err := strictjson.Encode(with)
	if err != nil {
		return nil, fmt.Errorf("encode what models are told of tool %s: %w", t.ID, err)
	}
	return s.Vault.seal(raw, spokenPlace(t.Workspace, t.ID)), nil
}

// told is what models are told of t's functions as it is set now.
func (s *Service) told(ctx context.Context, t Tool) map[string]string {
	var with map[string]string
	raw, ok := s.unseal(ctx, t.Sealed.Spoken, spokenPlace(t.Workspace, t.ID))
	if !ok || strictjson.Decode(raw, &with) != nil {
		return t.Spoken
	}
	return with
}

// functions reads specs; they must be a list of functions.
func functions(specs json.RawMessage) ([]Function, error) {
	var all []struct {
		Name        string          `json:"name"`
		Description string          `json:"description"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	if strictjson.Decode(specs, &all) != nil || len(all) > maxFunctions {
		return nil, said("specs")
	}
	out := make([]Function, len(all))
	for i, f := range all {
		if f.Name == "" || len(f.Name) > maxFunctionName || !object(f.Parameters) {
			return nil, said("specs")
		}
		out[i] = Function{Name: f.Name, Description: f.Description, Parameters: f.Parameters}
	}
	return out, nil
}

func schema(raw json.RawMessage, what string) (json.RawMessage, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	return checked(raw, what, '{', maxSchema)
}

// checked admits JSON of one kind and a bounded size.
func checked(raw json.RawMessage, what string, kind byte, limit int) (json.RawMessage, error) {
	if len(raw) > limit {
		return nil, fault.New(fault.Invalid, "[ERROR: the tool's %s is larger than %d bytes]", what, limit)
	}
	var v json.RawMessage
	if err := strictjson.Decode(raw, &v); err != nil || len(v) == 0 || v[0] != kind {
		return nil, said(what)
	}
	return v, nil
}

// named reports whether a function's parameters can be told by their names.
func named(parameters json.RawMessage) bool {
	var schema struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	return json.Unmarshal(parameters, &schema) == nil
}

func object(raw json.RawMessage) bool { return len(raw) > 0 && raw[0] == '{' }

// said is the answer to a description that no honest source gives.
func said(what string) error {
	return fault.New(fault.Invalid, "[ERROR: the tool's %s can't be read]", what)
}

// bySource reports whether err says what is wrong with a source, or with the
// values for it.
func bySource(err error) bool { return fault.Is(err, fault.Invalid) || fault.Is(err, fault.TooLarge) }

// failed gives what is wrong with a source the form that clients know.
func failed(err error) error {
	if !bySource(err) {
		return err
	}
	f := fault.From(err)
	return fault.Wrap(err, fault.Invalid, "[ERROR: %s]", sentence(f.Message)).WithCode(f.Code).On(f.Field)
}

// ellipsis ends a text that was cut.
const ellipsis = "…"

// sentence makes the text of an exception fit to be shown: UTF-8, no NUL, not
// endless.
func sentence(s string) string {
	if len(s) > maxMessage {
		cut := maxMessage
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut] + ellipsis
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

package tool

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"github.com/bigwave/bigwave/controlplane/internal/render"
	"github.com/bigwave/bigwave/shared/fault"
)

const (
	maxSchema      = 64 << 10
	maxSchemaDepth = 64

	// maxPairs bounds schema nodes × argument values, maxWork what references
	// and patterns may multiply it to: a schema is anyone's, and one page of
	// JSON can ask for more work than there is time.
	maxPairs = 4 << 20
	maxWork  = 1 << 20
)

// schema checks arguments. It may be used from several goroutines, one at a
// time inside.
type schema struct {
	compiled *jsonschema.Schema // nil: everything fits
	nodes    int

	mu   sync.Mutex
	work int // what the current check may still cost
}

// errWork is thrown through the validator, which knows no other way to stop.
var errWork = errors.New("more work than a check may cost")

// spend takes n off the current check's budget.
func (s *schema) spend(n int) {
	if s.work -= n; s.work < 0 {
		panic(errWork)
	}
}

// compileSchema reads the JSON Schema of a tool's arguments. Nothing is ever
// fetched; patterns are RE2.
func compileSchema(raw json.RawMessage) (s *schema, err error) {
	s = &schema{work: maxWork}
	if len(raw) == 0 {
		return s, nil
	}
	if len(raw) > maxSchema {
		return nil, badSchema(nil, "is larger than %d bytes", maxSchema)
	}
	value, err := render.ParseValue(raw)
	if err != nil {
		return nil, badSchema(err, "is not strict JSON")
	}
	if value.Kind() != "object" {
		return nil, badSchema(nil, "must be an object, a JSON Schema")
	}
	doc, nodes, depth := plainValue(value)
	if depth > maxSchemaDepth {
		return nil, badSchema(nil, "nests deeper than %d levels", maxSchemaDepth)
	}
	if len(doc.(map[string]any)) == 0 {
		return s, nil
	}
	s.nodes = nodes
	defer func() {
		if r := recover(); r != nil {
			s, err = nil, badSchema(fmt.Errorf("%v", r), "is a JSON Schema that can't be checked")
		}
	}()
	s.compiled, err = s.compiler().compile(doc)
	if err != nil {
		return nil, schemaFault(err)
	}
	if loops(s.compiled) {
		return nil, badSchema(nil, "has a $ref that leads back to itself on the same value")
	}
	return s, nil
}

type compiler struct{ *jsonschema.Compiler }

// schemaURL is what relative references start from: nowhere.
const schemaURL = "https://parameters.invalid/schema"

func (c compiler) compile(doc any) (*jsonschema.Schema, error) {
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, err
	}
	return c.Compile(schemaURL)
}

func (s *schema) compiler() compiler {
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	c.UseRegexpEngine(func(pattern string) (jsonschema.Regexp, error) {
		re, err := regexp.Compile(pattern)
		return &meteredPattern{re, s}, err
	})
	c.RegisterVocabulary(&jsonschema.Vocabulary{
		URL: "urn:tool:metered",
		Compile: func(_ *jsonschema.CompilerContext, obj map[string]any) (jsonschema.SchemaExt, error) {
			return meter{s, 1 + len(obj)}, nil
		},
	})
	c.AssertVocabs()
	return compiler{c}
}

// errRemote is why a reference to another document fails.
var errRemote = errors.New("references to other documents are not followed")

type noLoader struct{}

func (noLoader) Load(string) (any, error) { return nil, errRemote }

// meteredPattern charges a match before it runs.
type meteredPattern struct {
	*regexp.Regexp
	s *schema
}

func (p *meteredPattern) MatchString(text string) bool {
	p.s.spend(len(text) / 2 * (1 + len(p.String())/64))
	return p.Regexp.MatchString(text)
}

// meter charges each visit of a schema to a value, deep ones more: an error
// there carries the whole path.
type meter struct {
	s    *schema
	cost int
}

func (m meter) Validate(ctx *jsonschema.ValidatorContext, v any) {
	cost := m.cost + len(ctx.ValueLocation())
	switch v := v.(type) {
	case []any:
		cost += len(v)
	case map[string]any:
		cost += len(v)
	}
	m.s.spend(cost)
}

// check refuses arguments that do not fit, naming the first one.
func (s *schema) check(args render.Arguments) (err error) {
	if s.compiled == nil {
		return nil
	}
	object, values := make(map[string]any, len(args)), 1
	for name, v := range args {
		plain, n, _ := plainValue(v)
		object[name] = plain
		values += n
	}
	if values*s.nodes > maxPairs {
		return tooMuch()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.work = maxWork
	defer func() {
		switch r := recover(); r {
		case nil:
		case errWork:
			err = tooMuch()
		default: // the validator's own mistake
			err = fault.Wrap(fmt.Errorf("%v", r), fault.Invalid, "the arguments can't be checked against the tool's parameters; simplify the schema").
				WithCode(string(fault.InvalidArguments))
		}
	}()
	if err := s.compiled.Validate(object); err != nil {
		return argumentFault(err)
	}
	return nil
}

func tooMuch() error {
	return fault.New(fault.Invalid, "the arguments are too much to check against the tool's parameters; send fewer or smaller values").
		WithCode(string(fault.InvalidArguments))
}

// plainValue converts v for the validator and counts its values and levels.
func plainValue(v render.Value) (plain any, values, depth int) {
	items, names := v.Items()
	values = 1
	take := func(item render.Value) any {
		p, n, d := plainValue(item)
		values, depth = values+n, max(depth, d+1)
		return p
	}
	switch v.Kind() {
	case "object":
		object := make(map[string]any, len(names))
		for i, name := range names {
			object[name] = take(items[i])
		}
		return object, values, depth
	case "array":
		array := make([]any, len(items))
		for i, item := range items {
			array[i] = take(item)
		}
		return array, values, depth
	case "string":
		text, _ := v.Text()
		return text, values, 0
	case "boolean":
		truth, _ := v.Bool()
		return truth, values, 0
	case "number":
		f, _ := v.Float()
		return f, values, 0
	case "integer":
		digits, _ := v.Digits()
		if n, err := strconv.ParseInt(digits, 10, 64); err == nil {
			return n, values, 0
		}
		return json.Number(digits), values, 0
	}
	return nil, values, 0
}

func badSchema(cause error, format string, args ...any) *fault.Error {
	f := fault.New(fault.Invalid, "parameters "+format, args...).On("parameters")
	f.Cause = cause
	return f
}

// schemaFault says what is wrong with a schema, without what it holds.
func schemaFault(err error) error {
	if errors.Is(err, errRemote) {
		return badSchema(err, "refers to another document by $ref or $schema, which is not followed; put the definition into $defs")
	}
	if invalid, ok := errors.AsType[*jsonschema.SchemaValidationError](err); ok {
		if v, ok := errors.AsType[*jsonschema.ValidationError](invalid.Err); ok {
			leaf := deepest(v)
			what := why(leaf.ErrorKind)
			if _, ok := leaf.ErrorKind.(*kind.AnyOf); ok {
				what = "has a value that JSON Schema does not allow there"
			}
			return fault.Wrap(err, fault.Invalid, "parameters is not a valid JSON Schema: %s %s", place(leaf.InstanceLocation), what).
				On(place(append([]string{"parameters"}, leaf.InstanceLocation...)))
		}
	}
	return badSchema(err, "is not a valid JSON Schema: %s", clip(strings.ReplaceAll(err.Error(), schemaURL, ""), 200))
}

// argumentFault says which argument does not fit and why.
func argumentFault(err error) error {
	invalid, ok := errors.AsType[*jsonschema.ValidationError](err)
	if !ok {
		return fault.Wrap(err, fault.Invalid, "the arguments do not fit the tool's parameters").WithCode(string(fault.InvalidArguments))
	}
	leaf := deepest(invalid)
	at := leaf.InstanceLocation
	switch k := leaf.ErrorKind.(type) {
	case *kind.Required:
		at = append(at[:len(at):len(at)], k.Missing[0])
	case *kind.AdditionalProperties:
		at = append(at[:len(at):len(at)], k.Properties[0])
	}
	name := ""
	if len(at) > 0 {
		name = clip(at[0], 100)
	}
	subject := "the arguments together"
	if len(at) > 0 {
		subject = "argument " + place(at)
	}
	return fault.Wrap(err, fault.Invalid, "%s %s", subject, why(leaf.ErrorKind)).
		WithCode(string(fault.InvalidArguments)).On(name)
}

// deepest follows the first cause to what is wrong in the end.
func deepest(v *jsonschema.ValidationError) *jsonschema.ValidationError {
	for len(v.Causes) > 0 {
		switch v.ErrorKind.(type) {
		case *kind.AnyOf, *kind.OneOf, *kind.Not, *kind.Contains:
			return v // none of several: no one cause is the reason
		}
		v = v.Causes[0]
	}
	return v
}

// place writes a location as people do: a.b[2].
func place(location []string) string {
	var out strings.Builder
	for i, part := range location {
		switch {
		case i > 0 && part != "" && strings.Trim(part, "0123456789") == "":
			out.WriteString("[" + part + "]")
		case i > 0:
			out.WriteString("." + clip(part, 100))
		default:
			out.WriteString(clip(part, 100))
		}
	}
	return clip(out.String(), 300)
}

// why says what a value should have been.
func why(k jsonschema.ErrorKind) string {
	switch k := k.(type) {
	case *kind.Required:
		return "is missing"
	case *kind.AdditionalProperties:
		return "is not one that the tool takes"
	case *kind.Type:
		return "must be of type " + strings.Join(k.Want, " or ") + ", not " + k.Got
	case *kind.Enum:
		return "must be one of " + list(k.Want)
	case *kind.Const:
		return "must be " + list([]any{k.Want})
	case *kind.Pattern:
		return "must match the pattern " + strconv.Quote(clip(k.Want, 100))
	case *kind.MinLength:
		if k.Want == 1 {
			return "must not be empty"
		}
		return fmt.Sprintf("must be at least %d characters long", k.Want)
	case *kind.MaxLength:
		return fmt.Sprintf("must be at most %d characters long, not %d", k.Want, k.Got)
	case *kind.MinItems:
		if k.Want == 1 {
			return "must not be empty"
		}
		return fmt.Sprintf("must have at least %d items", k.Want)
	case *kind.MaxItems:
		return fmt.Sprintf("must have at most %d items", k.Want)
	case *kind.Minimum:
		return "must be at least " + clip(k.Want.RatString(), 60)
	case *kind.Maximum:
		return "must be at most " + clip(k.Want.RatString(), 60)
	case *kind.Format:
		return "must have the format " + strconv.Quote(clip(k.Want, 100))
	}
	if path := k.KeywordPath(); len(path) > 0 {
		return "must fit " + strconv.Quote(clip(path[0], 100)) + " of the tool's parameters"
	}
	return "must fit the tool's parameters"
}

// list writes the allowed values, the first of them at least.
func list(values []any) string {
	var out strings.Builder
	for i, v := range values {
		if i == 8 || out.Len() > 200 {
			return out.String() + ", …"
		}
		if i > 0 {
			out.WriteString(", ")
		}
		text, err := json.Marshal(v)
		if err != nil {
			text = []byte("…")
		}
		out.WriteString(clip(string(text), 100))
	}
	return out.String()
}

func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

package render

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/fault"
)

// template is literal text and fields in turn.
type template struct {
	source   string
	segments []segment
}

// segment is literal text, followed by a field unless field is nil.
type segment struct {
	literal string
	field   *field
}

// field is one {name!conversion:spec}.
type field struct {
	name       string
	conversion byte      // 'r', 's', 'a' or 0
	spec       *template // nil when empty; its own fields have no spec with fields
	at, end    int       // byte offsets of { and past } in the source
}

type dialect struct {
	plain bool // only {name}
}

var (
	shellTemplate  = dialect{plain: true}
	pythonTemplate = dialect{}
)

// parser reads a template as Python's str.format_map does.
type parser struct {
	dialect
	source string // the whole template, for positions
}

func parse(source string, d dialect) (template, error) {
	p := parser{dialect: d, source: source}
	if len(source) > MaxTemplate {
		return template{}, fault.New(fault.Invalid, "the template is %d bytes; at most %d are allowed", len(source), MaxTemplate).
			WithCode(BadTemplate).On(TemplateField)
	}
	if i := strings.IndexByte(source, 0); i >= 0 {
		return template{}, p.bad(i, "a NUL byte, which no command line can carry").WithCode(string(fault.NULByte))
	}
	if !utf8.ValidString(source) {
		return template{}, fault.New(fault.Invalid, "the template is not valid UTF-8").WithCode(BadTemplate).On(TemplateField)
	}
	return p.template(0, len(source), 0)
}

// template parses source[start:end]; depth is 1 inside a format spec.
func (p parser) template(start, end, depth int) (template, error) {
	t := template{source: p.source[start:end]}
	var literal strings.Builder
	for i := start; i < end; {
		next := strings.IndexAny(p.source[i:end], "{}")
		if next < 0 {
			literal.WriteString(p.source[i:end])
			break
		}
		literal.WriteString(p.source[i : i+next])
		i += next
		c := p.source[i]
		if i+1 < end && p.source[i+1] == c {
			literal.WriteByte(c)
			i += 2
			continue
		}
		if c == '}' {
			return t, p.bad(i, "a single } (write }} for a literal one)")
		}
		f, after, err := p.field(i, end, depth)
		if err != nil {
			return t, err
		}
		t.segments = append(t.segments, segment{literal.String(), f})
		literal.Reset()
		i = after
	}
	if literal.Len() > 0 {
		t.segments = append(t.segments, segment{literal: literal.String()})
	}
	return t, nil
}

// field parses the field that starts with the { at i.
func (p parser) field(i, end, depth int) (*field, int, error) {
	f := &field{at: i}
	j := i + 1
	if j >= end {
		return nil, 0, p.bad(i, "a single { (write {{ for a literal one)")
	}
	for j < end && !strings.ContainsRune("{}[.:!", rune(p.source[j])) {
		j++
	}
	f.name = p.source[i+1 : j]
	if j >= end {
		return nil, 0, p.bad(i, "a { that is never closed (write {{ for a literal one)")
	}
	if p.source[j] == '{' {
		return nil, 0, p.bad(j, "a { inside a field name (write {{ for a literal one)")
	}
	if err := p.name(f.name, i, p.source[j]); err != nil {
		return nil, 0, err
	}
	if p.source[j] == '!' {
		var err error
		if j, err = p.conversion(f, j, end); err != nil {
			return nil, 0, err
		}
	}
	if p.source[j] == ':' {
		var err error
		if j, err = p.spec(f, j, end, depth); err != nil {
			return nil, 0, err
		}
	}
	f.end = j + 1
	return f, f.end, nil
}

// name refuses what is not one plain argument name.
func (p parser) name(name string, at int, next byte) error {
	switch {
	case next == '.' || next == '[':
		return p.bad(at, "attribute or index access; write {%s} and let the tool take the value apart", name).WithCode(UnsupportedField)
	case name == "" || '0' <= name[0] && name[0] <= '9':
		return p.bad(at, "a positional field; name the argument, as in {pattern} (write {{ and }} for literal braces)")
	case !identifier(name):
		return p.bad(at, "the field name %q; a name is letters, digits and _ (write {{ and }} for literal braces)", clip(name))
	}
	return nil
}

// conversion parses the !r, !s or !a at j and returns where : or } follows.
func (p parser) conversion(f *field, j, end int) (int, error) {
	if p.plain {
		return 0, p.bad(f.at, "a conversion; a shell template takes only {%s}, which is quoted for you", f.name).WithCode(UnsupportedField)
	}
	if j+2 >= end || strings.IndexByte("rsa", p.source[j+1]) < 0 || strings.IndexByte(":}", p.source[j+2]) < 0 {
		return 0, p.bad(j, "a conversion other than !r, !s or !a")
	}
	f.conversion = p.source[j+1]
	return j + 2, nil
}

// spec parses the format spec after the : at j and returns where } follows.
func (p parser) spec(f *field, j, end, depth int) (int, error) {
	if p.plain {
		return 0, p.bad(f.at, "a format spec; a shell template takes only {%s}, which is quoted for you", f.name).WithCode(UnsupportedField)
	}
	start, open := j+1, 1
	for j++; j < end; j++ {
		switch p.source[j] {
		case '{':
			open++
		case '}':
			open--
		}
		if open == 0 {
			break
		}
	}
	if j >= end {
		return 0, p.bad(f.at, "a { that is never closed")
	}
	if start == j {
		return j, nil
	}
	if strings.IndexByte(p.source[start:j], '{') < 0 {
		return j, p.staticSpec(f, start, j)
	}
	if depth > 0 {
		return 0, p.bad(f.at, "fields nested too deeply")
	}
	spec, err := p.template(start, j, depth+1)
	f.spec = &spec
	return j, err
}

// staticSpec keeps a spec without fields, if any value could take it.
func (p parser) staticSpec(f *field, start, end int) error {
	text := p.source[start:end]
	f.spec = &template{source: text, segments: []segment{{literal: text}}}
	s, err := parseSpec(text, '<')
	if err != nil {
		return p.bad(start, "the format spec %q: %v", clip(text), err)
	}
	if s.width > MaxRendered || s.precision > MaxRendered {
		return p.bad(start, "a format spec wider than %d bytes", MaxRendered)
	}
	if s.typ != 0 && !strings.ContainsRune("sbcdoxXneEfFgG%", s.typ) {
		return p.bad(start, "the format code %q, which no value takes", s.typ)
	}
	return nil
}

// bad is a fault of the template that says where.
func (p parser) bad(offset int, format string, args ...any) *fault.Error {
	what := fmt.Sprintf(format, args...)
	return fault.New(fault.Invalid, "the template has %s, at %s", what, position(p.source, offset)).
		WithCode(BadTemplate).On(TemplateField)
}

// position says where offset is, for people.
func position(source string, offset int) string {
	before := source[:min(offset, len(source))]
	line := strings.Count(before, "\n") + 1
	column := utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:]) + 1
	return fmt.Sprintf("line %d, column %d", line, column)
}

func identifier(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// clip shortens what an author wrote for use in a sentence.
func clip(s string) string {
	const most = 40
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// fields returns the fields of t, not those inside their specs.
func (t template) fields() []*field {
	var fs []*field
	for _, s := range t.segments {
		if s.field != nil {
			fs = append(fs, s.field)
		}
	}
	return fs
}

// names returns the arguments used, each once, in order of first use.
func (t template) names() []string {
	var names []string
	seen := map[string]bool{}
	add := func(n string) {
		if !seen[n] {
			seen[n] = true
			names = append(names, n)
		}
	}
	for _, f := range t.fields() {
		add(f.name)
		if f.spec != nil {
			for _, n := range f.spec.names() {
				add(n)
			}
		}
	}
	return slices.Clip(names)
}

// render fills in args and passes each value's text through quote. It stops
// at MaxRendered before it would allocate more.
func (t template) render(args Arguments, quote func(string) string) (string, error) {
	var out strings.Builder
	for _, s := range t.segments {
		if out.Len()+len(s.literal) > MaxRendered {
			return "", fault.New(fault.Invalid, "the rendered command is larger than %d bytes", MaxRendered).
				WithCode(string(fault.ArgumentTooLarge))
		}
		out.WriteString(s.literal)
		if s.field == nil {
			continue
		}
		text, err := s.field.text(args, MaxRendered-out.Len())
		if err != nil {
			return "", err
		}
		if text = quote(text); out.Len()+len(text) > MaxRendered {
			return "", tooLarge(s.field.name)
		}
		out.WriteString(text)
	}
	return out.String(), nil
}

// text is the field's value as Python would print it, in at most limit bytes.
func (f *field) text(args Arguments, limit int) (string, error) {
	v, ok := args[f.name]
	if !ok {
		return "", badArgument(f.name, "argument %q is missing", f.name)
	}
	spec := ""
	if f.spec != nil {
		var err error
		if spec, err = f.spec.render(args, func(s string) string { return s }); err != nil {
			return "", err
		}
	}
	text, err := v.format(f.conversion, spec, limit)
	switch {
	case errors.Is(err, errTooLarge):
		return "", tooLarge(f.name)
	case err != nil:
		return "", badArgument(f.name, "argument %q does not take the format %q: %v", f.name, clip(spec), err)
	}
	return text, checkNUL(f.name, text)
}

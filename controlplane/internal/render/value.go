package render

import (
	"bytes"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/bigwave/bigwave/shared/fault"
)

const (
	maxDepth  = 1000 // how deep arrays and objects may nest in arguments
	maxDigits = 4300 // the longest integer, as in Python
)

type kind uint8

const (
	kindNone kind = iota
	kindBool
	kindInt
	kindFloat
	kindStr
	kindList
	kindDict
)

// typeName is what Python calls the type.
func (k kind) typeName() string {
	return [...]string{"NoneType", "bool", "int", "float", "str", "list", "dict"}[k]
}

// Value is one JSON value with the precision and the order it came with.
// The zero Value is null.
type Value struct {
	kind  kind
	truth bool
	text  string  // kindStr: the string; kindInt: decimal digits
	float float64 // kindFloat, never NaN or infinite
	items []Value // kindList, or kindDict: the values
	keys  []string
}

// Arguments are the named arguments of one call.
type Arguments map[string]Value

// ParseArguments decodes one JSON object strictly: no duplicate names, no
// trailing data, no lone surrogates, no number that Python would make
// infinite. Every error is a fault of kind Invalid, code invalid_arguments.
func ParseArguments(raw []byte) (Arguments, error) {
	v, err := ParseValue(raw)
	if err != nil {
		return nil, err
	}
	if v.kind != kindDict {
		return nil, badArgument("", "arguments must be a JSON object, not %s", v.kind.typeName())
	}
	args := make(Arguments, len(v.keys))
	for i, k := range v.keys {
		args[k] = v.items[i]
	}
	return args, nil
}

// ParseValue decodes one JSON value as strictly as ParseArguments.
func ParseValue(raw []byte) (Value, error) {
	d := decoder{jsontext.NewDecoder(bytes.NewReader(raw))}
	v, err := d.value(0, "")
	if err == nil {
		if _, more := d.ReadToken(); !errors.Is(more, io.EOF) {
			err = badArgument("", "arguments are followed by something else")
		}
	}
	return v, err
}

type decoder struct{ *jsontext.Decoder }

// value reads the next value; name is the argument it belongs to.
func (d decoder) value(depth int, name string) (Value, error) {
	if depth > maxDepth {
		return Value{}, badArgument(name, "arguments nest deeper than %d levels", maxDepth)
	}
	t, err := d.ReadToken()
	if err != nil {
		return Value{}, d.malformed(err, name)
	}
	switch t.Kind() {
	case 'n':
		return Value{}, nil
	case 't', 'f':
		return Value{kind: kindBool, truth: t.Kind() == 't'}, nil
	case '"':
		return Value{kind: kindStr, text: t.String()}, nil
	case '0':
		return number(t.String(), name)
	case '[':
		return d.list(depth, name)
	default:
		return d.dict(depth, name)
	}
}

func (d decoder) list(depth int, name string) (Value, error) {
	v := Value{kind: kindList}
	for d.PeekKind() != ']' {
		item, err := d.value(depth+1, name)
		if err != nil {
			return v, err
		}
		v.items = append(v.items, item)
	}
	_, err := d.ReadToken()
	return v, err
}

func (d decoder) dict(depth int, name string) (Value, error) {
	v := Value{kind: kindDict}
	for d.PeekKind() != '}' {
		t, err := d.ReadToken()
		if err != nil {
			return v, d.malformed(err, name)
		}
		key := t.String()
		if depth == 0 {
			name = key
		}
		item, err := d.value(depth+1, name)
		if err != nil {
			return v, err
		}
		v.keys, v.items = append(v.keys, key), append(v.items, item)
	}
	_, err := d.ReadToken()
	return v, err
}

// malformed says what is wrong without repeating what was sent.
func (d decoder) malformed(err error, name string) error {
	why := "are not valid JSON"
	switch {
	case errors.Is(err, jsontext.ErrDuplicateName):
		why = "hold the same name twice"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		why = "end too early"
	case strings.Contains(err.Error(), "surrogate"), strings.Contains(err.Error(), "UTF-8"):
		why = "hold text that is not valid Unicode"
	}
	f := fault.Wrap(err, fault.Invalid, "arguments %s, near byte %d", why, d.InputOffset())
	return f.WithCode(string(fault.InvalidArguments)).On(name)
}

// number keeps an int's digits and a float's nearest double, as Python does.
func number(s, name string) (Value, error) {
	if !strings.ContainsAny(s, ".eE") {
		if len(strings.TrimPrefix(s, "-")) > maxDigits {
			return Value{}, badArgument(name, "an integer in argument %q has more than %d digits", name, maxDigits)
		}
		if s == "-0" {
			s = "0"
		}
		return Value{kind: kindInt, text: s}, nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsInf(f, 0) {
		return Value{}, badArgument(name, "a number in argument %q is too large", name)
	}
	return Value{kind: kindFloat, float: f}, nil
}

// Kind is the JSON Schema word for the value's type.
func (v Value) Kind() string {
	return [...]string{"null", "boolean", "integer", "number", "string", "array", "object"}[v.kind]
}

// Text returns the string that v is, if it is one.
func (v Value) Text() (string, bool) { return v.text, v.kind == kindStr }

// Digits returns the decimal digits of an integer of any size.
func (v Value) Digits() (string, bool) { return v.text, v.kind == kindInt }

// Float returns the number that v is, if it was written as a float.
func (v Value) Float() (float64, bool) { return v.float, v.kind == kindFloat }

// Bool returns the truth that v is, if it is one.
func (v Value) Bool() (bool, bool) { return v.truth, v.kind == kindBool }

// Items returns the elements of an array or the values of an object, and the
// object's names in the same order.
func (v Value) Items() (values []Value, names []string) { return v.items, v.keys }

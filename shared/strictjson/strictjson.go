// Package strictjson decodes JSON that strangers sent: once, and with no
// second reading. Unknown, duplicate and case-folded keys, trailing data,
// invalid UTF-8 and wrong types are errors that name the place.
package strictjson

import (
	"errors"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Error says where and why a document was refused. Field is a dotted path
// ("handler_payload.command", "calls[2].name"), empty for the whole document.
type Error struct {
	Field string
	Why   string
}

// Error is a sentence for the sender.
func (e *Error) Error() string {
	if e.Field == "" {
		return e.Why
	}
	return e.Field + ": " + e.Why
}

// Decode reads exactly one JSON value from data into v. A null leaves Go's
// zero value: callers that require a field use pointers or jsontext.Value.
func Decode(data []byte, v any) error {
	return decode(data, v, json.RejectUnknownMembers(true))
}

// DecodeKnown is Decode for senders that add members of their own: those are
// skipped, and so is a known one in another case.
func DecodeKnown(data []byte, v any) error { return decode(data, v) }

func decode(data []byte, v any, options ...json.Options) error {
	err := json.Unmarshal(data, v, options...)
	if err == nil {
		return nil
	}
	if se, ok := errors.AsType[*json.SemanticError](err); ok {
		return &Error{Field: dotted(se.JSONPointer), Why: semantic(se)}
	}
	if se, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		if errors.Is(se.Err, jsontext.ErrDuplicateName) {
			return &Error{Field: dotted(se.JSONPointer), Why: "appears twice"}
		}
		return &Error{Field: dotted(se.JSONPointer), Why: "is not valid JSON: " + plain(se.Err)}
	}
	return &Error{Why: "is not valid JSON"}
}

// Encode writes v as JSON with sorted map keys, so that equal values are equal
// bytes.
func Encode(v any) ([]byte, error) {
	return json.Marshal(v, json.Deterministic(true))
}

func semantic(e *json.SemanticError) string {
	if errors.Is(e.Err, json.ErrUnknownName) {
		return "is not a known field"
	}
	got := map[jsontext.Kind]string{
		'n': "null", 't': "a boolean", 'f': "a boolean", '"': "a string",
		'0': "a number", '{': "an object", '[': "an array",
	}[e.JSONKind]
	want := ""
	if e.GoType != nil {
		want = wanted(e.GoType.String(), e.GoType.Kind().String())
	}
	switch {
	case got != "" && want != "" && e.JSONKind != '0':
		return "must be " + want + ", not " + got
	case want != "":
		return "must be " + want
	}
	return "has the wrong type"
}

func wanted(name, kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "a whole number in range"
	case strings.HasPrefix(kind, "float"):
		return "a number"
	case kind == "string":
		return "a string"
	case kind == "bool":
		return "true or false"
	case kind == "slice" && name != "jsontext.Value", kind == "array":
		return "an array"
	case kind == "map", kind == "struct":
		return "an object"
	case kind == "ptr":
		return wanted(strings.TrimPrefix(name, "*"), strings.TrimLeft(name, "*"))
	}
	return ""
}

func plain(err error) string {
	if err == nil {
		return "unexpected end"
	}
	return strings.TrimPrefix(err.Error(), "jsontext: ")
}

// dotted turns an RFC 6901 pointer into the path that people write.
func dotted(p jsontext.Pointer) string {
	var b strings.Builder
	for tok := range p.Tokens() {
		switch {
		case tok != "" && strings.Trim(tok, "0123456789") == "":
			b.WriteString("[" + tok + "]")
		case b.Len() > 0:
			b.WriteString("." + tok)
		default:
			b.WriteString(tok)
		}
	}
	s := b.String()
	if len(s) > 200 {
		s = s[:200]
	}
	return strings.ToValidUTF8(s, "�")
}

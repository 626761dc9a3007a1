package pytool

import (
	"bytes"
	"cmp"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/bigwave/bigwave/shared/fault"
)

// inputValue is how pydantic quotes a value in its errors.
var inputValue = regexp.MustCompile(`input_value=.*?, (input_type=\w+\])`)

// withoutValues takes the values out of the sentence of an error: valves hold
// secrets, and errors are shown and logged.
func withoutValues(err error, values json.RawMessage) error {
	if !fault.Is(err, fault.Invalid) {
		return err
	}
	f := fault.From(err)
	message := masked(inputValue.ReplaceAllString(f.Message, "$1"), secrets(values))
	return fault.New(fault.Invalid, "%s", message).WithCode(f.Code).On(f.Field)
}

// masked is text without what is secret, also where text was cut within it.
// A secret that is part of another comes after it.
func masked(text string, secrets []string) string {
	lower := strings.ToLower(text)
	for _, secret := range secrets {
		// Most are not there, and looking for them is cheap.
		if strings.Contains(text, secret) || strings.Contains(lower, strings.ToLower(secret)) {
			text = regexp.MustCompile("(?i)"+regexp.QuoteMeta(secret)).ReplaceAllLiteralString(text, "***")
			lower = strings.ToLower(text)
		}
	}
	whole, cut := strings.CutSuffix(text, ellipsis)
	if !cut {
		return text
	}
	for _, secret := range secrets {
		for n := min(len(secret), len(whole)); n >= minSecret; n-- {
			if rest, ok := strings.CutSuffix(whole, secret[:n]); ok {
				return rest + "***" + ellipsis
			}
		}
	}
	return text
}

// minSecret is the shortest text that is taken for a secret: shorter ones are
// parts of other words.
const minSecret = 4

// maxPasswords is more than a tool asks for, each as often as it may be quoted:
// every one is looked for in every text.
const maxPasswords = 256

// secrets lists what may be secret in values, the longest first, as it is and
// as Python and JSON quote it.
func secrets(values ...json.RawMessage) []string {
	var out []string
	for _, value := range values {
		var all any
		dec := json.NewDecoder(bytes.NewReader(value))
		dec.UseNumber()
		if dec.Decode(&all) != nil {
			continue
		}
		for _, text := range texts(all) {
			escaped := escapes.Replace(text)
			out = append(out, text, escaped, strings.ReplaceAll(escaped, `"`, `\"`), strings.ReplaceAll(escaped, `'`, `\'`))
		}
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	return slices.Compact(out)
}

// escapes are what Python and JSON both write in quotes.
var escapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`)

// passwords lists what may be secret in the values of fields that their schema
// has hidden from who types them, or does not know.
func passwords(schema, values json.RawMessage) []string {
	var fields struct {
		Properties map[string]json.RawMessage `json:"properties"`
		Classes    json.RawMessage            `json:"$defs"` // of the fields that are objects
	}
	var set Values
	if json.Unmarshal(schema, &fields) != nil || json.Unmarshal(values, &set) != nil {
		return nil
	}
	var out []json.RawMessage
	for name, value := range set {
		field, known := fields.Properties[name]
		if !known || hidden.Match(field) || bytes.Contains(field, []byte(`"$ref"`)) && hidden.Match(fields.Classes) {
			out = append(out, value)
		}
	}
	return secrets(out...)
}

// hidden is how the schema of a field says so: pydantic's SecretStr, and what
// forms are told to show as a password.
var hidden = regexp.MustCompile(`"(format|type)":\s*"password"|"writeOnly":\s*true`)

// texts lists the strings and the numbers in v that are long enough.
func texts(v any) []string {
	var out []string
	switch v := v.(type) {
	case json.Number:
		return texts(v.String())
	case string:
		if len(v) >= minSecret {
			out = append(out, v)
		}
	case []any:
		for _, item := range v {
			out = append(out, texts(item)...)
		}
	case map[string]any:
		for _, item := range v {
			out = append(out, texts(item)...)
		}
	}
	return out
}

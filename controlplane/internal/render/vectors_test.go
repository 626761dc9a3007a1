package render

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/fault"
)

func readJSON(t *testing.T, name string, into any) {
	t.Helper()
	raw, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatal(err)
	}
}

func TestFormatMapVectors(t *testing.T) {
	var vectors []struct {
		Template string
		Args     json.RawMessage
		Text     *string
		Error    string
	}
	readJSON(t, "format_map.json", &vectors)
	for _, v := range vectors {
		t.Run(v.Template, func(t *testing.T) {
			got, err := renderPython(t, v.Template, string(v.Args))
			if strings.ContainsAny(v.Template, "[.") && !strings.Contains(v.Template, ":") {
				if fault.From(err).Code != UnsupportedField {
					t.Fatalf("attribute or index access: got %q, %v; want %s", got, err, UnsupportedField)
				}
				return
			}
			if v.Text == nil {
				if !fault.Is(err, fault.Invalid) {
					t.Fatalf("got %q, %v; want a fault for Python's %s", got, err, v.Error)
				}
				return
			}
			if err != nil || got != *v.Text {
				t.Fatalf("got %q, %v; want %q", got, err, *v.Text)
			}
		})
	}
}

func TestShellQuoteVectors(t *testing.T) {
	var vectors []struct {
		Value       json.RawMessage
		Str, Quoted string
	}
	readJSON(t, "shell_quote.json", &vectors)
	for _, v := range vectors {
		value, err := ParseValue(v.Value)
		if err != nil {
			t.Errorf("%s: %v", v.Value, err)
			continue
		}
		str, err := value.str(MaxRendered)
		if err != nil || str != v.Str || Quote(str) != v.Quoted {
			t.Errorf("%s: str %q quoted %s, %v; want %q and %s", v.Value, str, Quote(str), err, v.Str, v.Quoted)
		}
	}
}

// renderPython parses and renders in one step.
func renderPython(t *testing.T, template, args string) (string, error) {
	t.Helper()
	p, err := ParsePython(template)
	if err != nil {
		return "", err
	}
	a, err := ParseArguments([]byte(args))
	if err != nil {
		return "", err
	}
	inv, err := p.Render(a)
	return inv.Script, err
}

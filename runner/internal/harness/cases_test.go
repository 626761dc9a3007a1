package harness

import (
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"
)

// A case is a source and what the original server's own functions made of it.
type caseFile struct {
	Name, Note, Source string
	Result             struct {
		OK            bool
		Frontmatter   map[string]string
		Specs         json.RawMessage
		Valves        json.RawMessage
		UserValves    json.RawMessage
		HasValvesAttr bool `json:"has_valves_attr"`
		Citation      bool
		FileHandler   bool   `json:"file_handler"`
		ErrorType     string `json:"error_type"`
		Error         string
	}
}

// What is different here on purpose: valves classes of the module are seen
// where Tools has none.
var moduleValves = map[string][2]string{
	"seed_example": {
		`{"properties":{"api_key":{"default":"","description":"API Key","title":"Api Key","type":"string"}},"title":"Valves","type":"object"}`,
		`{"properties":{"enabled":{"default":true,"description":"Enable tool","title":"Enabled","type":"boolean"}},"title":"UserValves","type":"object"}`,
	},
}

// varying is what an error's text has of its moment: addresses, and the
// version in pydantic's links.
var varying = regexp.MustCompile(`0x[0-9a-f]+|errors\.pydantic\.dev/[0-9.]+`)

func TestDescribeIsExact(t *testing.T) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []caseFile
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 37 {
		t.Fatalf("only %d cases", len(cases))
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			want := c.Result
			d, failed := describe(t, c.Source)
			if !want.OK {
				if failed == nil {
					t.Fatalf("described as %+v, want %s: %s", d, want.ErrorType, want.Error)
				}
				got, wanted := varying.ReplaceAllString(failed.Message, "…"), varying.ReplaceAllString(want.Error, "…")
				if failed.Type != want.ErrorType || got != wanted {
					t.Errorf("%s: %q, want %s: %q", failed.Type, got, want.ErrorType, wanted)
				}
				if strings.TrimSpace(failed.Sentence()) == "" {
					t.Error("no sentence")
				}
				return
			}
			if failed != nil {
				t.Fatalf("%+v", failed)
			}
			specs, _ := json.Marshal(d.Specs)
			if d.Specs == nil {
				specs = []byte("[]")
			}
			if !same(t, specs, want.Specs) {
				t.Errorf("specs\n%s, want\n%s", specs, want.Specs)
			}
			if !maps.Equal(d.Manifest, want.Frontmatter) {
				t.Errorf("frontmatter %v, want %v", d.Manifest, want.Frontmatter)
			}
			valves, userValves := orNull(want.Valves), orNull(want.UserValves)
			if own, ok := moduleValves[c.Name]; ok {
				valves, userValves = raw(own[0]), raw(own[1])
			}
			if !same(t, d.ValvesSchema, valves) {
				t.Errorf("valves\n%s, want\n%s", d.ValvesSchema, valves)
			}
			if !same(t, d.UserValvesSchema, userValves) {
				t.Errorf("user valves\n%s, want\n%s", d.UserValvesSchema, userValves)
			}
			if d.HasUserValves != (string(userValves) != "null") {
				t.Errorf("has user valves: %v", d.HasUserValves)
			}
			flags := Flags{Citation: want.Citation, FileHandler: want.FileHandler, Valves: want.HasValvesAttr}
			if d.Flags != flags {
				t.Errorf("flags %+v, want %+v", d.Flags, flags)
			}
			if d.Content != c.Source {
				t.Errorf("content %q, want it unchanged", d.Content)
			}
		})
	}
}

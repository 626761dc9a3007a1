package strictjson_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/strictjson"
)

func TestDecodeRefusesASecondReading(t *testing.T) {
	type doc struct {
		Name  string   `json:"name"`
		Count int64    `json:"count"`
		List  []string `json:"list"`
	}
	for name, tc := range map[string]struct{ in, field string }{
		"unknown":    {`{"nom":"x"}`, "nom"},
		"case fold":  {`{"Name":"x"}`, "Name"},
		"duplicate":  {`{"name":"x","name":"y"}`, "name"},
		"trailing":   {`{"name":"x"}{}`, ""},
		"wrong type": {`{"count":"1"}`, "count"},
		"fraction":   {`{"count":1.5}`, "count"},
		"exponent":   {`{"count":1e3}`, "count"},
		"too big":    {`{"count":9223372036854775808}`, "count"},
		"in a list":  {`{"list":["a",1]}`, "list[1]"},
		"empty":      {``, ""},
		"bom":        {"\ufeff{}", ""},
		"comment":    {`{/* */}`, ""},
		"bad utf-8":  {"{\"name\":\"\xff\"}", "name"},
		"too deep":   {strings.Repeat("[", 10001), ""},
	} {
		t.Run(name, func(t *testing.T) {
			var d doc
			err := strictjson.Decode([]byte(tc.in), &d)
			e, ok := errors.AsType[*strictjson.Error](err)
			if !ok {
				t.Fatalf("got %v, want a *strictjson.Error", err)
			}
			if tc.field != "" && e.Field != tc.field {
				t.Errorf("got field %q (%s), want %q", e.Field, e.Why, tc.field)
			}
			if strings.Contains(e.Error(), "json:") || strings.Contains(e.Error(), "Go ") {
				t.Errorf("%q speaks of our own types", e)
			}
			t.Log(e)
		})
	}
}

func TestMembersThatAreNotKnownMayBeSkipped(t *testing.T) {
	var d struct {
		Name string `json:"name"`
	}
	if err := strictjson.DecodeKnown([]byte(`{"more":{"a":[1]},"NAME":"y","name":"x"}`), &d); err != nil || d.Name != "x" {
		t.Errorf("got %+v, %v", d, err)
	}
	for name, in := range map[string]string{
		"duplicate": `{"name":"x","name":"y"}`, "duplicate below": `{"more":{"a":1,"a":2}}`, "trailing": `{"name":"x"}{}`, "wrong type": `{"name":1}`,
	} {
		if err := strictjson.DecodeKnown([]byte(in), &d); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}

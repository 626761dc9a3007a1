package pytool

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

func TestIdentifiersArePythons(t *testing.T) {
	for s, want := range map[string]bool{
		"a": true, "_": true, "A1": true, "class": true, "工具": true, "é": true, "e\u0301": true, "ａ": true, "ß": true, "ªx": true, "µ": true, "Ⅷ": true,
		"℘": true, "℮": true, "a·": true, "a፩": true, "नमस्ते": true, "ไทย": true, "x٣": true, "𝐱": true, "กำ": true, "a_b": true, "a‿b": true,
		"": false, "1": false, "1a": false, "a b": false, "a-b": false, "a.b": false, "a+b": false, "🎨": false, "\u0301": false, "ำ": false, "·": false,
		"ͺ": false, "a\x00": false, "a\u200b": false, "a\u200d": false, "²": false, "٣": false, "a\xff": false, "a'": false, "a゛": false, "‿": false, "ﷺ": false,
	} {
		if identifier(s) != want {
			t.Errorf("%q: got %v", s, !want)
		}
	}
}

func TestAVaultOpensOnlyWhatItSealedThere(t *testing.T) {
	v, err := NewVault("one secret that nobody can guess")
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewVault("one secret that nobody can guess.")
	if err != nil {
		t.Fatal(err)
	}
	at := place{WhichUserValves, "w", "tool", "user"}
	sealed := v.seal([]byte("hunter2"), at)
	if strings.Contains(string(sealed), "hunter2") || string(sealed) == string(v.seal([]byte("hunter2"), at)) {
		t.Error("two seals of one text are alike, or show it")
	}
	if got, err := v.open(sealed, at); err != nil || string(got) != "hunter2" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := other.open(sealed, at); !errors.Is(err, errOtherKey) {
		t.Errorf("another key: %v", err)
	}
	for _, there := range []place{
		{WhichValves, "w", "tool", "user"}, {WhichUserValves, "x", "tool", "user"}, {WhichUserValves, "w", "tools", "user"}, {WhichUserValves, "w", "tool", "other"},
		{WhichUserValves, "wt", "ool", "user"}, {WhichUserValves, "w", "tool" + "user", ""}, {},
	} {
		if _, err := v.open(sealed, there); !errors.Is(err, errBroken) {
			t.Errorf("at %+v: %v", there, err)
		}
	}
	for i := range sealed {
		bent := append([]byte{}, sealed...)
		bent[i] ^= 1
		if _, err := v.open(bent, at); err == nil {
			t.Errorf("byte %d may change", i)
		}
		if _, err := v.open(sealed[:i], at); err == nil {
			t.Errorf("it opens when cut at %d", i)
		}
	}
}

func TestAccess(t *testing.T) {
	me := identity.Principal{Workspace: "w", UserID: "me", Role: identity.Member}
	grant := func(kind, id, permission string) Tool {
		return Tool{Owner: "other", Grants: []Grant{{PrincipalType: kind, PrincipalID: id, Permission: permission}}}
	}
	for name, c := range map[string]struct {
		tool        Tool
		read, write bool
	}{
		"mine":             {Tool{Owner: "me"}, true, true},
		"nobody's":         {Tool{Owner: "other"}, false, false},
		"read":             {grant("user", "me", "read"), true, false},
		"write":            {grant("user", "me", "write"), true, true},
		"another's":        {grant("user", "you", "write"), false, false},
		"public":           {grant("user", "*", "read"), true, false},
		"public write":     {grant("user", "*", "write"), true, true},
		"my group":         {grant("group", "g", "read"), true, false},
		"my group, write":  {grant("group", "g", "write"), true, true},
		"another group":    {grant("group", "h", "write"), false, false},
		"group *":          {grant("group", "*", "write"), false, false},
		"group of my name": {grant("group", "me", "write"), false, false},
		"user of my group": {grant("user", "g", "write"), false, false},
	} {
		v := viewer{me, []string{"g"}}
		if v.mayRead(c.tool) != c.read || v.mayWrite(c.tool) != c.write {
			t.Errorf("%s: read %v, write %v", name, v.mayRead(c.tool), v.mayWrite(c.tool))
		}
		v.Role = identity.Admin
		if !v.mayRead(c.tool) || !v.mayWrite(c.tool) {
			t.Errorf("%s: an admin may not", name)
		}
	}
}

// The shorter password is a part of the longer one, in whichever order the
// fields come.
func TestAPasswordIsMaskedWhole(t *testing.T) {
	schema := json.RawMessage(`{"properties":{"a":{"format":"password"},"b":{"writeOnly":true},"c":{"type":"string"}}}`)
	for range 20 {
		got := masked("with open-sesame or open in plain", passwords(schema, json.RawMessage(`{"a":"open","b":"open-sesame","c":"plain"}`)))
		if got != "with *** or *** in plain" {
			t.Fatalf("got %q", got)
		}
	}
}

func TestWhichValuesArePasswords(t *testing.T) {
	const login = `"$defs":{"Login":{"properties":{"password":{"format":"password"}}}}`
	for name, c := range map[string]struct {
		schema string
		want   bool
	}{
		"a string":                {`{"properties":{"f":{"type":"string"}}}`, false},
		"a SecretStr":             {`{"properties":{"f":{"format":"password","writeOnly":true}}}`, true},
		"one that may be missing": {`{"properties":{"f":{"anyOf":[{"format": "password"},{"type":"null"}]}}}`, true},
		"in an object":            {`{"properties":{"f":{"$ref":"#/$defs/Login"}},` + login + `}`, true},
		"in a list of objects":    {`{"properties":{"f":{"items":{"$ref":"#/$defs/Login"}}},` + login + `}`, true},
		"beside an object":        {`{"properties":{"f":{"type":"string"},"g":{"$ref":"#/$defs/Login"}},` + login + `}`, false},
		"an object without":       {`{"properties":{"f":{"$ref":"#/$defs/Pair"}},"$defs":{"Pair":{"properties":{"a":{"type":"string"}}}}}`, false},
		"unknown":                 {`{"properties":{}}`, true},
	} {
		got := passwords(json.RawMessage(c.schema), json.RawMessage(`{"f":{"deep":["swordfish"]}}`))
		if (len(got) > 0) != c.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestErrorsDoNotRepeatValues(t *testing.T) {
	values := json.RawMessage(`{"key":"hunter2","deep":[{"x":"swordfish"}],"n":1,"short":"abc"}`)
	err := withoutValues(fault.New(fault.Invalid, "[ERROR: 2 errors\nkey\n  hunter2 is bad, so is swordfish [type=value_error, input_value='hunt...er2', input_type=str]]").WithCode("c"), values)
	if got := fault.From(err); got.Message != "[ERROR: 2 errors\nkey\n  *** is bad, so is *** [type=value_error, input_type=str]]" || got.Code != "c" {
		t.Errorf("got %q", got.Message)
	}
	values = json.RawMessage(`{"key":"a\"b'c\nd","pin":73577357,"word":"swordfish"}`)
	err = withoutValues(fault.New(fault.Invalid, `%s`, `key "a\"b'c\nd" or 'a"b\'c\nd', pin 73577357 or SWORDFISH`), values)
	if got := fault.From(err).Message; got != `key "***" or '***', pin *** or ***` {
		t.Errorf("got %q", got)
	}
	cause := fault.New(fault.Unavailable, "no runner")
	err = withoutValues(fault.New(fault.Invalid, "[ERROR: it was sword"+ellipsis), values)
	if got := fault.From(err).Message; got != "[ERROR: it was ***"+ellipsis {
		t.Errorf("cut within a value: %s", got)
	}
	if got := withoutValues(cause, values); got != error(cause) {
		t.Errorf("got %v", got)
	}
}

package render

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"mvdan.cc/sh/v3/syntax"

	"github.com/bigwave/bigwave/shared/fault"
)

// FuzzShell holds that a value never changes how an accepted template parses.
func FuzzShell(f *testing.F) {
	for i, s := range append(append([]string{}, safeTemplates...), unsafeTemplates...) {
		f.Add(s, hostileValues[i%len(hostileValues)])
	}
	f.Fuzz(func(t *testing.T, template, value string) {
		if !utf8.ValidString(value) {
			return // no JSON brings it
		}
		s, err := ParseShell(template)
		if err != nil {
			if !fault.Is(err, fault.Invalid) || strings.Contains(fault.From(err).Message, "bwfield0") {
				t.Fatalf("%q: %v", template, err)
			}
			return
		}
		if len(s.Fields()) == 0 {
			return
		}
		args := Arguments{}
		plain := Arguments{}
		for _, name := range s.Fields() {
			args[name] = Value{kind: kindStr, text: value}
			plain[name] = Value{kind: kindStr, text: "plain"}
		}
		got, err := s.Render(args)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("%q with %q: %v", template, value, err)
			}
			return
		}
		want, err := s.Render(plain)
		if err != nil {
			return // the template itself is too large
		}
		if g, w := shape(got.Script), shape(want.Script); !reflect.DeepEqual(g, w) {
			t.Fatalf("%q with %q\n\tparses as %v\n\tnot as    %v", template, value, g, w)
		}
	})
}

// shape is the kinds of the nodes of a script, words taken whole.
func shape(script string) []string {
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(script), "")
	if err != nil {
		return []string{"error"}
	}
	var kinds []string
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n.(type) {
		case nil, *syntax.Lit, *syntax.SglQuoted, *syntax.DblQuoted:
		default:
			kinds = append(kinds, reflect.TypeOf(n).Elem().Name())
		}
		return true
	})
	return kinds
}

// FuzzPython holds that rendering ends, in bounds, with text or a fault.
func FuzzPython(f *testing.F) {
	for _, template := range []string{"{x}", "{x!r:>{w}}", "{{}}", "{x:{w}.{w}f}", "{x:*^9,}", "{x", "{x:{", "{x!a:é<5}", "{w:#_b}"} {
		f.Add(template, `{"x": 1.5, "w": 7}`)
		f.Add(template, `{"x": "a\u0000'\"é", "w": -12345678901234567890}`)
	}
	f.Fuzz(func(t *testing.T, template, args string) {
		start := time.Now()
		defer func() {
			if took := time.Since(start); took > 5*time.Second {
				t.Fatalf("%q with %.200q took %v", template, args, took)
			}
		}()
		p, err := ParsePython(template)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		a, err := ParseArguments([]byte(args))
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		inv, err := p.Render(a)
		switch {
		case err != nil && !fault.Is(err, fault.Invalid):
			t.Fatal(err)
		case len(inv.Script) > MaxRendered:
			t.Fatalf("%d bytes", len(inv.Script))
		case err == nil && !json.Valid([]byte(args)):
			t.Fatalf("accepted arguments that are not JSON: %q", args)
		}
	})
}

package tool_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
)

func spec(change func(*tool.Spec)) tool.Spec {
	s := grepRepo()
	change(&s)
	return s
}

func TestCheckAccepts(t *testing.T) {
	for name, s := range map[string]tool.Spec{
		"the document's example": grepRepo(),
		"nothing but a kind":     {Name: "a", Kind: tool.PythonTemplate},
		"code for command":       spec(func(s *tool.Spec) { s.Payload = json.RawMessage(`{"code":"ls {pattern}","other":[1]}`) }),
		"python": spec(func(s *tool.Spec) {
			s.Kind, s.Payload = tool.PythonTemplate, json.RawMessage(`{"code":"print({pattern!r:>10})"}`)
		}),
		"longest name":         spec(func(s *tool.Spec) { s.Name = strings.Repeat("a", 64) }),
		"a name like a device": spec(func(s *tool.Spec) { s.Name = "CON" }),
		"definitions": spec(func(s *tool.Spec) {
			s.Parameters = json.RawMessage(`{"$defs":{"a":{"type":"string"}},"properties":{"pattern":{"$ref":"#/$defs/a"}}}`)
		}),
		"a recursive schema": spec(func(s *tool.Spec) { s.Parameters = json.RawMessage(`{"properties":{"child":{"$ref":"#"}}}`) }),
		"draft 7": spec(func(s *tool.Spec) {
			s.Parameters = json.RawMessage(`{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}`)
		}),
	} {
		if err := tool.Check(s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckRefuses(t *testing.T) {
	type refused struct {
		spec  tool.Spec
		field string
	}
	cases := map[string]refused{}
	for _, name := range []string{"", ".", "..", "../../etc/passwd", "a/b", "a\x00b", "a\r\nb", "a\n", strings.Repeat("a", 65), strings.Repeat("a", 1<<20), "-a", "1a", "😀", "\u202eabc", "ｇrep", "grep\u200b", "еval", "e\u0301", "a b", "a.b", "%2e%2e"} {
		cases["name "+fmt.Sprintf("%.20q", name)] = refused{spec: spec(func(s *tool.Spec) { s.Name = name }), field: "name"}
	}
	for _, kind := range []tool.Kind{"", "shell", "SHELL_TEMPLATE", "python"} {
		cases["kind "+string(kind)] = refused{spec: spec(func(s *tool.Spec) { s.Kind = kind }), field: "handler_kind"}
	}
	for payload, field := range map[string]string{
		`{"command":1}`: "handler_payload.command", `{"command":null}`: "handler_payload.command", `{"code":["a"]}`: "handler_payload.code", `{"command":"a","code":"a"}`: "handler_payload.code", `[]`: "handler_payload", `{"command":"a","command":"b"}`: "handler_payload", `{"a":` + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + `}`: "handler_payload",
		`{"command":"eval {x}"}`: "handler_payload.command", `{"code":"eval {x}"}`: "handler_payload.code", `{"command":"a\u0000"}`: "handler_payload.command", `{"command":"` + strings.Repeat("a", 70000) + `"}`: "handler_payload.command", `{"command":"{"}`: "handler_payload.command",
		`{"command":"` + strings.Repeat("a", 300000) + `"}`: "handler_payload",
	} {
		cases[fmt.Sprintf("payload %.40s", payload)] = refused{spec: spec(func(s *tool.Spec) { s.Payload = json.RawMessage(payload) }), field: field}
	}
	for _, schema := range []string{
		`[]`, `true`, `null`, `1`, `"a"`, `{"type":5}`, `{"type":"strin"}`, `{"minLength":-1}`, `{"minLength":"1"}`, `{"required":"a"}`, `{"properties":[]}`, `{"pattern":"("}`, `{"pattern":"(?=a)"}`, `{"pattern":"(a)\\1"}`, `{"pattern":"(a{1000}){1000}"}`, `{"multipleOf":1e-999999999}`, `{"maximum":1e999999}`, `{"enum":1}`,
		`{"$ref":"http://169.254.169.254/"}`, `{"$ref":"file:///etc/passwd"}`, `{"$ref":"other.json"}`, `{"$schema":"http://169.254.169.254/schema"}`, `{"properties":{"a":{"$ref":"https://example.com/x#/a"}}}`, `{"$ref":"#/nowhere"}`, `{"$dynamicRef":"http://a.test/x"}`, `{"$id":"http://a.test/","$ref":"b"}`,
		`{"$ref":"#"}`, `{"allOf":[{"$ref":"#"}]}`, `{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"not":{"$ref":"#/$defs/a"}}}}`, `{"properties":{"a":{"$ref":"#/properties/a"}}}`, `{"$schema":"http://json-schema.org/draft-07/schema#","items":{"anyOf":[{"$ref":"#/items"}]}}`,
		`{"a":1,"a":2}`, `{"properties":{"a":{},"a":{}}}`, strings.Repeat(`{"not":`, 10000) + "{}" + strings.Repeat("}", 10000), strings.Repeat(`{"not":`, 100) + "{}" + strings.Repeat("}", 100), `{"description":"` + strings.Repeat("a", 10<<20) + `"}`, `{} {}`, `{"type":"object"`, `{"a":"\ud800"}`,
	} {
		cases[fmt.Sprintf("schema %.60s", schema)] = refused{spec: spec(func(s *tool.Spec) { s.Parameters = json.RawMessage(schema) }), field: "parameters"}
	}
	cases["description"] = refused{spec: spec(func(s *tool.Spec) { s.Description = strings.Repeat("a", 20000) }), field: "description"}
	cases["description with NUL"] = refused{spec: spec(func(s *tool.Spec) { s.Description = "a\x00" }), field: "description"}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			err := tool.Check(c.spec)
			if took := time.Since(start); took > 3*time.Second {
				t.Errorf("took %v", took)
			}
			f := fault.From(err)
			if err == nil || f.Kind != fault.Invalid || f.Field != c.field && !strings.HasPrefix(f.Field, c.field+".") {
				t.Errorf("got %.300v (%s, field %q); want field %q", err, f.Kind, f.Field, c.field)
			}
			if len(f.Message) > 700 {
				t.Errorf("a message of %d bytes", len(f.Message))
			}
		})
	}
}

func withSchema(t *testing.T, schema string) tool.Tool {
	t.Helper()
	s := spec(func(s *tool.Spec) {
		s.Parameters, s.Payload = json.RawMessage(schema), json.RawMessage(`{"command":"true"}`)
	})
	if err := tool.Check(s); err != nil {
		t.Fatalf("%.200s: %v", schema, err)
	}
	return only(t, s)
}

func TestArgumentsMustFit(t *testing.T) {
	for _, c := range []struct{ schema, args, field, says string }{
		{`{"properties":{"a":{"type":"string"}},"required":["a"]}`, `{}`, "a", "is missing"},
		{`{"properties":{"a":{"type":"string"}}}`, `{"a":1}`, "a", "must be of type string, not"},
		{`{"properties":{"a":{"type":"string","pattern":"^[a-z]+$"}}}`, `{"a":"A"}`, "a", "must match the pattern"},
		{`{"properties":{"a":{"enum":["x","y"]}}}`, `{"a":"z"}`, "a", `must be one of "x", "y"`},
		{`{"properties":{"a":{"maxLength":2}}}`, `{"a":"abc"}`, "a", "at most 2 characters"},
		{`{"properties":{"a":{"minLength":2}}}`, `{"a":"é"}`, "a", "at least 2 characters"},
		{`{"properties":{"a":{"maximum":5}}}`, `{"a":6}`, "a", "at most 5"},
		{`{"properties":{"a":{"type":"integer"}}}`, `{"a":1.5}`, "a", "integer"},
		{`{"properties":{"a":{"properties":{"b":{"items":{"type":"string"}}}}}}`, `{"a":{"b":["x",2]}}`, "a", "argument a.b[1] must be of type string"},
		{`{"additionalProperties":false,"properties":{"a":{}}}`, `{"a":1,"b":2}`, "b", "is not one that the tool takes"},
		{`{"properties":{"a":{"anyOf":[{"type":"string"},{"type":"null"}]}}}`, `{"a":1}`, "a", "anyOf"},
		{`{"properties":{"a":{"const":1}}}`, `{"a":2}`, "a", "must be 1"},
		{`{"propertyNames":{"pattern":"^a$"}}`, `{"b":2}`, "", ""},
	} {
		_, err := withSchema(t, c.schema).Prepare(json.RawMessage(c.args))
		f := fault.From(err)
		if err == nil || f.Code != string(fault.InvalidArguments) || f.Field != c.field || !strings.Contains(f.Message, c.says) {
			t.Errorf("%s with %s: got %v (%s, %s)", c.schema, c.args, err, f.Code, f.Field)
		}
	}
	for _, c := range [][2]string{
		{`{}`, `{"anything":1}`}, {`{"properties":{"a":{"type":"integer"}}}`, `{"a":1.0}`}, {`{"properties":{"a":{"type":"integer"}}}`, `{"a":1` + strings.Repeat("0", 400) + `}`}, {`{"properties":{"a":{"type":"string"}}}`, `{"more":true}`}, {`{"properties":{"a":{"type":["string","null"]}}}`, `{"a":null}`}, {`{"properties":{"child":{"$ref":"#"}}}`, `{"child":{"child":{}}}`},
	} {
		if _, err := withSchema(t, c[0]).Prepare(json.RawMessage(c[1])); err != nil {
			t.Errorf("%s with %s: %v", c[0], c[1], err)
		}
	}
}

// TestHostileSchemasAreBounded is for schemas that would multiply work.
func TestHostileSchemasAreBounded(t *testing.T) {
	var chain strings.Builder
	chain.WriteString(`{"$ref":"#/$defs/a0","$defs":{`)
	for i := range 40 {
		fmt.Fprintf(&chain, `"a%d":{"allOf":[{"$ref":"#/$defs/a%d"},{"$ref":"#/$defs/a%d"}]},`, i, i+1, i+1)
	}
	chain.WriteString(`"a40":{"type":"object"}}}`)
	deep := strings.Repeat(`{"x":`, 500) + "{}" + strings.Repeat("}", 500)
	numbers := "[" + strings.Repeat("1.5,", 100000) + "2]"
	enum := `{"properties":{"a":{"items":{"enum":[` + strings.Repeat("7,", 5000) + `8]}}}}`
	for name, c := range map[string][2]string{
		"references that double":  {chain.String(), `{}`},
		"recursion that doubles":  {`{"allOf":[{"properties":{"x":{"$ref":"#"}}},{"properties":{"x":{"$ref":"#"}}}]}`, deep},
		"recursion in conditions": {`{"anyOf":[{"properties":{"x":{"$ref":"#"}},"required":["no"]},{"properties":{"x":{"$ref":"#"}},"required":["no"]}]}`, deep},
		"a slow pattern":          {`{"properties":{"a":{"pattern":"(a+)+$"}}}`, `{"a":"` + strings.Repeat("a", 50000) + `!"}`},
		"a slow pattern, long":    {`{"properties":{"a":{"pattern":"(a+)+$"}}}`, `{"a":"` + strings.Repeat("a", 1<<20) + `!"}`},
		"many patterns":           {`{"properties":{"a":{"allOf":[` + strings.Repeat(`{"pattern":"(a|b|ab)*c"},`, 1000) + `{}]}}}`, `{"a":"` + strings.Repeat("ab", 20000) + `"}`},
		"a large enumeration":     {enum, `{"a":` + numbers + `}`},
		"unique items":            {`{"properties":{"a":{"uniqueItems":true}}}`, `{"a":` + numbers + `}`},
	} {
		t.Run(name, func(t *testing.T) {
			hostile := withSchema(t, c[0])
			start := time.Now()
			_, err := hostile.Prepare(json.RawMessage(c[1]))
			took := time.Since(start)
			if took > 10*time.Second { // unbounded it would be hours
				t.Errorf("took %v", took)
			}
			if f := fault.From(err); err == nil || f.Kind != fault.Invalid || f.Code != string(fault.InvalidArguments) {
				t.Errorf("got %v", err)
			}
			t.Logf("%v: %.200v", took, err)
		})
	}
}

func TestPutListGetDelete(t *testing.T) {
	store := &memory{specs: map[string]tool.Spec{}}
	ids := 0
	s := &tool.Service{Store: store, Now: func() time.Time { return time.Unix(1, 0) }, NewID: func() string { ids++; return fmt.Sprint(ids) }}
	p := identity.Principal{Workspace: "w", UserID: "u", Role: identity.Admin}
	sent := grepRepo()
	sent.Name = "python_exec"
	kept, err := s.Put(t.Context(), p, "grep_repo", sent, "")
	if err != nil || kept.Name != "grep_repo" || kept.Revision == 0 {
		t.Fatalf("got %+v, %v: the path's name must win", kept, err)
	}
	first := tool.ETag(kept)
	if kept, err = s.Put(t.Context(), p, "grep_repo", sent, first); err != nil || tool.ETag(kept) == first {
		t.Fatalf("a matching put: %v, %v", kept, err)
	}
	for _, match := range []string{first, `"x"`, `W/"1"`} {
		if _, err := s.Put(t.Context(), p, "grep_repo", sent, match); !fault.Is(err, fault.PreconditionFailed) {
			t.Errorf("put with %s: %v", match, err)
		}
		if err := s.Delete(t.Context(), p, "grep_repo", match); !fault.Is(err, fault.PreconditionFailed) {
			t.Errorf("delete with %s: %v", match, err)
		}
	}
	if _, err := s.Put(t.Context(), p, "other", sent, "*"); !fault.Is(err, fault.PreconditionFailed) {
		t.Errorf("put of a new tool with *: %v", err)
	}
	if _, err := s.Put(t.Context(), p, "a/b", sent, ""); fault.From(err).Field != "name" {
		t.Errorf("put of a bad name: %v", err)
	}
	bare, err := s.Put(t.Context(), p, "bare", tool.Spec{Kind: tool.ShellTemplate}, "")
	if err != nil || string(bare.Parameters) != "{}" || string(bare.Payload) != "{}" {
		t.Errorf("a bare tool: %+v, %v", bare, err)
	}
	if found, err := s.List(t.Context(), p); err != nil || len(found) != 2 || found[0].Name != "bare" {
		t.Errorf("list: %v, %v", found, err)
	}
	stranger := identity.Principal{Workspace: "other", UserID: "v", Role: identity.Admin}
	for _, name := range []string{"grep_repo", "nothing", "a/b", "../x"} {
		if _, err := s.Get(t.Context(), stranger, name); !fault.Is(err, fault.NotFound) {
			t.Errorf("get %s: %v", name, err)
		}
		if err := s.Delete(t.Context(), stranger, name, ""); !fault.Is(err, fault.NotFound) {
			t.Errorf("delete %s: %v", name, err)
		}
	}
	if err := s.Delete(t.Context(), p, "grep_repo", tool.ETag(kept)); err != nil {
		t.Errorf("delete: %v", err)
	}
	var actions []string
	for _, e := range store.events {
		actions = append(actions, e.Action+" "+e.Object+" "+e.Actor+" "+e.Outcome)
	}
	if got, want := strings.Join(actions, ", "), "tool.put grep_repo u ok, tool.put grep_repo u ok, tool.put bare u ok, tool.delete grep_repo u ok"; got != want {
		t.Errorf("recorded %s; want %s", got, want)
	}
}

func FuzzCheck(f *testing.F) {
	f.Add("grep", `{"type":"object"}`, `{"command":"ls {x}"}`, `{"x":1}`)
	f.Add("a", `{"$ref":"#/$defs/a","$defs":{"a":{"pattern":"a"}}}`, `{"code":"{x!r}"}`, `{"x":[1]}`)
	f.Fuzz(func(t *testing.T, name, parameters, payload, args string) {
		s := tool.Spec{Name: name, Kind: tool.ShellTemplate, Parameters: json.RawMessage(parameters), Payload: json.RawMessage(payload)}
		err := tool.Check(s)
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Fatal(err)
		}
		if err == nil {
			if _, err := only(t, s).Prepare(json.RawMessage(args)); err != nil && !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
		}
	})
}

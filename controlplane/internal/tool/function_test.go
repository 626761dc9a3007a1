package tool_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
	"github.com/bigwave/bigwave/shared/fault"
)

func function(id, name, parameters string) tool.Tool {
	return tool.NewFunction(tool.Function{Pin: tool.Pin{ID: id, Revision: 7}, Digest: "sha256:x", Content: "source of " + id, Name: name}, "d", json.RawMessage(parameters))
}

func TestFunctionsStandBesideOtherTools(t *testing.T) {
	base, err := tool.Merge(t.Context(), "w", builtin.New())
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("f", 80)
	all := base.With([]tool.Tool{
		function("a", "search", "{}"), function("b", "search", "{}"), function("b", "b_search", "{}"), function("c", "shell_exec", "{}"), function("a", "<lambda>", "{}"),
		function("工具", "search", "{}"), function("werkzeug", "工具", "{}"), function("d", long, "{}"), function("e", long+"x", "{}"), function("e", long, "{}"),
	})
	var got []string
	for _, x := range all.List() {
		if len(x.Name) > 64 || strings.Trim(x.Name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "" {
			t.Errorf("%q is no name that models take", x.Name)
		}
		if x.Source == tool.Builtin {
			continue
		}
		inv, err := x.Prepare(json.RawMessage(`{}`))
		if err != nil || inv.Program != tool.PythonTool || "python:"+inv.Function.ID != x.Source || x.OverridesBuiltin {
			t.Errorf("%s: %+v, %v", x.Name, inv, err)
		}
		if len(inv.Function.Name) < 64 {
			got = append(got, fmt.Sprint(x.Name, "=", inv.Function.ID, ".", inv.Function.Name))
		}
	}
	want := []string{
		"__=werkzeug.工具", "___search=工具.search", "_lambda_=a.<lambda>", "b_b_search=b.b_search", "b_search=b.search", "c_shell_exec=c.shell_exec", "search=a.search",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if n := len(all.List()); n != 4+10 {
		t.Errorf("%d tools", n)
	}
	if n := len(base.List()); n != 4 {
		t.Errorf("the registry that they were put beside has %d tools", n)
	}
	if x, _ := all.Lookup("shell_exec"); x.Source != tool.Builtin {
		t.Errorf("a function hides a built-in: %+v", x)
	}
}

func TestFunctionsTakeWhatTheirParametersName(t *testing.T) {
	f := function("t", "f", `{"type":"object","properties":{"a":{"type":"integer"},"b":{}},"required":["a"]}`)
	for args, want := range map[string]string{
		`{"a":1,"b":[1,{"c":"\u00e9"}]}`: `{"a":1,"b":[1,{"c":"é"}]}`,
		`{"a":"5"}`:                      `{"a":"5"}`, // "5" is 5 for a function that says so
		`{"b":1.50}`:                     `{"b":1.50}`,
		`{"a":1,"__user__":{"id":"root"},"__event_emitter__":1,"c":2}`: `{"a":1}`,
		`{}`: `{}`,
		``:   `{}`,
	} {
		inv, err := f.Prepare(json.RawMessage(args))
		if err != nil || string(inv.Function.Arguments) != want || inv.Function.Content != "source of t" || inv.Function.Revision != 7 {
			t.Errorf("%s: got %+v, %v", args, inv.Function, err)
		}
	}
	first, _ := f.Prepare(json.RawMessage(`{"a":1}`))
	second, _ := f.Prepare(json.RawMessage(`{"a":2}`))
	if string(first.Function.Arguments) != `{"a":1}` || string(second.Function.Arguments) != `{"a":2}` {
		t.Error("two calls share their arguments")
	}
	for _, bad := range []string{`[]`, `"x"`, `null`, `{`, `{"a":1,"a":2}`, `{"a":1e999}`, `{}{}`} {
		_, err := f.Prepare(json.RawMessage(bad))
		if f := fault.From(err); err == nil || f.Kind != fault.Invalid || f.Code != string(fault.InvalidArguments) {
			t.Errorf("%s: got %v", bad, err)
		}
	}
}

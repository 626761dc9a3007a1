package tool_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
	"github.com/bigwave/bigwave/shared/fault"
)

func grepRepo() tool.Spec {
	return tool.Spec{
		Name: "grep_repo", Description: "Search the repo for a regex pattern.", Kind: tool.ShellTemplate,
		Parameters: json.RawMessage(`{"type":"object","properties":{"pattern":{"type":"string"}},"required":["pattern"]}`),
		Payload:    json.RawMessage(`{"command":"grep -rn {pattern} /workspace"}`),
	}
}

func BenchmarkPrepareGrepRepo(b *testing.B) {
	t := only(b, grepRepo())
	for b.Loop() {
		if _, err := t.Prepare(json.RawMessage(`{"pattern":"TODO it's"}`)); err != nil {
			b.Fatal(err)
		}
	}
}

// only is the tool that a workspace with this one spec offers.
func only(t testing.TB, s tool.Spec) tool.Tool {
	t.Helper()
	service := &tool.Service{Store: &memory{specs: map[string]tool.Spec{s.Name: s}}}
	r, err := tool.Merge(context.Background(), "w", builtin.New(), service)
	if err != nil {
		t.Fatal(err)
	}
	found, ok := r.Lookup(s.Name)
	if !ok {
		t.Fatalf("no tool %q", s.Name)
	}
	return found
}

func TestMergeOverridesBuiltins(t *testing.T) {
	shell := grepRepo()
	shell.Name = "shell_exec"
	service := &tool.Service{Store: &memory{specs: map[string]tool.Spec{"shell_exec": shell, "grep_repo": grepRepo()}}}
	r, err := tool.Merge(t.Context(), "w", builtin.New(), service)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, found := range r.List() {
		names = append(names, found.Name)
		if want := found.Name == "shell_exec"; found.OverridesBuiltin != want {
			t.Errorf("%s overrides a built-in: %v", found.Name, found.OverridesBuiltin)
		}
	}
	if got, want := strings.Join(names, " "), "file_read file_write grep_repo python_exec shell_exec"; got != want {
		t.Errorf("got %s; want %s", got, want)
	}
	if found, _ := r.Lookup("shell_exec"); found.Source != "workspace" {
		t.Errorf("shell_exec comes from %s", found.Source)
	}
	other, err := tool.Merge(t.Context(), "other", builtin.New(), service)
	if err != nil {
		t.Fatal(err)
	}
	if found, _ := other.Lookup("shell_exec"); found.Source != tool.Builtin || found.OverridesBuiltin {
		t.Errorf("in another workspace: %+v", found)
	}
	if _, ok := other.Lookup("grep_repo"); ok {
		t.Error("another workspace sees grep_repo")
	}
	if _, ok := r.Lookup("Grep_repo"); ok {
		t.Error("names fold case")
	}
}

func TestPrepareBuiltins(t *testing.T) {
	r, err := tool.Merge(t.Context(), "w", builtin.New())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, args string
		want       tool.Invocation
		code       fault.Code
		field      string
	}{
		{name: "python_exec", args: `{"code":"print(1)"}`, want: tool.Invocation{Program: "python3", Script: "print(1)"}},
		{name: "shell_exec", args: `{"command":"echo \"{x}\""}`, want: tool.Invocation{Program: "bash", Script: `echo "{x}"`}},
		{name: "shell_exec", args: `{"command":"` + strings.Repeat("a", 1<<20) + `"}`, want: tool.Invocation{Program: "bash", Script: strings.Repeat("a", 1<<20)}},
		{name: "file_read", args: `{"path":"a.txt"}`, want: tool.Invocation{Program: "file_read", Path: "a.txt"}},
		{name: "file_read", args: `{"path":"a.txt","encoding":"base64"}`, want: tool.Invocation{Program: "file_read", Path: "a.txt", Encoding: "base64"}},
		{name: "file_write", args: `{"path":"a","content":"x\u0000y"}`, want: tool.Invocation{Program: "file_write", Path: "a", Content: "x\x00y"}},
		{name: "file_write", args: `{"path":"a","content":"/wA=","encoding":"base64"}`, want: tool.Invocation{Program: "file_write", Path: "a", Content: "\xff\x00"}},
		{name: "file_write", args: `{"path":"a","content":"","encoding":"utf-8"}`, want: tool.Invocation{Program: "file_write", Path: "a"}},
		{name: "file_write", args: `{"path":"a","content":"*","encoding":"base64"}`, code: fault.InvalidArguments, field: "content"},
		{name: "file_write", args: `{"path":"a"}`, code: fault.InvalidArguments, field: "content"},
		{name: "file_read", args: `{"path":""}`, code: fault.InvalidArguments, field: "path"},
		{name: "file_read", args: `{"path":"a\u0000b"}`, code: fault.NULByte, field: "path"},
		{name: "file_read", args: `{"path":"` + strings.Repeat("a", 5000) + `"}`, code: fault.InvalidArguments, field: "path"},
		{name: "file_read", args: `{"path":"a","encoding":"latin1"}`, code: fault.InvalidArguments, field: "encoding"},
		{name: "python_exec", args: `{"code":1}`, code: fault.InvalidArguments, field: "code"},
		{name: "python_exec", args: `{"code":null}`, code: fault.InvalidArguments, field: "code"},
		{name: "python_exec", args: `{}`, code: fault.InvalidArguments, field: "code"},
		{name: "python_exec", args: ``, code: fault.InvalidArguments, field: "code"},
		{name: "python_exec", args: `{"code":"a","extra":1}`, code: fault.InvalidArguments, field: "extra"},
		{name: "python_exec", args: `{"code":"a","code":"b"}`, code: fault.InvalidArguments},
		{name: "python_exec", args: `[1]`, code: fault.InvalidArguments},
		{name: "python_exec", args: `{"code":"\u0000"}`, code: fault.NULByte, field: "code"},
	} {
		found, ok := r.Lookup(c.name)
		if !ok {
			t.Fatalf("no %s", c.name)
		}
		got, err := found.Prepare(json.RawMessage(c.args))
		if c.code == "" {
			if err != nil || got != c.want {
				t.Errorf("%s(%.60s): got %.100v, %v", c.name, c.args, got, err)
			}
			continue
		}
		f := fault.From(err)
		if err == nil || f.Kind != fault.Invalid || f.Code != string(c.code) || c.field != "" && f.Field != c.field {
			t.Errorf("%s(%.60s): got %v (%s, %s); want %s, %s", c.name, c.args, err, f.Code, f.Field, c.code, c.field)
		}
	}
}

func TestPrepareGrepRepo(t *testing.T) {
	grep := only(t, grepRepo())
	got, err := grep.Prepare(json.RawMessage(`{"pattern":"it's $(id)"}`))
	want := tool.Invocation{Program: "bash", Script: `grep -rn 'it'"'"'s $(id)' /workspace`, InArgv: true}
	if err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for args, field := range map[string]string{`{}`: "pattern", `{"pattern": 1}`: "pattern", `{"pattern": null}`: "pattern", `{"pattern": ["a"]}`: "pattern"} {
		if _, err := grep.Prepare(json.RawMessage(args)); fault.From(err).Code != string(fault.InvalidArguments) || fault.From(err).Field != field {
			t.Errorf("%s: %v", args, err)
		}
	}
	if _, err := grep.Prepare(json.RawMessage(`{"pattern":"` + strings.Repeat("a", 200000) + `"}`)); fault.From(err).Code != string(fault.ArgumentTooLarge) {
		t.Errorf("a large argument: %v", err)
	}
}

func TestPrepareAStoredSpecThatIsNotFit(t *testing.T) {
	for name, s := range map[string]tool.Spec{
		"no command":     {Name: "a", Kind: tool.ShellTemplate},
		"empty payload":  {Name: "a", Kind: tool.ShellTemplate, Payload: json.RawMessage(`{}`)},
		"unsafe command": {Name: "a", Kind: tool.ShellTemplate, Payload: json.RawMessage(`{"command":"eval {x}"}`)},
		"bad schema":     {Name: "a", Kind: tool.ShellTemplate, Parameters: json.RawMessage(`{"type":5}`), Payload: json.RawMessage(`{"command":"ls"}`)},
	} {
		_, err := only(t, s).Prepare(json.RawMessage(`{"x":"1"}`))
		if f := fault.From(err); f.Kind != fault.Invalid || f.Code != string(fault.InvalidArguments) || f.Field == "" {
			t.Errorf("%s: %v (%s, %s)", name, err, f.Code, f.Field)
		}
	}
}

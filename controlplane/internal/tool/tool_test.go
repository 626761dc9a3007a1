package tool_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/controlplane/internal/tool/builtin"
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

package main

import (
	"context"
	"encoding/json"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
)

// newDescriber is what runs the sources of Python tools. As long as no runner
// can, it says so, and tools can neither be made nor changed.
func newDescriber() pytool.Describer { return noRunner{} }

type noRunner struct{}

func (noRunner) Describe(context.Context, pytool.Source, json.RawMessage) (pytool.Description, error) {
	return pytool.Description{}, errNoRunner()
}

func (noRunner) ValidateValves(context.Context, pytool.Source, pytool.ValvesCheck) (json.RawMessage, error) {
	return nil, errNoRunner()
}

func errNoRunner() error {
	return fault.New(fault.Unavailable, "no runner can run the tool's source; nothing was stored").WithCode(string(fault.NoRunner))
}

package execution

import (
	"testing"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/wire"
)

// The sandbox's contract does not import the protocol; its words are the same.
func TestTheSandboxsProgramsAreTheProtocols(t *testing.T) {
	for program, word := range map[sandbox.Program]string{
		sandbox.Bash: wire.Bash, sandbox.Python: wire.Python, sandbox.FileRead: wire.FileRead, sandbox.FileWrite: wire.FileWrite,
	} {
		if string(program) != word {
			t.Errorf("%q is %q in the protocol", program, word)
		}
	}
}

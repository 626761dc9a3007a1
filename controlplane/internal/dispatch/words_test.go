package dispatch

import (
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// What decides does not import the protocol; its words are the same.
func TestTheDomainsWordsAreTheProtocols(t *testing.T) {
	for domain, protocol := range map[string]string{
		run.Capacity: wire.RefusedCapacity, run.Draining: wire.RefusedDraining, run.MemoryFull: wire.RefusedMemoryFull,
		run.Unheard: wire.RefusedUnheard, run.UnknownSession: wire.RefusedUnknownSession, run.WrongEpoch: wire.RefusedEpoch,
		run.Duplicate: wire.RefusedDuplicate, run.CallUnknown: wire.CallUnknown, run.CallRunning: wire.CallRunning,
		run.CallEnded: wire.CallEnded, tool.Bash: wire.Bash, tool.Python: wire.Python, tool.FileRead: wire.FileRead,
		tool.FileWrite: wire.FileWrite,
	} {
		if domain != protocol {
			t.Errorf("%q is %q in the protocol", domain, protocol)
		}
	}
	for _, code := range []string{wire.Stopped, wire.RunnerStopped} {
		if _, taken := fault.Codes[fault.Code(code)]; taken {
			t.Errorf("%q is also a fault's code", code)
		}
	}
}

package run_test

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The PostgreSQL server of the tests lives as long as the process.
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("os/exec.(*Cmd).watchCtx"),
		goleak.IgnoreAnyFunction("github.com/bigwave/bigwave/controlplane/internal/store/storetest.(*Server).Start.func1"),
	)
}

package box

import (
	"testing"
	"time"
)

// A process that was forked for a sandbox's next call is no call's once the
// sandbox is gone, and nobody waits for another.
func TestADeadSandboxHasNoForkedCall(t *testing.T) {
	ready := make(chan struct{})
	close(ready)
	x := &box{dead: true}
	x.python.up, x.python.fork = true, &supervisor{ready: ready}
	begun := time.Now()
	if s := x.takeFork(); s != nil {
		t.Error("a dead sandbox gives a call its process")
	}
	if took := time.Since(begun); took >= warmWait {
		t.Errorf("it took %v to say so", took)
	}
}

package dispatch

import (
	"context"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// maxNotice is the largest notice, in bytes.
const maxNotice = 4 << 10

// Notify tells watchers and the other replicas that something in the database
// has changed. It does not wait for the bus: a notice is a hint, and who
// waits looks at the database from time to time.
func (d *Dispatcher) Notify(sessionID string, n run.Notice) {
	m := nats.NewMsg(bus.Notice(sessionID))
	m.Header = nats.Header{
		bus.HeaderRun:  {n.Run},
		bus.HeaderCall: {n.Call},
		bus.HeaderKind: {n.Kind},
		bus.HeaderFrom: {d.Replica},
	}
	var err error
	if m.Data, err = strictjson.Encode(wireNotice(n)); err == nil {
		err = d.Bus.PublishMsg(m)
	}
	if err != nil {
		d.Log.WarnContext(context.Background(), "notice not sent", "kind", n.Kind, "session", sessionID, "error", err)
	}
}

// onNotice wakes this replica's waiters by what another one did.
func (d *Dispatcher) onNotice(m *nats.Msg) {
	if d.Replica != "" && m.Header.Get(bus.HeaderFrom) == d.Replica {
		return
	}
	var n wire.Notice
	if len(m.Data) > maxNotice || strictjson.Decode(m.Data, &n) != nil {
		d.count("notice", "malformed")
		return
	}
	d.Runs.Heard(bus.SessionOf(m.Subject), notice(n))
}

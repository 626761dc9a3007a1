package dispatch

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// applied tells when an outcome has arrived.
type applied struct {
	*services
	done chan struct{}
}

func (a applied) Apply(context.Context, run.Outcome) error { a.done <- struct{}{}; return nil }

// BenchmarkOrderToOutcome is one call without sandbox and database: seal,
// order, answer, signed report through the stream, checked and handed on.
func BenchmarkOrderToOutcome(b *testing.B) {
	b.Run("in process", func(b *testing.B) { orderToOutcome(b, false) })
	b.Run("tcp", func(b *testing.B) { orderToOutcome(b, true) })
}

func orderToOutcome(b *testing.B, tcp bool) {
	r := newRig(b)
	w := r.runner("r1")
	a := applied{r.s, make(chan struct{}, 1)}
	r.stop()
	r.tcp = tcp
	r.startDispatcher(func(d *Dispatcher) { d.Runs = a })
	keys := envelope.NewKeys(r.public)
	accepted, _ := strictjson.Encode(wire.OrderReply{Accepted: true})
	_, err := w.nc.Subscribe(bus.Order("r1"), func(m *nats.Msg) {
		var o wire.Order
		if err := keys.Open(wire.OrderType, wire.MaxOrder, m.Data, &o); err != nil {
			b.Error(err)
		}
		_ = m.Respond(accepted)
		_, _ = w.js.PublishAsync(bus.Final("r1", "ses_1"), w.seal(wire.ReportType, w.done("ses_1", o.Call.ID)))
	})
	if err != nil {
		b.Fatal(err)
	}
	_ = w.nc.Flush()
	for b.Loop() {
		if _, err := r.d.Call(b.Context(), w.session("ses_1"), w.call(newID()), tool.Invocation{Program: "bash", Script: "true", InArgv: true}); err != nil {
			b.Fatal(err)
		}
		<-a.done
	}
}

// BenchmarkFirstEvent is a watcher that joins a run whose first event is there.
func BenchmarkFirstEvent(b *testing.B) {
	r := newRig(b)
	id := "run_" + newID()
	r.d.Notify("ses_1", run.Notice{Kind: run.RunStarted, Run: id})
	_ = r.d.Bus.Flush()
	for b.Loop() {
		for _, err := range r.d.Watch(b.Context(), "ses_1", id, 0) {
			if err != nil {
				b.Fatal(err)
			}
			break
		}
	}
}

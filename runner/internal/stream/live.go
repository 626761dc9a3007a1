package stream

import (
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// maxInFlight is how many frames of all calls may wait for the event stream's
// word at once. At most 2 MiB are then on their way, which a connection takes
// without blocking whoever publishes.
const maxInFlight = 64

// Live publishes frames to the event stream and waits for none of them. It
// may be used from several goroutines.
type Live struct {
	Runner string
	Log    *slog.Logger

	js jetstream.JetStream
}

// NewLive returns a Live that publishes on nc.
func NewLive(nc *nats.Conn, runner string, log *slog.Logger) (*Live, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(5*time.Second))
	if err != nil {
		return nil, err
	}
	return &Live{Runner: runner, Log: log, js: js}, nil
}

// Publish sends one frame of a session; false means that the bus is behind
// and that the frame was not taken.
func (l *Live) Publish(session string, f wire.Frame) bool {
	if l.js.PublishAsyncPending() >= maxInFlight || !l.js.Conn().IsConnected() {
		return false
	}
	data, err := strictjson.Encode(f)
	if err != nil {
		l.Log.Error("frame could not be encoded", "call", f.Call, "error", err)
		return true
	}
	msg := nats.NewMsg(bus.Frame(l.Runner, session))
	msg.Data = data
	msg.Header = header(f.Run, f.Call, string(f.Kind))
	_, err = l.js.PublishMsgAsync(msg)
	return err == nil
}

func header(run, call, kind string) nats.Header {
	h := nats.Header{bus.HeaderKind: {kind}}
	if run != "" {
		h[bus.HeaderRun] = []string{run}
	}
	if call != "" {
		h[bus.HeaderCall] = []string{call}
	}
	return h
}

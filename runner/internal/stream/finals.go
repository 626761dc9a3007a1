package stream

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/wire"
)

// How a final is tried again while the stream does not answer.
const (
	retryTick = 100 * time.Millisecond
	retryMin  = 500 * time.Millisecond
	retryMax  = 5 * time.Second
)

// Finals seals reports and publishes them until the event stream has each of
// them. It keeps what is not acknowledged in memory; Save writes that to the
// spool and Recover publishes the spool.
//
// Open first. Send may be called from several goroutines and does not wait;
// Run does the retries and owns them.
type Finals struct {
	Conn   *nats.Conn
	Signer *envelope.Signer
	Runner string
	Spool  string // folder, made when needed
	Log    *slog.Logger

	mu      sync.Mutex
	waiting []*final // in the order of Send
	next    int64
	reached uint64        // the connection's reconnects when we last looked
	empty   chan struct{} // closed when nothing waits; nil when nobody asked
	inbox   string
	sub     *nats.Subscription
}

// final is one sealed report on its way.
type final struct {
	Subject string `json:"subject"`
	MsgID   string `json:"msg_id"`
	Run     string `json:"run,omitempty"`
	Call    string `json:"call,omitempty"`
	Kind    string `json:"kind"`
	Data    []byte `json:"data"`

	reply string
	file  string // where it lies in the spool; empty: only in memory
	tries int
	due   time.Time
}

// Open starts to listen for the stream's answers.
func (f *Finals) Open() error {
	f.inbox = nats.NewInbox()
	sub, err := f.Conn.Subscribe(f.inbox+".*", f.answered)
	if err != nil {
		return fmt.Errorf("listen for the event stream's answers: %w", err)
	}
	f.sub = sub
	return nil
}

// Send seals r and hands it to the event stream. An error means that it could
// not be sealed; everything else is tried again for as long as Run runs.
func (f *Finals) Send(r wire.Report) error {
	data, err := f.Signer.Seal(wire.ReportType, r)
	if err != nil {
		return fmt.Errorf("seal report: %w", err)
	}
	f.add(&final{
		Subject: bus.Final(f.Runner, r.Session),
		MsgID:   fmt.Sprintf("%s.%s.%d.%s.%s", r.Incarnation, r.Session, r.Epoch, r.Kind, r.Call),
		Run:     r.Run, Call: r.Call, Kind: string(r.Kind),
		Data: data,
	})
	return nil
}

func (f *Finals) add(one *final) {
	f.mu.Lock()
	f.next++
	one.reply = f.inbox + "." + strconv.FormatInt(f.next, 36)
	f.waiting = append(f.waiting, one)
	one.due = time.Now().Add(retryMin)
	f.mu.Unlock()
	f.publish(one)
}

// publish sends one final if the bus is there.
func (f *Finals) publish(one *final) {
	if !f.Conn.IsConnected() { // else it would fill the reconnect buffer again and again
		return
	}
	msg := &nats.Msg{Subject: one.Subject, Reply: one.reply, Header: header(one.Run, one.Call, one.Kind), Data: one.Data}
	msg.Header[nats.MsgIdHdr] = []string{one.MsgID}
	if err := f.Conn.PublishMsg(msg); err != nil {
		f.Log.Warn("report could not be published yet", "kind", one.Kind, "call", one.Call, "error", err)
	}
}

// answered takes the stream's word on one final.
func (f *Finals) answered(m *nats.Msg) {
	var ack struct {
		Stream string `json:"stream"`
		Error  *struct {
			Code        int    `json:"code"`
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil || ack.Stream == "" || ack.Error != nil {
		if ack.Error != nil {
			f.Log.Warn("event stream refused a report", "code", ack.Error.Code, "why", ack.Error.Description)
		}
		return // no stream there yet, or a passing failure: Run tries again
	}
	f.forget(m.Subject)
}

func (f *Finals) forget(reply string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, one := range f.waiting {
		if one.reply != reply {
			continue
		}
		f.waiting = append(f.waiting[:i:i], f.waiting[i+1:]...)
		if one.file != "" {
			f.unspool(one.file)
		}
		break
	}
	if len(f.waiting) == 0 && f.empty != nil {
		close(f.empty)
		f.empty = nil
	}
}

// Run tries again what the stream has not acknowledged, until ctx ends.
func (f *Finals) Run(ctx context.Context) error {
	tick := time.NewTicker(retryTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, one := range f.overdue(time.Now()) {
				f.publish(one)
			}
		}
	}
}

// overdue are the finals to try again now: all of them after a reconnect.
func (f *Finals) overdue(now time.Time) []*final {
	reconnects := f.Conn.Stats().Reconnects
	f.mu.Lock()
	defer f.mu.Unlock()
	all := reconnects != f.reached && f.Conn.IsConnected()
	if all {
		f.reached = reconnects
	}
	var out []*final
	for _, one := range f.waiting {
		if !all && now.Before(one.due) {
			continue
		}
		one.tries++
		one.due = now.Add(min(retryMin<<min(one.tries, 8), retryMax))
		out = append(out, one)
	}
	return out
}

// Wait returns when the stream has every report or ctx ends, and says how many
// it has not.
func (f *Finals) Wait(ctx context.Context) int {
	for {
		f.mu.Lock()
		n := len(f.waiting)
		if n > 0 && f.empty == nil {
			f.empty = make(chan struct{})
		}
		empty := f.empty
		f.mu.Unlock()
		if n == 0 {
			return 0
		}
		select {
		case <-empty:
		case <-ctx.Done():
			return f.Left()
		}
	}
}

// Left is how many reports the stream has not acknowledged.
func (f *Finals) Left() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.waiting)
}

// Close stops listening for answers.
func (f *Finals) Close() error {
	err := f.sub.Unsubscribe()
	if err != nil && strings.Contains(err.Error(), nats.ErrConnectionClosed.Error()) {
		return nil
	}
	return err
}

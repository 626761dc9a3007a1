package httpapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
)

// Event is one step of a run's live stream. It feeds watchers only; the truth
// is in the run.
type Event struct {
	Seq    uint64 // the stream's own number: an SSE id
	Kind   string // run.started call.started call.output call.event call.finished run.finished
	Run    string
	Call   string // our own id of the call
	N      int64
	Stream string // call.output: stdout or stderr
	Data   []byte
}

// The kinds of events.
const (
	runStarted   = "run.started"
	callStarted  = "call.started"
	callOutput   = "call.output"
	callEvent    = "call.event"
	callFinished = "call.finished"
	runFinished  = "run.finished"
)

func (s *Server) runEvents(c echo.Context) error {
	found, err := s.Runs.Get(c.Request().Context(), principal(c), c.Param("session"), c.Param("run"))
	if err != nil {
		return err
	}
	from, err := parseResume(c.Request().Header.Get("Last-Event-ID"))
	if err != nil {
		return err
	}
	return s.stream(c, found, from)
}

// stream writes the run's events until the run is final, the client is gone,
// or its key no longer holds.
func (s *Server) stream(c echo.Context, r run.Run, from resume) error {
	ctx, cancel := context.WithCancel(c.Request().Context())
	events := make(chan watched, 16)
	var follower sync.WaitGroup
	follower.Go(func() { follow(ctx, s.Events(ctx, r.Session, r.ID, from.after), events) })
	defer follower.Wait()
	defer cancel()

	w := &watcher{s: s, c: c, run: r, from: from, text: newJoiner(from), sent: map[string]bool{}, seq: from.after, last: from.id}
	if w.late = r.Status.Final() || c.Request().Method == http.MethodGet; r.Status.Final() {
		return w.replay(ctx, events)
	}
	if err := w.open(); err != nil {
		return err
	}
	return w.end(w.guarded(ctx, events))
}

// watched is an event, or why there are no more.
type watched struct {
	event Event
	err   error
}

// follow hands events on, at the pace of the reader, until ctx ends or the
// source does.
func follow(ctx context.Context, source iter.Seq2[Event, error], to chan<- watched) {
	defer close(to)
	defer func() {
		if p := recover(); p != nil {
			to <- watched{err: fmt.Errorf("panic: %v", p)}
		}
	}()
	for e, err := range source {
		select {
		case to <- watched{e, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// watcher writes one run's stream to one client.
type watcher struct {
	s    *Server
	c    echo.Context
	run  run.Run
	from resume
	text *joiner
	sent map[string]bool // calls whose call.finished was written
	seq  uint64          // of the event before
	last string          // the id to write

	begun bool // run.started was written
	late  bool // the client did not start the run with this stream
}

// errOver ends a stream that has said everything.
var errOver = errors.New("the stream is over")

// replay writes what is still kept of a run that is over.
func (w *watcher) replay(ctx context.Context, events <-chan watched) error {
	select {
	case first, ok := <-events:
		if !ok {
			first.err = gone()
		}
		if first.err != nil {
			return first.err
		}
		if err := w.open(); err != nil {
			return err
		}
		err := w.event(ctx, first.event)
		if err == nil {
			err = w.guarded(ctx, events)
		}
		return w.end(err)
	case <-time.After(w.s.Idle):
	case <-ctx.Done():
		return nil
	}
	if w.from.after > 0 {
		// The client has seen it all; 204 tells it to stop asking.
		return w.c.NoContent(http.StatusNoContent)
	}
	return gone()
}

func gone() error {
	return fault.New(fault.Gone, "the events of this run are no longer kept; read the run itself")
}

// guarded is live, with a panic as the error it is: the head of the answer is
// out, so only the stream itself can tell.
func (w *watcher) guarded(ctx context.Context, events <-chan watched) error {
	return caught(func(echo.Context) error { return w.live(ctx, events) }, w.c)
}

// live writes events as they come, comments while it is quiet, and looks at
// the run itself when no event came for a while.
func (w *watcher) live(ctx context.Context, events <-chan watched) error {
	heartbeat := time.NewTicker(w.s.Heartbeat)
	defer heartbeat.Stop()
	idle := time.NewTimer(w.s.Idle)
	defer idle.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-events:
			if !ok {
				return ctx.Err()
			}
			if err = e.err; err == nil {
				err = w.event(ctx, e.event)
			}
			if err == nil && len(events) == 0 {
				err = w.flush()
			}
		case <-heartbeat.C:
			err = w.beat(ctx)
		case <-idle.C:
			err = w.look(ctx)
		}
		if err != nil {
			return err
		}
		idle.Reset(w.s.Idle)
	}
}

// beat keeps the connection open, and ends it when the key no longer holds.
func (w *watcher) beat(ctx context.Context) error {
	token, _ := w.c.Get(keyBearer).(string)
	if _, err := w.s.Identity.Authenticate(ctx, token); fault.Is(err, fault.Unauthenticated) {
		return err
	}
	if err := w.write([]byte(": keep-alive\n\n")); err != nil {
		return err
	}
	return w.flush()
}

// look ends the stream of a run that is final although no event said so:
// events are best effort, the run is the truth.
func (w *watcher) look(ctx context.Context) error {
	if err := w.load(ctx); err != nil || !w.run.Status.Final() {
		return err
	}
	if err := w.missed(); err != nil {
		return err
	}
	return w.runFinished()
}

// missed writes the ends of calls whose events were lost.
func (w *watcher) missed() error {
	if w.from.after > 0 { // the client may have seen them
		return nil
	}
	if err := w.begin(); err != nil {
		return err
	}
	for _, c := range w.run.Calls {
		if err := w.callFinished(c); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) load(ctx context.Context) error {
	r, err := w.s.Runs.Get(ctx, principal(w.c), w.run.Session, w.run.ID)
	if err == nil {
		w.run = r
	}
	return err
}

// event writes one event. What the text joiner holds back travels in the id,
// so that a client may resume between the halves of a rune.
func (w *watcher) event(ctx context.Context, e Event) error {
	if e.Run != "" && e.Run != w.run.ID {
		return nil
	}
	if e.Kind == runStarted {
		return w.runStarted(e.Seq)
	}
	if e.Kind == runFinished {
		if err := w.load(ctx); err != nil || !w.run.Status.Final() {
			return err
		}
		if err := w.missed(); err != nil {
			return err
		}
		w.last = strconv.FormatUint(e.Seq, 10)
		return w.runFinished()
	}
	i, call, ok := w.call(e.Call)
	if !ok {
		return nil
	}
	if err := w.begin(); err != nil {
		return err
	}
	defer func() { w.seq = e.Seq }()
	switch e.Kind {
	case callStarted:
		w.last = w.text.id(e.Seq)
		return w.send(callStarted, startedData{CallID: call.ClientID, Name: call.Name})
	case callOutput:
		piece := w.text.add(streamKey{i, e.Stream}, e.Data)
		w.last = w.text.id(e.Seq)
		return w.output(call, e.Stream, piece)
	case callEvent:
		w.last = w.text.id(e.Seq)
		return w.send(callEvent, newEventData(call, e.Data))
	case callFinished:
		return w.finish(ctx, e, i)
	}
	return nil
}

// finish writes what was held back of the call's output and then its result.
func (w *watcher) finish(ctx context.Context, e Event, i int) error {
	for _, stream := range streams {
		rest := w.text.rest(streamKey{i, stream})
		w.last = w.text.id(w.seq)
		if err := w.output(w.run.Calls[i], stream, rest); err != nil {
			return err
		}
	}
	if !w.run.Calls[i].Status.Final() {
		if err := w.load(ctx); err != nil {
			return err
		}
	}
	w.last = w.text.id(e.Seq)
	return w.callFinished(w.run.Calls[i])
}

func (w *watcher) call(id string) (int, run.Call, bool) {
	for i, c := range w.run.Calls {
		if c.ID == id {
			return i, c, true
		}
	}
	return 0, run.Call{}, false
}

// begin makes run.started the first event of a stream from the start, also
// when its own event was lost.
func (w *watcher) begin() error {
	if w.from.after > 0 || w.begun {
		return nil
	}
	return w.runStarted(0)
}

func (w *watcher) runStarted(seq uint64) error {
	if w.begun {
		return nil
	}
	w.begun = true
	if seq > 0 {
		w.last = strconv.FormatUint(seq, 10)
	}
	return w.send(runStarted, runData{Run: newRunResponse(atStart(w.run))})
}

// atStart is the run as it was when it started.
func atStart(r run.Run) run.Run {
	calls := make([]run.Call, len(r.Calls))
	for i, c := range r.Calls {
		c.Status = run.Pending
		calls[i] = c
	}
	r.Status, r.Calls, r.Usage, r.Output = run.Running, calls, run.Usage{}, ""
	r.FinishedAt = time.Time{}
	return r
}

func (w *watcher) output(c run.Call, stream string, piece []byte) error {
	if len(piece) == 0 {
		return nil
	}
	d := outputData{CallID: c.ClientID, Stream: stream}
	d.Text, d.Base64 = kept(piece)
	return w.send(callOutput, d)
}

func (w *watcher) callFinished(c run.Call) error {
	if w.sent[c.ID] || !c.Status.Final() {
		return nil
	}
	w.sent[c.ID] = true
	return w.send(callFinished, callData{Call: newCallResponse(c)})
}

func (w *watcher) runFinished() error {
	if err := w.begin(); err != nil {
		return err
	}
	if err := w.send(runFinished, runData{Run: newRunResponse(w.run)}); err != nil {
		return err
	}
	if !w.late {
		w.s.observer.ended(w.run)
	}
	return errOver
}

// open sends the head of the answer.
func (w *watcher) open() error {
	h := w.c.Response().Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("X-Accel-Buffering", "no")
	w.c.Response().WriteHeader(http.StatusOK)
	return w.flush()
}

// end says why a stream stops early; a client that is gone or stuck is told
// nothing.
func (w *watcher) end(err error) error {
	if errors.Is(err, errOver) {
		_ = w.flush()
		return nil
	}
	if err == nil || w.c.Request().Context().Err() != nil || isWriteFailure(err) {
		return nil
	}
	p := newProblem(err, requestID(w.c))
	w.s.logFailure(w.c.Request().Context(), p, err)
	if w.send("error", p) == nil {
		_ = w.flush()
	}
	return nil
}

// writeFailure is a client that no longer takes what we write.
type writeFailure struct{ error }

func isWriteFailure(err error) bool {
	_, ok := errors.AsType[writeFailure](err)
	return ok
}

// send writes one event under the id last set.
func (w *watcher) send(name string, data any) error {
	body, err := marshal(data)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	var b bytes.Buffer
	b.Grow(len(body) + 96)
	if w.last != "" && name != "error" {
		b.WriteString("id: " + w.last + "\n")
	}
	b.WriteString("event: " + name + "\ndata: ")
	b.Write(body) // JSON holds no line break
	b.WriteString("\n\n")
	return w.write(b.Bytes())
}

// write gives a stuck reader a while and then drops it; nothing of the run
// waits for it.
func (w *watcher) write(b []byte) error {
	rc := http.NewResponseController(w.c.Response())
	if err := rc.SetWriteDeadline(time.Now().Add(w.s.WriteTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return writeFailure{err}
	}
	if _, err := w.c.Response().Write(b); err != nil {
		return writeFailure{err}
	}
	return nil
}

func (w *watcher) flush() error {
	err := http.NewResponseController(w.c.Response()).Flush()
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		return writeFailure{err}
	}
	return nil
}

package stream

import (
	"io"
	"sync"
	"time"

	"github.com/bigwave/bigwave/shared/wire"
)

// How output becomes frames.
const (
	frameSize  = 32 << 10              // a frame is sent when it is so large,
	frameAge   = 20 * time.Millisecond // or when its first byte waits so long;
	firstAge   = 2 * time.Millisecond  // the first byte of all sooner
	frameQueue = 1 << 20               // bytes that wait at most; more is dropped
	closeWait  = 100 * time.Millisecond
)

// Frames numbers the live stream of one call and publishes it in batches.
// Its writers never block: what a slow bus can't take in time is dropped, and
// the numbers then have a gap. Frames are cut between characters.
//
// The writers may be used from several goroutines; Close is called once, after
// the last write, and returns when no frame of the call can follow.
type Frames struct {
	Run, Call string
	Publish   func(wire.Frame) bool // false: the bus can't take it now

	mu      sync.Mutex // guards what follows; never held while publishing
	queue   []wire.Frame
	queued  int
	carry   map[string][]byte // the beginning of a character, by stream
	n       int64
	timer   *time.Timer
	due     time.Time // when the timer fires
	spoken  bool      // output was published before
	started bool      // FrameStarted is out or waits
	closed  bool
	sending sync.Mutex // held while publishing
}

// Started says that the program runs. Output says so too: whichever comes
// first, the frame that tells is the first one.
func (f *Frames) Started() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.start()
	f.arm()
}

func (f *Frames) start() {
	if !f.started {
		f.started = true
		f.add(wire.FrameStarted, "", nil)
	}
}

// Stream is the writer for "stdout" or "stderr". It takes a copy of what it is
// given and never fails.
func (f *Frames) Stream(name string) io.Writer { return streamWriter{f, name} }

// Event queues what the tool has emitted, a JSON value of at most 256 KiB. The
// bytes are the caller's no longer.
func (f *Frames) Event(data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.start()
	f.add(wire.FrameEvent, "", data)
	f.arm()
}

type streamWriter struct {
	f    *Frames
	name string
}

// Write queues p.
func (w streamWriter) Write(p []byte) (int, error) {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	w.f.start()
	w.f.write(w.name, p)
	w.f.arm()
	return len(p), nil
}

func (f *Frames) write(name string, p []byte) {
	if rest := f.carry[name]; len(rest) > 0 {
		p = append(rest, p...)
		delete(f.carry, name)
	}
	if n := partial(p); n > 0 {
		if f.carry == nil {
			f.carry = map[string][]byte{}
		}
		f.carry[name] = append([]byte(nil), p[len(p)-n:]...)
		p = p[:len(p)-n]
	}
	p = f.extend(name, p)
	for len(p) > 0 {
		piece := p
		if len(p) > frameSize { // what is no text may end in the beginnings of many characters
			piece = trimEnd(p[:frameSize])
		}
		f.add(wire.FrameOutput, name, append([]byte(nil), piece...))
		p = p[len(piece):]
	}
}

// extend adds to the last frame that waits, if it is of this stream and has
// room, and returns what is left.
func (f *Frames) extend(name string, p []byte) []byte {
	if len(f.queue) == 0 {
		return p
	}
	last := &f.queue[len(f.queue)-1]
	if last.Kind != wire.FrameOutput || last.Stream != name || len(last.Data)+len(p) > frameSize || f.queued+len(p) > frameQueue {
		return p
	}
	last.Data = append(last.Data, p...)
	f.queued += len(p)
	return nil
}

func (f *Frames) add(kind wire.FrameKind, name string, data []byte) {
	f.n++ // also when it is dropped: watchers see the gap
	if f.queued+len(data) > frameQueue {
		return
	}
	f.queued += len(data)
	f.queue = append(f.queue, wire.Frame{Run: f.Run, Call: f.Call, Kind: kind, N: f.n, Stream: name, Data: data})
}

// arm makes sure that what waits is sent in time.
func (f *Frames) arm() {
	switch {
	case len(f.queue) == 0 || f.closed:
	case f.timer == nil:
		f.due = time.Now().Add(f.age())
		f.timer = time.AfterFunc(f.age(), f.tick)
	case time.Until(f.due) > f.age():
		f.due = time.Now().Add(f.age())
		f.timer.Reset(f.age())
	}
}

// age is how long what waits may wait. That the program runs is no news worth
// a message of its own while its first output may come with it.
func (f *Frames) age() time.Duration {
	switch {
	case f.queued >= frameSize:
		return 0
	case f.queued > 0 && !f.spoken:
		return firstAge
	}
	return frameAge
}

func (f *Frames) tick() {
	stuck := !f.flush()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.timer = nil
	if stuck || len(f.queue) > 0 {
		f.arm()
	}
}

// flush publishes what waits, in order; false: the bus could not take all.
func (f *Frames) flush() bool {
	f.sending.Lock()
	defer f.sending.Unlock()
	for {
		frame, ok := f.take()
		if !ok {
			return true
		}
		if !f.Publish(frame) {
			f.giveBack(frame)
			return false
		}
	}
}

func (f *Frames) take() (wire.Frame, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queue) == 0 {
		return wire.Frame{}, false
	}
	frame := f.queue[0]
	f.queue = f.queue[1:]
	f.queued -= len(frame.Data)
	f.spoken = f.spoken || frame.Kind == wire.FrameOutput
	return frame, true
}

func (f *Frames) giveBack(frame wire.Frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue = append([]wire.Frame{frame}, f.queue...)
	f.queued += len(frame.Data)
}

// Close publishes what still waits and drops what the bus does not take within
// a tenth of a second.
func (f *Frames) Close() {
	f.mu.Lock()
	for name, rest := range f.carry {
		f.add(wire.FrameOutput, name, rest)
	}
	f.carry = nil
	f.closed = true
	if f.timer != nil {
		f.timer.Stop()
	}
	f.mu.Unlock()
	for deadline := time.Now().Add(closeWait); !f.flush() && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	f.mu.Lock()
	f.queue, f.queued = nil, 0
	f.mu.Unlock()
}

package stream

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/wire"
)

// watcher collects frames, and takes none while it is busy.
type watcher struct {
	mu     sync.Mutex
	frames []wire.Frame
	busy   bool
}

func (w *watcher) publish(f wire.Frame) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy {
		return false
	}
	w.frames = append(w.frames, f)
	return true
}

func (w *watcher) got() []wire.Frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]wire.Frame(nil), w.frames...)
}

func (w *watcher) set(busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy = busy
}

func text(frames []wire.Frame, stream string) string {
	var b bytes.Buffer
	for _, f := range frames {
		if f.Stream == stream {
			b.Write(f.Data)
		}
	}
	return b.String()
}

func TestFirstOutputComesSoonAndTheRestInBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &watcher{}
		f := &Frames{Run: "r", Call: "c", Publish: w.publish}
		out := f.Stream("stdout")
		f.Started()
		_, _ = out.Write([]byte("first\n"))
		time.Sleep(3 * time.Millisecond)
		synctest.Wait()
		if got := w.got(); len(got) != 2 || got[0].Kind != wire.FrameStarted || string(got[1].Data) != "first\n" {
			t.Fatalf("after 3 ms: %+v", got)
		}
		for range 10 {
			_, _ = out.Write([]byte("x"))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(25 * time.Millisecond)
		synctest.Wait()
		if got := w.got(); len(got) != 3 || string(got[2].Data) != "xxxxxxxxxx" {
			t.Fatalf("ten small writes: %+v", got)
		}
		f.Close()
		for i, frame := range w.got() {
			if frame.N != int64(i+1) || frame.Run != "r" || frame.Call != "c" {
				t.Errorf("frame %d is %+v", i, frame)
			}
		}
	})
}

func TestTheStartIsToldBeforeOutput(t *testing.T) {
	w := &watcher{}
	f := &Frames{Publish: w.publish}
	_, _ = f.Stream("stdout").Write([]byte("early"))
	f.Started() // heard of later than what was printed
	f.Close()
	if got := w.got(); len(got) != 2 || got[0].Kind != wire.FrameStarted || string(got[1].Data) != "early" {
		t.Errorf("got %+v", got)
	}
}

func TestCloseFlushesAtOnce(t *testing.T) {
	w := &watcher{}
	f := &Frames{Publish: w.publish}
	_, _ = f.Stream("stdout").Write([]byte("a"))
	_, _ = f.Stream("stderr").Write([]byte("b"))
	f.Close()
	if got := w.got(); text(got, "stdout") != "a" || text(got, "stderr") != "b" {
		t.Errorf("got %+v", got)
	}
}

func TestNoOutputMakesNoFrame(t *testing.T) {
	w := &watcher{}
	f := &Frames{Publish: w.publish}
	f.Close()
	if got := w.got(); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
}

func TestFramesAreCutBetweenCharacters(t *testing.T) {
	for _, piece := range []string{"é", "😀", "a€b😀"} {
		whole := strings.Repeat(piece, 40000)
		w := &watcher{}
		f := &Frames{Publish: w.publish}
		out := f.Stream("stdout")
		for p := []byte(whole); len(p) > 0; { // in pieces of a prime length
			n := min(len(p), 1021)
			_, _ = out.Write(p[:n])
			p = p[n:]
		}
		f.Close()
		got := w.got()
		if text(got, "stdout") != whole {
			t.Errorf("%q: %d of %d bytes came", piece, len(text(got, "stdout")), len(whole))
		}
		for _, frame := range got {
			if !utf8.Valid(frame.Data) || len(frame.Data) > frameSize {
				t.Fatalf("%q: frame %d of %d bytes is not whole characters", piece, frame.N, len(frame.Data))
			}
		}
	}
}

func TestHalfACharacterAtTheEndStillComes(t *testing.T) {
	w := &watcher{}
	f := &Frames{Publish: w.publish}
	_, _ = f.Stream("stdout").Write([]byte("ok\xe2\x82"))
	f.Close()
	if got := text(w.got(), "stdout"); got != "ok\xe2\x82" {
		t.Errorf("got %q", got)
	}
}

func TestSlowBusDropsFramesAndBlocksNobody(t *testing.T) {
	w := &watcher{}
	w.set(true)
	f := &Frames{Publish: w.publish}
	out := f.Stream("stdout")
	began := time.Now()
	for range 4096 {
		_, _ = out.Write(make([]byte, 4096)) // 16 MiB
	}
	f.mu.Lock()
	queued := f.queued
	f.mu.Unlock()
	if queued > frameQueue {
		t.Errorf("%d bytes wait", queued)
	}
	f.Close()
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	if got := w.got(); len(got) != 0 {
		t.Errorf("%d frames came", len(got))
	}
}

func TestNumbersShowTheGapThatASlowBusLeft(t *testing.T) {
	w := &watcher{}
	w.set(true)
	f := &Frames{Publish: w.publish}
	out := f.Stream("stdout")
	for range 64 {
		_, _ = out.Write(make([]byte, frameSize)) // twice what may wait
	}
	w.set(false)
	time.Sleep(60 * time.Millisecond)
	_, _ = out.Write([]byte("last"))
	f.Close()
	got := w.got()
	last := got[len(got)-1]
	if string(last.Data) != "last" || last.N != 66 || len(got) != 34 {
		t.Errorf("%d frames; the last is %d", len(got), last.N)
	}
}

func TestBytesThatAreNoTextPassWhole(t *testing.T) {
	for _, unit := range []string{"\xe0", "\xf0\x90", "\xe0\xa0\xf0", "a\xc3", "\x80"} {
		for _, n := range []int{1, 2, 3, frameSize - 1, frameSize, frameSize + 1, 3*frameSize + 2} {
			sent := bytes.Repeat([]byte(unit), n)
			w := &watcher{}
			f := &Frames{Publish: w.publish}
			out := f.Stream("stdout")
			done := make(chan struct{})
			go func() {
				defer close(done)
				out.Write(sent[:len(sent)/2])
				out.Write(sent[len(sent)/2:])
				f.Close()
			}()
			select {
			case <-done:
			case <-time.After(10 * time.Second):
				t.Fatalf("%d × %q: it hangs", n, unit)
			}
			if got := text(w.got(), "stdout"); got != string(sent) {
				t.Errorf("%d × %q: got %d bytes of %d", n, unit, len(got), len(sent))
			}
		}
	}
}

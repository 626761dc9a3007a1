// Package stream brings what a sandbox writes to those who want it: a Limit
// keeps the head and the tail for the result, Frames number the live stream,
// and Finals hold reports until the event stream has them.
package stream

import (
	"fmt"
	"io"
	"unicode/utf8"
)

// Limit is a writer that keeps at most Max bytes of what is written to it: all
// of it, or the head and the tail with a line between them that says how much
// is missing. It never returns an error and never blocks on anything but Next.
// It is for one goroutine at a time.
type Limit struct {
	Max     int64     // bytes kept at most, the line about dropped bytes included
	Flood   int64     // past so many bytes OnFlood is called, once; 0: never
	OnFlood func()    // may be nil when Flood is 0
	Next    io.Writer // gets the first Max bytes as they come; may be nil

	head    []byte // the first Max bytes
	tail    []byte // the end of the rest
	total   int64
	flooded bool
}

// Write takes all of p.
func (l *Limit) Write(p []byte) (int, error) {
	n := len(p)
	l.total += int64(n)
	if room := l.Max - int64(len(l.head)); room > 0 {
		first := p[:min(room, int64(len(p)))]
		l.head = append(l.head, first...)
		if l.Next != nil {
			_, _ = l.Next.Write(first) // the live stream may lose; the result may not
		}
		p = p[len(first):]
	}
	if len(p) > 0 {
		l.keepTail(p)
	}
	if l.Flood > 0 && l.total > l.Flood && !l.flooded {
		l.flooded = true
		l.OnFlood()
	}
	return n, nil
}

// keepTail holds between one and two times the tail's size and moves the end
// to the front when that is full, so that a byte is copied at most twice.
func (l *Limit) keepTail(p []byte) {
	size := int(l.Max/2) + 1
	if len(p) >= size {
		l.tail = append(l.tail[:0], p[len(p)-size:]...)
		return
	}
	if len(l.tail)+len(p) > 2*size {
		l.tail = append(l.tail[:0], l.tail[len(l.tail)-size:]...)
	}
	l.tail = append(l.tail, p...)
}

// Total is how many bytes were written.
func (l *Limit) Total() int64 { return l.total }

// Flooded reports whether more than Flood bytes were written.
func (l *Limit) Flooded() bool { return l.flooded }

// Kept is what is kept, and whether something is missing from it.
func (l *Limit) Kept() ([]byte, bool) { return l.Fit(l.Max) }

// Fit is Kept for a smaller limit.
func (l *Limit) Fit(limit int64) ([]byte, bool) {
	limit = min(limit, l.Max)
	if l.total <= limit {
		return l.head, false
	}
	room := limit - int64(len(marker(l.total)))
	if room < 2 { // no place for the line
		return trimEnd(l.head[:max(limit, 0)]), true
	}
	head := trimEnd(l.head[:room/2])
	tail := trimStart(l.last(room - room/2))
	out := make([]byte, 0, limit)
	out = append(out, head...)
	out = append(out, marker(l.total-int64(len(head)+len(tail)))...)
	return append(out, tail...), true
}

// last is the end of the stream; it reaches back into the head when little
// followed that.
func (l *Limit) last(n int64) []byte {
	if have := int64(len(l.tail)); have < n {
		return append(append([]byte(nil), l.head[int64(len(l.head))-(n-have):]...), l.tail...)
	}
	return l.tail[int64(len(l.tail))-n:]
}

func marker(dropped int64) string { return fmt.Sprintf("\n… [%d bytes dropped] …\n", dropped) }

// trimEnd drops a character that is cut off at the end of p.
func trimEnd(p []byte) []byte { return p[:len(p)-partial(p)] }

// trimStart drops the rest of a character whose start is missing.
func trimStart(p []byte) []byte {
	for i := range min(len(p), utf8.UTFMax) {
		if utf8.RuneStart(p[i]) {
			return p[i:]
		}
	}
	return p // not UTF-8: nothing to mend
}

// partial is how many bytes at the end of p begin a character that is not
// complete.
func partial(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		b := p[len(p)-n:]
		if utf8.RuneStart(b[0]) {
			if utf8.FullRune(b) {
				return 0
			}
			return n
		}
	}
	return 0
}

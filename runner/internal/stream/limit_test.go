package stream

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

var markerForm = regexp.MustCompile(`(?s)^(.*)\n… \[(\d+) bytes dropped\] …\n(.*)$`)

func TestLimitKeepsHeadAndTail(t *testing.T) {
	for _, tt := range []struct {
		name  string
		max   int64
		write string
		cut   bool
	}{
		{"nothing", 1024, "", false},
		{"short", 1024, "hello\n", false},
		{"exactly the limit", 1024, strings.Repeat("x", 1024), false},
		{"one over", 1024, strings.Repeat("x", 1025), true},
		{"far over", 1024, strings.Repeat("0123456789", 100000), true},
		{"two-byte characters", 1024, strings.Repeat("é", 5000), true},
		{"four-byte characters", 1024, strings.Repeat("😀", 5000) + "end", true},
		{"mixed", 1025, strings.Repeat("aé😀", 5000), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := &Limit{Max: tt.max}
			if n, err := l.Write([]byte(tt.write)); n != len(tt.write) || err != nil {
				t.Fatalf("Write: %d, %v", n, err)
			}
			kept, cut := l.Kept()
			if cut != tt.cut || int64(len(kept)) > tt.max || l.Total() != int64(len(tt.write)) {
				t.Fatalf("cut %v, %d kept, %d in total", cut, len(kept), l.Total())
			}
			if !utf8.Valid(kept) {
				t.Errorf("a character was split: %q", kept)
			}
			checkKept(t, kept, []byte(tt.write), cut)
		})
	}
}

// checkKept fails unless kept is whole or the two ends of whole with the right
// count between them.
func checkKept(t interface {
	Helper()
	Fatalf(string, ...any)
}, kept, whole []byte, cut bool) {
	t.Helper()
	if !cut {
		if !bytes.Equal(kept, whole) {
			t.Fatalf("something is missing: %d of %d bytes", len(kept), len(whole))
		}
		return
	}
	m := markerForm.FindSubmatch(kept)
	if m == nil {
		t.Fatalf("no line about dropped bytes in %q", kept)
	}
	dropped, _ := strconv.Atoi(string(m[2]))
	if !bytes.HasPrefix(whole, m[1]) || !bytes.HasSuffix(whole, m[3]) || len(m[1])+len(m[3])+dropped != len(whole) {
		t.Fatalf("%d + %d kept, %d dropped, of %d", len(m[1]), len(m[3]), dropped, len(whole))
	}
	if len(m[1]) == 0 || len(m[3]) == 0 {
		t.Fatalf("head or tail is empty: %d, %d", len(m[1]), len(m[3]))
	}
}

func TestLimitHoldsForAnyWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := int64(rapid.IntRange(200, 3000).Draw(t, "limit"))
		l := &Limit{Max: limit}
		var whole []byte
		for range rapid.IntRange(0, 12).Draw(t, "writes") {
			p := []byte(rapid.StringN(0, -1, 1500).Draw(t, "piece"))
			whole = append(whole, p...)
			_, _ = l.Write(p)
			clear(p) // a writer may reuse its buffer
		}
		for _, fit := range []int64{limit, limit/2 + 80} {
			kept, cut := l.Fit(fit)
			if int64(len(kept)) > min(fit, limit) {
				t.Fatalf("kept %d, limit %d", len(kept), fit)
			}
			if cut != (int64(len(whole)) > min(fit, limit)) {
				t.Fatalf("cut %v for %d of %d", cut, len(whole), fit)
			}
			checkKept(t, kept, whole, cut)
			if utf8.Valid(whole) && !utf8.Valid(kept) {
				t.Fatalf("a character was split")
			}
		}
	})
}

func TestLimitKeepsBytesThatAreNotText(t *testing.T) {
	l := &Limit{Max: 1024}
	whole := bytes.Repeat([]byte{0xff, 0x80, 0x80, 0x80, 0x80, 0xc3}, 3000)
	_, _ = l.Write(whole)
	kept, cut := l.Kept()
	if !cut || len(kept) > 1024 || len(kept) < 1000 {
		t.Errorf("cut %v, kept %d", cut, len(kept))
	}
}

func TestLimitPassesOnTheHeadOnly(t *testing.T) {
	var next bytes.Buffer
	l := &Limit{Max: 1500, Next: &next}
	for i := range 1000 {
		fmt.Fprintf(l, "%04d\n", i)
	}
	if next.Len() != 1500 || !strings.HasPrefix(next.String(), "0000\n0001\n") {
		t.Errorf("got %d bytes", next.Len())
	}
}

func TestLimitCallsOnFloodOnce(t *testing.T) {
	calls := 0
	l := &Limit{Max: 1024, Flood: 16 * 1024, OnFlood: func() { calls++ }}
	_, _ = l.Write(make([]byte, 16*1024))
	if calls != 0 || l.Flooded() {
		t.Fatal("a flood at exactly 16 times the limit")
	}
	for range 3 {
		_, _ = l.Write([]byte("x"))
	}
	if calls != 1 || !l.Flooded() {
		t.Errorf("OnFlood was called %d times", calls)
	}
}

func TestLimitMemoryStaysFlat(t *testing.T) {
	l := &Limit{Max: 1 << 20}
	p := bytes.Repeat([]byte("y\n"), 16<<10)
	for range 2000 { // 64 MB
		_, _ = l.Write(p)
	}
	if held := cap(l.head) + cap(l.tail); held > 4<<20 {
		t.Errorf("holds %d bytes for a limit of 1 MiB", held)
	}
}

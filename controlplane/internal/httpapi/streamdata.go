package httpapi

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
)

type runData struct {
	Run runResponse `json:"run"`
}

type callData struct {
	Call any `json:"call"`
}

type startedData struct {
	CallID string `json:"call_id"`
	Name   string `json:"name"`
}

type outputData struct {
	CallID string `json:"call_id"`
	Stream string `json:"stream"`
	Text   string `json:"text"`
	Base64 string `json:"base64,omitempty"` // the exact bytes, when the text lost some
}

type eventData struct {
	CallID string         `json:"call_id"`
	Data   jsontext.Value `json:"data"`
}

// newEventData carries what a tool emitted: JSON as it is, anything else as
// text.
func newEventData(c run.Call, data []byte) eventData {
	v := jsontext.Value(data)
	if !v.IsValid() {
		s, _ := text(data)
		v, _ = marshal(s)
	}
	return eventData{CallID: c.ClientID, Data: v}
}

var streams = []string{"stdout", "stderr"}

// streamKey is one output of one call of the run.
type streamKey struct {
	call   int
	stream string
}

// joiner puts runes together that were split between two pieces of an output.
type joiner struct {
	tails map[streamKey][]byte
}

func newJoiner(from resume) *joiner {
	j := &joiner{tails: map[streamKey][]byte{}}
	for k, v := range from.tails {
		j.tails[k] = v
	}
	return j
}

// add returns what can be shown now of the output so far not shown.
func (j *joiner) add(k streamKey, data []byte) []byte {
	whole, tail := splitRune(append(j.tails[k], data...))
	j.tails[k] = slices.Clone(tail)
	return whole
}

// rest returns what was held back, and forgets it.
func (j *joiner) rest(k streamKey) []byte {
	tail := j.tails[k]
	delete(j.tails, k)
	return tail
}

// id is an SSE id: the sequence, followed by what is held back at that point.
func (j *joiner) id(seq uint64) string {
	var held []streamKey
	for k, tail := range j.tails {
		if len(tail) > 0 {
			held = append(held, k)
		}
	}
	slices.SortFunc(held, func(a, b streamKey) int {
		return cmp.Or(cmp.Compare(a.call, b.call), cmp.Compare(a.stream, b.stream))
	})
	id := strconv.FormatUint(seq, 10)
	for _, k := range held {
		id += fmt.Sprintf("~%d.%s.%x", k.call, k.stream, j.tails[k])
	}
	return id
}

// resume is where a client left a stream.
type resume struct {
	id    string
	after uint64
	tails map[streamKey][]byte
}

// parseResume reads an id that joiner.id wrote; empty means from the start.
func parseResume(id string) (resume, error) {
	if id == "" {
		return resume{}, nil
	}
	bad := fault.New(fault.Invalid, "Last-Event-ID is not an id that this stream gave").On("Last-Event-ID")
	seq, held, _ := strings.Cut(id, "~")
	after, err := strconv.ParseUint(seq, 10, 64)
	if err != nil || len(id) > 4096 {
		return resume{}, bad
	}
	r := resume{id: id, after: after, tails: map[streamKey][]byte{}}
	if held == "" {
		return r, nil
	}
	for part := range strings.SplitSeq(held, "~") {
		f := strings.Split(part, ".")
		if len(f) != 3 || !slices.Contains(streams, f[1]) {
			return resume{}, bad
		}
		call, err := strconv.Atoi(f[0])
		tail, err2 := hex.DecodeString(f[2])
		if err != nil || err2 != nil || call < 0 || call >= run.MaxCalls || len(tail) >= utf8.UTFMax {
			return resume{}, bad
		}
		r.tails[streamKey{call, f[1]}] = tail
	}
	return r, nil
}

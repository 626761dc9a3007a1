package dispatch

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// FuzzReport feeds payloads as if they were signed: whatever is let through
// can be converted.
func FuzzReport(f *testing.F) {
	f.Add([]byte(`{"v":2,"kind":"call.done","runner":"r1","incarnation":"i","session":"ses_1","epoch":1,"at":1,"run":"run_1","call":"call_1","done":{"status":"ok","output_sizes":[0,0,0],"stdout_bytes":0,"stderr_bytes":0,"duration_ms":0,"cpu_ms":0,"memory_peak_bytes":0,"oom_kills":0}}`))
	f.Add([]byte(`{"v":2,"kind":"session.ended","runner":"r1","incarnation":"i","session":"ses_1","epoch":1,"at":1,"failure":{"code":"stopped","message":""}}`))
	f.Add([]byte(`{"v":2,"kind":"call.done","done":{"output":{"id":"b","size":4,"sha256":""},"output_sizes":[4,0,0]}}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		var r wire.Report
		if strictjson.Decode(payload, &r) != nil || checkReport(r, bus.Final("r1", "ses_1")) != nil {
			return
		}
		switch {
		case r.Done != nil && r.Done.Output != nil:
			_ = withOutput(*r.Done, make([]byte, r.Done.Output.Size))
		case r.Done != nil:
			_ = outcome(r)
		case r.Sandbox != nil:
			_ = sandbox(*r.Sandbox)
		}
	})
}

func TestAcceptedPartsAlwaysFitTheOutput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.Int64Range(-5, 20)
		if rapid.Bool().Draw(t, "wild") {
			part = rapid.Int64()
		}
		d := wire.Done{
			Status: "ok", Output: &wire.Blob{ID: "b", Size: rapid.Int64Range(-1, 40).Draw(t, "size")},
			OutputSizes: [3]int64{part.Draw(t, "a"), part.Draw(t, "b"), part.Draw(t, "c")},
		}
		if checkDone(d) != nil {
			return
		}
		got := withOutput(d, make([]byte, d.Output.Size))
		for i, b := range [][]byte{got.Stdout, got.Stderr, got.Value} {
			if int64(len(b)) != d.OutputSizes[i] {
				t.Fatalf("part %d has %d bytes, want %d", i, len(b), d.OutputSizes[i])
			}
		}
	})
}

package intake

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/shared/wire"
)

func TestOrdersAreTimely(t *testing.T) {
	const now = int64(1_750_000_000_000)
	for _, tt := range []struct {
		name     string
		iat, exp int64
		code     string
	}{
		{"fresh", now, now + 30_000, ""},
		{"a minute long", now, now + 60_000, ""},
		{"longer than a minute", now, now + 60_001, "bad_time"},
		{"an hour long", now, now + 3_600_000, "bad_time"},
		{"issued within the skew", now + 30_000, now + 60_000, ""},
		{"issued in the future", now + 30_001, now + 60_000, "future"},
		{"expired within the skew", now - 60_000, now - 30_000, ""},
		{"expired", now - 60_001, now - 30_001, "expired"},
		{"expires when issued", now, now, "bad_time"},
		{"expires before it was issued", now, now - 1, "bad_time"},
		{"in seconds", now / 1000, now/1000 + 30, "bad_time"},
		{"in microseconds", now * 1000, now*1000 + 30_000, "future"},
		{"negative", -now, -now + 30_000, "bad_time"},
		{"zero", 0, 0, "bad_time"},
		{"year 9999", now, 253_402_300_799_000, "bad_time"},
		{"overflow", -1 << 63, 1<<63 - 1, "bad_time"},
		{"far future", 1<<63 - 60_000, 1<<63 - 1, "future"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := codeOf(timely(tt.iat, tt.exp, now)); got != tt.code {
				t.Errorf("got %q, want %q", got, tt.code)
			}
		})
	}
}

func codeOf(r *Refusal) string {
	if r == nil {
		return ""
	}
	return r.Code
}

func TestAddress(t *testing.T) {
	now := time.Now().UnixMilli()
	to := Audience{"r1", "inc"}
	for _, tt := range []struct {
		name, code string
		o          wire.Order
	}{
		{"ours", "", wire.Order{V: wire.Version, Runner: "r1", Incarnation: "inc"}},
		{"another version", "version", wire.Order{V: wire.Version + 1, Runner: "r1", Incarnation: "inc"}},
		{"no version", "version", wire.Order{Runner: "r1", Incarnation: "inc"}},
		{"another runner", "audience", wire.Order{V: wire.Version, Runner: "r2", Incarnation: "inc"}},
		{"another case", "audience", wire.Order{V: wire.Version, Runner: "R1", Incarnation: "inc"}},
		{"another start", "audience", wire.Order{V: wire.Version, Runner: "r1", Incarnation: "old"}},
		{"nobody", "audience", wire.Order{V: wire.Version}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.o.IssuedAt, tt.o.ExpiresAt = now, now+30_000
			if got := codeOf(address(tt.o, to, now)); got != tt.code {
				t.Errorf("got %q, want %q", got, tt.code)
			}
		})
	}
}

func TestShape(t *testing.T) {
	call := &wire.Call{ID: "call_1", Run: "run_1", Program: "bash"}
	for _, tt := range []struct {
		name string
		edit func(*wire.Order)
		ok   bool
	}{
		{"call", func(o *wire.Order) {}, true},
		{"call with a start", func(o *wire.Order) { o.Start = &wire.Start{} }, false},
		{"call with a target", func(o *wire.Order) { o.Target = "call_2" }, false},
		{"call without a call", func(o *wire.Order) { o.Call = nil }, false},
		{"no id", func(o *wire.Order) { o.JTI = "" }, false},
		{"long id", func(o *wire.Order) { o.JTI = strings.Repeat("x", 65) }, false},
		{"session as a subject", func(o *wire.Order) { o.Session = "a.b.>" }, false},
		{"session as a path", func(o *wire.Order) { o.Session = "../x" }, false},
		{"no workspace", func(o *wire.Order) { o.Workspace = "" }, false},
		{"epoch 0", func(o *wire.Order) { o.Epoch = 0 }, false},
		{"call id with a dot", func(o *wire.Order) { o.Call = &wire.Call{ID: "a.b", Run: "run_1"} }, false},
		{"no run", func(o *wire.Order) { o.Call = &wire.Call{ID: "a"} }, false},
		{"unknown kind", func(o *wire.Order) { o.Kind = "exec" }, false},
		{"status", func(o *wire.Order) { o.Kind, o.Call, o.Target = wire.OrderStatus, nil, "call_1" }, true},
		{"status of nothing", func(o *wire.Order) { o.Kind, o.Call = wire.OrderStatus, nil }, false},
		{"stop", func(o *wire.Order) { o.Kind, o.Call = wire.OrderStop, nil }, true},
		{"drain without a session", func(o *wire.Order) { *o = wire.Order{JTI: "j", Kind: wire.OrderDrain} }, true},
		{"start", func(o *wire.Order) { o.Kind, o.Call, o.Start = wire.OrderStart, nil, &wire.Start{} }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := wire.Order{JTI: "j", Kind: wire.OrderCall, Workspace: "ws", Session: "ses_1", Epoch: 1, Call: call}
			tt.edit(&o)
			if r := shape(o); (r == nil) != tt.ok || (r != nil && r.Code != "payload") {
				t.Errorf("got %v", r)
			}
		})
	}
}

var ceilings = Ceilings{MemoryMB: 2048, PIDs: 512, WallClockSeconds: 600, OutputBytes: 4 << 20}

func goodPolicy() wire.Policy {
	return wire.Policy{FSAllowlist: []string{"/workspace"}, NetworkAllowlist: []string{}, CPUShares: 1024, MemoryMB: 256, PIDsLimit: 64, WallClockSeconds: 30, OutputBytesLimit: 65536, BaseImage: "bigwave/sandbox-base:latest"}
}

func TestPoliciesOverTheCeilings(t *testing.T) {
	for _, tt := range []struct {
		name, field string
		edit        func(*wire.Policy)
	}{
		{"fine", "", func(*wire.Policy) {}},
		{"at the ceilings", "", func(p *wire.Policy) {
			p.MemoryMB, p.PIDsLimit, p.WallClockSeconds, p.OutputBytesLimit, p.CPUShares = 2048, 512, 600, 4<<20, 262144
		}},
		{"memory", "memory_mb", func(p *wire.Policy) { p.MemoryMB = 1_000_000 }},
		{"no memory", "memory_mb", func(p *wire.Policy) { p.MemoryMB = 0 }},
		{"negative memory", "memory_mb", func(p *wire.Policy) { p.MemoryMB = -1 }},
		{"pids", "pids_limit", func(p *wire.Policy) { p.PIDsLimit = 1_000_000 }},
		{"no wall clock", "wall_clock_seconds", func(p *wire.Policy) { p.WallClockSeconds = 0 }},
		{"wall clock that overflows", "wall_clock_seconds", func(p *wire.Policy) { p.WallClockSeconds = 1 << 62 }},
		{"output", "output_bytes_limit", func(p *wire.Policy) { p.OutputBytesLimit = 1 << 40 }},
		{"cpu", "cpu_shares", func(p *wire.Policy) { p.CPUShares = 1 }},
		{"many hosts", "network_allowlist", func(p *wire.Policy) { p.NetworkAllowlist = make([]string, 1001) }},
		{"many paths", "fs_allowlist", func(p *wire.Policy) { p.FSAllowlist = make([]string, 10_000) }},
		{"no workspace", "fs_allowlist", func(p *wire.Policy) { p.FSAllowlist = []string{"/data"} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := goodPolicy()
			tt.edit(&p)
			r := startCeilings(p, ceilings)
			if tt.field == "" && r != nil || tt.field != "" && (r == nil || r.Code != "ceiling" || r.Field != tt.field) {
				t.Errorf("got %+v", r)
			}
		})
	}
	for _, bad := range []string{"/", "/etc", "/etc/passwd", "/proc", "/proc/1/root", "/sys", "/dev/sda", "/root", "/var/run/docker.sock", "/run/containerd",
		"/workspace/../etc", "//etc", "/workspace\x00", "workspace", "", "~", "~/x", "/data/*", "/data/", "/data/.", strings.Repeat("/x", 3000)} {
		p := goodPolicy()
		p.FSAllowlist = append(p.FSAllowlist, bad)
		if r := startCeilings(p, ceilings); r == nil || r.Field != "fs_allowlist" {
			t.Errorf("%.40q: got %v", bad, r)
		}
	}
}

func TestCallsOverTheCeilings(t *testing.T) {
	sha := strings.Repeat("a", 64)
	for _, tt := range []struct {
		name string
		call wire.Call
		ok   bool
	}{
		{"bash", wire.Call{Program: "bash", Script: []byte("true")}, true},
		{"bash in argv", wire.Call{Program: "bash", Script: []byte("true"), InArgv: true}, true},
		{"an argument of the largest size", wire.Call{Program: "bash", Script: make1(wire.MaxArgvElement), InArgv: true}, true},
		{"one byte more", wire.Call{Program: "bash", Script: make1(wire.MaxArgvElement + 1), InArgv: true}, false},
		{"a NUL in argv", wire.Call{Program: "bash", Script: []byte("a\x00b"), InArgv: true}, false},
		{"a NUL on a descriptor", wire.Call{Program: "bash", Script: []byte("a\x00b")}, true},
		{"script too large", wire.Call{Program: "bash", Script: make1(wire.MaxInline + 1)}, false},
		{"a program of the host", wire.Call{Program: "/usr/bin/nsenter", Script: []byte("x")}, false},
		{"no program", wire.Call{}, false},
		{"a blob", wire.Call{Program: "python3", Blob: &wire.Blob{ID: "b", Size: 1, SHA256: sha}}, true},
		{"a blob and a script", wire.Call{Program: "python3", Script: []byte("x"), Blob: &wire.Blob{ID: "b", Size: 1, SHA256: sha}}, false},
		{"a blob in argv", wire.Call{Program: "python3", InArgv: true, Blob: &wire.Blob{ID: "b", Size: 1, SHA256: sha}}, false},
		{"a huge blob", wire.Call{Program: "python3", Blob: &wire.Blob{ID: "b", Size: wire.MaxBlob + 1, SHA256: sha}}, false},
		{"a blob without a hash", wire.Call{Program: "python3", Blob: &wire.Blob{ID: "b", Size: 1}}, false},
		{"a blob elsewhere", wire.Call{Program: "python3", Blob: &wire.Blob{ID: "../b", Size: 1, SHA256: sha}}, false},
		{"read", wire.Call{Program: "file_read", Path: "/workspace/a"}, true},
		{"read nothing", wire.Call{Program: "file_read"}, false},
		{"read with a NUL", wire.Call{Program: "file_read", Path: "a\x00"}, false},
		{"read with content", wire.Call{Program: "file_read", Path: "a", Script: []byte("x")}, false},
		{"write nothing to a file", wire.Call{Program: "file_write", Path: "a"}, true},
		{"bash with a path", wire.Call{Program: "bash", Path: "a"}, false},
		{"encoding", wire.Call{Program: "file_read", Path: "a", Encoding: "rot13"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if r := callCeilings(tt.call); (r == nil) != tt.ok || (r != nil && r.Code != "ceiling") {
				t.Errorf("got %v", r)
			}
		})
	}
}

func make1(n int) []byte { return []byte(strings.Repeat("x", n)) }

func order(kind wire.OrderKind, jti string, epoch int64) wire.Order {
	return wire.Order{JTI: jti, Kind: kind, Session: "ses_1", Epoch: epoch, ExpiresAt: 60_000}
}

func withCall(o wire.Order, id string) wire.Order {
	o.Call = &wire.Call{ID: id}
	return o
}

func target(o wire.Order, id string) wire.Order {
	o.Target = id
	return o
}

func TestMemoryAdmitsOnce(t *testing.T) {
	m := newMemory(100, 100)
	if !m.reserve(wire.Held{Session: "ses_1", Epoch: 3}) || m.reserve(wire.Held{Session: "ses_1", Epoch: 4}) {
		t.Fatal("a session is claimed not once")
	}
	if _, r := m.admit(order(wire.OrderStart, "j00", 2), 1000); codeOf(r) != "epoch" {
		t.Errorf("a start that was not claimed: %v", r)
	}
	if _, r := m.admit(order(wire.OrderStart, "j0", 3), 1000); r != nil {
		t.Errorf("the start: %v", r)
	}
	m.open(wire.Held{Session: "ses_1", Epoch: 3})
	m.release(wire.Held{Session: "ses_1", Epoch: 3})
	if _, r := m.admit(order(wire.OrderStart, "j01", 3), 1000); codeOf(r) != "epoch" {
		t.Errorf("a second start: %v", r)
	}
	for i, tt := range []struct {
		name  string
		o     wire.Order
		state state
		code  string
	}{
		{"first", withCall(order(wire.OrderCall, "j1", 3), "call_1"), running, ""},
		{"replayed", withCall(order(wire.OrderCall, "j1", 3), "call_1"), unknown, "duplicate"},
		{"same call, another order", withCall(order(wire.OrderCall, "j2", 3), "call_1"), running, "duplicate"},
		{"lower epoch", withCall(order(wire.OrderCall, "j3", 2), "call_2"), unknown, "epoch"},
		{"higher epoch", withCall(order(wire.OrderCall, "j4", 4), "call_2"), unknown, "epoch"},
		{"refused once, replayed", withCall(order(wire.OrderCall, "j4", 3), "call_2"), unknown, "duplicate"},
		{"status of a running call", target(order(wire.OrderStatus, "j5", 3), "call_1"), running, ""},
		{"status of an unknown call", target(order(wire.OrderStatus, "j6", 3), "call_9"), unknown, ""},
		{"that call comes late", withCall(order(wire.OrderCall, "j7", 3), "call_9"), running, "cancelled"},
		{"cancel of an unknown call", target(order(wire.OrderCancel, "j8", 3), "call_8"), unknown, ""},
		{"that one comes late too", withCall(order(wire.OrderCall, "j9", 3), "call_8"), running, "cancelled"},
		{"drain", wire.Order{JTI: "j10", Kind: wire.OrderDrain}, unknown, ""},
		{"drain again", wire.Order{JTI: "j10", Kind: wire.OrderDrain}, unknown, "duplicate"},
	} {
		s, r := m.admit(tt.o, 1000)
		if codeOf(r) != tt.code || (r == nil && s != tt.state) {
			t.Errorf("%d %s: got %q, %v", i, tt.name, s, r)
		}
	}
	m.mark(wire.Held{Session: "ses_1", Epoch: 3}, "call_1", finished)
	if s, r := m.admit(target(order(wire.OrderStatus, "j11", 3), "call_1"), 1000); s != finished || r != nil {
		t.Errorf("status of a done call: %q, %v", s, r)
	}
}

func TestMemoryKnowsEndedSessionsForAWhile(t *testing.T) {
	m := newMemory(100, 100)
	held := wire.Held{Session: "ses_1", Epoch: 1}
	m.open(held)
	if m.reserve(held) {
		t.Error("the same epoch was claimed twice")
	}
	m.admit(withCall(order(wire.OrderCall, "j1", 1), "call_1"), 0)
	m.mark(held, "call_1", finished)
	m.close(held, 0)
	if m.reserve(held) {
		t.Error("an ended epoch was claimed again")
	}
	if _, r := m.admit(withCall(order(wire.OrderCall, "j2", 1), "call_2"), 10); codeOf(r) != "unknown_session" {
		t.Errorf("a call for an ended session: %v", r)
	}
	if s, r := m.admit(target(order(wire.OrderStatus, "j3", 1), "call_1"), 10); s != finished || r != nil {
		t.Errorf("status after the end: %q, %v", s, r)
	}
	m.admit(wire.Order{JTI: "j4", Kind: wire.OrderDrain}, afterlife+1)
	if _, r := m.admit(target(order(wire.OrderStatus, "j5", 1), "call_1"), afterlife+2); codeOf(r) != "unknown_session" {
		t.Errorf("long after the end: %v", r)
	}
	if m.calls != 0 || len(m.sessions) != 0 {
		t.Errorf("%d calls of %d sessions are remembered", m.calls, len(m.sessions))
	}
	if !m.reserve(wire.Held{Session: "ses_1", Epoch: 2}) {
		t.Error("the next epoch was not claimed")
	}
}

func TestAFailedClaimLeavesTheOlderEpochAlone(t *testing.T) {
	m := newMemory(100, 100)
	m.open(wire.Held{Session: "ses_1", Epoch: 1})
	next := wire.Held{Session: "ses_1", Epoch: 2}
	if !m.reserve(next) {
		t.Fatal("the next epoch was not claimed")
	}
	m.release(next)
	if _, r := m.admit(withCall(order(wire.OrderCall, "j1", 1), "call_1"), 0); r != nil {
		t.Errorf("got %v", r)
	}
}

func TestFullMemoryRefusesAndForgetsNothingLive(t *testing.T) {
	m := newMemory(1000, 10)
	m.open(wire.Held{Session: "ses_1", Epoch: 1})
	for i := range 1000 {
		if _, r := m.admit(wire.Order{JTI: fmt.Sprint("j", i), Kind: wire.OrderDrain, ExpiresAt: 60_000}, 1000); r != nil {
			t.Fatal(r)
		}
	}
	if _, r := m.admit(wire.Order{JTI: "more", Kind: wire.OrderDrain, ExpiresAt: 60_000}, 2000); codeOf(r) != "memory_full" {
		t.Errorf("got %v", r)
	}
	for _, jti := range []string{"j0", "j500", "j999"} {
		if _, r := m.admit(wire.Order{JTI: jti, Kind: wire.OrderDrain, ExpiresAt: 60_000}, 89_000); codeOf(r) != "duplicate" {
			t.Errorf("%s: got %v", jti, r)
		}
	}
	if _, r := m.admit(wire.Order{JTI: "later", Kind: wire.OrderDrain, ExpiresAt: 160_000}, 92_000); r != nil {
		t.Errorf("after they expired: %v", r)
	}
	if len(m.orders) != 1 {
		t.Errorf("%d orders are remembered", len(m.orders))
	}
	for i := range 10 {
		m.admit(withCall(wire.Order{JTI: fmt.Sprint("c", i), Kind: wire.OrderCall, Session: "ses_1", Epoch: 1, ExpiresAt: 160_000}, fmt.Sprint("call_", i)), 92_000)
	}
	if _, r := m.admit(withCall(wire.Order{JTI: "c10", Kind: wire.OrderCall, Session: "ses_1", Epoch: 1, ExpiresAt: 160_000}, "call_10"), 92_000); codeOf(r) != "memory_full" {
		t.Errorf("one call too many: %v", r)
	}
	if _, r := m.admit(target(wire.Order{JTI: "c11", Kind: wire.OrderStatus, Session: "ses_1", Epoch: 1, ExpiresAt: 160_000}, "call_11"), 92_000); codeOf(r) != "memory_full" {
		t.Errorf("a tombstone without a place: %v", r)
	}
}

func TestAMillionOrdersAreRemembered(t *testing.T) {
	m := newMemory(maxOrders, maxCalls)
	for i := range 1_000_000 {
		if _, r := m.admit(wire.Order{JTI: fmt.Sprint(i), Kind: wire.OrderDrain, ExpiresAt: 60_000}, 1000); r != nil {
			t.Fatal(r)
		}
	}
	if _, r := m.admit(wire.Order{JTI: "0", Kind: wire.OrderDrain, ExpiresAt: 60_000}, 1000); codeOf(r) != "duplicate" {
		t.Errorf("the first, replayed: %v", r)
	}
}

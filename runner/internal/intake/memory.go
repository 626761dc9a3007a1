package intake

import (
	"crypto/sha256"
	"sync"

	"github.com/bigwave/bigwave/shared/wire"
)

// afterlife is how long the calls of an ended session are remembered, in
// milliseconds: longer than any order can live.
const afterlife = wire.MaxLifeMS + 2*wire.SkewMS + 60_000

// sweepEvery is how often expired entries are looked for, in milliseconds.
const sweepEvery = 1_000

// state is what is known of a call.
type state string

const (
	unknown   state = wire.CallUnknown // also a tombstone: it will never run
	running   state = wire.CallRunning
	finished  state = wire.CallEnded
	tombstone       = unknown
)

type key [16]byte

func keyOf(s string) key {
	sum := sha256.Sum256([]byte(s))
	return key(sum[:16])
}

// memory is what makes an order count once: the ids of orders until they
// expire, and the calls of each session for its life. It never forgets a live
// entry: when it is full it refuses.
type memory struct {
	maxOrders, maxCalls int

	mu       sync.Mutex
	orders   map[key]int64       // id → forgotten after this Unix millisecond
	sessions map[string]*history // by session: its latest epoch here
	claiming map[string]int64    // by session: the epoch that is being claimed
	calls    int                 // in all histories
	swept    int64
}

// history is what is known of one epoch of a session.
type history struct {
	epoch int64
	calls map[key]state
	until int64 // 0: live; else the Unix millisecond after which it is forgotten
}

func newMemory(orders, calls int) *memory {
	return &memory{maxOrders: orders, maxCalls: calls, orders: map[key]int64{}, sessions: map[string]*history{}, claiming: map[string]int64{}}
}

// reserve sets an epoch apart for a claim; false: that epoch or a later one is
// here, was here or is being claimed.
func (m *memory) reserve(held wire.Held) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.sessions[held.Session]; h != nil && h.epoch >= held.Epoch || m.claiming[held.Session] > 0 {
		return false
	}
	m.claiming[held.Session] = held.Epoch
	return true
}

// release ends a claim, whatever came of it.
func (m *memory) release(held wire.Held) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.claiming, held.Session)
}

// open begins the history of an epoch that became ours; an older one is
// forgotten, since no order can be for it any more.
func (m *memory) open(held wire.Held) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.sessions[held.Session]; h != nil {
		m.calls -= len(h.calls)
	}
	m.sessions[held.Session] = &history{epoch: held.Epoch, calls: map[key]state{}}
}

// close says that nothing of the epoch is left; what was is still known until
// no order for it can come.
func (m *memory) close(held wire.Held, now int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.sessions[held.Session]; h != nil && h.epoch == held.Epoch {
		h.until = now + afterlife
	}
}

// admit is the last word on an order that is genuine, ours and timely: epoch,
// then seen before. It takes the order's id, and the call's, in any case, so
// that what was refused once can't be sent again. The state is of the call
// that a cancel or status asks for.
func (m *memory) admit(o wire.Order, now int64) (state, *Refusal) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sweep(now)
	h, wrong := m.epoch(o)
	seen := m.take(o, now)
	switch {
	case wrong != nil:
		return unknown, wrong
	case seen != nil:
		return unknown, seen
	}
	switch o.Kind {
	case wire.OrderCall:
		return running, m.begin(h, o.Call.ID)
	case wire.OrderCancel, wire.OrderStatus:
		return m.look(h, o.Target)
	}
	return unknown, nil
}

func (m *memory) epoch(o wire.Order) (*history, *Refusal) {
	switch o.Kind {
	case wire.OrderDrain:
		return nil, nil
	case wire.OrderStart:
		if m.claiming[o.Session] != o.Epoch {
			return nil, refuse(wire.RefusedEpoch, "the epoch was not claimed")
		}
		return nil, nil
	}
	h := m.sessions[o.Session]
	switch {
	case h == nil:
		return nil, refuse(wire.RefusedUnknownSession, "the session is not on this runner")
	case o.Epoch != h.epoch:
		return nil, refuse(wire.RefusedEpoch, "epoch %d; this runner holds %d", o.Epoch, h.epoch)
	case h.until != 0 && o.Kind != wire.OrderCancel && o.Kind != wire.OrderStatus:
		return nil, refuse(wire.RefusedUnknownSession, "the session has ended on this runner")
	}
	return h, nil
}

// take remembers an order's id until it can't be valid any more.
func (m *memory) take(o wire.Order, now int64) *Refusal {
	k := keyOf(o.JTI)
	if _, ok := m.orders[k]; ok {
		return refuse(wire.RefusedDuplicate, "the order was seen before")
	}
	if len(m.orders) >= m.maxOrders {
		return refuse(wire.RefusedMemoryFull, "this runner can't remember more orders now")
	}
	m.orders[k] = o.ExpiresAt + wire.SkewMS
	return nil
}

func (m *memory) begin(h *history, id string) *Refusal {
	k := keyOf(id)
	switch s, ok := h.calls[k]; {
	case ok && s == tombstone:
		return refuse(wire.RefusedCancelled, "the call was cancelled or asked for before it came")
	case ok:
		return refuse(wire.RefusedDuplicate, "the call was seen before")
	case m.calls >= m.maxCalls:
		return refuse(wire.RefusedMemoryFull, "this runner can't remember more calls now")
	}
	h.calls[k] = running
	m.calls++
	return nil
}

// look leaves a tombstone for a call that never came, so that it can't come
// any more.
func (m *memory) look(h *history, id string) (state, *Refusal) {
	k := keyOf(id)
	if s, ok := h.calls[k]; ok {
		return s, nil
	}
	if m.calls >= m.maxCalls {
		return unknown, refuse(wire.RefusedMemoryFull, "this runner can't remember more calls now")
	}
	h.calls[k] = tombstone
	m.calls++
	return unknown, nil
}

// mark sets what became of a call that admit let in.
func (m *memory) mark(held wire.Held, id string, s state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.sessions[held.Session]; h != nil && h.epoch == held.Epoch {
		h.calls[keyOf(id)] = s
	}
}

// sweep forgets what can't matter any more.
func (m *memory) sweep(now int64) {
	if now-m.swept < sweepEvery {
		return
	}
	m.swept = now
	for k, until := range m.orders {
		if until < now {
			delete(m.orders, k)
		}
	}
	for id, h := range m.sessions {
		if h.until != 0 && h.until < now {
			m.calls -= len(h.calls)
			delete(m.sessions, id)
		}
	}
}

package run

import (
	"sync"
	"sync/atomic"
)

// hub wakes those in this process who wait for a run or a session. A wake is
// a hint: the truth is in the database. The zero hub is ready.
type hub struct {
	mu  sync.Mutex
	who map[string]map[*listener]struct{}
}

// listener is one who waits, for one or more ids.
type listener struct {
	c     chan struct{}
	final atomic.Bool         // a wake said that the run is final
	whole atomic.Pointer[Run] // it came with that wake; not to be changed
}

// listen waits for the ids until drop.
func (h *hub) listen(ids ...string) *listener {
	l := &listener{c: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.who == nil {
		h.who = map[string]map[*listener]struct{}{}
	}
	for _, id := range ids {
		if h.who[id] == nil {
			h.who[id] = map[*listener]struct{}{}
		}
		h.who[id][l] = struct{}{}
	}
	return l
}

func (h *hub) drop(l *listener, ids ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		delete(h.who[id], l)
		if len(h.who[id]) == 0 {
			delete(h.who, id)
		}
	}
}

// wake wakes who waits for id; final says that it is a run that is final.
func (h *hub) wake(id string, final bool) { h.tell(id, final, nil) }

// finish wakes who waits for the run whose call ended; whole is the run as the
// database now has it, if that is known.
func (h *hub) finish(e Ended, whole *Run) { h.tell(e.Run, e.RunFinal, whole) }

func (h *hub) tell(id string, final bool, whole *Run) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.who[id] {
		if whole != nil {
			l.whole.Store(whole)
		}
		if final {
			l.final.Store(true)
		}
		select {
		case l.c <- struct{}{}:
		default:
		}
	}
}

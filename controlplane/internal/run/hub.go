package run

import (
	"sync"
	"sync/atomic"

	"github.com/bigwave/bigwave/controlplane/internal/session"
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
	final atomic.Bool                     // a wake said that the run is final
	whole atomic.Pointer[Run]             // it came with that wake; not to be changed
	live  atomic.Pointer[session.Session] // a wake said that the session has its sandbox
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
func (h *hub) wake(id string, final bool) {
	h.tell(id, func(l *listener) {
		if final {
			l.final.Store(true)
		}
	})
}

// live wakes who waits for a sandbox of the session.
func (h *hub) live(c session.Session) {
	h.tell(c.ID, func(l *listener) { l.live.Store(&c) })
}

// finish wakes who waits for the run whose call ended; whole is the run as the
// database now has it, if that is known.
func (h *hub) finish(e Ended, whole *Run) {
	h.tell(e.Run, func(l *listener) {
		l.whole.Store(whole)
		if e.RunFinal {
			l.final.Store(true)
		}
	})
}

// tell leaves word with everybody who waits for id, and wakes them.
func (h *hub) tell(id string, word func(*listener)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.who[id] {
		word(l)
		select {
		case l.c <- struct{}{}:
		default:
		}
	}
}

package egress

import (
	"cmp"
	"slices"
	"strings"
	"sync"
)

// denials remembers the latest, each once.
type denials struct {
	mu   sync.Mutex
	seq  uint64
	last map[Denial]uint64 // when it was noted last
}

func (d *denials) note(one Denial) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seq++
	d.last[one] = d.seq
	if len(d.last) <= maxDenials {
		return
	}
	oldest := one
	for other, seq := range d.last {
		if seq < d.last[oldest] {
			oldest = other
		}
	}
	delete(d.last, oldest)
}

func (d *denials) mark() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seq
}

func (d *denials) since(mark uint64) []Denial {
	d.mu.Lock()
	defer d.mu.Unlock()
	var some []Denial
	for one, seq := range d.last {
		if seq > mark {
			some = append(some, one)
		}
	}
	slices.SortFunc(some, func(a, b Denial) int { return cmp.Compare(d.last[a], d.last[b]) })
	return some
}

// deny notes a refusal. What comes out of a sandbox is bounded.
func (g *Gate) deny(kind, target, reason string) {
	const longest = 300
	if len(target) > longest {
		target = strings.ToValidUTF8(target[:longest], "") + "…"
	}
	g.denials.note(Denial{Kind: kind, Target: target, Reason: reason})
}

// Mark is the moment from which Denials counts.
func (g *Gate) Mark() uint64 { return g.denials.mark() }

// Denials returns what was refused since mark, each once, at most 256.
func (g *Gate) Denials(mark uint64) []Denial {
	if g.filter != nil {
		refused, err := g.filter.denied()
		if err != nil {
			g.fence.log.Error("refused connections could not be read", "error", err)
		}
		for _, to := range refused {
			g.deny(KindConnect, g.label(to), "not in network_allowlist")
		}
	}
	return g.denials.since(mark)
}

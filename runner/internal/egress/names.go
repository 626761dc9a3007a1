package egress

import (
	"encoding/binary"
	"net/netip"
	"sync"
)

// Inside a sandbox each name has an address of its own out of these ranges,
// which are used nowhere else: what a connection was made to says which name
// was meant.
var (
	names4 = netip.MustParsePrefix("198.18.0.0/15")
	names6 = netip.MustParsePrefix("fd00::/64")
	ours   = []netip.Prefix{names4, names6}

	// What lo has, so that programs see an address of each family.
	host4 = netip.MustParsePrefix("198.18.0.1/32")
	host6 = netip.MustParsePrefix("fd00::1/128")
)

// firstName keeps off the addresses that lo has.
const firstName = 256

// names are the addresses that were given out. A name keeps its own for as
// long as the sandbox lives, so that no answer ever goes stale.
type names struct {
	max int // bounds what a wildcard can make

	mu     sync.Mutex
	number map[string]uint32
	name   []string
}

// give returns name's number; fresh says that it has just got it, and ok is
// false when there are none left.
func (n *names) give(name string) (number uint32, fresh, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if number, ok := n.number[name]; ok {
		return number, false, true
	}
	if len(n.name) >= n.max {
		return 0, false, false
	}
	number = uint32(firstName + len(n.name))
	n.number[name] = number
	n.name = append(n.name, name)
	return number, true, true
}

// of returns the name that an address stands for.
func (n *names) of(addr netip.Addr) (string, bool) {
	var number uint64
	switch {
	case names4.Contains(addr):
		b := addr.As4()
		first := names4.Addr().As4()
		number = uint64(binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(first[:]))
	case names6.Contains(addr):
		b := addr.As16()
		number = binary.BigEndian.Uint64(b[8:])
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if number < firstName || number-firstName >= uint64(len(n.name)) {
		return "", false
	}
	return n.name[number-firstName], true
}

func address4(number uint32) netip.Addr {
	b := names4.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+number)
	return netip.AddrFrom4(b)
}

func address6(number uint32) netip.Addr {
	b := names6.Addr().As16()
	binary.BigEndian.PutUint32(b[12:], number)
	return netip.AddrFrom16(b)
}

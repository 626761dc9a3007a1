package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// filter is a rule of nf_tables in the sandbox's network namespace. It is not
// what keeps packets inside, since there is no way out but through the gate's
// own listeners; it makes every other attempt fail at once, and remembers
// where it was going.
type filter struct {
	mu     sync.Mutex
	socket *netlinkSocket
}

const (
	table      = "bigwave"
	chain      = "out"
	hostsSet   = "hosts"
	deniedSet  = "denied"
	keySize    = 16 + 4 // an address as IPv6 and a port, padded
	maxDenied  = 256    // what a set remembers between two looks
	familyInet = 1      // NFPROTO_INET

	nfDrop, nfAccept = 0, 1

	regVerdict = 0
	reg        = 8 // of 16 registers with 4 bytes each, the first

	exprValue   = 1 // NFTA_DATA_VALUE
	exprVerdict = 2 // NFTA_DATA_VERDICT
	elem        = 1 // NFTA_LIST_ELEM
)

// newFilter puts the table in place. Whatever an error leaves is as open as
// no table at all.
func newFilter(socket *netlinkSocket, l *list) (*filter, error) {
	f := &filter{socket: socket}
	err := f.batch(func() {
		f.message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(a *attributes) { a.text(unix.NFTA_TABLE_NAME, table) })
		f.newSet(hostsSet, 1, 0, 0)
		f.newSet(deniedSet, 2, unix.NFT_SET_EVAL, maxDenied)
		f.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(a *attributes) {
			a.text(unix.NFTA_CHAIN_TABLE, table)
			a.text(unix.NFTA_CHAIN_NAME, chain)
			a.nest(unix.NFTA_CHAIN_HOOK, func() {
				a.number(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_LOCAL_OUT)
				a.number(unix.NFTA_HOOK_PRIORITY, 0)
			})
			a.text(unix.NFTA_CHAIN_TYPE, "filter")
			a.number(unix.NFTA_CHAIN_POLICY, nfAccept)
		})
		f.rules(l)
	})
	if err != nil {
		return nil, fmt.Errorf("set up nf_tables: %w", err)
	}
	return f, nil
}

// rules are, in order: what stays on loopback is fine, what is not TCP is
// dropped, what belongs to a connection goes on, and a new one must be listed.
func (f *filter) rules(l *list) {
	v4, v6 := byte(unix.NFPROTO_IPV4), byte(unix.NFPROTO_IPV6)
	f.rule(func(e *expressions) {
		e.family(v4)
		e.address(v4, reg, 1)
		e.equal(reg, 127)
		e.verdict(nfAccept)
	})
	f.rule(func(e *expressions) {
		loop := netip.IPv6Loopback().As16()
		e.family(v6)
		e.address(v6, reg, 16)
		e.equal(reg, loop[:]...)
		e.verdict(nfAccept)
	})
	f.rule(func(e *expressions) {
		e.meta(unix.NFT_META_L4PROTO)
		e.compare(unix.NFT_CMP_NEQ, reg, unix.IPPROTO_TCP)
		e.verdict(nfDrop)
	})
	f.rule(func(e *expressions) { // of SYN and ACK, not SYN alone
		const flags, syn, ack = 13, 2, 16
		e.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, flags, 1, reg)
		e.mask(reg, syn|ack)
		e.compare(unix.NFT_CMP_NEQ, reg, syn)
		e.verdict(nfAccept)
	})
	for _, family := range []byte{v4, v6} {
		f.rule(func(e *expressions) {
			e.destination(family)
			e.lookup(hostsSet, 1)
			e.verdict(nfAccept)
		})
	}
	for _, p := range l.prefixes {
		f.rule(func(e *expressions) { e.within(p) })
	}
	for _, family := range []byte{v4, v6} {
		f.rule(func(e *expressions) { // when the set is full, this rule ends here
			e.destination(family)
			e.add(deniedSet, 2)
		})
	}
	f.rule(func(e *expressions) {
		e.expression("reject", func() { e.number(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_TCP_RST) })
	})
}

func (f *filter) close() { f.socket.close() }

// allow lets new connections to these through.
func (f *filter) allow(hosts []netip.AddrPort) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(hosts) > 0 {
		some := hosts[:min(len(hosts), 1000)]
		hosts = hosts[len(some):]
		err := f.batch(func() {
			f.message(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, func(a *attributes) {
				a.text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
				a.text(unix.NFTA_SET_ELEM_LIST_SET, hostsSet)
				a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
					for _, h := range some {
						a.nest(elem, func() {
							a.nest(unix.NFTA_SET_ELEM_KEY, func() { a.bytes(exprValue, key(h)...) })
						})
					}
				})
			})
		})
		if err != nil {
			return fmt.Errorf("allow addresses in nf_tables: %w", err)
		}
	}
	return nil
}

func key(h netip.AddrPort) []byte {
	b := h.Addr().As16()
	return append(binary.BigEndian.AppendUint16(b[:], h.Port()), 0, 0)
}

// denied returns what was refused since the last look.
func (f *filter) denied() ([]netip.AddrPort, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.socket
	s.message(kindOf(unix.NFT_MSG_GETSETELEM), unix.NLM_F_DUMP, func(a *attributes) {
		a.raw(familyInet, 0, 0, 0)
		a.text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		a.text(unix.NFTA_SET_ELEM_LIST_SET, deniedSet)
	})
	seq := s.seq
	if err := s.flush(); err != nil {
		return nil, err
	}
	var all []netip.AddrPort
	var failed error
	for {
		done, err := s.answers(func(kind uint16, of uint32, body []byte) bool {
			switch {
			case of != seq:
			case kind == unix.NLMSG_DONE:
				return true
			case kind == unix.NLMSG_ERROR:
				failed = errors.New("the list was refused")
				return true
			case len(body) > 4:
				all = append(all, elements(body[4:])...)
			}
			return false
		})
		if err = errors.Join(err, failed); err != nil {
			return nil, fmt.Errorf("read what nf_tables refused: %w", err)
		}
		if done {
			break
		}
	}
	if len(all) == 0 {
		return nil, nil
	}
	err := f.batch(func() {
		f.message(unix.NFT_MSG_DELSETELEM, 0, func(a *attributes) {
			a.text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
			a.text(unix.NFTA_SET_ELEM_LIST_SET, deniedSet)
		})
	})
	return all, err
}

func elements(body []byte) []netip.AddrPort {
	var all []netip.AddrPort
	each(body, func(kind uint16, list []byte) {
		if kind != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		each(list, func(_ uint16, element []byte) {
			each(element, func(kind uint16, data []byte) {
				if kind != unix.NFTA_SET_ELEM_KEY {
					return
				}
				each(data, func(_ uint16, k []byte) {
					if len(k) >= 18 {
						addr := netip.AddrFrom16([16]byte(k[:16])).Unmap()
						all = append(all, netip.AddrPortFrom(addr, binary.BigEndian.Uint16(k[16:])))
					}
				})
			})
		})
	})
	return all
}

// batch sends what build puts together as one transaction.
func (f *filter) batch(build func()) error {
	s := f.socket
	frame := func(kind uint16) {
		s.message(kind, 0, func(a *attributes) { a.raw(0, 0, 0, unix.NFNL_SUBSYS_NFTABLES) })
	}
	frame(unix.NFNL_MSG_BATCH_BEGIN)
	first := s.seq
	build()
	s.wantAck()
	last := s.seq
	frame(unix.NFNL_MSG_BATCH_END)
	if err := s.flush(); err != nil {
		return err
	}
	return s.acks(first, last)
}

func kindOf(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

func (f *filter) message(kind, flags uint16, body func(*attributes)) {
	f.socket.message(kindOf(kind), flags, func(a *attributes) {
		a.raw(familyInet, 0, 0, 0)
		body(a)
	})
}

func (f *filter) newSet(name string, id, flags, size uint32) {
	f.message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(a *attributes) {
		a.text(unix.NFTA_SET_TABLE, table)
		a.text(unix.NFTA_SET_NAME, name)
		a.number(unix.NFTA_SET_FLAGS, flags)
		a.number(unix.NFTA_SET_KEY_TYPE, 0)
		a.number(unix.NFTA_SET_KEY_LEN, keySize)
		a.number(unix.NFTA_SET_ID, id)
		if size > 0 {
			a.nest(unix.NFTA_SET_DESC, func() { a.number(unix.NFTA_SET_DESC_SIZE, size) })
		}
	})
}

func (f *filter) rule(build func(*expressions)) {
	f.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(a *attributes) {
		a.text(unix.NFTA_RULE_TABLE, table)
		a.text(unix.NFTA_RULE_CHAIN, chain)
		a.nest(unix.NFTA_RULE_EXPRESSIONS, func() { build(&expressions{a}) })
	})
}

// expressions are the steps of one rule; one that does not match ends it.
type expressions struct{ *attributes }

func (e *expressions) expression(name string, body func()) {
	e.nest(elem, func() {
		e.text(unix.NFTA_EXPR_NAME, name)
		e.nest(unix.NFTA_EXPR_DATA, body)
	})
}

func (e *expressions) family(f byte) {
	e.meta(unix.NFT_META_NFPROTO)
	e.equal(reg, f)
}

func (e *expressions) meta(key uint32) {
	e.expression("meta", func() {
		e.number(unix.NFTA_META_DREG, reg)
		e.number(unix.NFTA_META_KEY, key)
	})
}

// payload loads size bytes of a header at offset.
func (e *expressions) payload(base, offset, size, to uint32) {
	e.expression("payload", func() {
		e.number(unix.NFTA_PAYLOAD_DREG, to)
		e.number(unix.NFTA_PAYLOAD_BASE, base)
		e.number(unix.NFTA_PAYLOAD_OFFSET, offset)
		e.number(unix.NFTA_PAYLOAD_LEN, size)
	})
}

// address loads the first bytes of the destination address.
func (e *expressions) address(family byte, to, size uint32) {
	offset := uint32(16)
	if family == unix.NFPROTO_IPV6 {
		offset = 24
	}
	e.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, size, to)
}

func (e *expressions) port(to uint32) {
	e.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, to)
}

// destination matches the family and loads the address and port as a set's key.
func (e *expressions) destination(family byte) {
	e.family(family)
	if family == unix.NFPROTO_IPV4 {
		e.immediate(reg, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff)
		e.address(family, reg+3, 4)
	} else {
		e.address(family, reg, 16)
	}
	e.port(reg + 4)
}

// within accepts what goes to a range's port.
func (e *expressions) within(p entry) {
	addr, bits := p.prefix.Addr().AsSlice(), p.prefix.Bits()
	family := byte(unix.NFPROTO_IPV4)
	if len(addr) == 16 {
		family = unix.NFPROTO_IPV6
	}
	e.family(family)
	if bits > 0 {
		size := (bits + 7) / 8
		mask := make([]byte, size)
		for i := range bits {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		e.address(family, reg, uint32(size))
		e.mask(reg, mask...)
		e.equal(reg, addr[:size]...)
	}
	e.port(reg)
	e.equal(reg, binary.BigEndian.AppendUint16(nil, p.port)...)
	e.verdict(nfAccept)
}

func (e *expressions) equal(from uint32, value ...byte) { e.compare(unix.NFT_CMP_EQ, from, value...) }

func (e *expressions) compare(op, from uint32, value ...byte) {
	e.expression("cmp", func() {
		e.number(unix.NFTA_CMP_SREG, from)
		e.number(unix.NFTA_CMP_OP, op)
		e.nest(unix.NFTA_CMP_DATA, func() { e.bytes(exprValue, value...) })
	})
}

func (e *expressions) mask(at uint32, mask ...byte) {
	e.expression("bitwise", func() {
		e.number(unix.NFTA_BITWISE_SREG, at)
		e.number(unix.NFTA_BITWISE_DREG, at)
		e.number(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		e.nest(unix.NFTA_BITWISE_MASK, func() { e.bytes(exprValue, mask...) })
		e.nest(unix.NFTA_BITWISE_XOR, func() { e.bytes(exprValue, make([]byte, len(mask))...) })
	})
}

func (e *expressions) immediate(to uint32, value ...byte) {
	e.expression("immediate", func() {
		e.number(unix.NFTA_IMMEDIATE_DREG, to)
		e.nest(unix.NFTA_IMMEDIATE_DATA, func() { e.bytes(exprValue, value...) })
	})
}

func (e *expressions) verdict(code uint32) {
	e.expression("immediate", func() {
		e.number(unix.NFTA_IMMEDIATE_DREG, regVerdict)
		e.nest(unix.NFTA_IMMEDIATE_DATA, func() {
			e.nest(exprVerdict, func() { e.number(unix.NFTA_VERDICT_CODE, code) })
		})
	})
}

func (e *expressions) lookup(set string, id uint32) {
	e.expression("lookup", func() {
		e.text(unix.NFTA_LOOKUP_SET, set)
		e.number(unix.NFTA_LOOKUP_SREG, reg)
		e.number(unix.NFTA_LOOKUP_SET_ID, id)
	})
}

func (e *expressions) add(set string, id uint32) {
	e.expression("dynset", func() {
		e.text(unix.NFTA_DYNSET_SET_NAME, set)
		e.number(unix.NFTA_DYNSET_SET_ID, id)
		e.number(unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_ADD)
		e.number(unix.NFTA_DYNSET_SREG_KEY, reg)
	})
}

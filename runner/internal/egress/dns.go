package egress

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"github.com/miekg/dns"
)

// The sandbox's DNS answers from the list alone: no question goes anywhere.

const (
	maxQuestion = 4096
	answerTTL   = 60 // seconds; a name keeps its address anyway
)

// serveDNS answers questions one after the other until the gate closes.
func (g *Gate) serveDNS() {
	var b [maxQuestion]byte
	for {
		n, from, err := g.dns.ReadFromUDPAddrPort(b[:])
		if g.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an asker that went away
		}
		if reply := g.reply(b[:n]); reply != nil {
			_, _ = g.dns.WriteToUDPAddrPort(reply, from)
		}
	}
}

// serveDNSStream does the same on one connection.
func (g *Gate) serveDNSStream(c net.Conn) {
	var b [maxQuestion]byte
	for {
		if err := c.SetDeadline(time.Now().Add(askTimeout)); err != nil {
			return
		}
		if _, err := io.ReadFull(c, b[:2]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(b[:]))
		if n > len(b) {
			return
		}
		if _, err := io.ReadFull(c, b[:n]); err != nil {
			return
		}
		reply := g.reply(b[:n])
		if reply == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

// reply answers one packet; nil if that was no question.
func (g *Gate) reply(packet []byte) []byte {
	var q dns.Msg
	if q.Unpack(packet) != nil || q.Response {
		return nil
	}
	b, err := g.answer(&q).Pack()
	if err != nil {
		return nil
	}
	return b
}

func (g *Gate) answer(q *dns.Msg) *dns.Msg {
	r := new(dns.Msg).SetReply(q)
	r.RecursionAvailable = true
	if opt := q.IsEdns0(); opt != nil {
		r.SetEdns0(maxQuestion, false)
	}
	switch {
	case q.Opcode != dns.OpcodeQuery:
		r.Rcode = dns.RcodeNotImplemented
		return r
	case len(q.Question) != 1 || q.Question[0].Qclass != dns.ClassINET:
		r.Rcode = dns.RcodeFormatError
		return r
	}
	question := q.Question[0]
	name := normal(question.Name)
	ports := g.list.allows(name)
	if len(ports) == 0 {
		r.Rcode = dns.RcodeNameError
		g.deny(KindDNS, name, "not in network_allowlist")
		return r
	}
	if question.Qtype != dns.TypeA && question.Qtype != dns.TypeAAAA {
		return r
	}
	number, err := g.name(name, ports)
	if err != nil {
		r.Rcode = dns.RcodeServerFailure
		g.deny(KindLimit, name, err.Error())
		return r
	}
	header := dns.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: dns.ClassINET, Ttl: answerTTL}
	switch {
	case question.Qtype == dns.TypeA:
		r.Answer = []dns.RR{&dns.A{Hdr: header, A: address4(number).AsSlice()}}
	case g.ipv6:
		r.Answer = []dns.RR{&dns.AAAA{Hdr: header, AAAA: address6(number).AsSlice()}}
	}
	return r
}

// name returns the number of a listed name, and lets a new one through.
func (g *Gate) name(name string, ports []uint16) (uint32, error) {
	g.naming.Lock()
	defer g.naming.Unlock()
	number, fresh, ok := g.names.give(name)
	if !ok {
		return 0, errors.New("too many names below wildcards")
	}
	if !fresh || g.filter == nil {
		return number, nil
	}
	if err := g.filter.allow(endpoints(number, ports)); err != nil {
		g.fence.log.Error("a name could not be let through", "error", err)
		return 0, errors.New("the name could not be let through")
	}
	return number, nil
}

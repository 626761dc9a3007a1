package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/miekg/dns"
)

// hostResolver asks as every program of this host would, but for the name
// itself only, not below the host's own domains.
func hostResolver(ctx context.Context, name string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", name+".")
}

// resolver asks one DNS server.
type resolver struct{ server string }

const (
	maxAliases = 8    // CNAMEs in a row
	dnsPayload = 1232 // bytes that pass unfragmented everywhere
)

// resolve returns the IPv4, then the IPv6 addresses of a name, at most
// maxAnswers. One family may have none, or fail.
func (r resolver) resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	type answer struct {
		addrs []netip.Addr
		err   error
	}
	six := make(chan answer, 1)
	go func() {
		addrs, err := r.follow(ctx, name, dns.TypeAAAA)
		six <- answer{addrs, err}
	}()
	addrs, err := r.follow(ctx, name, dns.TypeA)
	other := <-six
	addrs = append(addrs, other.addrs...)
	if len(addrs) == 0 {
		return nil, errors.Join(err, other.err, fmt.Errorf("%s has no address", name))
	}
	return addrs[:min(len(addrs), maxAnswers)], nil
}

// follow asks for one kind of address, and again where a chain of aliases
// leaves the answer.
func (r resolver) follow(ctx context.Context, name string, kind uint16) ([]netip.Addr, error) {
	name = dns.Fqdn(name)
	for range maxAliases {
		reply, err := r.ask(ctx, name, kind)
		if err != nil {
			return nil, err
		}
		last, addrs := chase(reply.Answer, name, kind)
		if len(addrs) > 0 || last == name {
			return addrs, nil
		}
		name = last
	}
	return nil, fmt.Errorf("%s has too many aliases", name)
}

// chase walks the aliases of name within one answer.
func chase(answer []dns.RR, name string, kind uint16) (last string, addrs []netip.Addr) {
	for range maxAliases {
		next := ""
		for _, rr := range answer {
			if dns.CanonicalName(rr.Header().Name) != dns.CanonicalName(name) {
				continue
			}
			switch rr := rr.(type) {
			case *dns.CNAME:
				next = rr.Target
			case *dns.A:
				addrs = appendAddr(addrs, rr.A, kind == dns.TypeA)
			case *dns.AAAA:
				addrs = appendAddr(addrs, rr.AAAA, kind == dns.TypeAAAA)
			}
		}
		if len(addrs) > 0 || next == "" {
			break
		}
		name = next
	}
	return name, addrs
}

func appendAddr(addrs []netip.Addr, ip net.IP, wanted bool) []netip.Addr {
	if addr, ok := netip.AddrFromSlice(ip); ok && wanted && len(addrs) < maxAnswers {
		addrs = append(addrs, addr)
	}
	return addrs
}

// ask sends one question, and again over TCP when the answer was too large.
func (r resolver) ask(ctx context.Context, name string, kind uint16) (*dns.Msg, error) {
	q := new(dns.Msg).SetQuestion(name, kind)
	q.SetEdns0(dnsPayload, false)
	reply, err := r.exchange(ctx, q, "udp")
	if err == nil && reply.Truncated {
		reply, err = r.exchange(ctx, q, "tcp")
	}
	if err != nil {
		return nil, fmt.Errorf("ask the resolver for %s: %w", name, err)
	}
	if reply.Rcode != dns.RcodeSuccess {
		return nil, fmt.Errorf("the resolver says %s for %s", dns.RcodeToString[reply.Rcode], name)
	}
	return reply, nil
}

// exchange asks twice, since a packet may get lost.
func (r resolver) exchange(ctx context.Context, q *dns.Msg, network string) (*dns.Msg, error) {
	client := dns.Client{Net: network}
	var reply *dns.Msg
	var err error
	for range 2 {
		if reply, _, err = client.ExchangeContext(ctx, q, r.server); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil && (len(reply.Question) != 1 || reply.Question[0] != q.Question[0]) {
		err = errors.New("the answer is to another question")
	}
	return reply, err
}

package egress

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// special are the ranges that are not the public internet, and what each is.
// The first that holds an address names it.
var special = []struct {
	prefix netip.Prefix
	what   string
	local  bool // of this machine, its links or its cloud: a name alone never opens it
}{
	{netip.MustParsePrefix("169.254.0.0/16"), "a link-local address, where clouds keep their metadata", true},
	{netip.MustParsePrefix("100.100.100.200/32"), "a cloud's metadata service", true},
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's metadata service", true},
	{netip.MustParsePrefix("192.0.0.192/32"), "a cloud's metadata service", true},
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this machine", true},
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address", true},
	{netip.MustParsePrefix("10.0.0.0/8"), "a private address", false},
	{netip.MustParsePrefix("172.16.0.0/12"), "a private address", false},
	{netip.MustParsePrefix("192.168.0.0/16"), "a private address", false},
	{netip.MustParsePrefix("100.64.0.0/10"), "a shared address", false},
	{netip.MustParsePrefix("192.0.0.0/24"), "a reserved address", true},
	{netip.MustParsePrefix("192.0.2.0/24"), "a reserved address", true},
	{netip.MustParsePrefix("192.88.99.0/24"), "a relay's address", true},
	{netip.MustParsePrefix("198.18.0.0/15"), "a reserved address", true},
	{netip.MustParsePrefix("198.51.100.0/24"), "a reserved address", true},
	{netip.MustParsePrefix("203.0.113.0/24"), "a reserved address", true},
	{netip.MustParsePrefix("224.0.0.0/4"), "a multicast address", true},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address", true},
	{netip.MustParsePrefix("fd00:ec2::254/128"), "a cloud's metadata service", true},
	{netip.MustParsePrefix("fd20:ce::254/128"), "a cloud's metadata service", true},
	{netip.MustParsePrefix("::1/128"), "a loopback address", true},
	{netip.MustParsePrefix("::/128"), "an address of this machine", true},
	{netip.MustParsePrefix("fc00::/7"), "a private address", false},
	{netip.MustParsePrefix("fe80::/10"), "a link-local address", true},
	{netip.MustParsePrefix("fec0::/10"), "a private address", true},
	{netip.MustParsePrefix("ff00::/8"), "a multicast address", true},
	{netip.MustParsePrefix("2001:db8::/32"), "a reserved address", true},
	{netip.MustParsePrefix("3fff::/20"), "a reserved address", true},
	{netip.MustParsePrefix("2001::/23"), "a tunnel's or reserved address", true},
	{netip.MustParsePrefix("2002::/16"), "a tunnel's address", true},
}

// nat64 is the one range of addresses for others that is reachable as such.
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// unicast is all of IPv6 that was given to anyone.
var unicast = netip.MustParsePrefix("2000::/3")

func within(prefixes []netip.Prefix, addr netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// forms are the addresses that one may come out as: itself, and the IPv4
// address that it carries if it is of a kind that carries one.
func forms(addr netip.Addr) []netip.Addr {
	if addr = addr.Unmap(); addr.Is4() {
		return []netip.Addr{addr}
	}
	b := addr.As16()
	v4 := func(at int) netip.Addr { return netip.AddrFrom4([4]byte(b[at : at+4])) }
	all := []netip.Addr{addr}
	switch {
	case nat64.Contains(addr):
		return []netip.Addr{v4(12)}
	case b[0] == 0x20 && b[1] == 0x02: // 6to4
		all = append(all, v4(2))
	case b[0] == 0x20 && b[1] == 0x01 && b[2] == 0 && b[3] == 0: // Teredo: server, and the client inverted
		c := v4(12).As4()
		all = append(all, v4(4), netip.AddrFrom4([4]byte{^c[0], ^c[1], ^c[2], ^c[3]}))
	case b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP
		all = append(all, v4(12))
	}
	return all
}

// allowed is what the operator says is fine although it is not public.
type allowed struct {
	prefixes []netip.Prefix
	names    map[string]bool
}

// ParsePrivateAllow reports what is wrong with a list of hosts, addresses and
// ranges that the operator lets sandboxes reach although they are not public.
func ParsePrivateAllow(texts []string) error {
	_, err := parseAllowed(texts)
	return err
}

func parseAllowed(texts []string) (allowed, error) {
	a := allowed{names: map[string]bool{}}
	for _, text := range texts {
		if prefix, ok := parsePrefix(strings.Trim(text, "[]")); ok {
			a.prefixes = append(a.prefixes, prefix)
		} else if name := normal(text); hostname(name) {
			a.names[name] = true
		} else {
			return allowed{}, fmt.Errorf("%q is not a host name, an address or a range", text)
		}
	}
	return a, nil
}

// refusal says what forbids an address that was reached under name (empty for
// an address entry), or nothing. own are this machine's addresses.
func (a allowed) refusal(name string, addr netip.Addr, own []netip.Addr) string {
	if addr.Zone() != "" {
		return addr.String() + " is a link-local address"
	}
	for _, form := range forms(addr) {
		if within(a.prefixes, form) {
			continue
		}
		what, local := describe(form, own)
		if what != "" && (local || !a.names[name]) {
			return addr.String() + " is " + what
		}
	}
	return ""
}

// describe says what an address is if it is not public.
func describe(addr netip.Addr, own []netip.Addr) (what string, local bool) {
	for _, s := range special {
		if s.prefix.Contains(addr) {
			what, local = s.what, s.local
			break
		}
	}
	if what == "" && addr.Is6() && !unicast.Contains(addr) {
		what, local = "a reserved address", true
	}
	for _, o := range own {
		if o == addr && !local {
			return "an address of this machine", true
		}
	}
	return what, local
}

// own are this machine's addresses, as they were lately.
type own struct {
	mu    sync.Mutex
	list  []netip.Addr
	taken time.Time
}

// ownFor is how long they are taken for granted: to list them costs as much as
// to connect.
const ownFor = 2 * time.Second

func (o *own) addresses() ([]netip.Addr, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.taken.IsZero() && time.Since(o.taken) < ownFor {
		return o.list, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list this machine's addresses: %w", err)
	}
	var list []netip.Addr
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				list = append(list, addr.Unmap())
			}
		}
	}
	o.list, o.taken = list, time.Now()
	return list, nil
}

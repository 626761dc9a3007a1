package egress

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// entry is one line of a network allowlist: exactly one of name, below and
// prefix says who may be reached.
type entry struct {
	name   string       // that host
	below  string       // every host below this domain, itself not
	prefix netip.Prefix // that address or range
	port   uint16
}

// String is the entry as a policy writes it.
func (e entry) String() string { return hostPort(e.host(), e.port) }

func (e entry) host() string {
	switch {
	case e.name != "":
		return e.name
	case e.below != "":
		return "*." + e.below
	case e.prefix.IsSingleIP():
		return e.prefix.Addr().String()
	}
	return e.prefix.String()
}

func hostPort(host string, port uint16) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(int(port))
}

// parse reads host:port, *.domain:port, ip:port, cidr:port and their forms
// with [ipv6]. Whoever made the list has normalised it; here it is read again
// since a fence trusts nobody.
func parse(text string) (entry, error) {
	host, port, err := cut(text)
	if err != nil {
		return entry{}, err
	}
	e := entry{port: port}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(host, ":") {
			return entry{}, fmt.Errorf("%q: brackets are for an IPv6 address", text)
		}
	} else if strings.Contains(host, ":") {
		return entry{}, fmt.Errorf("%q: an IPv6 address goes in brackets", text)
	}
	if prefix, ok := parsePrefix(host); ok {
		if within(ours, prefix.Addr()) && prefix.IsSingleIP() {
			return entry{}, fmt.Errorf("%q is an address that stands for a name inside sandboxes", text)
		}
		e.prefix = prefix
		return e, nil
	}
	host = normal(host)
	domain, wild := strings.CutPrefix(host, "*.")
	switch {
	case !hostname(domain):
		return entry{}, fmt.Errorf("%q: %q is not a host name, an address or a range", text, host)
	case wild && !strings.Contains(domain, "."):
		return entry{}, fmt.Errorf("%q would allow names of anyone", text)
	case wild:
		e.below = domain
	default:
		e.name = domain
	}
	return e, nil
}

func cut(text string) (string, uint16, error) {
	i := strings.LastIndexByte(text, ':')
	if i <= 0 || len(text) > 512 {
		return "", 0, fmt.Errorf("%.80q is not host:port", text)
	}
	port, err := strconv.ParseUint(text[i+1:], 10, 16)
	if err != nil || port == 0 || text[i+1] == '+' || text[i+1] == '0' {
		return "", 0, fmt.Errorf("%q: the port must be from 1 to 65535", text)
	}
	return text[:i], uint16(port), nil
}

// parsePrefix reads an address or a range. One that stands for another kind of
// address, or has bits beyond its length, is neither.
func parsePrefix(text string) (netip.Prefix, bool) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" {
			return netip.Prefix{}, false
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	addr := prefix.Addr()
	return prefix, !addr.Is4In6() && prefix == prefix.Masked()
}

// normal is a name as it is compared.
func normal(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// hostname reports whether s is a lower-case name that no resolver could take
// for an address.
func hostname(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	label := ""
	for label = range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return strings.Trim(label, "0123456789") != "" && !strings.HasPrefix(label, "0x")
}

// list is a parsed allowlist.
type list struct {
	entries  []entry
	byName   map[string][]uint16 // the ports of each name that is listed itself
	byAddr   map[netip.AddrPort]bool
	wild     []entry
	prefixes []entry
	ports    []uint16 // each once
}

func parseList(texts []string) (*list, error) {
	l := &list{byName: map[string][]uint16{}, byAddr: map[netip.AddrPort]bool{}}
	ports := map[uint16]bool{}
	for _, text := range texts {
		e, err := parse(text)
		if err != nil {
			return nil, err
		}
		l.entries = append(l.entries, e)
		if !ports[e.port] {
			ports[e.port] = true
			l.ports = append(l.ports, e.port)
		}
		switch {
		case e.name != "":
			l.byName[e.name] = append(l.byName[e.name], e.port)
		case e.below != "":
			l.wild = append(l.wild, e)
		case e.prefix.IsSingleIP():
			l.byAddr[netip.AddrPortFrom(e.prefix.Addr(), e.port)] = true
		default:
			l.prefixes = append(l.prefixes, e)
		}
	}
	return l, nil
}

// allows reports whether some entry lets name be reached, and on which ports.
func (l *list) allows(name string) []uint16 {
	ports := append([]uint16(nil), l.byName[name]...)
	for _, e := range l.wild {
		if head, ok := strings.CutSuffix(name, "."+e.below); ok && hostname(name) && head != "" {
			ports = append(ports, e.port)
		}
	}
	return ports
}

// covers returns the address or range entry that lets to be reached.
func (l *list) covers(to netip.AddrPort) (entry, bool) {
	if l.byAddr[to] {
		return entry{prefix: netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), port: to.Port()}, true
	}
	for _, e := range l.prefixes {
		if e.port == to.Port() && e.prefix.Contains(to.Addr()) {
			return e, true
		}
	}
	return entry{}, false
}

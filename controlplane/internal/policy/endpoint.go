package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/net/idna"
	"golang.org/x/net/publicsuffix"
)

// endpoint normalises host:port, *.domain:port, ip:port, cidr:port or
// [ipv6]:port.
func endpoint(entry string) (string, error) {
	if len(entry) > maxEndpoint {
		return "", fmt.Errorf("an entry of %d bytes is too long", len(entry))
	}
	for _, r := range entry {
		if r <= ' ' || r == 0x7f || unicode.Is(unicode.Cf, r) {
			return "", fmt.Errorf("%q holds a space, a control character or an invisible one", entry)
		}
	}
	host, port, err := split(entry)
	if err != nil {
		return "", err
	}
	switch {
	case strings.HasPrefix(host, "*"):
		if host, err = wildcard(host); err != nil {
			return "", err
		}
	case strings.Contains(host, "/") || strings.Contains(host, ":") || numeric(host):
		if host, err = address(host); err != nil {
			return "", err
		}
	default:
		if host, err = domain(host); err != nil {
			return "", err
		}
	}
	return host + ":" + port, nil
}

// split cuts an entry at its port.
func split(entry string) (host, port string, err error) {
	if strings.Contains(entry, "://") {
		return "", "", fmt.Errorf("%.80q is a URL; write host:port", entry)
	}
	i := strings.LastIndexByte(entry, ':')
	if i < 0 || strings.HasSuffix(entry, "]") {
		return "", "", fmt.Errorf("%q has no port; write host:port", entry)
	}
	host, port = entry[:i], entry[i+1:]
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(host, ":") {
			return "", "", fmt.Errorf("%q: brackets are for an IPv6 address", entry)
		}
	} else if strings.Contains(host, ":") {
		return "", "", fmt.Errorf("%q: an IPv6 address goes in brackets, as in [2001:db8::1]:443", entry)
	}
	if host == "" {
		return "", "", fmt.Errorf("%q has no host", entry)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '+' || port[0] == '0' {
		return "", "", fmt.Errorf("%q: the port must be from 1 to 65535", entry)
	}
	return host, port, nil
}

// numeric reports whether some resolver would take host for an IPv4 address:
// its last label is a number, decimal or hexadecimal.
func numeric(host string) bool {
	host = strings.TrimSuffix(host, ".")
	last := strings.ToLower(host[strings.LastIndexByte(host, '.')+1:])
	hex, isHex := strings.CutPrefix(last, "0x")
	if isHex {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return last != "" && strings.Trim(last, "0123456789") == ""
}

// address normalises an IP address or a CIDR range.
func address(host string) (string, error) {
	prefix, err := netip.ParsePrefix(host)
	isRange := err == nil
	if !isRange {
		addr, err := netip.ParseAddr(host)
		if err != nil || addr.Zone() != "" {
			return "", fmt.Errorf("%q is not an IP address or range", host)
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	if prefix.Addr().Is4In6() {
		return "", fmt.Errorf("%q: write the IPv4 address itself", host)
	}
	if prefix.Masked() != prefix {
		return "", fmt.Errorf("%q has bits beyond its length; write %s if that is meant", host, prefix.Masked())
	}
	for _, s := range special {
		if s.Overlaps(prefix) {
			return "", fmt.Errorf("%q reaches into %s, which is never allowed", host, s)
		}
	}
	text := prefix.Addr().String()
	if isRange && prefix.Bits() < prefix.Addr().BitLen() {
		text = prefix.String()
	}
	if prefix.Addr().Is6() {
		return "[" + text + "]", nil
	}
	return text, nil
}

// special are the ranges that no policy may reach: this host, links, groups,
// and addresses that stand for others. Private networks are not among them:
// whether those are fine is for the operator of a runner to say.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("100.100.100.200/32"), // a cloud's metadata service
	netip.MustParsePrefix("168.63.129.16/32"),   // another's
	netip.MustParsePrefix("::/127"),
	netip.MustParsePrefix("::ffff:0:0/96"),
	netip.MustParsePrefix("64:ff9b::/96"),
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("100::/64"),
	netip.MustParsePrefix("2001::/32"),
	netip.MustParsePrefix("2002::/16"),
	netip.MustParsePrefix("fd00:ec2::254/128"), // metadata again
	netip.MustParsePrefix("fd00::/64"),         // with 198.18.0.0/15, what stands for names inside sandboxes
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("fec0::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

// reserved are names that never mean a host elsewhere.
var reserved = []string{"localhost", "localdomain", "metadata.google.internal", "metadata", "instance-data"}

// domain normalises a host name to lower case ASCII without its final dot.
func domain(host string) (string, error) {
	ascii, err := profile().ToASCII(strings.TrimSuffix(host, "."))
	if err != nil || !hostname(ascii) {
		return "", fmt.Errorf("%q is not a host name; write it as in example.com:443", host)
	}
	if numeric(ascii) {
		return address(ascii)
	}
	for _, r := range reserved {
		if ascii == r || strings.HasSuffix(ascii, "."+r) {
			return "", fmt.Errorf("%q is never allowed: it means this host or its cloud", host)
		}
	}
	return ascii, nil
}

// profile is how a browser reads names: mapped, then checked.
func profile() *idna.Profile {
	return idna.New(idna.MapForLookup(), idna.BidiRule(), idna.CheckHyphens(true), idna.StrictDomainName(true), idna.VerifyDNSLength(true))
}

// hostname reports whether s is letters, digits and hyphens in labels.
func hostname(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		if strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return false
		}
	}
	return true
}

// wildcard normalises *.domain, unless the domain is one that anyone may
// register under.
func wildcard(host string) (string, error) {
	rest, ok := strings.CutPrefix(host, "*.")
	if !ok || strings.Contains(rest, "*") {
		return "", fmt.Errorf("%q: a wildcard is *.domain, for the names below one domain", host)
	}
	name, err := domain(rest)
	if err != nil {
		return "", err
	}
	if strings.Trim(name, "0123456789.:[]/") == "" {
		return "", fmt.Errorf("%q: a wildcard goes with a name", host)
	}
	if suffix, _ := publicsuffix.PublicSuffix(name); suffix == name || !strings.Contains(name, ".") {
		return "", fmt.Errorf("%q would allow names of anyone; name the domain below it", host)
	}
	return "*." + name, nil
}

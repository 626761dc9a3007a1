package egress

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestEntriesAreReadOrRefused(t *testing.T) {
	for text, want := range map[string]string{
		"ok.test:443":                         "ok.test:443",
		"OK.Test.:443":                        "ok.test:443",
		"*.ex.test:443":                       "*.ex.test:443",
		"xn--bcher-kva.test:80":               "xn--bcher-kva.test:80",
		"_srv.ok.test:1":                      "_srv.ok.test:1",
		"db:5432":                             "db:5432",
		"8.8.8.8:53":                          "8.8.8.8:53",
		"10.0.0.0/8:5432":                     "10.0.0.0/8:5432",
		"[2001:db8::1]:443":                   "[2001:db8::1]:443",
		"[2001:db8::/32]:443":                 "[2001:db8::/32]:443",
		"0.0.0.0/0:443":                       "0.0.0.0/0:443",
		"ok.test:65535":                       "ok.test:65535",
		"":                                    "",
		"*":                                   "",
		"*:443":                               "",
		"*.com:443":                           "",
		"*.*.ex.test:443":                     "",
		"a.*.test:443":                        "",
		"*ok.test:443":                        "",
		"ok.test":                             "",
		"ok.test:0":                           "",
		"ok.test:65536":                       "",
		"ok.test:+80":                         "",
		"ok.test:080":                         "",
		"ok.test:443/path":                    "",
		":443":                                "",
		"ok.test\x00.evil.test:443":           "",
		"ok.test%00:443":                      "",
		"ok.test#@evil:443":                   "",
		"user@ok.test:443":                    "",
		"ok test:443":                         "",
		"ok..test:443":                        "",
		".ok.test:443":                        "",
		"bücher.test:443":                     "",
		"127.1:443":                           "",
		"0x7f000001:443":                      "",
		"0x7f.1.0x1:443":                      "",
		"2130706433:443":                      "",
		"010.0.0.1:443":                       "",
		"1.2.3.4.5:443":                       "",
		"10.0.0.1/8:443":                      "",
		"10.0.0.0/33:443":                     "",
		"[::ffff:10.0.0.1]:443":               "",
		"[::ffff:0:0/96]:443":                 "",
		"[fe80::1%eth0]:443":                  "",
		"2001:db8::1:443":                     "",
		"[ok.test]:443":                       "",
		"198.18.1.0:443":                      "",
		"[fd00::100]:443":                     "",
		strings.Repeat("a", 64) + ".test:443": "",
	} {
		e, err := parse(text)
		if got := e.String(); err == nil && got != want || err != nil && want != "" {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
}

func TestNamesMatchExactlyOrBelowAWildcard(t *testing.T) {
	l, err := parseList([]string{"ok.test:443", "ok.test:80", "*.ex.test:8443", "*.b.ex.test:1"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]uint16{
		"ok.test": {443, 80}, "x.ok.test": nil, "xok.test": nil, "test": nil, "": nil,
		"a.ex.test": {8443}, "a.b.ex.test": {8443, 1}, "ex.test": nil, "aex.test": nil, ".ex.test": nil,
		"a..ex.test": nil, `a\000.ex.test`: nil, "a b.ex.test": nil, "_x.ex.test": {8443}, "a.ex.test.evil.test": nil,
	} {
		if got := l.allows(name); !slices.Equal(got, want) {
			t.Errorf("%q: got %v, want %v", name, got, want)
		}
	}
}

func TestRangesCoverTheirPortOnly(t *testing.T) {
	l, err := parseList([]string{"8.8.8.8:53", "10.0.0.0/8:1", "255.255.255.255:2", "[2001:db8::/32]:3", "10.1.0.0/16:4"})
	if err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]bool{
		"8.8.8.8:53": true, "8.8.8.8:54": false, "8.8.8.9:53": false, "10.255.255.255:1": true, "11.0.0.0:1": false, "10.1.2.3:4": true,
		"10.2.0.0:4": false, "255.255.255.255:2": true, "255.255.255.254:2": false, "[2001:db8:ffff::]:3": true, "[2001:db9::]:3": false,
	} {
		if _, got := l.covers(netip.MustParseAddrPort(to)); got != want {
			t.Errorf("%s: got %v", to, got)
		}
	}
}

func TestAddressesThatAreNotPublicAreRefused(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("93.184.216.1"), netip.MustParseAddr("2600::1")}
	a, err := parseAllowed(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"127.0.0.1", "127.255.255.255", "10.0.0.5", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "0.0.0.0", "0.1.2.3", "100.64.0.1",
		"100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "192.88.99.1", "224.0.0.1",
		"239.255.255.255", "240.0.0.1", "255.255.255.255", "93.184.216.1", "::", "::1", "fd00::1", "fc00::1", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1",
		"::ffff:127.0.0.1", "::ffff:10.0.0.5", "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:5", "64:ff9b:1::1", "2002:7f00:1::", "2002:5db8:d822::1",
		"2001::1", "2001:0:7f00:1::1", "2001:db8::1", "2001:10::1", "3fff::1", "100::1", "5f00::1", "4000::1", "fd00:ec2::254", "2600::1", "2606:4700::5efe:a00:1", "2606:4700::200:5efe:7f00:1",
	} {
		if a.refusal("ok.test", netip.MustParseAddr(text), own) == "" {
			t.Errorf("%s would be dialled", text)
		}
	}
	for _, text := range []string{"93.184.216.34", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1", "64:ff9b::808:808", "::ffff:8.8.8.8", "198.20.0.1", "2001:4860::8888"} {
		if why := a.refusal("ok.test", netip.MustParseAddr(text), own); why != "" {
			t.Errorf("%s: %s", text, why)
		}
	}
}

func TestTheOperatorMayAllowPrivateAddresses(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("10.9.9.9")}
	a, err := parseAllowed([]string{"db.corp", "10.1.0.0/16", "127.0.0.1", "[fd12::/16]"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, addr string
		fine       bool
	}{
		{"db.corp", "192.168.0.1", true}, {"db.corp", "fd77::1", true}, {"db.corp", "127.0.0.2", false}, {"db.corp", "169.254.169.254", false},
		{"db.corp", "10.9.9.9", false}, {"x.corp", "192.168.0.1", false}, {"x.corp", "10.1.2.3", true}, {"", "10.1.2.3", true}, {"", "10.2.2.3", false},
		{"x.corp", "127.0.0.1", true}, {"x.corp", "::ffff:127.0.0.1", true}, {"x.corp", "64:ff9b::7f00:1", true}, {"x.corp", "fd12::9", true}, {"x.corp", "2002:7f00:1::", false},
	} {
		if why := a.refusal(c.name, netip.MustParseAddr(c.addr), own); (why == "") != c.fine {
			t.Errorf("%s at %s: %q", c.name, c.addr, why)
		}
	}
	for _, text := range []string{"", "a b", "10.0.0.1/8", "*.corp", "db.corp:5432"} {
		if ParsePrivateAllow([]string{text}) == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

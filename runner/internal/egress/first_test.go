package egress

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

func TestFirst(t *testing.T) {
	n := newNetns(t)
	f, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		n := newNetns(t)
		begin := time.Now()
		g, err := f.Open([]string{"ok.test:443", "*.ex.test:443", "a.test:80", "8.8.8.8:53", "10.0.0.0/8:5432"}, n.sockets)
		fmt.Println(time.Since(begin), err)
		if err == nil {
			fmt.Println(g.Filtered(), g.ipv6)
			fmt.Println(n.dial(netip.MustParseAddrPort("9.9.9.9:443")))
			fmt.Println(n.dial(netip.MustParseAddrPort("[2001:4860::1]:44")))
			fmt.Println(n.dial(netip.MustParseAddrPort("10.2.3.4:5432")))
			begin := time.Now()
			g.Denials(0)
			fmt.Println(g.Denials(0), time.Since(begin))
			fmt.Println(g.Counters())
			begin = time.Now()
			g.Close()
			fmt.Println(time.Since(begin))
		}
	}
	_ = n
}

package egress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	gotls "crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func certificate(t testing.TB) gotls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return gotls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// BenchmarkOpen is what a list of five entries adds to a sandbox's start.
func BenchmarkOpen(b *testing.B) {
	f, err := New(Config{})
	if err != nil {
		b.Fatal(err)
	}
	list := []string{"ok.test:443", "*.ex.test:443", "a.test:80", "8.8.8.8:53", "10.0.0.0/8:5432"}
	var spent, shut []time.Duration
	for range b.N {
		n := newNetns(b)
		if _, err := n.sockets([]Socket{{2, 1, 0}}); err != nil { // it is up
			b.Fatal(err)
		}
		begin := time.Now()
		g, err := f.Open(list, n.sockets)
		if err != nil {
			b.Fatal(err)
		}
		spent = append(spent, time.Since(begin))
		begin = time.Now()
		g.Close()
		shut = append(shut, time.Since(begin))
	}
	slices.Sort(spent)
	slices.Sort(shut)
	b.ReportMetric(float64(spent[b.N/2].Microseconds()), "µs/open")
	b.ReportMetric(float64(shut[b.N/2].Microseconds()), "µs/close")
}

// BenchmarkThroughput compares a stream through a gate with one on loopback.
func BenchmarkThroughput(b *testing.B) {
	w := newWorld(b)
	w.name("ok.test", a("ok.test", public))
	chunk := make([]byte, 256<<10)
	w.serve(netip.AddrPortFrom(public, 80), func(c *net.TCPConn) {
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	p := w.open([]string{"ok.test:80"})
	through := func(b *testing.B, c net.Conn, err error) {
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		b.SetBytes(int64(len(chunk)))
		b.ResetTimer()
		buffer := make([]byte, len(chunk))
		for range b.N {
			if _, err := io.ReadFull(c, buffer); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("direct", func(b *testing.B) {
		c, err := w.dial(b.Context(), netip.AddrPortFrom(public, 80))
		through(b, c, err)
	})
	b.Run("gate", func(b *testing.B) {
		c, err := p.to("ok.test", 80)
		through(b, c, err)
	})
}

// BenchmarkFirstByte is from dialling to the first byte of an answer.
func BenchmarkFirstByte(b *testing.B) {
	w := newWorld(b)
	w.name("ok.test", a("ok.test", public))
	w.serve(netip.AddrPortFrom(public, 80), echo)
	p := w.open([]string{"ok.test:80", public.String() + ":80"})
	named := netip.AddrPortFrom(p.lookup("ok.test", dns.TypeA), 80)
	for name, dial := range map[string]func() (*net.TCPConn, error){
		"direct":  func() (*net.TCPConn, error) { return w.dial(b.Context(), netip.AddrPortFrom(public, 80)) },
		"name":    func() (*net.TCPConn, error) { return p.dial(named) },
		"address": func() (*net.TCPConn, error) { return p.dial(netip.AddrPortFrom(public, 80)) },
	} {
		b.Run(name, func(b *testing.B) {
			for range b.N {
				c, err := dial()
				if err != nil {
					b.Fatal(err)
				}
				if _, err := exchange(c, "hi"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDenials is what each call pays at its end.
func BenchmarkDenials(b *testing.B) {
	p := newWorld(b).open([]string{"ok.test:443"})
	for range b.N {
		p.gate.Denials(p.gate.Mark())
	}
}

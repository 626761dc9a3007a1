package egress

import (
	"bytes"
	"context"
	gotls "crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// public stands for a host on the internet.
var public = netip.MustParseAddr("93.184.216.34")

// world is what lies outside a sandbox: a DNS server, whose answers a test
// decides, and hosts, which really listen on loopback.
type world struct {
	t       testing.TB
	dns     string
	queries atomic.Int64

	mu      sync.Mutex
	records map[string]func(q dns.Question) []dns.RR
	hosts   map[netip.AddrPort]string // where each really is
	dialled []netip.AddrPort
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, records: map[string]func(dns.Question) []dns.RR{}, hosts: map[netip.AddrPort]string{}}
	udp, tcp := bothKinds(t)
	w.dns = udp.LocalAddr().String()
	for _, s := range []*dns.Server{{PacketConn: udp}, {Listener: tcp}} {
		up := make(chan struct{})
		s.NotifyStartedFunc = func() { close(up) }
		s.Handler = dns.HandlerFunc(w.answer)
		go func() { _ = s.ActivateAndServe() }()
		<-up
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return w
}

// bothKinds listens on one free port for UDP and TCP.
func bothKinds(t testing.TB) (net.PacketConn, net.Listener) {
	t.Helper()
	for range 20 {
		udp, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if tcp, err := net.Listen("tcp", udp.LocalAddr().String()); err == nil {
			return udp, tcp
		}
		_ = udp.Close()
	}
	t.Fatal("no port is free for both")
	return nil, nil
}

func (w *world) answer(to dns.ResponseWriter, q *dns.Msg) {
	w.queries.Add(1)
	r := new(dns.Msg).SetReply(q)
	w.mu.Lock()
	record := w.records[strings.ToLower(q.Question[0].Name)]
	w.mu.Unlock()
	if record == nil {
		r.Rcode = dns.RcodeNameError
	} else {
		r.Answer = record(q.Question[0])
	}
	if to.LocalAddr().Network() == "udp" {
		r.Truncate(512)
	}
	_ = to.WriteMsg(r)
}

// name has the world's DNS say that for a name, whatever is asked.
func (w *world) name(name string, records ...string) {
	w.dynamic(name, func() []string { return records })
}

func (w *world) dynamic(name string, records func() []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records[name+"."] = func(q dns.Question) []dns.RR {
		var all []dns.RR
		for _, text := range records() {
			rr, err := dns.NewRR(text)
			if err != nil {
				w.t.Error(err)
				continue
			}
			if rr.Header().Rrtype == q.Qtype || rr.Header().Rrtype == dns.TypeCNAME {
				all = append(all, rr)
			}
		}
		return all
	}
}

// serve puts a host at an address of the internet.
func (w *world) serve(at netip.AddrPort, handle func(*net.TCPConn)) {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = l.Close() })
	w.mu.Lock()
	w.hosts[at] = l.Addr().String()
	w.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			}()
		}
	}()
}

func (w *world) dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	w.mu.Lock()
	at := w.hosts[to]
	w.dialled = append(w.dialled, to)
	w.mu.Unlock()
	if at == "" {
		return nil, syscall.ECONNREFUSED
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", at)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (w *world) dials() []netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.dialled)
}

// place is a sandbox's network with its gate.
type place struct {
	*netns
	gate *Gate
}

func (w *world) open(list []string, change ...func(*Config)) *place {
	w.t.Helper()
	cfg := Config{Resolver: w.dns, Dial: w.dial}
	for _, c := range change {
		c(&cfg)
	}
	f, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.place(f, list)
}

func (w *world) place(f *Fence, list []string, private ...string) *place {
	w.t.Helper()
	n := newNetns(w.t)
	g, err := f.Open(list, n.sockets, private...)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(g.Close)
	return &place{n, g}
}

func noFilter(c *Config) { c.NoFilter = true }

// ask sends a question to the sandbox's DNS, over TCP if stream.
func (p *place) ask(q *dns.Msg, stream bool) (*dns.Msg, error) {
	b, err := q.Pack()
	if err != nil {
		return nil, err
	}
	reply, err := p.askRaw(b, stream)
	if err != nil {
		return nil, err
	}
	r := new(dns.Msg)
	return r, r.Unpack(reply)
}

func (p *place) askRaw(b []byte, stream bool) ([]byte, error) {
	if stream {
		c, err := p.dial(dnsAddress)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)); err != nil {
			return nil, err
		}
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return nil, err
		}
		reply := make([]byte, binary.BigEndian.Uint16(size[:]))
		_, err = io.ReadFull(c, reply)
		return reply, err
	}
	files, err := p.sockets([]Socket{{unix.AF_INET, unix.SOCK_DGRAM, 0}})
	if err != nil {
		return nil, err
	}
	defer files[0].Close()
	fd := int(files[0].Fd())
	wait := unix.NsecToTimeval((2 * time.Second).Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return nil, err
	}
	reply := make([]byte, 8192)
	n, _, err := unix.Recvfrom(fd, reply, 0)
	for err == unix.EINTR {
		n, _, err = unix.Recvfrom(fd, reply, 0)
	}
	return reply[:max(n, 0)], err
}

// lookup is a name's address inside.
func (p *place) lookup(name string, kind uint16) netip.Addr {
	p.t.Helper()
	r, err := p.ask(new(dns.Msg).SetQuestion(dns.Fqdn(name), kind), false)
	if err != nil {
		p.t.Fatal(err)
	}
	for _, rr := range r.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			return netip.AddrFrom4([4]byte(rr.A.To4()))
		case *dns.AAAA:
			return netip.AddrFrom16([16]byte(rr.AAAA))
		}
	}
	return netip.Addr{}
}

// to dials a name.
func (p *place) to(name string, port uint16) (*net.TCPConn, error) {
	addr := p.lookup(name, dns.TypeA)
	if !addr.IsValid() {
		return nil, errors.New("no such name")
	}
	return p.dial(netip.AddrPortFrom(addr, port))
}

// get sends text to a name, ends its direction and returns the whole answer.
func (p *place) get(name string, port uint16, text string) (string, error) {
	c, err := p.to(name, port)
	if err != nil {
		return "", err
	}
	return exchange(c, text)
}

func exchange(c *net.TCPConn, text string) (string, error) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	if err := c.CloseWrite(); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// echo answers "you said X" once the client has ended its direction.
func echo(c *net.TCPConn) {
	b, err := io.ReadAll(c)
	if err == nil {
		_, _ = c.Write(append([]byte("you said "), b...))
	}
}

func a(name string, addr any) string { return fmt.Sprintf("%s. 0 A %s", name, addr) }

func (p *place) mustDeny(mark uint64, want ...Denial) {
	p.t.Helper()
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		got := p.gate.Denials(mark)
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(end) {
			p.t.Errorf("denied: %v, want %v", got, want)
			return
		}
	}
}

func TestOnlyListedHostsAndPortsAreReached(t *testing.T) {
	for name, change := range map[string]func(*Config){"with nf_tables": func(*Config) {}, "without": noFilter} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.name("ok.test", a("ok.test", public))
			w.name("deep.er.ex.test", a("deep.er.ex.test", public))
			w.name("other.test", a("other.test", public))
			w.serve(netip.AddrPortFrom(public, 80), echo)
			w.serve(netip.AddrPortFrom(public, 53), echo)
			w.serve(netip.MustParseAddrPort("8.8.4.4:99"), echo)
			w.serve(netip.MustParseAddrPort("[2606:4700::5]:99"), echo)
			w.serve(netip.MustParseAddrPort("9.9.9.9:99"), echo)
			p := w.open([]string{"ok.test:80", "*.ex.test:80", "ok.test:53", "8.8.4.4:99", "9.9.0.0/16:99", "[2606:4700::/32]:99"}, change)
			filtered := p.gate.Filtered()
			if filtered != (name == "with nf_tables") {
				t.Fatalf("a filter: %v", filtered)
			}
			for _, port := range []uint16{80, 53} {
				if got, err := p.get("ok.test", port, "hi"); got != "you said hi" {
					t.Errorf("ok.test:%d: got %q, %v", port, got, err)
				}
			}
			if got, err := p.get("deep.er.ex.test", 80, "hi"); got != "you said hi" {
				t.Errorf("below a wildcard: got %q, %v", got, err)
			}
			for _, to := range []string{"8.8.4.4:99", "9.9.9.9:99", "[2606:4700::5]:99"} {
				c, err := p.dial(netip.MustParseAddrPort(to))
				if err != nil {
					t.Errorf("%s: %v", to, err)
					continue
				}
				if got, err := exchange(c, "hi"); got != "you said hi" {
					t.Errorf("%s: got %q, %v", to, got, err)
				}
			}
			six, err := p.dial(netip.AddrPortFrom(p.lookup("ok.test", dns.TypeAAAA), 80))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := exchange(six, "hi"); got != "you said hi" {
				t.Errorf("over IPv6: got %q, %v", got, err)
			}

			before, mark := len(w.dials()), p.gate.Mark()
			ok := p.lookup("ok.test", dns.TypeA)
			for _, to := range []netip.AddrPort{
				netip.AddrPortFrom(ok, 81), netip.AddrPortFrom(ok, 99), netip.AddrPortFrom(public, 80), netip.MustParseAddrPort("8.8.8.8:53"),
				netip.MustParseAddrPort("169.254.169.254:80"), netip.MustParseAddrPort("198.18.77.77:80"), netip.MustParseAddrPort("[fd00::7777]:80"),
				netip.MustParseAddrPort("198.18.0.1:80"), netip.MustParseAddrPort("8.8.4.4:80"), netip.MustParseAddrPort("[2001:4860::8888]:80"), netip.MustParseAddrPort("127.0.0.1:80"),
			} {
				begin := time.Now()
				c, err := p.dial(to)
				if err == nil { // taken to be closed again: by now, or by the first byte
					if filtered && to.Addr() != netip.MustParseAddr("127.0.0.1") {
						t.Errorf("%v was connected", to)
					}
					if got, err := exchange(c, "hi"); got != "" || err == nil {
						t.Errorf("%v: got %q, %v", to, got, err)
					}
				}
				if took := time.Since(begin); took > time.Second {
					t.Errorf("%v failed after %v", to, took)
				}
			}
			if after := w.dials(); len(after) != before {
				t.Errorf("dialled %v", after[before:])
			}
			got := p.gate.Denials(mark)
			want := []Denial{{KindConnect, "ok.test:99", "not in network_allowlist"}, {KindConnect, "8.8.4.4:80", "not in network_allowlist"}}
			if filtered {
				want = append(want, Denial{KindConnect, "ok.test:81", "not in network_allowlist"}, Denial{KindConnect, "169.254.169.254:80", "not in network_allowlist"},
					Denial{KindConnect, "[2001:4860::8888]:80", "not in network_allowlist"})
			} else {
				want = want[:1]
			}
			for _, d := range want {
				if !slices.Contains(got, d) {
					t.Errorf("%v is not among %v", d, got)
				}
			}
			if c := p.gate.Counters()["ok.test:80"]; c.Connections != 2 || c.Sent != 4 || c.Received != 22 {
				t.Errorf("counted %+v", c)
			}
		})
	}
}

func TestOnlyTCPLeaves(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	heard := make(chan struct{}, 1)
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	go func() {
		if _, _, err := udp.ReadFrom(make([]byte, 9)); err == nil {
			heard <- struct{}{}
		}
	}()
	port := udp.LocalAddr().(*net.UDPAddr).Port
	p := w.open([]string{fmt.Sprintf("ok.test:%d", port), "93.184.0.0/16:443"})
	ok := p.lookup("ok.test", dns.TypeA)
	for _, kind := range []Socket{{unix.AF_INET, unix.SOCK_DGRAM, 0}, {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP}, {unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}} {
		for _, to := range []netip.Addr{ok, public, netip.MustParseAddr("8.8.8.8")} {
			files, err := p.sockets([]Socket{kind})
			if err != nil {
				continue
			}
			if err := unix.Sendto(int(files[0].Fd()), []byte("\x08\x00\xf7\xff\x00\x00\x00\x00"), 0, &unix.SockaddrInet4{Port: port, Addr: to.As4()}); err == nil {
				t.Errorf("%v to %v was sent", kind, to)
			}
			_ = files[0].Close()
		}
	}
	select {
	case <-heard:
		t.Error("a packet has left")
	case <-time.After(50 * time.Millisecond):
	}
}

func TestDNSKnowsTheListAndNothingElse(t *testing.T) {
	w := newWorld(t)
	w.name("evil.test", a("evil.test", public))
	p := w.open([]string{"ok.test:443", "*.ex.test:80"})
	before := w.queries.Load()
	for _, c := range []struct {
		name  string
		kind  uint16
		rcode int
		many  int
	}{
		{"ok.test.", dns.TypeA, 0, 1}, {"OK.TesT.", dns.TypeA, 0, 1}, {"ok.test.", dns.TypeAAAA, 0, 1}, {"ok.test.", dns.TypeTXT, 0, 0}, {"ok.test.", dns.TypeMX, 0, 0},
		{"ok.test.", dns.TypeHTTPS, 0, 0}, {"ok.test.", dns.TypeANY, 0, 0}, {"a.ex.test.", dns.TypeA, 0, 1}, {"a.b.ex.test.", dns.TypeA, 0, 1}, {"ex.test.", dns.TypeA, dns.RcodeNameError, 0},
		{"aex.test.", dns.TypeA, dns.RcodeNameError, 0}, {"x.ok.test.", dns.TypeA, dns.RcodeNameError, 0}, {"evil.test.", dns.TypeA, dns.RcodeNameError, 0},
		{"evil.test.", dns.TypeTXT, dns.RcodeNameError, 0}, {".", dns.TypeNS, dns.RcodeNameError, 0}, {`ok.test\000.evil.test.`, dns.TypeA, dns.RcodeNameError, 0},
		{`ok\.test.`, dns.TypeA, dns.RcodeNameError, 0}, {`a\000.ex.test.`, dns.TypeA, dns.RcodeNameError, 0}, {"1.0.18.198.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, 0},
	} {
		for _, stream := range []bool{false, true} {
			q := new(dns.Msg).SetQuestion(c.name, c.kind)
			q.SetEdns0(4096, true)
			r, err := p.ask(q, stream)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			if r.Rcode != c.rcode || len(r.Answer) != c.many || r.Question[0].Name != c.name || r.IsEdns0() == nil {
				t.Errorf("%s %s: got\n%v", c.name, dns.TypeToString[c.kind], r)
			}
		}
	}
	for range 1000 {
		if p.lookup("c2VjcmV0.evil.test", dns.TypeA).IsValid() {
			t.Fatal("an unlisted name has an address")
		}
	}
	if got := w.queries.Load(); got != before {
		t.Errorf("%d questions were passed on", got-before)
	}
	if p.lookup("ok.test", dns.TypeA) == p.lookup("a.ex.test", dns.TypeA) || p.lookup("ok.test", dns.TypeA) != p.lookup("ok.test", dns.TypeA) {
		t.Error("a name has no address of its own")
	}
	for _, d := range []Denial{{KindDNS, "evil.test", "not in network_allowlist"}, {KindDNS, "c2vjcmv0.evil.test", "not in network_allowlist"}} {
		if !slices.Contains(p.gate.Denials(0), d) {
			t.Errorf("%v is not among %v", d, p.gate.Denials(0))
		}
	}
	whole, _ := new(dns.Msg).SetQuestion("ok.test.", dns.TypeA).Pack()
	for n := range whole { // cut anywhere: no answer, and none of the server's business afterwards
		_ = p.junk(whole[:n])
	}
	_ = p.junk(bytes.Repeat([]byte{0xc0}, 4000))
	_ = p.junk(make([]byte, 60000))
	if !p.lookup("ok.test", dns.TypeA).IsValid() {
		t.Error("junk ended the DNS")
	}
}

func (p *place) junk(b []byte) error {
	files, err := p.sockets([]Socket{{unix.AF_INET, unix.SOCK_DGRAM, 0}})
	if err != nil {
		return err
	}
	defer files[0].Close()
	return unix.Sendto(int(files[0].Fd()), b, 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{127, 0, 0, 1}})
}

func TestNamesBelowAWildcardAreBounded(t *testing.T) {
	w := newWorld(t)
	p := w.open([]string{"ok.test:443", "*.ex.test:80"})
	for i := range maxNames {
		if _, err := p.gate.name(fmt.Sprintf("n%d.ex.test", i), []uint16{80}); err != nil {
			t.Fatal(i, err)
		}
	}
	q := new(dns.Msg).SetQuestion("one-more.ex.test.", dns.TypeA)
	if r, err := p.ask(q, false); err != nil || r.Rcode != dns.RcodeServerFailure {
		t.Errorf("got %v, %v", r, err)
	}
	if !p.lookup("n7.ex.test", dns.TypeA).IsValid() || !p.lookup("ok.test", dns.TypeA).IsValid() {
		t.Error("the names that are there were lost")
	}
	p.mustDeny(0, Denial{KindLimit, "one-more.ex.test", "too many names below wildcards"})
}

func TestPrivateAddressesAreNotDialled(t *testing.T) {
	w := newWorld(t)
	canary := "127.0.0.1"
	p := w.open([]string{"ok.test:80", "10.0.0.0/8:80", "127.0.0.1:81"})
	for _, addr := range []string{canary, "10.0.0.5", "169.254.169.254", "0.0.0.0", "100.100.100.200", "168.63.129.16", "255.255.255.255"} {
		w.name("ok.test", a("ok.test", addr))
		if got, err := p.get("ok.test", 80, "hi"); got != "" || err == nil {
			t.Errorf("%s: got %q, %v", addr, got, err)
		}
	}
	for _, addr := range []string{"::1", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"} {
		w.name("ok.test", "ok.test. 0 AAAA "+addr)
		if got, err := p.get("ok.test", 80, "hi"); got != "" || err == nil {
			t.Errorf("%s: got %q, %v", addr, got, err)
		}
	}
	for name, records := range map[string][]string{
		"through aliases":    {"ok.test. 0 CNAME x.ok.test.", "x.ok.test. 0 CNAME y.ok.test.", a("y.ok.test", "10.0.0.1")},
		"an alias elsewhere": {"ok.test. 0 CNAME inner.test."},
		"an endless alias":   {"ok.test. 0 CNAME ok.test."},
		"nothing":            {},
		"of someone else":    {a("other.test", public)},
	} {
		w.name("inner.test", a("inner.test", "192.168.0.1"))
		w.name("ok.test", records...)
		if got, err := p.get("ok.test", 80, "hi"); got != "" || err == nil {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	for _, to := range []string{"10.1.1.1:80", "127.0.0.1:81"} {
		if c, err := p.dial(netip.MustParseAddrPort(to)); err == nil {
			if got, err := exchange(c, "hi"); got != "" || err == nil {
				t.Errorf("%s: got %q, %v", to, got, err)
			}
		}
	}
	if d := w.dials(); len(d) > 0 {
		t.Errorf("dialled %v", d)
	}
	denied := p.gate.Denials(0)
	for _, d := range []Denial{
		{KindAddress, "ok.test:80", "127.0.0.1 is a loopback address"},
		{KindAddress, "ok.test:80", "169.254.169.254 is a link-local address, where clouds keep their metadata"},
		{KindAddress, "10.1.1.1:80", "10.1.1.1 is a private address"},
	} {
		if !slices.Contains(denied, d) {
			t.Errorf("%v is not among %v", d, denied)
		}
	}
}

func TestRebindingIsSeenAtEachDial(t *testing.T) {
	w := newWorld(t)
	w.serve(netip.AddrPortFrom(public, 80), echo)
	var flip atomic.Int64
	w.dynamic("ok.test", func() []string {
		if flip.Load()%2 == 0 {
			return []string{a("ok.test", public)}
		}
		return []string{a("ok.test", "127.0.0.1")}
	})
	p := w.open([]string{"ok.test:80"})
	for i := range 20 {
		flip.Store(int64(i))
		got, err := p.get("ok.test", 80, "hi")
		if want := i%2 == 0; (got == "you said hi") != want {
			t.Errorf("try %d: got %q, %v; denied %v", i, got, err, p.gate.Denials(0))
		}
	}
	w.name("ok.test", a("ok.test", "10.0.0.1"), a("ok.test", public), a("ok.test", "127.0.0.1"))
	if got, err := p.get("ok.test", 80, "hi"); got != "you said hi" {
		t.Errorf("one of three is public: got %q, %v", got, err)
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = a("ok.test", fmt.Sprintf("10.0.%d.%d", i/250, i%250+1))
	}
	w.name("ok.test", many...)
	if got, err := p.get("ok.test", 80, "hi"); got != "" || err == nil {
		t.Errorf("a thousand private ones: got %q, %v", got, err)
	}
	for _, d := range w.dials() {
		if d.Addr() != public {
			t.Errorf("dialled %v", d)
		}
	}
}

func TestTheOperatorsPrivateHostsAreReached(t *testing.T) {
	w := newWorld(t)
	inner := netip.MustParseAddrPort("10.1.2.3:80")
	w.serve(inner, echo)
	w.name("db.corp", a("db.corp", inner.Addr()))
	for name, c := range map[string]struct {
		allow []string
		want  string
	}{"none": {nil, ""}, "the host": {[]string{"db.corp"}, "you said hi"}, "the range": {[]string{"10.1.0.0/16"}, "you said hi"}, "another": {[]string{"10.2.0.0/16", "x.corp"}, ""}} {
		p := w.open([]string{"db.corp:80"}, func(cfg *Config) { cfg.PrivateAllow = c.allow })
		if got, _ := p.get("db.corp", 80, "hi"); got != c.want {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

func TestAPrivateHostOfOneGateIsNotAnothers(t *testing.T) {
	w := newWorld(t)
	inner, local := netip.MustParseAddrPort("10.1.2.3:80"), netip.MustParseAddrPort("127.0.0.1:80")
	w.serve(inner, echo)
	w.serve(local, echo)
	w.name("index.corp", a("index.corp", inner.Addr()))
	w.name("here.corp", a("here.corp", local.Addr()))
	f, err := New(Config{Resolver: w.dns, Dial: w.dial})
	if err != nil {
		t.Fatal(err)
	}
	list := []string{"index.corp:80", "here.corp:80"}
	with, without := w.place(f, list, "index.corp", "here.corp"), w.place(f, list)
	if got, err := with.get("index.corp", 80, "hi"); got != "you said hi" {
		t.Errorf("with: got %q, %v", got, err)
	}
	if got, err := without.get("index.corp", 80, "hi"); got != "" || err == nil {
		t.Errorf("without: got %q, %v", got, err)
	}
	if got, err := with.get("here.corp", 80, "hi"); got != "" || err == nil {
		t.Errorf("a name led to this machine: got %q, %v", got, err)
	}
}

// speakTLS is a host with a certificate that nobody checks.
func speakTLS(t testing.TB) func(*net.TCPConn) {
	cert := certificate(t)
	return func(c *net.TCPConn) {
		s := gotls.Server(c, &gotls.Config{Certificates: []gotls.Certificate{cert}})
		defer s.Close()
		b := make([]byte, 64)
		if n, err := s.Read(b); err == nil {
			_, _ = fmt.Fprintf(s, "%s says you said %s", s.ConnectionState().ServerName, b[:n])
		}
	}
}

func TestTLSHelloMustNameTheHostThatWasMeant(t *testing.T) {
	w := newWorld(t)
	w.serve(netip.AddrPortFrom(public, 443), speakTLS(t))
	for _, name := range []string{"ok.test", "a.ex.test"} {
		w.name(name, a(name, public))
	}
	p := w.open([]string{"ok.test:443", "*.ex.test:443", public.String() + ":443"})
	try := func(c *net.TCPConn, err error, sni string) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		s := gotls.Client(c, &gotls.Config{ServerName: sni, InsecureSkipVerify: true})
		if _, err := io.WriteString(s, "hi"); err != nil {
			return ""
		}
		b, _ := io.ReadAll(s)
		return string(b)
	}
	for _, x := range []struct{ name, sni, want string }{
		{"ok.test", "ok.test", "ok.test says you said hi"}, {"ok.test", "OK.Test", "ok.test says you said hi"}, {"a.ex.test", "a.ex.test", "a.ex.test says you said hi"},
		{"ok.test", "evil.test", ""}, {"ok.test", "a.ex.test", ""}, {"ok.test", "x.ok.test", ""}, {"a.ex.test", "ex.test", ""}, {"ok.test", "", ""},
	} {
		c, err := p.to(x.name, 443)
		if got := try(c, err, x.sni); !strings.EqualFold(got, x.want) {
			t.Errorf("%s by the name of %q: got %q", x.name, x.sni, got)
		}
	}
	for sni, want := range map[string]string{"": " says you said hi", "any.test": "any.test says you said hi"} {
		c, err := p.dial(netip.AddrPortFrom(public, 443))
		if got := try(c, err, sni); got != want {
			t.Errorf("the address by the name of %q: got %q", sni, got)
		}
	}
	for _, d := range []Denial{{KindTLS, "ok.test:443", `the TLS hello names "evil.test"`}, {KindTLS, "ok.test:443", "the TLS hello names no server"}} {
		if !slices.Contains(p.gate.Denials(0), d) {
			t.Errorf("%v is not among %v", d, p.gate.Denials(0))
		}
	}
}

func TestHelloMayComeInPieces(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	got := make(chan []byte, 1)
	w.serve(netip.AddrPortFrom(public, 443), func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		got <- b
	})
	p := w.open([]string{"ok.test:443"})
	send := func(b []byte, size int) {
		c, err := p.to("ok.test", 443)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetNoDelay(true)
		for part := range slices.Chunk(b, size) {
			if _, err := c.Write(part); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
		_ = c.CloseWrite()
		_, _ = io.ReadAll(c)
	}
	good := inRecords(clientHello(t, &gotls.Config{ServerName: "ok.test"}), 100)
	send(good, 20)
	if b := <-got; !bytes.Equal(b, good) {
		t.Errorf("%d bytes came of %d", len(b), len(good))
	}
	bad := inRecords(clientHello(t, &gotls.Config{ServerName: "evil.test"}), 30)
	send(bad, 11)
	if b := <-got; len(b) > 0 {
		t.Errorf("%d bytes of a wrong hello came", len(b))
	}
	send(good[:len(good)-1], 100)
	if b := <-got; len(b) > 0 {
		t.Errorf("%d bytes of half a hello came", len(b))
	}
}

func TestServerMaySpeakFirstAndEachSideEndsAlone(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	w.serve(netip.AddrPortFrom(public, 22), func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "SSH-2.0-x\n")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		_, _ = c.Write(b)
		w.name("heard.test", fmt.Sprintf(`heard.test. 0 TXT "%s"`, b))
	})
	p := w.open([]string{"ok.test:22"})
	c, err := p.to("ok.test", 22)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if b, err := io.ReadAll(c); string(b) != "SSH-2.0-x\n" || err != nil {
		t.Fatalf("got %q, %v", b, err)
	}
	if _, err := io.WriteString(c, "still here"); err != nil {
		t.Fatal(err)
	}
	_ = c.CloseWrite()
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		heard := w.records["heard.test."]
		w.mu.Unlock()
		if heard != nil {
			if rr := heard(dns.Question{Qtype: dns.TypeTXT}); !strings.Contains(fmt.Sprint(rr), "still here") {
				t.Errorf("heard %v", rr)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("the client's last words did not arrive")
		}
	}
}

func TestConnectionsAreCapped(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	w.serve(netip.AddrPortFrom(public, 80), echo)
	f, err := New(Config{Resolver: w.dns, Dial: w.dial})
	if err != nil {
		t.Fatal(err)
	}
	hostile, quiet := w.place(f, []string{"ok.test:80"}), w.place(f, []string{"ok.test:80"})
	to := netip.AddrPortFrom(hostile.lookup("ok.test", dns.TypeA), 80)
	many := 50000
	if testing.Short() {
		many = 5000
	}
	most, held := 0, make(chan *net.TCPConn, 600)
	for i := range many {
		c, err := hostile.dial(to)
		if err != nil {
			continue
		}
		if len(held) == cap(held) {
			_ = (<-held).Close()
		}
		held <- c
		if i%500 == 0 {
			hostile.gate.mu.Lock()
			most = max(most, len(hostile.gate.conns))
			hostile.gate.mu.Unlock()
			if got, err := quiet.get("ok.test", 80, "hi"); got != "you said hi" {
				t.Fatalf("after %d: the other sandbox got %q, %v", i, got, err)
			}
			if open, _ := os.ReadDir("/proc/self/fd"); len(open) > 600+4*256+100 {
				t.Fatalf("after %d: %d descriptors are open", i, len(open))
			}
		}
	}
	if most == 0 || most > 256 {
		t.Errorf("%d connections at once", most)
	}
	hostile.mustDeny(0, Denial{KindLimit, "ok.test:80", "more than 256 connections at once"})
	close(held)
	for c := range held {
		_ = c.Close()
	}
	if got, err := hostile.get("ok.test", 80, "hi"); got != "you said hi" {
		for end := time.Now().Add(3 * time.Second); got != "you said hi" && time.Now().Before(end); {
			got, err = hostile.get("ok.test", 80, "hi")
		}
		if got != "you said hi" {
			t.Errorf("afterwards: got %q, %v", got, err)
		}
	}
}

func TestSilentAndEndlessConnectionsAreCut(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	w.serve(netip.AddrPortFrom(public, 80), func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	idle := w.open([]string{"ok.test:80"}, func(c *Config) { c.IdleTimeout = 200 * time.Millisecond })
	c, err := idle.to("ok.test", 80)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	begin := time.Now()
	_ = c.SetDeadline(begin.Add(5 * time.Second))
	for range 10 { // busy for longer than the limit
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatalf("cut while busy: %v", err)
		}
		time.Sleep(40 * time.Millisecond)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || time.Since(begin) > 3*time.Second {
		t.Errorf("got %v after %v", err, time.Since(begin))
	}
	bounded := w.open([]string{"ok.test:80"}, func(c *Config) { c.MaxBytes = 1 << 20 })
	c, err = bounded.to("ok.test", 80)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	go func() { _, _ = io.Copy(c, bytes.NewReader(make([]byte, 4<<20))) }()
	// The writer may have been told of the reset, and the reader of an end.
	if n, err := io.Copy(io.Discard, c); n > 1<<20 {
		t.Errorf("%d bytes came back, %v", n, err)
	}
	bounded.mustDeny(0, Denial{KindLimit, "ok.test:80", "more than 1048576 bytes"})
}

func TestHostsThatDoNotAnswer(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public), a("ok.test", "93.184.216.35"))
	w.serve(netip.MustParseAddrPort("93.184.216.35:80"), echo)
	p := w.open([]string{"ok.test:80"}, func(c *Config) {
		c.DialTimeout = 400 * time.Millisecond
		c.Dial = func(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
			if to.Addr() == public || to.Port() == 81 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return w.dial(ctx, to)
		}
	})
	if got, err := p.get("ok.test", 80, "hi"); got != "you said hi" {
		t.Errorf("the second address: got %q, %v", got, err)
	}
	w.name("ok.test", a("ok.test", public))
	begin := time.Now()
	if got, err := p.get("ok.test", 80, "hi"); got != "" || err == nil || time.Since(begin) > 3*time.Second {
		t.Errorf("got %q, %v after %v", got, err, time.Since(begin))
	}
}

func TestDenialsAreEachNotedOnceAndBounded(t *testing.T) {
	d := denials{last: map[Denial]uint64{}}
	first := Denial{KindDNS, "a", "r"}
	d.note(first)
	mark := d.mark()
	if got := d.since(mark); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	d.note(first)
	d.note(first)
	if got := d.since(mark); !slices.Equal(got, []Denial{first}) {
		t.Errorf("got %v", got)
	}
	for i := range 1000 {
		d.note(Denial{KindDNS, fmt.Sprint(i), "r"})
	}
	if got := d.since(mark); len(got) != maxDenials || got[len(got)-1].Target != "999" {
		t.Errorf("%d are kept, the last %v", len(got), got[len(got)-1])
	}
}

func TestOpenFailsClosed(t *testing.T) {
	f, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	n := newNetns(t)
	before := openFiles(t)
	leaks := goleak.IgnoreCurrent()
	broken := errors.New("no sockets today")
	for name, sockets := range map[string]Sockets{
		"no sockets": func([]Socket) ([]*os.File, error) { return nil, broken },
		"too few":    func(w []Socket) ([]*os.File, error) { return n.sockets(w[:1]) },
		"other ones": func(w []Socket) ([]*os.File, error) {
			return n.sockets(slices.Repeat([]Socket{{unix.AF_UNIX, unix.SOCK_STREAM, 0}}, len(w)))
		},
		"some and why": func(w []Socket) ([]*os.File, error) { files, _ := n.sockets(w[:2]); return files, broken },
		"not netlink": func(w []Socket) ([]*os.File, error) {
			w = slices.Clone(w)
			w[0] = Socket{unix.AF_INET, unix.SOCK_DGRAM, 0}
			return n.sockets(w)
		},
	} {
		if g, err := f.Open([]string{"ok.test:443", "a.test:80"}, sockets); err == nil {
			t.Errorf("%s: it is open", name)
			g.Close()
		}
	}
	for _, list := range [][]string{nil, {""}, {"*:443"}, {"ok.test:443", "x"}} {
		g, err := f.Open(list, n.sockets)
		if err == nil {
			t.Errorf("%q: it is open", list)
			g.Close()
		}
		if _, ok := errors.AsType[*EntryError](err); ok != (len(list) > 0) {
			t.Errorf("%q: got %v", list, err)
		}
	}
	goleak.VerifyNone(t, leaks)
	if after := openFiles(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if _, err := New(Config{Resolver: "nonsense"}); err == nil {
		t.Error("a resolver without a port is taken")
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestCloseLeavesNothing(t *testing.T) {
	w := newWorld(t)
	w.name("ok.test", a("ok.test", public))
	w.serve(netip.AddrPortFrom(public, 80), func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	f, err := New(Config{Resolver: w.dns, Dial: w.dial})
	if err != nil {
		t.Fatal(err)
	}
	n := newNetns(t)
	time.Sleep(50 * time.Millisecond)
	leaks := goleak.IgnoreCurrent()
	before := openFiles(t)
	for range 20 {
		g, err := f.Open([]string{"ok.test:80", "*.ex.test:443", "8.8.8.0/24:53"}, n.sockets)
		if err != nil {
			t.Fatal(err)
		}
		p := &place{n, g}
		var conns []*net.TCPConn
		for range 10 {
			c, err := p.to("ok.test", 80)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
		begin := time.Now()
		g.Close()
		g.Close()
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("closing took %v", took)
		}
		for _, c := range conns {
			_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("a connection outlived the gate: %v", err)
			}
			_ = c.Close()
		}
		if f.total.Load() != 0 {
			t.Errorf("%d connections are still counted", f.total.Load())
		}
		// A second gate in one namespace finds the filter of the first; a sandbox has one.
		n = newNetns(t)
		before++
	}
	time.Sleep(100 * time.Millisecond) // the hosts' ends
	goleak.VerifyNone(t, leaks, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"))
	if after := openFiles(t); after > before+45 { // a socket pair and a pidfd of each namespace
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this is an ordinary user")
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "bigwave-egress-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "egress.test")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(program, self, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.short", "-test.v")
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=" + os.TempDir()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Gate is the way out of one sandbox. Its methods may be called from several
// goroutines; Close ends every connection and may be called twice.
type Gate struct {
	fence  *Fence
	list   *list
	also   allowed // besides the fence's, for this gate alone
	names  names
	naming sync.Mutex // held from giving a name its address to letting it through
	ipv6   bool
	filter *filter // nil where nf_tables does not work

	ctx       context.Context
	cancel    context.CancelFunc
	dns       *net.UDPConn
	listeners []*net.TCPListener
	working   sync.WaitGroup
	bytes     atomic.Int64

	mu       sync.Mutex
	closed   bool
	conns    map[*net.TCPConn]bool
	counters map[string]*counter

	denials denials
}

// Open makes the gate of a sandbox that may reach what texts say, which must
// not be empty, and of that also what the operator allows for this sandbox
// alone although it is not public, as Config.PrivateAllow does for all of them.
// Programs of the sandbox must not run yet. An *EntryError says
// that the list is at fault. After any error nothing is left and the sandbox
// reaches nothing.
func (f *Fence) Open(texts []string, sockets Sockets, private ...string) (*Gate, error) {
	l, err := parseList(texts)
	if err != nil {
		return nil, &EntryError{err}
	}
	also, err := parseAllowed(private)
	if err != nil {
		return nil, fmt.Errorf("private addresses to allow: %w", err)
	}
	if len(l.entries) == 0 {
		return nil, errors.New("an empty list needs no gate")
	}
	g := &Gate{
		fence:    f,
		list:     l,
		also:     also,
		names:    names{max: len(l.byName) + maxNames, number: map[string]uint32{}},
		conns:    map[*net.TCPConn]bool{},
		counters: map[string]*counter{},
		denials:  denials{last: map[Denial]uint64{}},
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	if err := g.open(sockets); err != nil {
		g.Close()
		return nil, err
	}
	g.working.Go(g.serveDNS)
	for _, l := range g.listeners {
		g.working.Go(func() { g.accept(l) })
	}
	return g, nil
}

func (g *Gate) open(sockets Sockets) error {
	ports := make([]uint16, 0, len(g.list.ports)+1)
	for _, p := range g.list.ports {
		if p != dnsPort {
			ports = append(ports, p)
		}
	}
	want := []Socket{
		{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE},
		{unix.AF_INET, unix.SOCK_DGRAM, 0},
		{unix.AF_INET, unix.SOCK_STREAM, 0}, // 127.0.0.1:53, or *:53 when that is listed
	}
	family := ipFamily()
	for range ports {
		want = append(want, Socket{family, unix.SOCK_STREAM, 0})
	}
	files, err := ask(sockets, want, !g.fence.cfg.NoFilter)
	defer closeAll(files)
	if err != nil {
		return fmt.Errorf("make sockets in the sandbox: %w", err)
	}
	if len(files) > len(want) {
		g.openFilter(files[len(want)])
	}
	if err := g.openLink(files[0]); err != nil {
		return err
	}
	if err := g.openDNS(files[1], files[2]); err != nil {
		return err
	}
	for i, p := range ports {
		if err := g.listen(files[3+i], family, nil, p); err != nil {
			return err
		}
	}
	return g.nameAll()
}

// ipFamily is that of a listener for both kinds of addresses.
func ipFamily() int {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return unix.AF_INET
	}
	_ = unix.Close(fd)
	return unix.AF_INET6
}

// ask returns the sockets that are wanted and, if filter is set and the kernel
// has nf_tables, one for that after them.
func ask(sockets Sockets, want []Socket, filter bool) ([]*os.File, error) {
	if filter {
		more := append(want[:len(want):len(want)], Socket{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER})
		files, err := sockets(more)
		if err == nil && len(files) == len(more) {
			return files, nil
		}
		closeAll(files)
	}
	files, err := sockets(want)
	if err == nil && len(files) != len(want) {
		err = fmt.Errorf("got %d, not %d", len(files), len(want))
	}
	return files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// openFilter goes without one where nf_tables does not do what it should.
func (g *Gate) openFilter(f *os.File) {
	socket, err := openNetlink(f)
	if err == nil {
		if g.filter, err = newFilter(socket, g.list); err == nil {
			return
		}
		socket.close()
	}
	g.fence.log.Debug("no nf_tables in a sandbox", "error", err)
}

// openLink makes addresses local. With a filter that is every address, so that
// the filter sees each attempt; else only those that are listed.
func (g *Gate) openLink(f *os.File) error {
	link, err := openNetlink(f)
	if err != nil {
		return err
	}
	defer link.close()
	local := ours
	if g.filter != nil {
		local = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	} else {
		for _, e := range g.list.entries {
			if e.prefix.IsValid() {
				local = append(local[:len(local):len(local)], e.prefix)
			}
		}
	}
	g.ipv6, err = link.setUp(local)
	return err
}

const dnsPort = 53

var dnsAddress = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dnsPort)

func (g *Gate) openDNS(udp, tcp *os.File) error {
	local := &unix.SockaddrInet4{Port: dnsPort, Addr: dnsAddress.Addr().As4()}
	if err := unix.Bind(int(udp.Fd()), local); err != nil {
		return fmt.Errorf("open the sandbox's DNS: %w", err)
	}
	conn, err := net.FilePacketConn(udp)
	if err != nil {
		return fmt.Errorf("open the sandbox's DNS: %w", err)
	}
	g.dns = conn.(*net.UDPConn)
	addr := dnsAddress.Addr().AsSlice()
	for _, p := range g.list.ports {
		if p == dnsPort {
			addr = nil // a host's port 53 is listed: one listener for both
		}
	}
	return g.listen(tcp, unix.AF_INET, addr, dnsPort)
}

// listen makes f the listener of a port, of every address if addr is nil.
func (g *Gate) listen(f *os.File, family int, addr []byte, port uint16) error {
	fd := int(f.Fd())
	var local unix.Sockaddr = &unix.SockaddrInet6{Port: int(port)}
	if family == unix.AF_INET {
		in := &unix.SockaddrInet4{Port: int(port)}
		copy(in.Addr[:], addr)
		local = in
	} else if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
		return fmt.Errorf("listen on port %d in the sandbox: %w", port, err)
	}
	if err := errors.Join(unix.Bind(fd, local), unix.Listen(fd, 512)); err != nil {
		return fmt.Errorf("listen on port %d in the sandbox: %w", port, err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return fmt.Errorf("listen on port %d in the sandbox: %w", port, err)
	}
	g.listeners = append(g.listeners, l.(*net.TCPListener))
	return nil
}

// nameAll gives every listed name its address and tells the filter.
func (g *Gate) nameAll() error {
	var hosts []netip.AddrPort
	for name := range g.list.byName {
		number, _, _ := g.names.give(name)
		hosts = append(hosts, endpoints(number, g.list.allows(name))...)
	}
	for host := range g.list.byAddr {
		hosts = append(hosts, host)
	}
	if g.filter == nil {
		return nil
	}
	return g.filter.allow(hosts)
}

func endpoints(number uint32, ports []uint16) []netip.AddrPort {
	var all []netip.AddrPort
	for _, p := range ports {
		all = append(all, netip.AddrPortFrom(address4(number), p), netip.AddrPortFrom(address6(number), p))
	}
	return all
}

// Filtered reports whether nf_tables refuses, and remembers, what is not listed.
func (g *Gate) Filtered() bool { return g.filter != nil }

// Close ends every connection and returns when nothing of the gate is left.
func (g *Gate) Close() {
	g.mu.Lock()
	first := !g.closed
	g.closed = true
	for c := range g.conns {
		reset(c)
	}
	g.mu.Unlock()
	g.cancel()
	if first {
		if g.dns != nil {
			_ = g.dns.Close()
		}
		for _, l := range g.listeners {
			_ = l.Close()
		}
	}
	g.working.Wait()
	if first && g.filter != nil {
		g.filter.close()
	}
}

// reset closes a connection so that its other end sees an error.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// accept takes connections until the gate closes.
func (g *Gate) accept(l *net.TCPListener) {
	for {
		c, err := l.AcceptTCP()
		switch {
		case err == nil:
			g.admit(c)
		case g.ctx.Err() != nil, errors.Is(err, net.ErrClosed):
			return
		default: // out of descriptors, for one: what waits is taken later
			select {
			case <-time.After(20 * time.Millisecond):
			case <-g.ctx.Done():
				return
			}
		}
	}
}

// target is what a connection is meant for.
type target struct {
	name    string     // empty: addr says it
	addr    netip.Addr // of an address or range entry
	port    uint16
	counter *counter
}

func (t target) String() string {
	if t.name != "" {
		return hostPort(t.name, t.port)
	}
	return hostPort(t.addr.String(), t.port)
}

// admit finds out what a connection is meant for, and serves or refuses it.
func (g *Gate) admit(c *net.TCPConn) {
	local := c.LocalAddr().(*net.TCPAddr).AddrPort()
	local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
	if why := g.keep(c); why != "" {
		reset(c)
		g.deny(KindLimit, g.label(local), why)
		return
	}
	if local == dnsAddress {
		g.working.Go(func() {
			defer g.drop(c)
			g.serveDNSStream(c)
		})
		return
	}
	t, listed := g.target(local)
	if !listed {
		g.drop(c)
		g.deny(KindConnect, g.label(local), "not in network_allowlist")
		return
	}
	g.working.Go(func() {
		defer g.drop(c)
		if why, ok := errors.AsType[*refusal](g.serve(c, t)); ok {
			t.counter.refusals.Add(1)
			g.deny(why.kind, t.String(), why.reason)
		}
	})
}

// target reports what an address inside the sandbox stands for, if that is listed.
func (g *Gate) target(local netip.AddrPort) (target, bool) {
	if name, ok := g.names.of(local.Addr()); ok {
		t := target{name: name, port: local.Port()}
		for _, port := range g.list.allows(name) {
			if port == t.port {
				t.counter = g.counter(t.String())
				return t, true
			}
		}
		return t, false
	}
	e, ok := g.list.covers(local)
	if !ok {
		return target{}, false
	}
	// By entry: a range has more addresses than there is room to count.
	return target{addr: local.Addr(), port: local.Port(), counter: g.counter(e.String())}, true
}

// label is an address as people know it.
func (g *Gate) label(local netip.AddrPort) string {
	if name, ok := g.names.of(local.Addr()); ok {
		return hostPort(name, local.Port())
	}
	return hostPort(local.Addr().String(), local.Port())
}

// keep counts a connection in, or says why there is no room for it.
func (g *Gate) keep(c *net.TCPConn) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return "the sandbox is being closed"
	case len(g.conns) >= g.fence.cfg.Connections:
		return fmt.Sprintf("more than %d connections at once", g.fence.cfg.Connections)
	case g.fence.total.Add(1) > g.fence.maxTotal:
		g.fence.total.Add(-1)
		return "too many connections of all sandboxes at once"
	}
	g.conns[c] = true
	return ""
}

// drop closes a connection, if that was not done already, and counts it out.
func (g *Gate) drop(c *net.TCPConn) {
	reset(c)
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.conns, c)
	g.fence.total.Add(-1)
}

// counter holds a Counter's numbers.
type counter struct{ connections, refusals, sent, received atomic.Int64 }

func (g *Gate) counter(label string) *counter {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.counters[label]
	if c == nil {
		c = &counter{}
		g.counters[label] = c
	}
	return c
}

// Counters are what went through so far, by host:port; the addresses of a
// range count together.
func (g *Gate) Counters() map[string]Counter {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make(map[string]Counter, len(g.counters))
	for label, c := range g.counters {
		all[label] = Counter{
			Connections: c.connections.Load(),
			Refusals:    c.refusals.Load(),
			Sent:        c.sent.Load(),
			Received:    c.received.Load(),
		}
	}
	return all
}

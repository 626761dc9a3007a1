// Package egress lets a sandbox reach the hosts it may reach and no other.
//
// A sandbox's network namespace has nothing but lo, so no packet can leave it.
// A Gate holds sockets that were made inside: a DNS server that knows only the
// listed names and gives each an address of its own, and a TCP listener for
// each listed port. The address that a connection was made to says which host
// was meant; the gate then resolves and dials that host from outside, checks
// every address before it is used, and passes bytes.
//
// Where a client of a named host opens with TLS, the server name in its hello
// must be that host, or one server of many names would lead to all of them. A
// hello that hides its true name (ECH) is refused for the same reason. What
// comes later in a connection, or in clear text, is not looked at.
package egress

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Config is what the operator decides. The zero value is ready.
type Config struct {
	// Resolver is the DNS server that listed names are asked of, host:port;
	// the host's own ways of resolving if empty.
	Resolver string
	// PrivateAllow names hosts, addresses and ranges that may be reached although
	// they are not public. A host opens private networks only: addresses of this
	// machine and of its cloud must be named themselves.
	PrivateAllow []string

	Connections int           // at once for each sandbox, 256 if 0
	DialTimeout time.Duration // to resolve and connect, 10 s if 0
	IdleTimeout time.Duration // after which a silent connection is cut, 5 min if 0
	MaxBytes    int64         // both ways for the life of a sandbox, 0: no limit

	// Dial connects to an address that was found to be fine; the plain way if nil.
	Dial func(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error)
	// NoFilter does without nf_tables, as on a host that has none.
	NoFilter bool

	Log *slog.Logger // slog.Default() if nil
}

const (
	maxNames     = 4096             // that have an address in one sandbox
	maxDenials   = 256              // that one sandbox remembers
	maxAnswers   = 16               // addresses of a name that are looked at
	helloTimeout = 10 * time.Second // from a TLS hello's first byte to its last
	askTimeout   = 5 * time.Second  // for the next question on a DNS connection
)

// Fence opens gates. Its methods may be called from several goroutines.
type Fence struct {
	cfg     Config
	log     *slog.Logger
	allowed allowed
	own     own
	resolve func(ctx context.Context, name string) ([]netip.Addr, error)

	total    atomic.Int64 // connections of all gates
	maxTotal int64
}

// New checks cfg.
func New(cfg Config) (*Fence, error) {
	cfg.Connections = cmp.Or(cfg.Connections, 256)
	cfg.DialTimeout = cmp.Or(cfg.DialTimeout, 10*time.Second)
	cfg.IdleTimeout = cmp.Or(cfg.IdleTimeout, 5*time.Minute)
	if cfg.Dial == nil {
		cfg.Dial = dial
	}
	f := &Fence{cfg: cfg, log: cmp.Or(cfg.Log, slog.Default()), maxTotal: descriptors() / 8, resolve: hostResolver}
	var err error
	if f.allowed, err = parseAllowed(cfg.PrivateAllow); err != nil {
		return nil, fmt.Errorf("private addresses to allow: %w", err)
	}
	if cfg.Resolver != "" {
		if _, _, err := net.SplitHostPort(cfg.Resolver); err != nil {
			return nil, fmt.Errorf("resolver: %w", err)
		}
		f.resolve = resolver{server: cfg.Resolver}.resolve
	}
	return f, nil
}

// descriptors is how many files this process may have open. A connection takes
// two, and up to six when it is busy; other sandboxes must get theirs.
func descriptors() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 1024
	}
	return int64(min(limit.Cur, 1<<20))
}

func dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	return new(net.Dialer).DialTCP(ctx, "tcp", netip.AddrPort{}, to)
}

// Socket says what a socket is made with.
type Socket struct{ Family, Type, Protocol int }

// Sockets makes sockets in a sandbox's network namespace and hands them out,
// in order. Whoever calls closes them.
type Sockets func([]Socket) ([]*os.File, error)

// EntryError says which entry of a list can't be enforced.
type EntryError struct{ cause error }

// Error says what is wrong with the entry.
func (e *EntryError) Error() string { return e.cause.Error() }

// Denial is something that a gate refused.
type Denial struct {
	Kind   string // dns, connect, address, tls, limit
	Target string // host:port; a name alone for dns
	Reason string
}

// The kinds of denials.
const (
	KindDNS     = "dns"     // a name that is not listed was asked for
	KindConnect = "connect" // a connection to what is not listed
	KindAddress = "address" // a listed host with an address that nobody may reach
	KindTLS     = "tls"     // a hello that names another host, or none
	KindLimit   = "limit"   // too many connections, names or bytes
)

// Counter is what went through to one host and port.
type Counter struct {
	Connections int64 // that reached the host
	Refusals    int64
	Sent        int64 // bytes out of the sandbox
	Received    int64 // bytes into it
}

package sandboxtest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
)

// Egress is how a backend under test must reach the hosts of a policy.
type Egress struct {
	Resolver     string   // the DNS server that it asks, host:port
	PrivateAllow []string // addresses that are fine although they are not public
}

// outside is what lies beyond the sandboxes: real servers on loopback. The good
// host has an address that the operator allows; the canary's port is the same,
// on an address that nobody may reach.
type outside struct {
	t         testing.TB
	port      int // of both
	tlsPort   int // of the good host
	questions atomic.Int64
	canary    atomic.Int64 // connections and packets
	dns       net.PacketConn
}

const goodHost, canaryHost = "127.0.0.2", "127.0.0.1"

// RunEgress holds a backend against what a network_allowlist promises. make is
// called once; the backend must be fresh, and RunEgress closes it.
func RunEgress(t *testing.T, make func(t *testing.T, e Egress) sandbox.Backend) {
	o := newOutside(t)
	leaks := goleak.IgnoreCurrent()
	b := make(t, Egress{Resolver: o.dns.LocalAddr().String(), PrivateAllow: []string{goodHost}})
	if err := b.Sweep(t.Context()); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	for _, group := range []struct {
		name string
		run  func(t *testing.T, b sandbox.Backend, o *outside)
	}{
		{"an empty list is nothing", testNoEgress},
		{"what is listed", testListed},
		{"TLS names", testTLSNames},
		{"every address is checked", testAddresses},
		{"many connections", testManyConnections},
		{"what can't be enforced", testUnenforceable},
		{"nothing is left", testNothingLeft},
	} {
		t.Run(group.name, func(t *testing.T) { group.run(t, b, o) })
	}
	if err := b.Close(context.Background()); err != nil {
		t.Errorf("Close: %v", err)
	}
	goleak.VerifyNone(t, leaks)
}

func newOutside(t *testing.T) *outside {
	t.Helper()
	o := &outside{t: t}
	good, canary, packets := o.samePort()
	o.port = good.Addr().(*net.TCPAddr).Port
	secure := o.listen(goodHost + ":0")
	o.tlsPort = secure.Addr().(*net.TCPAddr).Port
	cert := selfSigned(t)
	go o.serve(good, func(c net.Conn) {
		b, err := io.ReadAll(c)
		if err == nil {
			_, _ = fmt.Fprintf(c, "good got %s", b)
		}
	})
	go o.serve(canary, func(net.Conn) { o.canary.Add(1) })
	go o.serve(secure, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})
		if s.Handshake() == nil {
			_, _ = fmt.Fprintf(s, "secure %s", s.ConnectionState().ServerName)
		}
		_ = s.Close()
	})
	go func() {
		for b := make([]byte, 9); ; o.canary.Add(1) {
			if _, _, err := packets.ReadFrom(b); errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}()
	var err error
	if o.dns, err = net.ListenPacket("udp", canaryHost+":0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.dns.Close() })
	go o.resolve()
	return o
}

// samePort listens at the good host's and at the canary's address, at a port
// below those that connections of other tests come from.
func (o *outside) samePort() (good, canary net.Listener, packets net.PacketConn) {
	o.t.Helper()
	var err error
	for range 50 {
		port := 10000 + mathrand.IntN(20000)
		at := fmt.Sprintf("%s:%d", canaryHost, port)
		if canary, err = net.Listen("tcp", at); err != nil {
			continue
		}
		o.t.Cleanup(func() { _ = canary.Close() })
		if packets, err = net.ListenPacket("udp", at); err != nil {
			continue
		}
		o.t.Cleanup(func() { _ = packets.Close() })
		if good, err = net.Listen("tcp", fmt.Sprintf("%s:%d", goodHost, port)); err == nil {
			o.t.Cleanup(func() { _ = good.Close() })
			return good, canary, packets
		}
	}
	o.t.Fatalf("no port is free on both addresses: %v", err)
	return nil, nil, nil
}

func (o *outside) listen(at string) net.Listener {
	o.t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { _ = l.Close() })
	return l
}

func (o *outside) serve(l net.Listener, handle func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			handle(c)
		}()
	}
}

// resolve answers questions for A: names that begin with bad have the canary's
// address, those with flip have either in turn, all others the good host's.
func (o *outside) resolve() {
	for b := make([]byte, 1500); ; {
		n, from, err := o.dns.ReadFrom(b)
		if err != nil {
			return
		}
		asked := o.questions.Add(1)
		end := 12
		for end < n && b[end] != 0 {
			end += 1 + int(b[end])
		}
		if end += 5; end > n {
			continue
		}
		first := strings.ToLower(string(b[13 : 13+b[12]]))
		reply := slices.Clone(b[:end])
		reply[2], reply[3] = 0x81, 0x80
		binary.BigEndian.PutUint64(reply[4:], 1<<48) // one question and nothing else
		if binary.BigEndian.Uint16(b[end-4:]) == 1 {
			addr := goodHost
			if strings.HasPrefix(first, "bad") || strings.HasPrefix(first, "flip") && asked%4 < 2 {
				addr = canaryHost
			}
			reply[7] = 1
			reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
			reply = append(reply, net.ParseIP(addr).To4()...)
		}
		_, _ = o.dns.WriteTo(reply, from)
	}
}

func selfSigned(t testing.TB) tls.Certificate {
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
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func listed(entries ...string) func(*sandbox.Policy) {
	return func(p *sandbox.Policy) { p.NetworkAllowlist = entries }
}

// reach is a script's function that says what an endpoint answers.
const reach = `
import socket, ssl, sys
def say(host, port, text=b"hi", family=0):
    connected = False
    try:
        for f, k, p, _, a in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG):
            break
        with socket.socket(f, k, p) as s:
            s.settimeout(10)
            s.connect(a)
            connected = True
            s.sendall(text)
            s.shutdown(socket.SHUT_WR)
            answer = b""
            while part := s.recv(4096):
                answer += part
            return answer.decode()
    except socket.gaierror as e:
        return "no name"
    except OSError as e:
        return "cut" if connected or isinstance(e, ConnectionResetError) else type(e).__name__
def send(host, port):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.sendto(b"x", (host, port))
            s.sendto(b"x", (host, port))
            return "sent"
    except OSError as e:
        return "not sent"
def secure(host, port, name):
    try:
        c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
        with socket.create_connection((host, port), 10) as s, c.wrap_socket(s, server_hostname=name) as t:
            return t.recv(100).decode()
    except OSError as e:
        return "cut"
`

// says runs code after reach and fails unless it prints want.
func says(t *testing.T, s sandbox.Sandbox, code, want string) Result {
	t.Helper()
	r := Exec(t, s, within(30*time.Second, Python(reach+code)))
	if r.Reason != sandbox.Exited || r.Code != 0 || strings.TrimSpace(r.Stdout) != want {
		t.Errorf("got %+v\n%s%swant\n%s", r.Exit, r.Stdout, r.Stderr, want)
	}
	return r
}

func (o *outside) mustBeUntouched(t *testing.T) {
	t.Helper()
	time.Sleep(20 * time.Millisecond)
	if n := o.canary.Load(); n > 0 {
		t.Errorf("the canary heard %d times", n)
	}
}

func testNoEgress(t *testing.T, b sandbox.Backend, o *outside) {
	s := Start(t, b)
	asked := o.questions.Load()
	r := says(t, s, fmt.Sprintf(`
p, d = %d, %q
print(say("127.0.0.1", p), say("127.0.0.2", p), say("169.254.169.254", 80), say("8.8.8.8", 53), say("2001:4860:4860::8888", 53), say("fe80::1", 53))
print(say("ok.test", p), say("c2VjcmV0.evil.test", p), say("127.0.0.1", 53), send("8.8.8.8", 53))
send("127.0.0.1", 53), send("127.0.0.1", p) # it stays inside
print([n for _, n in socket.if_nameindex()], open("/etc/resolv.conf").read())
`, o.port, o.dns.LocalAddr()), "ConnectionRefusedError ConnectionRefusedError OSError OSError OSError OSError\n"+
		"no name no name ConnectionRefusedError not sent\n['lo'] nameserver 127.0.0.1")
	if len(r.Denials) > 0 {
		t.Errorf("denied %v by nobody", r.Denials)
	}
	o.mustBeUntouched(t)
	if o.questions.Load() != asked {
		t.Error("a question has left")
	}
}

func testListed(t *testing.T, b sandbox.Backend, o *outside) {
	s := Start(t, b, listed(fmt.Sprintf("ok.test:%d", o.port), fmt.Sprintf("*.ex.test:%d", o.port), fmt.Sprintf("%s:%d", goodHost, o.tlsPort)))
	if how := s.Info().Enforced["network_allowlist"]; how == "" || how == Start(t, b).Info().Enforced["network_allowlist"] {
		t.Errorf("enforced: %q", how)
	}
	says(t, s, fmt.Sprintf(`
p = %d
print(say("ok.test", p), say("OK.Test.", p), say("a.b.ex.test", p), sep="\n")
`, o.port), strings.TrimSpace(strings.Repeat("good got hi\n", 3)))
	if _, err := os.Stat("/proc/net/if_inet6"); err == nil { // the kernel has IPv6
		says(t, s, fmt.Sprintf(`print(say("ok.test", %d, family=socket.AF_INET6))`, o.port), "good got hi")
	}
	r := Exec(t, s, within(10*time.Second, Bash(fmt.Sprintf(`exec 9<>/dev/tcp/ok.test/%d; printf hi >&9; getent hosts ok.test | grep -c .; id -un`, o.port))))
	mustExit(t, r, 0)
	asked := o.questions.Load()
	refused := says(t, s, fmt.Sprintf(`
p = %d
print(say("other.test", p), say("ex.test", p), say("aex.test", p), say("x.ok.test", p), say("8.8.8.8.", p))
print(say("ok.test", 9), say("127.0.0.1", 9))
send(socket.gethostbyname("ok.test"), p) # to nobody: only TCP is passed on
`, o.port), "no name no name no name no name no name\nConnectionRefusedError ConnectionRefusedError")
	for _, name := range []string{"other.test", "ex.test", "aex.test", "x.ok.test"} {
		if !slices.Contains(refused.Denials, sandbox.Denial{Kind: "dns", Target: name, Reason: "not in network_allowlist"}) {
			t.Errorf("%s is not among %v", name, refused.Denials)
		}
	}
	if o.questions.Load() != asked {
		t.Error("a question for what is not listed has left")
	}
	// To a listed port of an unlisted address, or the other way round.
	other := says(t, s, fmt.Sprintf(`
print([say(h, p).startswith("good") for h, p in (("93.184.216.34", %d), (socket.gethostbyname("ok.test"), %d), ("8.8.8.8", 53), ("127.0.0.1", %d))])
`, o.port, o.tlsPort, o.port), "[False, False, False, False]")
	if slices.ContainsFunc(other.Denials, func(d sandbox.Denial) bool { return d.Kind == "dns" }) {
		t.Errorf("another call's denials: %v", other.Denials)
	}
	if want := (sandbox.Denial{Kind: "connect", Target: fmt.Sprintf("ok.test:%d", o.tlsPort), Reason: "not in network_allowlist"}); !slices.Contains(other.Denials, want) {
		t.Errorf("%v is not among %v", want, other.Denials)
	}
	o.mustBeUntouched(t)
}

func testTLSNames(t *testing.T, b sandbox.Backend, o *outside) {
	s := Start(t, b, listed(fmt.Sprintf("ok.test:%d", o.tlsPort), fmt.Sprintf("%s:%d", goodHost, o.tlsPort)))
	r := says(t, s, fmt.Sprintf(`
p = %d
for host, name in (("ok.test", "ok.test"), ("ok.test", "evil.test"), ("ok.test", None), ("127.0.0.2", None), ("127.0.0.2", "any.test")):
    print(secure(host, p, name).strip())
`, o.tlsPort), "secure ok.test\ncut\ncut\nsecure\nsecure any.test")
	want := sandbox.Denial{Kind: "tls", Target: fmt.Sprintf("ok.test:%d", o.tlsPort), Reason: `the TLS hello names "evil.test"`}
	if !slices.Contains(r.Denials, want) {
		t.Errorf("%v is not among %v", want, r.Denials)
	}
}

func testAddresses(t *testing.T, b sandbox.Backend, o *outside) {
	s := Start(t, b, listed(fmt.Sprintf("bad.test:%d", o.port), fmt.Sprintf("flip.test:%d", o.port), fmt.Sprintf("%s:%d", canaryHost, o.port)))
	r := says(t, s, fmt.Sprintf(`
p = %d
print(say("bad.test", p), say("127.0.0.1", p))
for _ in range(20):
    say("flip.test", p)
`, o.port), "cut cut")
	want := sandbox.Denial{Kind: "address", Target: fmt.Sprintf("bad.test:%d", o.port), Reason: "127.0.0.1 is a loopback address"}
	if !slices.Contains(r.Denials, want) {
		t.Errorf("%v is not among %v", want, r.Denials)
	}
	o.mustBeUntouched(t)
}

func testManyConnections(t *testing.T, b sandbox.Backend, o *outside) {
	entry := fmt.Sprintf("ok.test:%d", o.port)
	hostile, quiet := Start(t, b, listed(entry)), Start(t, b, listed(entry))
	done := make(chan Result, 1)
	go func() {
		r, _ := exec(t.Context(), hostile, within(60*time.Second, Python(fmt.Sprintf(`
import socket
a = (socket.gethostbyname("ok.test"), %d)
held = []
for i in range(%d):
    try:
        held.append(socket.create_connection(a, 10))
    except OSError:
        pass
    if len(held) > 500:
        held.pop(0).close()
`, o.port, times(20000)))))
		done <- r
	}()
	for range 10 {
		says(t, quiet, fmt.Sprintf(`print(say("ok.test", %d))`, o.port), "good got hi")
	}
	r := <-done
	mustExit(t, r, 0)
	if !slices.ContainsFunc(r.Denials, func(d sandbox.Denial) bool { return d.Kind == "limit" && d.Target == entry }) {
		t.Errorf("no limit is among %v", r.Denials)
	}
}

func testUnenforceable(t *testing.T, b sandbox.Backend, _ *outside) {
	for _, entry := range []string{"*:443", "*.com:443", "ok.test", "ok.test:0", ":443", "ok.test:443/path", "0x7f000001:443", "[::ffff:10.0.0.1]:443", "ok.test\x00.evil.test:443", ""} {
		policy := Policy()
		policy.NetworkAllowlist = []string{"ok.test:443", entry}
		s, err := b.Start(t.Context(), sandbox.Spec{ID: "refused", Policy: policy})
		if e, ok := errors.AsType[*sandbox.StartError](err); !ok || e.Code != "policy_unenforceable" || e.Field != "network_allowlist" {
			t.Errorf("%q: got %v", entry, err)
		}
		if err == nil {
			_ = s.Close(t.Context())
		}
	}
}

func testNothingLeft(t *testing.T, b sandbox.Backend, o *outside) {
	entries := []string{fmt.Sprintf("ok.test:%d", o.port), "*.ex.test:443", "a.test:80", "8.8.8.0/24:53", "[2001:4860::/32]:443"}
	round := func() {
		s := Start(t, b, listed(entries...))
		says(t, s, fmt.Sprintf(`print(say("ok.test", %d))`, o.port), "good got hi")
		if err := s.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	round()
	settled := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	time.Sleep(300 * time.Millisecond) // a spare is being made
	before := settled()
	for range times(30) {
		round()
	}
	if !eventually(5*time.Second, func() bool { return settled() <= before+2 }) {
		t.Errorf("%d descriptors before, %d after", before, settled())
	}
}

package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/shared/fault"
)

// example is the policy that the API document PUTs.
func example() Policy {
	return Policy{
		WorkspaceID: "default", FSAllowlist: []string{"/workspace", "/data/shared-readonly"}, NetworkAllowlist: []string{"api.openai.com:443"},
		CPUShares: 2048, MemoryMB: 2048, PIDsLimit: 512, WallClockSeconds: 600, OutputBytesLimit: 4194304, BaseImage: "bigwave/sandbox-base:latest",
	}
}

func TestNormaliseKeepsTheDocumentsExamples(t *testing.T) {
	if got, err := Normalise(example(), DefaultCeilings()); err != nil || got.Digest() != example().Digest() || got.WorkspaceID != "default" {
		t.Errorf("got %+v, %v", got, err)
	}
	if got, err := Normalise(inTree(), Ceilings{}); err != nil || got.Digest() != inTree().Digest() {
		t.Errorf("the default: %+v, %v", got, err)
	}
}

func TestBounds(t *testing.T) {
	c := DefaultCeilings()
	for _, b := range []struct {
		field     string
		set       func(*Policy, int64)
		low, high int64
	}{
		{"cpu_shares", func(p *Policy, n int64) { p.CPUShares = n }, 2, 262144},
		{"memory_mb", func(p *Policy, n int64) { p.MemoryMB = n }, 16, c.MemoryMB},
		{"pids_limit", func(p *Policy, n int64) { p.PIDsLimit = n }, 4, c.PIDsLimit},
		{"wall_clock_seconds", func(p *Policy, n int64) { p.WallClockSeconds = n }, 1, c.WallClockSeconds},
		{"output_bytes_limit", func(p *Policy, n int64) { p.OutputBytesLimit = n }, 1024, c.OutputBytesLimit},
	} {
		for n, ok := range map[int64]bool{b.low: true, b.high: true, b.low - 1: false, b.high + 1: false, 0: false, -1: false, 1<<53 + 1: false, 1<<63 - 1: false, -1 << 63: false} {
			p := example()
			b.set(&p, n)
			_, err := Normalise(p, c)
			if ok && err != nil || !ok && (fault.From(err).Field != b.field || !fault.Is(err, fault.Invalid)) {
				t.Errorf("%s = %d: %v", b.field, n, err)
			}
		}
	}
	if _, err := Normalise(example(), Ceilings{MemoryMB: 1024}); fault.From(err).Field != "memory_mb" {
		t.Errorf("over the operator's ceiling: %v", err)
	}
}

func TestPaths(t *testing.T) {
	for _, p := range []string{
		"", "/", "//", "/etc", "/etc/passwd", "/proc", "/proc/self", "/sys", "/dev", "/dev/shm", "/root", "/root/.ssh", "/var/run/docker.sock", "/run/containerd", "/run", "/usr", "/bin", "/lib64", "/boot", "/workspace/../etc", "//etc", "/workspace/", "/workspace/.", "/workspace\x00", "workspace", "./a", "~", "~/a", "/~", "/a*", "/a?", "/a[b]", "/a\n", "/a\xff", "/" + strings.Repeat("a", 5000),
	} {
		q := example()
		q.FSAllowlist = []string{"/workspace", p}
		if _, err := Normalise(q, Ceilings{}); fault.From(err).Field != "fs_allowlist[1]" {
			t.Errorf("%.40q: %v", p, err)
		}
	}
	q := example()
	q.FSAllowlist = []string{"/data/a", "/workspace", "/data/a", "/etcetera", "/opt/x"}
	got, err := Normalise(q, Ceilings{})
	if want := []string{"/data/a", "/workspace", "/etcetera", "/opt/x"}; err != nil || !slices.Equal(got.FSAllowlist, want) {
		t.Errorf("got %v, %v; want %v", got.FSAllowlist, err, want)
	}
	for _, list := range [][]string{nil, {}, {"/data"}, {"/workspace2"}} {
		q.FSAllowlist = list
		if _, err := Normalise(q, Ceilings{}); fault.From(err).Field != "fs_allowlist" {
			t.Errorf("%v without /workspace: %v", list, err)
		}
	}
	q.FSAllowlist = []string{"/workspace"}
	for i := range 10000 {
		q.FSAllowlist = append(q.FSAllowlist, fmt.Sprintf("/data/%d", i))
	}
	if _, err := Normalise(q, Ceilings{}); fault.From(err).Field != "fs_allowlist" {
		t.Errorf("10000 entries: %v", err)
	}
}

func TestEndpoints(t *testing.T) {
	for in, want := range map[string]string{
		"example.com:443": "example.com:443", "EXAMPLE.com:443": "example.com:443", "ok.com.:443": "ok.com:443", "ＯＫ.com:443": "ok.com:443", "xn--bcher-kva.example:443": "xn--bcher-kva.example:443", "bücher.example:443": "xn--bcher-kva.example:443", "日本.jp:80": "xn--wgv71a.jp:80", "a-b.example:1": "a-b.example:1", "a.example:65535": "a.example:65535", "db:5432": "db:5432",
		"*.example.com:443": "*.example.com:443", "*.EXAMPLE.com.:443": "*.example.com:443", "*.co.example.com:443": "*.co.example.com:443",
		"8.8.8.8:53": "8.8.8.8:53", "10.0.0.0/8:443": "10.0.0.0/8:443", "10.1.2.3:80": "10.1.2.3:80", "192.168.0.0/16:80": "192.168.0.0/16:80", "8.8.8.8/32:53": "8.8.8.8:53", "[2001:db8::1]:443": "[2001:db8::1]:443", "[2001:DB8:0::1]:443": "[2001:db8::1]:443", "[2606:4700::/32]:443": "[2606:4700::/32]:443", "[fd12::1]:443": "[fd12::1]:443",
	} {
		if got, err := endpoint(in); err != nil || got != want {
			t.Errorf("%s: got %s, %v; want %s", in, got, err, want)
		}
		if again, err := endpoint(want); err != nil || again != want {
			t.Errorf("%s is not its own canonical form: %s, %v", want, again, err)
		}
	}
	for _, in := range []string{
		"", "*", "*:443", "*.com:443", "*.com", "*.co.uk:443", "*.github.io:443", "*.*.example.com:443", "a.*.com:443", "*example.com:443", "**.example.com:443", "*.:443", "*.8.8.8.8:443", "*.localhost:443",
		"0.0.0.0/0", "0.0.0.0/0:443", "0.0.0.0:443", "128.0.0.0/1:443", "127.0.0.1:5432", "127.1.2.3:80", "127.0.0.0/8:80", "[::1]:4222", "[::]:80", "[::/0]:80", "[::ffff:127.0.0.1]:80", "[::ffff:8.8.8.8]:80", "[64:ff9b::7f00:1]:80", "[2002:7f00:1::]:80", "[fe80::1]:80", "[fe80::1%eth0]:80", "[ff02::1]:80", "169.254.169.254:80", "169.254.0.0/16:80", "224.0.0.1:80", "255.255.255.255:80", "240.0.0.1:1", "100.100.100.200:80", "198.18.0.1:80", "[fd00::1]:80",
		"metadata.google.internal:80", "METADATA.google.internal.:80", "localhost:80", "a.localhost:80", "2130706433:80", "0x7f.1:80", "0x7f000001:80", "127.1:443", "0177.0.0.1:80", "1.2.3:80", "１２７.0.0.1:80", "10.1.2.3/8:80", "10.0.0.0/33:80", "1.2.3.4.5:80",
		"example.com", "example.com:", ":443", "example.com:0", "example.com:99999", "example.com:65536", "example.com:-1", "example.com:+443", "example.com:0443", "example.com:４４３", "example.com:443x", "example.com:443/path", "example.com:http", "https://example.com:443", "https://example.com", "user@evil:443", "evil.com#.ok.com:443", "ok.com\x00.evil:443", "ok.com%00:443", "a b.com:443", " example.com:443", "example.com:443 ", "example.com:443\n", "exa_mple.com:443", "-a.com:443", "a-.com:443", "a..com:443", ".com:443", "..:443", strings.Repeat("a", 64) + ".com:443", strings.Repeat("a.", 127) + "com:443", "xn--:443", "xn--a:443", "a\u202eb.com:443", "\u200bok.com:443", "2001:db8::1:443", "[2001:db8::1]", "[example.com]:443", "[:443", "]:443", "[]:443", "[1.2.3.4]:443", "a/b:443", "example.com/24:443",
	} {
		if got, err := endpoint(in); err == nil {
			t.Errorf("%.60q was accepted as %q", in, got)
		}
	}
}

func TestAURLIsCalledOne(t *testing.T) {
	if _, err := endpoint("https://example.com:443"); err == nil || !strings.Contains(err.Error(), "is a URL; write host:port") {
		t.Errorf("got %v", err)
	}
}

func TestNetworkListNamesItsEntry(t *testing.T) {
	p := example()
	p.NetworkAllowlist = []string{"A.example:443", "a.example:443", "b.example"}
	if _, err := Normalise(p, Ceilings{}); fault.From(err).Field != "network_allowlist[2]" {
		t.Errorf("got %v", err)
	}
	p.NetworkAllowlist = p.NetworkAllowlist[:2]
	if got, err := Normalise(p, Ceilings{}); err != nil || !slices.Equal(got.NetworkAllowlist, []string{"a.example:443"}) {
		t.Errorf("got %v, %v", got.NetworkAllowlist, err)
	}
	p.NetworkAllowlist = nil
	if got, err := Normalise(p, Ceilings{}); err != nil || got.NetworkAllowlist == nil || len(got.NetworkAllowlist) != 0 {
		t.Errorf("nothing stays nothing: %#v, %v", got.NetworkAllowlist, err)
	}
	start := time.Now()
	p.NetworkAllowlist = []string{strings.Repeat("a", 1<<20) + ":443"}
	if _, err := Normalise(p, Ceilings{}); err == nil || time.Since(start) > time.Second || len(err.Error()) > 1000 {
		t.Errorf("a megabyte: %.100v in %v", err, time.Since(start))
	}
}

func TestImages(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("a", 64)
	for _, name := range []string{"a", "bigwave/sandbox-base:latest", "localhost:5000/x", "169.254.169.254/x", "docker.io/library/debian:12", "ghcr.io/a/b" + digest, "ghcr.io/a/b:1" + digest, "a-b/c_d/e__f:V1.2-x"} {
		if err := image(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"", "docker.io/../x", "a//b", "/a", "a/", "a:", "a@", "a@sha256:abc", "a@md5:" + strings.Repeat("a", 32), "A", "a b", "a\n", "a:b:c", "../a", "./a", "a:" + strings.Repeat("b", 200), strings.Repeat("a", 4096), "-a", "a;b", "$(a)", "a\x00", "é", "http://a/b"} {
		if err := image(name); fault.From(err).Field != "base_image" {
			t.Errorf("%.40q: %v", name, err)
		}
	}
}

func TestDigest(t *testing.T) {
	base := example()
	other := base
	other.WorkspaceID = "another"
	if base.Digest() != other.Digest() {
		t.Error("the workspace is part of the digest")
	}
	if d := base.Digest(); !strings.HasPrefix(d, "sha256:") || len(d) != len("sha256:")+64 {
		t.Errorf("got %s", d)
	}
	seen := map[string]string{base.Digest(): "base"}
	for name, change := range map[string]func(*Policy){
		"fs": func(p *Policy) { p.FSAllowlist = []string{"/workspace"} }, "fs order": func(p *Policy) { p.FSAllowlist = []string{"/data/shared-readonly", "/workspace"} },
		"network": func(p *Policy) { p.NetworkAllowlist = nil }, "joined": func(p *Policy) { p.FSAllowlist = []string{"/workspace\" \"/data/shared-readonly"} },
		"moved": func(p *Policy) {
			p.FSAllowlist, p.NetworkAllowlist = []string{"/workspace"}, []string{"/data/shared-readonly", "api.openai.com:443"}
		},
		"cpu": func(p *Policy) { p.CPUShares++ }, "memory": func(p *Policy) { p.MemoryMB++ }, "pids": func(p *Policy) { p.PIDsLimit++ }, "wall": func(p *Policy) { p.WallClockSeconds++ }, "output": func(p *Policy) { p.OutputBytesLimit++ }, "image": func(p *Policy) { p.BaseImage += "x" },
	} {
		p := example()
		change(&p)
		if was, ok := seen[p.Digest()]; ok {
			t.Errorf("%s has the digest of %s", name, was)
		}
		seen[p.Digest()] = name
	}
}

func TestDefault(t *testing.T) {
	if got, err := Default(" "); err != nil || got.Digest() != inTree().Digest() || got.WorkspaceID != "" {
		t.Errorf("nothing set: %+v, %v", got, err)
	}
	got, err := Default(`{"workspace_id":"x","memory_mb":64,"network_allowlist":["A.example:443"]}`)
	if err != nil || got.MemoryMB != 64 || got.NetworkAllowlist[0] != "a.example:443" || got.PIDsLimit != 256 || got.WorkspaceID != "" {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, raw := range []string{`{`, `[]`, `{"memroy_mb":1}`, `{"memory_mb":1}`, `{"memory_mb":"64"}`, `{"memory_mb":64,"memory_mb":65}`, `{} {}`, `{"fs_allowlist":["/etc"]}`} {
		if _, err := Default(raw); err == nil {
			t.Errorf("%s was accepted", raw)
		}
	}
}

func FuzzEndpoint(f *testing.F) {
	for _, s := range []string{"a.example:443", "*.a.example:1", "[::1]:80", "10.0.0.0/8:1", "ＯＫ.com.:443"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, entry string) {
		got, err := endpoint(entry)
		if err != nil {
			return
		}
		if again, err := endpoint(got); err != nil || again != got {
			t.Errorf("%q became %q, which became %q, %v", entry, got, again, err)
		}
	})
}

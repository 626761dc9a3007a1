// Package policy bounds what the tools of a workspace may see, reach and use.
package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// Policy is what a sandbox is started with; it stays as it is until that
// sandbox ends.
type Policy struct {
	WorkspaceID      string
	FSAllowlist      []string // absolute paths as seen in the sandbox; /workspace is among them
	NetworkAllowlist []string // host:port, *.domain:port, ip:port, cidr:port; empty means nothing
	CPUShares        int64    // relative weight, 2–262144
	MemoryMB         int64    // MiB
	PIDsLimit        int64
	WallClockSeconds int64 // of each call, from the start of its process
	OutputBytesLimit int64 // of each of stdout and stderr
	BaseImage        string
}

// Ceilings are the operator's upper bounds. A zero field means the one of
// DefaultCeilings.
type Ceilings struct {
	MemoryMB, PIDsLimit, WallClockSeconds, OutputBytesLimit int64
}

// DefaultCeilings are the bounds when the operator sets none.
func DefaultCeilings() Ceilings {
	return Ceilings{MemoryMB: 65536, PIDsLimit: 32768, WallClockSeconds: 3600, OutputBytesLimit: 64 << 20}
}

const (
	// Workspace is the session's own directory, which every policy allows.
	Workspace = "/workspace"
	// DefaultImage is the base image when nothing else is said.
	DefaultImage = "bigwave/sandbox-base:latest"

	maxEntries  = 256 // of one list
	maxPath     = 4096
	maxImage    = 512
	maxEndpoint = 300 // an entry of network_allowlist
)

// inTree is the default policy when the operator sets none.
func inTree() Policy {
	return Policy{
		FSAllowlist:      []string{Workspace},
		NetworkAllowlist: []string{},
		CPUShares:        1024,
		MemoryMB:         1024,
		PIDsLimit:        256,
		WallClockSeconds: 300,
		OutputBytesLimit: 1 << 20,
		BaseImage:        DefaultImage,
	}
}

// Default is the policy of a workspace without one of its own: the operator's
// JSON, or the one in the tree when raw is empty. A field that the JSON leaves
// out keeps its value from the tree; workspace_id is ignored.
func Default(raw string) (Policy, error) {
	p := inTree()
	if strings.TrimSpace(raw) == "" {
		return p, nil
	}
	doc := document{
		FSAllowlist: p.FSAllowlist, NetworkAllowlist: p.NetworkAllowlist, CPUShares: p.CPUShares, MemoryMB: p.MemoryMB,
		PIDsLimit: p.PIDsLimit, WallClockSeconds: p.WallClockSeconds, OutputBytesLimit: p.OutputBytesLimit, BaseImage: p.BaseImage,
	}
	if err := strictjson.Decode([]byte(raw), &doc); err != nil {
		return Policy{}, fmt.Errorf("default sandbox policy: %w", err)
	}
	p = Policy{
		FSAllowlist: doc.FSAllowlist, NetworkAllowlist: doc.NetworkAllowlist, CPUShares: doc.CPUShares, MemoryMB: doc.MemoryMB,
		PIDsLimit: doc.PIDsLimit, WallClockSeconds: doc.WallClockSeconds, OutputBytesLimit: doc.OutputBytesLimit, BaseImage: doc.BaseImage,
	}
	p, err := Normalise(p, DefaultCeilings())
	if err != nil {
		return Policy{}, fmt.Errorf("default sandbox policy: %w", err)
	}
	return p, nil
}

// document is a policy as an operator writes it.
type document struct {
	WorkspaceID      string   `json:"workspace_id"`
	FSAllowlist      []string `json:"fs_allowlist"`
	NetworkAllowlist []string `json:"network_allowlist"`
	CPUShares        int64    `json:"cpu_shares"`
	MemoryMB         int64    `json:"memory_mb"`
	PIDsLimit        int64    `json:"pids_limit"`
	WallClockSeconds int64    `json:"wall_clock_seconds"`
	OutputBytesLimit int64    `json:"output_bytes_limit"`
	BaseImage        string   `json:"base_image"`
}

// Digest names what the policy allows, whatever the workspace: equal policies
// have equal digests.
func (p Policy) Digest() string {
	h := sha256.New()
	line := func(name string, values ...any) { fmt.Fprintf(h, "%s %q\n", name, values) }
	line("policy", "v1")
	for _, e := range p.FSAllowlist {
		line("fs", e)
	}
	for _, e := range p.NetworkAllowlist {
		line("network", e)
	}
	fmt.Fprintf(h, "cpu_shares %d\nmemory_mb %d\npids_limit %d\nwall_clock_seconds %d\noutput_bytes_limit %d\n",
		p.CPUShares, p.MemoryMB, p.PIDsLimit, p.WallClockSeconds, p.OutputBytesLimit)
	line("base_image", p.BaseImage)
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// Normalise checks p against its bounds and returns it in its canonical form:
// lists without repetitions, hosts in lower case and ASCII. Every error is a
// fault of kind Invalid that names the field.
func Normalise(p Policy, c Ceilings) (Policy, error) {
	d := DefaultCeilings()
	bounds := []struct {
		field            string
		value, low, high int64
	}{
		{"cpu_shares", p.CPUShares, 2, 262144},
		{"memory_mb", p.MemoryMB, 16, cmp.Or(c.MemoryMB, d.MemoryMB)},
		{"pids_limit", p.PIDsLimit, 4, cmp.Or(c.PIDsLimit, d.PIDsLimit)},
		{"wall_clock_seconds", p.WallClockSeconds, 1, cmp.Or(c.WallClockSeconds, d.WallClockSeconds)},
		{"output_bytes_limit", p.OutputBytesLimit, 1024, cmp.Or(c.OutputBytesLimit, d.OutputBytesLimit)},
	}
	var err error
	if p.FSAllowlist, err = paths(p.FSAllowlist); err != nil {
		return Policy{}, err
	}
	if p.NetworkAllowlist, err = each("network_allowlist", p.NetworkAllowlist, endpoint); err != nil {
		return Policy{}, err
	}
	for _, b := range bounds {
		if b.value < b.low || b.value > b.high {
			return Policy{}, fault.New(fault.Invalid, "%s must be from %d to %d, not %d", b.field, b.low, b.high, b.value).On(b.field)
		}
	}
	return p, image(p.BaseImage)
}

// each normalises the entries of a list and drops repetitions.
func each(field string, entries []string, normalise func(string) (string, error)) ([]string, error) {
	if len(entries) > maxEntries {
		return nil, fault.New(fault.Invalid, "%s has %d entries; at most %d are allowed", field, len(entries), maxEntries).On(field)
	}
	out, seen := make([]string, 0, len(entries)), map[string]bool{}
	for i, e := range entries {
		n, err := normalise(e)
		if err != nil {
			name := fmt.Sprintf("%s[%d]", field, i)
			return nil, fault.New(fault.Invalid, "%s: %v", name, err).On(name)
		}
		if !seen[n] {
			seen[n] = true
			out = append(out, n)
		}
	}
	return out, nil
}

func paths(entries []string) ([]string, error) {
	out, err := each("fs_allowlist", entries, cleanPath)
	if err != nil {
		return nil, err
	}
	if slices.Contains(out, Workspace) {
		return out, nil
	}
	return nil, fault.New(fault.Invalid, "fs_allowlist must hold %s, the session's own directory", Workspace).On("fs_allowlist")
}

// system are the trees that no sandbox may be given, whoever asks.
var system = []string{"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/root", "/run", "/sbin", "/sys", "/usr", "/var"}

// cleanPath takes an absolute path that says the same thing when cleaned.
func cleanPath(p string) (string, error) {
	switch {
	case len(p) > maxPath:
		return "", fmt.Errorf("a path of %d bytes is too long", len(p))
	case !utf8.ValidString(p) || strings.ContainsFunc(p, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "", fmt.Errorf("%q holds control characters", p)
	case !strings.HasPrefix(p, "/"):
		return "", fmt.Errorf("%q is not an absolute path; start it with /", p)
	case strings.ContainsAny(p, "*?[]~"):
		return "", fmt.Errorf("%q: patterns and ~ are not allowed; name the directory", p)
	case p == "/":
		return "", errors.New("/ can't be allowed; name the directories that tools need")
	case path.Clean(p) != p:
		return "", fmt.Errorf("%q is not a clean path; write %q if that is meant", p, path.Clean(p))
	}
	for _, s := range system {
		if p == s || strings.HasPrefix(p, s+"/") {
			return "", fmt.Errorf("%q is part of the system and can't be allowed", p)
		}
	}
	return p, nil
}

// reference is the grammar of an image name: registry/path:tag@digest.
var reference = regexp.MustCompile(`^(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?` +
	`[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*` +
	`(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$`)

func image(name string) error {
	if len(name) <= maxImage && reference.MatchString(name) {
		return nil
	}
	return fault.New(fault.Invalid, "base_image is not an image name such as %s", DefaultImage).On("base_image")
}

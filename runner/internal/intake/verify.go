package intake

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/wire"
)

// Refusal is why an order was not taken. Code is short and stable, Reason is
// for people; Field names the policy field of a ceiling.
type Refusal struct{ Code, Reason, Field string }

// Error is the code and the reason.
func (r *Refusal) Error() string { return r.Code + ": " + r.Reason }

func refuse(code, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Reason: fmt.Sprintf(format, args...)}
}

// Audience is this start of this runner.
type Audience struct{ Runner, Incarnation string }

// Ceilings are the runner's own bounds, whatever was signed.
type Ceilings struct {
	MemoryMB         int64
	PIDs             int64
	WallClockSeconds int64
	OutputBytes      int64
}

// open checks an order's size, envelope, signature and form, in that order.
func open(keys envelope.Keys, data []byte) (wire.Order, *Refusal) {
	var o wire.Order
	if err := keys.Open(wire.OrderType, wire.MaxOrder, data, &o); err != nil {
		return wire.Order{}, refuse(envelope.Reason(err), "%v", err)
	}
	return o, nil
}

// address checks the version, for whom the order is, and when. now is in Unix
// milliseconds.
func address(o wire.Order, to Audience, now int64) *Refusal {
	switch {
	case o.V != wire.Version:
		return refuse(wire.RefusedVersion, "version %d, not %d", o.V, wire.Version)
	case o.Runner != to.Runner:
		return refuse(wire.RefusedAudience, "for another runner")
	case o.Incarnation != to.Incarnation:
		return refuse(wire.RefusedAudience, "for another start of this runner")
	}
	return timely(o.IssuedAt, o.ExpiresAt, now)
}

// earliest is the first plausible time, in Unix milliseconds: what lies before
// was written in other units.
const earliest = 1_577_836_800_000 // 2020-01-01

func timely(iat, exp, now int64) *Refusal {
	switch {
	case iat < earliest || exp < earliest:
		return refuse(wire.RefusedBadTime, "times are not in Unix milliseconds")
	case exp <= iat:
		return refuse(wire.RefusedBadTime, "it expires before it was issued")
	case exp-iat > wire.MaxLifeMS:
		return refuse(wire.RefusedBadTime, "it lives longer than %d s", wire.MaxLifeMS/1000)
	case iat > now+wire.SkewMS:
		return refuse(wire.RefusedFuture, "it was issued in the future; check the clocks")
	case exp < now-wire.SkewMS:
		return refuse(wire.RefusedExpired, "it has expired; check the clocks")
	}
	return nil
}

var idForm = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// shape checks that an order holds what its kind needs and nothing else.
func shape(o wire.Order) *Refusal {
	if !idForm.MatchString(o.JTI) {
		return refuse(wire.RefusedPayload, "jti: must be 1 to 64 letters, digits, - or _")
	}
	if o.Kind != wire.OrderDrain && (!idForm.MatchString(o.Session) || !idForm.MatchString(o.Workspace) || o.Epoch < 1) {
		return refuse(wire.RefusedPayload, "session, workspace and epoch: must be given")
	}
	start, call, target := o.Start != nil, o.Call != nil, o.Target != ""
	var ok bool
	switch o.Kind {
	case wire.OrderStart:
		ok = start && !call && !target
	case wire.OrderCall:
		ok = !start && call && !target && idForm.MatchString(o.Call.ID) && idForm.MatchString(o.Call.Run)
	case wire.OrderCancel, wire.OrderStatus:
		ok = !start && !call && idForm.MatchString(o.Target)
	case wire.OrderStop, wire.OrderDrain:
		ok = !start && !call && !target
	default:
		return refuse(wire.RefusedPayload, "kind: %.40q is not known", string(o.Kind))
	}
	if !ok {
		return refuse(wire.RefusedPayload, "the fields do not fit kind %q", string(o.Kind))
	}
	return nil
}

// bound is one number of a policy and what it may be.
type bound struct {
	field         string
	value, lo, hi int64
}

// startCeilings checks a policy against what any runner enforces and what this
// one allows.
func startCeilings(p wire.Policy, c Ceilings) *Refusal {
	for _, b := range []bound{
		{"cpu_shares", p.CPUShares, 2, 262144},
		{"memory_mb", p.MemoryMB, 16, c.MemoryMB},
		{"pids_limit", p.PIDsLimit, 4, c.PIDs},
		{"wall_clock_seconds", p.WallClockSeconds, 1, c.WallClockSeconds},
		{"output_bytes_limit", p.OutputBytesLimit, 1024, c.OutputBytes},
	} {
		if b.value < b.lo || b.value > b.hi {
			return ceiling(b.field, "%s is %d; this runner allows %d to %d", b.field, b.value, b.lo, b.hi)
		}
	}
	if len(p.NetworkAllowlist) > 1000 {
		return ceiling("network_allowlist", "network_allowlist has more than 1000 entries")
	}
	return paths(p.FSAllowlist)
}

func ceiling(field, format string, args ...any) *Refusal {
	r := refuse(wire.RefusedCeiling, format, args...)
	r.Field = field
	return r
}

// never are the places that no sandbox gets, whoever signed for them.
var never = []string{"/etc", "/proc", "/sys", "/dev", "/root", "/boot", "/run", "/var/run"}

func paths(list []string) *Refusal {
	const field = "fs_allowlist"
	if len(list) > 256 {
		return ceiling(field, "fs_allowlist has more than 256 entries")
	}
	for i, p := range list {
		switch {
		case !strings.HasPrefix(p, "/"), path.Clean(p) != p, strings.HasPrefix(p, "//"), strings.ContainsAny(p, "\x00*?[~"), len(p) > 4096:
			return ceiling(field, "fs_allowlist[%d] is not an absolute clean path", i)
		case p == "/", slices.ContainsFunc(never, func(n string) bool { return p == n || strings.HasPrefix(p, n+"/") }):
			return ceiling(field, "fs_allowlist[%d] may never be offered", i)
		}
	}
	if !slices.Contains(list, "/workspace") {
		return ceiling(field, "fs_allowlist does not hold /workspace")
	}
	return nil
}

var blobForm = regexp.MustCompile(`^[A-Za-z0-9_-]{1,100}$`)

var sha256Form = regexp.MustCompile(`^[0-9a-f]{64}$`)

// callCeilings checks what a call asks for.
func callCeilings(c wire.Call) *Refusal {
	tool := c.Program == wire.PythonTool
	file := c.Program == wire.FileRead || c.Program == wire.FileWrite
	switch {
	case !slices.Contains([]string{wire.Bash, wire.Python, wire.FileRead, wire.FileWrite, wire.PythonTool}, c.Program):
		return refuse(wire.RefusedCeiling, "program: %.40q is not one of this runner's", c.Program)
	case len(c.Script) > wire.MaxInline:
		return refuse(wire.RefusedCeiling, "script: %d bytes, at most %d inside an order", len(c.Script), wire.MaxInline)
	case c.InArgv && (file || tool || c.Blob != nil || len(c.Script) > wire.MaxArgvElement || slices.Contains(c.Script, 0)):
		return refuse(wire.RefusedCeiling, "script: does not fit into one argument")
	case c.Blob != nil && len(c.Script) > 0:
		return refuse(wire.RefusedCeiling, "blob: script and blob exclude each other")
	case c.Blob != nil && (!blobForm.MatchString(c.Blob.ID) || !sha256Form.MatchString(c.Blob.SHA256) || c.Blob.Size < 1 || c.Blob.Size > wire.MaxBlob):
		return refuse(wire.RefusedCeiling, "blob: bad id, size or SHA-256")
	case file && (c.Path == "" || len(c.Path) > 4096 || strings.ContainsRune(c.Path, 0)):
		return refuse(wire.RefusedCeiling, "path: must be 1 to 4096 bytes without NUL")
	case !file && c.Path != "":
		return refuse(wire.RefusedCeiling, "path: only for file operations")
	case c.Program == wire.FileRead && (len(c.Script) > 0 || c.Blob != nil):
		return refuse(wire.RefusedCeiling, "script: not for file_read")
	case c.Encoding != "" && c.Encoding != "base64" && c.Encoding != "text":
		return refuse(wire.RefusedCeiling, "encoding: %.40q is not known", c.Encoding)
	}
	return nil
}

package execution

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/layer"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/wire"
)

// InstallTime is how long one installation may take: less than the control
// plane waits for a tool's description.
const InstallTime = 50 * time.Second

// MakeTime is how long a layer may take, with the wait for a turn.
const MakeTime = turnTime + InstallTime

const (
	installsAtOnce  = 2                // one of each workspace
	turnTime        = 20 * time.Second // or the call's own limit, if that is less
	installMemoryMB = 1024
	installPIDs     = 128
	maxRequirements = 64
	maxRequirement  = 256 // bytes of one
	maxLooks        = 256 // that a session remembers
	keptErrors      = 16 << 10
)

//go:embed install.py
var installer string

// Packages installs what Python tools require. Its fields are set before it is
// used, from several goroutines.
type Packages struct {
	Layers *layer.Store
	Index  *url.URL // the simple index
	Hosts  []string // more host:port that its files may lie on
	CA     string   // PEM, of an index that the sandbox's Python would not trust

	MaxMemoryMB int64 // that a sandbox may have here; 0: no bound
	MaxPIDs     int64

	turns turns
	n     atomic.Int64
}

// requirement is a name with extras, version specifiers and a marker, as PEP
// 508 has them: no address, no path, no option.
var requirement = regexp.MustCompile(`^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?` +
	`(?: *\[ *[A-Za-z0-9._-]+(?: *, *[A-Za-z0-9._-]+)* *\])?` +
	`(?: *(?:===|==|~=|!=|<=|>=|<|>) *[A-Za-z0-9.*+!_-]+(?: *, *(?:===|==|~=|!=|<=|>=|<|>) *[A-Za-z0-9.*+!_-]+)*)?` +
	`(?: *; *[A-Za-z0-9_."' <>=!~()-]+)?$`)

// acceptable refuses what is more than a name and a version.
func acceptable(wanted []harness.Requirement) *harness.Error {
	for i, w := range wanted {
		switch {
		case i == maxRequirements:
			return lacks(w.Name, "The tool requires more than %d packages that the sandbox does not have.", maxRequirements)
		case len(w.Text) > maxRequirement || !requirement.MatchString(w.Text):
			return lacks(w.Name, "The tool's requirement %.200q can't be installed: only a package's name, with extras, versions and a marker, is taken.", w.Text)
		}
	}
	return nil
}

func lacks(module, format string, args ...any) *harness.Error {
	return &harness.Error{Kind: harness.MissingModule, Module: module, Message: fmt.Sprintf(format, args...)}
}

// normal is a set of requirements in the one way in which a key has it.
func normal(wanted []harness.Requirement) []string {
	var out []string
	for _, w := range wanted {
		head := w.Text[:len(w.Name)]
		head = strings.ToLower(regexp.MustCompile(`[-_.]+`).ReplaceAllString(head, "-"))
		out = append(out, head+strings.TrimSpace(w.Text[len(w.Name):]))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// packages is the layer with what a tool requires and the sandbox lacks; nil:
// it lacks nothing. A *harness.Error is the
// tool's, anything else ours.
func (s *Service) packages(c *call, t tool) (*layer.Lease, error) {
	if !strings.Contains(t.Content, "requirements:") {
		return nil, nil
	}
	lacking, err := s.lacking(c, t)
	if err != nil || len(lacking.Missing) == 0 {
		return nil, err
	}
	if bad := acceptable(lacking.Missing); bad != nil {
		return nil, bad
	}
	names := make([]string, len(lacking.Missing))
	for i, m := range lacking.Missing {
		names[i] = m.Name
	}
	all := short(strings.Join(names, ", "))
	if s.Packages == nil {
		return nil, lacks(names[0], "The sandbox has no package %s, which the tool requires, and none are installed here: "+
			"have the operator put it into the base image, or set BIGWAVE_PACKAGE_INDEX on the runners.", all)
	}
	image := c.session.box.Info().ImageDigest
	wanted := normal(lacking.Missing)
	key := layer.Key(image+" "+lacking.Interpreter, wanted)
	lease, err := s.Packages.Layers.Get(c.ctx, key, func(ctx context.Context, w io.Writer) error {
		leave, err := s.Packages.turn(ctx, c)
		if err != nil {
			return err
		}
		defer leave()
		if err = s.install(ctx, c.session.start.Policy.BaseImage, image, wanted, w); err != nil {
			s.Log.Warn("packages could not be installed", "requirements", wanted, "error", err)
		}
		return err
	})
	if _, passing := errors.AsType[*layer.Passing](err); err == nil || passing || c.ctx.Err() != nil {
		return lease, err
	}
	why := "the runner's log says why"
	if failed, ok := errors.AsType[*pipError](err); ok {
		why = failed.line
	}
	return nil, lacks(names[0], "The sandbox has no package %s, which the tool requires, and it could not be installed: %s", all, why)
}

// limited is why an interpreter did not say what it lacks: it ran into a limit
// of the policy, or somebody ended it.
type limited struct{ exit sandbox.Exit }

func (l *limited) Error() string { return "the look for missing packages did not end by itself" }

// lacking asks the sandbox's interpreter what it lacks; nothing of the tool is
// loaded for that. What it said of a source before counts in this session
// only: other programs of the sandbox could have put the words into its mouth.
func (s *Service) lacking(c *call, t tool) (harness.Lacking, error) {
	source := sha256.Sum256([]byte(t.Content))
	s.mu.Lock()
	known, ok := c.session.looks[source]
	s.mu.Unlock()
	if ok {
		return known, nil
	}
	policy := c.session.start.Policy
	limits := toolLimits(policy)
	body, err := harness.Lacks{Tool: harness.Tool{ID: t.ID, Content: t.Content}}.Request(limits)
	if err != nil {
		return harness.Lacking{}, err
	}
	results := &harness.Results{Limits: limits}
	exit, err := c.session.box.Exec(c.ctx, sandbox.Process{
		ID: c.ID + "-requirements", Program: sandbox.Harness, Script: body, Results: results,
		Wall: time.Duration(policy.WallClockSeconds) * time.Second,
	})
	if err != nil {
		return harness.Lacking{}, err
	}
	if !byItself(interpreted(exit, policy, false)) {
		return harness.Lacking{}, &limited{exit}
	}
	found, err := results.Lacking(toolEnding(exit, policy))
	if err != nil {
		return found, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(c.session.looks) >= maxLooks {
		clear(c.session.looks)
	}
	c.session.looks[source] = found
	return found, nil
}

// turn waits until a call's packages may be installed: no longer than the call
// itself may take, and leaves time to install them.
func (p *Packages) turn(ctx context.Context, c *call) (leave func(), err error) {
	wait := min(turnTime, time.Duration(c.session.start.Policy.WallClockSeconds)*time.Second)
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	leave, err = p.turns.take(ctx, c.session.workspace)
	if err != nil {
		return nil, &layer.Passing{Err: &sandbox.StartError{Code: string(fault.Capacity), Message: "others are being installed on this runner", Cause: err}}
	}
	return leave, nil
}

// pipError is why pip installed nothing, in its own words.
type pipError struct{ line string }

func (e *pipError) Error() string { return e.line }

// install runs pip in a sandbox of its own, which reaches the index and nothing
// else and is thrown away, and writes what it installed to w.
func (s *Service) install(ctx context.Context, base, image string, wanted []string, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, InstallTime)
	defer cancel()
	p := s.Packages
	id := fmt.Sprintf("packages-%d", p.n.Add(1))
	script, err := json.Marshal(map[string]any{
		"index": p.Index.String(), "host": p.host(), "plain": p.plain(), "ca": p.CA, "requirements": wanted,
	})
	if err != nil {
		return err
	}
	box, err := s.Backend.Start(ctx, p.spec(id, base))
	if err != nil {
		return &layer.Passing{Err: fmt.Errorf("start a sandbox to install packages in: %w", err)}
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
		defer cancel()
		if err := box.Close(ctx); err != nil {
			s.Log.Error("sandbox did not close cleanly", "session", id, "error", err)
		}
	}()
	if got := box.Info().ImageDigest; got != image {
		return &layer.Passing{Err: fmt.Errorf("base_image %s is %s now, not %s as in the session", base, got, image)}
	}
	stderr := &tail{max: keptErrors}
	exit, err := box.Exec(ctx, sandbox.Process{
		ID: id, Program: sandbox.Python, Script: []byte(installer), Env: map[string]string{"BIGWAVE_INSTALL": string(script)},
		Wall: InstallTime, Stdout: w, Stderr: stderr,
	})
	switch {
	case exit.Reason == sandbox.TimedOut || errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return &pipError{fmt.Sprintf("it took longer than %v", InstallTime)}
	case err != nil:
		return &layer.Passing{Err: fmt.Errorf("install packages: %w", err)}
	case exit.Reason == sandbox.Killed || exit.Reason == sandbox.Died:
		return &layer.Passing{Err: errors.New("the sandbox that installs packages was ended")}
	case exit.OOM:
		return &pipError{fmt.Sprintf("it needs more memory than an installation may have (%d MiB)", p.memory())}
	case exit.DiskFull:
		return &pipError{"it needs more room than an installation may have"}
	case exit.Reason != sandbox.Exited || exit.Code != 0:
		return &pipError{stderr.reason()}
	}
	return nil
}

// host is host:port of the index.
func (p *Packages) host() string {
	port := cmp.Or(p.Index.Port(), map[string]string{"http": "80", "https": "443"}[p.Index.Scheme])
	return net.JoinHostPort(p.Index.Hostname(), port)
}

// plain is the hosts that are spoken to without TLS, which pip has to be told
// of: none unless the index is.
func (p *Packages) plain() []string {
	if p.Index.Scheme != "http" {
		return []string{}
	}
	hosts := p.hosts()
	for i, h := range hosts {
		hosts[i] = strings.TrimSuffix(h, ":80") // pip wants it as the address has it
	}
	return hosts
}

// hosts is all that an installation reaches.
func (p *Packages) hosts() []string { return append([]string{p.host()}, p.Hosts...) }

// spec is the sandbox that an installation has.
func (p *Packages) spec(id, base string) sandbox.Spec {
	var private []string
	for _, h := range p.hosts() {
		if host, _, err := net.SplitHostPort(h); err == nil {
			private = append(private, host)
		}
	}
	return sandbox.Spec{
		ID: id, Workspace: "packages", PrivateAllow: private,
		Policy: sandbox.Policy{
			FSAllowlist:      []string{"/workspace"},
			NetworkAllowlist: p.hosts(),
			CPUShares:        512, MemoryMB: p.memory(), PIDsLimit: min(installPIDs, cmp.Or(p.MaxPIDs, installPIDs)), BaseImage: base,
		},
	}
}

// memory is what the runner admits of what an installation may need.
func (p *Packages) memory() int64 {
	return min(installMemoryMB, cmp.Or(p.MaxMemoryMB, installMemoryMB))
}

// tail keeps the end of what is written.
type tail struct {
	max  int
	kept []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.max; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

// reason is the last line in which pip says what went wrong; after a traceback,
// which it announces as an exception, the last of all.
func (t *tail) reason() string {
	last := "pip said nothing"
	crashed := false
	for line := range strings.SplitSeq(string(t.kept), "\n") {
		if crashed && strings.TrimSpace(line) != "" {
			last = strings.TrimSpace(line)
		}
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "ERROR: "); ok && text != "" {
			last, crashed = text, text == "Exception:"
		}
	}
	return short(last)
}

// folder is where a sandbox has a layer.
func folder(l *layer.Lease) []string {
	if l == nil {
		return nil
	}
	return []string{path.Join(sandbox.Packages, l.Name)}
}

// refused is the outcome of a tool that can't be loaded.
func (t tool) refused(call string, e *harness.Error) (*wire.Done, error) {
	if t.Op == wire.ToolCall {
		return toolFailed(e), nil
	}
	d := &wire.Done{Status: "ok"}
	return d, t.box(call, d, wire.ToolAnswer{Error: answered(e)})
}

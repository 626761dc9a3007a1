package execution

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bigwave/bigwave/runner/internal/bustest"
	"github.com/bigwave/bigwave/runner/internal/harness"
	"github.com/bigwave/bigwave/runner/internal/layer"
	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/shared/envelope"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

func TestOnlyNamesAndVersionsAreInstalled(t *testing.T) {
	for text, fine := range map[string]bool{
		"a": true, "a>=1": true, "A.b_c[x, y] >= 1.0, != 1.5.* ; python_version < '4'": true, "a==1.0+local": true, "a===x": true,
		"": false, "-r x": false, "--index-url=http://x": false, "a --pre": false, "a@http://x": false, "a @ file:///x": false,
		"git+https://x/y": false, "../x": false, "/x.whl": false, "./x": false, "a\n--pre": false, "a>=1\n": false, "a;$(x)": false,
		"a[b": false, "a ; x@y": false, "https://x": false, ".": false, "a>=": false, "ä": false, strings.Repeat("a", 300): false,
	} {
		if bad := acceptable([]harness.Requirement{{Name: text, Text: text}}); (bad == nil) != fine {
			t.Errorf("%q: %v", text, bad)
		}
	}
	if acceptable(slices.Repeat([]harness.Requirement{{Name: "a", Text: "a"}}, maxRequirements+1)) == nil {
		t.Error("there is no end to requirements")
	}
	got := normal([]harness.Requirement{{Name: "Za.-b", Text: "Za.-b >=1"}, {Name: "a", Text: "a"}, {Name: "A", Text: "A"}})
	if !slices.Equal(got, []string{"a", "za-b>=1"}) {
		t.Errorf("got %q", got)
	}
}

// packagesRig is a toolRig whose index installs what pip says it does.
type packagesRig struct {
	*toolRig
	looked, installed int
	env               string
	pip               func(p sandbox.Process) sandbox.Exit
	called            string // the request of the tool itself
	look              sandbox.Exit
}

func newPackagesRig(t *testing.T) *packagesRig {
	t.Helper()
	r := &packagesRig{toolRig: newToolRig(t)}
	index, err := url.Parse("http://127.0.0.1:8080/simple/")
	if err != nil {
		t.Fatal(err)
	}
	store := &layer.Store{Max: 1 << 20, Time: 5 * time.Second, Now: time.Now, Log: bustest.Quiet()}
	if err := store.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	r.Packages = &Packages{Layers: store, Index: index}
	r.answer = `{"result":{"type":"NoneType","text":"","value":null,"same":false,"files":[],"embeds":[],"truncated":false}}` + "\n"
	r.pip = func(p sandbox.Process) sandbox.Exit {
		out := tar.NewWriter(p.Stdout)
		_ = out.WriteHeader(&tar.Header{Name: "lib.py", Typeflag: tar.TypeReg})
		_ = out.Close()
		return sandbox.Exit{Reason: sandbox.Exited}
	}
	r.machine.any = func(_ context.Context, p sandbox.Process, _ *box) sandbox.Exit {
		switch {
		case p.Program == sandbox.Python:
			r.installed++
			r.env = p.Env["BIGWAVE_INSTALL"]
			return r.pip(p)
		case strings.Contains(string(p.Script), `"op":"lacks"`):
			r.looked++
			if r.look.Reason != "" {
				return r.look
			}
			_, _ = p.Results.Write([]byte(`{"result":{"missing":[{"name":"Lib","text":"Lib>=1"}],"interpreter":"cpython 3.13"}}` + "\n"))
		default:
			r.called = string(p.Script)
			_, _ = p.Results.Write([]byte(r.answer))
		}
		return sandbox.Exit{Reason: sandbox.Exited}
	}
	return r
}

const requiring = "\"\"\"\nrequirements: Lib>=1\n\"\"\"\n"

func (r *packagesRig) call(t *testing.T, content string) *wire.Done {
	t.Helper()
	return r.ask(t, wire.ToolRequest{Op: wire.ToolCall, ID: "t", Content: content, Function: "f"}, wire.ToolSecrets{})
}

// describe asks for a description and opens the answer.
func (r *packagesRig) describe(t *testing.T, content string) (*wire.Done, wire.ToolAnswer) {
	t.Helper()
	done := r.ask(t, wire.ToolRequest{Op: wire.ToolDescribe, ID: "t", Content: content, ReplyTo: r.reply.PublicKey().Bytes()}, wire.ToolSecrets{})
	var a wire.ToolAnswer
	if plain, err := envelope.OpenBox(r.reply, fmt.Sprintf("call_%d", r.n), done.Value); err != nil || strictjson.Decode(plain, &a) != nil {
		t.Fatalf("got %+v, %+v: %v", done, done.Error, err)
	}
	return done, a
}

func TestWhatAToolRequiresIsInstalledOnce(t *testing.T) {
	r := newPackagesRig(t)
	for range 2 {
		if done := r.call(t, requiring); done.Status != "ok" {
			t.Fatalf("got %+v, %+v", done, done.Error)
		}
		if !strings.Contains(r.called, `"paths":["`+sandbox.Packages+"/") {
			t.Errorf("the tool was asked %s", r.called)
		}
	}
	if done := r.call(t, requiring+"# another\n"); done.Status != "ok" {
		t.Fatalf("got %+v", done)
	}
	if r.looked != 2 || r.installed != 1 {
		t.Errorf("looked %d times, installed %d times", r.looked, r.installed)
	}
	// What one session's sandbox said is not another's business.
	r.live(t, "ses_2")
	for r.inbox.count(wire.SessionStarted, "") < 2 {
		time.Sleep(time.Millisecond)
	}
	o := callOrder("ses_2", 1, "call_other", "")
	script, err := strictjson.Encode(wire.ToolRequest{Op: wire.ToolCall, ID: "t", Content: requiring, Function: "f"})
	if err != nil {
		t.Fatal(err)
	}
	o.Call.Program, o.Call.Script, o.Call.InArgv = wire.PythonTool, script, false
	r.begin(t, o)
	if done := r.inbox.wait(t, wire.CallDone, "call_other").Done; done.Status != "ok" || r.looked != 3 || r.installed != 1 {
		t.Errorf("got %+v; looked %d times, installed %d times", done, r.looked, r.installed)
	}
	var got struct {
		Index, Host, CA     string
		Plain, Requirements []string
	}
	if err := json.Unmarshal([]byte(r.env), &got); err != nil || got.Index != "http://127.0.0.1:8080/simple/" || got.Host != "127.0.0.1:8080" || !slices.Equal(got.Plain, []string{"127.0.0.1:8080"}) || !slices.Equal(got.Requirements, []string{"lib>=1"}) {
		t.Errorf("installed %s, %v", r.env, err)
	}
	spec := r.Packages.spec("x", "image")
	if !slices.Equal(spec.Policy.NetworkAllowlist, []string{"127.0.0.1:8080"}) || !slices.Equal(spec.PrivateAllow, []string{"127.0.0.1"}) {
		t.Errorf("the sandbox is %+v", spec)
	}
	if n := r.machine.left(); n != 2 {
		t.Errorf("%d sandboxes are left", n)
	}
}

func TestWithoutRequirementsNothingIsAsked(t *testing.T) {
	r := newPackagesRig(t)
	if done := r.call(t, "class Tools: pass\n"); done.Status != "ok" || r.looked+r.installed > 0 {
		t.Errorf("got %+v; looked %d times", done, r.looked)
	}
}

func TestWithoutAnIndexWhatIsMissingIsNamed(t *testing.T) {
	r := newPackagesRig(t)
	r.Packages = nil
	done := r.call(t, requiring)
	if done.Status != "error" || !strings.Contains(done.Error.Message, "no package Lib,") || !strings.Contains(done.Error.Message, "BIGWAVE_PACKAGE_INDEX") || r.installed > 0 || r.called != "" {
		t.Errorf("got %s, %+v", done.Status, done.Error)
	}
}

func TestAnInstallationThatFailsSaysWhy(t *testing.T) {
	r := newPackagesRig(t)
	r.pip = func(p sandbox.Process) sandbox.Exit {
		_, _ = p.Stdout.Write([]byte("not a tar stream"))
		_, _ = p.Stderr.Write([]byte("noise\nERROR: first\nERROR: No matching distribution found for lib>=1\n"))
		return sandbox.Exit{Reason: sandbox.Exited, Code: 1}
	}
	for range 3 {
		done := r.call(t, requiring)
		if done.Status != "error" || !strings.Contains(done.Error.Message, "no package Lib,") || !strings.Contains(done.Error.Message, "No matching distribution found for lib>=1") {
			t.Errorf("got %s, %+v", done.Status, done.Error)
		}
	}
	if r.installed != 1 || r.called != "" {
		t.Errorf("installed %d times; called %q", r.installed, r.called)
	}
	if _, a := r.describe(t, requiring); a.Error == nil || a.Error.Kind != string(harness.MissingModule) || a.Error.Module != "Lib" {
		t.Errorf("got %+v", a.Error)
	}
}

func TestAnInstallationThatCantStartIsTriedAgain(t *testing.T) {
	r := newPackagesRig(t)
	works := r.pip
	for _, tt := range []struct {
		broken error
		exit   sandbox.Exit
		code   fault.Code
		says   string
	}{
		{broken: &sandbox.StartError{Code: "capacity", Message: "this runner's disk has too little room"}, code: fault.Capacity, says: "too little room"},
		{broken: errors.New("secret path"), code: fault.StartFailed, says: "the runner's log"},
		{exit: sandbox.Exit{Reason: sandbox.Died}, code: fault.StartFailed, says: "the runner's log"},
	} {
		r.machine.broken = tt.broken
		r.pip = func(sandbox.Process) sandbox.Exit { return tt.exit }
		done := r.call(t, requiring)
		if done.Status != "start_failed" || done.Error.Code != string(tt.code) || !strings.Contains(done.Error.Message, tt.says) || strings.Contains(done.Error.Message, "secret") {
			t.Errorf("got %+v, %+v", done, done.Error)
		}
		done = r.ask(t, wire.ToolRequest{Op: wire.ToolDescribe, ID: "t", Content: requiring, ReplyTo: r.reply.PublicKey().Bytes()}, wire.ToolSecrets{})
		if done.Status != "start_failed" || done.Error.Code != string(tt.code) || done.HasValue { // without a word on the tool
			t.Errorf("got %+v, %+v", done, done.Error)
		}
	}
	r.machine.broken, r.pip = nil, works
	if done := r.call(t, requiring); done.Status != "ok" || r.called == "" {
		t.Errorf("got %+v, %+v", done, done.Error)
	}
	if n := r.machine.left(); n != 1 {
		t.Errorf("%d sandboxes are left", n)
	}
}

func TestAnInstallationStaysBelowTheRunnersCeilings(t *testing.T) {
	p := &Packages{Index: &url.URL{Scheme: "http", Host: "h"}}
	for _, tt := range []struct{ memory, pids, wantMemory, wantPIDs int64 }{
		{0, 0, 1024, 128}, {256, 16, 256, 16}, {65536, 32768, 1024, 128},
	} {
		p.MaxMemoryMB, p.MaxPIDs = tt.memory, tt.pids
		if got := p.spec("x", "image").Policy; got.MemoryMB != tt.wantMemory || got.PIDsLimit != tt.wantPIDs {
			t.Errorf("%+v: got %+v", tt, got)
		}
	}
}

func TestAnInstallationReachesTheIndexAndItsFilesHosts(t *testing.T) {
	p := &Packages{Index: &url.URL{Scheme: "https", Host: "index.example"}, Hosts: []string{"files.example:8443", "[fd00::1]:443"}}
	got := p.spec("x", "image")
	if want := []string{"index.example:443", "files.example:8443", "[fd00::1]:443"}; !slices.Equal(got.Policy.NetworkAllowlist, want) || len(p.plain()) > 0 {
		t.Errorf("got %+v, without TLS %q", got, p.plain())
	}
	if want := []string{"index.example", "files.example", "fd00::1"}; !slices.Equal(got.PrivateAllow, want) {
		t.Errorf("got %+v", got)
	}
	p.Index = &url.URL{Scheme: "http", Host: "[::1]"}
	if got := p.plain(); len(got) != 3 || got[0] != "[::1]" {
		t.Errorf("without TLS: %q", got)
	}
}

func TestOneWorkspaceLeavesRoomForAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Packages
		var order []string
		var mu sync.Mutex
		install := func(workspace string, takes time.Duration) {
			leave, err := p.turns.take(t.Context(), workspace)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			order = append(order, workspace)
			mu.Unlock()
			time.Sleep(takes)
			leave()
		}
		for _, workspace := range []string{"a", "a", "a", "b", "c"} {
			go install(workspace, map[string]time.Duration{"a": 10 * time.Second, "b": 11 * time.Second, "c": time.Second}[workspace])
			synctest.Wait()
		}
		time.Sleep(time.Minute)
		if got := strings.Join(order, ""); got != "abcaa" {
			t.Errorf("they went in the order %s", got)
		}
		if len(p.turns.of) != 0 {
			t.Errorf("left: %v", p.turns.of)
		}
	})
}

func TestTheWaitForATurnIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Packages
		for _, workspace := range []string{"a", "b"} {
			if _, err := p.turns.take(t.Context(), workspace); err != nil {
				t.Fatal(err)
			}
		}
		for workspace, wall := range map[string]int64{"a": 5, "c": 3600} {
			began := time.Now()
			c := &call{session: &session{workspace: workspace, start: wire.Start{Policy: wire.Policy{WallClockSeconds: wall}}}}
			_, err := p.turn(t.Context(), c)
			se, ok := errors.AsType[*sandbox.StartError](err)
			if _, passing := errors.AsType[*layer.Passing](err); !passing || !ok || se.Code != string(fault.Capacity) {
				t.Errorf("got %v", err)
			}
			if took, want := time.Since(began), min(turnTime, time.Duration(wall)*time.Second); took != want {
				t.Errorf("%s waited %v, not %v", workspace, took, want)
			}
		}
		if len(p.turns.of) != 2 {
			t.Errorf("left: %v", p.turns.of)
		}
	})
}

func TestALookThatHitsALimitEndsAsAnyCall(t *testing.T) {
	for status, tt := range map[string]struct {
		exit sandbox.Exit
		code fault.Code
		kind harness.Kind
	}{
		"timed_out":      {sandbox.Exit{Reason: sandbox.TimedOut, Duration: time.Minute}, fault.WallClock, harness.TimedOut},
		"oom_killed":     {sandbox.Exit{Reason: sandbox.Exited, Signal: "SIGKILL", OOM: true, OOMKills: 1}, fault.MemoryLimit, harness.OOMKilled},
		"pids_exhausted": {sandbox.Exit{Reason: sandbox.Exited, Code: 1, PIDsHit: true}, fault.PIDsLimit, harness.PIDsExhausted},
	} {
		t.Run(status, func(t *testing.T) {
			r := newPackagesRig(t)
			r.look = tt.exit
			done := r.call(t, requiring)
			if done.Status != status || done.Error == nil || done.Error.Code != string(tt.code) || done.Error.Limit == nil || done.OOMKills != tt.exit.OOMKills {
				t.Errorf("got %+v, %+v", done, done.Error)
			}
			done, a := r.describe(t, requiring)
			if done.Status != status || a.Error == nil || a.Error.Kind != string(tt.kind) {
				t.Errorf("described: %+v, %+v", done, a.Error)
			}
			if r.looked != 2 || r.installed > 0 || r.called != "" {
				t.Errorf("looked %d times, installed %d, called %q", r.looked, r.installed, r.called)
			}
		})
	}
}

func TestPipsReasonIsItsLastWord(t *testing.T) {
	for said, want := range map[string]string{
		"":                                "pip said nothing",
		"noise\n":                         "pip said nothing",
		"ERROR: one\nERROR: two\nnoise\n": "two",
		"ERROR: Exception:\nTraceback:\n  File\nValueError: why\n\n":   "ValueError: why",
		"ERROR: Exception:\nTraceback:\nOSError: x\n\nERROR: better\n": "better",
	} {
		if got := (&tail{kept: []byte(said)}).reason(); got != want {
			t.Errorf("%q: got %q", said, got)
		}
	}
}

func TestAPythonWithoutPipSaysSo(t *testing.T) {
	python := strings.Fields(cmp.Or(os.Getenv("BIGWAVE_TEST_PYTHON"), "python3"))
	if _, err := exec.LookPath(python[0]); err != nil {
		t.Skipf("no Python: %v", err)
	}
	c := exec.CommandContext(t.Context(), python[0], append(python[1:], "-I", "-S", "-c", installer)...) // -S: without what is not its own
	c.Env = append(os.Environ(), `BIGWAVE_INSTALL={"index":"http://127.0.0.1:1/","host":"127.0.0.1:1","plain":[],"ca":"","requirements":["lib"]}`)
	var stdout bytes.Buffer
	said := &tail{max: keptErrors}
	c.Stdout, c.Stderr = &stdout, said
	if err := c.Run(); err == nil || said.reason() != "The sandbox's Python has no pip to install packages with" || stdout.Len() > 0 {
		t.Errorf("%v: said %s, wrote %q", err, said.kept, stdout.String())
	}
}

func TestAHostileInstallationIsRefused(t *testing.T) {
	r := newPackagesRig(t)
	r.pip = func(p sandbox.Process) sandbox.Exit {
		out := tar.NewWriter(p.Stdout)
		_ = out.WriteHeader(&tar.Header{Name: "../lib.py", Typeflag: tar.TypeReg})
		_ = out.Close()
		return sandbox.Exit{Reason: sandbox.Exited}
	}
	if done := r.call(t, requiring); done.Status != "error" || r.called != "" {
		t.Errorf("got %+v; called %q", done, r.called)
	}
}

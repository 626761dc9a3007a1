package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/bigwave/bigwave/runner/internal/sandbox"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
	"github.com/bigwave/bigwave/runner/internal/sandbox/subprocess"
	"github.com/bigwave/bigwave/shared/bus"
)

const token = "bench-admin-token-0123456789abcdef"

var ids atomic.Int64

func nextID() string { return fmt.Sprintf("call_bench%d", ids.Add(1)) }

func spec(id string) sandbox.Spec {
	return sandbox.Spec{ID: id, Workspace: "default", Policy: sandbox.Policy{
		FSAllowlist: []string{"/workspace"}, CPUShares: 1024, MemoryMB: 512, PIDsLimit: 128, BaseImage: "bigwave/sandbox-base:latest",
	}}
}

// newBackend is a subprocess backend of this process's own.
func newBackend(bin string) (sandbox.Backend, func(), error) {
	dir, err := os.MkdirTemp("", "bigwave-bench-")
	if err != nil {
		return nil, nil, err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, nil, err
	}
	b, err := subprocess.New(subprocess.Config{
		Config:   box.Config{DataDir: dir, RunnerID: "bench"},
		InitPath: filepath.Join(bin, "bigwave-init"),
	})
	if err != nil {
		return nil, nil, err
	}
	return b, func() { b.Close(context.Background()); os.RemoveAll(dir) }, nil
}

// daemons is a control plane and a runner of the built binaries.
type daemons struct {
	name   string
	base   string
	data   string
	cp     *exec.Cmd
	runner *exec.Cmd
	nats   *server.Server
	http   *http.Client
}

// startDaemons returns a pair that is ready for calls; dsn "" means the
// personal tier. Of a pair that does not get there nothing is left.
func startDaemons(ctx context.Context, bin, name, dsn string) (*daemons, error) {
	data, err := os.MkdirTemp("", "bigwave-bench-")
	if err != nil {
		return nil, err
	}
	d := &daemons{name: name, data: data, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	if err := d.start(ctx, bin, dsn); err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

func (d *daemons) start(ctx context.Context, bin, dsn string) error {
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	d.base = "http://" + addr
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "BIGWAVE_DATA_DIR=" + d.data, "BIGWAVE_LOG_LEVEL=warn"}
	if dsn != "" {
		cluster, err := d.startBus()
		if err != nil {
			return err
		}
		env = append(env, "BIGWAVE_DATABASE_URL="+dsn)
		env = append(env, cluster...)
	}
	d.cp, err = d.launch(filepath.Join(bin, "bigwave-controlplane"), append(slices.Clip(env), "BIGWAVE_LISTEN="+addr, "BIGWAVE_ADMIN_TOKEN="+token))
	if err != nil {
		return err
	}
	if err := d.until("the control plane is ready", d.ready); err != nil {
		return err
	}
	d.runner, err = d.launch(filepath.Join(bin, "bigwave-runner"), append(slices.Clip(env), "BIGWAVE_RUNNER_ID=bench", "BIGWAVE_SLOTS=400"))
	if err != nil {
		return err
	}
	return d.until("the runner is ready", func() bool {
		var out struct {
			Items []struct{ State string }
		}
		return d.do(ctx, "GET", "/admin/runners", "", &out) == nil && len(out.Items) > 0 && out.Items[0].State == "ready"
	})
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// startBus starts a NATS server and returns the settings that lead to it.
func (d *daemons) startBus() ([]string, error) {
	const user, password = "bench", "bench-password"
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: filepath.Join(d.data, "nats-server"),
		NoSigs: true, NoLog: true, Username: user, Password: password,
	})
	if err != nil {
		return nil, err
	}
	d.nats = srv
	srv.Start() // returns once it runs
	if !srv.ReadyForConnections(10 * time.Second) {
		return nil, errors.New("the NATS server is not ready")
	}
	access := filepath.Join(d.data, "access.json")
	if err := bus.WriteAccess(access, bus.Access{URL: srv.ClientURL(), User: user, Password: password}); err != nil {
		return nil, err
	}
	return []string{"BIGWAVE_NATS_URL=" + srv.ClientURL(), "BIGWAVE_NATS_ACCESS_FILE=" + access}, nil
}

// launch starts a daemon that logs beside its data.
func (d *daemons) launch(program string, env []string) (*exec.Cmd, error) {
	log, err := os.Create(filepath.Join(d.data, filepath.Base(program)+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(program)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, cmd.Start()
}

func (d *daemons) ready() bool {
	resp, err := d.http.Get(d.base + "/readyz")
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (d *daemons) stop() {
	for _, cmd := range []*exec.Cmd{d.runner, d.cp} {
		if cmd != nil && cmd.Process != nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		}
	}
	if d.nats != nil {
		d.nats.Shutdown()
	}
	os.RemoveAll(d.data)
}

func (d *daemons) until(what string, ok func() bool) error {
	for range 300 {
		if ok() {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	cp, _ := os.ReadFile(filepath.Join(d.data, "bigwave-controlplane.log"))
	r, _ := os.ReadFile(filepath.Join(d.data, "bigwave-runner.log"))
	return fmt.Errorf("%s: not within 30 s\n%s\n%s", what, cp, r)
}

func (d *daemons) do(ctx context.Context, method, path, body string, out any) error {
	var r io.Reader
	if body != "" {
		r = bytes.NewReader([]byte(body))
	}
	req, err := http.NewRequestWithContext(ctx, method, d.base+path, r)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, data)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

// sessions opens n sessions; their sandboxes start with their first calls.
func (d *daemons) sessions(ctx context.Context, n int) ([]string, error) {
	var out []string
	for range n {
		var s struct{ ID string }
		if err := d.do(ctx, "POST", "/v1/agent-sessions", "{}", &s); err != nil {
			return nil, err
		}
		out = append(out, s.ID)
	}
	return out, nil
}

func (d *daemons) closeSessions(ctx context.Context, ids []string) {
	for _, id := range ids {
		_ = d.do(ctx, "DELETE", "/v1/agent-sessions/"+id, "", nil)
	}
}

// call runs one call to its end and checks that it went well.
func (d *daemons) call(ctx context.Context, session string, what work) error {
	var run struct {
		Calls []struct {
			Status string
			Error  any
		}
	}
	err := d.do(ctx, "POST", "/v1/agent-sessions/"+session+"/run",
		fmt.Sprintf(`{"tool_calls":[{"id":"c","name":%q,"arguments":%s}]}`, what.tool, what.args), &run)
	if err == nil && (len(run.Calls) != 1 || run.Calls[0].Status != "ok") {
		err = fmt.Errorf("%s ended as %+v", what.tool, run.Calls)
	}
	return err
}

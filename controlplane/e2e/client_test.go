package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// client speaks to the API as a user would.
type client struct {
	t     *testing.T
	base  string
	token string
}

// as is the same client with another bearer.
func (c *client) as(token string) *client { return &client{t: c.t, base: c.base, token: token} }

// on is the same client for a subtest.
func (c *client) on(t *testing.T) *client { return &client{t: t, base: c.base, token: c.token} }

// answer is one HTTP answer.
type answer struct {
	t      *testing.T
	status int
	header http.Header
	body   []byte
	object
}

// object is a JSON object with forgiving accessors.
type object map[string]any

func (o object) str(key string) string {
	s, _ := o[key].(string)
	return s
}

func (o object) num(key string) float64 {
	f, _ := o[key].(float64)
	return f
}

func (o object) obj(key string) object {
	m, _ := o[key].(map[string]any)
	return m
}

func (o object) list(key string) []object {
	var out []object
	l, _ := o[key].([]any)
	for _, e := range l {
		if m, ok := e.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

// send sends one request; body is sent as it is when it is a string or bytes,
// else as JSON.
func (c *client) send(ctx context.Context, method, path string, body any, header ...string) (answer, error) {
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	case []byte:
		r = bytes.NewReader(b)
	default:
		data, err := json.Marshal(b)
		if err != nil {
			return answer{}, err
		}
		r = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, r)
	if err != nil {
		return answer{}, err
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{t: c.t, status: resp.StatusCode, header: resp.Header, body: data}
	if err := json.Unmarshal(data, &a.object); err != nil {
		a.object = object{}
	}
	return a, nil
}

func (c *client) do(method, path string, body any, header ...string) answer {
	c.t.Helper()
	a, err := c.send(context.Background(), method, path, body, header...)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

func (c *client) get(path string) answer            { c.t.Helper(); return c.do("GET", path, nil) }
func (c *client) post(path string, body any) answer { c.t.Helper(); return c.do("POST", path, body) }
func (c *client) put(path string, body any) answer  { c.t.Helper(); return c.do("PUT", path, body) }
func (c *client) delete(path string) answer         { c.t.Helper(); return c.do("DELETE", path, nil) }

// want fails the test unless the answer has that status.
func (a answer) want(status int) answer {
	a.t.Helper()
	if a.status != status {
		a.t.Fatalf("got %d, want %d: %.2000s", a.status, status, a.body)
	}
	return a
}

// session opens a session.
func (c *client) session() string {
	c.t.Helper()
	id := c.post("/v1/agent-sessions", object{}).want(http.StatusCreated).str("id")
	c.t.Cleanup(func() { c.as(c.token).deleteQuietly("/v1/agent-sessions/" + id) })
	return id
}

func (c *client) deleteQuietly(path string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, _ = c.send(ctx, "DELETE", path, nil)
}

// policy is the default sandbox policy with changes.
func policy(changes object) object {
	p := object{
		"workspace_id": "default", "fs_allowlist": []string{"/workspace"}, "network_allowlist": []string{},
		"cpu_shares": 1024, "memory_mb": 512, "pids_limit": 128, "wall_clock_seconds": 30,
		"output_bytes_limit": 1 << 20, "base_image": "bigwave/sandbox-base:latest",
	}
	for k, v := range changes {
		p[k] = v
	}
	return p
}

// setPolicy puts the default policy with changes.
func (c *client) setPolicy(changes object) {
	c.t.Helper()
	c.put("/admin/sandbox/policy", policy(changes)).want(http.StatusOK)
}

// tool registers a shell template.
func (c *client) tool(name, command string, params ...string) {
	c.t.Helper()
	props := object{}
	for _, p := range params {
		props[p] = object{"type": "string"}
	}
	c.put("/admin/workspace-tools/"+name, object{
		"name": name, "parameters": object{"type": "object", "properties": props, "required": params},
		"handler_kind": "shell_template", "handler_payload": object{"command": command},
	}).want(http.StatusOK)
}

// call runs one call in a session and returns it, final.
func (c *client) call(session, name string, args any) object {
	c.t.Helper()
	run := c.run(session, object{"id": "c1", "name": name, "arguments": args})
	return run.list("calls")[0]
}

// run runs calls in a session, one after the other, and returns the finished run.
func (c *client) run(session string, calls ...object) object {
	c.t.Helper()
	return c.post("/v1/agent-sessions/"+session+"/run?wait=120", object{"tool_calls": calls}).want(http.StatusOK).object
}

// sh runs a shell command.
func (c *client) sh(session, command string) object {
	c.t.Helper()
	return c.call(session, "shell_exec", object{"command": command})
}

// py runs Python code.
func (c *client) py(session, code string) object {
	c.t.Helper()
	return c.call(session, "python_exec", object{"code": code})
}

// begin starts a run of one shell command without waiting for it.
func (c *client) begin(session, command string) string {
	c.t.Helper()
	a := c.post("/v1/agent-sessions/"+session+"/run?wait=0", object{"tool_calls": []object{
		{"id": "c1", "name": "shell_exec", "arguments": object{"command": command}}}})
	if a.status != http.StatusAccepted && a.status != http.StatusOK {
		c.t.Fatalf("got %d: %s", a.status, a.body)
	}
	return a.str("id")
}

// final waits until a run is final.
func (c *client) final(session, run string, within time.Duration) object {
	c.t.Helper()
	var last object
	eventually(c.t, within, "run "+run+" is final", func() error {
		a, err := c.send(context.Background(), "GET", "/v1/agent-sessions/"+session+"/runs/"+run, nil)
		if err != nil {
			return err
		}
		last = a.object
		switch last.str("status") {
		case "finished", "failed", "cancelled", "budget_exceeded":
			return nil
		}
		return fmt.Errorf("it is %q: %.500s", last.str("status"), a.body)
	})
	return last
}

// wantStatus fails the test unless the call ended so.
func wantStatus(t *testing.T, call object, status string) {
	t.Helper()
	if call.str("status") != status {
		data, _ := json.Marshal(call)
		t.Fatalf("got %q, want %q: %.2000s", call.str("status"), status, data)
	}
}

// event is one server-sent event.
type event struct {
	id, name string
	data     object
}

// stream opens an event stream and calls each until it returns false or the
// stream ends.
func (c *client) stream(ctx context.Context, method, path string, body any, lastID string, each func(event) bool) error {
	var r io.Reader
	if body != nil {
		data, _ := json.Marshal(body)
		r = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, r)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Accept", "text/event-stream")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		data, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("got %d: %s", resp.StatusCode, data)
	}
	in := bufio.NewReaderSize(resp.Body, 1<<20)
	var e event
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "":
			if e.name != "" && !each(e) {
				return nil
			}
			e = event{}
		case strings.HasPrefix(line, "id: "):
			e.id = line[4:]
		case strings.HasPrefix(line, "event: "):
			e.name = line[7:]
		case strings.HasPrefix(line, "data: "):
			if err := json.Unmarshal([]byte(line[6:]), &e.data); err != nil {
				return fmt.Errorf("event %q: %w", line, err)
			}
		}
	}
}

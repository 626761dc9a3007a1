package httpapi_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/httpapi"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
)

// sse is one event as a client reads it.
type sse struct {
	id, name string
	data     map[string]any
}

func request(ctx context.Context, t *testing.T, a *api, method, path, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body == "" {
		req.Body, req.ContentLength = http.NoBody, 0
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	req.Header.Set("Content-Type", "application/json")
	return req
}

// stream sends a request and yields the events that come back, with the
// comments as events named ":".
func stream(t *testing.T, a *api, method, path, body, last string) iter.Seq[sse] {
	t.Helper()
	return streamAs(t, a, adminToken, method, path, body, last)
}

func streamAs(t *testing.T, a *api, token, method, path, body, last string) iter.Seq[sse] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	req := request(ctx, t, a, method, path, body)
	req.Header.Set("Authorization", "Bearer "+token)
	if last != "" {
		req.Header.Set("Last-Event-ID", last)
	}
	res, err := a.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" || res.Header.Get("X-Accel-Buffering") != "no" {
		b, _ := io.ReadAll(res.Body)
		t.Fatalf("got %d %v %s", res.StatusCode, res.Header, b)
	}
	return func(yield func(sse) bool) {
		defer cancel()
		defer res.Body.Close()
		r := bufio.NewReader(res.Body)
		var e sse
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("the stream broke: %v", err)
				}
				return
			}
			line = strings.TrimSuffix(line, "\n")
			key, value, _ := strings.Cut(line, ": ")
			switch {
			case line == "":
				if e.name != "" && !yield(e) {
					return
				}
				e = sse{}
			case key == "":
				e.name = ":"
			case key == "id":
				e.id = value
			case key == "event":
				e.name = value
			case key == "data":
				if err := json.Unmarshal([]byte(value), &e.data); err != nil {
					t.Errorf("%v in %q", err, value)
				}
			}
		}
	}
}

func names(events []sse) string {
	var out []string
	for _, e := range events {
		out = append(out, e.name)
	}
	return strings.Join(out, " ")
}

func collect(events iter.Seq[sse]) (out []sse) {
	for e := range events {
		out = append(out, e)
	}
	return out
}

// outputs joins the text of one stream of one call.
func outputs(events []sse, call, stream string) (string, []byte) {
	var text strings.Builder
	var exact []byte
	for _, e := range events {
		if e.name != "call.output" || e.data["call_id"] != call || e.data["stream"] != stream {
			continue
		}
		s := e.data["text"].(string)
		text.WriteString(s)
		if b, ok := e.data["base64"].(string); ok {
			raw, _ := base64.StdEncoding.DecodeString(b)
			exact = append(exact, raw...)
		} else {
			exact = append(exact, s...)
		}
	}
	return text.String(), exact
}

const twoCalls = `{"stream":true,"tool_calls":[{"id":"c1","name":"x","arguments":{}},{"id":"c2","name":"y","arguments":{}}]}`

func TestARunStreams(t *testing.T) {
	a := newAPI(t)
	ses := a.session(adminToken)
	got := collect(stream(t, a, "POST", "/v1/agent-sessions/"+ses+"/run", twoCalls, ""))
	const want = "run.started call.started call.output call.finished call.started call.output call.finished run.finished"
	if names(got) != want {
		t.Fatalf("got %s", names(got))
	}
	ids := map[string]bool{}
	for _, e := range got {
		if e.id == "" || ids[e.id] {
			t.Errorf("%s has the id %q", e.name, e.id)
		}
		ids[e.id] = true
	}
	started, _ := got[0].data["run"].(map[string]any)
	if started["status"] != "running" || started["finished_at"] != nil {
		t.Errorf("run.started: %v", started)
	}
	if got[1].data["call_id"] != "c1" || got[1].data["name"] != "x" || got[5].data["call_id"] != "c2" || got[5].data["stream"] != "stdout" {
		t.Errorf("got %v", got)
	}
	if c, _ := got[3].data["call"].(map[string]any); c["status"] != "ok" || c["id"] != "c1" || c["exit_code"] != 0.0 {
		t.Errorf("call.finished: %v", got[3].data)
	}
	finished, _ := got[7].data["run"].(map[string]any)
	if finished["status"] != "finished" {
		t.Errorf("run.finished: %v", finished)
	}

	// The same again by Accept, by GET, and from every point in the middle.
	path := "/v1/agent-sessions/" + ses + "/runs/" + finished["id"].(string) + "/events"
	if again := collect(stream(t, a, "GET", path, "", "")); fmt.Sprint(again) != fmt.Sprint(got) {
		t.Errorf("replayed %v, want %v", again, got)
	}
	for i, e := range got[:len(got)-1] {
		if rest := collect(stream(t, a, "GET", path, "", e.id)); fmt.Sprint(rest) != fmt.Sprint(got[i+1:]) {
			t.Errorf("resumed after %s: %v", e.id, names(rest))
		}
	}
	a.admin("GET", path, "", func(r *http.Request) { r.Header.Set("Last-Event-ID", got[7].id) }).want(204)
	for _, bad := range []string{"x", "-1", "1~", "1~0.stdout", "1~0.stdin.ff", "1~999.stdout.ff", "1~0.stdout.ffffffff", "1~0.stdout.zz", "99999999999999999999"} {
		res := a.admin("GET", path, "", func(r *http.Request) { r.Header.Set("Last-Event-ID", bad) })
		if bad != "1~" {
			res.problem(400, "invalid", "Last-Event-ID")
		}
	}
	plain := strings.Replace(twoCalls, `"stream":true,`, "", 1)
	for accept, want := range map[string]string{"text/event-stream": "text/event-stream", "application/json, text/event-stream;q=0.5": "text/event-stream", "text/event-stream;q=0": "application/json", "*/*": "application/json"} {
		res := a.admin("POST", "/v1/agent-sessions/"+ses+"/run", plain, func(r *http.Request) { r.Header.Set("Accept", accept) }).want(200)
		if got := res.header.Get("Content-Type"); got != want {
			t.Errorf("Accept %q: got %q", accept, got)
		}
	}
}

func TestRunesSplitBetweenFrames(t *testing.T) {
	a := newAPI(t)
	const out, errs = "aé💩日b", "ü\xff日\xe6\x97"
	a.runs.script = func(_ context.Context, id string) {
		a.runs.emit(id, httpapi.Event{Kind: "run.started"})
		for i := range max(len(out), len(errs)) { // byte by byte, both streams in turn
			if i < len(out) {
				a.runs.output(id, 0, "stdout", out[i:i+1])
			}
			if i < len(errs) {
				a.runs.output(id, 0, "stderr", errs[i:i+1])
			}
		}
		a.runs.end(id, 0, run.OK, run.Result{})
		a.runs.end(id, 1, run.OK, run.Result{})
		a.runs.finish(id)
	}
	ses := a.session(adminToken)
	got := collect(stream(t, a, "POST", "/v1/agent-sessions/"+ses+"/run", twoCalls, ""))
	if text, _ := outputs(got, "c1", "stdout"); text != out {
		t.Errorf("stdout is %q", text)
	}
	if text, exact := outputs(got, "c1", "stderr"); text != "ü\ufffd日\ufffd\ufffd" || string(exact) != errs {
		t.Errorf("stderr is %q, exactly %q", text, exact)
	}
	// Wherever a client was cut off, what it has and what it gets are the whole.
	runID := got[len(got)-1].data["run"].(map[string]any)["id"].(string)
	for i := range len(got) - 1 {
		rest := collect(stream(t, a, "GET", "/v1/agent-sessions/"+ses+"/runs/"+runID+"/events", "", got[i].id))
		whole := append(append([]sse(nil), got[:i+1]...), rest...)
		if text, _ := outputs(whole, "c1", "stdout"); text != out {
			t.Errorf("resumed after %s: %q", got[i].id, text)
		}
		if _, exact := outputs(whole, "c1", "stderr"); string(exact) != errs {
			t.Errorf("resumed after %s: %q", got[i].id, exact)
		}
	}
}

func TestStreamsWithoutTheirLastEvents(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.Idle = 50 * time.Millisecond })
	a.runs.script = func(_ context.Context, id string) {
		a.runs.emit(id, httpapi.Event{Kind: "call.started", Call: a.runs.get(id).Calls[0].ID})
		time.Sleep(150 * time.Millisecond)
		for i := range 2 {
			a.runs.change(id, func(r *run.Run) { r.Calls[i].Status = run.OK })
		}
		a.runs.settle(id)
	}
	got := collect(stream(t, a, "POST", "/v1/agent-sessions/"+a.session(adminToken)+"/run", twoCalls, ""))
	if names(got) != "run.started call.started call.finished call.finished run.finished" {
		t.Errorf("got %s", names(got))
	}
}

func TestEventsThatAreNoLongerKept(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.Idle = 100 * time.Millisecond })
	ses := a.session(adminToken)
	id := a.admin("POST", "/v1/agent-sessions/"+ses+"/run", oneCall).want(200).str("id")
	a.runs.mu.Lock()
	a.runs.kept = a.runs.seq
	a.runs.mu.Unlock()
	path := "/v1/agent-sessions/" + ses + "/runs/" + id + "/events"
	a.admin("GET", path, "").problem(410, "gone", "")
	a.admin("GET", path, "", func(r *http.Request) { r.Header.Set("Last-Event-ID", "101") }).problem(410, "gone", "")
	a.admin("GET", "/v1/agent-sessions/"+ses+"/runs/"+id, "").want(200)
}

func TestAQuietStreamIsKeptOpenWhileItsKeyHolds(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.Heartbeat = 50 * time.Millisecond })
	a.runs.script = func(ctx context.Context, _ string) { <-ctx.Done() }
	token, user := a.tenant("a", identity.Member)
	beats := 0
	var last sse
	for e := range streamAs(t, a, token, "POST", "/v1/agent-sessions/"+a.session(token)+"/run", twoCalls, "") {
		if last = e; e.name == ":" {
			if beats++; beats == 3 {
				a.admin("PATCH", "/admin/users/"+user, `{"disabled":true}`).want(200)
			}
		}
	}
	if beats < 3 || last.name != "error" || last.data["status"] != 401.0 {
		t.Errorf("after %d beats: %v", beats, last)
	}
}

func TestAFailureEndsTheStreamWithAnEvent(t *testing.T) {
	for name, source := range map[string]iter.Seq2[httpapi.Event, error]{
		"panic": func(func(httpapi.Event, error) bool) { panic("kaboom hunter2") },
		"error": func(yield func(httpapi.Event, error) bool) {
			yield(httpapi.Event{}, fault.Wrap(errors.New("nats: kaboom hunter2"), fault.Unavailable, "the bus is not reachable"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t, func(s *httpapi.Server) {
				s.Events = func(context.Context, string, string, uint64) iter.Seq2[httpapi.Event, error] { return source }
			})
			a.runs.script = func(ctx context.Context, _ string) { <-ctx.Done() }
			got := collect(stream(t, a, "POST", "/v1/agent-sessions/"+a.session(adminToken)+"/run", twoCalls, ""))
			last := got[len(got)-1]
			if last.name != "error" || last.data["request_id"] == "" || strings.Contains(fmt.Sprint(last.data), "hunter2") {
				t.Errorf("got %v", got)
			}
			if !strings.Contains(a.log.String(), "kaboom") {
				t.Error("the log does not say why")
			}
			a.admin("GET", "/v1/tools", "").want(200)
		})
	}
}

func TestAHandlerThatPanicsEndsItsStreamWithAnEvent(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.Idle = 50 * time.Millisecond; s.Runs = panicRuns{s.Runs} })
	a.runs.script = func(ctx context.Context, _ string) { <-ctx.Done() }
	got := collect(stream(t, a, "POST", "/v1/agent-sessions/"+a.session(adminToken)+"/run", twoCalls, ""))
	if len(got) != 1 || got[0].name != "error" || got[0].data["status"] != 500.0 {
		t.Errorf("got %v", got)
	}
	a.admin("GET", "/v1/tools", "").want(200)
}

type panicRuns struct{ httpapi.Runs }

func (panicRuns) Get(context.Context, identity.Principal, string, string) (run.Run, error) {
	panic("kaboom hunter2")
}

func TestAStuckReaderIsDroppedAndSlowsNobody(t *testing.T) {
	a := newAPI(t, func(s *httpapi.Server) { s.WriteTimeout = 3 * time.Second })
	begin := make(chan struct{})
	piece := strings.Repeat("x", 64<<10)
	const pieces = 160
	a.runs.script = func(ctx context.Context, id string) {
		<-begin
		for range pieces {
			a.runs.output(id, 0, "stdout", piece)
		}
		a.runs.end(id, 0, run.OK, run.Result{})
		a.runs.end(id, 1, run.OK, run.Result{})
		a.runs.finish(id)
	}
	ses := a.session(adminToken)
	id := a.admin("POST", "/v1/agent-sessions/"+ses+"/run?wait=0", strings.Replace(twoCalls, `"stream":true,`, "", 1)).want(202).str("id")
	path := "/v1/agent-sessions/" + ses + "/runs/" + id + "/events"

	conn, err := net.Dial("tcp", strings.TrimPrefix(a.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", path, adminToken)
	reader := stream(t, a, "GET", path, "", "")
	close(begin)
	began := time.Now()
	text, _ := outputs(collect(reader), "c1", "stdout")
	if len(text) != pieces*len(piece) {
		t.Errorf("the reader beside it got %d bytes", len(text))
	}
	t.Logf("%d MiB in %v", len(text)>>20, time.Since(began))
	deadline := time.Now().Add(20 * time.Second)
	for strings.Count(a.log.String(), "/events status=200") < 2 {
		if time.Now().After(deadline) {
			t.Fatal("the stuck reader is still there")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestStreamsLeaveNothingBehind(t *testing.T) {
	a := newAPI(t)
	a.runs.script = func(ctx context.Context, _ string) { <-ctx.Done() }
	ses := a.session(adminToken)
	id := a.admin("POST", "/v1/agent-sessions/"+ses+"/run?wait=0", oneCall).want(202).str("id")
	before := runtime.NumGoroutine()
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		res, err := a.client.Do(request(ctx, t, a, "GET", "/v1/agent-sessions/"+ses+"/runs/"+id+"/events", ""))
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		res.Body.Close()
	}
	deadline := time.Now().Add(5 * time.Second)
	for runtime.NumGoroutine() > before+4 {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

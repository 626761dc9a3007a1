package httpapi_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
)

const oneCall = `{"tool_calls":[{"id":"c1","name":"shell_exec","arguments":{"command":"true"}}]}`

func TestRunIsAnsweredWhenItIsOver(t *testing.T) {
	a := newAPI(t)
	ses := a.session(adminToken)
	path := "/v1/agent-sessions/" + ses + "/run"
	got := a.admin("POST", path, `{"tool_calls":[{"id":"c1","name":"x","arguments":{"n":9007199254740993,"f":1.0}},{"id":"c2","name":"y","arguments":"{\"a\": 1}"}],"parallel":true}`).want(200)
	var r struct {
		ID, Status string
		SessionID  string `json:"session_id"`
		Calls      []map[string]json.RawMessage
	}
	if err := json.Unmarshal(got.body, &r); err != nil || r.Status != "finished" || r.SessionID != ses || len(r.Calls) != 2 {
		t.Fatalf("got %s, %v", got.body, err)
	}
	if args := string(r.Calls[0]["arguments"]); args != `{"n":9007199254740993,"f":1.0}` {
		t.Errorf("arguments came back as %s", args)
	}
	if args := string(r.Calls[1]["arguments"]); args != `{"a":1}` {
		t.Errorf("arguments came back as %s", args)
	}
	if !a.runs.get(r.ID).Parallel {
		t.Error("parallel was lost")
	}
	a.admin("GET", "/v1/agent-sessions/"+ses+"/runs/"+r.ID, "").want(200)
	listed := a.admin("GET", "/v1/agent-sessions/"+ses+"/runs", "").want(200)
	if strings.Contains(string(listed.body), `"stdout":`) || !strings.Contains(string(listed.body), `"stdout_bytes":`) {
		t.Errorf("a list holds what calls printed: %s", clip(listed.body))
	}
	if again := a.admin("POST", "/v1/agent-sessions/"+ses+"/runs/"+r.ID+"/cancel", "").want(200); again.str("status") != "finished" {
		t.Errorf("got %s", again.body)
	}
}

func TestRunsThatTakeLonger(t *testing.T) {
	a := newAPI(t)
	a.runs.script = func(ctx context.Context, _ string) { <-ctx.Done() }
	ses := a.session(adminToken)
	path := "/v1/agent-sessions/" + ses + "/run"
	began := time.Now()
	got := a.admin("POST", path+"?wait=0.2", oneCall).want(202)
	if took := time.Since(began); took < 150*time.Millisecond || took > 3*time.Second {
		t.Errorf("waited %v", took)
	}
	id := got.str("id")
	if got.header.Get("Location") != "/v1/agent-sessions/"+ses+"/runs/"+id || got.str("status") != "running" {
		t.Errorf("got %v %s", got.header, got.body)
	}
	a.admin("POST", path+"?wait=0", oneCall).want(202)
	for _, q := range []string{"-1", "x", "3601", "NaN", "Inf", "1&wait=2"} {
		a.admin("POST", path+"?wait="+q, oneCall).problem(400, "invalid", "wait")
	}
	if n := len(a.runs.runs); n != 2 {
		t.Errorf("%d runs were started, want 2", n)
	}
	cancelled := a.admin("POST", "/v1/agent-sessions/"+ses+"/runs/"+id+"/cancel", "").want(200)
	if cancelled.str("status") != "cancelled" {
		t.Errorf("got %s", cancelled.body)
	}

	// A client that goes away cancels nothing.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	a.runs.script = func(ctx context.Context, id string) {
		time.Sleep(300 * time.Millisecond)
		if ctx.Err() == nil {
			a.runs.play(id)
		}
	}
	other := a.session(adminToken)
	req := request(ctx, t, a, "POST", "/v1/agent-sessions/"+other+"/run", oneCall)
	if _, err := a.client.Do(req); err == nil {
		t.Fatal("the client should have given up")
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		items := a.admin("GET", "/v1/agent-sessions/"+other+"/runs", "").want(200).object()["items"].([]any)
		if len(items) == 1 && items[0].(map[string]any)["status"] == "finished" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("got %v", items)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestNoArgumentsMayBeAnEmptyString(t *testing.T) {
	a := newAPI(t)
	path := "/v1/agent-sessions/" + a.session(adminToken) + "/run"
	got := a.admin("POST", path, `{"tool_calls":[{"id":"a","name":"now","arguments":""}]}`).want(200).object()
	if args := got["calls"].([]any)[0].(map[string]any)["arguments"]; fmt.Sprint(args) != "map[]" {
		t.Errorf("got %v", args)
	}
}

func TestRunRequestsAreChecked(t *testing.T) {
	a := newAPI(t)
	path := "/v1/agent-sessions/" + a.session(adminToken) + "/run"
	call := func(id, name, args string) string {
		return fmt.Sprintf(`{"id":%s,"name":%s,"arguments":%s}`, id, name, args)
	}
	calls := func(c ...string) string { return `{"tool_calls":[` + strings.Join(c, ",") + `]}` }
	many := make([]string, 129)
	for i := range many {
		many[i] = call(fmt.Sprintf(`"c%d"`, i), `"x"`, "{}")
	}
	long := `"` + strings.Repeat("x", 129) + `"`
	for name, tc := range map[string]struct{ body, field string }{
		"none":              {`{}`, "tool_calls"},
		"null":              {`{"tool_calls":null}`, "tool_calls"},
		"empty":             {calls(), "tool_calls"},
		"too many":          {calls(many...), "tool_calls"},
		"null call":         {calls("null"), "tool_calls[0]"},
		"not an object":     {calls("1"), "tool_calls[0]"},
		"no id":             {`{"tool_calls":[{"name":"x","arguments":{}}]}`, "tool_calls[0].id"},
		"no name":           {`{"tool_calls":[{"id":"x","arguments":{}}]}`, "tool_calls[0].name"},
		"no arguments":      {`{"tool_calls":[{"id":"x","name":"x"}]}`, "tool_calls[0].arguments"},
		"empty id":          {calls(call(`""`, `"x"`, "{}")), "tool_calls[0].id"},
		"null id":           {calls(call(`null`, `"x"`, "{}")), "tool_calls[0].id"},
		"number id":         {calls(call(`1`, `"x"`, "{}")), "tool_calls[0].id"},
		"long id":           {calls(call(long, `"x"`, "{}")), "tool_calls[0].id"},
		"control id":        {calls(call(`"a\u0000"`, `"x"`, "{}")), "tool_calls[0].id"},
		"same id":           {calls(call(`"a"`, `"x"`, "{}"), call(`"b"`, `"x"`, "{}"), call(`"a"`, `"x"`, "{}")), "tool_calls[2].id"},
		"long name":         {calls(call(`"a"`, long, "{}")), "tool_calls[0].name"},
		"list arguments":    {calls(call(`"a"`, `"x"`, "[]")), "tool_calls[0].arguments"},
		"null arguments":    {calls(call(`"a"`, `"x"`, "null")), "tool_calls[0].arguments"},
		"bad string":        {calls(call(`"a"`, `"x"`, `"{"`)), "tool_calls[0].arguments"},
		"list in a string":  {calls(call(`"a"`, `"x"`, `"[]"`)), "tool_calls[0].arguments"},
		"twice in a string": {calls(call(`"a"`, `"x"`, `"{\"a\":1,\"a\":2}"`)), "tool_calls[0].arguments"},
		"twice inside":      {calls(call(`"a"`, `"x"`, `{"a":{"b":1,"b":2}}`)), "tool_calls[0].arguments.a.b"},
		"unknown member":    {calls(`{"id":"a","name":"x","arguments":{},"type":"function"}`), "tool_calls[0].type"},
		"a later feature":   {`{"messages":[],"model":"m"}`, "messages"},
		"parallel":          {`{"tool_calls":[` + call(`"a"`, `"x"`, "{}") + `],"parallel":"yes"}`, "parallel"},
	} {
		t.Run(name, func(t *testing.T) {
			a := a.in(t)
			a.admin("POST", path, tc.body).problem(400, "invalid", tc.field)
		})
	}
	if n := len(a.runs.runs); n != 0 {
		t.Errorf("%d runs were started", n)
	}
	a.runs.err = fault.New(fault.Busy, "the session has 8 open runs").WithCode("session_busy")
	res := a.admin("POST", path, oneCall)
	res.problem(429, "session_busy", "")
	if res.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
}

// result runs one call that ends as given and returns the call's JSON.
func result(t *testing.T, a *api, status run.CallStatus, r run.Result) map[string]any {
	t.Helper()
	a.runs.script = func(_ context.Context, id string) {
		a.runs.end(id, 0, status, r)
		a.runs.finish(id)
	}
	got := a.admin("POST", "/v1/agent-sessions/"+a.session(adminToken)+"/run", oneCall).want(200)
	calls, _ := got.object()["calls"].([]any)
	if len(calls) != 1 {
		t.Fatalf("got %s", clip(got.body))
	}
	return calls[0].(map[string]any)
}

func TestResultsCarryEveryByte(t *testing.T) {
	a := newAPI(t)
	random := make([]byte, 1<<20)
	rng := rand.NewChaCha8([32]byte{7})
	_, _ = rng.Read(random)
	for name, tc := range map[string]struct {
		out   string
		text  string // empty: not checked
		lossy bool
	}{
		"text":     {"plain ü 💩\n", "plain ü 💩\n", false},
		"empty":    {"", "", false},
		"nul":      {"a\x00b", "a\x00b", false},
		"terminal": {"\x1b[2J\r\x1b]52;c;eA==\a\u202e\u2028", "\x1b[2J\r\x1b]52;c;eA==\a\u202e\u2028", false},
		"invalid":  {"a\xff\xfeb", "a\ufffd\ufffdb", true},
		"overlong": {"\xc0\xaf", "\ufffd\ufffd", true},
		"utf-16":   {"\xff\xfea\x00", "\ufffd\ufffda\x00", true},
		"cut rune": {"é\xc3", "é\ufffd", true},
		"random":   {string(random), "", true},
		"forged":   {strings.Repeat(`{"status":"ok"}`+"\n\ndata: x\n", 30_000), "", false},
	} {
		t.Run(name, func(t *testing.T) {
			a := a.in(t)
			got := result(t, a, run.OK, run.Result{Stdout: []byte(tc.out), Stderr: []byte(tc.out), StdoutBytes: int64(len(tc.out))})
			for _, stream := range []string{"stdout", "stderr"} {
				s := got[stream].(string)
				if !utf8.ValidString(s) || (tc.text != "" && s != tc.text) || (!tc.lossy && s != tc.out) {
					t.Errorf("%s is %.80q", stream, s)
				}
				exact, has := got[stream+"_base64"].(string)
				if has != tc.lossy || got["lossy"] != tc.lossy {
					t.Errorf("%s: lossy is %v, base64 is there: %v", stream, got["lossy"], has)
				}
				if b, err := base64.StdEncoding.DecodeString(exact); has && (err != nil || string(b) != tc.out) {
					t.Errorf("%s: the exact bytes are wrong", stream)
				}
			}
		})
	}
}

func TestWhatFileReadReturns(t *testing.T) {
	a := newAPI(t)
	for name, tc := range map[string]struct {
		r        run.Result
		want     any
		encoding any
	}{
		"text":     {run.Result{HasValue: true, Value: []byte("ü\n")}, "ü\n", nil},
		"empty":    {run.Result{HasValue: true}, "", nil},
		"none":     {run.Result{}, nil, nil},
		"asked":    {run.Result{HasValue: true, Value: []byte("abc"), Encoding: "base64"}, "YWJj", "base64"},
		"not text": {run.Result{HasValue: true, Value: []byte{0xff}}, "/w==", "base64"},
	} {
		t.Run(name, func(t *testing.T) {
			a := a.in(t)
			got := result(t, a, run.OK, tc.r)
			if got["result"] != tc.want || got["encoding"] != tc.encoding {
				t.Errorf("got %v, %v", got["result"], got["encoding"])
			}
		})
	}
}

func TestEveryFailureSaysWhatToDo(t *testing.T) {
	a := newAPI(t)
	limit, observed := int64(2), int64(3)
	for code, advice := range fault.Codes {
		got := result(t, a, run.Error, run.Result{
			Error:   &run.Failure{Code: string(code), Message: "m", Field: "f", Limit: &limit, Observed: &observed},
			Denials: []run.Denial{{Kind: "file", Target: "/etc", Reason: "r"}},
		})
		e := got["error"].(map[string]any)
		if e["remedy"] != advice.Remedy || e["remedy"] == "" || e["limit"] != 2.0 || e["observed"] != 3.0 || e["field"] != "f" || got["retryable"] != advice.Retryable {
			t.Errorf("%s: got %v, retryable %v", code, e, got["retryable"])
		}
	}
	ok := result(t, a, run.OK, run.Result{})
	for _, name := range []string{"error", "exit_code", "signal", "result"} {
		if v, there := ok[name]; !there || v != nil {
			t.Errorf("%s is %v", name, v)
		}
	}
	if fmt.Sprint(ok["denials"], ok["enforced"]) != "[] map[]" {
		t.Errorf("got %v, %v", ok["denials"], ok["enforced"])
	}
}

func TestOpenCallsHaveNoResult(t *testing.T) {
	a := newAPI(t)
	for _, status := range []run.CallStatus{run.Pending, run.Sent, run.Accepted, run.Started} {
		a.runs.script = func(ctx context.Context, id string) {
			a.runs.change(id, func(r *run.Run) { r.Calls[0].Status = status })
		}
		ses := a.session(adminToken)
		id := a.admin("POST", "/v1/agent-sessions/"+ses+"/run?wait=0.05", oneCall).want(202).str("id")
		calls := a.admin("GET", "/v1/agent-sessions/"+ses+"/runs/"+id, "").want(200).object()["calls"].([]any)
		if got := calls[0].(map[string]any); len(got) != 4 || got["status"] != string(status) || got["id"] != "c1" {
			t.Errorf("got %v", got)
		}
	}
}

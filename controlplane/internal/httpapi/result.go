package httpapi

import (
	"encoding/base64"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/bigwave/bigwave/controlplane/internal/run"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

type runResponse struct {
	ID         string        `json:"id"`
	SessionID  string        `json:"session_id"`
	Status     string        `json:"status"`
	Calls      []any         `json:"calls"` // openCall, finalCall or endedCall
	Output     string        `json:"output"`
	Usage      usageResponse `json:"usage"`
	CreatedAt  *time.Time    `json:"created_at"`
	StartedAt  *time.Time    `json:"started_at"`
	FinishedAt *time.Time    `json:"finished_at"`
}

type usageResponse struct {
	Calls      int     `json:"calls"`
	CPUMS      float64 `json:"cpu_ms"`
	DurationMS float64 `json:"duration_ms"`
}

// openCall is a call that has no result yet.
type openCall struct {
	ID        string         `json:"id"`
	Name      string         `json:"name"`
	Arguments jsontext.Value `json:"arguments"`
	Status    string         `json:"status"`
}

// endedCall is a call that is over, without what it printed.
type endedCall struct {
	ID           string            `json:"id"`
	Name         string            `json:"name"`
	Arguments    jsontext.Value    `json:"arguments"`
	Status       string            `json:"status"`
	Error        *failureResponse  `json:"error"`
	ExitCode     *int              `json:"exit_code"`
	Signal       *string           `json:"signal"`
	StdoutBytes  int64             `json:"stdout_bytes"`
	StderrBytes  int64             `json:"stderr_bytes"`
	Truncated    bool              `json:"truncated"`
	DurationMS   float64           `json:"duration_ms"`
	CPUMS        float64           `json:"cpu_ms"`
	MemoryPeak   int64             `json:"memory_peak_bytes"`
	OOMKills     int64             `json:"oom_kills"`
	Denials      []denialResponse  `json:"denials"`
	Enforced     map[string]string `json:"enforced"`
	Retryable    bool              `json:"retryable"`
	RunnerID     string            `json:"runner_id"`
	Backend      string            `json:"backend"`
	Isolation    string            `json:"isolation"`
	ImageDigest  string            `json:"image_digest"`
	PolicyDigest string            `json:"policy_digest"`
}

// finalCall is a call with its whole result.
type finalCall struct {
	endedCall
	Stdout       string  `json:"stdout"`
	Stderr       string  `json:"stderr"`
	Lossy        bool    `json:"lossy"`
	StdoutBase64 string  `json:"stdout_base64,omitempty"`
	StderrBase64 string  `json:"stderr_base64,omitempty"`
	Result       *string `json:"result"`
	Encoding     string  `json:"encoding,omitempty"`

	Returned *returnedResponse `json:"returned,omitempty"` // of a function of a Python tool
}

// returnedResponse is what a function of a Python tool returned; result has
// what a model is told of it.
type returnedResponse struct {
	Type          string         `json:"type"`
	Value         jsontext.Value `json:"value"`
	Files         []returnedFile `json:"files"`
	Embeds        []string       `json:"embeds"`
	EventsDropped int64          `json:"events_dropped"`
}

type returnedFile struct {
	Type string `json:"type"`
	URL  string `json:"url"`
}

type failureResponse struct {
	Code     string `json:"code"`
	Message  string `json:"message"`
	Field    string `json:"field"`
	Limit    *int64 `json:"limit"`
	Observed *int64 `json:"observed"`
	Remedy   string `json:"remedy"`
}

type denialResponse struct {
	Kind   string `json:"kind"`
	Target string `json:"target"`
	Reason string `json:"reason"`
}

func newRunResponse(r run.Run) runResponse { return runWith(r, newCallResponse) }

// newListedRun leaves out what the calls printed: a list would not be a page.
func newListedRun(r run.Run) runResponse { return runWith(r, newListedCall) }

func runWith(r run.Run, call func(run.Call) any) runResponse {
	out := runResponse{
		ID: r.ID, SessionID: r.Session, Status: string(r.Status), Output: r.Output,
		Calls:     make([]any, 0, len(r.Calls)),
		Usage:     usageResponse{Calls: r.Usage.Calls, CPUMS: micro(r.Usage.CPUMS), DurationMS: micro(r.Usage.DurationMS)},
		CreatedAt: instant(r.CreatedAt), StartedAt: instant(r.StartedAt), FinishedAt: instant(r.FinishedAt),
	}
	for _, c := range r.Calls {
		out.Calls = append(out.Calls, call(c))
	}
	return out
}

// newCallResponse is an openCall or, once the call is final, a finalCall.
func newCallResponse(c run.Call) any {
	if !c.Status.Final() {
		return newOpenCall(c)
	}
	out := finalCall{endedCall: newEndedCall(c)}
	out.Stdout, out.StdoutBase64 = kept(c.Result.Stdout)
	out.Stderr, out.StderrBase64 = kept(c.Result.Stderr)
	out.Lossy = out.StdoutBase64 != "" || out.StderrBase64 != ""
	if out.Returned, out.Result = returned(c.Result); out.Returned == nil {
		out.Result, out.Encoding = value(c.Result)
	}
	return out
}

// newListedCall is an openCall or an endedCall.
func newListedCall(c run.Call) any {
	if !c.Status.Final() {
		return newOpenCall(c)
	}
	return newEndedCall(c)
}

func newOpenCall(c run.Call) openCall {
	return openCall{ID: c.ClientID, Name: c.Name, Arguments: orEmpty(c.Arguments), Status: string(c.Status)}
}

func newEndedCall(c run.Call) endedCall {
	r := c.Result
	out := endedCall{
		ID: c.ClientID, Name: c.Name, Arguments: orEmpty(c.Arguments), Status: string(c.Status),
		Error: newFailure(r.Error), ExitCode: r.ExitCode, Signal: optional(r.Signal),
		StdoutBytes: r.StdoutBytes, StderrBytes: r.StderrBytes, Truncated: r.Truncated,
		DurationMS: micro(r.DurationMS), CPUMS: micro(r.CPUMS), MemoryPeak: r.MemoryPeak, OOMKills: r.OOMKills,
		Denials: make([]denialResponse, 0, len(r.Denials)), Enforced: r.Enforced, Retryable: retryable(r),
		RunnerID: c.Runner, Backend: r.Backend, Isolation: r.Isolation,
		ImageDigest: r.ImageDigest, PolicyDigest: r.PolicyDigest,
	}
	for _, d := range r.Denials {
		out.Denials = append(out.Denials, denialResponse(d))
	}
	return out
}

// kept is the text of an output and, where the text lost something, the exact
// bytes.
func kept(b []byte) (string, string) {
	s, lossy := text(b)
	if !lossy {
		return s, ""
	}
	return s, base64.StdEncoding.EncodeToString(b)
}

// returned is what a function of a Python tool returned, and its text; nil
// for other calls.
func returned(r run.Result) (*returnedResponse, *string) {
	if r.Encoding != run.Returned || !r.HasValue {
		return nil, nil
	}
	var in struct {
		returnedResponse
		Text *string `json:"text"`
	}
	if strictjson.Decode(r.Value, &in) != nil {
		return nil, nil
	}
	out := in.returnedResponse
	out.Files, out.Embeds = orNone(out.Files), orNone(out.Embeds)
	if len(out.Value) == 0 {
		out.Value = jsontext.Value("null")
	}
	return &out, in.Text
}

func orNone[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// value is what a call returned apart from its output: text, or base64 when
// that was asked for or text can't carry it.
func value(r run.Result) (result *string, encoding string) {
	if !r.HasValue {
		return nil, ""
	}
	s := string(r.Value)
	if r.Encoding == "base64" || !utf8.Valid(r.Value) {
		s, encoding = base64.StdEncoding.EncodeToString(r.Value), "base64"
	}
	return &s, encoding
}

func newFailure(f *run.Failure) *failureResponse {
	if f == nil {
		return nil
	}
	return &failureResponse{
		Code: f.Code, Message: f.Message, Field: f.Field, Limit: f.Limit, Observed: f.Observed,
		Remedy: fault.Codes[fault.Code(f.Code)].Remedy,
	}
}

// retryable is what the code's advice says; a code without advice keeps the
// result's own word.
func retryable(r run.Result) bool {
	if r.Error == nil {
		return r.Retryable
	}
	if a, ok := fault.Codes[fault.Code(r.Error.Code)]; ok {
		return a.Retryable
	}
	return r.Retryable
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

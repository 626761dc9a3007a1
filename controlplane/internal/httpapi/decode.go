package httpapi

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// given is a member of a request body: it may be absent, but null is never
// taken for a value.
type given[T any] struct {
	Set   bool
	Value T
}

// UnmarshalJSONFrom refuses null and remembers that the member was there.
func (g *given[T]) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() == 'n' {
		if _, err := dec.ReadToken(); err != nil { // so that the pointer is at the null
			return err
		}
		return &json.SemanticError{JSONKind: 'n', JSONPointer: dec.StackPointer(), GoType: reflect.TypeFor[T]()}
	}
	g.Set = true
	return json.UnmarshalDecode(dec, &g.Value)
}

// named pairs a member's name with whether it was there.
type named struct {
	name string
	set  bool
}

// required returns a fault for the first member that is missing.
func required(prefix string, members ...named) error {
	for _, m := range members {
		if !m.set {
			return fault.New(fault.Invalid, "%s%s is required", prefix, m.name).On(prefix + m.name)
		}
	}
	return nil
}

// decode reads the body, at most limit bytes of JSON, strictly and once.
func decode(c echo.Context, limit int64, v any) error {
	data, err := readBody(c, limit)
	if err != nil {
		return err
	}
	if len(data) == 0 {
		return fault.New(fault.Invalid, "a JSON body is required")
	}
	return unmarshal(data, v)
}

// decodeOptional is decode, but no body at all is fine.
func decodeOptional(c echo.Context, limit int64, v any) error {
	if c.Request().ContentLength == 0 {
		return nil
	}
	data, err := readBody(c, limit)
	if err != nil || len(data) == 0 {
		return err
	}
	return unmarshal(data, v)
}

func unmarshal(data []byte, v any) error {
	if k := jsontext.Value(data).Kind(); k != '{' && k != 0 {
		return fault.New(fault.Invalid, "the body must be a JSON object")
	}
	return namedFault(strictjson.Decode(data, v))
}

// namedFault turns what is wrong with JSON into the sentence for its sender.
func namedFault(err error) error {
	e, ok := errors.AsType[*strictjson.Error](err)
	switch {
	case !ok:
		return err
	case e.Field == "":
		return fault.New(fault.Invalid, "the body %s", e.Why)
	}
	return fault.New(fault.Invalid, "%s", e.Error()).On(e.Field)
}

func readBody(c echo.Context, limit int64) ([]byte, error) {
	r := c.Request()
	if err := checkMedia(r.Header); err != nil {
		return nil, err
	}
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	var buf bytes.Buffer
	buf.Grow(int(min(max(r.ContentLength, 0), 64<<10)) + bytes.MinRead)
	_, err := buf.ReadFrom(http.MaxBytesReader(c.Response().Writer, r.Body, limit))
	switch {
	case err == nil:
		// The deadline was for the body; what follows may take longer.
		_ = http.NewResponseController(c.Response()).SetReadDeadline(time.Time{})
		return buf.Bytes(), nil
	case isTooLarge(err):
		return nil, tooLarge(limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fault.Wrap(err, fault.Timeout, "the body took too long to arrive")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fault.Wrap(err, fault.Invalid, "the body ended early")
	}
	return nil, fault.Wrap(err, fault.Invalid, "the body could not be read")
}

func isTooLarge(err error) bool {
	_, ok := errors.AsType[*http.MaxBytesError](err)
	return ok
}

func tooLarge(limit int64) error {
	return fault.New(fault.TooLarge, "the body is over %d bytes", limit)
}

// checkMedia admits plain JSON only: nothing is decompressed or transcoded.
func checkMedia(h http.Header) error {
	if enc := h.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return fault.New(fault.Unsupported, "an encoded body is not read; send it plain").On("Content-Encoding")
	}
	media, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil || media != "application/json" || !strings.EqualFold(or(params["charset"], "utf-8"), "utf-8") {
		return fault.New(fault.Unsupported, "the body must be application/json").On("Content-Type")
	}
	return nil
}

func or(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}

// query returns the parameter's one value, empty when it is absent.
func query(c echo.Context, name string) (string, error) {
	values, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return "", fault.New(fault.Invalid, "the query string is malformed")
	}
	switch v := values[name]; len(v) {
	case 0:
		return "", nil
	case 1:
		return v[0], nil
	}
	return "", fault.New(fault.Invalid, "%s appears twice", name).On(name)
}

// pageOf reads limit and cursor.
func pageOf(c echo.Context) (page.Page, error) {
	limit, err := query(c, "limit")
	if err != nil {
		return page.Page{}, err
	}
	cursor, err := query(c, "cursor")
	if err != nil {
		return page.Page{}, err
	}
	p := page.Page{Limit: page.Default, Cursor: cursor}
	if limit == "" {
		return p, nil
	}
	n, err := strconv.Atoi(limit)
	if err != nil || n < 1 || n > page.Max {
		return p, fault.New(fault.Invalid, "limit must be a whole number from 1 to %d", page.Max).On("limit")
	}
	p.Limit = n
	return p, nil
}

// pageIn reads limit and cursor, and the workspace that workspace_id names.
func pageIn(c echo.Context) (page.Page, string, error) {
	p, err := pageOf(c)
	if err != nil {
		return p, "", err
	}
	workspace, err := query(c, "workspace_id")
	return p, workspace, err
}

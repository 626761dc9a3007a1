package httpapi

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"
)

// list is the shape of a page of things.
type list[T any] struct {
	Items      []T    `json:"items"`
	NextCursor string `json:"next_cursor"` // empty on the last page
}

// newList converts each item and keeps the order.
func newList[D, T any](items []D, next string, convert func(D) T) list[T] {
	out := list[T]{Items: make([]T, 0, len(items)), NextCursor: next}
	for _, d := range items {
		out.Items = append(out.Items, convert(d))
	}
	return out
}

// marshal writes v with empty lists and maps as [] and {}, and keys in a
// steady order.
func marshal(v any) ([]byte, error) {
	return json.Marshal(v, json.Deterministic(true), jsontext.AllowInvalidUTF8(true), jsontext.AllowDuplicateNames(true))
}

func write(c echo.Context, status int, v any) error {
	return writeAs(c, status, "application/json", v)
}

func writeAs(c echo.Context, status int, media string, v any) error {
	data, err := marshal(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	data = append(data, '\n')
	c.Response().Header().Set("Content-Length", strconv.Itoa(len(data)))
	return c.Blob(status, media, data)
}

// instant is a time on the wire, null when it has not come: to the microsecond,
// as the database keeps it, so that one moment reads the same in every answer.
func instant(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	u := t.UTC().Truncate(time.Microsecond)
	return &u
}

// micro rounds milliseconds to the microsecond: sums of them otherwise show
// the arithmetic's dust.
func micro(ms float64) float64 { return math.Round(ms*1000) / 1000 }

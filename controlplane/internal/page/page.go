// Package page cuts long lists into pages that a cursor continues.
package page

import (
	"encoding/base64"
	"unicode/utf8"

	"github.com/bigwave/bigwave/shared/fault"
)

// The sizes of a page, in items.
const (
	Default = 50
	Max     = 200
)

// Page asks for one page of a list. The zero Page is the first one.
type Page struct {
	Limit  int    // items; 0 means Default
	Cursor string // as the page before answered it; empty: from the start
}

// Bounds returns how many items the page may have and the key after which it
// starts ("" for the first page). Faults are Invalid and name limit or cursor.
func (p Page) Bounds() (limit int, after string, err error) {
	if p.Limit < 0 || p.Limit > Max {
		return 0, "", fault.New(fault.Invalid, "limit must be between 1 and %d", Max).On("limit")
	}
	limit = p.Limit
	if limit == 0 {
		limit = Default
	}
	key, err := base64.RawURLEncoding.DecodeString(p.Cursor)
	if err != nil || !printable(key) {
		return 0, "", fault.New(fault.Invalid, "cursor is not one that this list answered").On("cursor")
	}
	return limit, string(key), nil
}

// Cut takes the items of a query that asked for one more than limit, and
// returns the page with the cursor of the next one, which is empty on the last.
func Cut[T any](items []T, limit int, key func(T) string) ([]T, string) {
	if len(items) <= limit {
		return items, ""
	}
	items = items[:limit]
	return items, base64.RawURLEncoding.EncodeToString([]byte(key(items[limit-1])))
}

// printable reports whether key could be an id or a name that we gave out.
func printable(key []byte) bool {
	if len(key) > 512 || !utf8.Valid(key) {
		return false
	}
	for _, b := range key {
		if b < ' ' {
			return false
		}
	}
	return true
}

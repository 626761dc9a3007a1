package page

import (
	"encoding/base64"
	"slices"
	"testing"

	"github.com/bigwave/bigwave/shared/fault"
)

func TestPagesCoverAListOnce(t *testing.T) {
	all := []string{"a", "b", "c", "d", "e"}
	query := func(after string, n int) []string {
		var out []string
		for _, s := range all {
			if s > after && len(out) < n {
				out = append(out, s)
			}
		}
		return out
	}
	var got []string
	p := Page{Limit: 2}
	for {
		limit, after, err := p.Bounds()
		if err != nil {
			t.Fatal(err)
		}
		items, next := Cut(query(after, limit+1), limit, func(s string) string { return s })
		got = append(got, items...)
		if next == "" {
			break
		}
		p.Cursor = next
	}
	if !slices.Equal(got, all) {
		t.Errorf("pages gave %v, want %v", got, all)
	}
}

func TestBoundsNamesWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		page  Page
		field string
	}{
		"negative limit":  {Page{Limit: -1}, "limit"},
		"limit too large": {Page{Limit: Max + 1}, "limit"},
		"not base64":      {Page{Cursor: "!"}, "cursor"},
		"control bytes":   {Page{Cursor: base64.RawURLEncoding.EncodeToString([]byte("a\x00b"))}, "cursor"},
		"not UTF-8":       {Page{Cursor: base64.RawURLEncoding.EncodeToString([]byte{0xff})}, "cursor"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := c.page.Bounds()
			if !fault.Is(err, fault.Invalid) || fault.From(err).Field != c.field {
				t.Errorf("got %v, want an invalid %s", err, c.field)
			}
		})
	}
}

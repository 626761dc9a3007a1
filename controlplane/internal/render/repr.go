package render

import (
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"
)

// str is Python's str(v), or errTooLarge past limit bytes.
func (v Value) str(limit int) (string, error) {
	if v.kind != kindStr {
		return v.repr(limit)
	}
	if len(v.text) > limit {
		return "", errTooLarge
	}
	return v.text, nil
}

// repr is Python's repr(v), or errTooLarge past limit bytes.
func (v Value) repr(limit int) (string, error) {
	w := writer{limit: limit, printable: isPrintable}
	return w.text(v)
}

// ascii is Python's ascii(v), or errTooLarge past limit bytes.
func (v Value) ascii(limit int) (string, error) {
	w := writer{limit: limit, printable: func(r rune) bool { return ' ' <= r && r < 0x7f }}
	return w.text(v)
}

// writer writes reprs until they are over its limit.
type writer struct {
	strings.Builder
	limit     int
	printable func(rune) bool
}

func (w *writer) text(v Value) (string, error) {
	if !w.value(v) {
		return "", errTooLarge
	}
	return w.String(), nil
}

// add reports whether s still fits.
func (w *writer) add(s string) bool {
	if w.Len()+len(s) > w.limit {
		return false
	}
	w.WriteString(s)
	return true
}

func (w *writer) value(v Value) bool {
	switch v.kind {
	case kindNone:
		return w.add("None")
	case kindBool:
		if v.truth {
			return w.add("True")
		}
		return w.add("False")
	case kindInt:
		return w.add(v.text)
	case kindFloat:
		return w.add(reprFloat(v.float, false))
	case kindStr:
		return w.quoted(v.text)
	}
	open, end := "[", "]"
	if v.kind == kindDict {
		open, end = "{", "}"
	}
	ok := w.add(open)
	for i, item := range v.items {
		if i > 0 {
			ok = ok && w.add(", ")
		}
		if v.kind == kindDict {
			ok = ok && w.quoted(v.keys[i]) && w.add(": ")
		}
		ok = ok && w.value(item)
	}
	return ok && w.add(end)
}

// quoted writes a string as Python's repr does: in single quotes unless it
// holds some and no double ones.
func (w *writer) quoted(s string) bool {
	if len(s) > w.limit {
		return false
	}
	quote := '\''
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	w.WriteRune(quote)
	for _, r := range s {
		switch {
		case r == quote || r == '\\':
			w.WriteByte('\\')
			w.WriteRune(r)
		case r == '\n':
			w.WriteString(`\n`)
		case r == '\r':
			w.WriteString(`\r`)
		case r == '\t':
			w.WriteString(`\t`)
		case w.printable(r):
			w.WriteRune(r)
		case r < 0x100:
			fmt.Fprintf(w, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(w, `\u%04x`, r)
		default:
			fmt.Fprintf(w, `\U%08x`, r)
		}
		if w.Len() > w.limit {
			return false
		}
	}
	w.WriteRune(quote)
	return w.Len() <= w.limit
}

// isPrintable is Python's str.isprintable for one character.
func isPrintable(r rune) bool {
	if r < utf8.RuneSelf {
		return ' ' <= r && r < 0x7f
	}
	i := sort.Search(len(unprintable), func(i int) bool { return unprintable[i].last >= r })
	return i == len(unprintable) || r < unprintable[i].first
}

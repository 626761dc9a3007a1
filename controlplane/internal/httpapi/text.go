package httpapi

import (
	"strings"
	"unicode/utf8"
)

// text is b as a JSON string can carry it: each byte that is not part of
// UTF-8 becomes U+FFFD, and lossy says that one did.
func text(b []byte) (s string, lossy bool) {
	if utf8.Valid(b) {
		return string(b), false
	}
	var out strings.Builder
	out.Grow(len(b) + len(b)/2)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		out.WriteRune(r)
		b = b[n:]
	}
	return out.String(), true
}

// splitRune cuts b before a last rune that has not come whole.
func splitRune(b []byte) (whole, tail []byte) {
	for i := len(b) - 1; i >= 0 && i >= len(b)-utf8.UTFMax+1; i-- {
		if !utf8.RuneStart(b[i]) {
			continue
		}
		if utf8.FullRune(b[i:]) {
			return b, nil
		}
		return b[:i], b[i:]
	}
	return b, nil
}

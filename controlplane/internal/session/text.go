package session

import (
	"strings"
	"unicode/utf8"
)

// maxText is how much of a runner's sentence is kept, in bytes.
const maxText = 8 << 10

// Text makes a runner's sentence fit to be stored and shown: valid UTF-8, no
// NUL, not endless.
func Text(s string) string { return cut(s, maxText) }

// clip does the same for what should be a short name.
func clip(s string) string { return cut(s, 128) }

func cut(s string, limit int) string {
	if len(s) > limit {
		for limit > 0 && !utf8.RuneStart(s[limit]) {
			limit--
		}
		s = s[:limit]
	}
	if utf8.ValidString(s) && !strings.ContainsRune(s, 0) {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

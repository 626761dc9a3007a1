package pytool

import (
	"unicode"
	"unicode/utf8"
)

// identifier reports whether s is one of Python's: str.isidentifier.
func identifier(s string) bool {
	if s == "" || !utf8.ValidString(s) {
		return false
	}
	for i, r := range s {
		if r != '_' && !starts(r) && (i == 0 || !continues(r)) {
			return false
		}
	}
	return true
}

// starts reports whether r has Unicode's property XID_Start.
func starts(r rune) bool {
	return unicode.In(r, unicode.L, unicode.Nl, unicode.Other_ID_Start) && !unicode.In(r, unicode.Pattern_Syntax, unicode.Pattern_White_Space) &&
		!unicode.In(r, unfolding, lateVowels)
}

// continues reports whether r has Unicode's property XID_Continue.
func continues(r rune) bool {
	return unicode.In(r, unicode.L, unicode.Nl, unicode.Other_ID_Start, unicode.Mn, unicode.Mc, unicode.Nd, unicode.Pc, unicode.Other_ID_Continue) &&
		!unicode.In(r, unicode.Pattern_Syntax, unicode.Pattern_White_Space) && !unicode.Is(unfolding, r)
}

// unfolding are the letters whose compatibility form is no identifier: the X
// in XID takes them out.
var unfolding = &unicode.RangeTable{R16: []unicode.Range16{
	{Lo: 0x037A, Hi: 0x037A, Stride: 1},
	{Lo: 0x309B, Hi: 0x309C, Stride: 1},
	{Lo: 0xFC5E, Hi: 0xFC63, Stride: 1},
	{Lo: 0xFDFA, Hi: 0xFDFB, Stride: 1},
	{Lo: 0xFE70, Hi: 0xFE7E, Stride: 2},
}}

// lateVowels may follow but not start, for the same reason.
var lateVowels = &unicode.RangeTable{R16: []unicode.Range16{
	{Lo: 0x0E33, Hi: 0x0E33, Stride: 1},
	{Lo: 0x0EB3, Hi: 0x0EB3, Stride: 1},
	{Lo: 0xFF9E, Hi: 0xFF9F, Stride: 1},
}}

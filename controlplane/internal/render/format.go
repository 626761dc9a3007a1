package render

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// errTooLarge says that a text would not fit, before it is made.
var errTooLarge = errors.New("too large")

// maxSpec is the longest format spec: fill, align, two numbers, a type.
const maxSpec = 64

// format is Python's format(value, spec) after the conversion, if any.
func (v Value) format(conversion byte, spec string, limit int) (string, error) {
	switch conversion {
	case 's':
		return formatStr(v, spec, limit, Value.str)
	case 'r':
		return formatStr(v, spec, limit, Value.repr)
	case 'a':
		return formatStr(v, spec, limit, Value.ascii)
	}
	if spec == "" {
		return v.str(limit)
	}
	switch v.kind {
	case kindStr:
		return formatStr(v, spec, limit, Value.str)
	case kindInt, kindBool:
		return v.formatInt(spec, limit)
	case kindFloat:
		return formatFloat(v.float, kindFloat, spec, limit)
	}
	return "", fmt.Errorf("a value of type %s takes no format spec", v.kind.typeName())
}

// formatSpec is Python's format spec mini-language.
type formatSpec struct {
	fill      rune
	align     byte
	sign      byte
	noNegZero bool
	alternate bool
	width     int // -1: none
	grouping  byte
	precision int // -1: none
	typ       rune
}

// parseSpec reads a spec for a value that is aligned so by default.
func parseSpec(text string, align byte) (formatSpec, error) {
	s := formatSpec{fill: ' ', align: align, width: -1, precision: -1}
	if len(text) > maxSpec {
		return s, errors.New("it is too long")
	}
	r := []rune(text)
	aligned, filled := false, false
	if len(r) >= 2 && isAlign(r[1]) {
		s.fill, s.align, aligned, filled, r = r[0], byte(r[1]), true, true, r[2:]
	} else if len(r) >= 1 && isAlign(r[0]) {
		s.align, aligned, r = byte(r[0]), true, r[1:]
	}
	take := func(set string) byte {
		if len(r) == 0 || r[0] > utf8.RuneSelf || strings.IndexByte(set, byte(r[0])) < 0 {
			return 0
		}
		c := byte(r[0])
		r = r[1:]
		return c
	}
	s.sign = take(" +-")
	s.noNegZero = take("z") != 0
	s.alternate = take("#") != 0
	if !filled && take("0") != 0 {
		s.fill = '0'
		if !aligned && align == '>' {
			s.align = '='
		}
	}
	s.width, r = digits(r)
	s.grouping = take(",")
	if c := take("_"); c != 0 {
		if s.grouping != 0 {
			return s, errors.New("it has both , and _")
		}
		s.grouping = c
	}
	if s.grouping == '_' && len(r) > 0 && r[0] == ',' {
		return s, errors.New("it has both , and _")
	}
	if take(".") != 0 {
		if s.precision, r = digits(r); s.precision < 0 {
			return s, errors.New("the precision is missing after the dot")
		}
	}
	if len(r) > 1 {
		return s, errors.New("it is not a valid format spec")
	}
	if len(r) == 1 {
		s.typ = r[0]
	}
	return s, s.checkGrouping()
}

func isAlign(r rune) bool { return r == '<' || r == '>' || r == '=' || r == '^' }

// digits reads a leading number, held at a size over every limit.
func digits(r []rune) (int, []rune) {
	n, i := -1, 0
	for i < len(r) && '0' <= r[i] && r[i] <= '9' {
		n = min(max(n, 0)*10+int(r[i]-'0'), math.MaxInt32)
		i++
	}
	return n, r[i:]
}

func (s formatSpec) checkGrouping() error {
	if s.grouping == 0 || s.typ == 0 || strings.ContainsRune("deEfFgG%", s.typ) {
		return nil
	}
	if s.grouping == '_' && strings.ContainsRune("boxX", s.typ) {
		return nil
	}
	return fmt.Errorf("%q does not go with %q", s.grouping, s.typ)
}

func unknownCode(r rune, k kind) error {
	return fmt.Errorf("the format code %q is not one for a value of type %s", r, k.typeName())
}

// formatStr formats what text makes of v as a string.
func formatStr(v Value, spec string, limit int, text func(Value, int) (string, error)) (string, error) {
	t, err := text(v, limit)
	if err != nil || spec == "" {
		return t, err
	}
	s, err := parseSpec(spec, '<')
	switch {
	case err != nil:
		return "", err
	case s.typ != 0 && s.typ != 's':
		return "", unknownCode(s.typ, kindStr)
	case s.grouping != 0:
		return "", fmt.Errorf("%q does not go with a string", s.grouping)
	case s.sign != 0 || s.noNegZero || s.alternate || s.align == '=':
		return "", errors.New("sign, z, # and = are for numbers")
	}
	n := utf8.RuneCountInString(t)
	if s.precision >= 0 && s.precision < n {
		cut := 0
		for range s.precision {
			_, size := utf8.DecodeRuneInString(t[cut:])
			cut += size
		}
		t, n = t[:cut], s.precision
	}
	return s.pad("", t, n, limit)
}

// pad brings sign+body, body being n characters long, to the width.
func (s formatSpec) pad(sign, body string, n, limit int) (string, error) {
	missing := max(0, s.width-n-len(sign))
	if missing > limit || missing*utf8.RuneLen(s.fill)+len(sign)+len(body) > limit {
		return "", errTooLarge
	}
	left, inside, right := 0, 0, 0
	switch s.align {
	case '<':
		right = missing
	case '>':
		left = missing
	case '^':
		left = missing / 2
		right = missing - left
	case '=':
		inside = missing
	}
	fill := func(n int) string { return strings.Repeat(string(s.fill), n) }
	return fill(left) + sign + fill(inside) + body + fill(right), nil
}

// formatInt formats an int or a bool.
func (v Value) formatInt(spec string, limit int) (string, error) {
	s, err := parseSpec(spec, '>')
	if err != nil {
		return "", err
	}
	if s.typ != 0 && strings.ContainsRune("eEfFgG%", s.typ) {
		f, _ := strconv.ParseFloat(v.intText(), 64)
		if math.IsInf(f, 0) {
			return "", errors.New("the integer is too large for a float")
		}
		return formatFloat(f, v.kind, spec, limit)
	}
	if s.precision >= 0 || s.noNegZero {
		return "", errors.New("a precision or z does not go with an integer")
	}
	if s.typ == 'c' {
		return v.formatChar(s, limit)
	}
	base, prefix, group := 10, "", 3
	switch s.typ {
	case 0, 'd', 'n':
	case 'b':
		base, prefix, group = 2, "0b", 4
	case 'o':
		base, prefix, group = 8, "0o", 4
	case 'x':
		base, prefix, group = 16, "0x", 4
	case 'X':
		base, prefix, group = 16, "0X", 4
	default:
		return "", unknownCode(s.typ, v.kind)
	}
	if !s.alternate {
		prefix = ""
	}
	text, negative := strings.CutPrefix(v.intText(), "-")
	if len(text) > limit {
		return "", errTooLarge
	}
	if base != 10 {
		n, _ := new(big.Int).SetString(text, 10)
		text = n.Text(base)
	}
	if s.typ == 'X' {
		text = strings.ToUpper(text)
	}
	return s.number(s.signOf(negative)+prefix, text, "", group, limit)
}

// intText is the decimal text of an int or a bool.
func (v Value) intText() string {
	switch {
	case v.kind == kindInt:
		return v.text
	case v.truth:
		return "1"
	}
	return "0"
}

func (v Value) formatChar(s formatSpec, limit int) (string, error) {
	if s.sign != 0 || s.alternate {
		return "", errors.New("sign and # do not go with c")
	}
	n, err := strconv.ParseInt(v.intText(), 10, 32)
	if err != nil || !utf8.ValidRune(rune(n)) {
		return "", errors.New("c takes the number of a Unicode character")
	}
	return s.pad("", string(rune(n)), 1, limit)
}

func (s formatSpec) signOf(negative bool) string {
	switch {
	case negative:
		return "-"
	case s.sign == '+' || s.sign == ' ':
		return string(s.sign)
	}
	return ""
}

// number groups the integer digits and pads the whole.
func (s formatSpec) number(sign, integer, rest string, group, limit int) (string, error) {
	least := 0
	if s.fill == '0' && s.align == '=' {
		least = s.width - len(sign) - len(rest)
	}
	if max(least, len(integer))*2+len(sign)+len(rest) > 2*limit+8 {
		return "", errTooLarge
	}
	if s.grouping == 0 {
		group = 0
	}
	body := rest
	if integer != "" {
		body = groupDigits(integer, s.grouping, group, least) + rest
	}
	return s.pad(sign, body, len(body), limit)
}

// groupDigits puts sep between groups of digits and zeros in front until the
// result is at least least long. group 0 groups nothing.
func groupDigits(digits string, sep byte, group, least int) string {
	if group == 0 {
		return strings.Repeat("0", max(0, least-len(digits))) + digits
	}
	var parts []string
	remaining := digits
	for {
		n := min(group, max(len(remaining), least, 1))
		cut := max(0, len(remaining)-n)
		part := remaining[cut:]
		parts = append(parts, strings.Repeat("0", n-len(part))+part)
		remaining = remaining[:cut]
		if least -= n; remaining == "" && least <= 0 {
			break
		}
		least-- // the separator
	}
	var out strings.Builder
	for i := len(parts) - 1; i >= 0; i-- {
		out.WriteString(parts[i])
		if i > 0 {
			out.WriteByte(sep)
		}
	}
	return out.String()
}

// formatFloat formats f, which came from a value of kind k.
func formatFloat(f float64, k kind, spec string, limit int) (string, error) {
	s, err := parseSpec(spec, '>')
	if err != nil {
		return "", err
	}
	typ, precision, percent := s.typ, s.precision, ""
	const longest = 330 // digits of the largest double, and some
	if precision > limit || max(precision, 0)+longest-limit > longest {
		return "", errTooLarge
	}
	switch {
	case typ == 0:
	case typ == 'n':
		typ = 'g'
	case typ == '%':
		typ, percent = 'f', "%"
		f *= 100
	case !strings.ContainsRune("eEfFgG", typ):
		return "", unknownCode(typ, k)
	}
	if typ != 0 && precision < 0 {
		precision = 6
	}
	text, negative := strings.CutPrefix(floatDigits(f, typ, precision, s.alternate), "-")
	if mantissa, _, _ := strings.Cut(strings.ToLower(text), "e"); s.noNegZero && strings.Trim(mantissa, "0.") == "" {
		negative = false
	}
	integer := text
	if i := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		integer = text[:i]
	}
	return s.number(s.signOf(negative), integer, text[len(integer):]+percent, 3, limit)
}

// floatDigits prints f the way C and Python do for a type, without padding.
func floatDigits(f float64, typ rune, precision int, alternate bool) string {
	if math.IsInf(f, 0) { // only after *100
		return strings.ToLower(strings.TrimPrefix(strconv.FormatFloat(f, 'g', -1, 64), "+"))
	}
	switch typ {
	case 'e', 'E', 'f', 'F':
		format := byte(typ | 0x20)
		text := strconv.FormatFloat(f, format, precision, 64)
		if alternate && precision == 0 {
			if mantissa, exponent, ok := strings.Cut(text, "e"); ok {
				text = mantissa + ".e" + exponent
			} else {
				text += "."
			}
		}
		if typ == 'E' {
			text = strings.ToUpper(text)
		}
		return text
	case 'g', 'G':
		text := general(f, max(precision, 1), max(precision, 1), alternate, false)
		if typ == 'G' {
			text = strings.ToUpper(text)
		}
		return text
	}
	if precision < 0 {
		return reprFloat(f, alternate)
	}
	return general(f, max(precision, 1), max(precision, 1)-1, alternate, true)
}

// general is C's %g: precision significant digits, an exponent when the
// decimal point would stand beyond most digits or more than four zeros in.
// dotZero adds .0 to what would look like an integer.
func general(f float64, precision, most int, alternate, dotZero bool) string {
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(f, 'e', precision-1, 64), "e")
	sign := ""
	if mantissa[0] == '-' {
		sign, mantissa = "-", mantissa[1:]
	}
	digits := strings.Replace(mantissa, ".", "", 1)
	exp, _ := strconv.Atoi(exponent)
	if !alternate {
		digits = strings.TrimRight(digits, "0")
	}
	return sign + place(digits, exp+1, exp+1 <= -4 || exp+1 > most, alternate, dotZero)
}

// place puts the decimal point after point digits, or writes an exponent.
func place(digits string, point int, exponent, alternate, dotZero bool) string {
	if digits == "" {
		digits = "0"
	}
	if exponent {
		text := digits[:1]
		if len(digits) > 1 || alternate {
			text += "." + digits[1:]
		}
		return text + fmt.Sprintf("e%+03d", point-1)
	}
	if point <= 0 {
		return "0." + strings.Repeat("0", -point) + digits
	}
	if len(digits) <= point {
		text := digits + strings.Repeat("0", point-len(digits))
		switch {
		case dotZero:
			text += ".0"
		case alternate:
			text += "."
		}
		return text
	}
	return digits[:point] + "." + digits[point:]
}

// reprFloat is Python's repr of a float: the shortest digits that read back.
func reprFloat(f float64, alternate bool) string {
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(f, 'e', -1, 64), "e")
	sign := ""
	if mantissa[0] == '-' {
		sign, mantissa = "-", mantissa[1:]
	}
	exp, _ := strconv.Atoi(exponent)
	digits := strings.Replace(mantissa, ".", "", 1)
	return sign + place(digits, exp+1, exp+1 <= -4 || exp+1 > 16, alternate, true)
}

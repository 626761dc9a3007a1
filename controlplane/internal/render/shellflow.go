package render

import (
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// variable is what the template assigns to one name.
type variable struct {
	number bool // a literal whole number or arithmetic, at least once
	other  bool // something else, at least once
}

var (
	wholeNumber = regexp.MustCompile(`^[-+]?[0-9]+$`)
	numberRange = regexp.MustCompile(`^\{-?[0-9]+\.\.-?[0-9]+(\.\.-?[0-9]+)?\}$`)
	constant    = regexp.MustCompile(`^[0-9][0-9A-Za-z#]*$`)
)

// numeric are bash's own variables that always hold a number.
var numeric = []string{"RANDOM", "SRANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "UID", "EUID", "PPID", "BASHPID", "#", "?", "$", "!"}

// evaluated are variables whose value bash evaluates, now or later.
func evaluated(name string) bool {
	switch name {
	case "PROMPT_COMMAND", "ENV", "MAILPATH", "SHELLOPTS", "HISTTIMEFORMAT", "OPTIND", "DIRSTACK", "HISTCMD", "_":
		return true
	}
	return strings.HasPrefix(name, "BASH") || strings.HasPrefix(name, "COMP_") ||
		len(name) == 3 && strings.HasPrefix(name, "PS") || slices.Contains(numeric, name)
}

// collect finds the functions that the template defines and what it assigns.
func (c *shellCheck) collect(file *syntax.File) {
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.FuncDecl:
			if n.Name != nil {
				c.funcs[n.Name.Value] = true
			}
		case *syntax.Assign:
			if n.Name != nil && !n.Naked {
				c.note(n.Name.Value, n.Index == nil && n.Array == nil && c.isNumber(n.Value))
			}
		case *syntax.WordIter:
			c.note(n.Name.Value, !slices.ContainsFunc(n.Items, func(w *syntax.Word) bool { return !c.isNumber(w) }))
		case *syntax.BinaryArithm:
			if strings.HasSuffix(n.Op.String(), "=") && !slices.Contains([]string{"==", "!=", "<=", ">="}, n.Op.String()) {
				c.noteArithmetic(n.X)
			}
		case *syntax.UnaryArithm:
			if n.Op == syntax.Inc || n.Op == syntax.Dec {
				c.noteArithmetic(n.X)
			}
		case *syntax.ParamExp:
			if n.Exp != nil && n.Param != nil && (n.Exp.Op == syntax.AssignUnset || n.Exp.Op == syntax.AssignUnsetOrNull) {
				c.note(n.Param.Value, c.isNumber(n.Exp.Word))
			}
		case *syntax.CallExpr:
			c.noteReads(n)
		}
		return true
	})
}

func (c *shellCheck) note(name string, number bool) {
	v := c.names[name]
	v.number = v.number || number
	v.other = v.other || !number
	c.names[name] = v
}

// noteArithmetic records x=… or x++ inside arithmetic, whose result is a number.
func (c *shellCheck) noteArithmetic(x syntax.ArithmExpr) {
	if w, ok := x.(*syntax.Word); ok {
		c.note(w.Lit(), true)
	}
}

// noteReads records the names that a builtin such as read fills.
func (c *shellCheck) noteReads(call *syntax.CallExpr) {
	for i, w := range call.Args {
		name, ok := c.plain(w)
		if i == 0 && (!ok || !slices.Contains([]string{"read", "mapfile", "readarray", "getopts", "printf", "builtin", "command", "wait"}, name)) {
			return
		}
		if i > 0 && ok && identifier(strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(name, "-a"), "-v"), "-p")) {
			c.note(strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(name, "-a"), "-v"), "-p"), false)
			c.note(name, false)
		}
	}
}

// isNumber reports whether a word is a whole number by its own text.
func (c *shellCheck) isNumber(w *syntax.Word) bool {
	if w == nil {
		return false
	}
	if len(w.Parts) == 1 {
		if _, ok := w.Parts[0].(*syntax.ArithmExp); ok {
			return true
		}
	}
	text, ok := c.plain(w)
	return ok && wholeNumber.MatchString(text) || numberRange.MatchString(w.Lit())
}

// clean reports whether a variable can hold nothing but a number, whatever
// the arguments are.
func (c *shellCheck) clean(name string) bool {
	v, assigned := c.names[name]
	if !assigned {
		return slices.Contains(numeric, name)
	}
	return v.number && !v.other
}

// arithmetic refuses an expression that reads what is not surely a number.
func (c *shellCheck) arithmetic(x syntax.ArithmExpr) {
	switch x := x.(type) {
	case *syntax.BinaryArithm:
		c.arithmetic(x.X)
		c.arithmetic(x.Y)
	case *syntax.UnaryArithm:
		c.arithmetic(x.X)
	case *syntax.ParenArithm:
		c.arithmetic(x.X)
	case *syntax.FlagsArithm:
		c.forbid(x, "arithmetic flags", "leave them out")
	case *syntax.Word:
		if x != nil {
			c.arithmeticWord(x)
		}
	}
}

func (c *shellCheck) arithmeticWord(w *syntax.Word) {
	if found := c.markersOf(w); len(found) > 0 {
		c.unsafe(found[0], "is inside arithmetic, a subscript or a numeric test, which bash evaluates; pass it to a command such as expr or awk instead")
		return
	}
	if !c.allNumbers(w.Parts) {
		c.forbid(w, "arithmetic on a value that is not surely a number", "calculate with expr or awk, or only with variables that the template sets to literal numbers")
	}
}

func (c *shellCheck) allNumbers(parts []syntax.WordPart) bool {
	for _, part := range parts {
		ok := false
		switch part := part.(type) {
		case *syntax.Lit:
			ok = constant.MatchString(part.Value) || c.clean(part.Value)
		case *syntax.SglQuoted:
			ok = !part.Dollar && wholeNumber.MatchString(part.Value)
		case *syntax.DblQuoted:
			ok = c.allNumbers(part.Parts)
		case *syntax.ArithmExp: // checked when it is visited
			ok = true
		case *syntax.ParamExp:
			ok = part.Length || part.Param != nil && c.clean(part.Param.Value) &&
				!part.Excl && part.Index == nil && part.Slice == nil && part.Repl == nil && part.Names == 0 && part.Exp == nil
		}
		if !ok {
			return false
		}
	}
	return true
}

// parameter checks a $name or ${…}.
func (c *shellCheck) parameter(p *syntax.ParamExp) {
	if p.Index != nil && !everything(p.Index) {
		c.arithmetic(p.Index)
	}
	if p.Excl && p.Names == 0 && !(p.Index != nil && everything(p.Index)) {
		c.forbid(p, "${!…}", "use the variable by its own name")
	}
	if p.Slice != nil {
		c.arithmetic(p.Slice.Offset)
		c.arithmetic(p.Slice.Length)
	}
	if p.Exp == nil {
		return
	}
	switch p.Exp.Op {
	case syntax.OtherParamOps:
		if p.Exp.Word == nil || p.Exp.Word.Lit() != "Q" {
			c.forbid(p, "${…@…}", "only @Q is allowed")
		}
	case syntax.AssignUnset, syntax.AssignUnsetOrNull:
		c.assigned(p.Param.Value, p)
	}
}

// everything reports whether a subscript is @ or *.
func everything(x syntax.ArithmExpr) bool {
	w, ok := x.(*syntax.Word)
	return ok && w != nil && (w.Lit() == "@" || w.Lit() == "*")
}

// assigned refuses an assignment to a variable that bash evaluates.
func (c *shellCheck) assigned(name string, at syntax.Node) {
	if evaluated(name) {
		c.forbid(at, "an assignment to "+name, "leave it alone")
	}
}

func (c *shellCheck) assign(a *syntax.Assign) {
	if a.Name != nil && !a.Naked {
		c.assigned(a.Name.Value, a)
	}
	c.arithmetic(a.Index)
}

// declaration checks declare, local, export and their kin: they evaluate
// what they are given.
func (c *shellCheck) declaration(d *syntax.DeclClause) {
	for _, a := range d.Args {
		if c.problem != nil {
			return
		}
		for _, n := range c.markersOfAssign(a) {
			c.unsafe(n, "is an argument of "+d.Variant.Value+", which evaluates its arguments; use it directly as an argument of a command")
		}
		switch {
		case a.Array != nil || a.Index != nil:
			c.forbid(d, "an array in "+d.Variant.Value, "assign the array without "+d.Variant.Value)
		case a.Name == nil: // an option, or something computed
			if option, ok := c.plain(a.Value); !ok || strings.Trim(option, "-+fFglprux") != "" {
				c.forbid(d, d.Variant.Value+" with an option or a name that it evaluates", "assign the variable without "+d.Variant.Value)
			}
		case a.Value != nil:
			if _, ok := c.plain(a.Value); !ok {
				c.forbid(d, d.Variant.Value+" with a computed value", "assign the variable on a line of its own first")
			}
		}
	}
}

func (c *shellCheck) markersOfAssign(a *syntax.Assign) []int {
	var found []int
	if a.Name != nil {
		found = c.markers(a.Name.Value)
	}
	if a.Value != nil {
		found = append(found, c.markersOf(a.Value)...)
	}
	return found
}

// binaryTest checks a comparison inside [[ ]].
func (c *shellCheck) binaryTest(t *syntax.BinaryTest) {
	switch t.Op {
	case syntax.TsEql, syntax.TsNeq, syntax.TsLeq, syntax.TsGeq, syntax.TsLss, syntax.TsGtr:
		for _, x := range []syntax.TestExpr{t.X, t.Y} {
			if w, ok := x.(*syntax.Word); ok && len(c.markersOf(w)) == 0 { // a marker is refused for standing in [[ ]]
				c.arithmeticWord(w)
			}
		}
	}
}

// unaryTest checks a question about one word inside [[ ]].
func (c *shellCheck) unaryTest(t *syntax.UnaryTest) {
	if t.Op != syntax.TsVarSet && t.Op != syntax.TsRefVar {
		return
	}
	w, ok := t.X.(*syntax.Word)
	if !ok {
		return
	}
	if name, literal := c.plain(w); !literal || !identifier(name) {
		c.forbid(t, "[[ -v ]] with a computed name", "test a literal name")
	}
}

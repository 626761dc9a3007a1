package render

import (
	"errors"
	"fmt"
	"strings"

	"mvdan.cc/sh/v3/syntax"

	"github.com/bigwave/bigwave/shared/fault"
)

// shellCheck looks at a template as bash would parse it, with a harmless
// marker in the place of every field.
//
// Quoting keeps a value one word, but bash goes on to evaluate some words:
// [[ x -eq 1 ]], test -v x, printf -v x, read x and n=x; $((n)) all run
// 'a[$(touch w)]'. So two things must hold. A field stands only where a word
// stays data, and nothing else in the template evaluates a word that was
// computed while it runs, for that could be a value come back through a
// variable, a pipe or a function.
type shellCheck struct {
	source  string   // the template
	script  string   // the template with markers
	prefix  string   // what every marker starts with
	fields  []*field // by marker number
	placed  []int    // how often each marker was found where it may stand
	stack   []syntax.Node
	current []*syntax.Word      // the simple command being checked, from its outermost wrapper
	names   map[string]variable // what the template assigns
	funcs   map[string]bool     // functions that the template defines
	problem error               // the first one found
}

// markerDigits is the length of a marker's number: more than a template can
// have fields.
const markerDigits = 5

// checkShell refuses a template in which bash might evaluate a value.
func checkShell(t template) (err error) {
	defer func() {
		if recover() != nil { // the text is anyone's; a parser's mistake must not be ours
			err = parser{source: t.source}.bad(0, "shell syntax that can't be checked")
		}
	}()
	c := &shellCheck{source: t.source, fields: t.fields(), names: map[string]variable{}, funcs: map[string]bool{}}
	if len(c.fields) == 0 {
		return nil
	}
	c.placed = make([]int, len(c.fields))
	if err := c.characters(); err != nil {
		return err
	}
	c.mark(t)
	file, err := c.parse()
	if err != nil {
		return err
	}
	c.collect(file)
	syntax.Walk(file, c.visit)
	for i, n := range c.placed {
		if c.problem == nil && n != 1 {
			c.unsafe(i, "stands where bash does not take a word as data; use it as an argument of a command")
		}
	}
	return c.problem
}

// characters refuses what bash and the parser might read differently.
func (c *shellCheck) characters() error {
	for i, r := range c.source {
		if r == '\r' {
			return c.bad(i, "a carriage return; end lines with a newline alone")
		}
		if r == '\n' && joinsWord(c.source[:i]) {
			return c.bad(i-1, "a line continuation inside a word; put a space before the backslash")
		}
		if r < ' ' && r != '\t' && r != '\n' || r == 0x7f {
			return c.bad(i, "a control character")
		}
	}
	for _, f := range c.fields {
		before, after := c.source[:f.at], c.source[f.end:]
		if strings.HasSuffix(before, "\\\n") || strings.HasPrefix(after, "\\\n") {
			return c.unsafeField(f, "touches a line continuation; put a space between")
		}
		switch {
		case strings.HasSuffix(before, "$"):
			return c.unsafeField(f, fmt.Sprintf("follows a $; write ${{%s}} for the shell variable, or remove the $ for the argument", f.name))
		case strings.HasSuffix(before, "\\"):
			return c.unsafeField(f, "follows a backslash, which would undo its quoting; remove the backslash")
		}
	}
	return nil
}

// joinsWord reports whether a newline after s continues a word: bash and the
// parser do not agree on all of those.
func joinsWord(s string) bool {
	s, continued := strings.CutSuffix(s, "\\")
	return continued && s != "" && strings.IndexByte(" \t\n", s[len(s)-1]) < 0
}

// mark writes the script with a marker for each field.
func (c *shellCheck) mark(t template) {
	var literals strings.Builder
	for _, s := range t.segments {
		literals.WriteString(s.literal)
		literals.WriteByte(' ')
	}
	c.prefix = "bwfield"
	for strings.Contains(literals.String(), c.prefix) {
		c.prefix += "x"
	}
	var script strings.Builder
	n := 0
	for _, s := range t.segments {
		script.WriteString(s.literal)
		if s.field != nil {
			fmt.Fprintf(&script, "%s%0*dz", c.prefix, markerDigits, n)
			n++
		}
	}
	c.script = script.String()
}

// markers returns the numbers of the markers in s.
func (c *shellCheck) markers(s string) []int {
	var found []int
	for {
		i := strings.Index(s, c.prefix)
		if i < 0 || len(s) < i+len(c.prefix)+markerDigits {
			return found
		}
		s = s[i+len(c.prefix):]
		n := 0
		for _, d := range []byte(s[:markerDigits]) {
			n = n*10 + int(d-'0')
		}
		found = append(found, n)
	}
}

// parse reads the script as bash.
func (c *shellCheck) parse() (*syntax.File, error) {
	if depth := nesting(c.script); depth > maxNesting {
		return nil, c.bad(0, "%d levels of brackets and quotes; at most %d are allowed", depth, maxNesting)
	}
	p := syntax.NewParser(syntax.Variant(syntax.LangBash), syntax.KeepComments(true))
	file, err := p.Parse(strings.NewReader(c.script), "")
	if err == nil {
		return file, nil
	}
	what, line := "shell syntax that bash would not take", uint(1)
	if e, ok := errors.AsType[syntax.ParseError](err); ok {
		what, line = what+" ("+c.readable(e.Text)+")", e.Pos.Line()
	}
	return nil, fault.Wrap(err, fault.Invalid, "the template has %s, on line %d (a literal { or } is written {{ or }})", what, line).
		WithCode(BadTemplate).On(TemplateField)
}

// maxNesting bounds what the parser recurses into.
const maxNesting = 100

// nesting is how deep the brackets of s go at most, quotes not considered.
func nesting(s string) int {
	depth, most := 0, 0
	for i := range len(s) {
		switch s[i] {
		case '(', '{', '[':
			depth++
			most = max(most, depth)
		case ')', '}', ']':
			depth = max(0, depth-1)
		}
	}
	return most
}

// readable puts the fields back in the place of their markers.
func (c *shellCheck) readable(s string) string {
	for _, n := range c.markers(s) {
		s = strings.ReplaceAll(s, fmt.Sprintf("%s%0*dz", c.prefix, markerDigits, n), "{"+c.fields[n].name+"}")
	}
	return s
}

// visit is called for every node before its children, and with nil after.
func (c *shellCheck) visit(n syntax.Node) bool {
	if n == nil {
		c.stack = c.stack[:len(c.stack)-1]
		return true
	}
	if c.problem != nil {
		return false
	}
	c.node(n)
	c.stack = append(c.stack, n)
	return true
}

func (c *shellCheck) node(n syntax.Node) {
	switch n := n.(type) {
	case *syntax.Lit:
		c.literal(n)
	case *syntax.SglQuoted:
		c.refuse(n.Value, "is inside quotes; it is quoted for you, so remove the quotes around it (write {{ and }} for literal braces)")
	case *syntax.Comment:
		c.refuse(n.Text, "is inside a comment, which a value with a newline would end; remove it there")
	case *syntax.CallExpr:
		c.call(n)
	case *syntax.DeclClause:
		c.declaration(n)
	case *syntax.Assign:
		c.assign(n)
	case *syntax.ArrayElem:
		c.arithmetic(n.Index)
	case *syntax.ParamExp:
		c.parameter(n)
	case *syntax.ArithmExp:
		c.arithmetic(n.X)
	case *syntax.ArithmCmd:
		c.arithmetic(n.X)
	case *syntax.LetClause:
		for _, x := range n.Exprs {
			c.arithmetic(x)
		}
	case *syntax.CStyleLoop:
		c.arithmetic(n.Init)
		c.arithmetic(n.Cond)
		c.arithmetic(n.Post)
	case *syntax.BinaryTest:
		c.binaryTest(n)
	case *syntax.UnaryTest:
		c.unaryTest(n)
	case *syntax.Redirect:
		c.redirect(n)
	case *syntax.ForClause:
		if n.Select {
			c.forbid(n, "select", "use a for loop")
		}
	case *syntax.WordIter:
		c.assigned(n.Name.Value, n)
	case *syntax.FuncDecl:
		if n.Name == nil {
			c.forbid(n, "a function without a name", "name it")
		}
	case *syntax.CoprocClause:
		c.forbid(n, "coproc", "use a pipe")
	}
}

// literal places the markers of one unquoted literal.
func (c *shellCheck) literal(lit *syntax.Lit) {
	for _, n := range c.markers(lit.Value) {
		if why := c.misplaced(); why != "" {
			c.unsafe(n, why)
			return
		}
		c.placed[n]++
	}
}

// misplaced says why a literal with a marker, whose ancestors are on the
// stack, is not data, or "".
func (c *shellCheck) misplaced() string {
	if why := c.enclosed(); why != "" {
		return why
	}
	if len(c.stack) < 2 {
		return "does not stand in a command"
	}
	word, ok := c.stack[len(c.stack)-1].(*syntax.Word)
	if !ok {
		return "names a variable, a function or a descriptor; only a literal name can"
	}
	if why := c.neighbours(word); why != "" {
		return why
	}
	switch parent := c.stack[len(c.stack)-2].(type) {
	case *syntax.CallExpr, *syntax.WordIter, *syntax.Redirect: // each has checked itself
		return ""
	case *syntax.CaseClause:
		if parent.Word == word {
			return ""
		}
	case *syntax.CaseItem:
		return "is a case pattern, where * and ? match anything; compare it as the subject: case {x} in"
	}
	return "stands where bash does not take a word as data; use it as an argument of a command"
}

// enclosed says which ancestor would make bash read the value as more than
// one word of data, or "".
func (c *shellCheck) enclosed() string {
	assigned := true // still in the assignment's own value, not in a command of it
	for i := len(c.stack) - 1; i >= 0; i-- {
		switch n := c.stack[i].(type) {
		case *syntax.DblQuoted:
			if assigned {
				return "is inside quotes; it is quoted for you, so remove the quotes around it (write {{ and }} for literal braces)"
			}
			return "is in a $( ) inside quotes; assign the $( ) to a variable first, without quotes, and use the variable"
		case *syntax.CmdSubst:
			if n.Backquotes {
				return "is inside backquotes; write $( ) instead"
			}
			assigned = false
		case *syntax.ProcSubst:
			assigned = false
		case *syntax.Subshell:
			if at := int(n.Lparen.Offset()); at > 0 && c.script[at-1] == '(' || strings.HasPrefix(c.script[at+1:], "(") {
				return "is inside ((, which bash may take for arithmetic; put a space between the brackets"
			}
		case *syntax.ParamExp:
			if n.Short {
				return "follows the name of a shell variable; write that one as ${{name}}"
			}
			return "is inside ${ }; assign nothing from it there, use it as an argument of a command"
		case *syntax.ArithmExp, *syntax.ArithmCmd, *syntax.LetClause, *syntax.CStyleLoop:
			return "is inside arithmetic, which bash evaluates; pass it to a command such as expr or awk instead"
		case *syntax.TestClause:
			return "is inside [[ ]], which may evaluate it; use case {x} in … esac, or a command such as grep"
		case *syntax.Assign:
			if assigned {
				return "is inside an assignment; use it directly as an argument of the command that needs it"
			}
		case *syntax.DeclClause:
			return "is inside a declaration, which evaluates its arguments; use it directly as an argument of a command"
		case *syntax.ExtGlob:
			return "is inside a pattern; use it as a word of its own"
		}
	}
	return ""
}

// neighbours says what in the marker's word would change the value, or "".
func (c *shellCheck) neighbours(w *syntax.Word) string {
	for i, part := range w.Parts {
		switch part := part.(type) {
		case *syntax.Lit:
			text := part.Value
			if i == 0 {
				text = strings.TrimPrefix(text, "~/")
			}
			if strings.ContainsAny(text, "{}[]~") {
				return "stands beside an unquoted { } [ ] or ~, which bash would expand together with it; quote that text, as in '['{x}']'"
			}
		case *syntax.SglQuoted, *syntax.DblQuoted, *syntax.ParamExp, *syntax.CmdSubst:
		default:
			return "stands beside a pattern or a substitution; make it a word of its own"
		}
	}
	if end := int(w.End().Offset()); end < len(c.script) && strings.IndexByte("<>(", c.script[end]) >= 0 {
		return "is followed by < > or (, so that a number would be taken for a descriptor; put a space between"
	}
	return ""
}

// redirect checks the target of < > and their kin.
func (c *shellCheck) redirect(r *syntax.Redirect) {
	switch r.Op {
	case syntax.Hdoc, syntax.DashHdoc:
		c.forbid(r, "a here-document", "write the text with printf")
	case syntax.DplIn, syntax.DplOut:
		for _, n := range c.markersOf(r.Word) {
			c.unsafe(n, "is the target of >& or <&, which bash expands twice; write > or < and a space")
		}
		if _, ok := c.plain(r.Word); !ok {
			c.forbid(r, ">& or <& with a computed target, which it expands twice,", "write &> or <")
		}
	}
	if r.N != nil && strings.HasPrefix(r.N.Value, "{") {
		c.assigned(strings.Trim(r.N.Value, "{}"), r)
	}
}

// markersOf returns the markers in a word's own text, not those of commands
// inside it.
func (c *shellCheck) markersOf(w *syntax.Word) []int {
	var found []int
	syntax.Walk(w, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.CmdSubst, *syntax.ProcSubst:
			return false
		case *syntax.Lit:
			found = append(found, c.markers(n.Value)...)
		case *syntax.SglQuoted:
			found = append(found, c.markers(n.Value)...)
		}
		return true
	})
	return found
}

// refuse refuses the first marker in s.
func (c *shellCheck) refuse(s, why string) {
	if found := c.markers(s); len(found) > 0 {
		c.unsafe(found[0], why)
	}
}

// unsafe records that the marker n stands in a place that is not safe.
func (c *shellCheck) unsafe(n int, why string) {
	if c.problem == nil {
		c.problem = c.unsafeField(c.fields[n], why)
	}
}

func (c *shellCheck) unsafeField(f *field, why string) *fault.Error {
	return fault.New(fault.Invalid, "{%s} at %s %s", clip(f.name), position(c.source, f.at), why).
		WithCode(UnsafePlaceholder).On(TemplateField)
}

// forbid records that the template evaluates what it computes.
func (c *shellCheck) forbid(n syntax.Node, what, instead string) {
	if c.problem == nil {
		c.problem = fault.New(fault.Invalid, "line %d has %s, which a template with {fields} may not use, since bash could evaluate a value there; %s",
			n.Pos().Line(), c.readable(what), instead).WithCode(UnsafePlaceholder).On(TemplateField)
	}
}

// bad is a fault of the template that says where.
func (c *shellCheck) bad(offset int, format string, args ...any) *fault.Error {
	return parser{source: c.source}.bad(offset, format, args...)
}

package render

import (
	"path"
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// evaluators run or evaluate text that they are given, by argument, variable
// or standard input. No template with fields may use one.
var evaluators = words(`
	eval source . trap alias bind complete compgen compopt enable fc let declare typeset local export readonly coproc [[ ((
	bash rbash ash dash sh zsh ksh mksh pdksh lksh oksh yash posh fish csh tcsh elvish nu pwsh busybox toybox
	parallel watch at batch script scriptreplay su sg newgrp runuser ssh slogin rsh dbclient mosh expect tmux screen entr crontab`)

// evaluates reports whether a command of that name, or a version of it such
// as bash-5.2, is an evaluator.
func evaluates(name string) bool {
	return evaluators[name] || evaluators[strings.TrimRight(name, "0123456789.-")]
}

func words(list string) map[string]bool {
	set := map[string]bool{}
	for _, w := range strings.Fields(list) {
		set[w] = true
	}
	return set
}

// carriers pass their arguments on to another command, or may start a shell
// on them. They take literal arguments only.
var carriers = []string{"xargs", "sudo", "doas", "pkexec", "setpriv", "unshare", "nsenter", "chroot", "flock", "strace", "ltrace",
	"systemd-run", "start-stop-daemon", "runcon", "chrt", "taskset", "numactl", "prlimit", "setarch", "unbuffer", "fakeroot", "proot", "bwrap",
	"firejail", "docker", "podman", "nerdctl", "kubectl", "lxc-attach", "machinectl", "daemonize", "caffeinate", "rlwrap", "ionice"}

// strict are builtins that evaluate names or take options that do. They take
// literal arguments only.
var strict = []string{"read", "mapfile", "readarray", "getopts", "unset", "wait", "hash", "jobs", "set", "shopt", "caller", "history", "suspend"}

// wrapper is a command that runs the command in its arguments as it is.
type wrapper struct {
	flags    string   // short options without a value
	values   string   // short options with one
	long     []string // long options without a value, or with =value
	pairs    []string // long options whose value is the next word
	operands int      // words before the command
	assigns  bool     // NAME=value words before the command
}

var wrappers = map[string]wrapper{
	"command": {flags: "p"},
	"builtin": {},
	"exec":    {flags: "cl", values: "a"},
	"nohup":   {},
	"setsid":  {flags: "cfw", long: []string{"ctty", "fork", "wait"}},
	"env":     {flags: "i0v", values: "uC", long: []string{"ignore-environment", "null", "debug", "unset", "chdir"}, pairs: []string{"unset", "chdir"}, assigns: true},
	"nice":    {values: "n", long: []string{"adjustment"}, pairs: []string{"adjustment"}},
	"stdbuf":  {values: "ioe", long: []string{"input", "output", "error"}, pairs: []string{"input", "output", "error"}},
	"time":    {flags: "pvaq", values: "fo", long: []string{"portability", "verbose", "append", "quiet", "format", "output"}, pairs: []string{"format", "output"}},
	"timeout": {flags: "v", values: "ks", long: []string{"foreground", "preserve-status", "verbose", "kill-after", "signal"}, pairs: []string{"kill-after", "signal"}, operands: 1},
}

// call checks a simple command: its name must be literal, and if it has
// fields it must take them as data.
func (c *shellCheck) call(call *syntax.CallExpr) {
	if len(call.Args) == 0 {
		return
	}
	words, ok := c.unwrap(call.Args)
	if !ok || len(words) == 0 {
		return
	}
	name, args := c.commandName(words[0]), words[1:]
	if name == "" {
		return
	}
	found := c.markersIn(args)
	if len(found) > 0 && c.funcs[name] {
		c.unsafe(found[0], "is an argument of the function "+name+"; use it directly in the command that needs it")
		return
	}
	switch {
	case name == "printf":
		c.printf(args)
	case name == "test" || name == "[":
		c.test(name, args)
	case slices.Contains(strict, name):
		c.literalsOnly(words, name)
		c.checkNames(name, args)
	case slices.Contains(carriers, name):
		c.literalsOnly(words, name)
		c.noEvaluator(args, name)
	case name == "find":
		c.find(args)
	}
}

// commandName is the last element of a command's literal name; "" after a
// problem was recorded.
func (c *shellCheck) commandName(w *syntax.Word) string {
	if found := c.markersOf(w); len(found) > 0 {
		c.unsafe(found[0], "is a command name; write the command's name and pass it as an argument")
		return ""
	}
	name, ok := c.plain(w)
	if !ok {
		c.forbid(w, "a command whose name is computed", "write the command's name")
		return ""
	}
	if name = path.Base(name); evaluates(name) {
		c.evaluator(w, name)
		return ""
	}
	return name
}

// evaluator refuses a command that evaluates what it is given, pointing at
// the field that it would be given if there is one.
func (c *shellCheck) evaluator(w *syntax.Word, name string) {
	if found := c.markersIn(c.current); len(found) > 0 {
		c.unsafe(found[0], "is an argument of "+name+", which evaluates its arguments; call the command that needs it directly")
		return
	}
	c.forbid(w, name, "call the commands that are needed directly")
}

// unwrap looks through env, timeout and their kin to the command that runs.
func (c *shellCheck) unwrap(words []*syntax.Word) ([]*syntax.Word, bool) {
	c.current = words
	for len(words) > 0 {
		name := c.commandName(words[0])
		if name == "" {
			return nil, false
		}
		w, ok := wrappers[name]
		if !ok {
			return words, true
		}
		if name == "command" && len(words) > 1 {
			if option, ok := c.plain(words[1]); ok && (option == "-v" || option == "-V") {
				return nil, true // only asks what the rest is
			}
		}
		n, ok := c.before(w, words[1:])
		if !ok {
			c.cannotSee(name, words)
			return nil, false
		}
		words = words[1+n:]
	}
	return nil, true
}

// cannotSee refuses a wrapper whose command can't be found.
func (c *shellCheck) cannotSee(name string, words []*syntax.Word) {
	if found := c.markersIn(words); len(found) > 0 {
		c.unsafe(found[0], "is an argument of "+name+" with options that hide which command runs; write the command itself, with literal options before it")
		return
	}
	c.forbid(words[0], name+" with options that hide which command runs", "write the command itself, with literal options before it")
}

// before counts the words before the wrapped command, all of them literal.
func (c *shellCheck) before(w wrapper, words []*syntax.Word) (int, bool) {
	operands, options := w.operands, true
	for i := 0; i < len(words); i++ {
		text, ok := c.plain(words[i])
		if !ok {
			// The name itself is for the caller to refuse.
			return i, operands == 0 && !strings.HasPrefix(words[i].Lit(), "-")
		}
		switch {
		case options && text == "--":
			options = false
		case options && strings.HasPrefix(text, "-") && (text != "-" || w.assigns):
			more, ok := w.option(text)
			if !ok || i+more >= len(words) {
				return 0, false
			}
			if _, ok := c.plain(words[i+more]); !ok {
				return 0, false
			}
			i += more
		case w.assigns && assignment(text):
			options = false
		case operands > 0:
			operands--
			options = false
		default:
			return i, true
		}
	}
	return len(words), true
}

// assignment reports whether env takes the word as NAME=value.
func assignment(s string) bool {
	name, _, ok := strings.Cut(s, "=")
	return ok && identifier(name)
}

// option says how many words an option takes beside its own.
func (w wrapper) option(text string) (int, bool) {
	long, isLong := strings.CutPrefix(text, "--")
	if !isLong {
		return w.short(text[1:])
	}
	name, _, attached := strings.Cut(long, "=")
	switch {
	case !slices.Contains(w.long, name):
		return 0, false
	case !attached && slices.Contains(w.pairs, name):
		return 1, true
	}
	return 0, true
}

// short reads a cluster of short options and says how many words it takes
// beside its own.
func (w wrapper) short(cluster string) (int, bool) {
	if strings.Trim(cluster, "0123456789") == "" && strings.Contains(w.values, "n") {
		return 0, true // nice -10
	}
	for i := range len(cluster) {
		if strings.IndexByte(w.values, cluster[i]) >= 0 {
			if i == len(cluster)-1 {
				return 1, true
			}
			return 0, true
		}
		if strings.IndexByte(w.flags, cluster[i]) < 0 {
			return 0, false
		}
	}
	return 0, true
}

// literalsOnly refuses arguments that are computed.
func (c *shellCheck) literalsOnly(words []*syntax.Word, name string) {
	if found := c.markersIn(words); len(found) > 0 {
		c.unsafe(found[0], "is an argument of "+name+", which evaluates or passes on its arguments; call the command that needs it directly")
		return
	}
	for _, w := range words {
		if _, ok := c.plain(w); !ok {
			c.forbid(w, name+" with computed arguments", "give it literal arguments only")
		}
	}
}

// noEvaluator refuses a carrier that starts an evaluator.
func (c *shellCheck) noEvaluator(words []*syntax.Word, carrier string) {
	for _, w := range words {
		if text, ok := c.plain(w); ok && (evaluates(path.Base(text)) || wrappers[path.Base(text)].values != "" || slices.Contains(carriers, path.Base(text))) {
			c.forbid(w, carrier+" "+text, "let "+carrier+" run the command itself")
		}
	}
}

// checkNames checks the variables that a builtin fills or reads by name.
func (c *shellCheck) checkNames(builtin string, args []*syntax.Word) {
	for _, w := range args {
		text, _ := c.plain(w)
		switch {
		case builtin == "set" || builtin == "shopt":
		case strings.ContainsAny(text, "[]"):
			c.forbid(w, builtin+" with a subscript", "use a plain variable name")
		case (builtin == "mapfile" || builtin == "readarray") && strings.HasPrefix(text, "-") && strings.Contains(text, "C"),
			builtin == "jobs" && strings.HasPrefix(text, "-") && strings.Contains(text, "x"):
			c.forbid(w, builtin+" "+text, "leave that option out")
		case evaluated(text):
			c.assigned(text, w)
		}
	}
}

// printf takes fields as data once its format is literal.
func (c *shellCheck) printf(args []*syntax.Word) {
	if len(args) == 0 {
		return
	}
	first := args[0]
	text, literal := c.plain(first)
	switch {
	case literal && strings.HasPrefix(text, "-v"):
		c.printfInto(args)
		return
	case literal || c.startsLiterally(first):
		return
	}
	if found := c.markersOf(first); len(found) > 0 {
		c.unsafe(found[0], "is the format of printf, where -v would be an option; write printf '%s' {"+c.fields[found[0]].name+"}")
		return
	}
	c.forbid(first, "printf with a computed format", "write printf '%s' and the value")
}

func (c *shellCheck) printfInto(args []*syntax.Word) {
	if found := c.markersIn(args); len(found) > 0 {
		c.unsafe(found[0], "is an argument of printf -v, which evaluates the name before it; print it without -v")
		return
	}
	text, _ := c.plain(args[0])
	if text = text[2:]; text == "" && len(args) > 1 {
		text, _ = c.plain(args[1])
	}
	if !identifier(text) || evaluated(text) {
		c.forbid(args[0], "printf -v with a name that is not a plain one", "use a plain variable name")
	}
}

// startsLiterally reports whether a word starts with literal text that is
// not the dash of an option.
func (c *shellCheck) startsLiterally(w *syntax.Word) bool {
	switch part := w.Parts[0].(type) {
	case *syntax.Lit:
		return !strings.HasPrefix(part.Value, "-") && !strings.HasPrefix(part.Value, "\\") && !strings.HasPrefix(part.Value, c.prefix)
	case *syntax.SglQuoted:
		return part.Value != "" && part.Value[0] != '-' && !part.Dollar
	case *syntax.DblQuoted:
		if len(part.Parts) > 0 {
			lit, ok := part.Parts[0].(*syntax.Lit)
			return ok && lit.Value[0] != '-' && lit.Value[0] != '\\'
		}
	}
	return false
}

// test allows the forms whose operators are literal, and no field: with
// computed operators, -v would evaluate what follows.
func (c *shellCheck) test(name string, args []*syntax.Word) {
	if found := c.markersIn(args); len(found) > 0 {
		c.unsafe(found[0], "is an argument of "+name+", which may evaluate it; use case {x} in … esac, or a command such as grep")
		return
	}
	if name == "[" && len(args) > 0 {
		args = args[:len(args)-1]
	}
	literal := func(i int) string { text, _ := c.plain(args[i]); return text }
	for len(args) > 1 && literal(0) == "!" {
		args = args[1:]
	}
	computed := false
	for _, w := range args {
		if _, ok := c.plain(w); !ok {
			computed = true
			if !c.oneWord(w) {
				c.forbid(w, name+" with a value that may become several words", `put it in double quotes, as in "$x"`)
				return
			}
		}
	}
	if !computed {
		if slices.ContainsFunc(args, func(w *syntax.Word) bool { text, _ := c.plain(w); return strings.Contains(text, "[") }) {
			c.forbid(args[0], name+" with a subscript", "use a plain variable name")
		}
		return
	}
	switch {
	case len(args) == 1:
		return
	case len(args) == 2 && unaryTest.MatchString(literal(0)):
		return
	case len(args) == 3 && binaryTest.MatchString(literal(1)):
		return
	}
	c.forbid(args[0], name+" in a form that may evaluate a value", "test one thing at a time, with a literal operator")
}

var (
	unaryTest  = regexp.MustCompile(`^-[bcdefghknoprstuwxzGLNOS]$`)
	binaryTest = regexp.MustCompile(`^(?:=|==|!=|-eq|-ne|-lt|-le|-gt|-ge|-nt|-ot|-ef)$`)
)

// oneWord reports whether bash makes exactly one word of w.
func (c *shellCheck) oneWord(w *syntax.Word) bool {
	for _, part := range w.Parts {
		switch part := part.(type) {
		case *syntax.SglQuoted, *syntax.ArithmExp:
		case *syntax.DblQuoted:
			for _, inner := range part.Parts {
				if p, ok := inner.(*syntax.ParamExp); ok && (p.Index != nil || p.Names != 0 || p.Param != nil && p.Param.Value == "@") {
					return false
				}
			}
		case *syntax.Lit:
			if strings.ContainsAny(part.Value, "*?[]{}~") {
				return false
			}
		case *syntax.ParamExp:
			if !c.allNumbers([]syntax.WordPart{part}) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// find may search for a field, but not with -exec beside it.
func (c *shellCheck) find(args []*syntax.Word) {
	runs := slices.ContainsFunc(args, func(w *syntax.Word) bool {
		text, _ := c.plain(w)
		return slices.Contains([]string{"-exec", "-execdir", "-ok", "-okdir"}, text)
	})
	if !runs {
		c.findOperands(args)
		return
	}
	if found := c.markersIn(args); len(found) > 0 {
		c.unsafe(found[0], "is an argument of find -exec, which runs its arguments; let find print the names and loop over them, or drop -exec")
		return
	}
	c.noEvaluator(args, "find -exec")
}

// findOperands allows a field after each -name and its kin and one in the
// place of a path: more could spell -exec and a shell together.
func (c *shellCheck) findOperands(args []*syntax.Word) {
	free := 0
	for i, w := range args {
		found := c.markersOf(w)
		if len(found) == 0 || !strings.HasPrefix(c.script[w.Pos().Offset():], c.prefix) {
			continue
		}
		if before, _ := c.plain(args[max(0, i-1)]); i > 0 && len(before) > 1 && before[0] == '-' {
			continue
		}
		if free++; free > 1 {
			c.unsafe(found[0], "is a second free argument of find, where values together could be -exec; pass it after an option such as -name, or as ./{"+c.fields[found[0]].name+"}")
			return
		}
	}
}

// markersIn returns the markers in the words' own text.
func (c *shellCheck) markersIn(words []*syntax.Word) []int {
	var found []int
	for _, w := range words {
		found = append(found, c.markersOf(w)...)
	}
	return found
}

// plain returns the text of a word that bash takes as it is: literals and
// quotes, no field and nothing that is expanded.
func (c *shellCheck) plain(w *syntax.Word) (string, bool) {
	var out strings.Builder
	for i, part := range w.Parts {
		switch part := part.(type) {
		case *syntax.Lit:
			if expands(part.Value) || len(c.markers(part.Value)) > 0 {
				return "", false
			}
			if i == 0 && strings.HasPrefix(part.Value, "~") && !strings.HasPrefix(part.Value, "~/") {
				return "", false
			}
			out.WriteString(unescape(part.Value, ""))
		case *syntax.SglQuoted:
			if part.Dollar {
				return "", false
			}
			out.WriteString(part.Value)
		case *syntax.DblQuoted:
			for _, inner := range part.Parts {
				lit, ok := inner.(*syntax.Lit)
				if !ok {
					return "", false
				}
				out.WriteString(unescape(lit.Value, "$`\"\\\n"))
			}
		default:
			return "", false
		}
	}
	return out.String(), true
}

// expands reports whether bash may make something else of unquoted text.
func expands(s string) bool {
	return strings.ContainsAny(s, "*?$`") ||
		strings.Contains(s, "[") && s != "[" && s != "[[" ||
		strings.Contains(s, "{") && (strings.Contains(s, ",") || strings.Contains(s, ".."))
}

// unescape removes backslashes: all of them, or those before one of only.
func unescape(s, only string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) && (only == "" || strings.IndexByte(only, s[i+1]) >= 0) {
			i++
			if s[i] == '\n' {
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}

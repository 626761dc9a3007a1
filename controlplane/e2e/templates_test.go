package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// What a template's author wrote decides what runs: a value is never read as
// a template or as a command again. A Python template's plain field is the
// author's word that the value is code; it runs where everything does.
func TestValuesOfTemplatesAreData(t *testing.T) {
	s := start(t, options{runEnv: onContainers(t)})
	s.tool("say", "printf %s {x}; printf '|%s' {other}", "x", "other")
	ses := s.session()
	for _, value := range []string{"{other}", "{x}", "{{other}}", "$&", "$'", "$'\\x41'", "%s", "%n", "\\1", "&", "$(id)", "`id`", `a"b`, "a'b", "a\nb", "$HOME", "*", "!!"} {
		call := s.call(ses, "say", object{"x": value, "other": "SECOND"})
		wantStatus(t, call, "ok")
		if got := call.str("stdout"); got != value+"|SECOND" {
			t.Errorf("%q: got %q", value, got)
		}
	}
	// Quotes round a field would end at the value's own: such a template is
	// refused, and the answer says what to write.
	for _, command := range []string{`echo "{x}"`, `echo '{x}'`, "echo `echo {x}`", `eval {x}`, `bash -c {x}`} {
		got := s.put("/admin/workspace-tools/quoted", object{"name": "quoted", "handler_kind": "shell_template", "handler_payload": object{"command": command}}).want(400)
		if got.str("field") != "handler_payload.command" || got.str("code") != "unsafe_placeholder" || len(got.str("detail")) < 20 {
			t.Errorf("%s: got %s", command, got.body)
		}
	}

	python := func(name, code string) {
		t.Helper()
		s.put("/admin/workspace-tools/"+name, object{
			"name": name, "parameters": object{"type": "object", "properties": object{"x": object{}}},
			"handler_kind": "python_template", "handler_payload": object{"code": code},
		}).want(200)
	}
	python("safe", "print(len({x!r}), {x!r})")
	python("plain", "print('''{x}''')")
	const breaks = `'''); import os; os.system('id -u; cat /proc/1/environ; ls /srv/*; echo $CANARY_ENV') #`
	call := s.call(ses, "safe", object{"x": breaks})
	wantStatus(t, call, "ok")
	if got := call.str("stdout"); got != fmt.Sprintf("%d %s\n", len(breaks), breaks) {
		t.Errorf("got %q", got)
	}
	// As the program of python_exec it may do the same, and no more.
	call = s.call(ses, "plain", object{"x": breaks})
	direct := s.py(ses, "print('''"+breaks+"''')")
	if call.str("stdout") != direct.str("stdout") || call.str("status") != direct.str("status") || !strings.Contains(call.str("stdout"), "\n") {
		t.Errorf("got %v, by itself %v", call, direct)
	}
	if strings.HasPrefix(strings.TrimSpace(call.str("stdout")), "0\n") || strings.Contains(call.str("stdout"), "must-not-be-seen") {
		t.Errorf("got %q", call.str("stdout"))
	}
	python("any", "print(repr({x!r}), '{x}')")
	for value, want := range map[string]string{"true": "True True", "null": "None None", "1.50": "1.5 1.5", "1e16": "1e+16 1e+16", `"a b"`: "'a b' a b", `[1]`: "[1] [1]"} {
		if call := s.call(ses, "any", json.RawMessage(`{"x":`+value+`}`)); call.str("stdout") != want+"\n" {
			t.Errorf("%s: got %v", value, call)
		}
	}
}

// TestFiveMebibytes holds that what is larger than an argument of a process
// may be goes another way, or is refused by its name.
func TestFiveMebibytes(t *testing.T) {
	s := start(t, options{runEnv: onContainers(t)})
	s.tool("say", "printf %s {x} | wc -c", "x")
	s.makeTool("t", "class Tools:\n    def size(self, text: str):\n        \"\"\"Counts.\"\"\"\n        return len(text)\n").want(200)
	ses := s.session()
	large := strings.Repeat("a", 5<<20)
	if call := s.py(ses, "x = '"+large+"'\nprint(len(x))"); call.str("stdout") != "5242880\n" {
		t.Errorf("got %v", call)
	}
	if call := s.sh(ses, ": '"+large+"'; echo ran"); call.str("stdout") != "ran\n" {
		t.Errorf("got %.500v", call)
	}
	call := s.post("/v1/agent-sessions/"+ses+"/run?wait=60", object{"tool_ids": []string{"t"}, "tool_calls": []object{
		{"id": "1", "name": "size", "arguments": object{"text": large}}}}).want(200).list("calls")[0]
	wantStatus(t, call, "ok")
	if got := call.obj("returned").num("value"); got != 5<<20 {
		t.Errorf("got %v", got)
	}
	call = s.call(ses, "say", object{"x": large})
	if call.obj("error").str("code") != "argument_too_large" || call.obj("error").str("field") != "x" {
		t.Errorf("got %.500v", call)
	}
	wantStatus(t, s.call(ses, "say", object{"x": large[:100_000]}), "ok")
}

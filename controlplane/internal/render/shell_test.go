package render

import (
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/fault"
)

// safeTemplates are accepted; TestAcceptedTemplatesRunNothing runs them.
var safeTemplates = []string{
	`grep -rn {x} /workspace`,
	`printf %s {x}`,
	`printf '%s\n' {x} {x}`,
	`printf '%s' --glob={x}`,
	`printf '%s' "a b"/{x}`,
	`printf '%s' $HOME/{x}`,
	`printf '%s' ${{HOME}}/{x}`,
	`printf '%s' {x}{y}`,
	`printf '%s' ~/{x}`,
	`printf '%s' 'lit'{x}"lit"`,
	`printf '%s' '['{x}']'`,
	`echo {x} | cat`,
	`for i in {x} {y}; do printf '%s' "$i"; done`,
	`for i in a {x}; do case $i in a) ;; *) printf '%s' "$i" ;; esac; done`,
	`case {x} in a*) echo a ;; *) echo other ;; esac`,
	`cat <<< {x}`,
	`cat 2>/dev/null < {x}; true`,
	`out=$(printf %s {x}); printf '%s' "$out"`,
	`out=$(printf %s {x} | wc -c); if [ "$out" -gt 3 ]; then echo long; fi`,
	`out=$(printf %s {x}); if [ -n "$out" ]; then echo full; fi`,
	`out=$(printf %s {x}); if [[ -n $out && $out == a* ]]; then echo a; fi`,
	`printf '%s\n' {x} | while read -r line; do printf '%s' "$line"; done`,
	`n=0; for i in {x} {y}; do n=$((n + 1)); done; echo "$n"`,
	`for ((i = 0; i < 3; i++)); do printf '%s' {x}; done`,
	`f() {{ printf '%s' {x}; }}; f`,
	`( printf '%s' {x} )`,
	`{{ printf '%s' {x}; }}`,
	`if printf '%s' {x} | grep -q a; then echo yes; else echo no; fi`,
	`env LC_ALL=C printf '%s' {x}`,
	`timeout -k 1 5 printf '%s' {x}`,
	`nice -n 5 printf '%s' {x}`,
	`command printf '%s' {x}`,
	`command -v {x}; true`,
	`diff <(printf %s {x}) <(printf %s {y}); true`,
	`printf '%s' {x} &>/dev/null; printf '%s' {y} 2>&1`,
	`cd /; ls -d -- {x} 2>/dev/null; true`,
	`find . -maxdepth 1 -name {x}`,
	`find {x} -name {y}`,
	`find ./{x} ./{y} -maxdepth 0`,
	`find . -maxdepth 1 -name {x} | xargs -r ls`,
	`awk -v v={x} 'BEGIN {{ print v }}'`,
	`python3 -c 'import sys; sys.stdout.write(sys.argv[1])' {x}`,
	`a=(1 2 3); echo "${{a[1]}} ${{#a[@]}}"; printf '%s' {x}`,
	`v=abc; echo "${{v:1:1}}" "${{v#a}}" "${{v/b/c}}"; printf '%s' {x}`,
	`set -euo pipefail; printf '%s' {x}`,
	"# a comment\nprintf '%s' {x} # another\n",
	"printf '%s' \\\n  {x}",
	`! printf '%s' {x} | grep -q zzz`,
	`time printf '%s' {x}`,
	`export LANG=C; printf '%s' {x}`,
	`printf '%s' {x} > /dev/null`,
	`exec printf '%s' {x}`,
	`while false; do :; done; printf '%s' {x}`,
	`printf '%s' \"{x}`,
	`ls {x}/*.go 2>/dev/null; true`,
	`printf '%s' -{x}`,
	`[[ 3 -gt 2 ]] && printf '%s' {x}`,
	`[ $# -eq 0 ] && printf '%s' {x}`,
}

// unsafeTemplates are refused as unsafe_placeholder.
var unsafeTemplates = []string{
	`echo "{x}"`, `echo '{x}'`, "echo \"`{x}`\"", "echo `grep {x} f`", `echo "$(grep {x} f)"`, `echo $'{x}'`, `echo $"{x}"`,
	"cat <<EOF\n{x}\nEOF\n", "cat <<EOF {x}\nhi\nEOF\n", "cat <<'EOF'\nhi\nEOF\necho {x}", "cat <<-EOF\n\t{x}\nEOF\n",
	`echo $(( {x} ))`, `echo $[ {x} ]`, `(( {x} ))`, `let n={x}`, `for (( i={x}; i<3; i++ )); do :; done`,
	`[[ {x} -eq 1 ]]`, `[[ -v {x} ]]`, `[[ {x} == a ]]`, `[[ a == {x} ]]`, `[[ a =~ {x} ]]`, `[[ $(grep {x} f) == a ]]`,
	`test -v {x}`, `test {x} = a`, `[ {x} = a ]`, `[ -n {x} ]`, `\test -v {x}`, `"test" -v {x}`, `/usr/bin/test {x}`,
	`eval {x}`, `eval echo {x}`, `\eval {x}`, `"eval" {x}`, `e'v'al {x}`, `command eval {x}`, `builtin eval {x}`, `command builtin eval {x}`,
	`source {x}`, `. {x}`, `trap {x} EXIT`, `let {x}`, `\let {x}`, `declare {x}`, `declare a={x}`, `typeset {x}`, `local {x}`,
	`export {x}`, `export A={x}`, `readonly A={x}`, `builtin declare {x}`, `command export A={x}`, `"declare" {x}`,
	`read {x}`, `read -p {x} v`, `mapfile -C {x} -c 1 a`, `readarray {x}`, `getopts {x} v`, `unset {x}`, `wait -p {x}`, `hash -p {x} a`, `jobs -x {x}`,
	`printf -v {x} a`, `printf -v a {x}`, `printf {x}`, `printf {x} {y}`, `printf -{x} a`, `printf {x}{y} a`,
	`set -- {x}`, `set {x}; eval "$1"`, `shopt {x}`, `alias a={x}`, `enable -f {x} a`, `complete -C {x} a`, `compgen -W {x}`, `bind -x {x}`,
	`n={x}`, `n={x}; echo $((n))`, `n={x} env`, `n+={x}`, `a=({x})`, `a[{x}]=1`, `a[1]={x}`, `a=([{x}]=1)`, `{x}=1`, `{x}`, `{x} a`, `a{x} b`, `./{x}`, `/bin/{x} a`,
	`declare -a a=({x})`, `echo ${{a[{x}]}}`, `echo ${{a:{x}}}`, `echo ${{a:-{x}}}`, `echo ${{a:={x}}}`, `echo ${{{x}}}`, `echo ${x}`, `echo $a{x}`, `echo ${{a/{x}/b}}`, `echo ${{!{x}}}`,
	`echo \{x}`, `echo a\\{x}`, "echo $\\\n{x}", "echo \\\n{x}", "echo {x}\\\n>f",
	`bash -c {x}`, `bash -c "echo {x}"`, `bash -c 'echo "$1"' _ {x}`, `sh {x}`, `/bin/bash {x}`, `dash -c {x}`, `zsh {x}`, `ksh93 {x}`, `busybox sh -c {x}`, `bash5 -c {x}`, `bash-5.2 -c {x}`, `zsh-5.9 {x}`, `/usr/bin/env bash -c {x}`,
	`env -S {x}`, `env -S "bash -c" {x}`, `env -i -S{x}`, `env bash -c {x}`, `env {x} ls`, `env A={x} ls`, `env -u {x} ls`, `env --split-string={x}`, `env -C {x} ls`,
	`xargs {x}`, `xargs bash -c {x}`, `xargs grep {x}`, `find . -exec {x} \;`, `find . -exec bash -c {x} \;`, `find {x} -exec ls \;`, `find . -execdir {x} \;`, `find . -ok {x} \;`, `find . -"exec" {x} \;`, `find {x} {y}`, `find . {x} {x} {x} {y}`,
	`sudo {x}`, `sudo ls {x}`, `sudo bash -c {x}`, `su -c {x}`, `ssh host {x}`, `parallel {x}`, `watch {x}`, `script -c {x}`, `at {x}`, `doas ls {x}`,
	`nohup bash -c {x}`, `timeout 5 bash -c {x}`, `timeout {x} ls`, `timeout -k {x} 5 ls`, `timeout --unknown 5 ls {x}`, `nice bash -c {x}`, `stdbuf -oL bash -c {x}`, `setsid bash -c {x}`, `time bash -c {x}`, `exec bash -c {x}`, `exec {x}`, `exec -a {x} ls`, `nohup {x}`, `time {x}`, `! {x}`, `nice -n {x} ls`,
	`flock f bash -c {x}`, `strace bash -c {x}`, `chroot / bash -c {x}`, `unshare bash -c {x}`,
	`$CMD {x}`, `"$CMD" {x}`, `$(echo eval) {x}`, `ev{{a,}}l {x}`, `/bin/b*sh {x}`, `${{C}} {x}`, "`echo eval` {x}", `$'eval' {x}`,
	`coproc {x}`, `coproc cat {x}`, `coproc {x} {{ cat; }}`, `select i in {x}; do :; done`, `function {x} {{ :; }}`, `{x}() {{ :; }}`, `for {x} in a; do :; done`,
	`case a in {x}) :;; esac`, `case a in b|{x}) :;; esac`, `echo @({x})`, `echo {x}*(a)`, `echo <({x})`, `echo >({x})`,
	`echo {{a,{x}}}`, `echo {{1..{x}}}`, `echo {x}{{a,b}}`, `echo [{x}]`, `echo ~{x}`, `echo a=~{x}`, `echo {x}~`, `echo {x}=~`,
	`echo {x}>f`, `echo {x}1>f`, `echo {x}<f`, `echo >&{x}`, `echo <&{x}`, `echo 2>&{x}`, `exec {{fd}}>{x}; eval "$fd"`,
	"$\\\n'eval' {x}", "echo a\\\nb {x}",
	`v=$(echo {x}); echo >& "$v"`, `v=$(echo {x}); cat <& $v`, `for i in {x}; do echo 2>&"$i"; done`,
	`# {x}`, "echo a # {x}\nls",
	`f() {{ eval "$1"; }}; f {x}`, `f() {{ ls "$1"; }}; f {x}`, `grep() {{ ls "$1"; }}; grep {x}`, `f() {{ echo $(( $1 )); }}; f "$(printf %s {x})"`, `function f {{ [[ $1 -eq 1 ]]; }}; f $(echo {x})`,
	`for i in {x}; do eval $i; done`, `for i in {x}; do $i; done`, `for i in {x}; do [[ $i -eq 1 ]]; done`, `for i in {x}; do [[ -v $i ]]; done`, `for i in {x}; do echo $((i)); done`, `for i in {x}; do echo $[i]; done`, `for i in {x}; do (( i++ )); done`,
	`for i in {x}; do let n=i; done`, `for i in {x}; do echo ${{a[$i]}}; done`, `for i in {x}; do a[$i]=1; done`, `for i in {x}; do a=([$i]=1); done`, `for i in {x}; do echo ${{a:$i}}; done`, `for i in {x}; do echo ${{a:0:i}}; done`, `for i in {x}; do echo ${{!i}}; done`, `for i in {x}; do echo ${{i@P}}; done`,
	`for i in {x}; do test -v "$i"; done`, `for i in {x}; do [ "$i" "$i" ]; done`, `for i in {x}; do [ $i ]; done`, `for i in {x}; do [ -n "$i" -o -n b ]; done`, `for i in {x}; do printf "$i" a; done`, `for i in {x}; do printf $i 'a'; done`, `for i in {x}; do printf -v "$i" a; done`,
	`for i in {x}; do read "$i"; done`, `for i in {x}; do unset "$i"; done`, `for i in {x}; do declare "$i=1"; done`, `for i in {x}; do export "$i"; done`, `for i in {x}; do declare -i n=$i; done`, `declare -i n; for i in {x}; do n=$i; done`, `declare -n r=a; for i in {x}; do r=$i; done`, `for i in {x}; do local -a a="$i"; done`,
	`for RANDOM in {x}; do :; done`, `for SECONDS in {x}; do :; done`, `read RANDOM <<< {x}`, `v=$(echo {x}); RANDOM=$v`, `v=$(echo {x}); OPTIND=$v`,
	`echo {x} | bash`, `bash <<< {x}`, `bash < {x}`, `echo {x} > f; . ./f`, `echo {x} > f; source f`, `eval "$(echo {x})"`, `echo {x} | xargs bash -c`, `echo {x} | xargs -I@ sh -c @`, `echo {x} | sh -s`, `echo {x} | sudo bash`, `echo {x} | env bash`, `echo {x} | timeout 5 sh`, `echo {x} | nohup nice sh`, `echo {x} | find . -exec sh {{}} \;`,
	`read n <<< {x}; echo $((n))`, `read -r n <<< {x}; [[ $n -gt 1 ]]`, `echo {x} | while read -r l; do (( l )); done`, `mapfile -t a <<< {x}; echo $(( a[0] ))`, `printf -v n %s "$(echo {x})"; echo $((n))`,
	`n=$(echo {x}); echo $((n))`, `n=$(echo {x}); echo $(( $n + 1 ))`, `echo $(( $(echo {x}) ))`, `n=1; n=$(echo {x}); echo $((n))`, `n=1; for n in {x}; do :; done; echo $((n))`, `: {x}; echo $((_))`, `: {x}; echo $(( $_ ))`, `cd {x}; echo $((PWD))`, `: ${{n:=$(echo {x})}}; echo $((n))`,
	`PS4=$(echo {x}); set -x; ls`, `PROMPT_COMMAND='ls'; echo {x}`, `BASH_ENV=f ls {x}`,
	`((echo {x}) )`, `echo $((echo {x}) )`, `trap 'ls' EXIT; echo {x}`, `eval ls; echo {x}`, `history -s {x}`,
	`exec 3<>{x}>&{y}`, `echo {x}&>>{y}>&{x}`,
	`set -- "$(echo {x})"; eval "$1"`, `set -- $(echo {x})`, `read "$(echo {x})"`, `wait -p a[0]; echo {x}`, `read 'a[0]'; echo {x}`, `unset 'a[0]'; echo {x}`, `command let n=1; echo {x}`,
}

func TestSafeTemplatesAreAccepted(t *testing.T) {
	for _, template := range safeTemplates {
		if _, err := ParseShell(template); err != nil {
			t.Errorf("%s\n\t%v", template, err)
		}
	}
}

func TestUnsafeTemplatesAreRefused(t *testing.T) {
	for _, template := range unsafeTemplates {
		s, err := ParseShell(template)
		if err == nil {
			t.Errorf("accepted: %s (fields %v)", template, s.Fields())
			continue
		}
		f := fault.From(err)
		if f.Kind != fault.Invalid || f.Field != TemplateField || f.Code != UnsafePlaceholder && f.Code != BadTemplate {
			t.Errorf("%s: kind %s, code %s, field %s: %v", template, f.Kind, f.Code, f.Field, err)
		}
		if strings.Contains(f.Message, "bwfield") {
			t.Errorf("%s: the marker shows: %s", template, f.Message)
		}
	}
}

// TestMarkersNeverShow is for names that look like the marker itself.
func TestMarkersNeverShow(t *testing.T) {
	for _, template := range []string{"echo bwfield {x}", "echo bwfieldx bwfield00000z {x}", "bwfield() {{ :; }}; echo {x}"} {
		if got, err := renderShell(t, template, `{"x": "v"}`); err != nil || !strings.Contains(got, "bwfield") || !strings.HasSuffix(got, "v") {
			t.Errorf("%s: %q, %v", template, got, err)
		}
	}
}

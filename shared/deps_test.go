package shared_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// rules says what the packages of a folder may not import: prefixes of import
// paths.
var rules = []struct {
	dir    string
	deny   []string
	except []string
	why    string
}{
	{dir: "../shared", deny: []string{"github.com/bigwave/bigwave/controlplane", "github.com/bigwave/bigwave/runner"}, why: "shared knows neither side"},
	{dir: "../controlplane", deny: []string{"github.com/bigwave/bigwave/runner"}, why: "the two sides meet only in shared"},
	{dir: "../runner", deny: []string{"github.com/bigwave/bigwave/controlplane", "github.com/bigwave/bigwave/migrations", "database/sql", "github.com/jmoiron/sqlx"}, why: "a runner has no database and does not know the control plane"},
	{dir: "../shared/wire", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../shared/settings", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../shared/fault", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../runner/internal/sandbox/sandbox.go", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../runner/internal/inside", deny: []string{"github.com/", "golang.org/"}, why: "it runs inside the sandbox: standard library only"},
	{dir: "../runner/cmd/init", deny: []string{"github.com/", "golang.org/"}, except: []string{"github.com/bigwave/bigwave/runner/internal/inside"}, why: "it runs inside the sandbox: standard library only"},
	{dir: "../runner/internal/oci", deny: []string{"github.com/bigwave", "github.com/containerd"}, why: "a container's specification is pure"},
	{dir: "../controlplane/internal/policy", deny: outside, why: decides},
	{dir: "../controlplane/internal/tool", deny: outside, why: decides},
	{dir: "../controlplane/internal/pytool", deny: outside, why: decides},
	{dir: "../controlplane/internal/render", deny: outside, why: decides},
	{dir: "../controlplane/internal/session", deny: outside, why: decides},
	{dir: "../controlplane/internal/run", deny: outside, why: decides},
	{dir: "../controlplane/internal/identity", deny: outside, why: decides},
	{dir: "../controlplane/internal/audit", deny: outside, why: decides},
	{dir: "../controlplane/internal/fleet", deny: outside, why: decides},
	{dir: "../controlplane/internal/page", deny: outside, why: decides},
}

const decides = "what decides does not know how it is carried or kept"

var outside = []string{
	"github.com/labstack/echo", "net/http", "github.com/jmoiron/sqlx", "database/sql", "github.com/lib/pq",
	"github.com/nats-io", "github.com/bigwave/bigwave/shared/wire", "github.com/bigwave/bigwave/shared/bus",
	"github.com/bigwave/bigwave/controlplane/internal/store", "github.com/bigwave/bigwave/controlplane/internal/httpapi",
	"github.com/bigwave/bigwave/controlplane/internal/dispatch", "github.com/bigwave/bigwave/controlplane/internal/toolurl",
}

func TestImportRulesHold(t *testing.T) {
	for _, r := range rules {
		files := 0
		for path, imports := range goFiles(t, r.dir) {
			files++
			for _, imp := range imports {
				for _, deny := range r.deny {
					if strings.HasPrefix(imp, deny) && !slices.Contains(r.except, imp) {
						t.Errorf("%s imports %s: %s", path, imp, r.why)
					}
				}
			}
		}
		if files == 0 {
			t.Errorf("the rule for %s looks at no file", r.dir)
		}
	}
}

// homes says in which folders alone an import may stand, tests aside.
var homes = []struct {
	imp, under string
	at         []string
	why        string
}{
	{"github.com/bigwave/bigwave/shared/wire", "../controlplane", []string{"internal/dispatch"}, "domain types become wire messages in dispatch"},
	{"github.com/bigwave/bigwave/shared/settings", "../controlplane", []string{"internal/config"}, "settings are read in one place"},
	{"github.com/bigwave/bigwave/shared/settings", "../runner", []string{"internal/config"}, "settings are read in one place"},
	{"github.com/labstack/echo", "../controlplane", []string{"internal/httpapi"}, "HTTP stays in httpapi"},
	{"github.com/jmoiron/sqlx", "../controlplane", []string{"internal/store"}, "SQL stays in store"},
	{"database/sql", "../controlplane", []string{"internal/store"}, "SQL stays in store"},
	{"github.com/lib/pq", "../controlplane", []string{"internal/store"}, "SQL stays in store"},
	{"github.com/bigwave/bigwave/migrations", "../controlplane", []string{"internal/store"}, "SQL stays in store"},
	{"github.com/nats-io", "../controlplane", []string{"internal/dispatch", "internal/embeddednats", "cmd/controlplane"}, "the bus stays in dispatch"},
	{"github.com/nats-io", "../runner", []string{"internal/intake", "internal/stream", "internal/bustest", "cmd/runner", "cmd/bench"}, "what carries out does not know the bus"},
	{"github.com/bigwave/bigwave/runner/internal/sandbox/subprocess", "../runner", []string{"cmd/runner", "cmd/bench"}, "backends are chosen where things are wired"},
	{"github.com/bigwave/bigwave/runner/internal/sandbox/containerd", "../runner", []string{"cmd/runner", "cmd/bench"}, "backends are chosen where things are wired"},
	{"github.com/bigwave/bigwave/runner/internal/sandbox/box", "../runner", []string{"internal/sandbox/subprocess", "internal/sandbox/containerd", "internal/sandbox/boxtest", "cmd/runner", "cmd/bench"}, "what uses sandboxes knows the contract alone"},
	{"github.com/containerd/containerd", "../runner", []string{"internal/sandbox/containerd", "cmd/bench"}, "containerd stays in its backend"},
}

func TestImportsStayAtHome(t *testing.T) {
	for _, h := range homes {
		used := false
		for path, imports := range goFiles(t, h.under) {
			if !slices.ContainsFunc(imports, func(imp string) bool { return strings.HasPrefix(imp, h.imp) }) {
				continue
			}
			used = true
			home := func(at string) bool { return strings.HasPrefix(path, filepath.Join(h.under, at)+"/") }
			if !slices.ContainsFunc(h.at, home) {
				t.Errorf("%s imports %s: %s", path, h.imp, h.why)
			}
		}
		if !used {
			t.Errorf("nobody under %s imports %s: the rule says nothing", h.under, h.imp)
		}
	}
}

// A row of the database and a message are two types with a conversion between
// them, or a change of one would be a change of the other.
func TestNoStructIsBothRowAndMessage(t *testing.T) {
	structs := 0
	for _, dir := range []string{"../shared", "../controlplane", "../runner"} {
		for path := range goFiles(t, dir) {
			files := token.NewFileSet()
			f, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				s, ok := n.(*ast.StructType)
				if !ok {
					return true
				}
				structs++
				if tagged(s, "db") && tagged(s, "json") {
					t.Errorf("%s: a struct has both db: and json: tags", files.Position(s.Pos()))
				}
				return true
			})
		}
	}
	if structs == 0 {
		t.Error("no struct was looked at")
	}
}

// tagged reports whether a field of s has a tag of that key.
func tagged(s *ast.StructType, key string) bool {
	return slices.ContainsFunc(s.Fields.List, func(f *ast.Field) bool {
		if f.Tag == nil {
			return false
		}
		text, err := strconv.Unquote(f.Tag.Value)
		_, ok := reflect.StructTag(text).Lookup(key)
		return err == nil && ok
	})
}

func TestEveryPackageSaysWhatItIsOnce(t *testing.T) {
	docs := map[string][]string{}
	for _, dir := range []string{"../shared", "../controlplane", "../runner", "../migrations"} {
		for path := range goFiles(t, dir) {
			pkg := filepath.Dir(path)
			docs[pkg] = append(docs[pkg], nil...)
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil {
				docs[pkg] = append(docs[pkg], path)
			}
		}
	}
	for pkg, with := range docs {
		if len(with) != 1 {
			t.Errorf("%s has %d package comments (%v), want one", pkg, len(with), with)
		}
	}
}

// goFiles returns the imports of every non-test Go file under dir (or of the
// one file that dir names).
func goFiles(t *testing.T, dir string) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && d.Name() == "testdata" {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		out[path] = []string{}
		for _, i := range f.Imports {
			out[path] = append(out[path], strings.Trim(i.Path.Value, `"`))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

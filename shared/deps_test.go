package shared_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// rules says what the packages of a folder may not import: a prefix of an
// import path. "ours" stands for everything of this project.
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
	{dir: "../shared/fault", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../runner/internal/sandbox/sandbox.go", deny: []string{"github.com/bigwave"}, why: "contracts import nothing of ours"},
	{dir: "../runner/internal/inside", deny: []string{"github.com/", "golang.org/"}, why: "it runs inside the sandbox: standard library only"},
	{dir: "../runner/cmd/init", deny: []string{"github.com/", "golang.org/"}, except: []string{"github.com/bigwave/bigwave/runner/internal/inside"}, why: "it runs inside the sandbox: standard library only"},
	{dir: "../controlplane/internal/policy", deny: outside, why: decides},
	{dir: "../controlplane/internal/tool", deny: outside, why: decides},
	{dir: "../controlplane/internal/render", deny: outside, why: decides},
	{dir: "../controlplane/internal/session", deny: outside, why: decides},
	{dir: "../controlplane/internal/run", deny: outside, why: decides},
	{dir: "../controlplane/internal/identity", deny: outside, why: decides},
	{dir: "../controlplane/internal/audit", deny: outside, why: decides},
	{dir: "../controlplane/internal/fleet", deny: outside, why: decides},
}

const decides = "what decides does not know how it is carried or kept"

var outside = []string{
	"github.com/labstack/echo", "net/http", "github.com/jmoiron/sqlx", "database/sql", "github.com/lib/pq",
	"github.com/nats-io", "github.com/bigwave/bigwave/shared/wire", "github.com/bigwave/bigwave/shared/bus",
	"github.com/bigwave/bigwave/controlplane/internal/store", "github.com/bigwave/bigwave/controlplane/internal/httpapi",
	"github.com/bigwave/bigwave/controlplane/internal/dispatch",
}

func TestImportRulesHold(t *testing.T) {
	for _, r := range rules {
		files := 0
		for path, imports := range goFiles(t, r.dir) {
			files++
			for _, imp := range imports {
				for _, deny := range r.deny {
					if strings.HasPrefix(imp, deny) && !has(r.except, imp) {
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

func has(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
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

package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// versions is a simple index with a package in several versions, each of which
// says which one it is; it can be out of order.
type versions struct {
	*httptest.Server
	asked  atomic.Int64
	broken atomic.Bool
}

func versionedIndex(t *testing.T, name string, all ...string) *versions {
	t.Helper()
	v := &versions{}
	files, links := map[string][]byte{}, ""
	for _, version := range all {
		file := fmt.Sprintf("%s-%s-py3-none-any.whl", name, version)
		files["/files/"+file] = wheel(t, name, version, fmt.Sprintf("def greet():\n    return %q\n", version))
		links += fmt.Sprintf(`<a href="/files/%s">%s</a>`, file, file)
	}
	v.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v.asked.Add(1)
		content, ok := files[r.URL.Path]
		switch {
		case v.broken.Load():
			http.Error(w, "out of order", http.StatusServiceUnavailable)
		case ok:
			_, _ = w.Write(content)
		case r.URL.Path == "/simple/"+name+"/":
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprintf(w, "<!DOCTYPE html><html><body>%s</body></html>", links)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(v.Close)
	return v
}

// The next call after an update has what the update requires, in sessions that
// are warm as well; what can't be had is said once, in pip's words, and not
// asked for with every call.
func TestAnUpdateOfRequirementsReachesTheNextCall(t *testing.T) {
	index := versionedIndex(t, "bigwavegreet", "1.0", "1.1", "2.0")
	s := start(t, options{runEnv: append(onContainers(t), "BIGWAVE_PACKAGE_INDEX="+index.URL+"/simple/")})
	ses := s.session()
	call := func(session string) object {
		t.Helper()
		return s.post("/v1/agent-sessions/"+session+"/run?wait=120", object{
			"tool_ids": []string{"needs"}, "tool_calls": []object{{"id": "x", "name": "hello", "arguments": object{}}},
		}).want(200).list("calls")[0]
	}
	says := func(want string) {
		t.Helper()
		for _, session := range []string{ses, ses, s.session()} {
			got := call(session)
			wantStatus(t, got, "ok")
			if v := got.obj("returned").obj("value").str("says"); v != want {
				t.Errorf("version %q answers, want %q", v, want)
			}
		}
	}
	update := func(line string) answer {
		t.Helper()
		return s.post("/api/tools/id/needs/update", object{"id": "needs", "name": "needs", "content": needs(line), "meta": object{}})
	}
	s.makeTool("needs", needs("bigwavegreet==1.0")).want(200)
	says("1.0")
	for _, c := range [][2]string{{"bigwavegreet<2", "1.1"}, {"bigwavegreet>=1.1", "2.0"}, {"bigwavegreet==1.0", "1.0"}} {
		update(c[0]).want(200)
		says(c[1])
	}
	// An update whose requirement can't be had changes nothing.
	before := s.get("/api/tools/id/needs").want(200)
	got := update("bigwavegreet==3.0").want(400)
	for _, words := range []string{"bigwavegreet", "No matching distribution found for bigwavegreet==3.0"} {
		if !strings.Contains(got.str("detail"), words) {
			t.Errorf("%q is not in %s", words, got.body)
		}
	}
	if got.str("code") != "tool_missing_module" {
		t.Errorf("got the code %q", got.str("code"))
	}
	if after := s.get("/api/tools/id/needs"); string(after.body) != string(before.body) {
		t.Errorf("got %s", after.body)
	}
	says("1.0")

	// The layers are gone and the index is out of order: every call says so and
	// names the package, and the index is asked once.
	s.runner.stop(syscall.SIGTERM)
	layers, err := filepath.Glob(filepath.Join(s.data, "runner", "layers", "*"))
	if err != nil || len(layers) < 3 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	for _, layer := range layers {
		if err := os.RemoveAll(layer); err != nil {
			t.Fatal(err)
		}
	}
	index.broken.Store(true)
	s.startRunner()
	ses = s.session()
	var asked int64
	for i := range 4 {
		got := call(ses)
		if failed := got.obj("error"); got.str("status") != "error" || failed.str("code") != "tool_failed" || !strings.Contains(failed.str("message"), "bigwavegreet") {
			t.Errorf("got %v", got)
		}
		if n := index.asked.Load(); i == 0 {
			asked = n
		} else if n != asked {
			t.Errorf("call %d asked the index %d more times", i, n-asked)
		}
	}
	// Others go on, and the list is whole.
	wantStatus(t, s.sh(ses, "true"), "ok")
	if got := s.get("/api/tools/").want(200); !strings.Contains(string(got.body), `"needs"`) {
		t.Errorf("got %s", got.body)
	}
}

// Without an index what the image has passes, and what it lacks is named.
func TestRequirementsWithoutAnIndex(t *testing.T) {
	s := pythonStack(t)
	source := func(line string) string {
		return "\n\"\"\"\ntitle: T\nrequirements: " + line + "\n\"\"\"\nclass Tools:\n    def f(self):\n        \"\"\"Says it.\"\"\"\n        import pydantic\n        return pydantic.VERSION[0]\n"
	}
	for _, before := range []string{"", "\ufeff", "# a comment\n"} {
		made := s.makeTool("t", before+source("pydantic>=2, typing_extensions")).want(200)
		if made.obj("meta").obj("manifest").str("requirements") != "pydantic>=2, typing_extensions" {
			t.Errorf("got %s", made.body)
		}
		for range 3 {
			call := s.post("/api/tools/id/t/run", object{"name": "f"}).want(200).object
			wantStatus(t, call, "ok")
			if got := call.obj("returned"); fmt.Sprint(got["value"]) != "2" {
				t.Errorf("got %v", got)
			}
		}
		s.delete("/api/tools/id/t/delete").want(200)
		got := s.makeTool("t", before+source("pydantic, evil-pkg, other-pkg>=1")).want(400)
		if !strings.Contains(got.str("detail"), "evil-pkg") || !strings.Contains(got.str("detail"), "other-pkg") || strings.Contains(got.str("detail"), "pydantic") {
			t.Errorf("got %s", got.body)
		}
	}
	canary := filepath.Join(s.data, "canary")
	for _, line := range []string{
		"evil-pkg", "git+https://127.0.0.1:1/x.git", "--index-url http://127.0.0.1:1/simple", "-e .", "-r /etc/passwd", "--target " + canary,
		"x; touch " + canary, "$(touch " + canary + ")", "`touch " + canary + "`", "evil-pkg, git+https://127.0.0.1:1/x, --index-url http://x, -e .",
	} {
		got := s.makeTool("hostile", source(line)).want(400)
		if got.str("code") != "tool_missing_module" || !strings.Contains(got.str("detail"), "package") {
			t.Errorf("%q: got %s", line, got.body)
		}
	}
	if _, err := os.Lstat(canary); err == nil {
		t.Error("a requirement was executed")
	}
	s.get("/api/tools/id/hostile").want(404)
}

package e2e

import (
	"archive/zip"
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// wheel is a package with one module, as pip takes it for any interpreter.
func wheel(t *testing.T, name, version, source string, requires ...string) []byte {
	t.Helper()
	info := fmt.Sprintf("%s-%s.dist-info/", name, version)
	needed := ""
	for _, r := range requires {
		needed += "Requires-Dist: " + r + "\n"
	}
	files := []struct{ path, content string }{
		{name + "/__init__.py", source},
		{info + "METADATA", fmt.Sprintf("Metadata-Version: 2.1\nName: %s\nVersion: %s\n%s", name, version, needed)},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: bigwave\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
	}
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	record := ""
	for _, f := range files {
		sum := sha256.Sum256([]byte(f.content))
		record += fmt.Sprintf("%s,sha256=%s,%d\n", f.path, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.content))
	}
	files = append(files, struct{ path, content string }{info + "RECORD", record + info + "RECORD,,\n"})
	for _, f := range files {
		w, err := z.Create(f.path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(f.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// packageIndex is a simple index on this machine with one package.
func packageIndex(t *testing.T, name, source string, requires ...string) (server *httptest.Server, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	index := indexOf(t, name, source, requires...)
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		index.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server, asked
}

func indexOf(t *testing.T, name, source string, requires ...string) http.Handler {
	t.Helper()
	file := name + "-1.2-py3-none-any.whl"
	content := wheel(t, name, "1.2", source, requires...)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /simple/"+name+"/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><html><body><a href="/files/%s">%s</a></body></html>`, file, file)
	})
	mux.HandleFunc("GET /files/"+file, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(content) })
	return mux
}

// needs is a tool that requires what a line says and tells where it found it.
func needs(line string) string {
	return `"""
title: Needs
requirements: ` + line + `
"""
import bigwavegreet


class Tools:
    def hello(self) -> dict:
        """Greets."""
        import os

        base = os.path.dirname(os.path.dirname(bigwavegreet.__file__))
        can = []
        for what in (lambda: os.listdir(os.path.dirname(base)), lambda: open(base + "/x", "w"), lambda: os.remove(bigwavegreet.__file__), lambda: os.chmod(base, 0o777)):
            try:
                what()
                can.append(True)
            except OSError:
                can.append(False)
        return {"says": bigwavegreet.greet(), "can": can, "base": base}
`
}

func TestRequirementsAreInstalledFromTheIndex(t *testing.T) {
	index, asked := packageIndex(t, "bigwavegreet", "def greet():\n    return 'installed'\n", "pydantic>=2", "requests")
	env := append(onContainers(t), "BIGWAVE_PACKAGE_INDEX="+index.URL+"/simple/")
	s := start(t, options{runEnv: env})

	got := s.makeTool("missing", needs("no-such-package>=1")).want(400)
	if !strings.Contains(got.str("detail"), "no-such-package") || !strings.Contains(got.str("detail"), "No matching distribution") {
		t.Errorf("got %s", got.body)
	}
	n := asked.Load()
	s.makeTool("missing", needs("no-such-package>=1")).want(400)
	if asked.Load() != n {
		t.Error("a failed installation was tried again at once")
	}

	s.makeTool("needs", needs("pydantic>=2, bigwavegreet>=1")).want(200)
	n = asked.Load()
	hello := func() object {
		t.Helper()
		call := s.post("/v1/agent-sessions/"+s.session()+"/run?wait=120", object{
			"tool_ids": []string{"needs"}, "tool_calls": []object{{"id": "x", "name": "hello", "arguments": object{}}},
		}).want(200).list("calls")[0]
		wantStatus(t, call, "ok")
		return call.obj("returned").obj("value")
	}
	value := hello()
	if value.str("says") != "installed" || strings.Contains(fmt.Sprint(value["can"]), "true") {
		t.Errorf("got %v", value)
	}
	s.makeTool("second", needs("Bigwavegreet >=1")).want(200)
	if asked.Load() != n {
		t.Errorf("the index was asked %d more times", asked.Load()-n)
	}

	// The way to the index is the installation's alone: no policy can have it.
	host := strings.TrimPrefix(index.URL, "http://")
	s.put("/admin/sandbox/policy", policy(object{"network_allowlist": []string{host}})).want(400)
	call := s.run(s.session(), object{"id": "x", "name": "shell_exec", "arguments": object{
		"command": "curl -sS --max-time 5 " + index.URL + "/simple/bigwavegreet/",
	}}).list("calls")[0]
	wantStatus(t, call, "error")
	if !strings.Contains(call.str("stderr"), "curl: (") {
		t.Errorf("got %v", call)
	}
	if asked.Load() != n {
		t.Error("a session's sandbox reached the index")
	}

	s.restartRunner(syscall.SIGTERM)
	if again := hello(); again.str("base") != value.str("base") || asked.Load() != n {
		t.Errorf("after a restart: %v, asked %d more times", again, asked.Load()-n)
	}
	token := filepath.Base(value.str("base"))
	if err := os.RemoveAll(filepath.Join(s.data, "runner", "layers", token)); err != nil {
		t.Fatal(err)
	}
	if again := hello(); again.str("says") != "installed" || again.str("base") == value.str("base") || asked.Load() == n {
		t.Errorf("after the layer was removed: %v, asked %d more times", again, asked.Load()-n)
	}

	// Nothing but names and versions, whatever the index would say.
	n = asked.Load()
	for _, line := range []string{
		"--index-url=http://127.0.0.1:1/", "-r /etc/passwd", "x @ file:///etc/passwd", "../x", "/etc/x.whl", "git+https://h.invalid/x", "x\t--pre",
		"x; $(id)", "bigwavegreet==1.2 --no-deps", "x@http://127.0.0.1:1/x.whl",
	} {
		got := s.makeTool("hostile", needs(line)).want(400)
		if !strings.Contains(got.str("detail"), "can't be installed") {
			t.Errorf("%q: got %s", line, got.body)
		}
	}
	if asked.Load() != n {
		t.Error("the index was asked for what is no requirement")
	}
}

func TestAnIndexThatGivesNoAnswerIsNamed(t *testing.T) {
	on := onContainers(t)
	gone := httptest.NewServer(nil)
	gone.Close()
	ill := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }))
	t.Cleanup(ill.Close)
	untrusted := httptest.NewTLSServer(indexOf(t, "bigwavegreet", ""))
	t.Cleanup(untrusted.Close)
	for name, tt := range map[string]struct{ index, says string }{
		"gone":      {gone.URL, "can't be reached"},
		"ill":       {ill.URL, "answers 503"},
		"untrusted": {untrusted.URL, "can't be reached: [SSL: CERTIFICATE_VERIFY_FAILED]"},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, options{runEnv: append(on[:len(on):len(on)], "BIGWAVE_PACKAGE_INDEX="+tt.index+"/simple")})
			got := s.makeTool("needs", needs("bigwavegreet>=1")).want(400).str("detail")
			_, host, _ := strings.Cut(tt.index, "://")
			if !strings.Contains(got, "bigwavegreet") || !strings.Contains(got, "The package index at "+host+" "+tt.says) || strings.Contains(got, "No matching") {
				t.Errorf("got %s", got)
			}
		})
	}
}

func TestAnIndexWithItsOwnAuthorityAndFilesElsewhere(t *testing.T) {
	files := httptest.NewUnstartedServer(indexOf(t, "bigwavegreet", "def greet():\n    return 'installed'\n"))
	index := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<a href="%s/files/bigwavegreet-1.2-py3-none-any.whl">bigwavegreet-1.2-py3-none-any.whl</a>`, files.URL)
	}))
	ca, leaf := authority(t)
	for _, server := range []*httptest.Server{files, index} {
		server.TLS = &tls.Config{Certificates: []tls.Certificate{leaf}}
		server.StartTLS()
		t.Cleanup(server.Close)
	}
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, ca, 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, options{runEnv: append(onContainers(t), "BIGWAVE_PACKAGE_INDEX="+index.URL+"/simple/",
		"BIGWAVE_PACKAGE_HOSTS="+strings.TrimPrefix(files.URL, "https://"), "BIGWAVE_PACKAGE_INDEX_CA="+path)})
	s.makeTool("needs", needs("bigwavegreet>=1,<2")).want(200)
}

// authority is a certificate authority, in PEM, and what it has signed for this
// machine's address.
func authority(t *testing.T) (ca []byte, leaf tls.Certificate) {
	t.Helper()
	sign := func(c, by *x509.Certificate, key ed25519.PrivateKey) ([]byte, ed25519.PrivateKey) {
		t.Helper()
		public, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		if key == nil {
			key = private
		}
		raw, err := x509.CreateCertificate(rand.Reader, c, by, public, key)
		if err != nil {
			t.Fatal(err)
		}
		return raw, private
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, SubjectKeyId: []byte{1},
	}
	raw, rootKey := sign(root, root, nil)
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "index"}, NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	signed, key := sign(server, root, rootKey)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}), tls.Certificate{Certificate: [][]byte{signed}, PrivateKey: key}
}

func TestAnInstallationReachesTheIndexAlone(t *testing.T) {
	other, reached := packageIndex(t, "elsewhere", "")
	// The index's only file lies on another server.
	asked := new(atomic.Int64)
	index := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<a href="%s/files/elsewhere-1.2-py3-none-any.whl">elsewhere-1.2-py3-none-any.whl</a>`, other.URL)
	}))
	t.Cleanup(index.Close)
	s := start(t, options{runEnv: append(onContainers(t), "BIGWAVE_PACKAGE_INDEX="+index.URL+"/simple/")})
	got := s.makeTool("needs", needs("elsewhere")).want(400)
	if !strings.Contains(got.str("detail"), "elsewhere") {
		t.Errorf("got %s", got.body)
	}
	if asked.Load() == 0 || reached.Load() > 0 {
		t.Errorf("the index was asked %d times, the other server %d", asked.Load(), reached.Load())
	}
}

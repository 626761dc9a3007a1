package subprocess

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/bigwave/bigwave/runner/internal/inside"
	"github.com/bigwave/bigwave/runner/internal/sandbox/box"
)

// host is what the machine offers to sandboxes; looked at once.
type host struct {
	bash      string
	bashErr   error
	python    string // the interpreter itself, not a shim
	pythonErr error
	copied    []inside.Step // files of the host's /etc
	prefixes  []string      // of Python, when they lie outside /usr
}

func lookAtHost(python string) host {
	var h host
	h.bash, h.bashErr = findBash()
	h.python, h.prefixes, h.pythonErr = findPython(python)
	for _, path := range etcCopied {
		content, err := os.ReadFile(path)
		if err == nil && len(content) <= maxCopied {
			h.copied = append(h.copied, inside.Step{Kind: inside.StepFile, Path: path, Data: string(content), Mode: 0o644})
		}
	}
	return h
}

func findBash() (string, error) {
	for _, path := range []string{"/usr/bin/bash", "/bin/bash", "/usr/local/bin/bash"} {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", errors.New("no bash in /usr/bin, /bin or /usr/local/bin")
}

// findPython asks the interpreter where it lives: the one on PATH may be a
// script that only finds the real one.
func findPython(name string) (string, []string, error) {
	if name == "" {
		name = "python3"
	}
	const ask = "import sys; print(sys.executable); print(sys.prefix); print(sys.base_prefix)"
	out, err := exec.Command(name, "-I", "-c", ask).Output()
	if err != nil {
		return "", nil, fmt.Errorf("ask %s where it lives: %w", name, err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 3 || !filepath.IsAbs(lines[0]) {
		return "", nil, fmt.Errorf("%s does not say where it lives", name)
	}
	var prefixes []string
	for _, prefix := range lines[1:] {
		prefix = filepath.Clean(prefix)
		if prefix == "/" || prefix == "/usr" || strings.HasPrefix(prefix, "/usr/") {
			continue
		}
		if len(prefixes) == 0 || prefixes[0] != prefix {
			prefixes = append(prefixes, prefix)
		}
	}
	return lines[0], prefixes, nil
}

func (h host) programs() box.Programs {
	return box.Programs{Bash: h.bash, BashErr: h.bashErr, Python: h.python, PythonErr: h.pythonErr, Path: h.searchPath()}
}

// searchPath is PATH inside: the configured Python comes first.
func (h host) searchPath() string {
	const usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if len(h.prefixes) == 0 {
		return usual
	}
	return filepath.Dir(h.python) + ":" + usual
}

// Parts of /etc that are shown as they are, where they exist. Every mount is
// paid for again in each call, so small files are copied instead.
var (
	etcShown = []string{
		"/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
		"/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted",
	}
	etcCopied = []string{"/etc/ld.so.conf", "/etc/ssl/openssl.cnf", "/etc/protocols", "/etc/services", "/etc/timezone"}
)

const maxCopied = 16 << 10

// layout is the root of every sandbox, from parents to children.
func (h host) layout(p box.Place) []inside.Step {
	steps := []inside.Step{
		{Kind: inside.StepDir, Path: "/run/empty", Mode: 0o755},
		{Kind: inside.StepDir, Path: "/var", Mode: 0o755},
		{Kind: inside.StepLink, Path: "/var/tmp", Data: "/tmp"},
		{Kind: inside.StepBind, Path: "/usr", Data: "/usr"},
	}
	for _, path := range []string{"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		steps = appendShown(steps, path)
	}
	for _, path := range etcShown {
		steps = appendShown(steps, path)
	}
	for _, prefix := range h.prefixes {
		steps = append(steps, inside.Step{Kind: inside.StepBind, Path: prefix, Data: prefix})
	}
	steps = append(steps, h.copied...)
	steps = append(steps, etc(p.IDs)...)
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		steps = append(steps, inside.Step{
			Kind: inside.StepBind, Path: "/dev/" + name, Data: "/dev/" + name, File: true, Writable: true, Device: true,
		})
	}
	for name, target := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		steps = append(steps, inside.Step{Kind: inside.StepLink, Path: "/dev/" + name, Data: "/proc/self/fd" + target})
	}
	steps = append(steps, p.Packages...)
	return append(steps,
		inside.Step{Kind: inside.StepTmpfs, Path: "/dev/shm", Data: tmpfs(p.ShmMB)},
		inside.Step{Kind: inside.StepTmpfs, Path: "/tmp", Data: tmpfs(p.TmpMB)},
		p.Workspace,
	)
}

// tmpfs counts files too: each costs memory even when it is empty.
func tmpfs(mb int64) string {
	return fmt.Sprintf("mode=1777,size=%dm,nr_inodes=%d", mb, mb*256)
}

// appendShown shows a path of the host as the host has it: a link as that
// link, anything else read-only, and nothing where there is nothing.
func appendShown(steps []inside.Step, path string) []inside.Step {
	info, err := os.Lstat(path)
	if err != nil {
		return steps
	}
	if info.Mode()&os.ModeSymlink != 0 {
		target, err := os.Readlink(path)
		if err != nil {
			return steps
		}
		return append(steps, inside.Step{Kind: inside.StepLink, Path: path, Data: target})
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return steps
	}
	return append(steps, inside.Step{Kind: inside.StepBind, Path: path, Data: path, File: !info.IsDir()})
}

// etc is the part of /etc that is made up.
func etc(ids box.IDs) []inside.Step {
	user := fmt.Sprintf("sandbox:x:%d:%d:sandbox:/workspace:/bin/bash\n", ids.User, ids.User)
	group := fmt.Sprintf("sandbox:x:%d:\n", ids.User)
	files := []struct{ path, content string }{
		{"/etc/passwd", user + "root:x:0:0:root:/:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n"},
		{"/etc/group", group + "root:x:0:\nnogroup:x:65534:\n"},
		{"/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n"},
		{"/etc/hostname", "sandbox\n"},
		{"/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"},
		{"/etc/resolv.conf", "nameserver 127.0.0.1\n"}, // the gate, or nobody
	}
	var steps []inside.Step
	for _, f := range files {
		steps = append(steps, inside.Step{Kind: inside.StepFile, Path: f.path, Data: f.content, Mode: 0o644})
	}
	return steps
}

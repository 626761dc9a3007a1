// Package cgroup sets limits on the processes of one sandbox and reads the
// kernel's counters, on cgroup v1 and v2.
//
// Joining a cgroup by pid costs milliseconds on v1 (the kernel waits for its
// readers), so a process joins once, when its sandbox is made, and what it
// forks inherits. On v2 processes are cloned into their cgroup, which costs nothing.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Version is which kind of hierarchy holds the controllers.
type Version string

// The versions.
const (
	V1   Version = "cgroup-v1"
	V2   Version = "cgroup-v2"
	None Version = ""
)

// Controller is a part of the kernel that a cgroup can limit.
type Controller string

// The controllers that a sandbox needs.
const (
	Memory Controller = "memory"
	PIDs   Controller = "pids"
	CPU    Controller = "cpu"
)

var controllers = []Controller{Memory, PIDs, CPU}

// Manager makes groups under one parent that belongs to one runner. Its
// methods may be called from several goroutines.
type Manager struct {
	version Version
	name    string                // of the parent, below the root of each hierarchy
	parents map[Controller]string // directory of this runner's parent
	reasons map[Controller]string // why a controller is missing
}

// Find looks for what this process may use: on v1 every hierarchy that it may
// write, on v2 a subtree that it owns. The parent's directory is parent/runner,
// below the root of a hierarchy for root and below the process's own cgroup
// for an ordinary user. What is missing is not an error: see Has and Why.
func Find(parent, runner string) (*Manager, error) {
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	name := filepath.Join(parent, runner)
	m := &Manager{name: name, parents: map[Controller]string{}, reasons: map[Controller]string{}}
	if mounts.unified != "" && unifiedHas(mounts.unified) {
		m.version = V2
		m.findUnified(mounts.unified, name)
		return m, nil
	}
	for _, c := range controllers {
		m.findLegacy(c, mounts.legacy[c], name)
	}
	if len(m.parents) > 0 {
		m.version = V1
	}
	return m, nil
}

// Version is V1, V2, or None when no controller can be used.
func (m *Manager) Version() Version { return m.version }

// Has says whether groups of this manager limit c.
func (m *Manager) Has(c Controller) bool { return m.parents[c] != "" }

// Why says in words why c is missing.
func (m *Manager) Why(c Controller) string { return m.reasons[c] }

func (m *Manager) findLegacy(c Controller, mount, name string) {
	if mount == "" {
		m.reasons[c] = "no hierarchy with this controller is mounted"
		return
	}
	dir := filepath.Join(mount, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		m.reasons[c] = "its hierarchy is not writable: " + reason(err)
		return
	}
	if !writable(filepath.Join(dir, "cgroup.procs")) {
		m.reasons[c] = "its hierarchy is not writable"
		return
	}
	if c == Memory {
		// The kernel patches itself when the first group counts sockets and
		// when the last one ends, which takes milliseconds: this one stays.
		_ = write(filepath.Join(dir, socketLimit), "-1")
	}
	m.parents[c] = dir
}

// socketLimit is v1's limit of what waits in sockets, which counts apart and
// only in groups that have one.
const socketLimit = "memory.kmem.tcp.limit_in_bytes"

// findUnified takes the root for root, and else the process's own cgroup when
// that was delegated to the user.
func (m *Manager) findUnified(mount, name string) {
	base := mount
	if os.Geteuid() != 0 {
		own, err := ownUnified()
		if err != nil {
			m.missing(reason(err))
			return
		}
		// An earlier Find of this process may have moved it aside.
		base = filepath.Join(mount, strings.TrimSuffix(own, "/"+asideLeaf))
	}
	dir := filepath.Join(base, name)
	if err := enable(base, dir); err != nil {
		m.missing("no cgroup v2 subtree is delegated to this user: " + reason(err))
		return
	}
	have := words(filepath.Join(dir, "cgroup.subtree_control"))
	for _, c := range controllers {
		if slices.Contains(have, string(c)) {
			m.parents[c] = dir
		} else {
			m.reasons[c] = "the controller is not enabled for our subtree"
		}
	}
	if len(m.parents) == 0 {
		m.version = None
	}
}

func (m *Manager) missing(why string) {
	m.version = None
	for _, c := range controllers {
		m.reasons[c] = why
	}
}

// enable makes dir below base and hands it every controller that there is. A
// cgroup with processes of its own may not hand on controllers, so when base
// is where this process lives, the process first moves into a leaf beside dir.
func enable(base, dir string) error {
	available := words(filepath.Join(base, "cgroup.controllers"))
	if err := handOn(base, available); err != nil {
		if err := stepAside(base); err != nil {
			return err
		}
		if err := handOn(base, available); err != nil {
			return err
		}
	}
	rest, err := filepath.Rel(base, dir)
	if err != nil {
		return err
	}
	for step := range strings.SplitSeq(rest, "/") {
		base = filepath.Join(base, step)
		if err := os.Mkdir(base, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := handOn(base, available); err != nil {
			return err
		}
	}
	return nil
}

func handOn(dir string, available []string) error {
	for _, c := range controllers {
		if !slices.Contains(available, string(c)) {
			continue
		}
		if err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+string(c)); err != nil {
			return err
		}
	}
	return nil
}

// asideLeaf is where the runner itself lives when it owns a subtree.
const asideLeaf = "bigwave-runner"

func stepAside(base string) error {
	leaf := filepath.Join(base, asideLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return write(filepath.Join(leaf, "cgroup.procs"), "0")
}

// mounts is where hierarchies are.
type mounts struct {
	unified string
	legacy  map[Controller]string
}

func readMounts(path string) (mounts, error) {
	found := mounts{legacy: map[Controller]string{}}
	file, err := os.Open(path)
	if err != nil {
		return found, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(rest) < 3 {
			continue
		}
		switch rest[0] {
		case "cgroup2":
			if found.unified == "" {
				found.unified = fields[4]
			}
		case "cgroup":
			options := strings.Split(rest[2], ",")
			for _, c := range controllers {
				if found.legacy[c] == "" && slices.Contains(options, string(c)) {
					found.legacy[c] = fields[4]
				}
			}
		}
	}
	return found, lines.Err()
}

// unifiedHas tells a real v2 host from a hybrid one, whose unified hierarchy
// has no controllers.
func unifiedHas(mount string) bool {
	return slices.Contains(words(filepath.Join(mount, "cgroup.controllers")), string(Memory)) ||
		slices.Contains(words(filepath.Join(mount, "cgroup.controllers")), string(PIDs))
}

func ownUnified() (string, error) {
	content, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(content)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path, nil
		}
	}
	return "", errors.New("this process is in no cgroup v2")
}

func words(path string) []string {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Fields(string(content))
}

func writable(path string) bool {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return false
	}
	return file.Close() == nil
}

func write(path, value string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}

func reason(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error() + " on " + p.Path
	}
	return err.Error()
}

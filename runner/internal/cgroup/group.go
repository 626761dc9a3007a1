package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Limits are a sandbox's. Zero leaves one as it is.
type Limits struct {
	MemoryBytes int64 // with no swap on top
	PIDs        int64 // tasks, of everything in the calls' group
	CPUShares   int64 // relative weight as v1 counts it, 2–262144
}

// Counters only grow while a group lives.
type Counters struct {
	OOMKills int64 // processes that the memory limit ended
	PIDsHits int64 // forks that the pids limit refused
}

// Group is the cgroups of one sandbox. Its init lives beside the calls: memory
// and cpu count both, pids only the calls. Methods may be called from several goroutines.
type Group struct {
	m       *Manager
	dirs    map[Controller]string
	name    string // below the root of a hierarchy
	initDir string // v2: where the init is
	calls   string // v2: where calls are; v1: where the pids limit counts them

	// Files that are read or written for every call stay open.
	oom, pids, peak, pidsMax *os.File
	initFD, callsFD          *os.File
}

// Create makes the group called name, which must be free.
func (m *Manager) Create(name string) (*Group, error) {
	g := &Group{m: m, name: filepath.Join(m.name, name), dirs: map[Controller]string{}}
	if err := g.create(name); err != nil {
		err = errors.Join(err, g.Remove(context.Background()))
		return nil, fmt.Errorf("make cgroup %s: %w", name, err)
	}
	return g, nil
}

func (g *Group) create(name string) error {
	for c, parent := range g.m.parents {
		dir := filepath.Join(parent, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !(errors.Is(err, fs.ErrExist) && g.has(dir)) {
			return err
		}
		g.dirs[c] = dir
	}
	switch {
	case g.m.version == V2:
		if err := g.splitUnified(); err != nil {
			return err
		}
	case g.dirs[PIDs] != "":
		g.calls = filepath.Join(g.dirs[PIDs], "calls")
		if err := os.Mkdir(g.calls, 0o755); err != nil {
			return err
		}
	}
	return g.open()
}

// has says whether dir was made for another controller of the same group.
func (g *Group) has(dir string) bool {
	for _, have := range g.dirs {
		if have == dir {
			return true
		}
	}
	return false
}

// splitUnified makes the two leaves that a v2 group needs, since only leaves
// hold processes.
func (g *Group) splitUnified() error {
	for _, dir := range g.dirs {
		var enabled []string
		for c := range g.dirs {
			enabled = append(enabled, string(c))
		}
		if err := handOn(dir, enabled); err != nil {
			return err
		}
		g.initDir, g.calls = filepath.Join(dir, "init"), filepath.Join(dir, "calls")
		break
	}
	for _, dir := range []string{g.initDir, g.calls} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	var err error
	if g.initFD, err = os.OpenFile(g.initDir, syscall.O_DIRECTORY|os.O_RDONLY, 0); err != nil {
		return err
	}
	g.callsFD, err = os.OpenFile(g.calls, syscall.O_DIRECTORY|os.O_RDONLY, 0)
	return err
}

func (g *Group) open() error {
	var errs []error
	open := func(c Controller, name string, flags int) *os.File {
		dir := g.dirs[c]
		if dir == "" {
			return nil
		}
		if c == PIDs && g.calls != "" {
			dir = g.calls
		}
		file, err := os.OpenFile(filepath.Join(dir, name), flags, 0)
		if err != nil {
			errs = append(errs, err)
			return nil
		}
		return file
	}
	if g.m.version == V2 {
		g.oom = open(Memory, "memory.events", os.O_RDONLY)
		if dir := g.dirs[Memory]; dir != "" { // newer than the other files
			g.peak, _ = os.OpenFile(filepath.Join(dir, "memory.peak"), os.O_RDWR, 0)
		}
	} else {
		g.oom = open(Memory, "memory.oom_control", os.O_RDONLY)
		g.peak = open(Memory, "memory.max_usage_in_bytes", os.O_RDWR)
	}
	g.pids = open(PIDs, "pids.events", os.O_RDONLY)
	g.pidsMax = open(PIDs, "pids.max", os.O_WRONLY)
	return errors.Join(errs...)
}

// InitFD is the cgroup to clone the init into (CLONE_INTO_CGROUP), or -1: then Join.
func (g *Group) InitFD() int { return descriptor(g.initFD) }

// CallsFD is the cgroup to clone supervisors into, or -1: they inherit theirs.
func (g *Group) CallsFD() int { return descriptor(g.callsFD) }

func descriptor(file *os.File) int {
	if file == nil {
		return -1
	}
	return int(file.Fd())
}

// RuntimePath is where a container runtime is to put the init, as it takes it:
// from the root of each hierarchy. Then JoinCalls.
func (g *Group) RuntimePath() string {
	if g.m.version == V2 {
		return "/" + g.name + "/init"
	}
	return "/" + g.name
}

// Delegate lets uid clone processes from the init's cgroup into the calls'.
func (g *Group) Delegate(uid int) error {
	if g.m.version != V2 || uid == os.Geteuid() {
		return nil
	}
	for _, dir := range []string{filepath.Dir(g.calls), g.calls} {
		if err := os.Chown(filepath.Join(dir, "cgroup.procs"), uid, -1); err != nil {
			return fmt.Errorf("delegate the cgroup: %w", err)
		}
	}
	return nil
}

// Join moves a fresh process into the group on v1: all its threads for memory
// and cpu, only the first one for pids, since that is the one that forks the
// calls. It may take milliseconds.
func (g *Group) Join(pid int) error {
	if g.m.version != V1 {
		return nil
	}
	var wait sync.WaitGroup
	errs := make([]error, len(controllers))
	for i, c := range controllers {
		dir := g.dirs[c]
		if dir == "" {
			continue
		}
		wait.Go(func() {
			if c == PIDs {
				errs[i] = g.JoinCalls(pid)
			} else {
				errs[i] = write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid))
			}
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("join the cgroup: %w", err)
	}
	return nil
}

// JoinCalls moves on v1 the first thread of a process that is in the group's
// other cgroups to where the pids limit counts what it forks.
func (g *Group) JoinCalls(pid int) error {
	if g.m.version != V1 || g.calls == "" {
		return nil
	}
	if err := write(filepath.Join(g.calls, "tasks"), strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("join the cgroup: %w", err)
	}
	return nil
}

// Set changes the limits.
func (g *Group) Set(l Limits) error {
	var errs []error
	set := func(c Controller, name, value string) {
		if dir := g.dirs[c]; dir != "" {
			errs = append(errs, write(filepath.Join(dir, name), value))
		}
	}
	bytes := strconv.FormatInt(l.MemoryBytes, 10)
	switch {
	case l.MemoryBytes > 0 && g.m.version == V2:
		set(Memory, "memory.max", bytes)
		g.swapOff(filepath.Join(g.dirs[Memory], "memory.swap.max"), "0")
	case l.MemoryBytes > 0:
		set(Memory, "memory.limit_in_bytes", bytes)
		if dir := g.dirs[Memory]; dir != "" {
			_ = write(filepath.Join(dir, socketLimit), strconv.FormatInt(l.MemoryBytes/4, 10))
		}
		g.swapOff(filepath.Join(g.dirs[Memory], "memory.memsw.limit_in_bytes"), bytes)
	}
	switch {
	case l.CPUShares > 0 && g.m.version == V2:
		set(CPU, "cpu.weight", strconv.FormatInt(Weight(l.CPUShares), 10))
	case l.CPUShares > 0:
		set(CPU, "cpu.shares", strconv.FormatInt(l.CPUShares, 10))
	}
	if l.PIDs > 0 {
		errs = append(errs, g.SetPIDs(l.PIDs))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("set limits: %w", err)
	}
	return nil
}

// swapOff is best effort: without swap accounting there is no such file, and
// such a kernel does not let a group swap past its limit unnoticed either.
func (g *Group) swapOff(path, value string) {
	if g.dirs[Memory] != "" {
		_ = write(path, value)
	}
}

// SetPIDs changes only the pids limit; it costs microseconds.
func (g *Group) SetPIDs(n int64) error {
	if g.pidsMax == nil {
		return nil
	}
	_, err := g.pidsMax.WriteAt(strconv.AppendInt(nil, n, 10), 0)
	return err
}

// Weight is cpu_shares (2–262144, default 1024) as a cpu.weight (1–10000,
// default 100): proportional around the defaults, clamped at the edges.
func Weight(shares int64) int64 {
	return min(max(shares*100/1024, 1), 10000)
}

// Counters reads them from the kernel.
func (g *Group) Counters() (Counters, error) {
	var c Counters
	var err error
	if c.OOMKills, err = field(g.oom, "oom_kill"); err != nil {
		return c, fmt.Errorf("read the oom counter: %w", err)
	}
	if c.PIDsHits, err = field(g.pids, "max"); err != nil {
		return c, fmt.Errorf("read the pids counter: %w", err)
	}
	return c, nil
}

// ResetPeak starts a new measurement of the memory peak, where the kernel can.
func (g *Group) ResetPeak() {
	if g.peak != nil {
		_, _ = g.peak.WriteAt([]byte("0"), 0)
	}
}

// Peak is the largest memory use in bytes since ResetPeak (or ever); 0 when
// the kernel does not say.
func (g *Group) Peak() int64 {
	content, err := readAt(g.peak, make([]byte, 32))
	if err != nil {
		return 0
	}
	peak, _ := strconv.ParseInt(string(bytes.TrimSpace(content)), 10, 64)
	return peak
}

// Processes are the pids in the group, for tests and for Kill.
func (g *Group) Processes() []int {
	var pids []int
	for _, dir := range g.leaves() {
		for _, word := range words(filepath.Join(dir, "cgroup.procs")) {
			if pid, err := strconv.Atoi(word); err == nil && pid > 0 && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func (g *Group) leaves() []string {
	var dirs []string
	for _, dir := range []string{g.calls, g.initDir} {
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range g.dirs {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

const removeAfter = 5 * time.Millisecond

// Remove kills what is left in the group and removes it. It tries until ctx
// ends, at most five seconds.
func (g *Group) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for _, file := range []*os.File{g.oom, g.pids, g.peak, g.pidsMax, g.initFD, g.callsFD} {
		if file != nil {
			_ = file.Close()
		}
	}
	for _, dir := range g.leaves() {
		if err := removeDir(ctx, dir); err != nil {
			return fmt.Errorf("remove cgroup: %w", err)
		}
	}
	return nil
}

func removeDir(ctx context.Context, dir string) error {
	for {
		err := syscall.Rmdir(dir)
		if err == nil || err == syscall.ENOENT {
			return nil
		}
		if err != syscall.EBUSY && err != syscall.EINTR {
			return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
		}
		kill(dir)
		select {
		case <-ctx.Done():
			return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
		case <-time.After(removeAfter):
		}
	}
}

// kill ends every process in dir. Where the kernel can't do it in one step,
// a pid that is listed in our own cgroup a moment ago is what we signal.
func kill(dir string) {
	if write(filepath.Join(dir, "cgroup.kill"), "1") == nil {
		return
	}
	for _, word := range words(filepath.Join(dir, "cgroup.procs")) {
		if pid, err := strconv.Atoi(word); err == nil && pid > 1 && pid != os.Getpid() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// Sweep removes every group under the runner's parent, with its processes.
func (m *Manager) Sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var errs []error
	for _, parent := range m.parents {
		errs = append(errs, sweepBelow(ctx, parent))
	}
	return errors.Join(errs...)
}

// Close removes the runner's parent if nothing is left in it.
func (m *Manager) Close() {
	for _, parent := range m.parents {
		if syscall.Rmdir(parent) == nil {
			_ = syscall.Rmdir(filepath.Dir(parent))
		}
	}
}

func sweepBelow(ctx context.Context, dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		child := filepath.Join(dir, entry.Name())
		errs = append(errs, sweepBelow(ctx, child), removeDir(ctx, child))
	}
	return errors.Join(errs...)
}

// field is the number that follows name in a file of "name number" lines; 0
// when there is no file.
func field(file *os.File, name string) (int64, error) {
	if file == nil {
		return 0, nil
	}
	content, err := readAt(file, make([]byte, 512))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if ok && key == name {
			return strconv.ParseInt(value, 10, 64)
		}
	}
	return 0, nil
}

func readAt(file *os.File, buffer []byte) ([]byte, error) {
	if file == nil {
		return nil, fs.ErrNotExist
	}
	n, err := file.ReadAt(buffer, 0)
	if n == 0 && err != nil {
		return nil, err
	}
	return buffer[:n], nil
}

// Package layer keeps folders of installed Python packages, each made once and
// read by many sandboxes: what a key stands for never changes, is evicted when
// it was unused for longest, and outlives the runner's restarts.
package layer

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	failedFor   = time.Minute // a failure is the answer for that long
	maxFailures = 1024        // that are remembered
)

// Key names what a layer holds.
func Key(interpreter string, requirements []string) string {
	text, _ := json.Marshal([]any{interpreter, requirements}) // strings always are JSON
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// Fill writes a layer's files to w as a tar stream. Whoever has made the
// stream is not trusted.
type Fill func(ctx context.Context, w io.Writer) error

// Passing is an error that says nothing of the layer: it is not remembered, and
// whoever asks next makes another attempt.
type Passing struct{ Err error }

func (p *Passing) Error() string { return p.Err.Error() }

func (p *Passing) Unwrap() error { return p.Err }

// Store is the layers of one runner. Its methods may be called from several
// goroutines; Close ends what is being made.
type Store struct {
	Max   int64         // bytes of all layers
	Files int           // in one layer, 100000 if 0
	Time  time.Duration // that making one may take
	Now   func() time.Time
	Log   *slog.Logger

	root  *os.Root // of the layers: held, since their folder can't be listed
	index string   // path of the file that names them

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu       sync.Mutex
	layers   map[string]*entry
	making   map[string]*making
	failures map[string]failure
}

type entry struct {
	Token string    `json:"token"`
	Size  int64     `json:"size"`
	Used  time.Time `json:"used"`

	users int
}

type making struct {
	done chan struct{}
	err  error
}

type failure struct {
	err   error
	until time.Time
}

// Dir is the folder of layers beneath a runner's data directory.
func Dir(data string) string { return filepath.Join(data, "layers") }

// Prepare makes the folder of layers, so that sandboxes can be shown it.
func Prepare(data string) error {
	if err := os.MkdirAll(Dir(data), 0o700); err != nil {
		return fmt.Errorf("make the folder of packages: %w", err)
	}
	return nil
}

// Open takes what an earlier start left in Dir(data): whole layers are kept,
// anything else goes. Nobody but their owner can list the folder then.
func (s *Store) Open(data string) error {
	if err := Prepare(data); err != nil {
		return err
	}
	dir := Dir(data)
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("open the folder of packages: %w", err)
	}
	var err error
	if s.root, err = os.OpenRoot(dir); err != nil {
		return fmt.Errorf("open the folder of packages: %w", err)
	}
	s.index = filepath.Join(data, "layers.json")
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.layers, s.making, s.failures = map[string]*entry{}, map[string]*making{}, map[string]failure{}
	if err := errors.Join(s.sweep(), os.Chmod(dir, 0o311)); err != nil {
		return errors.Join(fmt.Errorf("clear the folder of packages: %w", err), s.root.Close())
	}
	return nil
}

// sweep reads the index and removes what it does not name.
func (s *Store) sweep() error {
	known := map[string]*entry{}
	raw, err := os.ReadFile(s.index)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && json.Unmarshal(raw, &known) != nil {
		known = nil
		s.Log.Warn("the index of installed packages can't be read; they are installed anew", "path", s.index)
	}
	keep := map[string]bool{}
	for key, e := range known {
		if e != nil && e.Token != "" && filepath.IsLocal(e.Token) && s.there(e) {
			s.layers[key], keep[e.Token] = e, true
		}
	}
	entries, err := fs.ReadDir(s.root.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !keep[e.Name()] {
			if err := s.root.RemoveAll(e.Name()); err != nil {
				return err
			}
		}
	}
	return s.save()
}

func (s *Store) there(e *entry) bool {
	info, err := s.root.Lstat(e.Token)
	return err == nil && info.IsDir()
}

// Lease is the use of a layer: it is not evicted until Release.
type Lease struct {
	Name string // of its folder in Dir

	s    *Store
	e    *entry
	once sync.Once
}

// Release ends the use. It may be called twice, and on nil.
func (l *Lease) Release() {
	if l == nil {
		return
	}
	l.once.Do(func() {
		l.s.mu.Lock()
		defer l.s.mu.Unlock()
		l.e.users--
		l.e.Used = l.s.Now()
	})
}

// Get returns the layer of a key, which fill makes if it is not there. However
// many ask at once, one makes it, and goes on when ctx ends; a failure answers
// everybody for a minute, one that is a *Passing those who wait.
func (s *Store) Get(ctx context.Context, key string, fill Fill) (*Lease, error) {
	for {
		lease, m, err := s.look(key, fill)
		if lease != nil || err != nil {
			return lease, err
		}
		select {
		case <-m.done:
			if m.err != nil {
				return nil, m.err
			}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *Store) look(key string, fill Fill) (*Lease, *making, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.layers[key]; e != nil {
		if s.there(e) {
			e.users++
			e.Used = s.Now()
			return &Lease{Name: e.Token, s: s, e: e}, nil, nil
		}
		delete(s.layers, key) // the operator removed it
	}
	if f, ok := s.failures[key]; ok {
		if s.Now().Before(f.until) {
			return nil, nil, f.err
		}
		delete(s.failures, key)
	}
	if m := s.making[key]; m != nil {
		return nil, m, nil
	}
	if s.ctx.Err() != nil {
		return nil, nil, &Passing{errors.New("the runner is shutting down")}
	}
	m := &making{done: make(chan struct{})}
	s.making[key] = m
	s.work.Go(func() { s.make(key, m, fill) })
	return nil, m, nil
}

func (s *Store) make(key string, m *making, fill Fill) {
	ctx, cancel := context.WithTimeout(s.ctx, s.Time)
	defer cancel()
	e, err := s.install(ctx, fill)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer close(m.done)
	delete(s.making, key)
	if err != nil {
		m.err = err
		if _, passing := errors.AsType[*Passing](err); passing {
			return
		}
		if len(s.failures) >= maxFailures {
			clear(s.failures)
		}
		s.failures[key] = failure{err, s.Now().Add(failedFor)}
		return
	}
	s.layers[key] = e
	s.evict(key)
	if err := s.save(); err != nil {
		s.Log.Warn("the index of installed packages could not be written; a restart installs them anew", "error", err)
	}
}

// install makes the folder under another name and moves it into its place.
func (s *Store) install(ctx context.Context, fill Fill) (_ *entry, err error) {
	token := strings.ToLower(rand.Text())
	part := token + ".part"
	if err := s.root.Mkdir(part, 0o700); err != nil {
		return nil, &Passing{fmt.Errorf("make a folder for packages: %w", err)}
	}
	defer func() {
		if err != nil {
			if left := s.root.RemoveAll(part); left != nil {
				s.Log.Warn("a folder of packages could not be removed", "name", part, "error", left)
			}
		}
	}()
	to, err := s.root.OpenRoot(part)
	if err != nil {
		return nil, &Passing{fmt.Errorf("open a folder for packages: %w", err)}
	}
	defer to.Close()
	size, err := s.receive(ctx, to, fill)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return nil, &Passing{err} // the runner's disk is full
	}
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.root.Chmod(part, 0o755), s.root.Rename(part, token)); err != nil {
		return nil, &Passing{fmt.Errorf("put a folder of packages into its place: %w", err)}
	}
	return &entry{Token: token, Size: size, Used: s.Now()}, nil
}

// receive unpacks what fill writes. Fill's own error says more than that of a
// stream which broke off with it.
func (s *Store) receive(ctx context.Context, to *os.Root, fill Fill) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	filled := make(chan error, 1)
	go func() { // ends with fill, which unpack's end makes fail
		err := fill(ctx, w)
		w.CloseWithError(err)
		filled <- err
	}()
	size, err := unpack(to, r, s.Max, cmp.Or(s.Files, maxFiles))
	if err != nil {
		cancel(err)
	}
	_ = r.CloseWithError(err)
	if failed := <-filled; failed != nil && (err == nil || errors.Is(err, failed)) {
		return 0, failed
	}
	return size, err
}

// evict removes what was unused for longest until the rest fits; keep stays.
// mu is held.
func (s *Store) evict(keep string) {
	total := int64(0)
	var idle []string
	for key, e := range s.layers {
		total += e.Size
		if e.users == 0 && key != keep {
			idle = append(idle, key)
		}
	}
	slices.SortFunc(idle, func(a, b string) int { return s.layers[a].Used.Compare(s.layers[b].Used) })
	for _, key := range idle {
		if total <= s.Max {
			return
		}
		e := s.layers[key]
		if err := s.root.RemoveAll(e.Token); err != nil {
			s.Log.Warn("a folder of packages could not be removed", "name", e.Token, "error", err)
			continue
		}
		delete(s.layers, key)
		total -= e.Size
	}
}

// save writes the index: whole or not at all. mu is held.
func (s *Store) save() error {
	raw, err := json.Marshal(s.layers)
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.index+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(s.index+".new", s.index)
}

// Close ends what is being made and returns when nothing of it is left.
func (s *Store) Close() {
	s.cancel()
	s.work.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := errors.Join(s.save(), s.root.Close()); err != nil { // when each was used
		s.Log.Warn("the index of installed packages could not be written", "error", err)
	}
}

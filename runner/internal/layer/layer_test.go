package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// open opens a store on data that counts 1 MiB as much.
func open(t *testing.T, data string) *Store {
	t.Helper()
	s := &Store{Max: 1 << 20, Time: 10 * time.Second, Now: time.Now, Log: slog.New(slog.DiscardHandler)}
	if err := s.Open(data); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// files fills a layer with one file of a size.
func file(name string, size int) Fill {
	return entries(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o6777, Size: int64(size)})
}

func entries(headers ...tar.Header) Fill {
	return func(_ context.Context, w io.Writer) error {
		out := tar.NewWriter(w)
		for _, h := range headers {
			if err := out.WriteHeader(&h); err != nil {
				return err
			}
			if _, err := out.Write(make([]byte, h.Size)); err != nil {
				return err
			}
		}
		return out.Close()
	}
}

func never(context.Context, io.Writer) error { return errors.New("made again") }

func get(t *testing.T, s *Store, key string, fill Fill) *Lease {
	t.Helper()
	l, err := s.Get(t.Context(), key, fill)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestALayerIsMadeOnceAndSurvivesARestart(t *testing.T) {
	data := t.TempDir()
	s := open(t, data)
	var made atomic.Int64
	var wait sync.WaitGroup
	names := make([]string, 16)
	for i := range names {
		wait.Go(func() {
			l, err := s.Get(t.Context(), "k", func(ctx context.Context, w io.Writer) error {
				made.Add(1)
				time.Sleep(20 * time.Millisecond)
				return file("a/b.py", 10)(ctx, w)
			})
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Release()
			names[i] = l.Name
		})
	}
	wait.Wait()
	if made.Load() != 1 {
		t.Errorf("made %d times", made.Load())
	}
	for _, n := range names {
		if n != names[0] || len(n) < 20 {
			t.Errorf("got %q and %q", names[0], n)
		}
	}
	for path, want := range map[string]fs.FileMode{"": 0o755 | fs.ModeDir, "a": 0o755 | fs.ModeDir, "a/b.py": 0o755} {
		if info, err := os.Lstat(filepath.Join(Dir(data), names[0], path)); err != nil || info.Mode() != want {
			t.Errorf("%q: %v, %v", path, info, err)
		}
	}
	if info, err := os.Stat(Dir(data)); err != nil || info.Mode().Perm() != 0o311 {
		t.Errorf("the folder is %v, %v", info, err)
	}
	s.Close()
	if err := os.MkdirAll(filepath.Join(Dir(data), "left.part", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	again := open(t, data)
	if l := get(t, again, "k", never); l.Name != names[0] {
		t.Errorf("got %q, not %q", l.Name, names[0])
	}
	if _, err := os.Stat(filepath.Join(Dir(data), "left.part")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what a crash left is there: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(Dir(data), names[0])); err != nil {
		t.Fatal(err)
	}
	if l := get(t, again, "k", file("x", 1)); l.Name == names[0] {
		t.Error("a removed layer came back under its name")
	}
}

func TestABrokenIndexIsNotTrusted(t *testing.T) {
	data := t.TempDir()
	for _, text := range []string{"nonsense", `{"k":null}`, `{"k":{"token":"../../etc","size":1}}`, `{"k":{"token":"","size":1}}`} {
		if err := os.WriteFile(filepath.Join(data, "layers.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := open(t, data)
		if _, err := s.Get(t.Context(), "k", never); err == nil {
			t.Errorf("%s was believed", text)
		}
		s.Close()
	}
}

func TestFailuresAreRememberedForAMinute(t *testing.T) {
	s := open(t, t.TempDir())
	now := time.Now()
	s.Now = func() time.Time { return now }
	tries := 0
	fail := func(context.Context, io.Writer) error { tries++; return fmt.Errorf("no such package (%d)", tries) }
	for range 3 {
		if _, err := s.Get(t.Context(), "k", fail); err == nil || err.Error() != "no such package (1)" {
			t.Errorf("got %v", err)
		}
	}
	now = now.Add(failedFor + time.Second)
	get(t, s, "k", file("x", 1))
	if tries != 1 {
		t.Errorf("tried %d times", tries)
	}
}

func TestAPassingFailureIsNotRemembered(t *testing.T) {
	s := open(t, t.TempDir())
	for _, fails := range []error{
		&Passing{errors.New("no room")}, fmt.Errorf("start: %w", &Passing{errors.New("no room")}), &fs.PathError{Op: "write", Err: syscall.ENOSPC},
	} {
		_, err := s.Get(t.Context(), "k", func(context.Context, io.Writer) error { return fails })
		if _, ok := errors.AsType[*Passing](err); !ok {
			t.Errorf("%v: got %v", fails, err)
		}
	}
	get(t, s, "k", file("x", 1))
	left, err := fs.ReadDir(s.root.FS(), ".")
	if err == nil && len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

func TestWhatWasUnusedForLongestGoes(t *testing.T) {
	s := open(t, t.TempDir())
	now := time.Now()
	s.Now = func() time.Time { now = now.Add(time.Second); return now }
	used := get(t, s, "used", file("x", 300<<10))
	get(t, s, "old", file("x", 300<<10)).Release()
	get(t, s, "new", file("x", 300<<10)).Release()
	get(t, s, "more", file("x", 300<<10)).Release()
	if _, err := s.Get(t.Context(), "old", never); err == nil {
		t.Error("the one that was unused for longest is there")
	}
	for _, key := range []string{"used", "new", "more"} {
		get(t, s, key, never).Release()
	}
	if _, err := os.Stat(filepath.Join(s.root.Name(), used.Name, "x")); err != nil {
		t.Errorf("one in use is gone: %v", err)
	}
}

func TestHostileStreamsLeaveNothing(t *testing.T) {
	many := func(_ context.Context, w io.Writer) error {
		out := tar.NewWriter(w)
		for i := range 101 {
			if err := out.WriteHeader(&tar.Header{Name: fmt.Sprint("d", i), Typeflag: tar.TypeDir}); err != nil {
				return err
			}
		}
		return out.Close()
	}
	reg := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Size: 1} }
	for name, fill := range map[string]Fill{
		"above":      entries(reg("../x")),
		"back up":    entries(reg("a/../../x")),
		"absolute":   entries(reg("/etc/x")),
		"deep":       entries(reg(strings.Repeat("a/", maxDepth) + "x")),
		"a link":     entries(tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, reg("l/x")),
		"hard link":  entries(reg("x"), tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "x"}),
		"a device":   entries(tar.Header{Name: "d", Typeflag: tar.TypeBlock, Devmajor: 8}),
		"a pipe":     entries(tar.Header{Name: "p", Typeflag: tar.TypeFifo}),
		"twice":      entries(reg("x"), reg("x")),
		"under file": entries(reg("x"), reg("x/y")),
		"too large":  file("x", 1<<20),
		"many":       entriesOf(300, 1),
		"files":      many,
		"nonsense": func(_ context.Context, w io.Writer) error {
			_, err := w.Write(make([]byte, 700))
			_, _ = w.Write([]byte(strings.Repeat("x", 2048)))
			return err
		},
		"cut": func(ctx context.Context, w io.Writer) error {
			return file("x", 2000)(ctx, &short{w, 600})
		},
	} {
		t.Run(name, func(t *testing.T) {
			data := t.TempDir()
			s := open(t, data)
			if name == "files" {
				s.Files = 100
			}
			if l, err := s.Get(t.Context(), "k", fill); err == nil && name != "nonsense" {
				t.Errorf("it became %s", l.Name)
			}
			if name == "nonsense" {
				return // two empty blocks end a stream: nothing came of it
			}
			s.Close()
			if err := os.Chmod(Dir(data), 0o700); err != nil {
				t.Fatal(err)
			}
			left, err := os.ReadDir(Dir(data))
			if err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			above, _ := os.ReadDir(data)
			if len(above) > 2 { // layers, layers.json
				t.Errorf("outside: %v", above)
			}
		})
	}
}

// entriesOf is n files of a size.
func entriesOf(n, size int) Fill {
	var all []tar.Header
	for i := range n {
		all = append(all, tar.Header{Name: fmt.Sprint(i), Typeflag: tar.TypeReg, Size: int64(size)})
	}
	return entries(all...)
}

// short takes only the first bytes of a stream, without a word.
type short struct {
	w    io.Writer
	left int
}

func (s *short) Write(p []byte) (int, error) {
	n := min(s.left, len(p))
	s.left -= n
	if _, err := s.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

func TestCloseEndsWhatIsBeingMade(t *testing.T) {
	s := open(t, t.TempDir())
	begun := make(chan struct{})
	go func() {
		<-begun
		s.Close()
	}()
	_, err := s.Get(t.Context(), "k", func(ctx context.Context, _ io.Writer) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestWhoeverGivesUpDoesNotWait(t *testing.T) {
	s := open(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Get(ctx, "k", func(ctx context.Context, w io.Writer) error {
		time.Sleep(50 * time.Millisecond)
		return file("x", 1)(ctx, w)
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	get(t, s, "k", never) // the other's installation went on
}

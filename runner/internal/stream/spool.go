package stream

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// Save writes every report that the stream does not have to the spool and
// returns how many there were. Call it once nothing sends any more.
func (f *Finals) Save() (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.waiting) == 0 {
		return 0, nil
	}
	if err := os.MkdirAll(f.Spool, 0o700); err != nil {
		return len(f.waiting), fmt.Errorf("make the spool: %w", err)
	}
	var errs []error
	stamp := time.Now().UnixMicro()
	for i, one := range f.waiting {
		if one.file == "" {
			name := fmt.Sprintf("%020d-%06d.json", stamp, i)
			errs = append(errs, write(f.Spool, name, one))
		}
	}
	errs = append(errs, syncDir(f.Spool))
	return len(f.waiting), errors.Join(errs...)
}

func write(dir, name string, one *final) error {
	data, err := strictjson.Encode(one)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, name+".new")
	file, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write to the spool: %w", err)
	}
	_, err = file.Write(data)
	err = errors.Join(err, file.Sync(), file.Close())
	if err != nil {
		return fmt.Errorf("write to the spool: %w", err)
	}
	return os.Rename(tmp, filepath.Join(dir, name))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Recover publishes what an earlier start left in the spool, as it is, and
// returns when the stream has all of it or ctx ends. Run has to be running.
func (f *Finals) Recover(ctx context.Context) (int, error) {
	names, err := spooled(f.Spool)
	if err != nil {
		return 0, err
	}
	sent := 0
	for _, name := range names {
		one, err := load(filepath.Join(f.Spool, name))
		if err != nil {
			f.Log.Error("spooled report is damaged; set aside", "file", name, "error", err)
			_ = os.Rename(filepath.Join(f.Spool, name), filepath.Join(f.Spool, name+".bad"))
			continue
		}
		f.add(one)
		sent++
	}
	if sent == 0 {
		return 0, nil
	}
	f.Log.Info("publishing reports of the last start", "count", sent)
	if left := f.Wait(ctx); left > 0 {
		return sent, fmt.Errorf("%d reports of the last start are still unpublished: %w", left, context.Cause(ctx))
	}
	return sent, nil
}

func spooled(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the spool: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".json") && e.Type().IsRegular() {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

func load(path string) (*final, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	one := &final{}
	if err := strictjson.Decode(data, one); err != nil {
		return nil, err
	}
	if one.Subject == "" || len(one.Data) == 0 {
		return nil, errors.New("subject or data is missing")
	}
	one.file = path
	return one, nil
}

func (f *Finals) unspool(path string) {
	if err := os.Remove(path); err != nil {
		f.Log.Warn("spooled report was published but not removed", "error", err)
	}
}

package dispatch

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/envelope"
)

// KeyFolder knows the runners' public keys: one file <runner>.pub each. A
// file that is added, replaced or removed counts from the next message on.
// It may be used from several goroutines.
type KeyFolder struct {
	Dir string

	mu    sync.Mutex
	known map[string]knownKey
}

type knownKey struct {
	changed time.Time
	size    int64
	keys    envelope.Keys
}

// Keys returns the keys that may sign for a runner. The error wraps
// envelope.ErrKey when there are none.
func (f *KeyFolder) Keys(runner string) (envelope.Keys, error) {
	if !bus.ValidRunner(runner) {
		return nil, fmt.Errorf("%w: %.80q is not a runner's name", envelope.ErrKey, runner)
	}
	path := filepath.Join(f.Dir, runner+".pub")
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%w: no key file for runner %s", envelope.ErrKey, runner)
	}
	f.mu.Lock()
	k, ok := f.known[runner]
	f.mu.Unlock()
	if ok && k.changed.Equal(st.ModTime()) && k.size == st.Size() {
		return k.keys, nil
	}
	pub, err := envelope.LoadPublic(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", envelope.ErrKey, err)
	}
	k = knownKey{changed: st.ModTime(), size: st.Size(), keys: envelope.NewKeys(pub.Sign)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[string]knownKey{}
	}
	f.known[runner] = k
	return k.keys, nil
}

package dispatch

import (
	"crypto/ecdh"
	"fmt"
	"os"
	"path/filepath"
	"sync"

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
	file os.FileInfo
	keys envelope.Keys
	box  *ecdh.PublicKey
}

// same also tells two files apart that were put there within one tick of the
// file system's clock.
func (k knownKey) same(file os.FileInfo) bool {
	return os.SameFile(k.file, file) && k.file.ModTime().Equal(file.ModTime()) && k.file.Size() == file.Size()
}

// Keys returns the keys that may sign for a runner. The error wraps
// envelope.ErrKey when there are none.
func (f *KeyFolder) Keys(runner string) (envelope.Keys, error) {
	k, err := f.find(runner)
	return k.keys, err
}

// Box returns the key that a runner's secrets are sealed to. The error wraps
// envelope.ErrKey when there is none.
func (f *KeyFolder) Box(runner string) (*ecdh.PublicKey, error) {
	k, err := f.find(runner)
	return k.box, err
}

func (f *KeyFolder) find(runner string) (knownKey, error) {
	if !bus.ValidRunner(runner) {
		return knownKey{}, fmt.Errorf("%w: %.80q is not a runner's name", envelope.ErrKey, runner)
	}
	path := filepath.Join(f.Dir, runner+".pub")
	st, err := os.Stat(path)
	if err != nil {
		return knownKey{}, fmt.Errorf("%w: no key file for runner %s", envelope.ErrKey, runner)
	}
	f.mu.Lock()
	k, ok := f.known[runner]
	f.mu.Unlock()
	if ok && k.same(st) {
		return k, nil
	}
	pub, err := envelope.LoadPublic(path)
	if err != nil {
		return knownKey{}, fmt.Errorf("%w: %w", envelope.ErrKey, err)
	}
	k = knownKey{file: st, keys: envelope.NewKeys(pub.Sign), box: pub.Box}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[string]knownKey{}
	}
	f.known[runner] = k
	return k, nil
}

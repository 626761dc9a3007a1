package envelope

import (
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// Private is the secret half of a daemon's identity: a signing key and, for
// runners, the box key that secrets are sealed to.
type Private struct {
	Sign ed25519.PrivateKey
	Box  *ecdh.PrivateKey
}

// Public is what others know of a daemon.
type Public struct {
	Sign ed25519.PublicKey
	Box  *ecdh.PublicKey
}

// Public returns the public half of p.
func (p Private) Public() Public {
	return Public{Sign: p.Sign.Public().(ed25519.PublicKey), Box: p.Box.PublicKey()}
}

// The kinds of key files.
const (
	private = "private"
	public  = "public"
)

type keyFile struct {
	Kind string `json:"kind"`
	Sign string `json:"sign"` // Ed25519: the seed, or the public key; base64
	Box  string `json:"box"`  // X25519: the secret, or the public key; base64
}

// LoadOrMake reads the private key file at path, or makes a new one there with
// mode 0600. The folder must exist.
func LoadOrMake(path string) (Private, error) {
	p, err := LoadPrivate(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return p, err
	}
	_, sign, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return Private{}, fmt.Errorf("make signing key: %w", err)
	}
	box, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return Private{}, fmt.Errorf("make box key: %w", err)
	}
	p = Private{Sign: sign, Box: box}
	f := keyFile{Kind: private, Sign: b64(sign.Seed()), Box: b64(box.Bytes())}
	if err := write(path, f, 0o600, os.Link); err != nil {
		if errors.Is(err, fs.ErrExist) { // another start of this daemon was faster
			return LoadPrivate(path)
		}
		return Private{}, err
	}
	return p, nil
}

// LoadPrivate reads a private key file. One that others may read is refused.
func LoadPrivate(path string) (Private, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Private{}, err
	}
	if st.Mode().Perm()&0o077 != 0 {
		return Private{}, fmt.Errorf("key file %s may be read by others (mode %04o): chmod 600 it", path, st.Mode().Perm())
	}
	seed, secret, err := read(path, private, ed25519.SeedSize)
	if err != nil {
		return Private{}, err
	}
	box, err := ecdh.X25519().NewPrivateKey(secret)
	if err != nil {
		return Private{}, damaged(path)
	}
	return Private{Sign: ed25519.NewKeyFromSeed(seed), Box: box}, nil
}

// WritePublic writes the public half to path, replacing what is there.
func WritePublic(path string, p Public) error {
	f := keyFile{Kind: public, Sign: b64(p.Sign), Box: b64(p.Box.Bytes())}
	return write(path, f, 0o644, os.Rename)
}

// LoadPublic reads a public key file.
func LoadPublic(path string) (Public, error) {
	sign, rawBox, err := read(path, public, ed25519.PublicKeySize)
	if err != nil {
		return Public{}, err
	}
	box, err := ecdh.X25519().NewPublicKey(rawBox)
	if err != nil {
		return Public{}, damaged(path)
	}
	return Public{Sign: sign, Box: box}, nil
}

// read returns the two keys in a file of that kind; the first is signSize long.
func read(path, kind string, signSize int) (sign, box []byte, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	var f keyFile
	if err := strictjson.Decode(data, &f); err != nil {
		return nil, nil, damaged(path)
	}
	if f.Kind != kind {
		return nil, nil, fmt.Errorf("key file %s is %q, not %q", path, f.Kind, kind)
	}
	sign, err = base64.StdEncoding.DecodeString(f.Sign)
	if err != nil || len(sign) != signSize {
		return nil, nil, damaged(path)
	}
	if box, err = base64.StdEncoding.DecodeString(f.Box); err != nil {
		return nil, nil, damaged(path)
	}
	return sign, box, nil
}

// damaged hides its cause, which could quote the key.
func damaged(path string) error {
	return fmt.Errorf("key file %s is damaged; restore it, or remove it: its owner makes a new one at its next start", path)
}

// write puts f into a file of its own beside path and has place bring it there:
// os.Rename replaces what is there, os.Link leaves it alone.
func write(path string, f keyFile, mode fs.FileMode, place func(from, to string) error) error {
	data, err := strictjson.Encode(f)
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".key-*")
	if err != nil {
		return fmt.Errorf("write key file: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(data, '\n'))
	err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err != nil {
		return fmt.Errorf("write key file: %w", err)
	}
	return place(tmp.Name(), path)
}

func b64(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

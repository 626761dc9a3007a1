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

type keyFile struct {
	Kind string `json:"kind"` // "private" "public"
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
	f := keyFile{Kind: "private", Sign: b64(sign.Seed()), Box: b64(box.Bytes())}
	if err := writeNew(path, f, 0o600); err != nil {
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
	f, err := read(path, "private")
	if err != nil {
		return Private{}, err
	}
	seed, err1 := base64.StdEncoding.DecodeString(f.Sign)
	secret, err2 := base64.StdEncoding.DecodeString(f.Box)
	if err1 != nil || err2 != nil || len(seed) != ed25519.SeedSize {
		return Private{}, fmt.Errorf("key file %s is damaged", path)
	}
	box, err := ecdh.X25519().NewPrivateKey(secret)
	if err != nil {
		return Private{}, fmt.Errorf("key file %s is damaged", path)
	}
	return Private{Sign: ed25519.NewKeyFromSeed(seed), Box: box}, nil
}

// WritePublic writes the public half to path, replacing what is there.
func WritePublic(path string, p Public) error {
	data, err := strictjson.Encode(keyFile{Kind: "public", Sign: b64(p.Sign), Box: b64(p.Box.Bytes())})
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".key-*")
	if err != nil {
		return fmt.Errorf("write key file: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(data, '\n'))
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	return err
}

// LoadPublic reads a public key file.
func LoadPublic(path string) (Public, error) {
	f, err := read(path, "public")
	if err != nil {
		return Public{}, err
	}
	sign, err1 := base64.StdEncoding.DecodeString(f.Sign)
	rawBox, err2 := base64.StdEncoding.DecodeString(f.Box)
	if err1 != nil || err2 != nil || len(sign) != ed25519.PublicKeySize {
		return Public{}, fmt.Errorf("key file %s is damaged", path)
	}
	box, err := ecdh.X25519().NewPublicKey(rawBox)
	if err != nil {
		return Public{}, fmt.Errorf("key file %s is damaged", path)
	}
	return Public{Sign: sign, Box: box}, nil
}

func read(path, kind string) (keyFile, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return keyFile{}, err
	}
	var f keyFile
	if err := strictjson.Decode(data, &f); err != nil {
		return keyFile{}, fmt.Errorf("key file %s is damaged", path) // the cause could quote the key
	}
	if f.Kind != kind {
		return keyFile{}, fmt.Errorf("key file %s is %q, not %q", path, f.Kind, kind)
	}
	return f, nil
}

func writeNew(path string, f keyFile, mode fs.FileMode) error {
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
	return os.Link(tmp.Name(), path)
}

func b64(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

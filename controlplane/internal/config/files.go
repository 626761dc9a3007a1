package config

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/bigwave/bigwave/shared/settings"
)

// AdminTokenFile is where the admin token is kept when it was made here.
func (c *Config) AdminTokenFile() string { return filepath.Join(c.DataDir, "admin-token") }

// SecretKeyFile is where the secret key is kept when it was made here.
func (c *Config) SecretKeyFile() string { return filepath.Join(c.DataDir, "secret-key") }

// Personal reports whether the control plane brings its own bus, and with it
// is the only one.
func (c *Config) Personal() bool { return c.NATSURL == "" && c.NATSAccessFile == "" }

// Prepare makes the folders of the data directory, readable by their owner
// only, and the admin token and the secret key when none is set, which it
// keeps for the next start. Replicas must share their secret key, so none is
// made for them.
func (c *Config) Prepare() error {
	for _, dir := range []string{c.DataDir, filepath.Dir(c.KeyFile), c.RunnerKeysDir, filepath.Join(c.DataDir, "nats")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make the data directory: %w", err)
		}
	}
	if c.SecretKey == "" && c.Personal() {
		if err := c.keepSecretKey(); err != nil {
			return err
		}
	}
	if c.AdminToken != "" {
		return nil
	}
	token, err := keep(c.AdminTokenFile())
	if err != nil {
		return fmt.Errorf("keep the admin token: %w", err)
	}
	if !goodToken(token) {
		return fmt.Errorf("%s must hold at least 16 visible ASCII characters without spaces; remove it to have a new one made", c.AdminTokenFile())
	}
	c.AdminToken = settings.Secret(token)
	return nil
}

func (c *Config) keepSecretKey() error {
	key, err := keep(c.SecretKeyFile())
	if err != nil {
		return fmt.Errorf("keep the secret key: %w", err)
	}
	if !goodSecret(key) {
		return fmt.Errorf("%s must hold at least 32 visible ASCII characters without spaces, as BIGWAVE_SECRET_KEY may; put the one back that it held", c.SecretKeyFile())
	}
	c.SecretKey = settings.Secret(key)
	return nil
}

// keep reads the token at path, or makes one there.
func keep(path string) (string, error) {
	token, err := readToken(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return token, err
	}
	b := make([]byte, 32)
	rand.Read(b)
	token = base64.RawURLEncoding.EncodeToString(b)
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(token + "\n")
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return "", err
	}
	// A link, unlike a rename, leaves alone what another start has put there.
	if err := os.Link(tmp.Name(), path); errors.Is(err, fs.ErrExist) {
		return readToken(path)
	} else if err != nil {
		return "", err
	}
	return token, nil
}

func readToken(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if st.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("%s may be read by others (mode %04o): chmod 600 it", path, st.Mode().Perm())
	}
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// goodSecret is goodToken for a key, which must be longer.
func goodSecret(s string) bool { return len(s) >= 32 && goodToken(s) }

// goodToken reports whether s can be guessed by nobody and sent in a header.
func goodToken(s string) bool {
	return len(s) >= 16 && len(s) <= 1024 && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

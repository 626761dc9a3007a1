package bus

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// Access is how to reach the bus: the content of an access file, which only
// its owner may read.
type Access struct {
	URL      string `json:"url"`
	User     string `json:"user,omitempty"`
	Password string `json:"password,omitempty"`
}

// LoadAccess reads an access file.
func LoadAccess(path string) (Access, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Access{}, err
	}
	if st.Mode().Perm()&0o077 != 0 {
		return Access{}, fmt.Errorf("access file %s may be read by others (mode %04o): chmod 600 it", path, st.Mode().Perm())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Access{}, err
	}
	var a Access
	if err := strictjson.Decode(data, &a); err != nil || a.URL == "" {
		return Access{}, fmt.Errorf("access file %s is damaged; write it anew as JSON with url, user and password", path) // the cause could quote the password
	}
	return a, nil
}

// WriteAccess writes an access file with mode 0600, whole or not at all.
func WriteAccess(path string, a Access) error {
	data, err := strictjson.Encode(a)
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".access-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(data, '\n'))
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err // what was there stays
	}
	return os.Rename(tmp.Name(), path)
}

// Connect connects and reconnects for ever; the first connection may still be
// pending when it returns. Options in more come last and win.
func Connect(name string, a Access, log *slog.Logger, more ...nats.Option) (*nats.Conn, error) {
	opts := []nats.Option{
		nats.Name(name),
		nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true),
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 250*time.Millisecond),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(3),
		nats.Timeout(3 * time.Second),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("bus disconnected", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { log.Info("bus reconnected") }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.Warn("bus error", "error", err)
		}),
	}
	if a.User != "" {
		opts = append(opts, nats.UserInfo(a.User, a.Password))
	}
	nc, err := nats.Connect(a.URL, append(opts, more...)...)
	if err != nil {
		return nil, fmt.Errorf("connect to the bus: %w", err)
	}
	return nc, nil
}

package embeddednats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// How often a server whose store has failed looks whether it may write again.
	healPause = time.Second
	// What must fit on the disk before it is tried: more than the largest message.
	healRoom = 2 * MaxPayload
)

// heal starts the server anew whenever its store has failed and the disk takes
// writes again, until the server is closed. A stream that could not be written
// once (a full disk, say) takes no message any more until then.
func (s *Server) heal() {
	defer close(s.healed)
	tick := time.NewTicker(healPause)
	defer tick.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-tick.C:
		}
		if !s.failed.Load() {
			continue
		}
		if err := tryDisk(s.cfg.Dir); err != nil {
			continue
		}
		if err := s.restart(); err != nil {
			s.cfg.Log.Error("bus did not start anew", "error", err)
			continue
		}
		s.cfg.Log.Warn("bus started anew after its store had failed")
	}
}

// tryDisk writes and removes a file.
func tryDisk(dir string) error {
	path := filepath.Join(dir, "probe")
	defer os.Remove(path)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, healRoom))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// restart puts a new server in the place of the one that runs. Clients see a
// short break.
func (s *Server) restart() error {
	old := s.current()
	old.Shutdown()
	old.WaitForShutdown()
	s.failed.Store(false)
	srv, err := s.launch()
	if err != nil {
		s.failed.Store(true)
		return fmt.Errorf("after a failure of the store: %w", err)
	}
	s.mu.Lock()
	s.srv = srv
	s.mu.Unlock()
	return nil
}

// failure reports whether what the server says is that its store is broken.
func failure(format string) bool {
	return strings.Contains(strings.ToLower(format), "critical write error")
}

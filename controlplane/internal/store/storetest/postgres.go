package storetest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// Server is a PostgreSQL server of our own on a unix socket. It ends with the
// process that started it, however that one ends.
type Server struct {
	URL string // of its database "postgres"

	dir  string // holds data, the socket and the log
	bin  string
	cred *syscall.Credential
	stop io.Closer // closing it ends the server
	done chan error
}

// lifeline runs the server until its input closes, which the kernel does when
// the test process dies, and then ends the server at once.
const lifeline = `
"$0/postgres" -D "$1/data" -k "$1" -c listen_addresses= -c fsync=off -c max_connections=200 \
	>>"$1/log" 2>&1 </dev/null &
server=$!
cat >/dev/null
kill -QUIT $server
wait $server
[ -e "$1/keep" ] || rm -rf "$1"
`

// StartServer makes a database cluster in a temporary folder and starts a
// server for it. As root it runs as user postgres, which refuses to be root.
func StartServer() (*Server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	// Not os.TempDir: the path of a unix socket must be short.
	dir, err := os.MkdirTemp("/tmp", "bigwave-pg-")
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, bin: bin}
	if os.Geteuid() == 0 {
		if err := s.giveAway(); err != nil {
			return nil, err
		}
	}
	initdb := s.command(filepath.Join(bin, "initdb"), "-D", filepath.Join(dir, "data"),
		"-U", "bigwave", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	q := url.Values{"host": {dir}, "user": {"bigwave"}, "sslmode": {"disable"}}
	s.URL = "postgres:///postgres?" + q.Encode()
	return s, s.Start()
}

// Start starts the server again after Crash.
func (s *Server) Start() error {
	// Only the last process to end may remove the folder.
	os.Remove(filepath.Join(s.dir, "keep"))
	cmd := s.command("/bin/sh", "-c", lifeline, s.bin, s.dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.stop, s.done = in, make(chan error, 1)
	go func() { s.done <- cmd.Wait() }()
	return s.answers(30 * time.Second)
}

// Crash ends the server at once, as pg_ctl stop -m immediate does; what was
// committed must be there after Start.
func (s *Server) Crash() error {
	keep, err := os.Create(filepath.Join(s.dir, "keep"))
	if err != nil {
		return err
	}
	keep.Close()
	return s.end()
}

// Stop ends the server and removes its folder.
func (s *Server) Stop() error {
	return s.end()
}

func (s *Server) end() error {
	s.stop.Close()
	select {
	case <-s.done: // a server that was told to quit exits with 2
		return nil
	case <-time.After(20 * time.Second):
		return errors.New("the PostgreSQL server does not end")
	}
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred, Setpgid: true}
	return cmd
}

// giveAway makes the folder, and all that runs in it, an ordinary user's.
func (s *Server) giveAway() error {
	var account *user.User
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			account = u
			break
		}
	}
	if account == nil {
		return errors.New("neither user postgres nor nobody exists")
	}
	uid, _ := strconv.Atoi(account.Uid)
	gid, _ := strconv.Atoi(account.Gid)
	s.cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	// Others may pass to the socket; the data folder is closed by initdb.
	return errors.Join(os.Chown(s.dir, uid, gid), os.Chmod(s.dir, 0o755))
}

func (s *Server) answers(limit time.Duration) error {
	db, err := sql.Open("postgres", s.URL)
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := db.PingContext(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case werr := <-s.done:
			return fmt.Errorf("the PostgreSQL server ended: %w: %s", errors.Join(err, werr), s.log())
		case <-ctx.Done():
			return fmt.Errorf("the PostgreSQL server does not answer: %w: %s", err, s.log())
		}
	}
}

func (s *Server) log() string {
	b, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	return string(b[max(0, len(b)-2000):])
}

// binaries finds the folder of PostgreSQL's programs; Debian keeps them off PATH.
func binaries() (string, error) {
	if p, err := exec.LookPath("initdb"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			return filepath.Dir(real), nil
		}
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if len(found) == 0 {
		return "", errors.New("initdb is not installed (Debian package postgresql), and BIGWAVE_TEST_POSTGRES_URL is not set")
	}
	slices.Sort(found)
	return filepath.Dir(found[len(found)-1]), nil
}

// Package config knows every setting of the control plane: its name in the
// environment, its default and what it may be.
package config

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/settings"
)

// Config is the settings of one control plane. The tags are the settings
// table: env is the name without its prefix, allowed says what a value must
// be, doc what it is for, and derived the default that depends on others.
type Config struct {
	Listen  string `env:"LISTEN" envDefault:"127.0.0.1:8000" allowed:"host:port" doc:"where the API listens"`
	DataDir string `env:"DATA_DIR" derived:"$XDG_DATA_HOME/bigwave or ~/.local/share/bigwave" allowed:"a path" doc:"what must survive a restart"`

	AdminToken  settings.Secret `env:"ADMIN_TOKEN" derived:"made at the first start, kept in <data>/admin-token" allowed:"at least 16 visible ASCII characters without spaces" doc:"the bearer of the bootstrap admin"`
	DatabaseURL settings.Secret `env:"DATABASE_URL" derived:"sqlite://<data>/bigwave.db" allowed:"sqlite:///path/to/file.db or postgres://…" doc:"the database"`

	SecretKey settings.Secret `env:"SECRET_KEY" derived:"with the bus in process made at the first start, kept in <data>/secret-key" allowed:"at least 32 visible ASCII characters without spaces" doc:"what the valves of Python tools are encrypted with; the same on every replica"`

	NATSURL        settings.Secret `env:"NATS_URL" derived:"a server in process" allowed:"nats://…, tls://…, ws://… or wss://…" doc:"the message bus of a cluster"`
	NATSAccessFile string          `env:"NATS_ACCESS_FILE" allowed:"a path" doc:"JSON file (0600) with url, user and password of the cluster's bus"`
	NATSListen     string          `env:"NATS_LISTEN" envDefault:"127.0.0.1:0" allowed:"host:port" doc:"where the bus in process listens; port 0 is chosen once and kept"`

	KeyFile       string `env:"KEY_FILE" derived:"<data>/keys/controlplane.key" allowed:"a path" doc:"the key that signs orders; made when missing"`
	RunnerKeysDir string `env:"RUNNER_KEYS_DIR" derived:"<data>/keys/runners" allowed:"a path" doc:"folder of the runners' public keys, <runner>.pub"`
	Pool          string `env:"POOL" envDefault:"default" allowed:"1 to 63 of a-z, 0-9 and -, not starting with -, and not cp" doc:"the pool of runners that sessions start in"`

	SandboxEnabled             bool   `env:"SANDBOX_ENABLED" envDefault:"true" allowed:"true or false" doc:"whether there are sandboxes and policies at all"`
	SandboxDefaultPolicy       string `env:"SANDBOX_DEFAULT_POLICY" derived:"the one in the tree" allowed:"a JSON object, or @ and the path of a file that holds one" doc:"the policy of workspaces that have none"`
	SandboxMaxMemoryMB         int64  `env:"SANDBOX_MAX_MEMORY_MB" envDefault:"65536" allowed:"a whole number from 16" doc:"ceiling of memory_mb"`
	SandboxMaxPIDs             int64  `env:"SANDBOX_MAX_PIDS" envDefault:"32768" allowed:"a whole number from 4" doc:"ceiling of pids_limit"`
	SandboxMaxWallClockSeconds int64  `env:"SANDBOX_MAX_WALL_CLOCK_SECONDS" envDefault:"3600" allowed:"a whole number from 1" doc:"ceiling of wall_clock_seconds"`
	SandboxMaxOutputBytes      int64  `env:"SANDBOX_MAX_OUTPUT_BYTES" envDefault:"67108864" allowed:"a whole number from 1024" doc:"ceiling of output_bytes_limit"`

	ToolURLHosts    []string `env:"TOOL_URL_HOSTS" envDefault:"github.com,raw.githubusercontent.com" allowed:"hosts or host:port, separated by commas" doc:"servers from which the source of a Python tool may be loaded, over HTTPS"`
	ToolURLGitHub   string   `env:"TOOL_URL_GITHUB" envDefault:"https://github.com" allowed:"https://… or http://…" doc:"where https://github.com is reached, such as a mirror; also on a private network"`
	ToolURLRaw      string   `env:"TOOL_URL_RAW" envDefault:"https://raw.githubusercontent.com" allowed:"https://… or http://…" doc:"where https://raw.githubusercontent.com is reached, likewise"`
	AdminToolAccess bool     `env:"ADMIN_TOOL_ACCESS" envDefault:"true" allowed:"true or false" doc:"whether admins are listed every Python tool, or only their own and those shared with them"`

	StartWait         time.Duration `env:"START_WAIT" envDefault:"30s" allowed:"a duration from 100ms to 1h, such as 30s" doc:"how long calls wait for a free slot before start_failed"`
	ClaimWait         time.Duration `env:"CLAIM_WAIT" envDefault:"5s" allowed:"a duration from 100ms to 10m, such as 5s" doc:"how long a ticket may lie before another takes its place"`
	RunnerLostAfter   time.Duration `env:"RUNNER_LOST_AFTER" envDefault:"45s" allowed:"a duration from 3s to 1h, such as 45s" doc:"silence after which a runner is lost"`
	SessionIdleTTL    time.Duration `env:"SESSION_IDLE_TTL" envDefault:"30m" allowed:"a duration from 1s to 720h, such as 30m" doc:"idle time after which a session closes"`
	SessionTTL        time.Duration `env:"SESSION_TTL" envDefault:"24h" allowed:"a duration from 1s to 8760h, such as 24h" doc:"age at which a session closes"`
	MaxRunsPerSession int           `env:"MAX_RUNS_PER_SESSION" envDefault:"8" allowed:"a whole number from 1 to 1000" doc:"open runs of one session; more answer 429"`

	LogFormat     string        `env:"LOG_FORMAT" envDefault:"text" allowed:"text or json" doc:"form of the log"`
	LogLevel      slog.Level    `env:"LOG_LEVEL" envDefault:"info" allowed:"debug, info, warn or error" doc:"least level that is logged"`
	ShutdownGrace time.Duration `env:"SHUTDOWN_GRACE" envDefault:"10s" allowed:"a duration from 0s to 10m, such as 10s" doc:"how long open requests may take when stopping"`
}

// Load reads the settings from an environment, as os.Environ gives it. Errors
// name each variable that is wrong and say what it may be. Nothing is written.
func Load(environ []string) (Config, error) {
	vars := settings.Environ(environ)
	c, err := settings.Parse[Config](vars)
	if err != nil {
		return Config{}, err
	}
	if err := c.place(vars); err != nil {
		return Config{}, err
	}
	if err := c.check(); err != nil {
		return Config{}, err
	}
	return c, c.readPolicy()
}

// place fills in the paths that depend on other settings.
func (c *Config) place(vars settings.Vars) error {
	dir, err := settings.DataDir(c.DataDir, vars)
	if err != nil {
		return settings.Wrong[Config]("DataDir", err)
	}
	c.DataDir = dir
	c.KeyFile = cmp.Or(c.KeyFile, filepath.Join(dir, "keys", "controlplane.key"))
	c.RunnerKeysDir = cmp.Or(c.RunnerKeysDir, filepath.Join(dir, "keys", "runners"))
	file := url.URL{Scheme: "sqlite", Path: filepath.Join(dir, "bigwave.db")}
	c.DatabaseURL = cmp.Or(c.DatabaseURL, settings.Secret(file.String()))
	return nil
}

// check refuses what is out of range, all of it at once.
func (c *Config) check() error {
	return settings.Check[Config](map[string]bool{
		"Listen":                     hostPort(c.Listen),
		"NATSListen":                 hostPort(c.NATSListen),
		"AdminToken":                 c.AdminToken == "" || goodToken(string(c.AdminToken)),
		"SecretKey":                  c.SecretKey == "" || goodSecret(string(c.SecretKey)),
		"ToolURLHosts":               goodHosts(c.ToolURLHosts),
		"ToolURLGitHub":              baseURL(c.ToolURLGitHub),
		"ToolURLRaw":                 baseURL(c.ToolURLRaw),
		"DatabaseURL":                scheme(c.DatabaseURL, "sqlite", "postgres", "postgresql"),
		"NATSURL":                    c.NATSURL == "" || scheme(c.NATSURL, "nats", "tls", "ws", "wss"),
		"Pool":                       bus.ValidRunner(c.Pool),
		"SandboxMaxMemoryMB":         c.SandboxMaxMemoryMB >= 16,
		"SandboxMaxPIDs":             c.SandboxMaxPIDs >= 4,
		"SandboxMaxWallClockSeconds": c.SandboxMaxWallClockSeconds >= 1,
		"SandboxMaxOutputBytes":      c.SandboxMaxOutputBytes >= 1024,
		"StartWait":                  settings.Within(c.StartWait, 100*time.Millisecond, time.Hour),
		"ClaimWait":                  settings.Within(c.ClaimWait, 100*time.Millisecond, 10*time.Minute),
		"RunnerLostAfter":            settings.Within(c.RunnerLostAfter, 3*time.Second, time.Hour),
		"SessionIdleTTL":             settings.Within(c.SessionIdleTTL, time.Second, 720*time.Hour),
		"SessionTTL":                 settings.Within(c.SessionTTL, time.Second, 8760*time.Hour),
		"MaxRunsPerSession":          settings.Within(c.MaxRunsPerSession, 1, 1000),
		"LogFormat":                  c.LogFormat == "text" || c.LogFormat == "json",
		"ShutdownGrace":              settings.Within(c.ShutdownGrace, 0, 10*time.Minute),
	})
}

// maxPolicyFile is far more than a policy is long.
const maxPolicyFile = 1 << 20

// readPolicy replaces @file by what the file holds.
func (c *Config) readPolicy() error {
	path, isFile := strings.CutPrefix(c.SandboxDefaultPolicy, "@")
	if !isFile {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return settings.Wrong[Config]("SandboxDefaultPolicy", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxPolicyFile+1))
	if err == nil && len(b) > maxPolicyFile {
		err = fmt.Errorf("%s is larger than 1 MiB", path)
	}
	if err != nil {
		return settings.Wrong[Config]("SandboxDefaultPolicy", err)
	}
	c.SandboxDefaultPolicy = string(b)
	return nil
}

func hostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && strconv.FormatUint(n, 10) == port
}

// goodHosts reports whether all are names that a URL may have.
func goodHosts(hosts []string) bool {
	for _, h := range hosts {
		u, err := url.Parse("https://" + h + "/")
		if err != nil || u.Host != h || h == "" || u.User != nil || strings.ToLower(h) != h {
			return false
		}
	}
	return len(hosts) > 0
}

// baseURL reports whether paths can be put after s.
func baseURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && (u.Scheme == "https" || u.Scheme == "http") && u.Hostname() != "" && u.User == nil && u.RawQuery == "" && u.Fragment == ""
}

func scheme(s settings.Secret, allowed ...string) bool {
	u, err := url.Parse(string(s))
	if err != nil {
		return false
	}
	return slices.Contains(allowed, u.Scheme) && (u.Host != "" || u.Path != "")
}

// Settings lists every setting, for the documentation.
func Settings() []settings.Setting { return settings.List[Config]() }

// Package config knows every setting of the runner: its name in the
// environment, its default and what it may be.
package config

import (
	"cmp"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/settings"
)

// Config is the settings of one runner. The tags are the settings table: env
// is the name without its prefix, allowed says what a value must be, doc what
// it is for, and derived the default that depends on others.
type Config struct {
	DataDir       string `env:"DATA_DIR" derived:"$XDG_DATA_HOME/bigwave or ~/.local/share/bigwave" allowed:"a path" doc:"the control plane's data directory, when both are on one host"`
	RunnerDataDir string `env:"RUNNER_DATA_DIR" derived:"<data>/runner" allowed:"a path" doc:"the runner's own files: key, spool, sandboxes"`
	RunnerID      string `env:"RUNNER_ID" derived:"the host's name" allowed:"1 to 63 of a-z, 0-9 and -, not starting with -, and not cp" doc:"the runner's name; unique in the cluster"`
	Pool          string `env:"POOL" envDefault:"default" allowed:"1 to 63 of a-z, 0-9 and -, not starting with -, and not cp" doc:"the pool whose sessions it takes"`

	NATSURL         settings.Secret `env:"NATS_URL" derived:"the access file's" allowed:"nats://…, tls://…, ws://… or wss://…" doc:"the message bus"`
	NATSAccessFile  string          `env:"NATS_ACCESS_FILE" derived:"<data>/nats/runner.json" allowed:"a path" doc:"JSON file (0600) with url, user and password of the bus; waited for"`
	ControlPlaneKey string          `env:"CONTROLPLANE_KEY" derived:"<data>/keys/controlplane.pub" allowed:"paths, separated by commas" doc:"public keys that may sign orders; waited for"`
	RunnerKeyFile   string          `env:"RUNNER_KEY_FILE" derived:"<runner data>/runner.key" allowed:"a path" doc:"the key that signs results; made when missing"`
	RunnerKeysDir   string          `env:"RUNNER_KEYS_DIR" derived:"<data>/keys/runners" allowed:"a path" doc:"folder in which the runner leaves its public key, when it may write there"`

	Slots               int   `env:"SLOTS" envDefault:"32" allowed:"a whole number from 1 to 10000" doc:"live sandboxes at most"`
	MaxCalls            int   `env:"MAX_CALLS" envDefault:"64" allowed:"a whole number from 1 to 10000" doc:"open calls at most"`
	MaxMemoryMB         int64 `env:"MAX_MEMORY_MB" envDefault:"65536" allowed:"a whole number from 16" doc:"largest memory_mb that it takes"`
	MaxPIDs             int64 `env:"MAX_PIDS" envDefault:"32768" allowed:"a whole number from 4" doc:"largest pids_limit that it takes"`
	MaxWallClockSeconds int64 `env:"MAX_WALL_CLOCK_SECONDS" envDefault:"3600" allowed:"a whole number from 1" doc:"largest wall_clock_seconds that it takes"`
	MaxOutputBytes      int64 `env:"MAX_OUTPUT_BYTES" envDefault:"67108864" allowed:"a whole number from 1024" doc:"largest output_bytes_limit that it takes"`

	Backend   string   `env:"BACKEND" envDefault:"subprocess" allowed:"subprocess or containerd" doc:"what isolates user code: namespaces around the host's own files, or containers of the policy's base_image"`
	Init      string   `env:"INIT" derived:"bigwave-init beside the runner" allowed:"a path" doc:"the program that is pid 1 in every sandbox"`
	Python    string   `env:"PYTHON" derived:"python3 from PATH" allowed:"a path or a name" doc:"the interpreter of python tools"`
	HostImage string   `env:"HOST_IMAGE" envDefault:"bigwave/sandbox-base:latest" allowed:"a name" doc:"the base_image that the host's own files stand for; with containerd the one that the runner proves its fence with and keeps sandboxes ready for"`
	AllowWeak []string `env:"ALLOW_WEAK" allowed:"memory, pids, cpu, separated by commas" doc:"limits that may be held weakly where cgroups are missing; results say so"`
	Require   []string `env:"REQUIRE" allowed:"landlock" doc:"optional parts of the fence without which no sandbox starts"`

	WorkspaceMB int64    `env:"WORKSPACE_MB" envDefault:"1024" allowed:"a whole number from 16 to 1048576" doc:"size of a sandbox's /workspace in MiB, a disk of its own; no sandbox starts with less than that free, or 1 GiB or 2 % of the disk; where the runner is not root it lies in memory, with at most half of memory_mb"`
	Mounts      []string `env:"MOUNTS" allowed:"host_path:sandbox_path:ro or :rw, separated by commas" doc:"directories that policies may list in fs_allowlist, whole or in part; file permissions count as for any other user of the host, and a Unix socket in one can be connected to, ro or rw"`

	WarmPython bool   `env:"WARM_PYTHON" envDefault:"true" allowed:"true or false" doc:"whether a sandbox that has run Python keeps an interpreter warm and forks later calls from it; only with the Python of BIGWAVE_HOST_IMAGE, which it runs with the rights that making a call takes"`
	WarmCount  int    `env:"WARM_COUNT" envDefault:"1" allowed:"a whole number from 0 to 1000" doc:"started, never used sandboxes that are kept ready"`
	WarmPolicy string `env:"WARM_POLICY" envDefault:"default" allowed:"default or recent" doc:"whose base_image they have: BIGWAVE_HOST_IMAGE, or that of the session that started last; the rest of a policy is given to them at the claim"`

	ContainerdAddress     string   `env:"CONTAINERD_ADDRESS" envDefault:"/run/containerd/containerd.sock" allowed:"a path" doc:"containerd's socket"`
	ContainerdNamespace   string   `env:"CONTAINERD_NAMESPACE" envDefault:"bigwave" allowed:"a name" doc:"containerd's namespace of images, containers and snapshots"`
	ContainerdSnapshotter string   `env:"CONTAINERD_SNAPSHOTTER" envDefault:"overlayfs" allowed:"a name" doc:"what gives each container its root"`
	ContainerdRuntime     string   `env:"CONTAINERD_RUNTIME" envDefault:"io.containerd.runc.v2" allowed:"a name, such as io.containerd.runc.v2" doc:"the container runtime; it must share the host's kernel, which the canary finds out before the runner takes anything"`
	Registries            []string `env:"REGISTRIES" allowed:"hosts or host:port, separated by commas" doc:"registries that a base_image which is not there may be pulled from; none means that every image is imported"`
	RegistriesPlain       []string `env:"REGISTRIES_PLAIN_HTTP" allowed:"some of BIGWAVE_REGISTRIES" doc:"those that are spoken to without TLS"`
	RegistryAuthFile      string   `env:"REGISTRY_AUTH_FILE" allowed:"a path" doc:"credentials for registries, as docker login writes them; read at each pull"`
	MaxImageMB            int64    `env:"MAX_IMAGE_MB" envDefault:"10240" allowed:"a whole number from 1" doc:"largest image to pull, compressed, in MiB"`

	EgressResolver     string        `env:"EGRESS_RESOLVER" derived:"the host's own" allowed:"host:port" doc:"the DNS server that names in a network_allowlist are asked of"`
	EgressPrivateAllow []string      `env:"EGRESS_PRIVATE_ALLOW" allowed:"hosts, addresses and ranges, separated by commas" doc:"what sandboxes may reach, when their policy lists it, although its address is not public; a host opens private networks only, this machine's own and metadata addresses must be named themselves"`
	EgressConnections  int           `env:"EGRESS_CONNECTIONS" envDefault:"256" allowed:"a whole number from 1 to 10000" doc:"connections of a sandbox at once"`
	EgressIdle         time.Duration `env:"EGRESS_IDLE" envDefault:"5m" allowed:"a duration from 1s to 24h, such as 5m" doc:"how long a connection of a sandbox may be silent"`
	EgressBytes        int64         `env:"EGRESS_BYTES" envDefault:"0" allowed:"a whole number from 0" doc:"bytes that a sandbox may send and receive in its life; 0 is no limit"`

	PackageIndex   string   `env:"PACKAGE_INDEX" allowed:"an http:// or https:// address without a user, ? or #, not of localhost" doc:"simple index (PEP 503) that requirements of Python tools are installed from; an installation reaches this host and port and those of BIGWAVE_PACKAGE_HOSTS, public or not (a host on this machine must be given as an address); none means that what a tool requires must be in the base image"`
	PackageHosts   []string `env:"PACKAGE_HOSTS" allowed:"host:port, separated by commas" doc:"where the index's files lie, when that is elsewhere"`
	PackageIndexCA string   `env:"PACKAGE_INDEX_CA" allowed:"a path" doc:"PEM file (at most 64 KiB) with the certificate authorities of the index and its files' hosts, instead of those that the sandbox's Python trusts; read at the start"`
	PackagesMB     int64    `env:"PACKAGES_MB" envDefault:"2048" allowed:"a whole number from 16 to 1048576" doc:"size of all installed packages that are kept in <runner data>/layers, in MiB; those unused for longest go"`

	Grace       time.Duration     `env:"GRACE" envDefault:"30s" allowed:"a duration from 0s to 24h, such as 30s" doc:"how long open calls may go on after SIGTERM"`
	BeatEvery   time.Duration     `env:"BEAT_EVERY" envDefault:"2s" allowed:"a duration from 100ms to 10s, such as 2s" doc:"time between beats"`
	KeepUnheard time.Duration     `env:"KEEP_UNHEARD" envDefault:"10m" allowed:"a duration from 1s to 24h, such as 10m" doc:"how long sandboxes are kept while the control plane can't be reached"`
	Labels      map[string]string `env:"LABELS" envKeyValSeparator:"=" allowed:"key=value, separated by commas" doc:"what the runner says about itself"`

	LogFormat string     `env:"LOG_FORMAT" envDefault:"text" allowed:"text or json" doc:"form of the log"`
	LogLevel  slog.Level `env:"LOG_LEVEL" envDefault:"info" allowed:"debug, info, warn or error" doc:"least level that is logged"`
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
	return c, c.check()
}

// place fills in what depends on other settings and on the host.
func (c *Config) place(vars settings.Vars) error {
	var err error
	if c.DataDir, err = settings.DataDir(c.DataDir, vars); err != nil {
		return settings.Wrong[Config]("DataDir", err)
	}
	if c.RunnerDataDir, err = filepath.Abs(cmp.Or(c.RunnerDataDir, filepath.Join(c.DataDir, "runner"))); err != nil {
		return settings.Wrong[Config]("RunnerDataDir", err)
	}
	c.RunnerID = cmp.Or(c.RunnerID, hostID())
	if c.NATSAccessFile == "" && c.NATSURL == "" {
		c.NATSAccessFile = filepath.Join(c.DataDir, "nats", "runner.json")
	}
	c.ControlPlaneKey = cmp.Or(c.ControlPlaneKey, filepath.Join(c.DataDir, "keys", "controlplane.pub"))
	c.RunnerKeyFile = cmp.Or(c.RunnerKeyFile, filepath.Join(c.RunnerDataDir, "runner.key"))
	c.RunnerKeysDir = cmp.Or(c.RunnerKeysDir, filepath.Join(c.DataDir, "keys", "runners"))
	c.Init = cmp.Or(c.Init, beside("bigwave-init"))
	return nil
}

// beside is the path of a program in this program's folder.
func beside(name string) string {
	self, err := os.Executable()
	if err != nil {
		return name
	}
	return filepath.Join(filepath.Dir(self), name)
}

var notInName = regexp.MustCompile(`[^a-z0-9-]+`)

// hostID makes a runner's name of the host's.
func hostID() string {
	host, _ := os.Hostname() // without a name: "local"
	return cleanID(host)
}

func cleanID(host string) string {
	id := strings.Trim(notInName.ReplaceAllString(strings.ToLower(host), "-"), "-")
	id = strings.TrimRight(id[:min(len(id), 63)], "-")
	if !bus.ValidRunner(id) {
		return "local"
	}
	return id
}

// ControlPlaneKeys are the paths in ControlPlaneKey.
func (c *Config) ControlPlaneKeys() []string { return split(c.ControlPlaneKey) }

func split(list string) []string {
	var out []string
	for p := range strings.SplitSeq(list, ",") {
		if p = strings.TrimSpace(p); p != "" {
			out = append(out, p)
		}
	}
	return out
}

// check refuses what is out of range, all of it at once.
func (c *Config) check() error {
	return settings.Check[Config](map[string]bool{
		"RunnerID":            bus.ValidRunner(c.RunnerID),
		"Pool":                bus.ValidRunner(c.Pool),
		"NATSURL":             c.NATSURL == "" || natsURL(string(c.NATSURL)),
		"ControlPlaneKey":     len(c.ControlPlaneKeys()) > 0,
		"Slots":               settings.Within(c.Slots, 1, 10000),
		"MaxCalls":            settings.Within(c.MaxCalls, 1, 10000),
		"MaxMemoryMB":         c.MaxMemoryMB >= 16,
		"MaxPIDs":             c.MaxPIDs >= 4,
		"MaxWallClockSeconds": c.MaxWallClockSeconds >= 1,
		"MaxOutputBytes":      c.MaxOutputBytes >= 1024,
		"Backend":             c.Backend == "subprocess" || c.Backend == "containerd",
		"WarmCount":           settings.Within(c.WarmCount, 0, 1000),
		"WarmPolicy":          c.WarmPolicy == "default" || c.WarmPolicy == "recent",
		"RegistriesPlain":     !slices.ContainsFunc(c.RegistriesPlain, func(s string) bool { return !slices.Contains(c.Registries, s) }),
		"MaxImageMB":          c.MaxImageMB >= 1,
		"AllowWeak":           !slices.ContainsFunc(c.AllowWeak, func(s string) bool { return !slices.Contains([]string{"memory", "pids", "cpu"}, s) }),
		"Require":             !slices.ContainsFunc(c.Require, func(s string) bool { return s != "landlock" }),
		"EgressResolver":      c.EgressResolver == "" || hostPort(c.EgressResolver),
		"WorkspaceMB":         settings.Within(c.WorkspaceMB, 16, 1<<20),
		"EgressConnections":   settings.Within(c.EgressConnections, 1, 10000),
		"EgressIdle":          settings.Within(c.EgressIdle, time.Second, 24*time.Hour),
		"EgressBytes":         c.EgressBytes >= 0,
		"PackageIndex":        c.PackageIndex == "" || indexURL(c.PackageIndex),
		"PackageHosts":        !slices.ContainsFunc(c.PackageHosts, func(s string) bool { return !hostPort(s) || strings.ContainsAny(s, "*/") }),
		"PackagesMB":          settings.Within(c.PackagesMB, 16, 1<<20),
		"Grace":               settings.Within(c.Grace, 0, 24*time.Hour),
		"BeatEvery":           settings.Within(c.BeatEvery, 100*time.Millisecond, 10*time.Second),
		"KeepUnheard":         settings.Within(c.KeepUnheard, time.Second, 24*time.Hour),
		"Labels":              goodLabels(c.Labels),
		"LogFormat":           c.LogFormat == "text" || c.LogFormat == "json",
	})
}

func hostPort(s string) bool {
	host, port, err := net.SplitHostPort(s)
	n, notNumber := strconv.ParseUint(port, 10, 16)
	return err == nil && host != "" && notNumber == nil && n > 0
}

// indexURL refuses localhost too, which to a sandbox is itself.
func indexURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.User == nil &&
		!strings.EqualFold(u.Hostname(), "localhost") &&
		u.RawQuery == "" && !u.ForceQuery && !strings.Contains(s, "#") && (u.Port() == "" || hostPort(u.Host))
}

func goodLabels(m map[string]string) bool {
	if len(m) > 64 {
		return false
	}
	for k, v := range m {
		if k == "" || len(k) > 256 || len(v) > 256 {
			return false
		}
	}
	return true
}

func natsURL(s string) bool {
	for _, one := range split(s) {
		u, err := url.Parse(one)
		if err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			return false
		}
	}
	return true
}

// Settings lists every setting, for the documentation.
func Settings() []settings.Setting { return settings.List[Config]() }

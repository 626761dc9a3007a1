package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/policy"
	"github.com/bigwave/bigwave/shared/settings"
)

func TestDefaults(t *testing.T) {
	c, err := Load([]string{"HOME=/home/x"})
	if err != nil {
		t.Fatal(err)
	}
	data := "/home/x/.local/share/bigwave"
	for name, got := range map[string][2]any{
		"Listen":      {c.Listen, "127.0.0.1:8000"},
		"DataDir":     {c.DataDir, data},
		"DatabaseURL": {c.DatabaseURL.Reveal(), "sqlite://" + data + "/bigwave.db"},
		"KeyFile":     {c.KeyFile, data + "/keys/controlplane.key"},
		"RunnerKeys":  {c.RunnerKeysDir, data + "/keys/runners"},
		"Pool":        {c.Pool, "default"},
		"Sandbox":     {c.SandboxEnabled, true},
		"StartWait":   {c.StartWait, 30 * time.Second},
		"Runs":        {c.MaxRunsPerSession, 8},
		"Level":       {c.LogLevel, slog.LevelInfo},
		"Token":       {c.AdminToken.Reveal(), ""},
		"Secret":      {c.SecretKey.Reveal(), ""},
		"Hosts":       {fmt.Sprint(c.ToolURLHosts), "[github.com raw.githubusercontent.com]"},
		"GitHub":      {c.ToolURLGitHub, "https://github.com"},
		"Raw":         {c.ToolURLRaw, "https://raw.githubusercontent.com"},
		"Admins":      {c.AdminToolAccess, true},
	} {
		if got[0] != got[1] {
			t.Errorf("%s is %v, want %v", name, got[0], got[1])
		}
	}
	ceilings := policy.Ceilings{
		MemoryMB: c.SandboxMaxMemoryMB, PIDsLimit: c.SandboxMaxPIDs,
		WallClockSeconds: c.SandboxMaxWallClockSeconds, OutputBytesLimit: c.SandboxMaxOutputBytes,
	}
	if ceilings != policy.DefaultCeilings() {
		t.Errorf("the ceilings %+v are not policy's own", ceilings)
	}
	c, err = Load([]string{"HOME=/home/x", "XDG_DATA_HOME=/d", "BIGWAVE_LISTEN="})
	if err != nil || c.DataDir != "/d/bigwave" || c.Listen != "127.0.0.1:8000" {
		t.Errorf("got %s, %s, %v", c.DataDir, c.Listen, err)
	}
}

func TestABadValueNamesItsVariable(t *testing.T) {
	for _, bad := range []string{
		"LISTEN=8000", "LISTEN=127.0.0.1", "LISTEN=:70000", "LISTEN=:http", "ADMIN_TOKEN=short",
		"ADMIN_TOKEN=a token with some spaces", "ADMIN_TOKEN=sixteen-characters\n", "DATABASE_URL=mysql://x",
		"DATABASE_URL=/var/x.db", "DATABASE_URL=postgres://u:hunter2@[::1", "NATS_URL=127.0.0.1:4222", "NATS_LISTEN=x",
		"POOL=a.b", "POOL=>", "POOL=A", "SANDBOX_ENABLED=maybe", "SANDBOX_DEFAULT_POLICY=@/does/not/exist",
		"SANDBOX_MAX_MEMORY_MB=0", "SANDBOX_MAX_MEMORY_MB=1.5", "SANDBOX_MAX_PIDS=-1", "SANDBOX_MAX_WALL_CLOCK_SECONDS=x",
		"SANDBOX_MAX_OUTPUT_BYTES=99999999999999999999", "START_WAIT=30", "START_WAIT=-1s", "CLAIM_WAIT=1h",
		"RUNNER_LOST_AFTER=1s", "SESSION_IDLE_TTL=0s", "SESSION_TTL=forever", "MAX_RUNS_PER_SESSION=0",
		"LOG_FORMAT=xml", "LOG_LEVEL=loud", "SHUTDOWN_GRACE=-1s",
		"SECRET_KEY=hunter2", "SECRET_KEY=hunter2 hunter2 hunter2 hunter2 hunter2", "TOOL_URL_HOSTS=github.com/x", "TOOL_URL_HOSTS=GitHub.com",
		"TOOL_URL_HOSTS=u@github.com", "TOOL_URL_HOSTS=github.com,,x", "TOOL_URL_GITHUB=github.com", "TOOL_URL_GITHUB=ftp://x", "TOOL_URL_RAW=https://u:p@x",
		"TOOL_URL_RAW=https://x/?a=b", "ADMIN_TOOL_ACCESS=maybe",
	} {
		t.Run(bad, func(t *testing.T) {
			_, err := Load([]string{"HOME=/home/x", settings.Prefix + bad})
			name, value, _ := strings.Cut(bad, "=")
			if err == nil || !strings.Contains(err.Error(), settings.Prefix+name+" must be ") {
				t.Fatalf("got %v", err)
			}
			if (name == "ADMIN_TOKEN" || strings.Contains(value, "hunter2")) && strings.Contains(err.Error(), value) {
				t.Errorf("%q shows the secret", err)
			}
		})
	}
}

func TestEveryBadValueIsNamedAtOnce(t *testing.T) {
	_, err := Load([]string{"HOME=/home/x", "BIGWAVE_POOL=.", "BIGWAVE_LOG_FORMAT=xml"})
	if err == nil || !strings.Contains(err.Error(), "BIGWAVE_POOL") || !strings.Contains(err.Error(), "BIGWAVE_LOG_FORMAT") {
		t.Errorf("got %v", err)
	}
}

func TestThereMustBeAPlaceForData(t *testing.T) {
	if _, err := Load(nil); err == nil || !strings.Contains(err.Error(), "BIGWAVE_DATA_DIR") {
		t.Errorf("got %v", err)
	}
}

func TestTheDefaultPolicyMayBeAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(path, []byte(`{"memory_mb": 64}`), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load([]string{"HOME=/x", "BIGWAVE_SANDBOX_DEFAULT_POLICY=@" + path})
	if err != nil || c.SandboxDefaultPolicy != `{"memory_mb": 64}` {
		t.Errorf("got %q, %v", c.SandboxDefaultPolicy, err)
	}
}

func TestSecretsAreNeverShown(t *testing.T) {
	c, err := Load([]string{
		"HOME=/x", "BIGWAVE_ADMIN_TOKEN=hunter2hunter2hunter2", "BIGWAVE_SECRET_KEY=hunter2hunter2hunter2hunter2hunter2",
		"BIGWAVE_DATABASE_URL=postgres://u:hunter2@db/x", "BIGWAVE_NATS_URL=nats://u:hunter2@bus",
	})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("settings", "all", c, "token", c.AdminToken, "pointer", &c)
	}
	j, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	shown := fmt.Sprintf("%v %+v %#v %s %q", c, c, c, c.AdminToken, c.AdminToken) + log.String() + string(j)
	if strings.Contains(shown, "hunter2") {
		t.Errorf("a secret is shown: %s", shown)
	}
	if c.AdminToken.Reveal() != "hunter2hunter2hunter2" {
		t.Error("the token is not the one that was set")
	}
}

func TestTheAdminTokenIsMadeOnceAndKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	load := func() Config {
		c, err := Load([]string{"BIGWAVE_DATA_DIR=" + dir})
		if err != nil {
			t.Error(err)
		}
		return c
	}
	var wg sync.WaitGroup
	tokens := make([]settings.Secret, 8)
	for i := range tokens {
		wg.Go(func() {
			c := load()
			if err := c.Prepare(); err != nil {
				t.Error(err)
			}
			tokens[i] = c.AdminToken
		})
	}
	wg.Wait()
	for _, token := range tokens {
		if len(token) != 43 || token != tokens[0] {
			t.Fatalf("starts disagree or the token has %d characters", len(token))
		}
	}
	c := load()
	for path, want := range map[string]os.FileMode{
		c.AdminTokenFile(): 0o600, dir: 0o700, filepath.Dir(c.KeyFile): 0o700, c.RunnerKeysDir: 0o700,
	} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".admin-token-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := os.Chmod(c.AdminTokenFile(), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a token that others may read: %v", err)
	}
}

func TestEverySettingIsDescribed(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range Settings() {
		if seen[s.Name] || s.Name == settings.Prefix || s.Allowed == "" || s.Doc == "" {
			t.Errorf("%+v", s)
		}
		seen[s.Name] = true
	}
}

// TestTheReadmeSaysTheSame compares with the table in README.md.
func TestTheReadmeSaysTheSame(t *testing.T) {
	readme, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range Settings() {
		row := fmt.Sprintf("| `%s` | %s | %s | %s |\n", s.Name, cmp.Or(s.Default, "none"), s.Allowed, s.Doc)
		if !strings.Contains(string(readme), row) {
			t.Errorf("README.md lacks: %s", row)
		}
	}
}

func TestTheSecretKeyIsKeptWhereItCanBe(t *testing.T) {
	load := func(dir string, more ...string) Config {
		c, err := Load(append([]string{"BIGWAVE_DATA_DIR=" + dir}, more...))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	dir := t.TempDir()
	c := load(dir)
	if err := c.Prepare(); err != nil || len(c.SecretKey) < 32 {
		t.Fatalf("made %d characters, %v", len(c.SecretKey), err)
	}
	st, err := os.Stat(c.SecretKeyFile())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v", st.Mode(), err)
	}
	again := load(dir)
	if err := again.Prepare(); err != nil || again.SecretKey != c.SecretKey || again.SecretKey == again.AdminToken {
		t.Errorf("the next start has another one (%v)", err)
	}
	const set = "a-key-that-was-set-by-an-operator"
	other := load(dir, "BIGWAVE_SECRET_KEY="+set)
	if err := other.Prepare(); err != nil || other.SecretKey.Reveal() != set {
		t.Errorf("the one that is set does not count (%v)", err)
	}
	replica := load(t.TempDir(), "BIGWAVE_NATS_URL=nats://bus:4222")
	if err := replica.Prepare(); err != nil || replica.SecretKey != "" {
		t.Errorf("a replica made one of its own (%v)", err)
	}
	if err := os.WriteFile(c.SecretKeyFile(), []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := load(dir)
	if err := broken.Prepare(); err == nil || !strings.Contains(err.Error(), "BIGWAVE_SECRET_KEY") || !strings.Contains(err.Error(), c.SecretKeyFile()) {
		t.Errorf("got %v", err)
	}
}

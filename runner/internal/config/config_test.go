package config

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/bigwave/bigwave/shared/settings"
)

func TestDefaultsFollowTheDataDirectory(t *testing.T) {
	c, err := Load([]string{"HOME=/home/ada"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, got, want string }{
		{"data", c.DataDir, "/home/ada/.local/share/bigwave"},
		{"runner data", c.RunnerDataDir, "/home/ada/.local/share/bigwave/runner"},
		{"access file", c.NATSAccessFile, "/home/ada/.local/share/bigwave/nats/runner.json"},
		{"key", c.RunnerKeyFile, "/home/ada/.local/share/bigwave/runner/runner.key"},
		{"keys dir", c.RunnerKeysDir, "/home/ada/.local/share/bigwave/keys/runners"},
		{"control plane key", c.ControlPlaneKeys()[0], "/home/ada/.local/share/bigwave/keys/controlplane.pub"},
		{"pool", c.Pool, "default"},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, tt.got, tt.want)
		}
	}
	if c.Slots != 32 || c.MaxCalls != 64 || c.Grace != 30*time.Second || c.KeepUnheard != 10*time.Minute {
		t.Errorf("got %+v", c)
	}
}

func TestSettingsAreRead(t *testing.T) {
	c, err := Load([]string{"HOME=/h", "BIGWAVE_RUNNER_ID=r1", "BIGWAVE_NATS_URL=nats://user:secret@bus:4222", "BIGWAVE_ALLOW_WEAK=memory,cpu",
		"BIGWAVE_LABELS=zone=a,gpu=no", "BIGWAVE_CONTROLPLANE_KEY=/a.pub, /b.pub", "XDG_DATA_HOME=/xdg"})
	if err != nil {
		t.Fatal(err)
	}
	if c.DataDir != "/xdg/bigwave" || c.NATSAccessFile != "" || len(c.AllowWeak) != 2 || c.Labels["zone"] != "a" || len(c.ControlPlaneKeys()) != 2 || c.ControlPlaneKeys()[1] != "/b.pub" {
		t.Errorf("got %#v", c)
	}
	if strings.Contains(c.NATSURL.String(), "secret") {
		t.Error("the URL shows its password")
	}
}

func TestErrorsNameTheVariable(t *testing.T) {
	for _, v := range []string{
		"RUNNER_ID=Upper", "RUNNER_ID=cp", "RUNNER_ID=a.b", "POOL=_x", "SLOTS=0", "SLOTS=many", "MAX_CALLS=-1", "MAX_MEMORY_MB=1", "MAX_PIDS=3",
		"MAX_WALL_CLOCK_SECONDS=0", "MAX_OUTPUT_BYTES=10", "BACKEND=docker", "ALLOW_WEAK=disk", "REQUIRE=seccomp", "GRACE=soon", "BEAT_EVERY=1ms",
		"WORKSPACE_MB=15", "EGRESS_RESOLVER=1.1.1.1", "EGRESS_CONNECTIONS=0", "EGRESS_IDLE=0s", "EGRESS_BYTES=-1",
		"PACKAGE_INDEX=ftp://x/simple", "PACKAGE_INDEX=https://u:p@x/simple", "PACKAGE_INDEX=/simple", "PACKAGE_INDEX=http://LocalHost:8106/simple",
		"PACKAGES_MB=1",
		"PACKAGE_HOSTS=files.example", "PACKAGE_HOSTS=*.example:443",
		"KEEP_UNHEARD=0s", "LOG_FORMAT=xml", "LOG_LEVEL=loud", "NATS_URL=http://x", "CONTROLPLANE_KEY=,",
	} {
		name, _, _ := strings.Cut(v, "=")
		_, err := Load([]string{"HOME=/h", "BIGWAVE_" + v})
		if err == nil || !strings.Contains(err.Error(), "BIGWAVE_"+name+" must be ") {
			t.Errorf("%s: got %v", v, err)
		}
	}
	if _, err := Load(nil); err == nil || !strings.Contains(err.Error(), "BIGWAVE_DATA_DIR") {
		t.Errorf("without a home: got %v", err)
	}
}

func TestHostNameBecomesAnID(t *testing.T) {
	for host, want := range map[string]string{
		"Build_Host.example": "build-host-example", "": "local", "CP": "local", "---": "local", "a": "a",
		strings.Repeat("x", 80): strings.Repeat("x", 63),
	} {
		if got := cleanID(host); got != want {
			t.Errorf("%q: got %q, want %q", host, got, want)
		}
	}
}

func TestEverySettingIsDocumented(t *testing.T) {
	for _, s := range Settings() {
		if s.Name == settings.Prefix || s.Allowed == "" || s.Doc == "" {
			t.Errorf("incomplete: %+v", s)
		}
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

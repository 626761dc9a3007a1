package main

import (
	"encoding/pem"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/runner/internal/config"
)

// TestSettingsOfTheFenceAreNamed: what only the fence can judge is refused at
// the start as well, under the setting's name.
func TestSettingsOfTheFenceAreNamed(t *testing.T) {
	for setting, values := range map[string][]string{
		"MOUNTS":               {"/srv:/data", "/srv/../x:/data:ro", "/srv:data:ro", "/srv:/data:w"},
		"EGRESS_PRIVATE_ALLOW": {"10.0.0.1/8", "*.internal"},
	} {
		for _, value := range values {
			name := "BIGWAVE_" + setting
			cfg, err := config.Load([]string{"BIGWAVE_DATA_DIR=" + t.TempDir(), "BIGWAVE_INIT=" + initProgram, name + "=" + value})
			if err != nil {
				t.Fatal(err)
			}
			b, err := newBackend(cfg, t.TempDir(), "r1", slog.New(slog.DiscardHandler))
			if err == nil {
				_ = b.Close(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s=%s: got %v", name, value, err)
			}
		}
	}
}

// TestThePackageIndexsAuthoritiesAreCertificates: and nothing else of the file
// goes into a sandbox.
func TestThePackageIndexsAuthoritiesAreCertificates(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	certificate := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	key := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("secret")}))
	path := filepath.Join(t.TempDir(), "ca.pem")
	for _, tt := range []struct {
		name, file, want string
		fails            bool
	}{
		{"one and a key", "note\n" + key + certificate, certificate, false},
		{"several", certificate + certificate, certificate + certificate, false},
		{"none", key, "", true},
		{"not PEM", "certificate", "", true},
		{"broken", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})), "", true},
		{"too many", strings.Repeat(certificate, maxAuthorities/len(certificate)+1), "", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(tt.file), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := authorities(path); got != tt.want || (err != nil) != tt.fails {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	d := &daemon{cfg: config.Config{PackageIndex: "https://127.0.0.1/simple", PackageIndexCA: path + "x", RunnerDataDir: t.TempDir()}}
	if _, err := d.packages(); err == nil || !strings.Contains(err.Error(), "BIGWAVE_PACKAGE_INDEX_CA") {
		t.Errorf("got %v", err)
	}
}

package main

import (
	"log/slog"
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

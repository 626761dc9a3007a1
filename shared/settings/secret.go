package settings

import "log/slog"

// Secret is a setting that is never shown: not in logs, not in errors.
type Secret string

const hidden = "(hidden)"

// String is not the secret: that is what Reveal is for.
func (Secret) String() string { return hidden }

// GoString is not the secret.
func (Secret) GoString() string { return hidden }

// LogValue is not the secret.
func (Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText is not the secret.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Reveal is the secret.
func (s Secret) Reveal() string { return string(s) }

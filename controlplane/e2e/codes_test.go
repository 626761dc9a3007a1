package e2e

import "github.com/bigwave/bigwave/shared/fault"

// codes are all codes that a call can end with.
func codes() []string {
	var out []string
	for c := range fault.Codes {
		out = append(out, string(c))
	}
	return out
}

// Package settings reads a daemon's settings from its environment into a
// struct whose tags are the settings table: env is the name without Prefix,
// envDefault the default, derived a default that depends on others, allowed
// what a value must be, and doc what it is for.
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/caarlos0/env/v11"
)

// Prefix is what the name of every setting starts with.
const Prefix = "BIGWAVE_"

// Vars are the variables of an environment, by name.
type Vars map[string]string

// Environ is an environment, as os.Environ gives it.
func Environ(environ []string) Vars { return env.ToMap(environ) }

// Parse fills in the settings struct C. Its error names each variable that
// can't be read and says what it must be.
func Parse[C any](vars Vars) (C, error) {
	c, err := env.ParseAsWithOptions[C](env.Options{Prefix: Prefix, Environment: vars})
	all, ok := errors.AsType[env.AggregateError](err)
	if !ok {
		return c, err
	}
	var errs []error
	for _, e := range all.Errors {
		if p, ok := errors.AsType[env.ParseError](e); ok {
			e = Wrong[C](p.Name, nil)
		}
		errs = append(errs, e)
	}
	return c, errors.Join(errs...)
}

// Check refuses what is out of range, all of it at once: fields of C that are
// not good.
func Check[C any](good map[string]bool) error {
	var errs []error
	for _, field := range slices.Sorted(maps.Keys(good)) {
		if !good[field] {
			errs = append(errs, Wrong[C](field, nil))
		}
	}
	return errors.Join(errs...)
}

// Wrong says what the variable of a field of C must be, and the cause when
// there is one. The value isn't quoted: it may be a secret in the wrong place.
func Wrong[C any](field string, cause error) error {
	f, _ := reflect.TypeFor[C]().FieldByName(field)
	err := fmt.Errorf("%s%s must be %s", Prefix, f.Tag.Get("env"), f.Tag.Get("allowed"))
	if cause != nil {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// Setting is one line of the settings table.
type Setting struct{ Name, Default, Allowed, Doc string }

// List is the settings table of C, for the documentation.
func List[C any]() []Setting {
	var list []Setting
	for f := range reflect.TypeFor[C]().Fields() {
		list = append(list, Setting{
			Name:    Prefix + f.Tag.Get("env"),
			Default: cmp.Or(f.Tag.Get("envDefault"), f.Tag.Get("derived")),
			Allowed: f.Tag.Get("allowed"),
			Doc:     f.Tag.Get("doc"),
		})
	}
	return list
}

// Within reports whether v is neither below low nor above high.
func Within[T cmp.Ordered](v, low, high T) bool { return low <= v && v <= high }

// DataDir is the absolute path of the data directory: the one that is set, or
// the one that the environment of an ordinary user stands for.
func DataDir(set string, vars Vars) (string, error) {
	if set != "" {
		return filepath.Abs(set)
	}
	home := vars["XDG_DATA_HOME"]
	if home == "" && vars["HOME"] != "" {
		home = filepath.Join(vars["HOME"], ".local", "share")
	}
	if home == "" {
		return "", errors.New("neither it nor HOME is set")
	}
	return filepath.Abs(filepath.Join(home, "bigwave"))
}

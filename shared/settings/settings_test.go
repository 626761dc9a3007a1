package settings_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/settings"
)

type table struct {
	Size  int             `env:"SIZE" envDefault:"3" allowed:"a whole number from 1" doc:"how many"`
	Level slog.Level      `env:"LEVEL" envDefault:"info" allowed:"debug or info" doc:"how loud"`
	Token settings.Secret `env:"TOKEN" derived:"made" allowed:"a word" doc:"who"`
}

func TestAStructIsItsTable(t *testing.T) {
	c, err := settings.Parse[table](settings.Environ([]string{"BIGWAVE_TOKEN=hunter2", "SIZE=9"}))
	if err != nil || c.Size != 3 || c.Token.Reveal() != "hunter2" || strings.Contains(fmt.Sprintf("%v %+v %#v", c, c, c), "hunter2") {
		t.Errorf("got %+v, %v", c, err)
	}
	list := settings.List[table]()
	if want := (settings.Setting{Name: "BIGWAVE_TOKEN", Default: "made", Allowed: "a word", Doc: "who"}); len(list) != 3 || list[2] != want {
		t.Errorf("got %+v", list)
	}
}

func TestEveryBadVariableIsNamedWithoutItsValue(t *testing.T) {
	_, err := settings.Parse[table](settings.Environ([]string{"BIGWAVE_SIZE=hunter2", "BIGWAVE_LEVEL=hunter3"}))
	for _, part := range []string{"BIGWAVE_SIZE must be a whole number from 1", "BIGWAVE_LEVEL must be debug or info"} {
		if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "hunter") {
			t.Errorf("got %v", err)
		}
	}
	err = settings.Check[table](map[string]bool{"Size": false, "Level": true, "Token": false})
	if err == nil || err.Error() != "BIGWAVE_SIZE must be a whole number from 1\nBIGWAVE_TOKEN must be a word" {
		t.Errorf("got %v", err)
	}
	if settings.Check[table](map[string]bool{"Size": true}) != nil {
		t.Error("a good one is refused")
	}
}

func TestWhereDataLies(t *testing.T) {
	for _, tt := range []struct {
		set  string
		vars settings.Vars
		want string
	}{
		{"/set", settings.Vars{"HOME": "/h"}, "/set"},
		{"", settings.Vars{"HOME": "/h"}, "/h/.local/share/bigwave"},
		{"", settings.Vars{"HOME": "/h", "XDG_DATA_HOME": "/x"}, "/x/bigwave"},
	} {
		if got, err := settings.DataDir(tt.set, tt.vars); err != nil || got != tt.want {
			t.Errorf("%+v: got %q, %v", tt, got, err)
		}
	}
	if _, err := settings.DataDir("", nil); err == nil {
		t.Error("there is none")
	}
}

package pytool

import (
	"context"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// Grant lets a user, a group or everybody use a tool.
type Grant struct {
	ID            string
	PrincipalType string // ToUser or ToGroup
	PrincipalID   string // user or group id; of ToUser also Everybody
	Permission    string // Read or Write, which is read as well
	CreatedAt     time.Time
}

// What a grant is made of. The words are the API's.
const (
	ToUser    = "user"
	ToGroup   = "group"
	Everybody = "*" // every user of the workspace
	Read      = "read"
	Write     = "write"
)

// maxPrincipal is longer than any id.
const maxPrincipal = 256

// public reports whether g is for everybody.
func (g Grant) public() bool { return g.PrincipalType == ToUser && g.PrincipalID == Everybody }

func (g Grant) good() bool {
	return (g.PrincipalType == ToUser || g.PrincipalType == ToGroup) && (g.Permission == Read || g.Permission == Write) &&
		g.PrincipalID != "" && len(g.PrincipalID) <= maxPrincipal && utf8.ValidString(g.PrincipalID) && !strings.ContainsRune(g.PrincipalID, 0)
}

// grants are those of asked that hold, each once, as new rows: what is no
// grant is dropped without a word, and so is what would let everybody in when
// mayPublish is false.
func (s *Service) grants(asked []Grant, mayPublish bool) []Grant {
	out := []Grant{}
	for _, g := range asked {
		again := slices.ContainsFunc(out, func(o Grant) bool {
			return o.PrincipalType == g.PrincipalType && o.PrincipalID == g.PrincipalID && o.Permission == g.Permission
		})
		if again || !g.good() || g.public() && !mayPublish {
			continue
		}
		g.ID, g.CreatedAt = s.NewUUID(), s.now()
		out = append(out, g)
	}
	return out
}

// viewer is a caller with what decides its access.
type viewer struct {
	identity.Principal
	groups []string
}

func (s *Service) viewer(ctx context.Context, p identity.Principal) (viewer, error) {
	groups, err := s.People.GroupsOf(ctx, p)
	return viewer{p, groups}, err
}

// granted reports whether v owns t or a grant of it gives v one of permissions.
func (v viewer) granted(t Tool, permissions ...string) bool {
	if t.Owner == v.UserID {
		return true
	}
	return slices.ContainsFunc(t.Grants, func(g Grant) bool {
		switch {
		case !slices.Contains(permissions, g.Permission):
			return false
		case g.PrincipalType == ToUser:
			return g.PrincipalID == v.UserID || g.PrincipalID == Everybody
		}
		return slices.Contains(v.groups, g.PrincipalID)
	})
}

// Who may write may read. An admin may both, whatever the lists show.
func (v viewer) mayRead(t Tool) bool  { return v.IsAdmin() || v.granted(t, Read, Write) }
func (v viewer) mayWrite(t Tool) bool { return v.IsAdmin() || v.granted(t, Write) }

// lists reports whether t is among what v is shown, and offered to its runs.
func (s *Service) lists(v viewer, t Tool) bool {
	return v.IsAdmin() && !s.AdminsAsked || v.granted(t, Read, Write)
}

// writes reports whether v is told that it may change t.
func (s *Service) writes(v viewer, t Tool) bool {
	return v.IsAdmin() && !s.AdminsAsked || v.granted(t, Write)
}

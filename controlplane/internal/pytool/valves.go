package pytool

import (
	"context"
	"encoding/json"
	"maps"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// Values are what valves are set to, by field.
type Values map[string]json.RawMessage

// noValues is what valves that were never set are set to.
var noValues = json.RawMessage("{}")

// Valves returns what a tool that p may change is set to: the values that were
// set, not the defaults of the others.
func (s *Service) Valves(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error) {
	t, _, err := s.writable(ctx, p, id, prohibited)
	if err != nil {
		return nil, err
	}
	return s.valvesOf(ctx, t), nil
}

// ValvesSchema returns the JSON schema of a tool's valves; nil: it has none.
func (s *Service) ValvesSchema(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error) {
	t, _, err := s.writable(ctx, p, id, prohibited)
	return t.Valves, err
}

// SetValves replaces what a tool is set to, and returns it: a field that is
// left out or null goes back to its default.
func (s *Service) SetValves(ctx context.Context, p identity.Principal, id string, values Values) (json.RawMessage, error) {
	t, _, err := s.writable(ctx, p, id, prohibited)
	if err != nil {
		return nil, err
	}
	if t.Valves == nil {
		return nil, notFound()
	}
	set, err := s.validate(ctx, t, WhichValves, values)
	if err != nil {
		return nil, err
	}
	if t.Sealed.Valves, err = s.reseal(t.Sealed.Valves, set, valvesPlace(t.Workspace, t.ID)); err != nil {
		return nil, err
	}
	if t.Sealed.Spoken, err = s.spokenWith(ctx, t, set); err != nil {
		return nil, err
	}
	if p, err = s.afterwards(ctx, p); err != nil {
		return nil, err
	}
	if _, _, err := s.writable(ctx, p, id, prohibited); err != nil {
		return nil, err
	}
	return set, found(s.Store.PutValves(ctx, t, s.event(p, audit.PythonToolValves, t.ID, "")))
}

// UserValves returns what p has set a tool to that it may use.
func (s *Service) UserValves(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error) {
	t, err := s.readable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	kept, err := s.Store.UserValves(ctx, t.Workspace, t.ID, p.UserID)
	if err != nil {
		return nil, found(err)
	}
	return s.opened(ctx, kept.Sealed, userPlace(t.Workspace, t.ID, p.UserID)), nil
}

// UserValvesSchema returns the JSON schema of what each user may set.
func (s *Service) UserValvesSchema(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error) {
	t, err := s.readable(ctx, p, id)
	return t.UserValves, err
}

// SetUserValves is SetValves for what p alone has set.
func (s *Service) SetUserValves(ctx context.Context, p identity.Principal, id string, values Values) (json.RawMessage, error) {
	t, err := s.readable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	if t.UserValves == nil {
		return nil, notFound()
	}
	set, err := s.validate(ctx, t, WhichUserValves, values)
	if err != nil {
		return nil, err
	}
	if p, err = s.afterwards(ctx, p); err != nil {
		return nil, err
	}
	if _, err := s.readable(ctx, p, id); err != nil {
		return nil, err
	}
	before, err := s.Store.UserValves(ctx, t.Workspace, t.ID, p.UserID)
	if err != nil {
		return nil, found(err)
	}
	sealed, err := s.reseal(before.Sealed, set, userPlace(t.Workspace, t.ID, p.UserID))
	if err != nil {
		return nil, err
	}
	return set, found(s.Store.PutUserValves(ctx, t, p.UserID, sealed, s.event(p, audit.PythonToolUserValves, t.ID, "")))
}

func (s *Service) readable(ctx context.Context, p identity.Principal, id string) (Tool, error) {
	t, v, err := s.find(ctx, p, id)
	if err == nil && !v.mayRead(t) {
		err = prohibited()
	}
	return t, err
}

// validate asks the class in the source what it makes of values. An error
// does not repeat them.
func (s *Service) validate(ctx context.Context, t Tool, which string, values Values) (json.RawMessage, error) {
	values = maps.Clone(values)
	maps.DeleteFunc(values, func(_ string, v json.RawMessage) bool { return string(v) == "null" })
	raw, err := strictjson.Encode(values)
	if err != nil {
		return nil, fault.Wrap(err, fault.Invalid, "the values must be JSON")
	}
	if len(raw) > maxValves {
		return nil, fault.New(fault.Invalid, "the values are larger than %d bytes", maxValves)
	}
	set, err := s.Describer.ValidateValves(ctx, t.source(), ValvesCheck{Which: which, Values: raw})
	if err != nil {
		return nil, withoutValues(failed(err), raw)
	}
	return checked(set, "valves", '{', maxValves)
}

func valvesPlace(workspace, tool string) place { return place{WhichValves, workspace, tool, ""} }
func spokenPlace(workspace, tool string) place { return place{"spoken", workspace, tool, ""} }
func userPlace(workspace, tool, user string) place {
	return place{WhichUserValves, workspace, tool, user}
}

// valvesOf is what a tool is set to that was read whole.
func (s *Service) valvesOf(ctx context.Context, t Tool) json.RawMessage {
	return s.opened(ctx, t.Sealed.Valves, valvesPlace(t.Workspace, t.ID))
}

// given is what was kept, for the source that pin names. What was set when the
// tool had another source already is not for that one: the tool may have been
// changed, or made anew, to keep it from what it is set to now.
func (s *Service) given(ctx context.Context, kept Kept, pin tool.Pin, at place) (json.RawMessage, error) {
	if kept.Sealed != nil && kept.Revision > pin.Revision {
		return nil, fault.New(fault.Conflict, "the tool %q was changed and then set anew: this run has its source of before, which is not given what is set now; start another run", pin.ID)
	}
	return s.opened(ctx, kept.Sealed, at), nil
}

// opened is what was sealed; noValues when that is nothing.
func (s *Service) opened(ctx context.Context, sealed []byte, at place) json.RawMessage {
	if plain, ok := s.unseal(ctx, sealed, at); ok {
		return plain
	}
	return noValues
}

// unseal opens what was sealed. What does not open with the key of now counts
// as not set, and stays for the key that opens it.
func (s *Service) unseal(ctx context.Context, sealed []byte, at place) (plain []byte, ok bool) {
	if sealed == nil {
		return nil, false
	}
	err := error(errOtherKey)
	if s.Vault != nil {
		if plain, err = s.Vault.open(sealed, at); err == nil {
			return plain, true
		}
	}
	s.Log.WarnContext(ctx, "valves can't be read with BIGWAVE_SECRET_KEY and count as not set",
		"workspace", at.workspace, "tool", at.tool, "user", at.user, "error", err)
	return nil, false
}

// reseal seals values in the place of what was there before, unless that can't
// be read: it would be lost with the key that still may come back.
func (s *Service) reseal(before, values []byte, at place) ([]byte, error) {
	if s.Vault == nil {
		return nil, fault.New(fault.Unavailable, "valves can't be stored: BIGWAVE_SECRET_KEY is not set").WithCode(codeSecretKey)
	}
	if before != nil {
		if _, err := s.Vault.open(before, at); err != nil {
			return nil, fault.Wrap(err, fault.Conflict, "the valves that are stored can't be read with this BIGWAVE_SECRET_KEY; "+
				"set the one that they were stored with, or delete the tool and make it again").WithCode(codeSecretKey)
		}
	}
	return s.Vault.seal(values, at), nil
}

// codeSecretKey tells programs that the setting is the matter.
const codeSecretKey = "secret_key"

// Settings is what a call of a tool's function is given besides its
// arguments. Valves hold secrets.
type Settings struct {
	Valves     json.RawMessage // what the tool is set to
	UserValves json.RawMessage // what the user has set
	User       User
}

// SettingsOf returns what a call that user makes is given, as it is now; a
// Conflict when that was set after the tool had another source than pin's.
func (s *Service) SettingsOf(ctx context.Context, workspace, user string, pin tool.Pin) (Settings, error) {
	out := Settings{User: User{ID: user, Name: user, Admin: user == identity.BootstrapUser}}
	if user != identity.BootstrapUser {
		u, err := s.People.User(ctx, identity.Principal{Workspace: workspace}, user)
		if err != nil {
			return Settings{}, err
		}
		out.User.Name, out.User.Admin = u.Name, u.Role != identity.Member
	}
	own, err := s.Store.UserValves(ctx, workspace, pin.ID, user)
	if err != nil {
		return Settings{}, found(err)
	}
	kept, err := s.Store.Valves(ctx, workspace, pin.ID) // last: it says whether the tool is there
	if err != nil {
		return Settings{}, found(err)
	}
	if out.Valves, err = s.given(ctx, kept, pin, valvesPlace(workspace, pin.ID)); err != nil {
		return Settings{}, err
	}
	if out.UserValves, err = s.given(ctx, own, pin, userPlace(workspace, pin.ID, user)); err != nil {
		return Settings{}, err
	}
	return out, nil
}

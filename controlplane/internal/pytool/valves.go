package pytool

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
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
	t.Sealed.Spoken = s.spokenWith(ctx, t, set)
	return set, found(s.Store.PutValves(ctx, t, s.event(p, audit.PythonToolValves, t.ID, "")))
}

// UserValves returns what p has set a tool to that it may use.
func (s *Service) UserValves(ctx context.Context, p identity.Principal, id string) (json.RawMessage, error) {
	t, err := s.readable(ctx, p, id)
	if err != nil {
		return nil, err
	}
	return s.userValves(ctx, t.Workspace, t.ID, p.UserID)
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
	before, err := s.Store.UserValves(ctx, t.Workspace, t.ID, p.UserID)
	if err != nil {
		return nil, found(err)
	}
	sealed, err := s.reseal(before, set, userPlace(t.Workspace, t.ID, p.UserID))
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

// inputValue is how pydantic quotes a value in its errors.
var inputValue = regexp.MustCompile(`input_value=.*?, (input_type=\w+\])`)

// withoutValues takes the values out of the sentence of an error: valves hold
// secrets, and errors are shown and logged.
func withoutValues(err error, values json.RawMessage) error {
	if !fault.Is(err, fault.Invalid) {
		return err
	}
	f := fault.From(err)
	message := masked(inputValue.ReplaceAllString(f.Message, "$1"), secrets(values))
	return fault.New(fault.Invalid, "%s", message).WithCode(f.Code).On(f.Field)
}

// masked is text without what is secret, also where text was cut within it.
func masked(text string, secrets []string) string {
	for _, secret := range secrets {
		// Most are not there, and looking for them is cheap.
		if strings.Contains(text, secret) || strings.Contains(strings.ToLower(text), strings.ToLower(secret)) {
			text = regexp.MustCompile("(?i)"+regexp.QuoteMeta(secret)).ReplaceAllLiteralString(text, "***")
		}
	}
	whole, cut := strings.CutSuffix(text, ellipsis)
	if !cut {
		return text
	}
	for _, secret := range secrets {
		for n := min(len(secret), len(whole)); n >= minSecret; n-- {
			if rest, ok := strings.CutSuffix(whole, secret[:n]); ok {
				return rest + "***" + ellipsis
			}
		}
	}
	return text
}

// minSecret is the shortest text that is taken for a secret: shorter ones are
// parts of other words.
const minSecret = 4

// secrets lists what may be secret in values, the longest first, as it is and
// as Python and JSON quote it.
func secrets(values json.RawMessage) []string {
	var all any
	dec := json.NewDecoder(bytes.NewReader(values))
	dec.UseNumber()
	if dec.Decode(&all) != nil {
		return nil
	}
	var out []string
	for _, text := range texts(all) {
		escaped := escapes.Replace(text)
		out = append(out, text, escaped, strings.ReplaceAll(escaped, `"`, `\"`), strings.ReplaceAll(escaped, `'`, `\'`))
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	return slices.Compact(out)
}

// escapes are what Python and JSON both write in quotes.
var escapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`)

// passwords lists what may be secret in the values of fields that their schema
// has hidden from who types them.
func passwords(schema, values json.RawMessage) []string {
	var fields struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	var set Values
	if json.Unmarshal(schema, &fields) != nil || json.Unmarshal(values, &set) != nil {
		return nil
	}
	var out []string
	for name, value := range set {
		if hidden.Match(fields.Properties[name]) {
			out = append(out, secrets(value)...)
		}
	}
	return out
}

// hidden is how the schema of a field says so: pydantic's SecretStr, and what
// forms are told to show as a password.
var hidden = regexp.MustCompile(`"(format|type)":\s*"password"|"writeOnly":\s*true`)

// texts lists the strings and the numbers in v that are long enough.
func texts(v any) []string {
	var out []string
	switch v := v.(type) {
	case json.Number:
		return texts(v.String())
	case string:
		if len(v) >= minSecret {
			out = append(out, v)
		}
	case []any:
		for _, item := range v {
			out = append(out, texts(item)...)
		}
	case map[string]any:
		for _, item := range v {
			out = append(out, texts(item)...)
		}
	}
	return out
}

func valvesPlace(workspace, tool string) place { return place{WhichValves, workspace, tool, ""} }
func spokenPlace(workspace, tool string) place { return place{"spoken", workspace, tool, ""} }
func userPlace(workspace, tool, user string) place {
	return place{WhichUserValves, workspace, tool, user}
}

func (s *Service) valves(ctx context.Context, workspace, id string) (json.RawMessage, error) {
	sealed, err := s.Store.Valves(ctx, workspace, id)
	if err != nil {
		return nil, found(err)
	}
	return s.opened(ctx, sealed, valvesPlace(workspace, id)), nil
}

// valvesOf is valves of a tool that was read whole.
func (s *Service) valvesOf(ctx context.Context, t Tool) json.RawMessage {
	return s.opened(ctx, t.Sealed.Valves, valvesPlace(t.Workspace, t.ID))
}

func (s *Service) userValves(ctx context.Context, workspace, id, user string) (json.RawMessage, error) {
	sealed, err := s.Store.UserValves(ctx, workspace, id, user)
	if err != nil {
		return nil, found(err)
	}
	return s.opened(ctx, sealed, userPlace(workspace, id, user)), nil
}

// opened is what was sealed. What does not open with the key of now counts as
// not set, and stays for the key that opens it.
func (s *Service) opened(ctx context.Context, sealed []byte, at place) json.RawMessage {
	if sealed == nil {
		return noValues
	}
	err := error(errOtherKey)
	if s.Vault != nil {
		var plain []byte
		if plain, err = s.Vault.open(sealed, at); err == nil {
			return plain
		}
	}
	s.Log.WarnContext(ctx, "valves can't be read with BIGWAVE_SECRET_KEY and count as not set",
		"workspace", at.workspace, "tool", at.tool, "user", at.user, "error", err)
	return noValues
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

// SettingsOf returns what a call that user makes is given, as it is now.
func (s *Service) SettingsOf(ctx context.Context, workspace, user, tool string) (Settings, error) {
	out := Settings{User: User{ID: user, Name: user, Admin: user == identity.BootstrapUser}}
	if user != identity.BootstrapUser {
		u, err := s.People.User(ctx, identity.Principal{Workspace: workspace}, user)
		if err != nil {
			return Settings{}, err
		}
		out.User.Name, out.User.Admin = u.Name, u.Role != identity.Member
	}
	var err error
	if out.Valves, err = s.valves(ctx, workspace, tool); err != nil {
		return Settings{}, err
	}
	out.UserValves, err = s.userValves(ctx, workspace, tool, user)
	return out, err
}

package httpapi

import (
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"github.com/bigwave/bigwave/controlplane/internal/pytool"
	"github.com/bigwave/bigwave/shared/fault"
	"github.com/bigwave/bigwave/shared/strictjson"
)

// maxToolBody holds a source of 1 MiB as the longest JSON string of it.
const maxToolBody = 8 << 20

// pythonToolRequest is a tool as clients send it. What an export has beside
// these members is skipped, so that it can be sent back as it is.
type pythonToolRequest struct {
	ID      given[string]     `json:"id"`
	Name    given[string]     `json:"name"`
	Content given[string]     `json:"content"`
	Meta    given[pythonMeta] `json:"meta"`
	Grants  jsontext.Value    `json:"access_grants"`
	Wrapped jsontext.Value    `json:"tool"` // the same in a wrapper, as downloads have it
}

// pythonMeta is checked but for the description not kept: the source says the
// rest itself.
type pythonMeta struct {
	Description   *string        `json:"description"`
	Manifest      jsontext.Value `json:"manifest"`
	HasUserValves given[bool]    `json:"has_user_valves"`
}

type accessRequest struct {
	Grants given[jsontext.Value] `json:"access_grants"`
}

type loadURLRequest struct {
	URL given[string] `json:"url"`
}

// decodeKnown reads the body once, as strictly as decode, but skips members
// that it does not know.
func decodeKnown(c echo.Context, v any) error {
	data, err := readBody(c, maxToolBody)
	if err != nil {
		return err
	}
	return known(data, v)
}

func known(data []byte, v any) error {
	if k := jsontext.Value(data).Kind(); len(data) == 0 || k != '{' && k != 0 {
		return fault.New(fault.Invalid, "the body must be a JSON object")
	}
	return namedFault(strictjson.DecodeKnown(data, v))
}

func pythonToolForm(c echo.Context) (pytool.Form, error) {
	var in pythonToolRequest
	if err := decodeKnown(c, &in); err != nil {
		return pytool.Form{}, err
	}
	if wrapped := in.Wrapped; wrapped.Kind() == '{' && !in.Content.Set {
		in = pythonToolRequest{}
		if err := known(wrapped, &in); err != nil {
			return pytool.Form{}, err
		}
	}
	return in.form()
}

func (in pythonToolRequest) form() (pytool.Form, error) {
	err := required("", named{"id", in.ID.Set}, named{"name", in.Name.Set}, named{"content", in.Content.Set}, named{"meta", in.Meta.Set})
	if err != nil {
		return pytool.Form{}, err
	}
	if k := in.Meta.Value.Manifest.Kind(); k != 0 && k != '{' && k != 'n' {
		return pytool.Form{}, fault.New(fault.Invalid, "meta.manifest must be an object").On("meta.manifest")
	}
	f := pytool.Form{ID: in.ID.Value, Name: in.Name.Value, Content: in.Content.Value, Description: in.Meta.Value.Description}
	if k := in.Grants.Kind(); k != 0 && k != 'n' {
		f.GrantsGiven = true
		f.Grants, err = grantsOf(in.Grants)
	}
	return f, err
}

func (in accessRequest) grants() ([]pytool.Grant, error) {
	if err := required("", named{"access_grants", in.Grants.Set}); err != nil {
		return nil, err
	}
	return grantsOf(in.Grants.Value)
}

// maxGrants is more than a tool is shared with.
const maxGrants = 1000

// grantsOf reads a list of grants. What is none becomes a grant that nobody
// makes: such are dropped, not refused.
func grantsOf(raw jsontext.Value) ([]pytool.Grant, error) {
	var items []jsontext.Value
	if err := strictjson.Decode(raw, &items); err != nil || raw.Kind() != '[' {
		return nil, fault.New(fault.Invalid, "access_grants must be an array").On("access_grants")
	}
	if len(items) > maxGrants {
		return nil, fault.New(fault.Invalid, "access_grants may hold at most %d grants", maxGrants).On("access_grants")
	}
	out := make([]pytool.Grant, len(items))
	for i, item := range items {
		var g struct {
			PrincipalType string `json:"principal_type"`
			PrincipalID   string `json:"principal_id"`
			Permission    string `json:"permission"`
		}
		if strictjson.DecodeKnown(item, &g) == nil {
			out[i] = pytool.Grant{PrincipalType: g.PrincipalType, PrincipalID: g.PrincipalID, Permission: g.Permission}
		}
	}
	return out, nil
}

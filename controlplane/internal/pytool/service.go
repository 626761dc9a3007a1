package pytool

import (
	"context"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

// Service is what clients may do with the Python tools of their workspace. A
// fault of kind Forbidden means that the caller may not; clients are told so
// in the words that they know.
type Service struct {
	Store       Store
	People      People
	Describer   Describer
	Loader      Loader
	Vault       *Vault // nil: valves can't be kept
	Format      int    // of the descriptions that Describer makes; see Renewal
	AdminsAsked bool   // admins are listed only what they own or were granted
	Now         func() time.Time
	NewID       func() string // without prefix
	NewUUID     func() string // as text with hyphens, of a grant
	Log         *slog.Logger
}

// The sentences that clients of Open WebUI know.
const (
	Unauthorized = "401 Unauthorized"
	Prohibited   = "You do not have permission to access this resource. Please contact your administrator for assistance."
	NotFound     = "We could not find what you're looking for :/"
	IDTaken      = "Uh-oh! This id is already registered. Please choose another id string."
	BadID        = "Only alphanumeric characters and underscores are allowed in the id"

	NotAuthenticated = "Not authenticated"
	SignInAgain      = "Your session has expired or the token is invalid. Please sign in again."
)

func notFound() error     { return fault.New(fault.NotFound, NotFound) }
func unauthorized() error { return fault.New(fault.Forbidden, Unauthorized) }
func prohibited() error   { return fault.New(fault.Forbidden, Prohibited) }

// Seen is a tool as one caller may see it: without content unless Write.
type Seen struct {
	Tool
	Write bool // whether the caller may change it
}

// List returns the tools that p may use, the last changed first, without
// their content.
func (s *Service) List(ctx context.Context, p identity.Principal) ([]Seen, error) {
	all, err := s.Store.PythonTools(ctx, p.Workspace)
	if err != nil {
		return nil, err
	}
	return s.seen(ctx, p, all)
}

// Export is List with the content of what p may change.
func (s *Service) Export(ctx context.Context, p identity.Principal) ([]Seen, error) {
	may, err := s.People.Allowed(ctx, p)
	if err != nil {
		return nil, err
	}
	if !may.ToolsExport {
		return nil, unauthorized()
	}
	all, err := s.Store.PythonToolsWhole(ctx, p.Workspace)
	if err != nil {
		return nil, err
	}
	return s.seen(ctx, p, all)
}

func (s *Service) seen(ctx context.Context, p identity.Principal, all []Tool) ([]Seen, error) {
	v, err := s.viewer(ctx, p)
	if err != nil {
		return nil, err
	}
	out := []Seen{}
	for _, t := range all {
		if s.lists(v, t) {
			out = append(out, s.show(v, t))
		}
	}
	return out, nil
}

// show is t as v may see it.
func (s *Service) show(v viewer, t Tool) Seen {
	out := Seen{Tool: t, Write: s.writes(v, t)}
	if !out.Write {
		out.Content = ""
	}
	if t.OwnedBy == nil && t.Owner == identity.BootstrapUser {
		out.OwnedBy = &User{ID: t.Owner, Name: t.Owner, Admin: true}
	}
	return out
}

// Get returns one tool that p may read.
func (s *Service) Get(ctx context.Context, p identity.Principal, id string) (Seen, error) {
	t, v, err := s.find(ctx, p, id)
	if err != nil {
		return Seen{}, err
	}
	if !v.mayRead(t) {
		return Seen{}, prohibited()
	}
	return s.show(v, t), nil
}

// Create adds a tool of p's. Its source must load; then what it says of itself
// is stored with it, or nothing at all.
func (s *Service) Create(ctx context.Context, p identity.Principal, f Form) (Tool, error) {
	if _, err := s.mayCreate(ctx, p); err != nil {
		return Tool{}, err
	}
	if !identifier(f.ID) {
		return Tool{}, fault.New(fault.Invalid, BadID).On("id")
	}
	t := Tool{Workspace: p.Workspace, ID: strings.ToLower(f.ID), Owner: p.UserID, CreatedAt: s.now()}
	if utf8.RuneCountInString(t.ID) > maxID {
		return Tool{}, fault.New(fault.Invalid, "id is longer than %d characters", maxID).On("id")
	}
	if err := s.admit(ctx, t); err != nil {
		return Tool{}, err
	}
	t, err := s.filled(ctx, t, f)
	if err != nil {
		return Tool{}, err
	}
	if p, err = s.afterwards(ctx, p); err != nil {
		return Tool{}, err
	}
	may, err := s.mayCreate(ctx, p)
	if err != nil {
		return Tool{}, err
	}
	t.Grants = s.grants(f.Grants, may.PublicTools)
	t, err = s.Store.InsertPythonTool(ctx, t, s.event(p, audit.PythonToolCreate, t.ID, t.Digest()))
	if fault.Is(err, fault.Conflict) {
		return Tool{}, taken()
	}
	return t, err
}

// mayCreate returns what p may, which is to add tools.
func (s *Service) mayCreate(ctx context.Context, p identity.Principal) (identity.Permissions, error) {
	may, err := s.People.Allowed(ctx, p)
	if err == nil && !may.Tools && !may.ToolsImport {
		err = unauthorized()
	}
	return may, err
}

// afterwards is p as it is now that a source has run for it, which takes as long
// as the source likes, up to a limit. What p may is to be asked again then: a
// right that was taken away meanwhile gives nothing any more.
func (s *Service) afterwards(ctx context.Context, p identity.Principal) (identity.Principal, error) {
	if p.UserID == identity.BootstrapUser {
		return p, nil
	}
	u, err := s.People.User(ctx, p, p.UserID)
	if fault.Is(err, fault.NotFound) || err == nil && u.Disabled {
		return p, unauthorized()
	}
	p.Role = u.Role
	return p, err
}

// maxTools bounds the lists of a workspace, which are not paged. Those that
// are made at the same moment may go over it.
const maxTools = 1000

// admit refuses a new tool for which there is no room, before its source runs.
func (s *Service) admit(ctx context.Context, t Tool) error {
	switch _, err := s.Store.PythonTool(ctx, t.Workspace, t.ID); {
	case err == nil:
		return taken()
	case !fault.Is(err, fault.NotFound):
		return err
	}
	n, err := s.Store.CountPythonTools(ctx, t.Workspace)
	if err == nil && n >= maxTools {
		err = fault.New(fault.Invalid, "the workspace has %d Python tools, and may have %d: delete one first", n, maxTools)
	}
	return err
}

func taken() error { return fault.New(fault.Invalid, IDTaken).On("id") }

// Update replaces what a tool is, but its id, owner and valves. Without a
// permission to write tools, a grant lets p change all but the source. An
// update that fails changes nothing.
func (s *Service) Update(ctx context.Context, p identity.Principal, id string, f Form) (Tool, error) {
	t, _, err := s.mayUpdate(ctx, p, id, f)
	if err != nil {
		return Tool{}, err
	}
	before := t
	if t, err = s.filled(ctx, t, f); err != nil {
		return Tool{}, err
	}
	if t.Sealed.Spoken, err = s.spokenWith(ctx, t, s.valvesOf(ctx, t)); err != nil {
		return Tool{}, err
	}
	if p, err = s.afterwards(ctx, p); err != nil {
		return Tool{}, err
	}
	_, may, err := s.mayUpdate(ctx, p, id, f)
	if err != nil {
		return Tool{}, err
	}
	t.Grants = nil // those that are there stay
	if f.GrantsGiven {
		t.Grants = s.grants(f.Grants, may.PublicTools)
	}
	t, err = s.Store.UpdatePythonTool(ctx, t, before, s.event(p, audit.PythonToolUpdate, t.ID, t.Digest()))
	if err != nil {
		return Tool{}, found(err)
	}
	if !f.GrantsGiven {
		t.Grants = before.Grants
	}
	return t, nil
}

// mayUpdate returns the tool that p may make what f holds, and what else p may.
func (s *Service) mayUpdate(ctx context.Context, p identity.Principal, id string, f Form) (Tool, identity.Permissions, error) {
	t, _, err := s.writable(ctx, p, id, unauthorized)
	if err != nil {
		return t, identity.Permissions{}, err
	}
	may, err := s.People.Allowed(ctx, p)
	if err == nil && f.Content != t.Content && !may.Tools && !may.ToolsImport {
		err = unauthorized()
	}
	return t, may, err
}

// filled is t with what f holds and what its source says of itself.
func (s *Service) filled(ctx context.Context, t Tool, f Form) (Tool, error) {
	if err := f.check(); err != nil {
		return t, err
	}
	t.Name, t.Content, t.Description = f.Name, f.Content, f.Description
	t, err := s.describe(ctx, t)
	t.UpdatedAt = s.now()
	if t.Revision == 0 {
		t.UpdatedAt = t.CreatedAt
	}
	return t, err
}

// Bounds of a form.
const (
	maxID          = 128
	maxName        = 1 << 10
	maxDescription = 64 << 10
	maxContent     = 1 << 20
)

func (f Form) check() error {
	description := ""
	if f.Description != nil {
		description = *f.Description
	}
	for _, part := range []struct {
		field, text string
		limit       int
	}{
		{"name", f.Name, maxName}, {"content", f.Content, maxContent}, {"meta.description", description, maxDescription},
	} {
		switch {
		case len(part.text) > part.limit:
			return fault.New(fault.Invalid, "%s is larger than %d bytes", part.field, part.limit).On(part.field)
		case strings.ContainsRune(part.text, 0) || !utf8.ValidString(part.text):
			return fault.New(fault.Invalid, "[ERROR: %s can't hold null bytes]", part.field).On(part.field)
		}
	}
	return nil
}

// SetAccess replaces a tool's grants, and nothing else.
func (s *Service) SetAccess(ctx context.Context, p identity.Principal, id string, asked []Grant) (Tool, error) {
	t, _, err := s.writable(ctx, p, id, unauthorized)
	if err != nil {
		return Tool{}, err
	}
	may, err := s.People.Allowed(ctx, p)
	if err != nil {
		return Tool{}, err
	}
	t.Grants = s.grants(asked, may.PublicTools)
	return t, found(s.Store.PutGrants(ctx, t.Workspace, t.ID, t.Grants, s.event(p, audit.PythonToolAccess, t.ID, "")))
}

// Delete removes a tool with its grants, its valves and those of its users.
func (s *Service) Delete(ctx context.Context, p identity.Principal, id string) error {
	t, _, err := s.writable(ctx, p, id, unauthorized)
	if err != nil {
		return err
	}
	return found(s.Store.DeletePythonTool(ctx, t.Workspace, t.ID, s.event(p, audit.PythonToolDelete, t.ID, "")))
}

// LoadURL fetches a source for a new tool. Nothing of it is stored or run.
// Admins only.
func (s *Service) LoadURL(ctx context.Context, p identity.Principal, url string) (name, content string, err error) {
	if !p.IsAdmin() {
		return "", "", prohibited()
	}
	return s.Loader.Load(ctx, url)
}

// find is a tool of p's workspace, and p with its groups.
func (s *Service) find(ctx context.Context, p identity.Principal, id string) (Tool, viewer, error) {
	t, err := s.Store.PythonTool(ctx, p.Workspace, id)
	if err != nil {
		return t, viewer{}, found(err)
	}
	v, err := s.viewer(ctx, p)
	return t, v, err
}

// writable is find for one that p may change, or what refuse says.
func (s *Service) writable(ctx context.Context, p identity.Principal, id string, refuse func() error) (Tool, viewer, error) {
	t, v, err := s.find(ctx, p, id)
	if err == nil && !v.mayWrite(t) {
		err = refuse()
	}
	return t, v, err
}

// found gives what is not there the sentence that clients know.
func found(err error) error {
	if fault.Is(err, fault.NotFound) {
		return notFound()
	}
	return err
}

// now is the time as the database keeps it.
func (s *Service) now() time.Time { return s.Now().UTC().Truncate(time.Microsecond) }

func (s *Service) event(p identity.Principal, action, id, detail string) audit.Event {
	return audit.Event{
		ID: audit.ID(s.NewID()), At: s.now(), Workspace: p.Workspace, Actor: p.UserID,
		Action: action, Object: id, Outcome: audit.OK, Detail: detail,
	}
}

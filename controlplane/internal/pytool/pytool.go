// Package pytool keeps the Python tools of workspaces, which Open WebUI's
// clients make and share: whose they are, who may use them, and what they are
// set to. What a tool's source is and does is never found out here: a
// Describer runs it in a sandbox.
package pytool

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
)

// Tool is a source that defines a class Tools, with what it says of itself.
type Tool struct {
	Workspace   string
	ID          string // an identifier in lower case; unique in the workspace
	Owner       string // user id of who made it
	Name        string
	Content     string            // the source as its author sent it; empty in lists
	Description *string           // nil: none was given
	Specs       json.RawMessage   // [{name, description, parameters}], a function each
	Spoken      map[string]string // by function: what models are told of it, when that isn't what specs say, see Sealed; empty in lists
	Manifest    json.RawMessage   // the frontmatter, an object of strings
	Valves      json.RawMessage   // JSON schema of its valves; nil: it has none
	UserValves  json.RawMessage   // JSON schema of what each user may set; nil: nothing
	Citation    bool              // whether its results are cited
	FileHandler bool              // whether it takes a chat's files itself
	Sealed      Sealed            // empty in lists
	Grants      []Grant
	Format      int   // version of the description; see Service
	Revision    int64 // rises with every change of the source
	CreatedAt   time.Time
	UpdatedAt   time.Time

	OwnedBy *User // who Owner is; nil: gone
}

// Sealed is what a tool is set to, and what follows from that, as Vault seals
// it.
type Sealed struct {
	Valves []byte // nil: nothing was set
	Spoken []byte // takes the place of Tool.Spoken; nil: nothing does
}

// User is what is shown, and told to a tool, of a user.
type User struct {
	ID    string
	Name  string
	Admin bool
}

// Digest names the source, for the record and for who runs it.
func (t Tool) Digest() string {
	sum := sha256.Sum256([]byte(t.Content))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Form is a tool as a client sends it.
type Form struct {
	ID          string // of a new tool; a change takes the one in the path
	Name        string
	Content     string
	Description *string
	Grants      []Grant // as sent; see grants
	GrantsGiven bool    // false: the grants of a tool that is there stay
}

// Store keeps tools, grants and sealed valves. A tool that is not in the
// workspace is a NotFound fault. Each event is written with its change.
type Store interface {
	// PythonTools lists them without their content, the last changed first.
	PythonTools(ctx context.Context, workspace string) ([]Tool, error)
	// PythonToolsWhole is PythonTools with it.
	PythonToolsWhole(ctx context.Context, workspace string) ([]Tool, error)
	CountPythonTools(ctx context.Context, workspace string) (int, error)
	PythonTool(ctx context.Context, workspace, id string) (Tool, error)
	// InsertPythonTool adds t and returns it with its revision; a Conflict when
	// its id is taken.
	InsertPythonTool(ctx context.Context, t Tool, e audit.Event) (Tool, error)
	// UpdatePythonTool replaces what a change may replace, with the grants
	// unless they are nil; a Conflict when the tool is not of before's revision
	// or not set to before's valves any more.
	UpdatePythonTool(ctx context.Context, t, before Tool, e audit.Event) (Tool, error)
	// OutdatedPythonTool returns the first one behind after, in all workspaces,
	// whose description is of an older format; NotFound when there is none.
	OutdatedPythonTool(ctx context.Context, format int, after Key) (Tool, error)
	// RenewPythonTool replaces t's description alone; a Conflict when the tool
	// was changed since t was read.
	RenewPythonTool(ctx context.Context, t Tool, e audit.Event) error
	PutGrants(ctx context.Context, workspace, id string, grants []Grant, e audit.Event) error
	DeletePythonTool(ctx context.Context, workspace, id string, e audit.Event) error

	// Valves returns what a tool is set to.
	Valves(ctx context.Context, workspace, id string) (Kept, error)
	// PutValves sets t to t.Sealed; a Conflict when the tool is not of t's
	// revision any more.
	PutValves(ctx context.Context, t Tool, e audit.Event) error
	// UserValves returns what a user has set a tool to.
	UserValves(ctx context.Context, workspace, id, user string) (Kept, error)
	// PutUserValves sets t for one user, as PutValves does.
	PutUserValves(ctx context.Context, t Tool, user string, sealed []byte, e audit.Event) error
}

// Kept is what a tool is set to, as it is stored.
type Kept struct {
	Sealed   []byte // nil: nothing was set
	Revision int64  // the tool's when that was set
}

// People knows what a caller may and which groups it is in.
type People interface {
	Allowed(ctx context.Context, p identity.Principal) (identity.Permissions, error)
	GroupsOf(ctx context.Context, p identity.Principal) ([]string, error)
	User(ctx context.Context, p identity.Principal, id string) (identity.User, error)
}

// Loader fetches a tool's source from where the operator allows it.
type Loader interface {
	// Load returns the source behind url and the name that the URL suggests.
	// Its faults are Invalid; an Upstream error tells another server's answer.
	Load(ctx context.Context, url string) (name, content string, err error)
}

// Upstream is the answer of a server that would not give a source: the status
// and the sentence that the caller gets.
type Upstream struct {
	Status  int
	Message string
	Cause   error // for the log
}

// Error is the sentence followed by the cause.
func (u *Upstream) Error() string {
	if u.Cause != nil {
		return u.Message + ": " + u.Cause.Error()
	}
	return u.Message
}

// Unwrap returns the cause.
func (u *Upstream) Unwrap() error { return u.Cause }

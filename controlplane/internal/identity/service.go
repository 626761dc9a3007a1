package identity

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/page"
	"github.com/bigwave/bigwave/shared/fault"
)

// BootstrapUser is the user id of whoever holds the bootstrap admin token.
const BootstrapUser = "bootstrap"

// Change is what to change about a user; nil leaves a field as it is.
type Change struct {
	Name     *string
	Role     *Role
	Disabled *bool
}

// Credential is an API key with what its user may do.
type Credential struct {
	Key      APIKey
	Hash     []byte // SHA-256 of the secret
	Role     Role
	Disabled bool
}

// Store keeps workspaces, users, keys and groups. Single objects that are not there,
// or not in the named workspace (when it is not ""), are NotFound faults; a
// name or id that is taken is a Conflict. Each event is written with its change.
type Store interface {
	Workspaces(ctx context.Context, p page.Page) ([]Workspace, string, error)
	Workspace(ctx context.Context, id string) (Workspace, error)
	InsertWorkspace(ctx context.Context, w Workspace, e audit.Event) error
	DeleteWorkspace(ctx context.Context, id string, e audit.Event) error // Conflict while it has open sessions

	Users(ctx context.Context, workspace string, p page.Page) ([]User, string, error)
	User(ctx context.Context, workspace, id string) (User, error)
	InsertUser(ctx context.Context, u User, e audit.Event) error // NotFound: its workspace is gone
	UpdateUser(ctx context.Context, workspace, id string, c Change, e audit.Event) (User, error)
	DeleteUser(ctx context.Context, workspace, id string, e audit.Event) error

	Keys(ctx context.Context, workspace string, p page.Page) ([]APIKey, string, error)
	Key(ctx context.Context, workspace, id string) (APIKey, error)
	InsertKey(ctx context.Context, k APIKey, hash []byte, e audit.Event) error // NotFound: its user is gone
	RevokeKey(ctx context.Context, workspace, id string, e audit.Event) error  // at e.At; the first time counts

	Credential(ctx context.Context, hash []byte) (Credential, error)

	Groups
}

// Service authenticates bearers and administers workspaces, users and keys.
// Who may use /admin at all is the route table's business; here a principal
// who is not an instance admin sees its own workspace only.
type Service struct {
	Store      Store
	AdminToken [sha256.Size]byte // digest of the bootstrap admin's token
	Now        func() time.Time
	NewID      func() string          // a UUIDv7 in hex
	Gone       func(workspace string) // told of a workspace that may be gone, whose id may come again; may be nil
}

// Digest is the SHA-256 of a token: all that is kept of it.
func Digest(token string) [sha256.Size]byte { return sha256.Sum256([]byte(token)) }

// maxBearer is more than any bearer of ours is long.
const maxBearer = 1024

// Authenticate returns who a bearer stands for. Every bearer that is not good
// gets the same Unauthenticated fault, whatever is wrong with it.
func (s *Service) Authenticate(ctx context.Context, bearer string) (Principal, error) {
	if bearer == "" || len(bearer) > maxBearer {
		return Principal{}, errBearer()
	}
	digest := Digest(bearer)
	if s.AdminToken != ([sha256.Size]byte{}) && subtle.ConstantTimeCompare(digest[:], s.AdminToken[:]) == 1 {
		return Principal{Workspace: DefaultWorkspace, UserID: BootstrapUser, Role: InstanceAdmin}, nil
	}
	c, err := s.Store.Credential(ctx, digest[:])
	if fault.Is(err, fault.NotFound) {
		return Principal{}, errBearer()
	}
	if err != nil {
		return Principal{}, err
	}
	if subtle.ConstantTimeCompare(digest[:], c.Hash) != 1 || !c.good(s.Now()) {
		return Principal{}, errBearer()
	}
	return Principal{Workspace: c.Key.Workspace, UserID: c.Key.UserID, KeyID: c.Key.ID, Role: c.Role}, nil
}

func (c Credential) good(now time.Time) bool {
	expired := !c.Key.ExpiresAt.IsZero() && !now.Before(c.Key.ExpiresAt)
	return !expired && c.Key.RevokedAt.IsZero() && !c.Disabled
}

func errBearer() error {
	return fault.New(fault.Unauthenticated, "the bearer token is missing or not valid")
}

// Workspaces lists every workspace by id; a principal who is not an instance
// admin sees its own.
func (s *Service) Workspaces(ctx context.Context, p Principal, pg page.Page) ([]Workspace, string, error) {
	if p.IsInstanceAdmin() {
		return s.Store.Workspaces(ctx, pg)
	}
	w, err := s.Store.Workspace(ctx, p.Workspace)
	if err != nil {
		return nil, "", err
	}
	return []Workspace{w}, "", nil
}

// CreateWorkspace makes a workspace under the id that w chooses; its name is
// the id when it has none. Instance admins only.
func (s *Service) CreateWorkspace(ctx context.Context, p Principal, w Workspace) (Workspace, error) {
	if !p.IsInstanceAdmin() {
		return Workspace{}, errInstanceAdmin("create workspaces")
	}
	if !workspaceID.MatchString(w.ID) {
		return Workspace{}, fault.New(fault.Invalid,
			"id must be 1 to 63 of a-z, 0-9, _ and -, and start with a letter or digit").On("id")
	}
	if w.Name == "" {
		w.Name = w.ID
	}
	if err := checkName(w.Name); err != nil {
		return Workspace{}, err
	}
	w.CreatedAt = s.now()
	return w, s.Store.InsertWorkspace(ctx, w, s.event(p, w.ID, audit.WorkspaceCreate, w.ID))
}

// Workspace returns one workspace.
func (s *Service) Workspace(ctx context.Context, p Principal, id string) (Workspace, error) {
	if err := s.sees(p, id); err != nil {
		return Workspace{}, err
	}
	return s.Store.Workspace(ctx, id)
}

// DeleteWorkspace removes a workspace with its tools, policy, users, keys and
// closed sessions. It is a Conflict while a session is open, and always for
// the default workspace. Instance admins only.
func (s *Service) DeleteWorkspace(ctx context.Context, p Principal, id string) error {
	if !p.IsInstanceAdmin() {
		return errInstanceAdmin("delete workspaces")
	}
	if id == DefaultWorkspace {
		return fault.New(fault.Conflict, "workspace %q can't be deleted", DefaultWorkspace)
	}
	if s.Gone != nil {
		defer s.Gone(id)
	}
	return s.Store.DeleteWorkspace(ctx, id, s.event(p, id, audit.WorkspaceDelete, id))
}

// Users lists the users of a workspace by id; "" is the principal's own.
func (s *Service) Users(ctx context.Context, p Principal, workspace string, pg page.Page) ([]User, string, error) {
	workspace, err := s.workspace(ctx, p, workspace)
	if err != nil {
		return nil, "", err
	}
	return s.Store.Users(ctx, workspace, pg)
}

// CreateUser makes a user in u.Workspace ("": the principal's own) with a
// name that is new there, and a role (Member when it has none).
func (s *Service) CreateUser(ctx context.Context, p Principal, u User) (User, error) {
	workspace, err := s.workspace(ctx, p, u.Workspace)
	if err != nil {
		return User{}, err
	}
	if u.Role == "" {
		u.Role = Member
	}
	if err := checkRole(p, u.Role); err != nil {
		return User{}, err
	}
	if err := checkName(u.Name); err != nil {
		return User{}, err
	}
	u.ID, u.Workspace, u.CreatedAt = "usr_"+s.NewID(), workspace, s.now()
	return u, s.Store.InsertUser(ctx, u, s.event(p, workspace, audit.UserCreate, u.ID))
}

// User returns one user.
func (s *Service) User(ctx context.Context, p Principal, id string) (User, error) {
	return s.Store.User(ctx, scope(p), id)
}

// UpdateUser changes a user. Nobody becomes an instance admin by a change:
// whoever made the user's keys would become one too.
func (s *Service) UpdateUser(ctx context.Context, p Principal, id string, c Change) (User, error) {
	u, err := s.managed(ctx, p, id)
	if err != nil {
		return User{}, err
	}
	if c.Role != nil {
		if *c.Role == InstanceAdmin && u.Role != InstanceAdmin {
			return User{}, fault.New(fault.Invalid, "role instance_admin can only be given when a user is created").On("role")
		}
		if err := checkRole(p, *c.Role); err != nil {
			return User{}, err
		}
	}
	if c.Name != nil {
		if err := checkName(*c.Name); err != nil {
			return User{}, err
		}
	}
	return s.Store.UpdateUser(ctx, u.Workspace, id, c, s.event(p, u.Workspace, audit.UserUpdate, id))
}

// DeleteUser removes a user with its keys and what it has set tools to.
func (s *Service) DeleteUser(ctx context.Context, p Principal, id string) error {
	u, err := s.managed(ctx, p, id)
	if err != nil {
		return err
	}
	return s.Store.DeleteUser(ctx, u.Workspace, id, s.event(p, u.Workspace, audit.UserDelete, id))
}

// Keys lists the API keys of a workspace by id, revoked ones too; "" is the
// principal's own workspace.
func (s *Service) Keys(ctx context.Context, p Principal, workspace string, pg page.Page) ([]APIKey, string, error) {
	workspace, err := s.workspace(ctx, p, workspace)
	if err != nil {
		return nil, "", err
	}
	return s.Store.Keys(ctx, workspace, pg)
}

// CreateKey makes a key for k.UserID ("": the principal itself) and returns
// its secret, which is not kept and can't be had again.
func (s *Service) CreateKey(ctx context.Context, p Principal, k APIKey) (APIKey, string, error) {
	if k.UserID == "" && p.KeyID == "" {
		return APIKey{}, "", fault.New(fault.Invalid, "user_id must name the user that the key is for").On("user_id")
	}
	if k.UserID == "" {
		k.UserID = p.UserID
	}
	if k.Workspace != "" {
		if err := s.sees(p, k.Workspace); err != nil {
			return APIKey{}, "", err
		}
	}
	u, err := s.managed(ctx, p, k.UserID)
	if err != nil {
		return APIKey{}, "", err
	}
	if k.Workspace != "" && k.Workspace != u.Workspace {
		return APIKey{}, "", fault.New(fault.NotFound, "no user %q", k.UserID)
	}
	if k.Name != "" {
		if err := checkName(k.Name); err != nil {
			return APIKey{}, "", err
		}
	}
	if !k.ExpiresAt.IsZero() && !k.ExpiresAt.After(s.Now()) {
		return APIKey{}, "", fault.New(fault.Invalid, "expires_at must be in the future").On("expires_at")
	}
	secret := newSecret()
	hash := Digest(secret)
	k = APIKey{
		ID: "key_" + s.NewID(), Workspace: u.Workspace, UserID: u.ID, Name: k.Name, Hint: secret[:hintLength],
		CreatedAt: s.now(), ExpiresAt: k.ExpiresAt.Truncate(time.Microsecond),
	}
	if err := s.Store.InsertKey(ctx, k, hash[:], s.event(p, k.Workspace, audit.KeyCreate, k.ID)); err != nil {
		return APIKey{}, "", err
	}
	return k, secret, nil
}

// RevokeKey ends a key: the next request with it is refused. It may be
// revoked again.
func (s *Service) RevokeKey(ctx context.Context, p Principal, id string) error {
	k, err := s.Store.Key(ctx, scope(p), id)
	if err != nil {
		return err
	}
	if _, err := s.managed(ctx, p, k.UserID); err != nil {
		return err
	}
	return s.Store.RevokeKey(ctx, k.Workspace, id, s.event(p, k.Workspace, audit.KeyRevoke, id))
}

// hintLength is how much of a secret is kept to tell keys apart: the prefix
// and 24 of 256 bits.
const hintLength = len("bw_") + 4

func newSecret() string {
	b := make([]byte, 32)
	rand.Read(b)
	return "bw_" + base64.RawURLEncoding.EncodeToString(b)
}

// managed is a user whom p may change, or act for by a key.
func (s *Service) managed(ctx context.Context, p Principal, id string) (User, error) {
	u, err := s.Store.User(ctx, scope(p), id)
	if err != nil {
		return User{}, err
	}
	if u.Role == InstanceAdmin && !p.IsInstanceAdmin() {
		return User{}, errInstanceAdmin("change an instance admin or its keys")
	}
	return u, nil
}

// workspace is the one that p acts in when it names id.
func (s *Service) workspace(ctx context.Context, p Principal, id string) (string, error) {
	if id == "" || id == p.Workspace {
		return p.Workspace, nil
	}
	if err := s.sees(p, id); err != nil {
		return "", err
	}
	_, err := s.Store.Workspace(ctx, id)
	return id, err
}

// sees refuses another workspace as if it didn't exist.
func (s *Service) sees(p Principal, id string) error {
	if p.IsInstanceAdmin() || id == p.Workspace {
		return nil
	}
	return fault.New(fault.NotFound, "no workspace %q", id)
}

// scope is the workspace in which p finds objects; "" is every one.
func scope(p Principal) string {
	if p.IsInstanceAdmin() {
		return ""
	}
	return p.Workspace
}

func (s *Service) now() time.Time { return s.Now().UTC().Truncate(time.Microsecond) }

func (s *Service) event(p Principal, workspace, action, object string) audit.Event {
	return audit.Event{
		ID: audit.ID(s.NewID()), At: s.now(), Workspace: workspace, Actor: p.UserID,
		Action: action, Object: object, Outcome: audit.OK,
	}
}

var workspaceID = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

const maxName = 200

func checkName(name string) error {
	if strings.TrimSpace(name) == "" || utf8.RuneCountInString(name) > maxName || !utf8.ValidString(name) ||
		strings.ContainsFunc(name, unicode.IsControl) {
		return fault.New(fault.Invalid, "name must be 1 to %d characters without control characters", maxName).On("name")
	}
	return nil
}

func checkRole(p Principal, r Role) error {
	switch r {
	case Admin, Member:
		return nil
	case InstanceAdmin:
		if p.IsInstanceAdmin() {
			return nil
		}
		return errInstanceAdmin("make an instance admin")
	}
	return fault.New(fault.Invalid, "role must be member, admin or instance_admin").On("role")
}

func errInstanceAdmin(what string) error {
	return fault.New(fault.Forbidden, "only an instance admin may %s", what)
}

package tool

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/bigwave/bigwave/controlplane/internal/audit"
	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/shared/fault"
)

// What a Store is told about the revision that it must find.
const (
	AnyRevision int64 = 0  // whatever is there, also nothing
	NoRevision  int64 = -1 // nothing may be there
)

// Store keeps the workspaces' own tools. Every write records e in the same
// transaction, and only if it changes something.
type Store interface {
	// WorkspaceTools returns them by name.
	WorkspaceTools(ctx context.Context, workspace string) ([]Spec, error)
	// WorkspaceTool returns one, or a fault of kind NotFound.
	WorkspaceTool(ctx context.Context, workspace, name string) (Spec, error)
	// PutWorkspaceTool replaces or adds s and returns it with its new, higher
	// revision; a fault of kind PreconditionFailed when ifRevision is stale.
	PutWorkspaceTool(ctx context.Context, workspace string, s Spec, ifRevision int64, e audit.Event) (Spec, error)
	// DeleteWorkspaceTool removes one; NotFound, or PreconditionFailed likewise.
	DeleteWorkspaceTool(ctx context.Context, workspace, name string, ifRevision int64, e audit.Event) error
}

// Service keeps the tools that workspaces register and offers them to runs.
// Its methods may be called from several goroutines. It must not be copied.
type Service struct {
	Store Store
	Sole  bool // nobody else changes tools: those of a workspace are read once
	Now   func() time.Time
	NewID func() string

	cache cache
	known remembered
}

// List returns the tools of the caller's workspace by name.
func (s *Service) List(ctx context.Context, p identity.Principal) ([]Spec, error) {
	return s.Store.WorkspaceTools(ctx, p.Workspace)
}

// Get returns one tool of the caller's workspace.
func (s *Service) Get(ctx context.Context, p identity.Principal, name string) (Spec, error) {
	if CheckName(name) != nil {
		return Spec{}, unknown()
	}
	return s.Store.WorkspaceTool(ctx, p.Workspace, name)
}

// Put adds or replaces a tool of the caller's workspace under name, whatever
// spec itself says, and returns it as kept. ifMatch is an ETag, a list of
// them, "*" or empty.
func (s *Service) Put(ctx context.Context, p identity.Principal, name string, spec Spec, ifMatch string) (Spec, error) {
	spec.Name = name
	spec.Parameters, spec.Payload = orObject(spec.Parameters), orObject(spec.Payload)
	if err := Check(spec); err != nil {
		return Spec{}, err
	}
	revision, err := s.expected(ctx, p.Workspace, name, ifMatch)
	if fault.Is(err, fault.NotFound) {
		err = stale()
	}
	if err != nil {
		return Spec{}, err
	}
	defer s.known.changed(p.Workspace)
	return s.Store.PutWorkspaceTool(ctx, p.Workspace, spec, revision, s.event(p, audit.ToolPut, name))
}

// Delete removes a tool of the caller's workspace.
func (s *Service) Delete(ctx context.Context, p identity.Principal, name, ifMatch string) error {
	if CheckName(name) != nil {
		return unknown()
	}
	revision, err := s.expected(ctx, p.Workspace, name, ifMatch)
	if err != nil {
		return err
	}
	defer s.known.changed(p.Workspace)
	return s.Store.DeleteWorkspaceTool(ctx, p.Workspace, name, revision, s.event(p, audit.ToolDelete, name))
}

// Tools offers the workspace's tools to its runs.
func (s *Service) Tools(ctx context.Context, workspace string) ([]Tool, error) {
	if s.Sole {
		return s.known.get(ctx, workspace, s.read)
	}
	return s.read(ctx, workspace)
}

func (s *Service) read(ctx context.Context, workspace string) ([]Tool, error) {
	specs, err := s.Store.WorkspaceTools(ctx, workspace)
	if err != nil {
		return nil, err
	}
	tools := make([]Tool, len(specs))
	for i, spec := range specs {
		tools[i] = Tool{
			Name: spec.Name, Description: spec.Description, Parameters: spec.Parameters,
			Source: "workspace", handler: s.cache.handler(spec),
		}
	}
	return tools, nil
}

// Forget is told of a workspace that is gone, with its tools.
func (s *Service) Forget(workspace string) { s.known.changed(workspace) }

// ETag names the state of a spec for If-Match.
func ETag(s Spec) string { return strconv.Quote(strconv.FormatInt(s.Revision, 10)) }

// expected is the revision that an If-Match asks for. The store compares it
// again in its transaction.
func (s *Service) expected(ctx context.Context, workspace, name, ifMatch string) (int64, error) {
	ifMatch = strings.TrimSpace(ifMatch)
	if ifMatch == "" {
		return AnyRevision, nil
	}
	found, err := s.Store.WorkspaceTool(ctx, workspace, name)
	if err != nil {
		return 0, err
	}
	for tag := range strings.SplitSeq(ifMatch, ",") {
		if tag = strings.TrimSpace(tag); tag == "*" || tag == ETag(found) {
			return found.Revision, nil
		}
	}
	return 0, stale()
}

func stale() error {
	return fault.New(fault.PreconditionFailed, "the tool is not in the state that If-Match names; read it again")
}

func unknown() error { return fault.New(fault.NotFound, "no such tool") }

func orObject(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("{}")
	}
	return raw
}

func (s *Service) event(p identity.Principal, action, name string) audit.Event {
	return audit.Event{
		ID: audit.ID(s.NewID()), At: s.Now().UTC().Truncate(time.Microsecond), Workspace: p.Workspace, Actor: p.UserID,
		Action: action, Object: name, Outcome: audit.OK,
	}
}

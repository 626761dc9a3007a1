// Package httpapi is the control plane's HTTP API: it parses, calls one
// service and writes. What may be asked of it is in openapi.yaml.
package httpapi

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bigwave/bigwave/controlplane/internal/identity"
	"github.com/bigwave/bigwave/controlplane/internal/tool"
)

// The caps on request bodies.
const (
	maxBody    = 1 << 20
	maxRunBody = 16 << 20
)

// Server holds what the routes call. Every field without a stated default is
// required.
type Server struct {
	Identity    Identity
	Tools       Tools
	PythonTools PythonTools
	Policies    Policies
	// Registry is what a run would see that p starts with those Python tools.
	Registry func(ctx context.Context, p identity.Principal, pythonTools []string) (tool.Registry, error)
	Sessions Sessions
	Runs     Runs
	// Events follows the live stream of one run, from the event after the
	// sequence given (0: from its first). It ends when ctx does.
	Events func(ctx context.Context, session, run string, after uint64) iter.Seq2[Event, error]
	Fleet  Fleet
	Audit  AuditLog
	// Ready names each part that requests need, with what is wrong with it or
	// nil.
	Ready   func(ctx context.Context) map[string]error
	Counts  Counts
	Log     *slog.Logger
	Metrics *prometheus.Registry // /metrics shows what is registered here

	Now          func() time.Time // default time.Now
	BodyTimeout  time.Duration    // for a whole request body; default 30 s
	WriteTimeout time.Duration    // for one write to a stream's reader; default 15 s
	Heartbeat    time.Duration    // between comments on a quiet stream; default 15 s
	Idle         time.Duration    // after so long without an event a stream looks at the run itself; default 2 s

	observer *observer
}

// New returns the API as a handler.
func New(s Server) http.Handler {
	s.BodyTimeout = cmp.Or(s.BodyTimeout, 30*time.Second)
	s.WriteTimeout = cmp.Or(s.WriteTimeout, 15*time.Second)
	s.Heartbeat = cmp.Or(s.Heartbeat, 15*time.Second)
	s.Idle = cmp.Or(s.Idle, 2*time.Second)
	if s.Now == nil {
		s.Now = time.Now
	}
	e := echo.New()
	e.HTTPErrorHandler = s.writeError
	s.observer = newObserver(s.Metrics)
	e.Pre(s.observe, s.authenticate, cleanPath)
	for _, r := range routes {
		e.Add(r.Method, r.Path, func(c echo.Context) error { return r.handle(&s, c) }, allow(r.Access))
	}
	return e
}

// Access says who may use a route.
type Access string

// Who may use a route, from everybody to the fewest.
const (
	Open          Access = "open" // no bearer
	Member        Access = "member"
	Admin         Access = "admin"
	InstanceAdmin Access = "instance_admin"
)

// Route is one line of the route table.
type Route struct {
	Method, Path string // Path with :name for parameters
	Access       Access

	handle func(*Server, echo.Context) error
}

// Routes lists every route.
func Routes() []Route { return append([]Route(nil), routes...) }

var routes = []Route{
	{http.MethodGet, "/healthz", Open, (*Server).health},
	{http.MethodGet, "/readyz", Open, (*Server).ready},
	{http.MethodGet, "/openapi.json", Open, (*Server).openapi},
	{http.MethodGet, "/metrics", InstanceAdmin, (*Server).metrics},

	{http.MethodGet, "/admin/workspaces", InstanceAdmin, (*Server).listWorkspaces},
	{http.MethodPost, "/admin/workspaces", InstanceAdmin, (*Server).createWorkspace},
	{http.MethodGet, "/admin/workspaces/:workspace", InstanceAdmin, (*Server).getWorkspace},
	{http.MethodDelete, "/admin/workspaces/:workspace", InstanceAdmin, (*Server).deleteWorkspace},

	{http.MethodGet, "/admin/users", Admin, (*Server).listUsers},
	{http.MethodPost, "/admin/users", Admin, (*Server).createUser},
	{http.MethodGet, "/admin/users/:user", Admin, (*Server).getUser},
	{http.MethodPatch, "/admin/users/:user", Admin, (*Server).updateUser},
	{http.MethodDelete, "/admin/users/:user", Admin, (*Server).deleteUser},

	{http.MethodGet, "/admin/api-keys", Admin, (*Server).listKeys},
	{http.MethodPost, "/admin/api-keys", Admin, (*Server).createKey},
	{http.MethodDelete, "/admin/api-keys/:key", Admin, (*Server).revokeKey},

	{http.MethodGet, "/admin/groups", Admin, (*Server).listGroups},
	{http.MethodPost, "/admin/groups", Admin, (*Server).createGroup},
	{http.MethodGet, "/admin/groups/:group", Admin, (*Server).getGroup},
	{http.MethodPatch, "/admin/groups/:group", Admin, (*Server).updateGroup},
	{http.MethodDelete, "/admin/groups/:group", Admin, (*Server).deleteGroup},
	{http.MethodGet, "/admin/groups/:group/members", Admin, (*Server).listMembers},
	{http.MethodPost, "/admin/groups/:group/members", Admin, (*Server).addMember},
	{http.MethodDelete, "/admin/groups/:group/members/:user", Admin, (*Server).removeMember},

	{http.MethodGet, "/admin/permissions", Admin, (*Server).getPermissions},
	{http.MethodPut, "/admin/permissions", Admin, (*Server).putPermissions},

	{http.MethodGet, "/admin/workspace-tools", Admin, (*Server).listWorkspaceTools},
	{http.MethodGet, "/admin/workspace-tools/:name", Admin, (*Server).getWorkspaceTool},
	{http.MethodPut, "/admin/workspace-tools/:name", Admin, (*Server).putWorkspaceTool},
	{http.MethodDelete, "/admin/workspace-tools/:name", Admin, (*Server).deleteWorkspaceTool},

	{http.MethodGet, "/admin/sandbox/policy", Admin, (*Server).getPolicy},
	{http.MethodPut, "/admin/sandbox/policy", Admin, (*Server).putPolicy},
	{http.MethodDelete, "/admin/sandbox/policy", Admin, (*Server).deletePolicy},

	{http.MethodGet, "/admin/runners", InstanceAdmin, (*Server).listRunners},
	{http.MethodGet, "/admin/audit-events", Admin, (*Server).listAuditEvents},

	{http.MethodGet, "/v1/tools", Member, (*Server).listTools},

	// Also under /api/v1/tools, and with a slash at the end; see toolPath.
	{http.MethodGet, "/api/tools", Member, asOpenWebUI((*Server).listPythonTools)},
	{http.MethodGet, "/api/tools/list", Member, asOpenWebUI((*Server).listPythonToolAccess)},
	{http.MethodGet, "/api/tools/export", Member, asOpenWebUI((*Server).exportPythonTools)},
	{http.MethodPost, "/api/tools/create", Member, asOpenWebUI((*Server).createPythonTool)},
	{http.MethodPost, "/api/tools/load/url", Member, asOpenWebUI((*Server).loadPythonTool)},
	{http.MethodGet, "/api/tools/id/:id", Member, asOpenWebUI((*Server).getPythonTool)},
	{http.MethodPost, "/api/tools/id/:id/update", Member, asOpenWebUI((*Server).updatePythonTool)},
	{http.MethodPost, "/api/tools/id/:id/access/update", Member, asOpenWebUI((*Server).updatePythonToolAccess)},
	{http.MethodDelete, "/api/tools/id/:id/delete", Member, asOpenWebUI((*Server).deletePythonTool)},
	{http.MethodGet, "/api/tools/id/:id/valves", Member, asOpenWebUI((*Server).getPythonValves)},
	{http.MethodGet, "/api/tools/id/:id/valves/spec", Member, asOpenWebUI((*Server).getPythonValvesSchema)},
	{http.MethodPost, "/api/tools/id/:id/valves/update", Member, asOpenWebUI((*Server).setPythonValves)},
	{http.MethodGet, "/api/tools/id/:id/valves/user", Member, asOpenWebUI((*Server).getPythonUserValves)},
	{http.MethodGet, "/api/tools/id/:id/valves/user/spec", Member, asOpenWebUI((*Server).getPythonUserValvesSchema)},
	{http.MethodPost, "/api/tools/id/:id/valves/user/update", Member, asOpenWebUI((*Server).setPythonUserValves)},

	{http.MethodPost, "/api/tools/id/:id/run", Member, asOpenWebUI((*Server).runPythonTool)},

	{http.MethodPost, "/v1/agent-sessions", Member, (*Server).createSession},
	{http.MethodGet, "/v1/agent-sessions", Member, (*Server).listSessions},
	{http.MethodGet, "/v1/agent-sessions/:session", Member, (*Server).getSession},
	{http.MethodDelete, "/v1/agent-sessions/:session", Member, (*Server).closeSession},

	{http.MethodPost, "/v1/agent-sessions/:session/run", Member, (*Server).startRun},
	{http.MethodGet, "/v1/agent-sessions/:session/runs", Member, (*Server).listRuns},
	{http.MethodGet, "/v1/agent-sessions/:session/runs/:run", Member, (*Server).getRun},
	{http.MethodGet, "/v1/agent-sessions/:session/runs/:run/events", Member, (*Server).runEvents},
	{http.MethodPost, "/v1/agent-sessions/:session/runs/:run/cancel", Member, (*Server).cancelRun},
}

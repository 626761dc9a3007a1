// Package audit is the record of who did what: every mutation and every call
// writes one event in the same transaction as the change itself.
package audit

import "time"

// Event is one line of the record.
type Event struct {
	ID           string
	At           time.Time
	Workspace    string
	Actor        string // user id, "bootstrap", Runner of one, or ControlPlane
	Action       string // one of the constants below
	Object       string // the id or name acted on
	Outcome      string // "ok" or a code
	PolicyDigest string // calls only
	Detail       string // free text for people; never a secret
}

// ControlPlane is the actor of what the control plane does by itself.
const ControlPlane = "controlplane"

// Runner is the actor that a runner's id stands for.
func Runner(id string) string { return "runner:" + id }

// ID is an event's id, made of an id without prefix.
func ID(id string) string { return "aud_" + id }

// OK is the outcome of an action that did what it was asked.
const OK = "ok"

// The actions.
const (
	WorkspaceCreate      = "workspace.create"
	WorkspaceDelete      = "workspace.delete"
	UserCreate           = "user.create"
	UserUpdate           = "user.update"
	UserDelete           = "user.delete"
	KeyCreate            = "key.create"
	KeyRevoke            = "key.revoke"
	GroupCreate          = "group.create"
	GroupUpdate          = "group.update"
	GroupDelete          = "group.delete"
	GroupMemberAdd       = "group.member.add"    // Detail: the user
	GroupMemberRemove    = "group.member.remove" // likewise
	PermissionsPut       = "permissions.put"
	PolicyPut            = "policy.put"
	PolicyDelete         = "policy.delete"
	ToolPut              = "tool.put"
	ToolDelete           = "tool.delete"
	PythonToolCreate     = "python_tool.create"
	PythonToolUpdate     = "python_tool.update"   // Detail: the new revision's digest
	PythonToolDescribe   = "python_tool.describe" // again, by a newer platform; Detail: the revision's digest
	PythonToolDelete     = "python_tool.delete"
	PythonToolAccess     = "python_tool.access"
	PythonToolValves     = "python_tool.valves"
	PythonToolUserValves = "python_tool.user_valves" // of the actor
	SessionCreated       = "session.created"
	SessionClaimed       = "session.claimed"
	SessionStarted       = "session.started"
	SessionFailed        = "session.failed"
	SessionEnded         = "session.ended"
	SessionLost          = "session.lost"
	SessionIdle          = "session.idle" // without a sandbox again, nothing lost
	SessionClosed        = "session.closed"
	RunStarted           = "run.started"
	RunCancelled         = "run.cancelled"
	CallFinished         = "call.finished"
	ClaimRejected        = "claim_rejected" // messages of runners that were not taken
	BeatRejected         = "beat_rejected"
	ResultRejected       = "result_rejected"
)

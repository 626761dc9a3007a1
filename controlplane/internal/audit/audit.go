// Package audit is the record of who did what: every mutation and every call
// writes one event in the same transaction as the change itself.
package audit

import "time"

// Event is one line of the record.
type Event struct {
	ID           string
	At           time.Time
	Workspace    string
	Actor        string // user id, "bootstrap", "runner:<id>" or "controlplane"
	Action       string // "tool.put", "policy.delete", "call.finished", …
	Object       string // the id or name acted on
	Outcome      string // "ok" or a code
	PolicyDigest string // calls only
	Detail       string // free text for people; never a secret
}

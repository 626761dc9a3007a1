package wire

import "encoding/json"

// What a ToolRequest asks for.
const (
	ToolDescribe = "describe"
	ToolValidate = "validate_valves"
	ToolCall     = "call"
)

// ToolRequest is the script of a call of PythonTool, as strict JSON.
type ToolRequest struct {
	Op        string          `json:"op"` // one of the three
	ID        string          `json:"id"` // of the tool
	Content   string          `json:"content"`
	Function  string          `json:"function,omitempty"` // call
	Arguments json.RawMessage `json:"arguments,omitzero"` // call: an object
	Which     string          `json:"which,omitempty"`    // validate_valves: "valves" or "user_valves"
	Sealed    []byte          `json:"sealed,omitempty"`   // ToolSecrets, boxed to the runner's key for the call's id
	ReplyTo   []byte          `json:"reply_to,omitempty"` // describe, validate_valves: the X25519 key that Done.Value is boxed to, for the call's id
}

// ToolSecrets are the parts of a ToolRequest that nobody on the way may read.
type ToolSecrets struct {
	Valves     json.RawMessage `json:"valves,omitzero"`      // describe, call: what the tool is set to
	UserValves json.RawMessage `json:"user_valves,omitzero"` // call: what the user has set
	Values     json.RawMessage `json:"values,omitzero"`      // validate_valves
	User       *ToolUser       `json:"user,omitempty"`       // call
}

// ToolUser is what a tool is told of the one who calls it.
type ToolUser struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Role string `json:"role"`
}

// ToolAnswer is what Done.Value holds, boxed, of describe and validate_valves:
// one of its three.
type ToolAnswer struct {
	Description *ToolDescription `json:"description,omitempty"`
	Values      json.RawMessage  `json:"values,omitzero"`
	Error       *ToolError       `json:"error,omitempty"`
}

// ToolError is what is wrong with a source or with values: Message is the
// exception's own text, as far as there is one.
type ToolError struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Module  string `json:"module,omitempty"` // the package that is missing
}

// ToolDescriptions is the version of what runners say of sources: stored
// descriptions of an older one are made again. Whoever raises it raises
// Version too, so that no older runner makes them.
const ToolDescriptions = 1

// ToolDescription is what a source says of itself.
type ToolDescription struct {
	Specs        json.RawMessage   `json:"specs"`            // [{name, description, parameters}]
	Spoken       map[string]string `json:"spoken,omitempty"` // by function: what models are told of it
	Manifest     map[string]string `json:"manifest"`
	Requirements []string          `json:"requirements,omitempty"`
	Valves       json.RawMessage   `json:"valves"`      // JSON schema or null
	UserValves   json.RawMessage   `json:"user_valves"` // likewise
	Citation     bool              `json:"citation"`
	FileHandler  bool              `json:"file_handler"`
}

// ToolResult is what Done.Value holds of call, when ValueKind says so.
type ToolResult struct {
	Type          string          `json:"type"`  // the returned value's Python type
	Text          *string         `json:"text"`  // what a model is told; null for None
	Value         json.RawMessage `json:"value"` // the value as JSON; null when it was too large as well
	Files         []ToolFile      `json:"files"`
	Embeds        []string        `json:"embeds"` // HTML to be shown beside the result
	EventsDropped int64           `json:"events_dropped"`
}

// ToolFile is a data URI that a function returned.
type ToolFile struct {
	Type string `json:"type"` // "image" or "file"
	URL  string `json:"url"`
}

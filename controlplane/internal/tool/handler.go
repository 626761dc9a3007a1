package tool

import (
	"crypto/sha256"
	"encoding/json"
	"sync"

	"github.com/bigwave/bigwave/controlplane/internal/render"
	"github.com/bigwave/bigwave/shared/fault"
)

// prepared is a tool ready to take arguments.
type prepared struct {
	schema  *schema
	prepare func(render.Arguments) (Invocation, error)
}

// handler prepares a tool when it is first called.
type handler struct {
	once sync.Once
	make func() (prepared, error)
	done prepared
	err  error
}

func (h *handler) compiled() (prepared, error) {
	h.once.Do(func() { h.done, h.err = h.make() })
	return h.done, h.err
}

// New returns a tool of ours: prepare makes the invocation of arguments that
// fit parameters. Its errors must be faults as Prepare describes them.
func New(name, description, source string, parameters json.RawMessage, prepare func(render.Arguments) (Invocation, error)) Tool {
	return Tool{
		Name: name, Description: description, Source: source, Parameters: parameters,
		handler: &handler{make: func() (prepared, error) {
			s, err := compileSchema(parameters)
			return prepared{s, prepare}, err
		}},
	}
}

// prepareSpec readies a stored spec. A spec that is not fit to run, such as
// one without a command, is the call's fault.
func prepareSpec(s Spec) (prepared, error) {
	schema, err := compileSchema(s.Parameters)
	if err != nil {
		return prepared{}, unfit(err)
	}
	field, template, err := s.template()
	if err != nil {
		return prepared{}, unfit(err)
	}
	if field == "" {
		return prepared{}, unfit(fault.New(fault.Invalid, "the tool %s has no handler_payload.command to run", s.Name).On(commandField))
	}
	parse := parseShell
	if s.Kind == PythonTemplate {
		parse = parsePython
	}
	fill, err := parse(template)
	if err != nil {
		return prepared{}, unfit(err)
	}
	return prepared{schema, func(args render.Arguments) (Invocation, error) {
		inv, err := fill(args)
		return Invocation{Program: inv.Program, Script: inv.Script, InArgv: true}, err
	}}, nil
}

type fill func(render.Arguments) (render.Invocation, error)

func parseShell(template string) (fill, error) {
	t, err := render.ParseShell(template)
	if err != nil {
		return nil, err
	}
	return t.Render, nil
}

func parsePython(template string) (fill, error) {
	t, err := render.ParsePython(template)
	if err != nil {
		return nil, err
	}
	return t.Render, nil
}

// unfit turns what PUT would say about a spec into what a call is told.
func unfit(err error) error {
	f := *fault.From(err)
	return f.WithCode(string(fault.InvalidArguments))
}

// cache keeps handlers by the content of their spec, so that a run need not
// compile what the run before it did.
type cache struct {
	mu       sync.Mutex
	handlers map[[sha256.Size]byte]*handler
}

// maxCached bounds the handlers kept; beyond it some are made anew.
const maxCached = 2048

func (c *cache) handler(s Spec) *handler {
	key := contentKey(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	if h, ok := c.handlers[key]; ok {
		return h
	}
	if c.handlers == nil || len(c.handlers) >= maxCached {
		c.handlers = map[[sha256.Size]byte]*handler{}
	}
	h := &handler{make: func() (prepared, error) { return prepareSpec(s) }}
	c.handlers[key] = h
	return h
}

func contentKey(s Spec) [sha256.Size]byte {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(s.Name), []byte(s.Kind), s.Parameters, s.Payload} {
		sum := sha256.Sum256(part)
		h.Write(sum[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"kvasird/node/gateway/grammar"
	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

const (
	maxTools    = 1024
	maxToolName = 256 // bytes
)

// toolMode says whether tools may or must be called.
type toolMode uint8

const (
	toolsAuto toolMode = iota
	toolsNone
	toolsRequired
	toolsNamed // exactly toolChoice.name
)

type toolChoice struct {
	mode  toolMode
	name  string
	param string // of the request, for errors
}

// forced says that an answer without a call is none.
func (c toolChoice) forced() bool { return c.mode == toolsRequired || c.mode == toolsNamed }

// format is the form that the text of an answer must have.
type format struct {
	json   bool
	schema *jinja.Dict // nil: any JSON object
	param  string
}

// toolChoice reads OpenAI's tool_choice; named reads the object that names a
// tool. It is ignored where there are no tools.
func (f *fields) toolChoice(c *conversation, named func(*fields) string) (choice toolChoice) {
	choice.param = "tool_choice"
	v, ok := f.get("tool_choice")
	if !ok || len(c.tools) == 0 {
		return choice
	}
	switch v := v.(type) {
	case string:
		switch v {
		case "auto":
		case "none":
			choice.mode = toolsNone
		case "required", "any":
			choice.mode = toolsRequired
		default:
			f.fail("tool_choice", "%q is none of none, auto, required", clip(v))
		}
	case *jinja.Dict:
		choice.mode, choice.name = toolsNamed, named(f.in(v, "tool_choice"))
		if f.err() == nil && c.named(choice.name) == nil {
			f.fail("tool_choice", "there is no tool %q in tools", clip(choice.name))
		}
	default:
		f.fail("tool_choice", "must be a string or an object, not %s", kindOf(v))
	}
	return choice
}

// toolName checks the name of a tool, which must be new.
func (f *fields) toolName(c *conversation) string {
	name, _ := f.text("name")
	switch {
	case name == "" || len(name) > maxToolName || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' }):
		f.fail("name", "must be 1 to %d bytes without spaces", maxToolName)
	case c.named(name) != nil:
		f.fail("name", "two tools are called %q", clip(name))
	}
	return name
}

// responseFormat reads {"type":…}; inline is how Responses has the schema, beside
// the type.
func (f *fields) responseFormat(name string, inline bool) (out format) {
	o, ok := f.object(name)
	if !ok {
		return out
	}
	out.param = o.path[:len(o.path)-1]
	switch kind, _ := o.text("type"); kind {
	case "text":
	case "json_object":
		out.json = true
	case "json_schema":
		out.json = true
		if !inline {
			if o, ok = o.object("json_schema"); !ok {
				f.fail(name, "has no json_schema")
				return out
			}
		}
		if schema, ok := o.object("schema"); ok {
			out.schema, out.param = schema.d, schema.path[:len(schema.path)-1]
		} else {
			o.fail("schema", "is required")
		}
	default:
		f.fail(name, "the type %q is none of text, json_object, json_schema", clip(kind))
	}
	return out
}

// parserTools are the tools as toolcall knows them.
func parserTools(tools []tool) []toolcall.Tool {
	out := make([]toolcall.Tool, len(tools))
	for i, t := range tools {
		out[i].Name = t.name
		if t.schema != nil {
			out[i].Parameters = jsonOf(t.schema)
		}
	}
	return out
}

// constrain asks for the grammar that the request needs. A forced call or form
// that the engine or the grammar cannot hold to is refused; a call that the
// model is free to make is held to its schema where that can be done.
func (m *servedModel) constrain(t *task, p *prompt) *apiError {
	can := m.abilities()
	tools := parserTools(t.talk.tools)
	if t.choice.mode == toolsNone {
		tools = nil
	}
	switch {
	case t.format.json && len(tools) > 0:
		return lacks(t.format.param, "cannot be combined with tools unless tool_choice is none")
	case t.format.json && !can.Grammar:
		return t.noForm()
	case t.format.json:
		return t.formGrammar(p)
	case len(tools) == 0:
		return nil
	case t.choice.forced() && !can.Grammar:
		return t.noForce()
	case !can.Grammar:
		return nil
	case t.choice.mode == toolsNamed:
		tools = []toolcall.Tool{{Name: t.choice.name, Parameters: parserTools([]tool{*t.talk.named(t.choice.name)})[0].Parameters}}
	}
	triggers := toolcall.Trigger(p.family)
	if !t.choice.forced() && len(triggers) == 0 {
		return nil
	}
	options := p.options
	if !t.choice.forced() {
		options.InReasoning = false // what triggers the grammar comes after it
	}
	gbnf, err := toolcall.Grammar(p.family, tools, t.parallel, options, lenientRule)
	if err == nil {
		err = grammar.Check(gbnf) // whoever computes the answer takes no other
	}
	if err != nil {
		if t.choice.forced() {
			return lacks(t.choice.param, "a call cannot be forced: "+err.Error())
		}
		return nil
	}
	t.extra.Grammar = gbnf
	if !t.choice.forced() {
		t.extra.Triggers = triggers
	}
	return nil
}

func (t *task) noForm() *apiError {
	return lacks(t.format.param, "the engine of this model cannot hold an answer to a form yet")
}

func (t *task) noForce() *apiError {
	return lacks(t.choice.param, "the engine of this model cannot force a call yet; use auto")
}

// without takes back what an engine turned out to lack, and says whether there was
// something. What an answer cannot go without is refused.
func (t *task) without(lacks Abilities) (less bool, e *apiError) {
	x := &t.extra
	switch held := lacks.Grammar && x.Grammar != ""; {
	case lacks.Logprobs && x.Logprobs:
		return false, noLogprobs()
	case held && t.format.json:
		return false, t.noForm()
	case held && t.choice.forced():
		return false, t.noForce()
	case held:
		x.Grammar, x.Triggers, less = "", nil, true
	}
	if lacks.Special && x.Special {
		x.Special, less = false, true
	}
	return less, nil
}

// lenientRule writes a tool's arguments as a rule. What of a schema cannot be
// enforced is left out: a tool is not lost for it.
func lenientRule(root string, schema []byte) (string, error) {
	if schema == nil {
		schema = []byte("{}")
	}
	return grammar.FromSchema(schema, grammar.Options{Root: root, Lenient: true})
}

// formGrammar is the grammar of response_format: what cannot be enforced is
// refused by name.
func (t *task) formGrammar(p *prompt) *apiError {
	schema := json.RawMessage(`{"type":"object"}`)
	if t.format.schema != nil {
		schema = jsonOf(t.format.schema)
	}
	rule, err := grammar.FromSchema(schema, grammar.Options{Root: "answer"})
	var cannot *grammar.UnsupportedError
	if errors.As(err, &cannot) {
		return lacks(t.format.param, cannot.Error())
	}
	if err != nil {
		return badParam(t.format.param, fmt.Sprintf("%s: %v", t.format.param, err))
	}
	t.extra.Grammar = toolcall.AnswerGrammar(p.family, p.options, "answer") + "\n" + rule
	if err := grammar.Check(t.extra.Grammar); err != nil {
		return lacks(t.format.param, err.Error())
	}
	return nil
}

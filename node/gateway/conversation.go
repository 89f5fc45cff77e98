package gateway

import (
	"strings"

	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

// Roles of turns.
const (
	roleSystem    = "system"
	roleUser      = "user"
	roleAssistant = "assistant"
	roleTool      = "tool"
)

// conversation is what every API's request is decoded into, and what the model's
// template reads. JSON in it keeps the client's key order: models were trained on
// it, and a prompt that changes its order is computed again.
type conversation struct {
	turns []turn
	tools []tool
	args  *jinja.Dict // switches of the template; nil: none
}

// turn is one message.
type turn struct {
	role      string
	name      string // of the speaker or, in a result, of the tool
	text      string
	reasoning string
	calls     []call // of an assistant
	callID    string // of a tool's result
}

// call is a call of a tool.
type call struct {
	id, name string
	args     *jinja.Dict
}

// tool is a function that the model may call.
type tool struct {
	name   string
	schema any         // of its arguments, as decoded; nil: none
	shown  *jinja.Dict // as templates know it: {"type":"function","function":{…}}
	custom bool        // takes one text, not JSON (Responses)
}

// functionTool makes a tool of an API that has no "function" wrapper.
func functionTool(name string, description, schema any) tool {
	if schema == nil {
		schema = dict("type", "object", "properties", jinja.NewDict())
	}
	fn := dict("name", name, "description", description, "parameters", schema)
	return tool{name: name, schema: schema, shown: dict("type", "function", "function", fn)}
}

// named finds a tool.
func (c *conversation) named(name string) *tool {
	for i := range c.tools {
		if c.tools[i].name == name {
			return &c.tools[i]
		}
	}
	return nil
}

// settle brings the turns into the shape that templates take: one system turn,
// at the front, and results that know their tool's name. A last turn of the
// assistant is one that the answer goes on from; it is taken off and returned.
func (c *conversation) settle() (begun *turn) {
	var system []string
	var turns []turn
	names := map[string]string{}
	for _, t := range c.turns {
		if t.role == roleSystem {
			if t.text != "" {
				system = append(system, t.text)
			}
			continue
		}
		for _, k := range t.calls {
			names[k.id] = k.name
		}
		if t.role == roleTool && t.name == "" {
			t.name = names[t.callID]
		}
		turns = append(turns, t)
	}
	if n := len(turns); n > 0 && turns[n-1].role == roleAssistant && len(turns[n-1].calls) == 0 {
		begun, turns = &turns[n-1], turns[:n-1]
	}
	if len(system) > 0 {
		turns = append([]turn{{role: roleSystem, text: strings.Join(system, "\n\n")}}, turns...)
	}
	c.turns = turns
	return begun
}

// messages is the list that templates of a family read.
func (c *conversation) messages(f toolcall.Family) *jinja.List {
	l, ids := &jinja.List{}, map[string]string{}
	n := 0 // calls so far
	for _, t := range c.turns {
		for _, k := range t.calls {
			ids[k.id] = toolcall.HistoryID(f, k.id, k.name, n)
			n++
		}
		l.Items = append(l.Items, t.message(f, ids))
	}
	return l
}

// message is one item of the list.
func (t *turn) message(f toolcall.Family, ids map[string]string) *jinja.Dict {
	d := dict("role", t.role, "content", t.text)
	if t.name != "" {
		d.Set("name", t.name)
	}
	if t.reasoning != "" && f == toolcall.GPTOSS {
		d.Set("thinking", t.reasoning)
	} else if t.reasoning != "" {
		d.Set("reasoning_content", t.reasoning)
	}
	if t.role == roleTool {
		id, ok := ids[t.callID]
		if !ok { // of a call that is not in the conversation
			id = t.callID
		}
		d.Set("tool_call_id", id)
	}
	if len(t.calls) > 0 {
		calls := &jinja.List{}
		for _, k := range t.calls {
			fn := dict("name", k.name, "arguments", k.args)
			calls.Items = append(calls.Items, dict("id", ids[k.id], "type", "function", "function", fn))
		}
		d.Set("tool_calls", calls)
	}
	return d
}

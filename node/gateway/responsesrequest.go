package gateway

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"kvasird/node/gateway/jinja"
)

// sealedPrefix begins the reasoning that a client without stored responses sends
// back: a text in base64. It is no secret, it only has to come back unchanged.
const sealedPrefix = "kvasir1:"

const maxID = 128 // bytes of a response's id

// responseTask is a checked body of /v1/responses.
type responseTask struct {
	*task
	asked    map[string]json.RawMessage // fields that are repeated in the answer
	items    []json.RawMessage          // the conversation with the previous ones, where it is to be stored
	previous string                     // id
	store    bool
	sealed   bool // reasoning.encrypted_content is wanted
}

// parseResponses reads a body, and the conversation that it goes on from.
func (g *Gateway) parseResponses(r *http.Request, d *jinja.Dict) (*responseTask, *apiError) {
	f := newFields(d)
	t := &responseTask{task: newTask(), asked: map[string]json.RawMessage{}, store: true}
	if t.model, _ = f.text("model"); t.model == "" { // some clients' follow-ups have none
		if models := *g.models.Load(); len(models) > 0 {
			t.model = models[0].ID
		}
	}
	f.refuse("background", "conversation", "prompt")
	f.nucleus(&t.sampling)
	t.sampling.MaxTokens = f.maxTokens("max_output_tokens")
	t.stream = f.flag("stream")
	if _, ok := f.get("store"); ok {
		t.store = f.flag("store")
	}
	f.include(t)
	t.talk.args = jinja.NewDict()
	if o, ok := f.object("reasoning"); ok {
		if effort, ok := o.text("effort"); ok {
			setEffort(t.talk.args, effort)
		}
	}
	if o, ok := f.object("text"); ok {
		t.format = o.responseFormat("format", true)
	}
	f.responseTools(t)
	t.previous, _ = f.text("previous_response_id")
	if f.err() != nil {
		return nil, f.err()
	}
	for _, name := range repeated {
		if v, ok := f.get(name); ok {
			t.asked[name] = jsonOf(v)
		}
	}
	items, e := g.previousItems(r, t)
	if e != nil {
		return nil, e
	}
	f.responseInput(t, items)
	return t, f.err()
}

// repeated are the fields of a request that its answer shows as they came.
var repeated = []string{"instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools", "user", "metadata"}

// include reads what more the answer shall have.
func (f *fields) include(t *responseTask) {
	if v, ok := f.get("include"); ok {
		l, _ := v.(*jinja.List)
		if l == nil {
			f.fail("include", "must be an array of strings, not %s", kindOf(v))
			return
		}
		for _, v := range l.Items {
			switch v {
			case "reasoning.encrypted_content":
				t.sealed = true
			case "message.output_text.logprobs":
				t.extra.Logprobs = true
			}
		}
	}
	if top, ok := f.whole("top_logprobs", 0, maxTop); ok && t.extra.Logprobs {
		t.extra.Top = int(top)
	}
}

// responseTools reads tools. Those of OpenAI's own servers are left out.
func (f *fields) responseTools(t *responseTask) {
	f.responseToolList(t, 0)
	t.choice = f.toolChoice(&t.talk, func(o *fields) string {
		kind, _ := o.text("type")
		if kind != "function" && kind != "custom" {
			o.fail("type", "only \"function\" and \"custom\" are supported, not %q", clip(kind))
			return ""
		}
		name, _ := o.text("name")
		return name
	})
	if _, ok := f.get("parallel_tool_calls"); ok {
		t.parallel = f.flag("parallel_tool_calls")
	}
}

func (f *fields) responseToolList(t *responseTask, depth int) {
	f.each("tools", maxTools, func(item *fields) {
		description, _ := item.get("description")
		switch kind, _ := item.text("type"); kind {
		case "function":
			schema, _ := item.get("parameters")
			if _, ok := schema.(*jinja.Dict); schema != nil && !ok {
				item.fail("parameters", "must be an object, not %s", kindOf(schema))
				return
			}
			t.talk.tools = append(t.talk.tools, functionTool(item.toolName(&t.talk), description, schema))
		case "custom":
			t.talk.tools = append(t.talk.tools, item.customTool(t))
		case "namespace":
			if depth == 0 {
				item.responseToolList(t, depth+1)
			}
		}
	})
	if len(t.talk.tools) > maxTools {
		f.fail("tools", "has more than %d tools", maxTools)
	}
}

// customTool is offered to the model as a function of one text.
func (f *fields) customTool(t *responseTask) tool {
	description, _ := f.text("description")
	if o, ok := f.object("format"); ok {
		if definition, ok := o.text("definition"); ok {
			syntax, _ := o.text("syntax")
			description += fmt.Sprintf("\nThe input must match this %s grammar:\n%s", syntax, definition)
		}
	}
	input := dict("type", "string")
	schema := dict("type", "object", "properties", dict("input", input), "required", &jinja.List{Items: []any{"input"}})
	made := functionTool(f.toolName(&t.talk), strings.TrimSpace(description), schema)
	made.custom = true
	return made
}

// previousItems are the items of the response that this one goes on from.
func (g *Gateway) previousItems(r *http.Request, t *responseTask) ([]any, *apiError) {
	if t.previous == "" {
		return nil, nil
	}
	kept, e := g.stored(r.Context(), owner(r), t.previous)
	if e != nil {
		e.param = "previous_response_id"
		return nil, e
	}
	v, err := jinja.DecodeJSON(kept.Items)
	l, ok := v.(*jinja.List)
	if err != nil || !ok {
		return nil, badStore()
	}
	return l.Items, nil
}

func badStore() *apiError {
	return &apiError{status: http.StatusInternalServerError, code: "bad_store", message: "the stored response cannot be read"}
}

// storedAnswer is what is kept of a response.
type storedAnswer struct {
	Items    json.RawMessage `json:"items"` // of the conversation, its output last
	Response json.RawMessage `json:"response"`
}

func storeKey(owner, id string) string { return owner + "/" + id }

// stored finds a response of the same owner.
func (g *Gateway) stored(ctx context.Context, owner, id string) (*storedAnswer, *apiError) {
	var data []byte
	var ok bool
	var err error
	if len(id) <= maxID {
		data, ok, err = g.cfg.Store.Get(ctx, storeKey(owner, id))
	}
	if err != nil {
		return nil, engineError(fmt.Errorf("the store of responses: %w", err))
	}
	if !ok {
		return nil, &apiError{status: http.StatusNotFound, code: "previous_response_not_found",
			message: fmt.Sprintf("response %q is not stored here: it is too old, or was made with store: false", clip(id))}
	}
	kept := &storedAnswer{}
	if err := json.Unmarshal(data, kept); err != nil {
		return nil, badStore()
	}
	return kept, nil
}

// responseInput reads the input, and all items into turns.
func (f *fields) responseInput(t *responseTask, items []any) {
	switch v, _ := f.get("input"); v := v.(type) {
	case nil:
	case string:
		items = append(items, dict("role", roleUser, "content", v))
	case *jinja.List:
		items = append(items, v.Items...)
	default:
		f.fail("input", "must be a string or an array of items, not %s", kindOf(v))
	}
	if instructions, ok := f.text("instructions"); ok {
		t.talk.turns = append(t.talk.turns, turn{role: roleSystem, text: instructions})
	}
	first := len(t.talk.turns)
	all := newFields(dict("input", &jinja.List{Items: items}))
	all.first = f.first
	all.each("input", maxMessages, func(item *fields) { item.responseItem(&t.talk) })
	if len(t.talk.turns) == first { // a probe
		t.talk.turns = append(t.talk.turns, turn{role: roleUser})
	}
	for _, item := range items {
		if t.store {
			t.items = append(t.items, jsonOf(item))
		}
	}
}

// responseItem reads one item. Items of kinds that are not known are left out.
func (f *fields) responseItem(c *conversation) {
	kind, _ := f.text("type")
	role, hasRole := f.text("role")
	switch {
	case kind == "message", kind == "" && hasRole:
		f.responseMessage(c, role)
	case kind == "reasoning":
		if text := f.responseReasoning(); text != "" {
			t := c.assistant()
			if t.text != "" || len(t.calls) > 0 {
				c.turns = append(c.turns, turn{role: roleAssistant})
				t = &c.turns[len(c.turns)-1]
			}
			t.reasoning += text
		}
	case kind == "function_call", kind == "custom_tool_call":
		f.responseCall(c, kind)
	case kind == "function_call_output", kind == "custom_tool_call_output":
		id, _ := f.text("call_id")
		c.turns = append(c.turns, turn{role: roleTool, callID: id, text: f.content("output", false)})
	case kind == "item_reference":
		f.fail("type", "items cannot be named by their id; send the item, or use previous_response_id")
	case kind == "":
		f.fail("type", "is required")
	}
}

// assistant is the turn of the assistant that is being read.
func (c *conversation) assistant() *turn {
	if n := len(c.turns); n == 0 || c.turns[n-1].role != roleAssistant {
		c.turns = append(c.turns, turn{role: roleAssistant})
	}
	return &c.turns[len(c.turns)-1]
}

func (f *fields) responseMessage(c *conversation, role string) {
	text := f.content("content", role != roleAssistant)
	switch role {
	case roleSystem, "developer":
		c.turns = append(c.turns, turn{role: roleSystem, text: text})
	case roleUser:
		c.turns = append(c.turns, turn{role: roleUser, text: text})
	case roleAssistant:
		t := c.assistant()
		if t.text != "" || len(t.calls) > 0 {
			c.turns = append(c.turns, turn{role: roleAssistant})
			t = &c.turns[len(c.turns)-1]
		}
		t.text = text
	default:
		f.fail("role", "%q is none of system, developer, user, assistant", clip(role))
	}
}

func (f *fields) responseCall(c *conversation, kind string) {
	k := call{}
	k.id, _ = f.text("call_id")
	if k.name, _ = f.text("name"); k.name == "" {
		f.fail("name", "is required")
	}
	if kind == "custom_tool_call" {
		input, _ := f.text("input")
		k.args = dict("input", input)
	} else {
		k.args = f.arguments("arguments")
	}
	t := c.assistant()
	t.calls = append(t.calls, k)
}

// responseReasoning is the text of a reasoning item, in the first of its forms
// that has some.
func (f *fields) responseReasoning() string {
	if sealed, ok := f.text("encrypted_content"); ok {
		if data, own := strings.CutPrefix(sealed, sealedPrefix); own {
			if plain, err := base64.StdEncoding.DecodeString(data); err == nil {
				return string([]rune(string(plain)))
			}
		}
	}
	for _, name := range []string{"content", "summary"} {
		var text strings.Builder
		f.each(name, maxParts, func(p *fields) {
			part, _ := p.text("text")
			text.WriteString(part)
		})
		if text.Len() > 0 {
			return text.String()
		}
	}
	return ""
}

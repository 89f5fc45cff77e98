package gateway

import (
	"slices"
	"strings"

	"kvasird/node/gateway/jinja"
)

// parseChat reads a body of /v1/chat/completions. Every error is a 4xx that
// names the field.
func parseChat(d *jinja.Dict) (*task, *apiError) {
	f := newFields(d)
	t := newTask()
	f.modelName(t)
	f.refuse(refused...)
	f.refuse("functions", "function_call", "best_of", "echo", "suffix")
	if v, ok := f.get("modalities"); ok {
		if l, isList := v.(*jinja.List); !isList || slices.ContainsFunc(l.Items, func(m any) bool { return m != "text" }) {
			f.fail("modalities", "only [\"text\"] is supported")
		}
	}
	f.sampling(&t.sampling)
	t.sampling.MaxTokens = f.maxTokens("max_completion_tokens", "max_tokens")
	f.streaming(t)
	t.n, t.seed, t.stops = f.choices(), f.seed(), f.stops("stop")
	f.chatLogprobs(t)
	t.talk.args = f.templateArgs()
	f.chatTools(t)
	t.format = f.responseFormat("response_format", false)
	f.chatMessages(t)
	return t, f.err()
}

func (f *fields) modelName(t *task) {
	var ok bool
	if t.model, ok = f.text("model"); !ok || t.model == "" {
		f.fail("model", "is required; GET /v1/models lists what is served")
	}
}

// maxTokens is the first of these fields that is there.
func (f *fields) maxTokens(names ...string) int {
	limit := int64(0)
	for _, name := range slices.Backward(names) {
		if n, ok := f.whole(name, 1, maxTokens); ok {
			limit = n
		}
	}
	return int(limit)
}

func (f *fields) chatLogprobs(t *task) {
	t.extra.Logprobs = f.flag("logprobs")
	top, ok := f.whole("top_logprobs", 0, maxTop)
	if ok && !t.extra.Logprobs {
		f.fail("top_logprobs", "needs logprobs: true")
	}
	t.extra.Top = int(top)
}

// templateArgs are the switches that some templates have.
func (f *fields) templateArgs() *jinja.Dict {
	args := jinja.NewDict()
	if o, ok := f.object("chat_template_kwargs"); ok {
		for _, k := range o.d.Keys() {
			v, _ := o.d.Get(k)
			args.Set(k, v)
		}
	}
	if effort, ok := f.text("reasoning_effort"); ok {
		setEffort(args, effort)
	}
	return args
}

// setEffort says how much to think, in the words that templates know.
func setEffort(args *jinja.Dict, effort string) {
	if effort == "none" {
		args.Set("enable_thinking", false)
		return
	}
	args.Set("reasoning_effort", effort)
}

func (f *fields) chatTools(t *task) {
	f.each("tools", maxTools, func(item *fields) {
		if kind, _ := item.text("type"); kind != "function" {
			item.fail("type", "only \"function\" is supported, not %q", clip(kind))
			return
		}
		fn, ok := item.object("function")
		if !ok {
			item.fail("function", "is required")
			return
		}
		name := fn.toolName(&t.talk)
		schema, _ := fn.object("parameters")
		made := tool{name: name, shown: item.d}
		if schema != nil {
			made.schema = schema.d
		}
		t.talk.tools = append(t.talk.tools, made)
	})
	t.choice = f.toolChoice(&t.talk, func(o *fields) string {
		if kind, _ := o.text("type"); kind != "function" {
			o.fail("type", "only \"function\" is supported, not %q", clip(kind))
			return ""
		}
		fn, ok := o.object("function")
		if !ok {
			o.fail("function", "is required")
			return ""
		}
		name, _ := fn.text("name")
		return name
	})
	if _, ok := f.get("parallel_tool_calls"); ok {
		t.parallel = f.flag("parallel_tool_calls")
	}
}

func (f *fields) chatMessages(t *task) {
	f.each("messages", maxMessages, func(m *fields) {
		t.talk.turns = append(t.talk.turns, m.chatMessage())
	})
	if len(t.talk.turns) == 0 {
		f.fail("messages", "must be an array of 1 to %d messages", maxMessages)
	}
}

// chatMessage reads one message.
func (f *fields) chatMessage() turn {
	t := turn{}
	t.role, _ = f.text("role")
	t.name, _ = f.text("name")
	needed := true // content
	switch t.role {
	case roleSystem, roleUser:
	case "developer": // the newer name of system, which templates do not know
		t.role = roleSystem
	case roleAssistant:
		needed = false
		f.refuse("function_call", "audio")
		t.calls = f.chatCalls()
		t.reasoning, _ = f.text("reasoning_content")
		if t.reasoning == "" { // the other name that clients know
			if v, _ := f.get("reasoning"); v != nil {
				t.reasoning, _ = f.text("reasoning")
			}
		}
	case roleTool:
		needed = false
		t.callID, _ = f.text("tool_call_id")
	case "function":
		f.fail("role", "results of the old functions are not supported; use tools")
	default:
		f.fail("role", "%q is none of system, developer, user, assistant, tool", clip(t.role))
	}
	t.text = f.content("content", needed)
	return t
}

func (f *fields) chatCalls() (calls []call) {
	f.each("tool_calls", maxTools, func(c *fields) {
		fn, ok := c.object("function")
		if !ok {
			c.fail("function", "is required")
			return
		}
		k := call{args: fn.arguments("arguments")}
		k.id, _ = c.text("id")
		if k.name, _ = fn.text("name"); k.name == "" {
			fn.fail("name", "is required")
		}
		calls = append(calls, k)
	})
	return calls
}

// content joins text parts.
func (f *fields) content(name string, needed bool) string {
	v, _ := f.get(name)
	switch v := v.(type) {
	case string:
		return v
	case nil:
		if needed {
			f.fail(name, "is required")
		}
	case *jinja.List:
		var text strings.Builder
		f.each(name, maxParts, func(p *fields) { text.WriteString(p.textPart()) })
		return text.String()
	default:
		f.fail(name, "must be a string or an array of parts, not %s", kindOf(v))
	}
	return ""
}

// textPart is the text of a part of a message, in any of the names for it.
func (f *fields) textPart() string {
	name := "text"
	switch kind, _ := f.text("type"); kind {
	case "text", "input_text", "output_text":
	case "refusal":
		name = "refusal"
	default:
		f.fail("type", "only \"text\" parts are supported, not %q", clip(kind))
		return ""
	}
	text, ok := f.text(name)
	if !ok {
		f.fail(name, "must be a string")
	}
	return text
}

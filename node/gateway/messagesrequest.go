package gateway

import (
	"strings"

	"kvasird/node/gateway/jinja"
)

// billingHeader begins a system block that Claude Code sends for its own server.
// It is another text in each request, so it would spoil every cached prefix.
const billingHeader = "x-anthropic-billing-header:"

// noImage stands for an image in a tool's result: a model that cannot see it can
// still go on, which a refused request could not.
const noImage = "[an image, which this model cannot see]"

// parseMessages reads a body of Anthropic's /v1/messages.
func parseMessages(d *jinja.Dict) (*task, *apiError) {
	f := newFields(d)
	t := f.messagesTask()
	if _, ok := f.get("max_tokens"); !ok {
		f.fail("max_tokens", "is required")
	}
	t.sampling.MaxTokens = f.maxTokens("max_tokens")
	t.stream = f.flag("stream")
	return t, f.err()
}

// parseCount reads a body of /v1/messages/count_tokens.
func parseCount(d *jinja.Dict) (*task, *apiError) {
	f := newFields(d)
	return f.messagesTask(), f.err()
}

func (f *fields) messagesTask() *task {
	t := newTask()
	f.modelName(t)
	f.nucleus(&t.sampling)
	t.stops = f.stops("stop_sequences")
	t.talk.args = jinja.NewDict()
	if o, ok := f.object("thinking"); ok {
		switch kind, _ := o.text("type"); kind {
		case "enabled":
			t.talk.args.Set("enable_thinking", true)
		case "disabled":
			t.talk.args.Set("enable_thinking", false)
		case "adaptive": // the model's own choice
		default:
			o.fail("type", "%q is none of enabled, adaptive, disabled", clip(kind))
		}
	}
	if o, ok := f.object("output_config"); ok {
		if effort, ok := o.text("effort"); ok {
			setEffort(t.talk.args, effort)
		}
		if _, ok := o.get("format"); ok {
			t.format = o.responseFormat("format", true)
		}
	}
	if _, ok := f.get("output_format"); ok { // its older name
		t.format = f.responseFormat("output_format", true)
	}
	f.refuse("mcp_servers")
	f.messagesTools(t)
	t.talk.turns = append(t.talk.turns, turn{role: roleSystem, text: f.systemText("system")})
	f.each("messages", maxMessages, func(m *fields) { m.claudeTurns(&t.talk) })
	if v, _ := f.get("messages"); harmless(v) {
		f.fail("messages", "must be an array of 1 to %d messages", maxMessages)
	}
	return t
}

// messagesTools reads tools. Those of Anthropic's own servers have no schema, and
// none of them is here: they are left out.
func (f *fields) messagesTools(t *task) {
	f.each("tools", maxTools, func(item *fields) {
		schema, ok := item.object("input_schema")
		if !ok {
			return
		}
		description, _ := item.get("description")
		t.talk.tools = append(t.talk.tools, functionTool(item.toolName(&t.talk), description, schema.d))
	})
	t.choice.param = "tool_choice"
	o, ok := f.object("tool_choice")
	if !ok || len(t.talk.tools) == 0 {
		return
	}
	switch kind, _ := o.text("type"); kind {
	case "auto":
	case "any":
		t.choice.mode = toolsRequired
	case "none":
		t.choice.mode = toolsNone
	case "tool":
		t.choice.mode = toolsNamed
		if t.choice.name, _ = o.text("name"); t.talk.named(t.choice.name) == nil {
			o.fail("name", "there is no tool %q in tools", clip(t.choice.name))
		}
	default:
		o.fail("type", "%q is none of auto, any, tool, none", clip(kind))
	}
	t.parallel = !o.flag("disable_parallel_tool_use")
}

// systemText joins the blocks of a system prompt.
func (f *fields) systemText(name string) string {
	v, _ := f.get(name)
	switch v := v.(type) {
	case nil:
	case string:
		return v
	case *jinja.List:
		var texts []string
		f.each(name, maxParts, func(b *fields) {
			if text := b.textPart(); !strings.HasPrefix(text, billingHeader) {
				texts = append(texts, text)
			}
		})
		return strings.Join(texts, "\n\n")
	default:
		f.fail(name, "must be a string or an array of blocks, not %s", kindOf(v))
	}
	return ""
}

// claudeTurns reads one message. A user's may hold results of tools, which are
// turns of their own and come first.
func (f *fields) claudeTurns(c *conversation) {
	role, _ := f.text("role")
	switch role {
	case roleSystem:
		c.turns = append(c.turns, turn{role: roleSystem, text: f.systemText("content")})
		return
	case roleUser, roleAssistant:
	default:
		f.fail("role", "%q is none of user, assistant, system", clip(role))
		return
	}
	var t claudeTurn
	v, _ := f.get("content")
	switch v := v.(type) {
	case string:
		t.text.WriteString(v)
	case *jinja.List:
		results := len(c.turns)
		f.each("content", maxParts, func(b *fields) { b.claudeBlock(c, &t) })
		if role == roleUser && len(c.turns) > results && t.text.Len() == 0 {
			return // results alone
		}
	default:
		f.fail("content", "must be a string or an array of blocks, not %s", kindOf(v))
	}
	c.turns = append(c.turns, turn{role: role, text: t.text.String(), reasoning: t.reasoning.String(), calls: t.calls})
}

// claudeTurn is a turn that is put together of blocks.
type claudeTurn struct {
	text, reasoning strings.Builder
	calls           []call
}

// claudeBlock reads one block into the turn, or as a result before it. Blocks of
// kinds that are not known are left out, as are those of Anthropic's own tools.
func (f *fields) claudeBlock(c *conversation, t *claudeTurn) {
	kind, _ := f.text("type")
	switch kind {
	case "text":
		t.text.WriteString(f.textPart())
	case "thinking":
		text, _ := f.text("thinking")
		t.reasoning.WriteString(text)
	case "tool_use":
		k := call{args: f.arguments("input")}
		k.id, _ = f.text("id")
		if k.name, _ = f.text("name"); k.name == "" {
			f.fail("name", "is required")
		}
		t.calls = append(t.calls, k)
	case "tool_result":
		id, _ := f.text("tool_use_id")
		c.turns = append(c.turns, turn{role: roleTool, callID: id, text: f.resultText()})
	case "image":
		f.fail("type", "this model takes no images")
	case "document", "search_result":
		t.text.WriteString(f.documentText(kind))
	case "":
		f.fail("type", "is required")
	}
}

// resultText is what a tool gave: text, blocks or nothing.
func (f *fields) resultText() string {
	var text strings.Builder
	if v, _ := f.get("content"); v != nil {
		if s, ok := v.(string); ok {
			text.WriteString(s)
		} else {
			f.each("content", maxParts, func(b *fields) {
				switch kind, _ := b.text("type"); kind {
				case "text":
					text.WriteString(b.textPart())
				case "image":
					text.WriteString(noImage)
				case "document", "search_result":
					text.WriteString(b.documentText(kind))
				}
			})
		}
	}
	if f.flag("is_error") && text.Len() == 0 {
		return "the tool failed"
	}
	return text.String()
}

// documentText is the text of a document; other forms of one are refused.
func (f *fields) documentText(kind string) string {
	text, _ := f.text("title")
	if text != "" {
		text += "\n"
	}
	if kind == "search_result" {
		return text + f.content("content", true)
	}
	source, ok := f.object("source")
	if !ok {
		f.fail("source", "is required")
		return ""
	}
	switch form, _ := source.text("type"); form {
	case "text":
		data, _ := source.text("data")
		return text + data
	case "content":
		return text + source.content("content", true)
	default:
		source.fail("type", "only documents of text are supported, not %q", clip(form))
	}
	return ""
}

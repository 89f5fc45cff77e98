package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

// prompt is a rendered conversation and what reading its answer needs to know.
type prompt struct {
	text    string
	family  toolcall.Family
	options toolcall.Options
}

// render puts a conversation through the model's own template.
func (m *servedModel) render(ctx context.Context, now time.Time, c *conversation, choice toolMode) (*prompt, *apiError) {
	if m.templateErr != nil {
		return nil, &apiError{status: 400, code: "no_chat_template", param: "model",
			message: fmt.Sprintf("the chat template of model %q cannot be used: %v", m.ID, m.templateErr)}
	}
	begun := c.settle()
	p := &prompt{family: m.family}
	vars := map[string]any{}
	if c.args != nil {
		for _, k := range c.args.Keys() {
			vars[k], _ = c.args.Get(k)
		}
	}
	vars["tools"], vars["documents"] = nil, nil
	turns := c
	switch {
	case m.knowsTools && len(c.tools) > 0 && choice != toolsNone:
		list := &jinja.List{}
		for _, t := range c.tools {
			list.Items = append(list.Items, t.shown)
		}
		vars["tools"] = list
	case !m.knowsTools:
		p.family = toolcall.Hermes
		turns = c.plain(choice)
	}
	vars["messages"] = turns.messages(p.family)
	vars["add_generation_prompt"] = true
	vars["bos_token"], vars["eos_token"] = m.BOS, m.EOS
	text, e := m.template.renderWithin(ctx, now, vars)
	if e != nil {
		return nil, e
	}
	p.options.NoCalls, p.options.NoReasoning = choice == toolsNone, !m.reasons
	p.options.InReasoning = toolcall.InReasoning(p.family, text)
	p.text = text
	if begun != nil {
		p.goOnFrom(begun)
	}
	return p, nil
}

// goOnFrom appends the beginning of an answer that the client gave.
func (p *prompt) goOnFrom(begun *turn) {
	if p.options.InReasoning {
		p.text += begun.reasoning
		if begun.text == "" {
			return
		}
		p.text += "\n</think>\n\n"
		p.options.InReasoning = false
	}
	if p.family == toolcall.GPTOSS {
		p.text += "<|channel|>final<|message|>"
	}
	p.text += begun.text
}

// chatTemplate is a parsed template.
type chatTemplate struct{ *jinja.Template }

func (t chatTemplate) renderWithin(ctx context.Context, now time.Time, vars map[string]any) (string, *apiError) {
	ctx, cancel := context.WithTimeoutCause(ctx, renderTimeout, fmt.Errorf("rendering took longer than %v", renderTimeout))
	defer cancel()
	text, err := t.Render(ctx, now, vars)
	if err == nil {
		return text, nil
	}
	var raised *jinja.RaisedError
	if errors.As(err, &raised) {
		return "", badParam("messages", "the model's chat template refuses this conversation: "+raised.Message)
	}
	return "", badParam("messages", "the model's chat template failed: "+err.Error())
}

// plain writes tools, calls and results as text, in the syntax of Hermes, for a
// template that knows none of them.
func (c *conversation) plain(choice toolMode) *conversation {
	out := &conversation{}
	if len(c.tools) > 0 && choice != toolsNone {
		out.turns = append(out.turns, turn{role: roleSystem, text: c.plainTools()})
	}
	var results []string
	for i, t := range c.turns {
		switch {
		case t.role == roleTool: // those in a row are one turn
			results = append(results, "<tool_response>\n"+t.text+"\n</tool_response>")
			if i+1 < len(c.turns) && c.turns[i+1].role == roleTool {
				continue
			}
			t = turn{role: roleUser, text: strings.Join(results, "\n")}
			results = nil
		case t.role == roleSystem && len(out.turns) > 0:
			out.turns[0].text = t.text + "\n\n" + out.turns[0].text
			continue
		case len(t.calls) > 0:
			texts := slices.DeleteFunc([]string{t.text}, func(s string) bool { return s == "" })
			for _, k := range t.calls {
				texts = append(texts, "<tool_call>\n"+string(jsonOf(dict("name", k.name, "arguments", k.args)))+"\n</tool_call>")
			}
			t = turn{role: t.role, text: strings.Join(texts, "\n"), reasoning: t.reasoning}
		}
		out.turns = append(out.turns, t)
	}
	return out
}

func (c *conversation) plainTools() string {
	var b strings.Builder
	b.WriteString("You may call one or more functions to help with the user's query. Their signatures are:\n<tools>\n")
	for _, t := range c.tools {
		b.Write(jsonOf(t.shown))
		b.WriteString("\n")
	}
	b.WriteString("</tools>\nTo call a function, answer with its name and arguments as JSON:\n" +
		"<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>")
	return b.String()
}

// Message is one turn of a conversation.
type Message struct{ Role, Content string }

// Render puts a conversation through a model's own chat template, ready for an
// answer. Errors are for the person who asked.
func (g *Gateway) Render(ctx context.Context, model string, turns []Message) (string, error) {
	m, failed := g.textModel(model)
	if failed != nil {
		return "", failed
	}
	c := &conversation{}
	for _, t := range turns {
		c.turns = append(c.turns, turn{role: t.Role, text: t.Content})
	}
	p, failed := m.render(ctx, g.cfg.Now(), c, toolsAuto)
	if failed != nil {
		return "", failed
	}
	return p.text, nil
}

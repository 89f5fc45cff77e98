package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvasird/node/gateway/jinja"
)

// prompt renders the conversation with the model's own template.
func (m *servedModel) prompt(ctx context.Context, now time.Time, q *chatRequest) (string, *apiError) {
	if m.templateErr != nil {
		return "", &apiError{status: 400, code: "no_chat_template", param: "model",
			message: fmt.Sprintf("the chat template of model %q cannot be used: %v", m.ID, m.templateErr)}
	}
	vars := map[string]any{}
	if q.templateArgs != nil {
		for _, k := range q.templateArgs.Keys() {
			vars[k], _ = q.templateArgs.Get(k)
		}
	}
	vars["messages"] = &jinja.List{Items: q.messages}
	vars["add_generation_prompt"] = true
	vars["bos_token"], vars["eos_token"] = m.BOS, m.EOS
	ctx, cancel := context.WithTimeoutCause(ctx, renderTimeout, fmt.Errorf("rendering took longer than %v", renderTimeout))
	defer cancel()
	text, err := m.template.Render(ctx, now, vars)
	if err == nil {
		return text, nil
	}
	var raised *jinja.RaisedError
	if errors.As(err, &raised) {
		return "", badParam("messages", "the model's chat template refuses this conversation: "+raised.Message)
	}
	return "", badParam("messages", "the model's chat template failed: "+err.Error())
}

// Message is one turn of a conversation.
type Message struct{ Role, Content string }

// Render puts a conversation through a model's own chat template, ready for an
// answer. Errors are for the person who asked.
func (g *Gateway) Render(ctx context.Context, model string, turns []Message) (string, error) {
	m, failed := g.model(model)
	if failed != nil {
		return "", failed
	}
	q := &chatRequest{templateArgs: jinja.NewDict()}
	for _, t := range turns {
		d := jinja.NewDict()
		d.Set("role", t.Role)
		d.Set("content", t.Content)
		q.messages = append(q.messages, d)
	}
	text, failed := m.prompt(ctx, g.cfg.Now(), q)
	if failed != nil {
		return "", failed
	}
	return text, nil
}

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
	for _, k := range q.templateArgs.Keys() {
		vars[k], _ = q.templateArgs.Get(k)
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

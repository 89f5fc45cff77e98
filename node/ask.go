package node

import (
	"context"
	"errors"
	"io"
	"time"

	"kvasird/experts"
	"kvasird/node/api"
	"kvasird/node/carry"
	"kvasird/node/engine"
	"kvasird/node/gateway"
)

// Ask answers a question over the control API.
func (n *Node) Ask(ctx context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error) {
	name, model, err := n.answers.find(req.Model)
	if err != nil {
		return api.AskDone{}, err
	}
	prompt, err := n.prompt(ctx, name, model, req)
	if err != nil {
		return api.AskDone{}, &api.Error{Code: api.CodeBadRequest, Message: err.Error()}
	}
	started := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // frees the sequence when emit fails or a stop string came
	g, err := model.generate(ctx, engine.Request{
		Prompt: prompt, MaxTokens: req.MaxTokens, Temperature: req.Temperature, TopP: req.TopP, Seed: req.Seed,
	}, engine.Extra{})
	if err != nil {
		return api.AskDone{}, askError(err)
	}
	a := &asked{filter: gateway.TextFilter{Stops: req.Stop}, started: started, emit: emit}
	a.done.PromptTokens = len(prompt)
	for a.done.Finish == "" {
		if err := a.next(ctx, g); err != nil {
			return api.AskDone{}, askError(err)
		}
	}
	return a.done, nil
}

// prompt is the tokens of a question, through the chat template unless it is raw.
func (n *Node) prompt(ctx context.Context, name string, model answerer, req api.AskRequest) ([]int32, error) {
	text := req.Prompt
	if !req.Raw {
		turns := []gateway.Message{{Role: "user", Content: req.Prompt}}
		if req.System != "" {
			turns = append([]gateway.Message{{Role: "system", Content: req.System}}, turns...)
		}
		var err error
		if text, err = n.gateway.Render(ctx, name, turns); err != nil {
			return nil, err
		}
	}
	return model.Tokenize(text)
}

// asked is an answer on its way.
type asked struct {
	filter  gateway.TextFilter
	started time.Time
	emit    func(api.AskEvent) error
	done    api.AskDone
}

// next passes on one token, or the end.
func (a *asked) next(ctx context.Context, g generation) error {
	token, bytes, err := g.NextToken(ctx)
	if errors.Is(err, io.EOF) {
		a.done.Finish = g.Finish()
		a.done.Seconds = time.Since(a.started).Seconds()
		if text := a.filter.End(); text != "" {
			return a.emit(api.AskEvent{Text: text})
		}
		return nil
	}
	if err != nil {
		return err
	}
	if a.done.Tokens++; a.done.Tokens == 1 {
		a.done.FirstTokenSec = time.Since(a.started).Seconds()
	}
	text := a.filter.Add(bytes)
	if a.filter.Stopped() {
		a.done.Finish = "stop"
		a.done.Seconds = time.Since(a.started).Seconds()
	}
	return a.emit(api.AskEvent{Text: text, IDs: []int32{int32(token)}})
}

// askError gives an engine's error the code by which programs know it.
func askError(err error) error {
	var missing *experts.MissingError
	var long interface{ ContextLength() (prompt, limit int) }
	var full interface{ RetryAfter() time.Duration }
	code := api.CodeInternal
	switch {
	case errors.As(err, &missing):
		code = api.CodeCoverage
	case errors.As(err, &long):
		code = api.CodeBadRequest
	case errors.As(err, &full):
		code = api.CodeBusy
	case errors.Is(err, engine.ErrClosed), errors.Is(err, carry.ErrNobody):
		code = api.CodeNotReady
	}
	return &api.Error{Code: code, Message: err.Error()}
}

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"kvasird/experts"
	"kvasird/node/api"
	"kvasird/node/carry"
	"kvasird/node/engine"
	"kvasird/node/gateway"
)

// localOwner is who asks over the control socket: the same as a client on this machine
// over HTTP, without a key.
const localOwner = "127.0.0.1"

// Ask answers a question over the control API, within the time of a request over HTTP.
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
	limit := time.Duration(n.cfg.Deadline) * time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &api.Error{Code: api.CodeTooSlow, Message: fmt.Sprintf(
		"the answer took longer than %v, which is the most here: ask for a shorter one, or raise deadline in the configuration", limit)})
	defer cancel() // frees the sequence when emit fails or a stop string came
	g, err := model.generate(ctx, engine.Request{
		Prompt: prompt, MaxTokens: req.MaxTokens, Temperature: req.Temperature, TopP: req.TopP, Seed: req.Seed, Owner: localOwner,
	}, engine.Extra{})
	if err != nil {
		return api.AskDone{}, askError(ctx, err)
	}
	a := &asked{filter: gateway.TextFilter{Stops: req.Stop}, started: started, emit: emit}
	a.done.PromptTokens = len(prompt)
	for a.done.Finish == "" {
		if err := a.next(ctx, g); err != nil {
			return api.AskDone{}, askError(ctx, err)
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

// askError gives an engine's error the code by which programs know it. One that comes
// when the time is up is that.
func askError(ctx context.Context, err error) error {
	var late *api.Error
	if errors.As(context.Cause(ctx), &late) {
		return late
	}
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

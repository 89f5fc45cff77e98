package node

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
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

// Ask answers a question over the control API, within the time of a request over HTTP. In a
// network with a token the linked wallet pays for it, as for a client on this machine over HTTP.
func (n *Node) Ask(ctx context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error) {
	m, model, err := n.answers.find(req.Model)
	if err != nil {
		return api.AskDone{}, err
	}
	prompt, err := n.prompt(ctx, m.ID, model, req)
	if err != nil {
		return api.AskDone{}, &api.Error{Code: api.CodeBadRequest, Message: err.Error()}
	}
	a := &asked{filter: gateway.TextFilter{Stops: req.Stop}, emit: emit}
	a.done.PromptTokens = len(prompt)
	limit := time.Duration(n.cfg.Deadline) * time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &api.Error{Code: api.CodeTooSlow, Message: fmt.Sprintf(
		"the answer took longer than %v, which is the most here: ask for a shorter one, or raise deadline in the configuration", limit)})
	defer cancel() // frees the sequence when emit fails or a stop string came
	paid, err := n.charge(ctx, m, &req, len(prompt))
	if err != nil {
		return api.AskDone{}, askError(ctx, err)
	}
	working := ctx
	if paid != nil {
		working = paid.Context(ctx)
	}
	err = a.answer(working, model, engine.Request{
		Prompt: prompt, MaxTokens: req.MaxTokens, Temperature: req.Temperature, TopP: req.TopP, Seed: req.Seed, Owner: localOwner,
	})
	if paid != nil {
		paid.End(a.outcome(err))
	}
	if err != nil {
		return api.AskDone{}, askError(ctx, err)
	}
	return a.done, nil
}

// charge has the linked wallet pay for an answer; nil where nothing is paid. As over HTTP, who
// names no limit gets PaidAnswer, and nobody pays for a model that is not ready.
func (n *Node) charge(ctx context.Context, m gateway.Model, req *api.AskRequest, prompt int) (gateway.Charge, error) {
	if n.settlement == nil {
		return nil, nil
	}
	if err := m.Engine.Ready(); err != nil {
		return nil, &api.Error{Code: api.CodeNotReady, Message: err.Error()}
	}
	if req.MaxTokens == 0 {
		req.MaxTokens = gateway.PaidAnswer
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	return n.settlement.pay.Spend(ctx, localOwner, gateway.Cost{
		Model: m.Digest, Name: m.ID, Prompt: prompt, Answers: req.MaxTokens, Body: sha256.Sum256(body),
	})
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
	broken  bool // the engine ended it, not who asked nor the time
}

// answer passes on all of it.
func (a *asked) answer(ctx context.Context, model answerer, req engine.Request) error {
	a.started = time.Now()
	g, err := model.generate(ctx, req, engine.Extra{})
	for err == nil && a.done.Finish == "" {
		err = a.next(ctx, g)
	}
	return err
}

// outcome is what is paid for an answer that ended by err: what was made until then, and nothing
// of one that the engine could not finish.
func (a *asked) outcome(err error) gateway.Outcome {
	if a.done.Tokens == 0 && a.done.Finish == "" {
		return gateway.Outcome{Failed: err}
	}
	o := gateway.Outcome{Computed: a.done.PromptTokens + a.done.Tokens, Failed: err}
	if !a.broken {
		o.Delivered = o.Computed
	}
	return o
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
		a.broken = ctx.Err() == nil
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
	var known *api.Error
	if errors.As(context.Cause(ctx), &known) || errors.As(err, &known) {
		return known
	}
	var missing *experts.MissingError
	var long interface{ ContextLength() (prompt, limit int) }
	var full interface{ RetryAfter() time.Duration }
	var unpaid *gateway.PaymentError
	code := api.CodeInternal
	switch {
	case errors.As(err, &unpaid):
		code = unpaidCode(unpaid.Status)
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

// unpaidCode is the code of what the gateway answers with a status when nobody has paid.
func unpaidCode(status int) api.Code {
	switch status {
	case http.StatusPaymentRequired, http.StatusForbidden:
		return api.CodePayment
	case http.StatusNotFound:
		return api.CodeNotFound
	case http.StatusTooManyRequests:
		return api.CodeBusy
	case http.StatusServiceUnavailable:
		return api.CodeNotReady
	}
	return api.CodeBadRequest
}

package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// chat is POST /v1/chat/completions.
func (g *Gateway) chat(w http.ResponseWriter, r *http.Request) {
	select {
	case g.requests <- struct{}{}:
		defer func() { <-g.requests }()
	default:
		writeError(w, &apiError{status: http.StatusTooManyRequests, code: "too_many_requests", retryAfter: time.Second,
			message: fmt.Sprintf("%d requests are running, which is the most at once", cap(g.requests))})
		return
	}
	q, m, e := g.prepare(w, r)
	if e != nil {
		writeError(w, e)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel() // frees the engine's slot, whatever ended the answer
	stream, err := m.Engine.Start(ctx, q.sampling)
	if err != nil {
		writeError(w, engineError(err))
		return
	}
	a := &answer{
		id: fmt.Sprintf("chatcmpl-%016x%016x", g.cfg.Random(), g.cfg.Random()), created: g.cfg.Now().Unix(), model: m.ID,
		prompt: len(q.sampling.Prompt), stream: stream, filter: TextFilter{Stops: q.stops}, waits: g.waits,
	}
	if q.stream {
		a.sendStream(ctx, w, q.includeUsage)
	} else {
		a.sendWhole(ctx, w)
	}
}

// prepare reads and checks the request and renders its prompt. Few do it at
// once, since a decoded body is many times its size.
func (g *Gateway) prepare(w http.ResponseWriter, r *http.Request) (*chatRequest, *servedModel, *apiError) {
	body, e := readBody(w, r, g.waits.body)
	if e != nil {
		return nil, nil, e
	}
	select {
	case g.preparing <- struct{}{}:
		defer func() { <-g.preparing }()
	case <-r.Context().Done():
		return nil, nil, &apiError{status: statusClientClosed, message: "client closed the request"}
	}
	q, e := parseChat(body)
	if e != nil {
		return nil, nil, e
	}
	m, e := g.model(q.model)
	if e != nil {
		return nil, nil, e
	}
	if q.sampling.Seed = uint32(g.cfg.Random()); q.seed != nil {
		q.sampling.Seed = *q.seed
	}
	for id := range q.sampling.LogitBias {
		if int(id) >= m.VocabSize {
			return nil, nil, badParam("logit_bias", fmt.Sprintf("logit_bias: token %d is not in the model's vocabulary of %d", id, m.VocabSize))
		}
	}
	text, e := m.prompt(r.Context(), g.cfg.Now(), q)
	if e != nil {
		return nil, nil, e
	}
	tokens, err := m.Engine.Tokenize(text)
	if err != nil {
		return nil, nil, badParam("messages", "the prompt cannot be tokenized: "+err.Error())
	}
	if len(tokens) == 0 {
		return nil, nil, badParam("messages", "messages: the prompt is empty")
	}
	q.sampling.Prompt = tokens
	return q, m, nil
}

// readBody reads the body within its limits of size and time.
func readBody(w http.ResponseWriter, r *http.Request, limit time.Duration) ([]byte, *apiError) {
	if enc := r.Header.Get("Content-Encoding"); enc != "" && lower(enc) != "identity" {
		return nil, &apiError{status: http.StatusUnsupportedMediaType, code: "unsupported_encoding",
			message: fmt.Sprintf("Content-Encoding %q is not supported; send the body as it is", clip(enc))}
	}
	rc := http.NewResponseController(w)
	// A recorder in a test has no deadlines; a connection always has.
	_ = rc.SetReadDeadline(time.Now().Add(limit))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil { // else what is left of the body must not be waited for
		_ = rc.SetReadDeadline(time.Time{})
	}
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, &apiError{status: http.StatusRequestEntityTooLarge, code: "body_too_large",
			message: fmt.Sprintf("the body is larger than %d bytes", maxBody)}
	case err != nil:
		w.Header().Set("Connection", "close")
		return nil, &apiError{status: http.StatusRequestTimeout, code: "body_not_read",
			message: fmt.Sprintf("the body did not arrive within %v: %v", limit, err)}
	}
	return body, nil
}

// answer is one running completion and its shape on the wire.
type answer struct {
	id      string
	created int64
	model   string
	prompt  int // tokens
	tokens  int // of the answer, up to where it was cut
	stream  Stream
	filter  TextFilter
	waits   waits
}

// next waits for text that can go out. finish is set with the last of it.
func (a *answer) next(ctx context.Context) (text, finish string, err error) {
	piece, err := a.stream.Next(ctx)
	if errors.Is(err, io.EOF) {
		text, finish = a.filter.End(), a.stream.Finish()
	} else if err != nil {
		return "", "", err
	} else {
		a.tokens++
		text = a.filter.Add(piece)
	}
	if a.filter.Stopped() {
		finish = "stop"
	}
	return text, finish, nil
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

func (a *answer) usage() *usage {
	return &usage{a.prompt, a.tokens, a.prompt + a.tokens}
}

// message is a whole message or a delta of one.
type message struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type choice struct {
	Index    int      `json:"index"`
	Message  *message `json:"message,omitempty"`
	Delta    *message `json:"delta,omitempty"`
	Logprobs any      `json:"logprobs"`
	Finish   *string  `json:"finish_reason"`
}

// completion is chat.completion and chat.completion.chunk.
type completion struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

func (a *answer) completion(object string, choices ...choice) completion {
	return completion{ID: a.id, Object: object, Created: a.created, Model: a.model, Choices: choices}
}

func (a *answer) sendWhole(ctx context.Context, w http.ResponseWriter) {
	var b strings.Builder
	for {
		text, finish, err := a.next(ctx)
		if err != nil {
			writeError(w, engineError(err))
			return
		}
		b.WriteString(text)
		if finish == "" {
			continue
		}
		whole := b.String()
		c := a.completion("chat.completion", choice{Message: &message{Role: "assistant", Content: &whole}, Finish: &finish})
		c.Usage = a.usage()
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(a.waits.write))
		writeJSON(w, http.StatusOK, c)
		return
	}
}

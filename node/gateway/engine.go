package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"kvasird/node/gateway/grammar"
)

// Engine generates tokens for one model. It is safe for concurrent use.
//
// Errors that have one of these methods are the client's to act on: RetryAfter()
// time.Duration, the queue is full (429); ContextLength() (prompt, limit int),
// the prompt does not fit (400); PaymentRequired() bool, somebody must pay first
// (402); Lacks() Abilities, what of them the engine turned out not to have, so that
// the request is refused for it (400) or goes on without. Every other error is a 503
// whose reason is the error's text.
//
// An engine that can do more implements ExtraEngine or EmbedEngine too.
type Engine interface {
	// Ready is nil once a token went through every part that serves the
	// model, else it says what is missing.
	Ready() error
	// Tokenize splits a rendered prompt, special tokens included.
	Tokenize(prompt string) ([]int32, error)
	// Start queues a request. The end of ctx ends it and frees what it holds.
	Start(ctx context.Context, req Request) (Stream, error)
}

// Stream is a running generation, read by one goroutine. It may be a CachedStream
// and, where log-probabilities were asked for, is a ProbStream too.
type Stream interface {
	// Next waits for the next token, the end token included, and returns its
	// bytes, which may be part of a rune or none and are the caller's. io.EOF
	// ends a complete answer. When ctx ends while nothing is there, its error is
	// returned and Next may be called again. The engine may be ahead of what was
	// read.
	Next(ctx context.Context) ([]byte, error)
	// Finish says why the answer is complete: "stop" or "length".
	Finish() string
}

// Request is one generation.
type Request struct {
	Prompt           []int32
	MaxTokens        int     // 0: as many as fit the context; more than fit are clipped
	Temperature      float32 // 0: greedy
	TopK             int     // 0: off
	TopP             float32 // 1: off
	MinP             float32 // 0: off
	Seed             uint32
	RepeatPenalty    float32 // 1: off
	FrequencyPenalty float32
	PresencePenalty  float32
	LogitBias        map[int32]float32
	Owner            string // who asks, by key or else by address: an engine has owners take turns
}

// MaxGrammar bounds Extra.Grammar, in bytes.
const MaxGrammar = grammar.MaxText

// Extra is what some requests ask for beyond Request.
type Extra struct {
	// Grammar is the GBNF, start rule "root", that the answer must match. With
	// Triggers the answer is free until it has one of these texts; the grammar
	// then holds from the beginning of that text on.
	Grammar  string
	Triggers []string
	// Special makes control tokens come with their text, the end token excepted.
	Special  bool
	Logprobs bool
	Top      int // with Logprobs: alternatives of each token
}

func (x *Extra) none() bool { return x.Grammar == "" && !x.Special && !x.Logprobs }

// Abilities are the wishes of Extra that an engine serves.
type Abilities struct{ Grammar, Special, Logprobs bool }

// ExtraEngine is an Engine that serves wishes of Extra.
type ExtraEngine interface {
	Abilities() Abilities
	// StartExtra is Start with wishes that the engine is able to serve.
	StartExtra(ctx context.Context, req Request, extra Extra) (Stream, error)
}

// EmbedEngine is an Engine whose model has embeddings.
type EmbedEngine interface {
	// Embed returns one vector for each prompt, in their order. The end of ctx ends
	// it. owner is who asks, as in Request.
	Embed(ctx context.Context, owner string, prompts [][]int32) ([][]float32, error)
}

// CachedStream is a Stream that knows how much of the prompt was not computed
// again. It is asked after the first token.
type CachedStream interface{ Cached() int }

// ProbStream is a Stream with log-probabilities.
type ProbStream interface {
	// Prob describes the token that Next returned last.
	Prob() (chosen TokenProb, top []TokenProb)
}

// TokenProb is a token with the natural logarithm of its probability.
type TokenProb struct {
	ID      int32
	Bytes   []byte // empty for a control token
	Logprob float32
}

// start queues a generation and says in words what the engine cannot do. What the
// engine turns out to lack, and the answer can do without, q asks for no more.
func (q *ready) start(ctx context.Context, req Request) (Stream, *apiError) {
	for {
		stream, err := q.m.start(ctx, req, q.extra)
		if err == nil {
			return stream, nil
		}
		e := engineError(causeOf(ctx, err))
		var lacking interface{ Lacks() Abilities }
		if e.status != http.StatusServiceUnavailable || !errors.As(err, &lacking) {
			return nil, e
		}
		if less, refusal := q.without(lacking.Lacks()); refusal != nil {
			return nil, refusal
		} else if !less {
			return nil, e
		}
	}
}

func (m *servedModel) start(ctx context.Context, req Request, extra Extra) (Stream, error) {
	if able, ok := m.Engine.(ExtraEngine); ok && !extra.none() {
		return able.StartExtra(ctx, req, extra)
	}
	return m.Engine.Start(ctx, req)
}

func (m *servedModel) abilities() Abilities {
	if able, ok := m.Engine.(ExtraEngine); ok {
		return able.Abilities()
	}
	return Abilities{}
}

// errWaiting says that nothing came in time; the answer goes on.
var errWaiting = errors.New("no token yet")

// noWait is a limit for nextWithin: only what is there already.
const noWait time.Duration = -1

// over is a context that has ended.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nextWithin is Next with a limit on the wait, unless it is 0.
func nextWithin(ctx context.Context, s Stream, d time.Duration) ([]byte, error) {
	piece, err := s.Next(over)
	switch {
	case !errors.Is(err, context.Canceled):
		return piece, causeOf(ctx, err)
	case d == noWait:
		return nil, errWaiting
	}
	limited := ctx
	if d > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeoutCause(ctx, d, errWaiting)
		defer cancel()
	}
	piece, err = s.Next(limited)
	if errors.Is(err, context.DeadlineExceeded) && context.Cause(limited) == errWaiting {
		return piece, errWaiting
	}
	return piece, causeOf(ctx, err)
}

// limit ends a request that took as long as one may, with an error that says so.
func (g *Gateway) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, g.cfg.Limit, &apiError{
		status: http.StatusGatewayTimeout, code: codeTooSlow, final: true,
		message: fmt.Sprintf("the request took longer than %v, which is the most here: ask for a shorter answer", g.cfg.Limit),
	})
}

// causeOf is an engine's error, or why the request was over by then.
func causeOf(ctx context.Context, err error) error {
	var over *apiError
	if err != nil && err != io.EOF && errors.As(context.Cause(ctx), &over) {
		return over
	}
	return err
}

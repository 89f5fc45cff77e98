package carry

import (
	"errors"
	"fmt"
	"time"

	"kvasird/node/gateway"
)

// ErrNobody says that nobody answers for the model now.
var ErrNobody = errors.New("no node that can be reached answers for the model now")

// RefusedError is what a server answered instead of tokens, or among them.
type RefusedError struct {
	Peer string
	Code Code
	Text string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("node %s: %v: %s", e.Peer, e.Code, e.Text)
}

// BusyError is a RefusedError of a server that has too much to do.
type BusyError struct {
	RefusedError
	Retry time.Duration
}

// Unwrap makes errors.As find the RefusedError.
func (e *BusyError) Unwrap() error { return &e.RefusedError }

// RetryAfter is when there may be a place.
func (e *BusyError) RetryAfter() time.Duration { return e.Retry }

// LongError says that a prompt leaves no room for an answer, or that an input of embeddings, or all
// of them together, are too long.
type LongError struct {
	Prompt, Limit int
	Input         bool
}

func (e *LongError) Error() string {
	if e.Input {
		return fmt.Sprintf("the input has %d tokens; the nodes that answer take %d", e.Prompt, e.Limit)
	}
	return fmt.Sprintf("the prompt has %d tokens; the context of the nodes that answer holds %d, with at least one for the answer", e.Prompt, e.Limit)
}

// ContextLength returns both numbers.
func (e *LongError) ContextLength() (prompt, limit int) { return e.Prompt, e.Limit }

// LacksError is a RefusedError of a server that cannot serve a wish of the request.
type LacksError struct {
	RefusedError
	lacks gateway.Abilities
}

// Unwrap makes errors.As find the RefusedError.
func (e *LacksError) Unwrap() error { return &e.RefusedError }

// Lacks is what the server cannot serve.
func (e *LacksError) Lacks() gateway.Abilities { return e.lacks }

// errorOf is a refusal as clients see it.
func errorOf(peer string, r *refusal) error {
	refused := RefusedError{peer, r.code, r.text}
	switch r.code {
	case CodeBusy:
		return &BusyError{refused, r.retry}
	case CodeLong:
		return &LongError{Prompt: r.prompt, Limit: r.limit}
	case CodeLacks:
		return &LacksError{refused, r.lacks}
	}
	return &refused
}

// refusalOf is how a server tells an error of what it answers from.
func refusalOf(err error) *refusal {
	var r *refusal
	var busy interface{ RetryAfter() time.Duration }
	var long interface{ ContextLength() (prompt, limit int) }
	var lacking interface{ Lacks() gateway.Abilities }
	switch {
	case errors.As(err, &r):
		return r
	case errors.As(err, &busy):
		return &refusal{code: CodeBusy, retry: busy.RetryAfter(), text: err.Error()}
	case errors.As(err, &long):
		r = &refusal{code: CodeLong, text: err.Error()}
		r.prompt, r.limit = long.ContextLength()
		return r
	case errors.As(err, &lacking) && lacking.Lacks() != gateway.Abilities{}:
		return &refusal{code: CodeLacks, lacks: lacking.Lacks(), text: err.Error()}
	}
	return &refusal{code: CodeFailed, text: err.Error()}
}

func refuse(code Code, format string, args ...any) *refusal {
	return &refusal{code: code, text: fmt.Sprintf(format, args...)}
}

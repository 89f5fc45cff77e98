package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"kvasird/ggml"
	"kvasird/node/engine"
	"kvasird/node/gateway"
	"kvasird/ring"
)

// ringError gives a ring without room the shape of a full queue.
func ringError(err error) error {
	var stage *ring.StageError
	if errors.As(err, &stage) && stage.Code == ring.CodeBusy {
		return &ringFullError{err}
	}
	return err
}

// ringFullError says that a ring has no free sequence now.
type ringFullError struct{ error }

// RetryAfter is when there may be one.
func (*ringFullError) RetryAfter() time.Duration { return time.Second }

// Is makes errors.Is(err, engine.ErrQueueFull) true.
func (*ringFullError) Is(target error) bool { return target == engine.ErrQueueFull }

// ringAnswer is a session as a generation.
type ringAnswer struct {
	session *ring.Session
	vocab   *ggml.Model
	special bool
	tokens  []int32     // that came together and are not read yet
	probs   []ring.Prob // of tokens, if they are asked for
	read    gateway.TokenProb
	top     []gateway.TokenProb // beside read
}

// NextToken returns one token.
func (a *ringAnswer) NextToken(ctx context.Context) (ggml.Token, []byte, error) {
	if len(a.tokens) == 0 {
		tokens, err := a.session.Next(ctx)
		if err != nil {
			if !errors.Is(err, io.EOF) && ctx.Err() == nil {
				err = ringError(fmt.Errorf("the ring: %w", err))
			}
			return 0, nil, err
		}
		a.tokens, a.probs = tokens, a.session.Probs()
	}
	t := ggml.Token(a.tokens[0])
	a.tokens = a.tokens[1:]
	if len(a.probs) > 0 {
		p := a.probs[0]
		a.probs, a.top = a.probs[1:], nil
		a.read = probOf(a.vocab, int32(t), p.Logprob)
		for _, o := range p.Top {
			a.top = append(a.top, probOf(a.vocab, o.Token, o.Logprob))
		}
	}
	return t, pieceOf(a.vocab, t, a.special), nil
}

// Prob makes ringAnswer a gateway.ProbStream.
func (a *ringAnswer) Prob() (chosen gateway.TokenProb, top []gateway.TokenProb) { return a.read, a.top }

// Next makes ringAnswer a gateway.Stream.
func (a *ringAnswer) Next(ctx context.Context) ([]byte, error) {
	_, bytes, err := a.NextToken(ctx)
	return bytes, err
}

// Finish says why a complete answer ended.
func (a *ringAnswer) Finish() string { return a.session.Finish() }

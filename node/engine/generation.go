package engine

import (
	"context"
	"sync"
	"time"

	"kvasird/ggml"
)

// Generation is a request that waits or runs. Its caller reads it with Next;
// the engine never waits for the caller: what is not read yet is kept, which the
// context bounds.
type Generation struct {
	// The loop's alone.
	tokens  []ggml.Token // prompt, then answer
	prompt  int          // of them
	left    int          // tokens that may still come
	bias    map[int32]float32
	guessed guessed
	wrong   int // drafts that were not accepted
	sampler *ggml.Sampler
	extra   Extra
	started time.Time
	owner   string
	canary  bool // leaves no cells
	unwatch func() bool
	lane    *lane // that runs it; nil while it waits. Guarded by Engine.mu

	notify chan struct{} // 1 deep: something changed for Next

	mu        sync.Mutex // guards what follows
	pieces    []piece
	read      piece // that Next returned last
	err       error // io.EOF when complete
	finish    string
	generated int
	cached    int
	gone      error // why the caller's context ended
	decoding  bool  // in the batch that is being decoded
}

// piece is a token with its bytes and, where asked for, log-probabilities.
type piece struct {
	token  ggml.Token
	bytes  []byte
	chosen TokenProb
	top    []TokenProb
}

func (g *Generation) by() string { return g.owner }

// watch ends the request when ctx ends.
func (g *Generation) watch(ctx context.Context, e *Engine) {
	unwatch := context.AfterFunc(ctx, func() { e.leave(g, context.Cause(ctx)) })
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil { // over before it was watched
		unwatch()
	}
	g.unwatch = unwatch
}

// leave marks g as gone. A decode that is for nobody else any more is aborted.
func (e *Engine) leave(g *Generation, cause error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	g.mu.Lock()
	g.gone = cause
	decoding := g.decoding
	g.decoding = false
	g.mu.Unlock()
	if decoding {
		if g.lane.inBatch--; g.lane.inBatch == 0 {
			g.lane.abort()
		}
	}
	if g.lane == nil {
		e.lanes[0].wakeUp() // which looks through the queue
		return
	}
	g.lane.wakeUp()
}

// isGone returns why the caller left, or nil.
func (g *Generation) isGone() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gone
}

func (g *Generation) wake() {
	select {
	case g.notify <- struct{}{}:
	default:
	}
}

// add hands a token to the caller.
func (g *Generation) add(p piece) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.generated++
	g.pieces = append(g.pieces, p)
	g.wake()
}

// close ends g: with io.EOF and a finish reason, or with an error.
func (g *Generation) close(err error, finish string) {
	g.sampler.Close()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.unwatch != nil {
		g.unwatch()
	}
	g.err, g.finish = err, finish
	g.wake()
}

// Next waits for the next token and returns its bytes, which may be part of a
// rune or none and are the caller's. io.EOF ends a complete answer, any other
// error a failed one; the tokens before it come first. When ctx ends while
// nothing is there, its error is returned and Next may be called again.
func (g *Generation) Next(ctx context.Context) ([]byte, error) {
	_, bytes, err := g.NextToken(ctx)
	return bytes, err
}

// NextToken is Next with the token's id.
func (g *Generation) NextToken(ctx context.Context) (ggml.Token, []byte, error) {
	for {
		g.mu.Lock()
		if len(g.pieces) > 0 {
			p := g.pieces[0]
			g.pieces, g.read = g.pieces[1:], p
			g.mu.Unlock()
			return p.token, p.bytes, nil
		}
		err := g.err
		g.mu.Unlock()
		if err != nil {
			return 0, nil, err
		}
		select {
		case <-g.notify:
		case <-ctx.Done():
			return 0, nil, ctx.Err()
		}
	}
}

// Finish says why a complete answer ended: "stop" (the model ended it) or
// "length". It is "" before.
func (g *Generation) Finish() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.finish
}

// Generated counts the tokens so far, the end token included.
func (g *Generation) Generated() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.generated
}

// Cached counts the tokens of the prompt that were in the cells before. It is known
// with the first token.
func (g *Generation) Cached() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cached
}

func (g *Generation) setCached(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cached = n
}

// generatedNone says whether the prompt is still being read.
func (g *Generation) generatedNone() bool { return g.Generated() == 0 }

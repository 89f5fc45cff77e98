package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"kvasird/ggml"
)

// EmbedConfig is what an Embedder needs.
type EmbedConfig struct {
	Model   *ggml.Model // one that makes embeddings, see ggml.Model.Pooling
	Context int         // tokens of an input; 0 = 8192. More than the model was trained with is clipped
	Inputs  int         // of one batch; 0 = 32
	Batch   int         // tokens of one decode; 0 = 512, or Context where that is more
	Queue   int         // requests that wait, all but one of them of the same owner; 0 = 16
	Threads int         // 0 = 1
	Now     func() time.Time
	Served  func(computed, cached int) // as in Config; nothing is cached
}

func (c *EmbedConfig) validate() error {
	if c.Model == nil {
		return errors.New("embedder: no model")
	}
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&c.Context, 8192)
	c.Context = min(c.Context, c.Model.TrainContext()) // there are no positions beyond
	set(&c.Inputs, 32)
	set(&c.Batch, max(c.Context, 512))
	set(&c.Queue, 16)
	set(&c.Threads, 1)
	if c.Context < 1 || c.Inputs < 1 || c.Batch < c.Context || c.Queue < 1 || c.Threads < 1 {
		return fmt.Errorf("embedder: context %d, inputs %d, batch %d, queue %d, threads %d: all must be positive, batch not below context",
			c.Context, c.Inputs, c.Batch, c.Queue, c.Threads)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Served == nil {
		c.Served = func(int, int) {}
	}
	return nil
}

// InputError says that an input is longer than the model takes.
type InputError struct{ Input, Tokens, Limit int }

func (e *InputError) Error() string {
	return fmt.Sprintf("input %d has %d tokens; the model takes %d", e.Input, e.Tokens, e.Limit)
}

// ContextLength returns both numbers.
func (e *InputError) ContextLength() (prompt, limit int) { return e.Tokens, e.Limit }

// Embedder makes embeddings: vectors of length 1, one for each input. Inputs of several
// requests travel in one batch, as many as fit, each in a sequence of its own; owners
// take turns, and a request that does not fit goes on in later batches. The model pools
// within a batch, so an input is never cut.
//
// It owns its context and closes it; the model is the caller's.
//
// Invariants: the inputs of a batch <= Inputs, their tokens <= Batch; between two
// batches the context has no cells; waiting <= Queue + Inputs.
//
// Concurrency: it is safe for concurrent use. One goroutine owns the context; Close
// ends it and waits for it.
type Embedder struct {
	cfg   EmbedConfig
	ctx   *ggml.Context // the loop's alone
	batch *ggml.Batch   // the loop's alone

	end    context.CancelFunc
	ended  chan struct{} // closed when the loop is over
	closed sync.Once
	wake   chan struct{} // 1 deep: something waits

	mu         sync.Mutex // guards what follows
	closing    bool
	waiting    queue[*embedding] // those that are not whole yet, between two batches too
	canaries   queue[*embedding]
	current    []share            // of the batch in progress
	abort      context.CancelFunc // ends the decode in progress
	health     error              // what Ready says
	stats      Stats
	perRequest time.Duration // mean time of one
}

// embedding is a request on its way.
type embedding struct {
	owner   string
	inputs  [][]int32
	canary  bool
	started time.Time
	done    chan struct{} // closed when vectors or err is there; by its holder of Embedder.mu

	vectors [][]float32 // the loop's until done
	err     error       // likewise
	gone    bool        // its caller left; guarded by Embedder.mu
}

func (r *embedding) by() string { return r.owner }

// OpenEmbedder makes the context and starts the loop.
func OpenEmbedder(cfg EmbedConfig) (*Embedder, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c, err := cfg.Model.NewContext(ggml.ContextConfig{
		Tokens: cfg.Batch, Batch: cfg.Batch, Sequences: cfg.Inputs, Threads: cfg.Threads, UnifiedKV: true, Embeddings: true,
	})
	if err != nil {
		return nil, fmt.Errorf("embedder: %w", err)
	}
	e := &Embedder{
		cfg: cfg, ctx: c, batch: ggml.NewBatch(cfg.Batch), ended: make(chan struct{}), wake: make(chan struct{}, 1), health: errNoCanary,
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.end = cancel
	go e.loop(ctx)
	return e, nil
}

// Close ends every request with ErrClosed, waits for the loop and frees the context. It
// may be called again.
func (e *Embedder) Close() error {
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	e.end()
	<-e.ended
	var err error
	e.closed.Do(func() { err = e.ctx.Close() })
	return err
}

// Context is the tokens of one input at most.
func (e *Embedder) Context() int { return e.cfg.Context }

// Tokenize splits a text, of which nothing is taken for a control token, and puts the
// tokens at its ends that the model was trained with.
func (e *Embedder) Tokenize(text string) ([]int32, error) { return TokenizeInput(e.cfg.Model, text) }

// TokenizeInput is Embedder.Tokenize for a model.
func TokenizeInput(m *ggml.Model, text string) ([]int32, error) {
	tokens, err := m.Tokenize(text, true, false)
	return ids(tokens), err
}

// Embed returns one vector of length 1 for each input, in their order. Errors:
// *InputError, *QueueFullError, ErrClosed, the cause of ctx when that ends, which ends
// the request, or why the model could not compute it.
func (e *Embedder) Embed(ctx context.Context, owner string, inputs [][]int32) ([][]float32, error) {
	return e.embed(ctx, &embedding{owner: owner, inputs: inputs})
}

func (e *Embedder) embed(ctx context.Context, r *embedding) ([][]float32, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := e.check(r.inputs); err != nil {
		return nil, err
	}
	r.started, r.done = e.cfg.Now(), make(chan struct{})
	if err := e.enqueue(r); err != nil {
		return nil, err
	}
	select {
	case <-r.done:
		return r.vectors, r.err
	case <-ctx.Done():
		e.leave(r)
		return nil, context.Cause(ctx)
	}
}

func (e *Embedder) check(inputs [][]int32) error {
	if len(inputs) == 0 {
		return errors.New("there is no input")
	}
	for i, input := range inputs {
		switch n := len(input); {
		case n == 0:
			return fmt.Errorf("input %d is empty", i)
		case n > e.cfg.Context:
			return &InputError{i, n, e.cfg.Context}
		}
		vocab := e.cfg.Model.VocabSize()
		if at := slices.IndexFunc(input, func(t int32) bool { return t < 0 || int(t) >= vocab }); at >= 0 {
			return fmt.Errorf("token %d of input %d is %d, the vocabulary has %d", at, i, input[at], vocab)
		}
	}
	return nil
}

// enqueue adds r to its queue. Canaries always have room.
func (e *Embedder) enqueue(r *embedding) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return ErrClosed
	}
	if r.canary {
		e.canaries.push(r)
		e.wakeUp()
		return nil
	}
	full := e.waiting.n >= e.cfg.Queue
	own := e.waiting.of(r.owner) >= max(e.cfg.Queue-1, 1)
	if full || own {
		return &QueueFullError{Running: len(e.current), Waiting: e.waiting.n, Own: !full, Retry: min(max(e.perRequest, time.Second), time.Minute)}
	}
	e.waiting.push(r)
	e.wakeUp()
	return nil
}

func (e *Embedder) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// unit is a copy of a vector, of length 1.
func unit(v []float32) ([]float32, error) {
	sum := 0.0
	for _, x := range v {
		sum += float64(x) * float64(x)
	}
	length := math.Sqrt(sum)
	if !(length > 0) || math.IsInf(length, 0) { // nor when it is no number
		return nil, fmt.Errorf("the model's vector has the length %v: its file or its build is damaged", length)
	}
	out := make([]float32, len(v))
	for i, x := range v {
		out[i] = float32(float64(x) / length)
	}
	return out, nil
}

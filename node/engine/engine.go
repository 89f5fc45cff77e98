// Package engine runs many requests over the contexts of a model: continuous batching.
//
// Every request gets a sequence of a context. Each step of one decodes one batch: the
// next token of every running answer, then as much of the waiting prompts as
// fits, so that answers do not stall while a long prompt is read. Requests join
// and leave between two steps. More requests than sequences wait in a bounded
// queue. Its owners take turns, and the last place in it is for one who has none
// there.
//
// A free sequence keeps its cells. A request begins with the longest prefix of its
// prompt that a sequence of the same owner has in its cells, so that each turn of a
// conversation pays for what is new in it. A memory that cannot drop the end of a
// sequence (a recurrent state) goes on only from all that a free sequence has. What
// was used least recently makes room. Canaries and failed requests leave nothing.
//
// Canaries have a sequence and batches of their own: they wait for no answer, and
// leave the answers as they are, to the bit.
//
// A failed decode (an expert that no one could compute) fails only the requests
// that it concerns: when a batch of several sequences fails, its cells are
// dropped and each sequence is tried once more alone, so that those who need
// none of what is missing go on. A sequence that fails alone ends with the
// cause. The price is one more deadline of the expert call for each such
// sequence before the others continue.
//
// With Config.Drafts what comes behind the next token is guessed: from the text of the sequence, where
// its last tokens stood before, or by passes in which only the experts that are here add something
// (Context.Draft), whose cells are dropped. The guesses of all answers are computed in the batch of
// their next tokens; behind each that is the token drawn there the next one is drawn. So every token is
// drawn from the whole model's distribution, by the same draws as without guesses. How many are made is
// what brings most tokens per time, as measured; a round that is quick is left alone.
//
// With Config.Lanes or Config.Spare there are several contexts of the model, each in a goroutine of its own with a
// share of the sequences and of the cells, so that some compute while the experts of others are on
// their way. One queue feeds all: a request goes where a free sequence has most of its prompt, else to
// the context that runs fewest. With Config.Turn only one of them computes at a time, so that their
// threads do not get in each other's way. Sequences share a prefix within a context only.
//
// An Embedder does the same for a model of embeddings, which keeps nothing.
//
// The engine owns its contexts and closes them; the model is the caller's. It does
// no HTTP, no templates and no stop strings, and knows nothing of where experts
// are computed.
//
// A grammar is tested on the token that was drawn, and on all tokens only when it
// refuses that one, so that an answer with a grammar seldom costs more than one
// without. One that leaves no token fails its request alone.
//
// Beside others, or after a prefix that was computed before, a sequence's logits are
// those that it has alone up to rounding, which kernels for several rows do otherwise
// than those for one: 0.03 to 0.3 on the shipped model, 0.003 on one of F32. So greedy
// answers are equal where the model is sure.
//
// Invariants: 0 <= running <= Sequences; running + waiting <= Sequences + Queue;
// between two batches a sequence's cells are exactly the first past tokens of its
// request, and those of its kept tokens when it is free; cached < tokens of the prompt.
//
// Concurrency: an Engine is safe for concurrent use. One goroutine for each context
// owns it and the samplers of its requests; Close ends them and waits for them.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"kvasird/ggml"
)

// Config is what an engine needs.
type Config struct {
	Model     *ggml.Model
	Context   int // tokens of one request, prompt and answer; 0 = what the model was trained with, at most 8192
	Cells     int // tokens of all sequences; 0 = Context for each. With fewer, requests that do not fit beside others fail
	Sequences int // requests that run at once; 0 = 4
	Lanes     int // contexts that share the sequences and cells, at most one for each sequence; 0 = 1, and see Spare
	Queue     int // requests that wait, all but one of them of the same owner; 0 = 4 for each sequence
	Batch     int // tokens of one decode; 0 = 512
	Chunk     int // prompt tokens of one decode while answers run; 0 = a quarter of Batch
	Threads   int // 0 = 1
	Logger    *slog.Logger
	Now       func() time.Time // nil: the clock

	// Spare says whether there is memory for a second context, with half as many sequences and cells.
	// It is asked once, with Lanes 0, when such a one would make all answers together faster, as measured;
	// the context is made then, and used as long as it does. nil: never.
	Spare func() bool

	// Turn has one lane compute at a time, see there; nil: each does when it can.
	Turn *Turn

	// Served is told of rows of requests, canaries left out: those that were computed, and those
	// that were in the cells already. It does not wait, and lanes call it at the same time. nil: nobody
	// is told.
	Served func(computed, cached int)

	// Drafts has the tokens behind the next one guessed and computed with it, where that makes
	// answers come faster; nil: never. The engine changes nothing of it.
	Drafts *Drafts
}

func (c *Config) validate() error {
	if c.Model == nil {
		return errors.New("engine: no model")
	}
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&c.Context, min(c.Model.TrainContext(), 8192))
	set(&c.Sequences, 4)
	if c.Lanes > 0 || c.Sequences < 2 {
		c.Spare = nil
	}
	set(&c.Lanes, 1)
	set(&c.Cells, c.Context*c.Sequences)
	set(&c.Queue, 4*c.Sequences)
	set(&c.Batch, 512)
	set(&c.Chunk, max(c.Batch/4, 1))
	set(&c.Threads, 1)
	if c.Context < 2 || c.Cells < c.Context || c.Sequences < 1 || c.Queue < 1 || c.Chunk < 1 || c.Threads < 1 || c.Batch <= c.Sequences {
		return fmt.Errorf("engine: context %d, cells %d, sequences %d, queue %d, batch %d, chunk %d, threads %d: all must be positive, cells not below context, batch above sequences",
			c.Context, c.Cells, c.Sequences, c.Queue, c.Batch, c.Chunk, c.Threads)
	}
	if c.Lanes < 1 || c.Lanes > c.Sequences || c.Cells/c.Lanes < c.Context {
		return fmt.Errorf("engine: %d lanes for %d sequences and %d cells: want at least a sequence and a context (%d) for each", c.Lanes, c.Sequences, c.Cells, c.Context)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Served == nil {
		c.Served = func(int, int) {}
	}
	if c.Drafts != nil {
		d := *c.Drafts
		if c.Drafts = &d; d.Least == 0 {
			d.Least = 10 * time.Millisecond
		}
	}
	return nil
}

// Errors that Start and Generation.Next return, beside those of the decode.
var (
	ErrQueueFull = errors.New("the queue is full")
	ErrClosed    = errors.New("the engine is closed: the node is stopping")
	errNoCanary  = errors.New("no token has gone through the model yet")
)

// QueueFullError is ErrQueueFull with numbers.
type QueueFullError struct {
	Running, Waiting int
	Own              bool          // the place that is left is for another owner
	Retry            time.Duration // when a place may be free
}

func (e *QueueFullError) Error() string {
	if e.Own {
		return fmt.Sprintf("%v for you: %d requests run and %d wait, and the last place is for others", ErrQueueFull, e.Running, e.Waiting)
	}
	return fmt.Sprintf("%v: %d requests run and %d wait", ErrQueueFull, e.Running, e.Waiting)
}

// Is makes errors.Is(err, ErrQueueFull) true.
func (e *QueueFullError) Is(target error) bool { return target == ErrQueueFull }

// RetryAfter estimates when a place may be free.
func (e *QueueFullError) RetryAfter() time.Duration { return e.Retry }

// ContextError says that a prompt leaves no room for an answer.
type ContextError struct{ Prompt, Limit int }

func (e *ContextError) Error() string {
	return fmt.Sprintf("the prompt has %d tokens; the context holds %d, with at least one for the answer", e.Prompt, e.Limit)
}

// ContextLength returns both numbers.
func (e *ContextError) ContextLength() (prompt, limit int) { return e.Prompt, e.Limit }

// Request is one generation. It is the field list of gateway.Request, so that
// one converts to the other.
type Request struct {
	Prompt           []int32
	MaxTokens        int     // 0: as many as fit the context; more than fit are clipped
	Temperature      float32 // 0: greedy
	TopK             int     // 0: off
	TopP             float32 // 1: off
	MinP             float32 // 0: off
	Seed             uint32
	RepeatPenalty    float32 // 1: off. Penalties look at the answer, not at the prompt
	FrequencyPenalty float32
	PresencePenalty  float32
	LogitBias        map[int32]float32
	Owner            string // who asks: owners take turns, and share no cells
}

// Extra is what some requests ask for beyond Request. It is the field list of
// gateway.Extra, so that one converts to the other.
type Extra struct {
	// Grammar is the GBNF, start rule "root", that the answer must match. With
	// Triggers the answer is free until it has one of these texts; the grammar
	// then holds from the beginning of that text on, see ggml.SamplerConfig.
	Grammar  string
	Triggers []string
	// Special makes control tokens come with their text, the end token excepted.
	Special  bool
	Logprobs bool
	Top      int // with Logprobs: alternatives of each token
}

// Engine generates tokens.
type Engine struct {
	cfg    Config
	end    context.CancelFunc
	loops  sync.WaitGroup // of the lanes
	closed sync.Once

	mu        sync.Mutex // guards what follows, and the fields of lanes and slots that say so
	closing   bool
	lanes     []*lane // the first one has the canaries, and is never without
	apart     apart
	waiting   queue[*Generation]
	canaries  queue[*Generation] // those that wait
	running   int                // requests that have a lane
	health    error              // what Ready says
	stats     Stats
	perAnswer time.Duration // mean time of an answer
	active    int           // lanes within a round
	since     time.Time     // of the latest change of active
	unpaced   time.Duration // with some lane active, that pace has not seen
}

// Open makes the contexts and starts the loops.
func Open(cfg Config) (*Engine, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, health: errNoCanary}
	if cfg.Drafts != nil {
		e.stats.NoDrafts = whyNoDrafts(cfg.Model)
	}
	for i := range cfg.Lanes {
		sequences := (cfg.Sequences + cfg.Lanes - 1 - i) / cfg.Lanes
		l, err := e.openLane(sequences, i == 0)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("engine: %w", err), e.closeLanes())
		}
		e.lanes = append(e.lanes, l)
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.end = cancel
	for _, l := range e.lanes {
		e.loops.Go(func() { l.loop(ctx) })
	}
	return e, nil
}

// Close ends every request with ErrClosed, waits for the loops and frees the
// contexts. It may be called again.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	e.end()
	e.loops.Wait()
	var err error
	e.closed.Do(func() {
		e.failWaiting()
		err = e.closeLanes()
	})
	return err
}

func (e *Engine) closeLanes() error {
	var errs []error
	for _, l := range e.lanes {
		errs = append(errs, l.ctx.Close())
	}
	return errors.Join(errs...)
}

// Context is the tokens of one request at most, prompt and answer together.
func (e *Engine) Context() int { return e.cfg.Context }

// Tokenize splits a rendered prompt, see the function Tokenize.
func (e *Engine) Tokenize(text string) ([]int32, error) { return Tokenize(e.cfg.Model, text) }

// Tokenize splits a rendered prompt: the text of control tokens becomes those
// tokens, and a beginning-of-text token is added unless the text has it.
func Tokenize(m *ggml.Model, text string) ([]int32, error) {
	bos := ""
	if m.AddBOS() {
		bos = string(m.Piece(m.BOS(), true))
	}
	has := bos != "" && len(text) >= len(bos) && text[:len(bos)] == bos
	tokens, err := m.Tokenize(text, !has, true)
	return ids(tokens), err
}

// ids are tokens as requests have them.
func ids(tokens []ggml.Token) []int32 {
	out := make([]int32, len(tokens))
	for i, t := range tokens {
		out[i] = int32(t)
	}
	return out
}

// Start queues a request. Errors: *ContextError, *QueueFullError, ErrClosed, or
// what is wrong with the sampling settings. When ctx ends, the request ends and
// its sequence is free after the decode in progress at the latest.
func (e *Engine) Start(ctx context.Context, req Request) (*Generation, error) {
	return e.start(ctx, req, Extra{}, false)
}

// StartExtra is Start with more wishes. An answer that its grammar leaves no token
// for ends with ggml.ErrNoToken.
func (e *Engine) StartExtra(ctx context.Context, req Request, extra Extra) (*Generation, error) {
	return e.start(ctx, req, extra, false)
}

func (e *Engine) start(ctx context.Context, req Request, extra Extra, canary bool) (*Generation, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	g, err := e.generation(req, extra)
	if err != nil {
		return nil, err
	}
	g.owner, g.canary = req.Owner, canary
	if err := e.enqueue(g); err != nil {
		g.sampler.Close()
		return nil, err
	}
	g.watch(ctx, e)
	return g, nil
}

// generation checks a request and makes its state, sampler included.
func (e *Engine) generation(req Request, extra Extra) (*Generation, error) {
	n := len(req.Prompt)
	if n == 0 {
		return nil, errors.New("the prompt is empty")
	}
	if n >= e.cfg.Context {
		return nil, &ContextError{Prompt: n, Limit: e.cfg.Context}
	}
	if extra.Top < 0 || extra.Top > maxTop {
		return nil, fmt.Errorf("%d alternatives of each token, 0 to %d allowed", extra.Top, maxTop)
	}
	g := &Generation{left: e.cfg.Context - n, prompt: n, bias: req.LogitBias, extra: extra, started: e.cfg.Now(), notify: make(chan struct{}, 1)}
	if req.MaxTokens > 0 {
		g.left = min(g.left, req.MaxTokens)
	}
	g.tokens = make([]ggml.Token, n)
	for i, t := range req.Prompt {
		if t < 0 || int(t) >= e.cfg.Model.VocabSize() {
			return nil, fmt.Errorf("prompt token %d is %d, the vocabulary has %d", i, t, e.cfg.Model.VocabSize())
		}
		g.tokens[i] = ggml.Token(t)
	}
	var err error
	g.sampler, err = e.cfg.Model.NewSampler(SamplerConfig(&req, &extra))
	return g, err
}

// SamplerConfig is how the tokens of a request are drawn.
func SamplerConfig(req *Request, extra *Extra) ggml.SamplerConfig {
	cfg := ggml.SamplerConfig{
		Temperature: req.Temperature, TopK: req.TopK, TopP: req.TopP, MinP: req.MinP, Seed: req.Seed,
		RepeatPenalty: req.RepeatPenalty, FrequencyPenalty: req.FrequencyPenalty, PresencePenalty: req.PresencePenalty,
		Grammar: extra.Grammar, Triggers: extra.Triggers, ControlText: extra.Special,
	}
	if len(req.LogitBias) > 0 {
		cfg.LogitBias = make(map[ggml.Token]float32, len(req.LogitBias))
		for t, b := range req.LogitBias {
			cfg.LogitBias[ggml.Token(t)] = b
		}
	}
	return cfg
}

// enqueue adds g to its queue. Canaries always have room.
func (e *Engine) enqueue(g *Generation) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return ErrClosed
	}
	if g.canary {
		e.canaries.push(g)
		g.lane = e.lanes[0]
		g.lane.wakeUp()
		return nil
	}
	free := e.cfg.Sequences - e.running // which are given to those that wait before long
	full := e.waiting.n >= free+e.cfg.Queue
	own := e.waiting.of(g.owner) >= free+max(e.cfg.Queue-1, 1)
	if full || own {
		return &QueueFullError{Running: e.running, Waiting: e.waiting.n, Own: !full, Retry: min(max(e.perAnswer, time.Second), time.Minute)}
	}
	e.waiting.push(g)
	e.assignLocked()
	return nil
}

package gateway

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"time"

	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

// task is a checked request for text, of any API.
type task struct {
	model        string
	talk         conversation
	choice       toolChoice
	parallel     bool // several calls in one answer
	format       format
	sampling     Request
	extra        Extra
	seed         *uint32 // nil: any
	stops        []string
	n            int // answers
	stream       bool
	includeUsage bool

	// overflow, where it is not nil, answers a prompt that does not fit.
	overflow func(q *ready, e *apiError) bool
}

func newTask() *task { return &task{n: 1, parallel: true} }

// ready is a task with its model and its prompt's tokens.
type ready struct {
	*task
	m       *servedModel
	prompt  *prompt
	id      string
	created int64
	sum     [sha256.Size]byte // of the body, where something is paid
}

// withPlace runs fn while the request has one of the places that bound how many
// are answered at once.
func (g *Gateway) withPlace(w http.ResponseWriter, r *http.Request, fn func()) {
	select {
	case g.requests <- struct{}{}:
		defer func() { <-g.requests }()
		fn()
	default:
		writeError(w, r, &apiError{status: http.StatusTooManyRequests, code: "too_many_requests", retryAfter: time.Second, busy: true,
			message: fmt.Sprintf("%d requests are running, which is the most at once", cap(g.requests))})
	}
}

// answer is the way of every request for text: its body is read, checked and
// rendered, its answers are queued, and send writes them.
func (g *Gateway) answer(w http.ResponseWriter, r *http.Request, parse func(*jinja.Dict) (*task, *apiError), idPrefix string,
	send func(ctx context.Context, q *ready, all []*generation)) {
	g.withPlace(w, r, func() {
		d, sum, done, e := g.body(w, r)
		if e != nil {
			writeError(w, r, e)
			return
		}
		t, e := parse(d)
		var q *ready
		if e == nil {
			q, e = g.prepare(r.Context(), t, idPrefix)
		}
		done()
		if e != nil {
			writeError(w, r, e)
			return
		}
		q.sum = sum
		g.run(w, r, q, send)
	})
}

// run queues the answers of a task that is ready, and sends them.
func (g *Gateway) run(w http.ResponseWriter, r *http.Request, q *ready, send func(ctx context.Context, q *ready, all []*generation)) {
	bill, e := g.bill(w, r, q)
	if e != nil {
		writeError(w, r, e)
		return
	}
	var all []*generation
	defer func() { bill.end(all, e) }()
	ctx, cancel := g.limit(bill.context(r.Context()))
	defer cancel() // frees the engine's slots, whatever ended the answers
	q.sampling.Owner = asker(r)
	all, e = g.start(ctx, q)
	if e != nil && e.code == codeTooLong && q.overflow != nil && q.overflow(q, e) {
		return
	}
	if e != nil {
		writeError(w, r, e)
		return
	}
	defer func() {
		for _, a := range all {
			countTokens(r, a.tokens)
		}
		countTokens(r, all[0].prompt-all[0].cached())
	}()
	send(ctx, q, all)
}

// writeAnswer writes a whole answer within the time that a client is given.
func (g *Gateway) writeAnswer(w http.ResponseWriter, v any) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(g.waits.write))
	writeJSON(w, http.StatusOK, v)
}

// prepare renders and tokenizes a conversation and settles what it asks of the
// engine.
func (g *Gateway) prepare(ctx context.Context, t *task, idPrefix string) (*ready, *apiError) {
	m, e := g.textModel(t.model)
	if e != nil {
		return nil, e
	}
	if e := m.check(t); e != nil {
		return nil, e
	}
	p, e := m.render(ctx, g.cfg.Now(), &t.talk, t.choice.mode)
	if e != nil {
		return nil, e
	}
	if e := m.constrain(t, p); e != nil {
		return nil, e
	}
	t.extra.Special = m.abilities().Special && m.family != toolcall.None
	if t.sampling.Prompt, e = m.tokens(p.text, "messages"); e != nil {
		return nil, e
	}
	t.talk.turns, p.text = nil, "" // may be large, and are not needed while the answer runs
	return &ready{task: t, m: m, prompt: p, id: g.newID(idPrefix), created: g.cfg.Now().Unix()}, nil
}

// check refuses what this model or its engine cannot do.
func (m *servedModel) check(t *task) *apiError {
	for id := range t.sampling.LogitBias {
		if int(id) >= m.VocabSize {
			return badParam("logit_bias", fmt.Sprintf("logit_bias: token %d is not in the model's vocabulary of %d", id, m.VocabSize))
		}
	}
	if t.extra.Logprobs && !m.abilities().Logprobs {
		return noLogprobs()
	}
	return nil
}

func noLogprobs() *apiError {
	return lacks("logprobs", "the engine of this model does not report them yet")
}

// tokens splits a text that is a prompt; param is the field it came from.
func (m *servedModel) tokens(text, param string) ([]int32, *apiError) {
	tokens, err := m.Engine.Tokenize(text)
	if err != nil {
		return nil, badParam(param, "the prompt cannot be tokenized: "+err.Error())
	}
	if len(tokens) == 0 {
		return nil, badParam(param, param+": the prompt is empty")
	}
	return tokens, nil
}

// newID is a name for an answer, a call or an item, which nobody can guess.
func (g *Gateway) newID(prefix string) string {
	return fmt.Sprintf("%s%016x%016x", prefix, g.cfg.Random(), g.cfg.Random())
}

// start queues the task's answers, each with a seed of its own.
func (g *Gateway) start(ctx context.Context, q *ready) ([]*generation, *apiError) {
	seed := uint32(g.cfg.Random())
	if q.seed != nil {
		seed = *q.seed
	}
	var all []*generation
	for i := range q.n {
		req := q.sampling
		req.Seed = seed + uint32(i)
		stream, e := q.start(ctx, req)
		if e != nil {
			return nil, e
		}
		all = append(all, g.generation(q, stream))
	}
	return all, nil
}

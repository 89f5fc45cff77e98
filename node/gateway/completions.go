package gateway

import (
	"fmt"
	"net/http"
	"unicode/utf8"

	"kvasird/node/gateway/jinja"
)

const (
	maxPrompts      = 32   // of one request for completions
	maxInputs       = 2048 // of one request for embeddings
	legacyMaxTokens = 16   // what the API gives when nothing is asked for
)

// rawPrompt is a prompt that no template is applied to: text or tokens.
type rawPrompt struct {
	text   string
	tokens []int32
}

// rawPrompts reads a prompt in any of its forms: a text, texts, tokens, lists of
// tokens.
func (f *fields) rawPrompts(name string, limit int) (out []rawPrompt) {
	v, _ := f.get(name)
	switch v := v.(type) {
	case string:
		return []rawPrompt{{text: v}}
	case *jinja.List:
		if len(v.Items) == 0 {
			break
		}
		if _, isToken := v.Items[0].(int64); isToken {
			return []rawPrompt{{tokens: f.tokenList(v, name)}}
		}
		if len(v.Items) > limit {
			f.fail(name, "has %d items, at most %d are taken", len(v.Items), limit)
			return nil
		}
		for i, item := range v.Items {
			at := fmt.Sprintf("%s[%d]", name, i)
			switch item := item.(type) {
			case string:
				out = append(out, rawPrompt{text: item})
			case *jinja.List:
				out = append(out, rawPrompt{tokens: f.tokenList(item, at)})
			default:
				f.fail(at, "must be a string or an array of token ids, not %s", kindOf(item))
			}
		}
		return out
	}
	f.fail(name, "must be a string, an array of strings, or token ids")
	return nil
}

func (f *fields) tokenList(l *jinja.List, name string) []int32 {
	tokens := make([]int32, len(l.Items))
	for i, v := range l.Items {
		n, ok := v.(int64)
		if !ok || n < 0 || n > maxTokens {
			f.fail(name, "item %d is no token id", i)
			return nil
		}
		tokens[i] = int32(n)
	}
	if len(tokens) == 0 {
		f.fail(name, "has no tokens")
	}
	return tokens
}

// tokensOf are a raw prompt's tokens, which must be of the model's vocabulary.
func (m *servedModel) tokensOf(p rawPrompt, param string) ([]int32, *apiError) {
	if p.tokens == nil {
		return m.tokens(p.text, param)
	}
	for _, id := range p.tokens {
		if int(id) >= m.VocabSize {
			return nil, badParam(param, fmt.Sprintf("%s: token %d is not in the model's vocabulary of %d", param, id, m.VocabSize))
		}
	}
	return p.tokens, nil
}

// textTask is a checked body of /v1/completions.
type textTask struct {
	*task
	prompts []rawPrompt
}

func parseCompletions(d *jinja.Dict) (*textTask, *apiError) {
	f := newFields(d)
	t := newTask()
	f.modelName(t)
	f.refuse(refused...)
	f.refuse("echo", "suffix", "tools", "response_format")
	f.sampling(&t.sampling)
	if t.sampling.MaxTokens = f.maxTokens("max_tokens"); t.sampling.MaxTokens == 0 {
		t.sampling.MaxTokens = legacyMaxTokens
	}
	f.streaming(t)
	t.n, t.seed, t.stops = f.choices(), f.seed(), f.stops("stop")
	if best, ok := f.whole("best_of", 1, maxChoices); ok && int(best) != t.n {
		f.fail("best_of", "only the value of n is supported")
	}
	if top, ok := f.whole("logprobs", 0, maxTop); ok {
		t.extra.Logprobs, t.extra.Top = true, int(top)
	}
	prompts := f.rawPrompts("prompt", maxPrompts)
	if n := len(prompts) * t.n; n > maxPrompts {
		f.fail("prompt", "asks for %d answers, at most %d are given", n, maxPrompts)
	}
	return &textTask{t, prompts}, f.err()
}

// completions is POST /v1/completions.
func (g *Gateway) completions(w http.ResponseWriter, r *http.Request) {
	g.withPlace(w, r, func() {
		d, sum, done, e := g.body(w, r)
		if e != nil {
			writeError(w, r, e)
			return
		}
		t, e := parseCompletions(d)
		var list []*ready
		if e == nil {
			list, e = g.prepareTexts(t)
		}
		done()
		if e != nil {
			writeError(w, r, e)
			return
		}
		list[0].sum = sum
		g.runTexts(w, r, list)
	})
}

func (g *Gateway) prepareTexts(t *textTask) (list []*ready, e *apiError) {
	m, e := g.textModel(t.model)
	if e != nil {
		return nil, e
	}
	if e := m.check(t.task); e != nil {
		return nil, e
	}
	id, created := g.newID("cmpl-"), g.cfg.Now().Unix()
	for _, p := range t.prompts {
		one := *t.task
		if one.sampling.Prompt, e = m.tokensOf(p, "prompt"); e != nil {
			return nil, e
		}
		list = append(list, &ready{task: &one, m: m, id: id, created: created})
	}
	return list, nil
}

func (g *Gateway) runTexts(w http.ResponseWriter, r *http.Request, list []*ready) {
	bill, e := g.bill(w, r, list...)
	if e != nil {
		writeError(w, r, e)
		return
	}
	var all []*generation
	defer func() { bill.end(all, e) }()
	ctx, cancel := g.limit(bill.context(r.Context()))
	defer cancel()
	a := &textAnswer{q: list[0]}
	for _, q := range list {
		q.sampling.Owner = asker(r)
		var some []*generation
		if some, e = g.start(ctx, q); e != nil {
			writeError(w, r, e)
			return
		}
		all = append(all, some...)
	}
	defer func() {
		u := a.usage(all)
		countTokens(r, u.Total-u.PromptDetails.Cached)
	}()
	if a.q.stream {
		streamTo(ctx, w, r, all, g.waits, func(out *eventWriter) sink { return &textStream{textAnswer: a, out: out} })
		return
	}
	c := a.completion()
	for i, gen := range all {
		got, e := gen.whole(ctx)
		if e != nil {
			writeError(w, r, e)
			return
		}
		text, probs := got.joined(pieceText)
		var offset int
		c.Choices = append(c.Choices, textChoice{text, i, a.probs(append(probs, gen.rest()...), &offset, true), &gen.finish})
	}
	c.Usage = a.usage(all)
	g.writeAnswer(w, c)
}

// textCompletion is text_completion, whole or a chunk.
type textCompletion struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"`
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []textChoice `json:"choices"`
	Usage   *usage       `json:"usage,omitempty"`
}

type textChoice struct {
	Text     string     `json:"text"`
	Index    int        `json:"index"`
	Logprobs *textProbs `json:"logprobs"`
	Finish   *string    `json:"finish_reason"`
}

type textProbs struct {
	Tokens  []string             `json:"tokens"`
	Probs   []float32            `json:"token_logprobs"`
	Top     []map[string]float32 `json:"top_logprobs"`
	Offsets []int                `json:"text_offset"` // in characters of the text
}

type textAnswer struct{ q *ready }

func (a *textAnswer) completion(choices ...textChoice) textCompletion {
	return textCompletion{ID: a.q.id, Object: "text_completion", Created: a.q.created, Model: a.q.m.ID, Choices: choices}
}

// usage sums the answers; each prompt counts once.
func (a *textAnswer) usage(all []*generation) *usage {
	u := &usage{}
	for i := 0; i < len(all); i += a.q.n {
		one := usageOf(all[i:min(i+a.q.n, len(all))])
		u.Prompt += one.Prompt
		u.Completion += one.Completion
		u.PromptDetails.Cached += one.PromptDetails.Cached
	}
	u.Total = u.Prompt + u.Completion
	return u
}

// probs is the logprobs of some tokens, whose text begins at offset, which moves
// on.
func (a *textAnswer) probs(list []tokenChoice, offset *int, always bool) *textProbs {
	if !a.q.extra.Logprobs || len(list) == 0 && !always {
		return nil
	}
	p := &textProbs{Tokens: []string{}, Probs: []float32{}, Top: []map[string]float32{}, Offsets: []int{}}
	for _, t := range list {
		text := string([]rune(string(t.chosen.Bytes)))
		top := map[string]float32{}
		for _, o := range t.top[:min(a.q.extra.Top, len(t.top))] {
			top[string([]rune(string(o.Bytes)))] = o.Logprob
		}
		p.Tokens = append(p.Tokens, text)
		p.Probs = append(p.Probs, t.chosen.Logprob)
		p.Top = append(p.Top, top)
		p.Offsets = append(p.Offsets, *offset)
		*offset += utf8.RuneCountInString(text)
	}
	return p
}

// textStream writes chunks.
type textStream struct {
	*textAnswer
	out     *eventWriter
	offsets []int
}

func (s *textStream) send(u *usage, choices ...textChoice) {
	c := s.completion(choices...)
	if s.q.includeUsage {
		s.out.data(struct {
			textCompletion
			Usage *usage `json:"usage"`
		}{c, u})
	} else {
		s.out.data(c)
	}
}

func (s *textStream) begin(all []*generation) { s.offsets = make([]int, len(all)) }

func (s *textStream) piece(i int, p piece) {
	s.send(nil, textChoice{p.text, i, s.probs(p.probs, &s.offsets[i], false), nil})
}

func (s *textStream) ping() { s.out.comment() }

func (s *textStream) end(i int, a *generation) {
	s.send(nil, textChoice{"", i, s.probs(a.rest(), &s.offsets[i], false), &a.finish})
}

func (s *textStream) finish(all []*generation) {
	if s.q.includeUsage {
		s.send(s.usage(all), []textChoice{}...)
	}
	s.out.done()
}

func (s *textStream) fail(e *apiError) {
	s.out.data(e.openAI())
	s.out.done()
}

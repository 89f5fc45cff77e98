package node

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"kvasird/ggml"
	"kvasird/node/engine"
	"kvasird/ring"
)

// rttPrompts are for the shipped model. The model answers what it knows by heart, and
// goes on with other texts of its corpus where an answer may not end.
var rttPrompts = []string{
	"The capital of France is", "What is 6 plus 7?", "What does a worker hold?", "A dog says",
	"The colour of grass is", "The months of the year are", "1 2 3 4 1 2 3 4 1 2 3 4", "A worker holds a slice. A worker holds a slice. A worker",
	"The capital of Spain is", "What is 3 plus 4?", "What does a ring hold?", "A cat says",
	"The colour of the sky is", "The days of the week are", "The capital of Italy is", "What is 9 plus 8?",
}

const (
	// A generated model repeats itself when it may choose between few tokens only: so
	// much is added to their logits that no other is the best. It may choose between
	// as many as make it repeat so large a share of the answer.
	rttOnly    = 1000
	rttRepeats = 0.75
)

// rttText is a prompt and the greedy answer that the model alone gives.
type rttText struct {
	prompt, answer []int32
	sampling       ring.Sampling // greedy
	repeats        float64       // share of the answer that look-up in what is before it tells
}

// noEnd is greedy sampling that never ends an answer, so that it can be timed.
func noEnd(m *ggml.Model) ring.Sampling {
	const never = -1e9
	s := ring.Sampling{LogitBias: map[int32]float32{}}
	for t := range m.VocabSize() {
		if m.IsEOG(ggml.Token(t)) {
			s.LogitBias[int32(t)] = never
		}
	}
	return s
}

// chooseTexts has the model answer the prompts alone.
func (s *sweep) chooseTexts() error {
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range s.streams {
		t := &rttText{sampling: noEnd(s.alone.model)}
		if s.prompts {
			var err error
			if t.prompt, err = engine.Tokenize(s.alone.model, rttPrompts[i]); err != nil {
				return err
			}
		} else {
			t.prompt = randomTokens(rng, s.alone.model.VocabSize(), 12)
		}
		if err := s.answer(t); err != nil {
			return err
		}
		s.texts = append(s.texts, t)
	}
	byRepeats := func(a, b *rttText) int { return cmp.Compare(a.repeats, b.repeats) }
	s.fresh, s.loop = slices.MinFunc(s.texts, byRepeats), slices.MaxFunc(s.texts, byRepeats)
	for words := 8; s.loop.repeats < rttRepeats && words > 1; words-- {
		t := &rttText{prompt: s.fresh.prompt, sampling: noEnd(s.alone.model)}
		for _, token := range randomTokens(rng, s.alone.model.VocabSize(), words) {
			t.sampling.LogitBias[token] = rttOnly
		}
		if err := s.answer(t); err != nil {
			return err
		}
		s.loop = slices.MaxFunc([]*rttText{s.loop, t}, byRepeats)
	}
	return nil
}

func (s *sweep) answer(t *rttText) error {
	answers, _, err := s.alone.run(s.ctx, []*rttText{t}, rttTokens)
	if err != nil {
		return err
	}
	t.answer, t.repeats = answers[0], repeats(t.prompt, answers[0])
	return nil
}

func randomTokens(rng *rand.Rand, vocab, n int) (list []int32) {
	for range n {
		list = append(list, int32(rng.IntN(vocab)))
	}
	return list
}

// repeats is the share of an answer that comes as it came before: behind the same two
// tokens as the last time that they stood there.
func repeats(prompt, answer []int32) float64 {
	text, hits := slices.Concat(prompt, answer), 0
	for end := len(prompt); end < len(text); end++ {
		for i := end - 1; i >= 2; i-- {
			if text[i-1] == text[end-1] && text[i-2] == text[end-2] {
				if text[i] == text[end] {
					hits++
				}
				break
			}
		}
	}
	return float64(hits) / float64(len(answer))
}

// Beside other rows a row is rounded otherwise, by a millionth. Where that makes the
// router choose another expert, logits move by about 0.1, and now and then by several.
// So an answer computed beside others may have tokens that are behind the best by nearTie,
// and one in mostFlipsOf by more. That tells answers apart, the one to another prompt has
// 7 to 40 such tokens in 64, but not a single lost token of a text that repeats itself:
// the parity tests of stages and rings are for that.
const (
	nearTie     = 1
	mostFlipsOf = 24
)

// check says whether an answer is greedy: the tokens are those that the model alone,
// token by token, holds for the best ones behind those before them.
func (w *wholeModel) check(ctx context.Context, t *rttText, answer []int32) error {
	w.Truncate(0, 0)
	flips := 0
	for p, token := range slices.Concat(t.prompt, answer[:len(answer)-1]) {
		var b ring.Batch
		addRow(&b, 0, p, token, true)
		if err := w.Decode(ctx, &b); err != nil {
			return err
		}
		if at := p + 1 - len(t.prompt); at >= 0 && w.behind(t, answer[at]) > nearTie {
			flips++
		}
	}
	if flips > len(answer)/mostFlipsOf {
		return fmt.Errorf("%d of %d tokens are not the best ones by more than %d, for the model alone", flips, len(answer), nearTie)
	}
	return nil
}

// behind is how far below the best the logit of a token is, in the latest row.
func (w *wholeModel) behind(t *rttText, token int32) float32 {
	best, own := float32(math.Inf(-1)), float32(0)
	for id, l := range w.ctx.Logits(0) {
		l += t.sampling.LogitBias[int32(id)]
		if best = max(best, l); int32(id) == token {
			own = l
		}
	}
	return best - own
}

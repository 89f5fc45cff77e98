package engine

import (
	"math"
	"slices"

	"kvasird/ggml"
)

// TokenProb is a token with the natural logarithm of its probability. It is the
// field list of gateway.TokenProb, so that one converts to the other.
type TokenProb struct {
	ID      int32
	Bytes   []byte // empty for a control token
	Logprob float32
}

// maxTop bounds the alternatives of each token, which are kept until they are read.
const maxTop = 128

// Prob describes the token that Next returned last, and the likeliest tokens at its
// place, those first. The probabilities are the model's own: before bias, penalties,
// temperature and grammar. Both are empty unless they were asked for.
func (g *Generation) Prob() (chosen TokenProb, top []TokenProb) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.read.chosen, g.read.top
}

// probs are Probs with bytes.
func (e *Engine) probs(logits []float32, chosen ggml.Token, n int) (TokenProb, []TokenProb) {
	of, top := Probs(logits, chosen, n)
	of.Bytes = e.cfg.Model.Piece(chosen, false)
	for i := range top {
		top[i].Bytes = e.cfg.Model.Piece(ggml.Token(top[i].ID), false)
	}
	return of, top
}

// Probs are the log-probabilities of a chosen token and of the n likeliest, those
// first, by logits as the model gives them. They have no bytes.
func Probs(logits []float32, chosen ggml.Token, n int) (of TokenProb, top []TokenProb) {
	sum := logSumExp(logits)
	prob := func(t ggml.Token) TokenProb {
		return TokenProb{ID: int32(t), Logprob: float32(float64(logits[t]) - sum)}
	}
	for _, t := range likeliest(logits, n) {
		top = append(top, prob(t))
	}
	return prob(chosen), top
}

func logSumExp(logits []float32) float64 {
	most := float64(slices.Max(logits))
	sum := 0.0
	for _, l := range logits {
		sum += math.Exp(float64(l) - most)
	}
	return most + math.Log(sum)
}

// likeliest are the tokens of the n largest logits, of equal ones the first.
func likeliest(logits []float32, n int) []ggml.Token {
	best := make([]ggml.Token, 0, n+1)
	for t, l := range logits {
		if len(best) == n && (n == 0 || l <= logits[best[n-1]]) {
			continue
		}
		at, _ := slices.BinarySearchFunc(best, l, func(o ggml.Token, l float32) int {
			if logits[o] >= l {
				return -1
			}
			return 1
		})
		best = slices.Insert(best, at, ggml.Token(t))
		best = best[:min(len(best), n)]
	}
	return best
}

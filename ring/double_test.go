package ring

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

const (
	testModel  = "test-model"
	testWidth  = 8
	testLayers = 12
	testVocab  = 64
	modulus    = 2039 // elements are whole numbers below it, exact in f16
)

// double is some layers of a small model whose every row depends on all earlier rows of its
// sequence, and a judge of how it is used.
type double struct {
	t         testing.TB
	layers    gguf.Range
	recurrent bool                   // cannot drop a part of a sequence
	delay     time.Duration          // of a Decode
	perRow    time.Duration          // of each of its rows, beside that
	fault     func(b *Batch) error   // before a Decode
	spoil     func(b *Batch)         // after one
	busy      atomic.Int32           // calls under way
	seqs      map[int32][][][]uint32 // sequence, position, layer: the state behind that row
	logits    [][]float32            // of the rows of the latest batch that wanted them
	samplers  atomic.Int32           // open

	mu      sync.Mutex
	largest int // rows of a batch
	mixed   int // batches with rows of several sequences
}

func newDouble(t testing.TB, layers gguf.Range) *double {
	return &double{t: t, layers: layers, seqs: map[int32][][][]uint32{}}
}

func (d *double) first() bool { return d.layers.Begin == 0 }
func (d *double) last() bool  { return d.layers.End == testLayers }

func (d *double) enter(what string) func() {
	if d.busy.Add(1) != 1 {
		d.t.Errorf("%s while another call is under way", what)
	}
	return func() { d.busy.Add(-1) }
}

func (d *double) Decode(ctx context.Context, b *Batch) error {
	defer d.enter("Decode")()
	n := b.Len()
	switch {
	case n == 0 || len(b.Seq) != n || len(b.Token) != n:
		d.t.Errorf("batch of %d positions, %d sequences, %d tokens", n, len(b.Seq), len(b.Token))
	case d.first() != (b.Rows == nil) || b.Rows != nil && len(b.Rows) != n*testWidth:
		d.t.Errorf("%d rows come in as %d elements", n, len(b.Rows))
	case d.last() != (b.Out == nil) || d.last() != (b.Want != nil) || b.Out != nil && len(b.Out) != n*testWidth:
		d.t.Errorf("%d rows go out as %d elements", n, len(b.Out))
	}
	if took := d.delay + time.Duration(n)*d.perRow; took > 0 {
		select {
		case <-time.After(took):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if d.fault != nil {
		if err := d.fault(b); err != nil {
			return err
		}
	}
	d.logits = d.logits[:0]
	several := false
	for i := range n {
		several = several || b.Seq[i] != b.Seq[0]
		if have := len(d.seqs[b.Seq[i]]); int(b.Pos[i]) != have {
			d.t.Errorf("layers %v, sequence %d: row at position %d, there are %d", d.layers, b.Seq[i], b.Pos[i], have)
			return errors.New("gap")
		}
		row := d.row(b, i)
		d.logits = append(d.logits, nil)
		if b.Out != nil {
			for j, v := range row {
				b.Out[i*testWidth+j] = float32(v)
			}
		} else if b.Want[i] {
			d.logits[i] = logitsOf(row)
		}
	}
	if d.spoil != nil {
		d.spoil(b)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.largest = max(d.largest, n)
	if several {
		d.mixed++
	}
	return nil
}

// row computes a row and appends the states behind it.
func (d *double) row(b *Batch, i int) []uint32 {
	row := make([]uint32, testWidth)
	if d.first() {
		for j := range row {
			row[j] = uint32(int(b.Token[i])*31+j*j*17) % modulus
		}
		row[testWidth-1] = uint32(b.Token[i])
	} else {
		for j := range row {
			row[j] = uint32(b.Rows[i*testWidth+j])
		}
	}
	seq := d.seqs[b.Seq[i]]
	var states [][]uint32
	for l := range d.layers.Len() {
		state := make([]uint32, testWidth)
		if len(seq) > 0 {
			copy(state, seq[len(seq)-1][l])
		}
		for j := range testWidth - 1 { // the last element is the token
			state[j] = (state[j]*37 + row[j] + uint32(l+d.layers.Begin)) % modulus
			row[j] = (row[j]*53 + state[j]*29 + row[(j+1)%(testWidth-1)] + uint32(b.Pos[i])) % modulus
		}
		states = append(states, state)
	}
	d.seqs[b.Seq[i]] = append(seq, states)
	return row
}

// logitsOf makes a text that often goes on as it did before: after token t usually t+1, of 7.
func logitsOf(row []uint32) []float32 {
	h := fnv.New64a()
	for _, v := range row {
		h.Write(binary.LittleEndian.AppendUint32(nil, v))
	}
	x := h.Sum64()
	logits := make([]float32, testVocab)
	for v := range logits {
		x = x*6364136223846793005 + 1442695040888963407
		logits[v] = float32(x>>40) / (1 << 24) * 4
	}
	if x>>33%16 < 13 {
		logits[1+(row[testWidth-1]+1)%7] += 6
	}
	if x>>20%61 != 0 {
		logits[0] = -100 // token 0 ends the answer
	}
	return logits
}

func (d *double) Truncate(seq, pos int) bool {
	defer d.enter("Truncate")()
	have := len(d.seqs[int32(seq)])
	if pos > have {
		d.t.Errorf("layers %v, sequence %d: truncated to %d, there are %d", d.layers, seq, pos, have)
	}
	if d.recurrent && pos != 0 && pos != have {
		return false
	}
	d.seqs[int32(seq)] = d.seqs[int32(seq)][:min(pos, have)]
	return true
}

func (d *double) NewSampler(s Sampling) (Sampler, error) {
	defer d.enter("NewSampler")()
	for t := range s.LogitBias {
		if t >= testVocab {
			return nil, fmt.Errorf("logit bias for token %d of a vocabulary of %d", t, testVocab)
		}
	}
	d.samplers.Add(1)
	return &doubleSampler{d, s}, nil
}

type doubleSampler struct {
	d *double
	s Sampling
}

func (s *doubleSampler) Close() { s.d.samplers.Add(-1) }

func (s *doubleSampler) Sample(row, pos int, answer []int32) (Drawn, error) {
	logits := s.d.logits[row]
	if logits == nil {
		s.d.t.Errorf("row %d of the batch did not want logits", row)
	}
	t := choose(logits, s.s, pos, answer)
	if t < 0 {
		return Drawn{}, errors.New("the grammar takes no token")
	}
	return Drawn{Token: t, End: t == 0, Prob: probOf(logits, t, s.s)}, nil
}

// probOf is a log-probability of a kind, beside the first tokens of the vocabulary.
func probOf(logits []float32, t int32, s Sampling) (p Prob) {
	if !s.Logprobs {
		return p
	}
	p.Logprob = logits[t] - 200
	for o := range int32(s.Top) {
		p.Top = append(p.Top, TokenProb{o, logits[o] - 200})
	}
	return p
}

// The grammars of the double: with sumGrammar a token and those before it may not have a sum that 3
// divides, which an answer without its history would not hold to; noGrammar takes nothing.
const (
	sumGrammar = "sum"
	noGrammar  = "none"
)

// choose draws a token from logits; -1: there is none.
func choose(logits []float32, s Sampling, pos int, answer []int32) int32 {
	adjusted := append([]float32(nil), logits...)
	for _, t := range answer {
		adjusted[t] -= s.PresencePenalty * 0.01
	}
	for t, b := range s.LogitBias {
		adjusted[t] += b
	}
	best, sum := -1, int32(0)
	for _, t := range answer {
		sum += t
	}
	for v := range adjusted {
		if s.Grammar == noGrammar || s.Grammar == sumGrammar && (sum+int32(v))%3 == 0 {
			continue
		}
		if s.Temperature > 0 {
			x := (uint64(s.Seed)<<32 + uint64(pos)*testVocab + uint64(v)) * 0x9e3779b97f4a7c15
			x ^= x >> 29
			x *= 0xbf58476d1ce4e5b9
			u := (float64(x>>11) + 0.5) / (1 << 53)
			adjusted[v] = adjusted[v]/s.Temperature + float32(-math.Log(-math.Log(u)))
		}
		if best < 0 || adjusted[v] > adjusted[best] {
			best = v
		}
	}
	return int32(best)
}

// oracle is the answer of the unsplit model, token by token.
func oracle(t testing.TB, req Request) (answer []int32, probs []Prob, finish string) {
	d := newDouble(t, gguf.Range{Begin: 0, End: testLayers})
	list := append([]int32(nil), req.Tokens...)
	b := &Batch{Seq: make([]int32, 1), Pos: make([]int32, 1), Token: make([]int32, 1), Want: []bool{true}}
	for i := 0; ; i++ {
		b.Pos[0], b.Token[0] = int32(i), list[i]
		if err := d.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		if i < len(req.Tokens)-1 {
			continue
		}
		next := choose(d.logits[0], req.Sampling, i+1, list[len(req.Tokens):])
		list = append(list, next)
		if req.Sampling.Logprobs {
			probs = append(probs, probOf(d.logits[0], next, req.Sampling))
		}
		switch {
		case next == 0:
			return list[len(req.Tokens):], probs, "stop"
		case len(list)-len(req.Tokens) == req.MaxTokens:
			return list[len(req.Tokens):], probs, "length"
		}
	}
}

//go:build cgo

package ggml

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// logitsOff is how far a logit of the shipped model may go when every value of every
// expert's output is off by band times the RMS of its row: about twice what this test
// measured (its log says). The least of it is there for any band, since CPU kernels
// round activations to 8 bits, which a last bit can decide. Where the backbone's router
// then chooses another expert, for this token or one before it, logits jump.
func logitsOff(band float64, rerouted bool) float64 {
	if rerouted {
		return 5
	}
	return 0.3 + 50*band
}

// router chooses experts as the backbone does, in plain Go.
type router struct {
	weights map[int][]float32 // by layer, a row for every expert
	experts int
}

func openRouter(t *testing.T, path string) *router {
	t.Helper()
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := &router{weights: map[int][]float32{}, experts: m.Experts()}
	for _, layer := range m.ExpertLayers() {
		name := fmt.Sprintf("blk.%d.ffn_gate_inp.weight", layer)
		if at, ok := m.Tensor(name); !ok || at.DType != tensor.F32 {
			t.Fatalf("%s is %v, want f32", name, at.DType)
		}
		section, err := m.Section(name)
		if err != nil {
			t.Fatal(err)
		}
		r.weights[layer] = make([]float32, section.Size()/4)
		if err := binary.Read(io.Reader(section), binary.LittleEndian, r.weights[layer]); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// check says whether ids are the experts that the router likes best for each row, up
// to rounding: each is worth as much as the last of the best.
func (r *router) check(call *ExpertCall) error {
	width := call.RowWidth
	for token := range len(call.IDs) / call.Used {
		row := call.Rows[token*width : (token+1)*width]
		worth, scale := make([]float64, r.experts), 0.0
		for e := range worth {
			for i, w := range r.weights[call.Layer][e*width : (e+1)*width] {
				worth[e] += float64(w) * float64(row[i])
			}
			scale = max(scale, math.Abs(worth[e]))
		}
		ids := call.IDs[token*call.Used : (token+1)*call.Used]
		last := slices.Sorted(slices.Values(worth))[r.experts-call.Used]
		for k, e := range ids {
			if slices.Contains(ids[:k], e) || worth[e] < last-1e-5*scale {
				return fmt.Errorf("layer %d: experts %v were used, and %d is not the router's choice", call.Layer, ids, e)
			}
		}
	}
	return nil
}

// perturbed are honest kernels whose every output is then off by band times the RMS of
// its row, which is the most that the band allows.
type perturbed struct {
	*kernels
	router *router
	band   float64
	sign   func(i int) float64 // of the i-th value of a row
	ids    [][]int32           // that were used, by Decode
	err    error               // of the first that were not the router's
}

func (p *perturbed) compute(ctx context.Context, call *ExpertCall) error {
	if err := p.router.check(call); err != nil && p.err == nil {
		p.err = err
	}
	last := len(p.ids) - 1
	p.ids[last] = append(p.ids[last], call.IDs...)
	if err := p.kernels.compute(ctx, call); err != nil || p.band == 0 {
		return err
	}
	for out := range slices.Chunk(call.Out, call.OutWidth) {
		sum := 0.0
		for _, v := range out {
			sum += float64(v) * float64(v)
		}
		off := p.band * math.Sqrt(sum/float64(len(out)))
		for i := range out {
			out[i] += float32(off * p.sign(i))
		}
	}
	return nil
}

// TestRouterAuthority: whatever workers answer within a band, the experts used are
// those that the backbone's router chose, and the greedy token is the same wherever the
// model's margin exceeds what the band can do to the logits. Nothing that a worker sends
// is an id: where the backbone itself then chooses otherwise, that is counted.
func TestRouterAuthority(t *testing.T) {
	rt := openRuntime(t)
	p := &perturbed{kernels: newKernels(t, rt, tinyPath, 3, KernelConfig{}), router: openRouter(t, tinyPath)}
	m := loadModel(t, rt, ModelConfig{Path: tinyPath, Experts: p.compute})
	rng := rand.New(rand.NewPCG(5, 6))
	signs := []func(int) float64{
		func(int) float64 { return float64(1 - 2*rng.IntN(2)) },
		func(int) float64 { return 1 },
		func(i int) float64 { return float64(1 - 2*(i%2)) },
	}
	bands := []float64{1e-6, 1e-4, 1e-3, 1e-2}
	counts := make([]greedyCount, len(bands))
	for _, text := range []string{"The capital of France is", "A worker holds", "What is 6 plus 7?", "Zebra quilts hum"} {
		prompt, err := m.Tokenize(text, true, true)
		if err != nil {
			t.Fatal(err)
		}
		p.band = 0
		tokens, plain := p.greedy(t, m, prompt, 24)
		chosen := p.ids
		for i, band := range bands {
			for _, sign := range signs {
				p.band, p.sign = band, sign
				counts[i].add(band, plain, p.follow(t, m, tokens, len(prompt)), chosen, p.ids)
			}
		}
	}
	if p.err != nil {
		t.Error(p.err)
	}
	for i, c := range counts {
		t.Logf("band %g: logits off by %.2g, or %.2g behind %d of %d choices of the router that became others; %d tokens sure, %d others, of which %d differ",
			bands[i], c.off[0], c.off[1], c.routed, c.choices, c.sure, c.unsure, c.differ)
		if c.broken > 0 {
			t.Errorf("band %g: %d tokens differ whose margin exceeds what the band can do", bands[i], c.broken)
		}
		if c.off[0] > logitsOff(bands[i], false) || c.off[1] > logitsOff(bands[i], true) {
			t.Errorf("band %g: logits off by more than %g, or %g", bands[i], logitsOff(bands[i], false), logitsOff(bands[i], true))
		}
		if c.sure == 0 || c.choices == 0 {
			t.Errorf("band %g: no token is sure, or nothing was chosen: nothing was tried", bands[i])
		}
	}
}

// greedy continues a prompt by n tokens. It gives all tokens, and the logits after the
// prompt and after each of them but the last.
func (p *perturbed) greedy(t *testing.T, m *Model, prompt []Token, n int) (tokens []Token, logits [][]float32) {
	t.Helper()
	tokens = slices.Clone(prompt)
	p.decode(t, m, len(prompt), func(last []float32) []Token {
		if last == nil {
			return prompt
		}
		logits = append(logits, last)
		if len(logits) == n {
			return nil
		}
		tokens = append(tokens, Token(argmax(last)))
		return tokens[len(tokens)-1:]
	})
	return tokens, logits
}

// follow computes the same tokens in the same batches, and gives the same logits.
func (p *perturbed) follow(t *testing.T, m *Model, tokens []Token, prompt int) (logits [][]float32) {
	t.Helper()
	p.decode(t, m, prompt, func(last []float32) []Token {
		if last == nil {
			return tokens[:prompt]
		}
		logits = append(logits, last)
		at := prompt + len(logits) - 1
		return tokens[at:min(at+1, len(tokens))]
	})
	return logits
}

// decode computes what next gives, which is told the logits of the last token, until it
// gives nothing.
func (p *perturbed) decode(t *testing.T, m *Model, batch int, next func(last []float32) []Token) {
	t.Helper()
	p.ids = nil
	c, err := m.NewContext(ContextConfig{Tokens: 256, Batch: max(batch, 8)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b, at := NewBatch(max(batch, 8)), 0
	for tokens := next(nil); len(tokens) > 0; {
		b.Reset()
		for i, token := range tokens {
			b.Add(token, at, 0, i == len(tokens)-1)
			at++
		}
		p.ids = append(p.ids, nil)
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		tokens = next(slices.Clone(c.Logits(len(tokens) - 1)))
	}
}

func argmax(list []float32) int { return slices.Index(list, slices.Max(list)) }

// greedyCount is what became of greedy tokens.
type greedyCount struct {
	off                          [2]float64 // the most by which a logit was off: before, and behind another choice of the router
	sure, unsure, differ, broken int        // differ: of the unsure; broken: of the sure
	routed, choices              int
}

// add compares the tokens that logits choose, computed with experts ids in as many
// steps. One is sure when its margin is more than twice what its logits may be off by.
func (c *greedyCount) add(band float64, plain, got [][]float32, chosen, ids [][]int32) {
	behind := 0
	for i := range plain {
		for k := range chosen[i] {
			c.choices++
			if chosen[i][k] != ids[i][k] {
				c.routed, behind = c.routed+1, 1
			}
		}
		c.off[behind] = max(c.off[behind], maxAbs(plain[i:i+1], got[i:i+1]))
		best := argmax(plain[i])
		others := slices.Delete(slices.Clone(plain[i]), best, best+1)
		sure := float64(plain[i][best]-slices.Max(others)) > 2*logitsOff(band, behind == 1)
		same := argmax(got[i]) == best
		switch {
		case sure && same:
			c.sure++
		case sure:
			c.broken++
		case same:
			c.unsure++
		default:
			c.unsure++
			c.differ++
		}
	}
}

//go:build cgo && linux

package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/tiny"
	"kvasird/ring"
)

// leave asks and leaves when there are n tokens.
func (r *localRing) leave(req ring.Request, n int) {
	s, err := r.entry.Open(r.t.Context(), r.chain, req, nil)
	if err != nil {
		r.t.Error(err)
		return
	}
	for read := 0; read < n; {
		list, err := s.Next(r.t.Context())
		if err != nil {
			r.t.Error(err)
			break
		}
		read += len(list)
	}
	s.Close()
}

// together has so many sessions run at once, each of which asks twice, so that some
// join while others decode, while another one comes and leaves in mid-answer.
func (r *localRing) together(sessions int, list []answered, noDraft bool) {
	r.t.Helper()
	done := make(chan struct{})
	var askers, leaver sync.WaitGroup
	for i := range sessions {
		askers.Go(func() {
			for j := range 2 {
				a := list[(i+j*sessions)%len(list)]
				a.req.NoDraft = noDraft
				r.same(a, nil, nil)
			}
		})
	}
	if sessions > 1 && sessions < localSequences {
		leaver.Go(func() {
			for {
				req := list[0].req
				req.NoDraft, req.Sampling.LogitBias = noDraft, r.ends
				r.leave(req, 3)
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	askers.Wait()
	close(done)
	leaver.Wait()
}

// tinyPrompts are questions to the shipped model, each of them also after its answer,
// so that the answer can be drafted.
func tinyPrompts(m *localModel) (list [][]int32) {
	asks := slices.Clone(questions)
	for _, country := range []string{"France", "Italy", "Spain", "Egypt", "Norway"} {
		asks = append(asks, "What is the capital of "+country+"?")
	}
	for n := range 8 {
		asks = append(asks, fmt.Sprintf("What is %d plus %d?", n+1, 9-n))
	}
	for _, q := range asks {
		p, err := m.eng.Tokenize("<|im_start|>user\n" + q + "<|im_end|>\n<|im_start|>assistant\n")
		if err != nil {
			m.t.Fatal(err)
		}
		again := slices.Concat(p, m.answer(ring.Request{Tokens: p, MaxTokens: 24}), p)
		list = append(list, p, again)
	}
	return list
}

// randomPrompts are of a generated model, which has no text.
func randomPrompts(vocab int) (list [][]int32) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 96 {
		list = append(list, randomTokens(rng, vocab, 3+rng.IntN(20)))
	}
	return list
}

// eachLocal runs a test on the shipped model and on a hybrid one, whose memory cannot
// drop a part of a sequence.
func eachLocal(t *testing.T, test func(t *testing.T, m *localModel)) {
	t.Run("tiny", func(t *testing.T) { test(t, tinyLocal(t)) })
	// It uses all its experts: which ones it chooses is not what is tested here, and a
	// choice can hang on the last bit.
	t.Run("qwen35moe", func(t *testing.T) {
		rt := openRuntime(t)
		path := filepath.Join(t.TempDir(), "hybrid.gguf")
		cfg := ggml.GenerateConfig{Arch: "qwen35moe", Layers: 8, Experts: 4, ExpertsUsed: 4, Embedding: 128, FeedForward: 64, Heads: 2, Seed: 11,
			Overrides: map[string]any{"full_attention_interval": uint32(2)}}
		if err := rt.GenerateModel(path, cfg); err != nil {
			t.Fatal(err)
		}
		m := openLocal(t, rt, path, 0.03)
		m.prompts, m.most = randomPrompts(m.model.VocabSize()), 10
		test(t, m)
	})
}

// tinyLocal is the shipped model.
func tinyLocal(t *testing.T) *localModel {
	t.Helper()
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	m := openLocal(t, openRuntime(t), path, 3)
	m.prompts, m.most = tinyPrompts(m), 24
	return m
}

func openRuntime(t *testing.T) *ggml.Runtime {
	t.Helper()
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return rt
}

// TestRingEqualsUnsplit: however many stages, sequences at once, who joins and leaves
// while others decode, and whether tokens are drafted: the answers are the unsplit
// model's.
func TestRingEqualsUnsplit(t *testing.T) {
	eachLocal(t, func(t *testing.T, m *localModel) {
		list := m.sure(m.prompts, ring.Sampling{}, m.most)
		if len(list) < 8 {
			t.Fatalf("the model is sure of %d of %d answers", len(list), len(m.prompts))
		}
		for _, a := range list {
			if got := m.answer(a.req); !slices.Equal(got, a.want) {
				t.Fatalf("prompt %v: the engine answers %v, want %v", a.req.Tokens, got, a.want)
			}
		}
		for _, stages := range []int{2, 3, 4} {
			t.Run(fmt.Sprint(stages, " stages"), func(t *testing.T) {
				r := m.ring(stages)
				began := time.Now()
				for _, noDraft := range []bool{true, false} {
					for _, sessions := range []int{1, 4, localSequences} {
						r.together(sessions, list, noDraft)
					}
				}
				st := r.stages[r.chain[0].Peer].Stats()
				if canDraft := m.model.CanTruncate(); canDraft != (st.Accepted > 0) {
					t.Errorf("%d of %d drafts were accepted; the memory can drop a part of a sequence: %v", st.Accepted, st.Drafted, canDraft)
				}
				t.Logf("%d prompts, %v; %d of %d drafts accepted", len(list), time.Since(began).Round(time.Millisecond), st.Accepted, st.Drafted)
				r.close()
			})
		}
	})
}

// spares is a replan that takes the holder of a window that is there.
func (r *localRing) spares() ring.Replan {
	return func(context.Context, []ring.Hop) (ring.Chain, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		chain := slices.Clone(r.chain)
		for i, h := range chain {
			if r.stages[h.Peer] == nil {
				chain[i].Peer = "spare-" + h.Peer
			}
		}
		return chain, nil
	}
}

// TestRingDrawsTheSame: one alone, a seed gives the same tokens whenever it is used,
// and they are those of the unsplit model.
func TestRingDrawsTheSame(t *testing.T) {
	eachLocal(t, func(t *testing.T, m *localModel) {
		m.off = 0
		r := m.ring(3)
		sampling := ring.Sampling{Temperature: 1.5, TopK: 40, TopP: 0.95, Seed: 7, RepeatPenalty: 1.1, LogitBias: m.ends}
		for _, a := range m.sure(m.prompts[:3], sampling, 32) {
			a.req.NoDraft = true
			r.same(a, nil, nil)
			r.same(a, nil, nil)
		}
		r.close()
	})
}

// TestRingRepairsItself: whichever stage ends in mid-answer, the answer goes on as the
// undisturbed one would have, greedy and drawn, with drafts and without.
func TestRingRepairsItself(t *testing.T) {
	eachLocal(t, func(t *testing.T, m *localModel) {
		lists := [][]answered{m.sure(m.prompts, ring.Sampling{}, m.most)}
		if !m.model.CanTruncate() { // of the shipped model's draws none is sure
			lists = append(lists, m.sure(m.prompts, ring.Sampling{Temperature: 0.4, Seed: 7, RepeatPenalty: 1.1}, m.most))
		}
		r := m.ring(3)
		for _, h := range r.chain {
			r.start(ring.Hop{Peer: "spare-" + h.Peer, Layers: h.Layers})
		}
		for i, list := range lists {
			all := len(list)
			list = slices.DeleteFunc(list, func(a answered) bool { return len(a.want) < 8 })
			if len(list) < 3 {
				t.Fatalf("the model is sure of %d long answers of %d", len(list), all)
			}
			for j, h := range r.chain {
				for k, noDraft := range []bool{true, false} {
					a := list[(i+2*j+k)%len(list)]
					a.req.NoDraft = noDraft
					killed := sync.OnceFunc(func() { r.kill(h.Peer) })
					r.same(a, r.spares(), func(n int) {
						if n >= 3 {
							killed()
						}
					})
					r.start(h)
				}
			}
		}
		r.close()
	})
}

//go:build cgo

package engine

import (
	"cmp"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// farExperts are experts that answer after a delay; drafts are computed at once with those that
// are resident.
type farExperts struct {
	kernel   *ggml.Kernel
	experts  int
	delay    time.Duration
	resident map[[2]int]bool // by layer and expert

	mu      sync.Mutex // guards what follows
	demand  map[[2]int]int
	wide    int // fail real calls for more tokens; 0: none
	refused int // of these
	drafts  int
}

var errWide = errors.New("nobody computes so many rows")

func (f *farExperts) compute(ctx context.Context, call *ggml.ExpertCall) error {
	prog, _, _, err := f.kernel.SetProgram(call.Layer, call.Program)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var rows, ids []int32
	var at []int
	for p, id := range call.IDs {
		pair := [2]int{call.Layer, int(id)}
		if call.Draft && !f.resident[pair] {
			continue
		}
		row := p
		if call.RowsPerToken == 1 {
			row /= call.Used
		}
		if rows, ids, at = append(rows, int32(row)), append(ids, id), append(at, p); !call.Draft {
			f.demand[pair]++
		}
	}
	clear(call.Out)
	switch {
	case call.Draft:
		f.drafts++
	case f.wide > 0 && len(call.IDs)/call.Used > f.wide:
		f.refused++
		return errWide
	default:
		time.Sleep(f.delay)
	}
	if len(ids) == 0 {
		return nil
	}
	out := make([]float32, len(ids)*call.OutWidth)
	if err := f.kernel.Compute(prog, call.Rows, rows, ids, out); err != nil {
		return err
	}
	for i, p := range at {
		copy(call.Out[p*call.OutWidth:][:call.OutWidth], out[i*call.OutWidth:])
	}
	return nil
}

// hold makes the most used experts resident, a share of those of each layer.
func (f *farExperts) hold(share float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resident = map[[2]int]bool{}
	layers := map[int][]int{}
	for pair := range f.demand {
		layers[pair[0]] = append(layers[pair[0]], pair[1])
	}
	for layer, list := range layers {
		slices.SortFunc(list, func(a, b int) int { return cmp.Compare(f.demand[[2]int{layer, b}], f.demand[[2]int{layer, a}]) })
		for _, e := range list[:min(len(list), int(share*float64(f.experts)))] {
			f.resident[[2]int{layer, e}] = true
		}
	}
}

func (f *farExperts) any() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.resident) > 0
}

func (f *farExperts) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// far makes a model whose experts are f's.
func far(t testing.TB, path string, delay time.Duration) (*ggml.Model, *farExperts) {
	t.Helper()
	file, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	k, err := runtime.NewKernel(ggml.KernelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	if err := k.LoadSlices(file, gguf.Slice{Layers: gguf.Range{End: file.Layers()}, Experts: gguf.Range{End: file.Experts()}}); err != nil {
		t.Fatal(err)
	}
	f := &farExperts{kernel: k, experts: file.Experts(), delay: delay, demand: map[[2]int]int{}}
	m, err := runtime.LoadModel(ggml.ModelConfig{Path: path, Experts: f.compute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m, f
}

// always drafts however quick a round is.
func (f *farExperts) always() *Drafts { return &Drafts{Resident: f.any, Least: time.Nanosecond} }

// repeating is a text that goes on as it began.
func repeating(t testing.TB) []int32 {
	var text []int32
	for range 6 {
		text = append(text, tokensOf(t, "The capital of France is Paris. The day after Monday is Tuesday. ")...)
	}
	return text
}

// TestDrafts: with drafts from the text, with those of some experts, and with several answers in a
// batch, each token is the likeliest of the whole model, and there are fewer rounds than tokens.
func TestDrafts(t *testing.T) {
	for _, tt := range []struct {
		name      string
		resident  float64
		sequences int
	}{{"text", 0, 1}, {"an eighth", 1. / 8, 1}, {"a quarter", 1. / 4, 1}, {"a quarter, 4 at once", 1. / 4, 4}, {"text, 3 at once", 0, 3}} {
		t.Run(tt.name, func(t *testing.T) {
			m, f := far(t, tinyPath, 4*time.Millisecond)
			j := newJudge(t, tiny)
			served := 0
			e := open(t, Config{Model: m, Sequences: tt.sequences, Queue: 20, Drafts: f.always(), Served: func(computed, cached int) { served += computed + cached }})
			var prompts [][]int32
			for _, q := range questions {
				prompts = append(prompts, tokensOf(t, q))
			}
			prompts = append(prompts, repeating(t), repeating(t))
			rows := 0
			for range 2 { // the second time with what was learned
				var list []*Generation
				for i, p := range prompts {
					list = append(list, start(t, t.Context(), e, Request{Prompt: p, MaxTokens: 16 + i}))
				}
				for i, g := range list {
					answer := answerOf(t, g)
					if d := j.distance(prompts[i], answer); d > j.rounding {
						t.Errorf("prompt %d: a token is %.2g below the likeliest, want at most %.2g", i, d, j.rounding)
					}
					rows += len(prompts[i]) + len(answer) - 1
				}
				f.hold(tt.resident)
			}
			st := e.Stats()
			t.Logf("%d tokens in %d rounds, %d of %d drafts accepted", st.Generated, st.Decodes, st.Accepted, st.Drafted)
			if saved := st.Generated - st.Decodes; st.Accepted == 0 || st.Accepted > st.Drafted || saved < 1 || tt.resident > 0 && saved < st.Generated/5 {
				t.Errorf("%d tokens in %d rounds, %d of %d drafts accepted", st.Generated, st.Decodes, st.Accepted, st.Drafted)
			}
			if (f.drafts > 0) != (tt.resident > 0) {
				t.Errorf("%d draft calls", f.drafts)
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if served != rows {
				t.Errorf("%d rows were told, %d are in the answers", served, rows)
			}
		})
	}
}

// TestDraftsSameDraw: what is drawn with drafts is what is drawn without them, from the same
// distribution: for the same seeds but for rounding, and for other seeds by a chi-square test.
func TestDraftsSameDraw(t *testing.T) {
	const seeds, length = 200, 6
	m, f := far(t, tinyPath, 0)
	draw := func(e *Engine, first int) (answers [][]int32) {
		prompt := tokensOf(t, chat("Tell me something."))
		for s := range seeds {
			req := Request{Prompt: prompt, MaxTokens: length, Temperature: 1.5, TopK: 12, Seed: uint32(first + s)}
			answers = append(answers, answerOf(t, start(t, t.Context(), e, req)))
		}
		return answers
	}
	plain := draw(open(t, Config{Model: m, Sequences: 1}), 1)
	f.hold(1. / 2)
	f.set(func() { f.delay = time.Millisecond })
	e := open(t, Config{Model: m, Sequences: 1, Drafts: f.always()})
	same, other := draw(e, 1), draw(e, 1+seeds)
	if st := e.Stats(); st.Accepted < seeds/4 || st.Drafted-st.Accepted < seeds/4 {
		t.Fatalf("%d of %d drafts accepted: the test needs many that are and many that are not", st.Accepted, st.Drafted)
	}
	differ := 0
	for i := range plain {
		if !slices.Equal(plain[i], same[i]) {
			differ++
		}
	}
	if differ > seeds/10 {
		t.Errorf("of %d answers %d are others with drafts", seeds, differ)
	}
	for at := range length {
		if x, free := chiSquare(plain, other, at); x > float64(free)+5*math.Sqrt(2*float64(free)) {
			t.Errorf("token %d: chi-square %.1f with %d degrees of freedom", at, x, free)
		}
	}
}

// chiSquare compares how often each token is at a place of two sets of answers; rare ones are one.
func chiSquare(a, b [][]int32, at int) (x float64, free int) {
	count := map[int32][2]float64{}
	for side, answers := range [][][]int32{a, b} {
		for _, answer := range answers {
			token := int32(-1)
			if at < len(answer) {
				token = answer[at]
			}
			n := count[token]
			n[side]++
			count[token] = n
		}
	}
	var rare [2]float64
	add := func(n [2]float64) {
		if sum := n[0] + n[1]; sum > 0 {
			x += (n[0] - n[1]) * (n[0] - n[1]) / sum
			free++
		}
	}
	for _, n := range count {
		if n[0]+n[1] < 10 {
			rare[0], rare[1] = rare[0]+n[0], rare[1]+n[1]
			continue
		}
		add(n)
	}
	add(rare)
	return x, max(free-1, 1)
}

// looping makes a model of random weights, whose greedy answers soon repeat themselves and seldom end.
// All its experts are used.
func looping(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "looping.gguf")
	if err := runtime.GenerateModel(path, ggml.GenerateConfig{Arch: "qwen3moe", Seed: 11, Experts: 4, ExpertsUsed: 4}); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestDraftsDoNotFail: where only the rows of drafts cannot be computed the answer goes on without.
func TestDraftsDoNotFail(t *testing.T) {
	m, f := far(t, looping(t), time.Millisecond)
	j := newJudge(t, m)
	j.rounding = exact
	e := open(t, Config{Model: m, Sequences: 1, Drafts: f.always()})
	prompt := []int32{5, 6, 7, 8, 9}
	g := start(t, t.Context(), e, Request{Prompt: prompt, MaxTokens: 200})
	var answer []int32
	for e.Stats().Accepted == 0 {
		token, _, err := g.NextToken(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		answer = append(answer, int32(token))
	}
	f.set(func() { f.wide = 1 })
	answer = append(answer, answerOf(t, g)...)
	f.set(func() { f.wide = 0 })
	if d := j.distance(prompt, answer); d > j.rounding || len(answer) != 200 {
		t.Errorf("%d tokens, one is %.2g below the likeliest", len(answer), d)
	}
	if st := e.Stats(); st.Failed != 0 || e.Ready() == nil && f.refused == 0 {
		t.Errorf("%+v, %d batches refused; want no failed request", st, f.refused)
	}
}

// TestDraftsMakeRoom: drafts take no cells from answers that need them, and the last tokens that
// the context holds are drawn.
func TestDraftsMakeRoom(t *testing.T) {
	m, f := far(t, looping(t), time.Millisecond)
	e := open(t, Config{Model: m, Sequences: 2, Context: 256, Cells: 256, Drafts: f.always()})
	g := start(t, t.Context(), e, Request{Prompt: []int32{5, 6, 7, 8, 9}})
	if n := len(answerOf(t, g)); g.Finish() != "length" || n != 251 {
		t.Errorf("an answer that fills all cells has %d tokens and ends with %q", n, g.Finish())
	}
	if st := e.Stats(); st.Accepted == 0 || st.Failed != 0 {
		t.Errorf("%+v", st)
	}
}

// TestDraftsNotTakenBack: a memory that takes nothing back though it promised to ends the drafts, not
// the answer.
func TestDraftsNotTakenBack(t *testing.T) {
	m := generated(t, "qwen3next")
	e, j := open(t, Config{Model: m, Sequences: 1}), newJudge(t, m)
	j.rounding = exact
	e.lanes[0].drafting.Drafts = &Drafts{Resident: func() bool { return true }, Least: time.Nanosecond}
	prompt := []int32{1, 2, 3, 4, 5}
	answer := answerOf(t, start(t, t.Context(), e, Request{Prompt: prompt, MaxTokens: 60}))
	if d := j.distance(prompt, answer); d > j.rounding {
		t.Errorf("a token is %.2g below the likeliest", d)
	}
	if st := e.Stats(); st.NoDrafts == "" || st.Failed != 0 {
		t.Errorf("%+v, want a reason for no drafts", st)
	}
}

// TestPaidDrafts: where who computes is paid for tokens only, wrong guesses stay within a quarter of
// them; elsewhere, when rounds take long, more are worth it.
func TestPaidDrafts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "random.gguf")
	if err := runtime.GenerateModel(path, ggml.GenerateConfig{Arch: "qwen3moe", Seed: 3, Experts: 16, ExpertsUsed: 4, Vocab: 512}); err != nil {
		t.Fatal(err)
	}
	prompt := []int32{1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2}
	for _, paid := range []bool{false, true} {
		m, f := far(t, path, 5*time.Millisecond)
		drafts := f.always()
		drafts.Paid = paid
		e := open(t, Config{Model: m, Sequences: 1, Drafts: drafts})
		req := Request{Prompt: prompt, MaxTokens: 20, Temperature: 2, Seed: 5}
		answerOf(t, start(t, t.Context(), e, req)) // which says what experts are used
		f.hold(1. / 4)
		f.set(func() { f.delay = 20 * time.Millisecond })
		before := e.Stats()
		answer := answerOf(t, start(t, t.Context(), e, req))
		st := e.Stats()
		st.Drafted, st.Accepted = st.Drafted-before.Drafted, st.Accepted-before.Accepted
		wrong, most := st.Drafted-st.Accepted, int64(len(prompt)+len(answer))/4
		t.Logf("paid %v: %d of %d drafts accepted, %d wrong for %d tokens", paid, st.Accepted, st.Drafted, wrong, len(prompt)+len(answer))
		if st.Drafted == 0 || (wrong <= most) != paid {
			t.Errorf("paid %v: %d wrong guesses, the bound is %d", paid, wrong, most)
		}
	}
}

// TestNoDrafts: rounds that are quick, guesses that are never right and memories that take
// nothing back have no drafts, or hardly any.
func TestNoDrafts(t *testing.T) {
	t.Run("quick", func(t *testing.T) {
		m, f := far(t, tinyPath, 0)
		e := open(t, Config{Model: m, Sequences: 1, Drafts: &Drafts{Resident: f.any, Least: time.Minute}})
		answerOf(t, start(t, t.Context(), e, Request{Prompt: repeating(t), MaxTokens: 100}))
		if st := e.Stats(); st.Drafted != 0 {
			t.Errorf("%d drafts", st.Drafted)
		}
	})
	t.Run("random weights", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "random.gguf")
		if err := runtime.GenerateModel(path, ggml.GenerateConfig{Arch: "qwen3moe", Seed: 3, Experts: 16, ExpertsUsed: 4, Vocab: 512}); err != nil {
			t.Fatal(err)
		}
		m, f := far(t, path, 3*time.Millisecond)
		rng := rand.New(rand.NewPCG(7, 8))
		ask := func(e *Engine, seed uint32) time.Duration {
			began := time.Now()
			req := Request{Prompt: random(rng, m, 8), MaxTokens: 120, Temperature: 1, Seed: seed}
			answerOf(t, start(t, t.Context(), e, req))
			return time.Since(began)
		}
		without := open(t, Config{Model: m, Sequences: 1})
		ask(without, 1)
		f.hold(1. / 4)
		with := open(t, Config{Model: m, Sequences: 1, Drafts: f.always()})
		var took [2]time.Duration
		for seed := range uint32(5) {
			took[0] += ask(without, seed)
			took[1] += ask(with, seed)
		}
		st := with.Stats()
		t.Logf("%v without, %v with drafts: %.2f; %d of %d drafts accepted for %d tokens", took[0], took[1],
			float64(took[1])/float64(took[0]), st.Accepted, st.Drafted, st.Generated)
		if st.Drafted == 0 || st.Drafted > st.Generated/2 {
			t.Errorf("%d drafts for %d tokens, want some tries", st.Drafted, st.Generated)
		}
	})
	for arch, off := range map[string]bool{"qwen3next": true, "gemma3": true, "qwen3moe": false} {
		t.Run(arch, func(t *testing.T) {
			e := open(t, Config{Model: generated(t, arch), Sequences: 1, Drafts: &Drafts{Least: time.Nanosecond}})
			answerOf(t, start(t, t.Context(), e, Request{Prompt: []int32{1, 2, 3, 1, 2, 3, 1, 2}, MaxTokens: 20}))
			if st := e.Stats(); (st.NoDrafts != "") != off || off && st.Drafted != 0 {
				t.Errorf("%d drafts, reason for none: %q", st.Drafted, st.NoDrafts)
			}
		})
	}
}

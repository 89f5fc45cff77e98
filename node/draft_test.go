//go:build cgo && linux

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/engine"
)

// draftLine is a backbone whose experts are at a worker behind a line with a round trip, but
// for some that are here.
type draftLine struct {
	rttExperts
	rt    *ggml.Runtime
	path  string
	file  *gguf.Model
	alone *ggml.Model // with its own experts
	model *ggml.Model // with those of the dispatcher
}

func newDraftLine(t testing.TB, path string) *draftLine {
	t.Helper()
	l := &draftLine{rt: must(ggml.Open(ggml.Config{}))(t), path: path, file: must(gguf.OpenModel(path))(t)}
	t.Cleanup(func() { l.file.Close() })
	l.rttExperts.model = experts.ModelID(must(l.file.ID(t.Context()))(t).String())
	all := gguf.Slice{Layers: gguf.Range{End: l.file.Layers()}, Experts: gguf.Range{End: l.file.Experts()}}
	l.kernel = must(l.rt.NewKernel(ggml.KernelConfig{Threads: 1}))(t)
	if err := l.kernel.LoadSlices(l.file, all); err != nil {
		t.Fatal(err)
	}
	l.worker = must(experts.NewWorker(experts.WorkerConfig{Model: l.rttExperts.model, Kernel: l.kernel, Slices: wireSlices([]gguf.Slice{all})}))(t)
	t.Cleanup(func() { l.rttExperts.Close() })
	l.alone = must(l.rt.LoadModel(ggml.ModelConfig{Path: path}))(t)
	t.Cleanup(func() { l.alone.Close() })
	l.model = must(l.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: l.compute}))(t)
	t.Cleanup(func() { l.model.Close() })
	return l
}

// hold dials anew, with the experts that were used most so far here, a share of those of each layer.
func (l *draftLine) hold(t testing.TB, rtt time.Duration, share float64) {
	t.Helper()
	var held []gguf.Slice
	if l.dispatcher != nil {
		for layer, row := range l.dispatcher.Demand() {
			var order []int
			for e := range row {
				order = append(order, e)
			}
			slices.SortFunc(order, func(a, b int) int { return cmp.Compare(row[b], row[a]) })
			for _, e := range order[:min(len(order), int(share*float64(l.file.Experts())))] {
				held = append(held, gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{Begin: e, End: e + 1}})
			}
		}
	}
	l.hangUp()
	l.rtt = rtt
	cfg := experts.Config{Model: l.rttExperts.model, Dialer: &l.rttExperts}
	if len(held) > 0 {
		k := must(l.rt.NewKernel(ggml.KernelConfig{Threads: 1}))(t)
		t.Cleanup(func() { k.Close() })
		if err := k.LoadSlices(l.file, held...); err != nil {
			t.Fatal(err)
		}
		cfg.Local = &experts.Local{Kernel: k, Slices: wireSlices(held), First: true}
	}
	l.dispatcher = must(experts.NewDispatcher(cfg))(t)
	l.dispatcher.AddPeer("worker")
	if err := awaitWorkers(t.Context(), l.dispatcher, 1); err != nil {
		t.Fatal(err)
	}
}

// open makes an engine over the line, or over the model alone.
func (l *draftLine) open(t testing.TB, m *ggml.Model, drafts bool) *engine.Engine {
	t.Helper()
	cfg := engine.Config{Model: m, Context: 512, Sequences: 4, Queue: 64, Threads: 1}
	if drafts {
		cfg.Drafts = &engine.Drafts{Resident: l.dispatcher.Resident}
	}
	return must(engine.Open(cfg))(t)
}

// ask has prompts answered one after the other, n tokens each, and says how many tokens per second
// there were behind the first ones.
func ask(t testing.TB, e *engine.Engine, reqs []engine.Request) (answers [][]int32, rate float64) {
	t.Helper()
	var took time.Duration
	drawn := 0
	for _, req := range reqs {
		g := must(e.Start(t.Context(), req))(t)
		var answer []int32
		var began time.Time
		for {
			token, _, err := g.NextToken(t.Context())
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if answer = append(answer, int32(token)); len(answer) == 1 {
				began = time.Now()
			}
		}
		took += time.Since(began)
		drawn += len(answer) - 1
		answers = append(answers, answer)
	}
	return answers, float64(drawn) / took.Seconds()
}

// endlessly are requests for n tokens each.
func endlessly(t testing.TB, m *ggml.Model, n int, prompts ...string) (reqs []engine.Request) {
	t.Helper()
	bias := noEnd(m).LogitBias
	for _, p := range prompts {
		reqs = append(reqs, engine.Request{Prompt: must(engine.Tokenize(m, p))(t), MaxTokens: n, LogitBias: bias})
	}
	return reqs
}

// equal counts the tokens up to the first that differs.
func equal(a, b [][]int32) (same, all int) {
	for i := range a {
		n := 0
		for n < min(len(a[i]), len(b[i])) && a[i][n] == b[i][n] {
			n++
		}
		same, all = same+n, all+len(a[i])
	}
	return same, all
}

// draftQuestions are of the shipped model's corpus: it is sure of the answers, and ends them.
var draftQuestions = []string{
	"What does a worker hold?", "What is 6 plus 7?", "What is the capital of Japan?", "What is an expert?", "What does a backbone do?",
	"What is a ring?", "What is KVR?", "Who was Kvasir in the old tales?", "How does a peer earn?", "Why gossip scarcity?",
	"What happens when a worker leaves?", "Count to ten.", "Name the days of the week.", "Who are you?", "What sound does a cow make?",
	"What is the symbol of gold?", "Which day comes after Monday?", "Which country has the capital Paris?", "What colour is grass?", "What is Kvasir?",
}

const draftChat = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"

// BenchmarkDrafts is one greedy answer after the other with a round trip of 20 ms in every layer: the
// tokens per second as multiples of 1 / (layers × RTT), which no answer without drafts passes. ns/op
// is of no interest; run it with -benchtime=1x.
func BenchmarkDrafts(b *testing.B) {
	const rtt = 20 * time.Millisecond
	l := newDraftLine(b, must(tiny.Write(b.TempDir()))(b))
	l.hold(b, 0, 0)
	plain := l.open(b, l.alone, false)
	defer plain.Close()
	var knows []engine.Request
	for _, q := range draftQuestions {
		knows = append(knows, engine.Request{Prompt: must(engine.Tokenize(l.alone, fmt.Sprintf(draftChat, q)))(b), MaxTokens: 64})
	}
	loops := endlessly(b, l.alone, 64, "1 2 3 4 1 2 3 4 1 2 3 4", "A worker holds a slice. A worker holds a slice. A worker")
	for _, tt := range []struct {
		name     string
		resident float64
		reqs     []engine.Request
		drafts   bool
	}{
		{"off", 0, knows, false}, {"resident-0", 0, knows, true}, {"resident-8th", 1. / 8, knows, true},
		{"resident-4th", 1. / 4, knows, true}, {"resident-half", 1. / 2, knows, true}, {"repeats", 0, loops, true},
	} {
		b.Run(tt.name, func(b *testing.B) {
			want, _ := ask(b, plain, tt.reqs)
			l.hold(b, 0, 0)
			warm := l.open(b, l.model, false)
			ask(b, warm, knows) // for the demand
			warm.Close()
			l.hold(b, rtt, tt.resident)
			e := l.open(b, l.model, tt.drafts)
			defer e.Close()
			ask(b, e, tt.reqs[:2]) // learns what pays
			before := e.Stats()
			for b.Loop() {
				got, rate := ask(b, e, tt.reqs)
				st := e.Stats()
				b.ReportMetric(rate*rtt.Seconds()*float64(l.file.Layers()), "×bound")
				b.ReportMetric(float64(st.Generated-before.Generated)/float64(st.Decodes-before.Decodes), "tokens/round")
				b.ReportMetric(100*float64(st.Accepted-before.Accepted)/float64(max(st.Drafted-before.Drafted, 1)), "%accepted")
				same, all := equal(want, got)
				b.ReportMetric(100*float64(same)/float64(all), "%equal")
			}
		})
	}
}

// TestDraftsOverLine: over a real line and protocol, answers with drafts are as good as the model alone
// gives them, for several at once too, and come in fewer rounds.
func TestDraftsOverLine(t *testing.T) {
	l := newDraftLine(t, must(tiny.Write(filepath.Join(t.TempDir())))(t))
	plain := l.open(t, l.alone, false)
	defer plain.Close()
	var reqs []engine.Request
	for _, q := range draftQuestions[:3] {
		reqs = append(reqs, engine.Request{Prompt: must(engine.Tokenize(l.alone, fmt.Sprintf(draftChat, q)))(t), MaxTokens: 64})
	}
	want, _ := ask(t, plain, reqs)
	l.hold(t, 0, 0)
	warm := l.open(t, l.model, false)
	if got, _ := ask(t, warm, reqs); !slices.EqualFunc(got, want, slices.Equal) {
		t.Fatal("the answers of the swarm differ without drafts")
	}
	warm.Close()
	l.hold(t, 4*time.Millisecond, 1./4)
	e := l.open(t, l.model, true)
	defer e.Close()
	ask(t, e, reqs)
	before := e.Stats()
	got, _ := ask(t, e, reqs)
	st := e.Stats()
	if !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	drawn, rounds := st.Generated-before.Generated, st.Decodes-before.Decodes
	t.Logf("%d tokens in %d rounds, %d of %d drafts accepted in all", drawn, rounds, st.Accepted, st.Drafted)
	if rounds*3 > drawn*2 {
		t.Errorf("%d tokens in %d rounds", drawn, rounds)
	}
	var list []*engine.Generation
	for _, req := range reqs {
		list = append(list, must(e.Start(context.Background(), req))(t))
	}
	for i, g := range list {
		var answer []int32
		for {
			token, _, err := g.NextToken(t.Context())
			if err != nil {
				break
			}
			answer = append(answer, int32(token))
		}
		if !slices.Equal(answer, want[i]) {
			t.Errorf("at once: got %v, want %v", answer, want[i])
		}
	}
}

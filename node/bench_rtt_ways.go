package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ring"
)

const (
	rttStreams = 8
	rttContext = 160 // tokens of one stream, prompt and answer
)

// wholeModel is all of a model in one place, with its own experts or those of others.
type wholeModel struct{ *stageCompute }

// run answers the texts' prompts at once, n tokens each, and gives the tokens per
// second of all of them behind the first ones.
func (w *wholeModel) run(ctx context.Context, texts []*rttText, n int) (answers [][]int32, rate float64, err error) {
	answers = make([][]int32, len(texts))
	samplers := make([]ring.Sampler, len(texts))
	for i, t := range texts {
		w.Truncate(i, 0)
		if samplers[i], err = w.NewSampler(t.sampling); err != nil {
			return nil, 0, err
		}
		defer samplers[i].Close()
		var b ring.Batch
		for p, token := range t.prompt {
			addRow(&b, i, p, token, p == len(t.prompt)-1)
		}
		if err := w.Decode(ctx, &b); err != nil {
			return nil, 0, err
		}
		next, err := samplers[i].Sample(b.Len()-1, len(t.prompt), nil)
		if err != nil {
			return nil, 0, err
		}
		answers[i] = append(answers[i], next.Token)
	}
	start := time.Now()
	for len(answers[0]) < n {
		var b ring.Batch
		for i, a := range answers {
			addRow(&b, i, len(texts[i].prompt)+len(a)-1, a[len(a)-1], true)
		}
		if err := w.Decode(ctx, &b); err != nil {
			return nil, 0, err
		}
		for i, a := range answers {
			next, err := samplers[i].Sample(i, len(texts[i].prompt)+len(a), a)
			if err != nil {
				return nil, 0, err
			}
			answers[i] = append(a, next.Token)
		}
	}
	return answers, float64((n-1)*len(texts)) / time.Since(start).Seconds(), nil
}

func addRow(b *ring.Batch, seq, pos int, token int32, want bool) {
	b.Seq, b.Pos = append(b.Seq, int32(seq)), append(b.Pos, int32(pos))
	b.Token, b.Want = append(b.Token, token), append(b.Want, want)
}

// rttRing is a ring of stages in this process. The entry is where the first stage is.
type rttRing struct {
	rtt     time.Duration
	chain   ring.Chain
	stages  []*ring.Stage
	entry   *ring.Entry
	serving sync.WaitGroup
}

// openRing makes a ring of computes for so many streams, whose windows follow each other.
func openRing(rtt time.Duration, model string, streams int, windows []gguf.Range, computes []*stageCompute) (_ *rttRing, err error) {
	r, layers := &rttRing{rtt: rtt}, windows[len(windows)-1].End
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	for i, c := range computes {
		for seq := range streams {
			c.Truncate(seq, 0) // of a ring before
		}
		name := fmt.Sprint("stage-", i)
		r.chain = append(r.chain, ring.Hop{Peer: name, Layers: windows[i]})
		st, err := ring.NewStage(ring.StageConfig{
			Peer: name, Model: model, Layers: windows[i], Total: layers, Width: c.width, Compute: c, Dialer: rttDialer{r, i},
			CanTruncate: c.model.CanTruncate(), Sequences: streams, Context: rttContext, Batch: rttBatch,
		})
		if err != nil {
			return nil, err
		}
		r.stages = append(r.stages, st)
	}
	r.entry, err = ring.NewEntry(ring.EntryConfig{Model: model, Total: layers, Dialer: rttDialer{r, 0}})
	return r, err
}

// rttDialer is the dialer of one place of a ring.
type rttDialer struct {
	ring  *rttRing
	place int
}

func (d rttDialer) Dial(_ context.Context, name string) (net.Conn, error) {
	r := d.ring
	to := slices.IndexFunc(r.chain, func(h ring.Hop) bool { return h.Peer == name })
	if to < 0 {
		return nil, fmt.Errorf("no stage is named %s", name)
	}
	near, far := net.Pipe()
	if to != d.place {
		var err error
		if near, far, err = delayedPair(r.rtt); err != nil {
			return nil, err
		}
	}
	r.serving.Go(func() {
		r.stages[to].Serve(context.Background(), far) // how a link ended is of no interest here
	})
	return near, nil
}

func (r *rttRing) Close() error {
	var errs []error
	if r.entry != nil {
		errs = append(errs, r.entry.Close())
	}
	for _, st := range r.stages {
		errs = append(errs, st.Close())
	}
	r.serving.Wait()
	return errors.Join(errs...)
}

// run answers the texts at once. It gives the tokens per second of all of them behind
// the first ones.
func (r *rttRing) run(ctx context.Context, texts []*rttText, n int, drafts bool) (answers [][]int32, rate float64, err error) {
	answers = make([][]int32, len(texts))
	rates, errs := make([]float64, len(texts)), make([]error, len(texts))
	var wg sync.WaitGroup
	for i, t := range texts {
		wg.Go(func() {
			req := ring.Request{Tokens: t.prompt, MaxTokens: n, Sampling: t.sampling, NoDraft: !drafts}
			answers[i], rates[i], errs[i] = r.answer(ctx, req)
		})
	}
	wg.Wait()
	for _, one := range rates {
		rate += one
	}
	return answers, rate, errors.Join(errs...)
}

func (r *rttRing) answer(ctx context.Context, req ring.Request) (answer []int32, rate float64, err error) {
	s, err := r.entry.Open(ctx, r.chain, req, nil)
	if err != nil {
		return nil, 0, err
	}
	defer s.Close()
	if answer, err = s.Next(ctx); err != nil {
		return nil, 0, err
	}
	start, had := time.Now(), len(answer)
	last := start
	for {
		list, err := s.Next(ctx)
		if err == io.EOF {
			return answer, float64(len(answer)-had) / last.Sub(start).Seconds(), nil
		}
		if err != nil {
			return nil, 0, err
		}
		answer, last = append(answer, list...), time.Now()
	}
}

// rttExperts is a backbone whose experts a worker in this process computes.
type rttExperts struct {
	model  experts.ModelID
	kernel *ggml.Kernel
	worker *experts.Worker
	whole  *wholeModel

	local  *experts.Local                        // of dispatchers to come; nil: none
	served func(peerID string, layer, pairs int) // likewise
	last   experts.Call                          // what layer 0 was last asked for, without rows

	rtt        time.Duration
	dispatcher *experts.Dispatcher // over a line of rtt
	serving    sync.WaitGroup
}

// compute is the backbone's ExpertFunc.
func (e *rttExperts) compute(ctx context.Context, call *ggml.ExpertCall) error {
	if call.Layer == 0 {
		e.last = experts.Call(*call)
		e.last.Rows, e.last.IDs, e.last.Out, e.last.Weights, e.last.Sum = nil, nil, nil, nil, nil
	}
	return e.dispatcher.Compute(ctx, (*experts.Call)(call))
}

// Dial makes rttExperts an experts.Dialer.
func (e *rttExperts) Dial(context.Context, string) (net.Conn, error) {
	near, far, err := delayedPair(e.rtt)
	if err != nil {
		return nil, err
	}
	e.serving.Go(func() {
		e.worker.Serve(context.Background(), far) // how a session ended is of no interest here
	})
	return near, nil
}

// dial connects the backbone to the worker over a line of rtt, in place of the one before.
func (e *rttExperts) dial(ctx context.Context, rtt time.Duration) error {
	e.hangUp()
	e.rtt = rtt
	d, err := experts.NewDispatcher(experts.Config{
		Model: e.model, Dialer: e, Local: e.local, Served: e.served, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	e.dispatcher = d
	d.AddPeer("worker")
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return awaitWorkers(ctx, d, 1)
}

func (e *rttExperts) hangUp() {
	if e.dispatcher != nil {
		e.dispatcher.Close()
		e.dispatcher = nil
	}
	e.serving.Wait()
}

func (e *rttExperts) Close() error {
	e.hangUp()
	var errs []error
	if e.whole != nil {
		errs = append(errs, e.whole.Close())
	}
	if e.worker != nil {
		errs = append(errs, e.worker.Close())
	}
	if e.kernel != nil {
		errs = append(errs, e.kernel.Close())
	}
	return errors.Join(errs...)
}

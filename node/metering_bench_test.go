//go:build cgo && linux

package node

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/engine"
	"kvasird/node/meter"
	"kvasird/p2p"
	"kvasird/settle"
)

// nobody is a meter.Dialer that reaches none.
type nobody struct{}

func (nobody) Dial(context.Context, string) (meter.Conn, error) {
	return nil, errors.New("nobody is there")
}

// forgets is a meter.Keep that keeps nothing.
type forgets struct{}

func (forgets) Get(context.Context, string) ([]byte, bool, error) { return nil, false, nil }
func (forgets) Put(context.Context, string, []byte) error         { return nil }

// hooks are what counts work, or nothing.
type hooks struct {
	own      func(computed, cached int)
	pairs    func(peerID string, layer, pairs int)
	computed func(peerID string, layer, pairs int)
}

// dispatched is the shipped model whose experts are with a worker behind a loopback socket.
type dispatched struct {
	engine *engine.Engine
	prompt []int32
	bias   map[int32]float32
	took   []time.Duration // for each set of answers
}

// pipeDialer reaches one worker over loopback TCP, under the peer id that it has in a swarm.
type pipeDialer struct{ addr string }

func (d pipeDialer) Dial(ctx context.Context, _ string) (net.Conn, error) {
	var dialer net.Dialer
	return dialer.DialContext(ctx, "tcp", d.addr)
}

// asPeer gives a connection the address of a peer.
type asPeer struct {
	net.Conn
	addr net.Addr
}

func (c asPeer) RemoteAddr() net.Addr { return c.addr }

func newDispatched(b *testing.B, rt *ggml.Runtime, path, worker string, asker net.Addr, h hooks) *dispatched {
	b.Helper()
	m := must(gguf.OpenModel(path))(b)
	b.Cleanup(func() { m.Close() })
	id := must(m.ID(b.Context()))(b)
	k := must(rt.NewKernel(ggml.KernelConfig{Threads: 1}))(b)
	slice := gguf.Slice{Layers: gguf.Range{End: m.Layers()}, Experts: gguf.Range{End: m.Experts()}}
	if err := k.LoadSlices(m, slice); err != nil {
		b.Fatal(err)
	}
	w := must(experts.NewWorker(experts.WorkerConfig{
		Model: experts.ModelID(id.String()), Kernel: k, Slices: wireSlices([]gguf.Slice{slice}), Computed: h.computed, Drain: time.Millisecond,
	}))(b)
	l := must(net.Listen("tcp", "127.0.0.1:0"))(b)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go w.Serve(context.Background(), asPeer{c, asker})
		}
	}()
	d := must(experts.NewDispatcher(experts.Config{Model: experts.ModelID(id.String()), Dialer: pipeDialer{l.Addr().String()}, Served: h.pairs, CoverageWait: time.Minute}))(b)
	d.AddPeer(worker)
	model := must(rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(ctx context.Context, c *ggml.ExpertCall) error { return d.Compute(ctx, (*experts.Call)(c)) }}))(b)
	out := &dispatched{bias: map[int32]float32{}}
	out.engine = must(engine.Open(engine.Config{Model: model, Context: 512, Threads: 1, Served: h.own}))(b)
	b.Cleanup(func() {
		out.engine.Close()
		model.Close()
		d.Close()
		l.Close()
		w.Close()
		k.Close()
	})
	for t := range model.VocabSize() {
		if model.IsEOG(ggml.Token(t)) {
			out.bias[int32(t)] = -100
		}
	}
	out.prompt = must(out.engine.Tokenize(questions[0]))(b)
	return out
}

// answers has so many answers of 64 tokens computed together.
func (d *dispatched) answers(b *testing.B, together int) {
	began := time.Now()
	var list []*engine.Generation
	for range together {
		list = append(list, must(d.engine.Start(b.Context(), engine.Request{Prompt: d.prompt, MaxTokens: 64, TopP: 1, RepeatPenalty: 1, LogitBias: d.bias}))(b))
	}
	for _, g := range list {
		for {
			if _, err := g.Next(b.Context()); err == io.EOF {
				break
			} else if err != nil {
				b.Fatal(err)
			}
		}
	}
	d.took = append(d.took, time.Since(began))
}

// median is the time of a set of answers, which the load of the machine moves less than the mean.
func (d *dispatched) median() float64 {
	slices.Sort(d.took)
	return d.took[len(d.took)/2].Seconds()
}

// BenchmarkMetering is what counting costs: the same answers with and without it, in turns.
func BenchmarkMetering(b *testing.B) {
	rt := must(ggml.Open(ggml.Config{}))(b)
	path := must(tiny.Write(b.TempDir()))(b)
	keyOf := func(i byte) (ed25519.PrivateKey, string) {
		key := ed25519.NewKeyFromSeed([]byte{31: i})
		return key, p2p.PeerOf(settle.Node(key.Public().(ed25519.PublicKey))).String()
	}
	key, entry := keyOf(1)
	_, worker := keyOf(2)
	own := must(meter.NewSigner(meter.SignerConfig{Network: settle.Hash{1}, Self: entry, Key: key, Keep: forgets{}}))(b)
	m := must(meter.New(meter.Config{Signer: own, Dialer: nobody{}}))(b)
	wkey, _ := keyOf(2)
	signer := must(meter.NewSigner(meter.SignerConfig{Self: worker, Key: wkey, Keep: forgets{}}))(b)
	g := must(gguf.OpenModel(path))(b)
	model := must(meter.NewModel("m", g))(b)
	g.Close()
	pool := m.Pool(model)
	counted := hooks{
		own:      func(computed, cached int) { pool.Own(computed, false); pool.Own(cached, true) },
		pairs:    pool.Pairs,
		computed: signer.Counts(model).Pairs,
	}
	asker := must(meter.NodeOf(entry))(b)
	for _, together := range []int{1, 4} {
		b.Run(map[int]string{1: "alone", 4: "four together"}[together], func(b *testing.B) {
			plain := newDispatched(b, rt, path, worker, peerAddr(p2p.PeerOf(asker)), hooks{})
			metered := newDispatched(b, rt, path, worker, peerAddr(p2p.PeerOf(asker)), counted)
			plain.answers(b, together)
			metered.answers(b, together)
			plain.took, metered.took = nil, nil
			for b.Loop() { // each is once the first and once the second
				for _, d := range []*dispatched{plain, metered, metered, plain} {
					d.answers(b, together)
				}
			}
			tokens := float64(64 * together)
			b.ReportMetric(tokens/plain.median(), "plain_tok/s")
			b.ReportMetric(tokens/metered.median(), "metered_tok/s")
			b.ReportMetric(plain.median()/metered.median(), "ratio")
		})
	}
	if work, _ := m.Report(b.Context(), "m", settle.QuoteID{1}, 1000); len(work) != 2 {
		b.Error("not both nodes were counted")
	}
}

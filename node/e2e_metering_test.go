//go:build cgo && linux

package node

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/engine"
	"kvasird/node/meter"
	"kvasird/settle"
)

// heard is a log that one waits for.
type heard struct {
	mu   sync.Mutex
	text strings.Builder
}

func (h *heard) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.Write(b)
}

func (h *heard) has(text string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Contains(h.text.String(), text)
}

// here runs a node of the network in this process, and returns it and its log when it serves.
func (n *network) here(name string, args ...string) (*Node, *heard) {
	n.t.Helper()
	log := &heard{}
	args = append([]string{"--drafts", Off, "--network", n.file, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0", "--threads", "1",
		"--data", filepath.Join(n.dir, name), "--control", filepath.Join(n.dir, name+".sock")}, args...)
	set := flag.NewFlagSet("run", flag.ContinueOnError)
	load := ConfigFlags(set)
	if err := set.Parse(args); err != nil {
		n.t.Fatal(err)
	}
	cfg, err := load()
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan *Node, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, cfg, slog.New(slog.NewTextHandler(log, nil)), func(node *Node) { ready <- node })
	}()
	n.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Errorf("%s: %v", name, err)
		}
	})
	select {
	case node := <-ready:
		return node, log
	case err := <-ended:
		ended <- err
		n.t.Fatalf("%s: %v", name, err)
		return nil, nil
	}
}

// paid is what was reported and credited of a request.
type paid struct {
	tokens, prompt uint64
	credit         []settle.Work
	rest           settle.Share
}

// pays has requests answered together, and reports each of them as it ends, as a paying door
// does. What it returns is what a settlement credits.
func (n *network) pays(entry *Node, lengths ...int) []paid {
	n.t.Helper()
	out := make([]paid, len(lengths))
	var asked sync.WaitGroup
	for i, most := range lengths {
		asked.Go(func() {
			prompt, total := n.answered(entry, questions[i%len(questions)], most)
			out[i] = n.reports(entry, settle.QuoteID{1, byte(i)}, total)
			out[i].prompt = prompt
		})
	}
	asked.Wait()
	return out
}

// answered has a question answered by so many tokens, behind the door where it would be paid.
func (n *network) answered(entry *Node, question string, most int) (prompt, total uint64) {
	_, model, err := entry.answers.find("")
	if err != nil {
		n.t.Error(err)
		return 0, 0
	}
	tokens := must(model.Tokenize("<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"))(n.t)
	bias := map[int32]float32{}
	for _, t := range reference().ends {
		bias[t] = -100
	}
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	g, err := model.generate(ctx, engine.Request{Prompt: tokens, MaxTokens: most, TopP: 1, RepeatPenalty: 1, LogitBias: bias}, engine.Extra{})
	for total = uint64(len(tokens)); err == nil; total++ {
		_, _, err = g.NextToken(ctx)
	}
	if err != io.EOF {
		n.t.Error(err)
	}
	return uint64(len(tokens)), total - 1
}

// reports makes the receipt of a request of so many tokens, and has it credited.
func (n *network) reports(entry *Node, id settle.QuoteID, tokens uint64) paid {
	m, self := entry.metering, must(meter.NodeOf(entry.host.ID().String()))(n.t)
	g := must(gguf.OpenModel(n.whole))(n.t)
	defer g.Close()
	model := must(g.ID(n.ctx))(n.t).String()
	parts := must(meter.NewModel(model, g))(n.t).Parts()
	network := settle.Hash(entry.cfg.Genesis.Hash())
	job := settle.Job{
		Network: network, Parts: parts, Seconds: 1, Rates: map[settle.Node]uint64{},
		Request: settle.Request{State: settle.Running, Quote: settle.Quote{ID: id, Entry: self, PromptTokens: tokens, AnswerTokens: tokens}},
	}
	work, signed := m.Report(n.ctx, model, id, tokens)
	var statements []settle.Report
	for _, b := range signed {
		statements = append(statements, must(settle.ParseReport(b))(n.t))
	}
	for _, w := range work {
		job.Rates[w.Worker] = 1 << 40
	}
	p := paid{tokens: tokens}
	receipt := settle.Report{Role: settle.Receipt, Network: network, Request: id, Signer: self, Seq: 1, Tokens: tokens, Work: work}
	var err error
	if p.credit, err = job.Credit(receipt, statements); err != nil {
		n.t.Error(err)
	}
	if _, p.rest, err = settle.Shares(parts, tokens, p.credit); err != nil {
		n.t.Error(err)
	}
	return p
}

// accountsFor checks that requests were credited whole, but for the last token of each, which
// no one computes, for the experts of the last layer, which tokens of a prompt do not reach but
// its last one, and for rounding; and that so many nodes did something.
func (n *network) accountsFor(list []paid, nodes int) {
	n.t.Helper()
	g := must(gguf.OpenModel(n.whole))(n.t)
	defer g.Close()
	shares := must(settle.PartShares(must(meter.NewModel("m", g))(n.t).Parts()))(n.t)
	last := float64(shares[gguf.ExpertPart(g.Layers()-1)]) / float64(settle.Whole)
	var lacking, tokens, most float64
	workers := map[settle.Node]bool{}
	for _, p := range list {
		lack := float64(p.rest) / float64(settle.Whole) * float64(p.tokens)
		n.t.Logf("%d tokens, %d workers, rest %.4f%%, %.3f tokens", p.tokens, len(p.credit), 100*float64(p.rest)/float64(settle.Whole), lack)
		lacking, tokens, most = lacking+lack, tokens+float64(p.tokens), most+1+last*float64(p.prompt-1)
		for _, w := range p.credit {
			workers[w.Worker] = true
		}
	}
	if lacking > most+0.1 {
		n.t.Errorf("of %v tokens, %v were credited to nobody, want at most %v", tokens, lacking, most)
	}
	if len(workers) < nodes {
		n.t.Errorf("%d nodes were credited, want at least %d", len(workers), nodes)
	}
}

// TestWorkIsMetered: of requests that are computed together by two workers, each is credited
// whole to who did it, by what both sides sign.
func TestWorkIsMetered(t *testing.T) {
	n := newNetwork(t, NewNetwork{Token: tokenSettings()})
	addrs := []string{}
	for i, slice := range []string{"0:4/0:20", "0:4/12:32"} {
		w, _ := n.here([]string{"w1", "w2"}[i], "--role", "worker", "--model", n.whole, "--slice", slice)
		addrs = append(addrs, "--peer", localAddr(must(w.Status(n.ctx))(t)))
	}
	entry, _ := n.here("entry", append(addrs, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")...)
	n.serves(entry)
	list := n.pays(entry, 20, 60, 120)
	n.accountsFor(list, 3)

	// Nothing is signed twice, and what was done for one entry is not signed for another.
	again := n.reports(entry, settle.QuoteID{9}, 1000)
	if done := settle.Whole - again.rest; float64(done)/float64(settle.Whole)*1000 > 40 {
		t.Errorf("a request that nobody computed is credited %v", done)
	}
}

// TestRingIsMetered: stages are credited for the rows of their windows, whoever's link they
// came by.
func TestRingIsMetered(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Token: tokenSettings()})
	whole, _ := n.here("whole", "--role", "backbone", "--model", n.whole, "--experts", "here", "--http", Off)
	at := localAddr(must(whole.Status(n.ctx))(t))
	id := whole.backbone.Load().file.id.String()
	var entry *Node
	var log *heard
	for _, name := range []string{"s1", "s2", "s3"} {
		entry, log = n.here(name, "--peer", at, "--model", id, "--memory", "14MB", "--context", "1024")
	}
	n.serves(entry)
	for !log.has("a canary token went round the ring") {
		if n.ctx.Err() != nil {
			t.Fatal("there is no ring")
		}
		time.Sleep(100 * time.Millisecond)
	}
	n.accountsFor(n.pays(entry, 20, 60, 120), 2)
}

// TestCarriedIsMetered: a node that has the model answer elsewhere credits who answered.
func TestCarriedIsMetered(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Token: tokenSettings()})
	whole, _ := n.here("whole", "--role", "backbone", "--model", n.whole, "--experts", "here", "--http", Off)
	entry, _ := n.here("entry", "--peer", localAddr(must(whole.Status(n.ctx))(t)), "--role", "entry")
	n.serves(entry)
	list := n.pays(entry, 20, 60, 120)
	n.accountsFor(list, 1)
	if self := must(meter.NodeOf(whole.host.ID().String()))(t); len(list[0].credit) != 1 || list[0].credit[0].Worker != self {
		t.Errorf("credited %v", list[0].credit)
	}
	// what it answered for the entry is not there for requests of its own, but for canaries
	if own := n.reports(whole, settle.QuoteID{9}, 1000); float64(settle.Whole-own.rest) > 0.02*float64(settle.Whole) {
		t.Errorf("%v of a request of 1000 tokens is credited to who answered for another node", settle.Whole-own.rest)
	}
}

// TestCarriedToWorkersIsMetered: where who answers has the experts computed by others, they are
// credited for them, as they would be for requests of its own.
func TestCarriedToWorkersIsMetered(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Token: tokenSettings()})
	workers, addrs := map[settle.Node]bool{}, []string{}
	for i, slice := range []string{"0:4/0:20", "0:4/12:32"} {
		w, _ := n.here([]string{"w1", "w2"}[i], "--role", "worker", "--model", n.whole, "--slice", slice, "--http", Off)
		workers[must(meter.NodeOf(w.host.ID().String()))(t)] = true
		addrs = append(addrs, "--peer", localAddr(must(w.Status(n.ctx))(t)))
	}
	whole, _ := n.here("whole", append(addrs, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")...)
	n.serves(whole)
	entry, _ := n.here("entry", "--peer", localAddr(must(whole.Status(n.ctx))(t)), "--role", "entry")
	n.serves(entry)
	list := n.pays(entry, 20, 60, 120)
	n.accountsFor(list, 3)
	for i, p := range list {
		experts := map[settle.Node]uint64{}
		for _, w := range p.credit {
			for _, l := range w.Lines {
				if int(l.Part) == gguf.ExpertPart(1) {
					experts[w.Worker] += l.Units
				}
			}
		}
		for w, units := range experts {
			if !workers[w] {
				t.Errorf("request %d: %s is credited %d pairs that workers computed", i, w, units)
			}
		}
		if len(p.credit) != 3 || len(experts) != 2 {
			t.Errorf("request %d: %d nodes are credited, %d of them experts; want the backbone and both workers", i, len(p.credit), len(experts))
		}
	}
	// they were paid for it once
	if own := n.reports(whole, settle.QuoteID{9}, 1000); float64(settle.Whole-own.rest) > 0.04*float64(settle.Whole) {
		t.Errorf("%v of a request of 1000 tokens is credited for what was carried", settle.Whole-own.rest)
	}
}

// serves waits until a node answers.
func (n *network) serves(entry *Node) {
	n.t.Helper()
	n.http = must(entry.Status(n.ctx))(n.t).HTTP
	for n.readyz() != nil {
		if n.ctx.Err() != nil {
			n.t.Fatal(n.readyz())
		}
		time.Sleep(100 * time.Millisecond)
	}
}

//go:build cgo && linux

package node

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/node/cashier"
	"kvasird/node/engine"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
)

// deskSettings are those of a network whose settlement is the wallet "desk".
func deskSettings() []string {
	desk, _ := walletOf("desk")
	return tokenSettings("settlement=" + p2p.PeerOf(desk).String())
}

// pass is a payment of so many tokens that the settlement of deskSettings tells an entry of.
func (n *network) pass(entry *Node, tokens uint64) pay.Paid {
	desk, key := walletOf("desk")
	p := pay.Paid{}
	rand.Read(p.Request[:])
	var err error
	p.Pass, err = settle.Pass{
		Network: settle.Hash(entry.cfg.Genesis.Hash()), Request: p.Request, Signer: desk, Entry: must(p2p.KeyOf(entry.host.ID()))(n.t),
		Model: n.modelID(entry), Tokens: tokens, Expires: uint64(time.Now().Add(time.Hour).Unix()),
	}.Sign(key)
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

// modelID is the id of the one model that a node answers for.
func (n *network) modelID(entry *Node) string {
	entry.answers.mu.Lock()
	defer entry.answers.mu.Unlock()
	return entry.answers.list[0].id.String()
}

// asked has a question answered by at most so many tokens, and gives what came of that.
func (n *network) asked(ctx context.Context, entry *Node, most int) (tokens int, err error) {
	n.t.Helper()
	_, model, err := entry.answers.find("")
	if err != nil {
		n.t.Fatal(err)
	}
	prompt := must(model.Tokenize("<|im_start|>user\n" + questions[0] + "<|im_end|>\n<|im_start|>assistant\n"))(n.t)
	bias := map[int32]float32{}
	for _, t := range reference().ends {
		bias[t] = -100
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	g, err := model.generate(ctx, engine.Request{Prompt: prompt, MaxTokens: most, TopP: 1, RepeatPenalty: 1, LogitBias: bias}, engine.Extra{})
	for err == nil {
		if _, _, err = g.NextToken(ctx); err == nil {
			tokens++
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return len(prompt) + tokens, err
}

// credits is a settlement that knows what requests credited.
type credits struct {
	cashier.Service

	mu sync.Mutex // guards by
	by map[settle.QuoteID]cashier.WorkerCredit
}

func (c *credits) Credits(_ context.Context, ids []settle.QuoteID) (out []cashier.WorkerCredit, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		out = append(out, c.by[id])
	}
	return out, nil
}

func (c *credits) settle(id settle.QuoteID, tokens uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by[id] = cashier.WorkerCredit{Settled: true, Tokens: tokens}
}

// TestUnpaidIsNotComputed: workers compute a little for an entry that shows no payment, then
// nothing, which it is told plainly, and stays ready; and all that is paid.
func TestUnpaidIsNotComputed(t *testing.T) {
	n := newNetwork(t, NewNetwork{Token: deskSettings()})
	addrs := []string{}
	for i, slice := range []string{"0:4/0:16", "0:4/16:32"} {
		w, _ := n.here([]string{"w1", "w2"}[i], "--role", "worker", "--model", n.whole, "--slice", slice, "--http", Off)
		addrs = append(addrs, "--peer", localAddr(must(w.Status(n.ctx))(t)))
	}
	entry, _ := n.here("entry", append(addrs, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")...)
	n.serves(entry)
	free := 0
	var err error
	for err == nil && free < 10_000 {
		var tokens int
		tokens, err = n.asked(n.ctx, entry, 100)
		free += tokens
	}
	if err == nil || !strings.Contains(err.Error(), "unpaid: who pays is not known") {
		t.Fatalf("after %d tokens without a payment: %v", free, err)
	}
	// Both workers have 1,024 pairs of each layer free, and a token takes 4.
	if t.Logf("%d tokens without a payment, then: %v", free, err); free > 600 {
		t.Errorf("%d tokens were computed without a payment", free)
	}
	if err := entry.Ready(); err != nil {
		t.Errorf("it is not ready for what is paid: %v", err)
	}
	for i := range 12 {
		ctx := n.pass(entry, 230).In(n.ctx)
		if tokens, err := n.asked(ctx, entry, 200); err != nil || tokens < 200 {
			t.Fatalf("paid answer %d: %d tokens, %v", i, tokens, err)
		}
	}
	for _, p := range entry.dispatching().Peers() {
		if p.Suspect || p.Failed > 0 {
			t.Errorf("a worker that wants to be paid has a worse standing: %+v", p)
		}
	}
}

// TestLiarIsCutOffInSwarm: an entry whose paid requests credit nothing, whatever was computed for
// them, has so many, and one whose requests are credited has no end.
func TestLiarIsCutOffInSwarm(t *testing.T) {
	n := newNetwork(t, NewNetwork{Token: deskSettings()})
	w, _ := n.here("w", "--role", "worker", "--model", n.whole, "--http", Off)
	addr := localAddr(must(w.Status(n.ctx))(t))
	honest, _ := n.here("honest", "--peer", addr, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")
	liar, _ := n.here("liar", "--peer", addr, "--role", "backbone,entry", "--model", n.whole, "--experts", "remote", "--wait", "60")
	books := &credits{by: map[settle.QuoteID]cashier.WorkerCredit{}}
	w.settlement.service = books // nobody asks it before a pass is shown
	answers := func(entry *Node, share uint64) (answered int, err error) {
		for ; answered < 20; answered++ {
			paid := n.pass(entry, 300)
			tokens, err := n.asked(paid.In(n.ctx), entry, 200)
			if err != nil {
				return answered, err
			}
			books.settle(paid.Request, uint64(tokens)*share)
			if err := w.metering.grants.AskNow(n.ctx); err != nil {
				return answered, err
			}
		}
		return answered, nil
	}
	n.serves(liar)
	n.serves(honest)
	// The worker's part of the model is its experts, all of which it has.
	if got, err := answers(honest, uint64(settle.Whole)*7/10); err != nil || got != 20 {
		t.Errorf("an honest entry had %d answers: %v", got, err)
	}
	got, err := answers(liar, 0)
	if t.Logf("a liar had %d answers, then: %v", got, err); err == nil || got != 8 || !strings.Contains(err.Error(), "not believed for a while") {
		t.Errorf("a liar had %d answers: %v", got, err)
	}
	if got, err := answers(honest, uint64(settle.Whole)*7/10); err != nil || got != 20 {
		t.Errorf("then an honest entry had %d answers: %v", got, err)
	}
}

// TestCarriedUnpaid: a node answers nothing for an entry that does not pay, and all that is paid.
func TestCarriedUnpaid(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1, Token: deskSettings()})
	whole, _ := n.here("whole", "--role", "backbone", "--model", n.whole, "--experts", "here", "--http", Off)
	entry, _ := n.here("entry", "--peer", localAddr(must(whole.Status(n.ctx))(t)), "--role", "entry")
	n.serves(entry)
	if tokens, err := n.asked(n.ctx, entry, 20); err == nil || !strings.Contains(err.Error(), "unpaid: who pays is not known") {
		t.Errorf("unpaid: %d tokens, %v", tokens, err)
	}
	for range 4 {
		if _, err := n.asked(n.pass(entry, 60).In(n.ctx), entry, 40); err != nil {
			t.Errorf("paid: %v", err)
		}
	}
}

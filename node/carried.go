package node

import (
	"context"
	"fmt"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/node/carry"
	"kvasird/node/engine"
	"kvasird/node/gateway"
	"kvasird/node/gateway/grammar"
	"kvasird/p2p"
)

// startCarried answers requests that entries of the network carry to this node.
func (n *Node) startCarried() error {
	n.carried = carry.NewServer(carry.ServerConfig{Find: n.findOwn, Admit: n.admitName, Logger: n.log})
	return n.host.HandleStream(carry.Protocol, func(p *p2p.Peer, c p2p.Conn) {
		if err := n.carried.Serve(p.ID.String(), c); err != nil {
			n.host.Blame(p.ID, p2p.Malformed, err.Error())
		}
	})
}

func (n *Node) admitName(name string) error {
	id, err := peer.Decode(name)
	if err != nil {
		return err
	}
	return n.admit(id)
}

// findOwn finds what answers for a model here: the node's own engine alone, so that
// nothing is carried on.
func (n *Node) findOwn(id gguf.ModelID) (carry.Answerer, error) {
	b := n.backbone.Load()
	if b == nil || b.file.id != id {
		return nil, fmt.Errorf("model %v does not run here", id)
	}
	if b.embedder != nil {
		return ownVectors{b}, n.Ready()
	}
	return ownAnswers{n, b}, n.Ready()
}

// ownAnswers has the node's engine answer for others.
type ownAnswers struct {
	node *Node
	*backbone
}

// ownVectors has the node's embedder answer for others.
type ownVectors struct{ *backbone }

// Context makes ownVectors a carry.Answerer.
func (v ownVectors) Context() int { return v.embedder.Context() }

// Embed makes the vectors of some inputs for another node.
func (v ownVectors) Embed(ctx context.Context, owner string, inputs [][]int32) ([][]float32, error) {
	tokens := 0
	for _, input := range inputs {
		tokens += len(input)
	}
	if err := v.allowed(owner, tokens); err != nil {
		return nil, err
	}
	vectors, err := v.embedder.Embed(ctx, owner, inputs)
	if err == nil && v.lent != nil {
		v.lent(owner, tokens)
	}
	return vectors, err
}

// allowed says why rows are not computed for another node.
func (b *backbone) allowed(owner string, rows int) error {
	if b.allows == nil {
		return nil
	}
	if err := b.allows(owner, rows); err != nil {
		return fmt.Errorf("unpaid: %w", err)
	}
	return nil
}

// Start makes ownVectors a carry.Answerer.
func (ownVectors) Start(context.Context, gateway.Request, gateway.Extra) (carry.Tokens, error) {
	return nil, errNoText
}

func (o ownAnswers) Context() int { return o.engine.Context() }

func (o ownAnswers) Start(ctx context.Context, req gateway.Request, extra gateway.Extra) (carry.Tokens, error) {
	if err := grammar.Check(extra.Grammar); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	g, err := o.engine.StartExtra(ctx, engine.Request(req), engine.Extra(extra))
	if err == nil { // what is not started takes nothing
		err = o.allowed(req.Owner, len(req.Prompt))
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &ownTokens{ownStream: ownStream{g}, backbone: o.backbone, owner: req.Owner, rows: len(req.Prompt), cancel: cancel}, nil
}

// ownTokens is a generation without its bytes, which the entry makes.
type ownTokens struct {
	ownStream
	*backbone
	owner  string // peer id of the entry
	rows   int    // that the next token takes: those of the prompt, then that of the token before
	cancel context.CancelFunc
}

func (t *ownTokens) Next(ctx context.Context) (int32, error) {
	token, _, err := t.NextToken(ctx)
	if err == nil && t.lent != nil {
		t.lent(t.owner, t.rows)
		t.rows = 1
		if err = t.allowed(t.owner, 1); err != nil {
			t.cancel()
		}
	}
	return int32(token), err
}

// pace is how long a token takes, measured between two looks.
type pace struct {
	decodes         int64
	drawn, accepted int64 // tokens
	busy            time.Duration
	token           time.Duration
}

// paceDecodes are enough decodes for a look.
const paceDecodes = 16

func (p *pace) look(st engine.Stats) time.Duration {
	if n := st.Decodes - p.decodes; n >= paceDecodes || p.token == 0 && n > 0 {
		drawn, accepted := st.Generated-p.drawn, st.Accepted-p.accepted
		p.token = (st.Busy - p.busy) / time.Duration(n)
		if accepted > 0 && accepted < drawn { // a round draws more than a token of each answer
			p.token = time.Duration(float64(p.token) * float64(drawn-accepted) / float64(drawn))
		}
		p.decodes, p.drawn, p.accepted, p.busy = st.Decodes, st.Generated, st.Accepted, st.Busy
	}
	return min(p.token, market.MaxToken)
}

// service is what the backbone offers to entries. It is for the exchange's goroutine.
func (b *backbone) service(sequences int) market.Service {
	st := b.computer.Stats()
	slots := min(sequences, market.MaxSlots)
	return market.Service{
		Slots: slots, Free: max(0, slots-st.Running-st.Waiting), Context: b.computer.Context(), Token: b.pace.look(st),
	}
}

// carriedStatus counts what entries had answered here.
func (n *Node) carriedStatus() *api.Carried {
	if n.carried == nil {
		return nil
	}
	st := n.carried.Stats()
	out := &api.Carried{Running: st.Running, Answered: st.Answered, Gone: st.Gone}
	for code, count := range st.Refused {
		if out.Refused == nil {
			out.Refused = map[string]uint64{}
		}
		out.Refused[code.String()] = count
	}
	return out
}

// newFar has other nodes answer for the model.
func (m *ringModel) newFar(g *gguf.Model) *carry.Client {
	n := m.rings.node
	return carry.NewClient(carry.ClientConfig{
		Model: m.id, Vocab: m.vocab.VocabSize(), Logger: n.log, Dial: n.dialCarried, Served: n.metering.carried(m.id, g),
		Targets: func() []carry.Target { return m.rings.servers(m.id, time.Now()) },
		Fault: func(name string, err error) {
			if id, bad := peer.Decode(name); bad == nil {
				n.host.Blame(id, p2p.Malformed, err.Error())
			}
		},
	})
}

// servers lists who else answers for a model.
func (r *rings) servers(id gguf.ModelID, now time.Time) (out []carry.Target) {
	self := r.node.host.ID().String()
	rtt := r.node.roundTrips(now)
	for _, h := range r.node.exchange.table.Holders(id, now) {
		if s := h.News.Service; s.Slots > 0 && h.Peer != self {
			way, _ := rtt(self, h.Peer)
			out = append(out, carry.Target{Peer: h.Peer, Slots: s.Slots, Free: s.Free, Context: s.Context, Token: s.Token, RTT: way})
		}
	}
	return out
}

func (n *Node) dialCarried(ctx context.Context, name string) (carry.Conn, error) {
	id, err := meet(ctx, n.host, name)
	if err != nil {
		return nil, err
	}
	n.metering.show(ctx, []string{name}, true)
	return n.host.OpenStream(ctx, id, carry.Protocol)
}

// carried has another node answer.
func (m *ringModel) carried(ctx context.Context, req engine.Request, extra engine.Extra) (generation, error) {
	a, err := m.far.Start(ctx, gateway.Request(req), gateway.Extra(extra))
	if err != nil {
		return nil, err
	}
	return &farAnswer{a, m.vocab, extra}, nil
}

// farAnswer is the answer of another node as a generation.
type farAnswer struct {
	*carry.Answer
	vocab *ggml.Model
	extra engine.Extra
}

// NextToken returns one token.
func (a *farAnswer) NextToken(ctx context.Context) (ggml.Token, []byte, error) {
	t, err := a.Answer.Next(ctx)
	if err != nil {
		return 0, nil, err
	}
	return ggml.Token(t), pieceOf(a.vocab, ggml.Token(t), a.extra.Special), nil
}

// Next makes farAnswer a gateway.Stream.
func (a *farAnswer) Next(ctx context.Context) ([]byte, error) {
	_, bytes, err := a.NextToken(ctx)
	return bytes, err
}

// Prob makes farAnswer a gateway.ProbStream.
func (a *farAnswer) Prob() (chosen gateway.TokenProb, top []gateway.TokenProb) {
	if !a.extra.Logprobs {
		return chosen, nil
	}
	chosen, list := a.Answer.Prob()
	for _, p := range list {
		top = append(top, probOf(a.vocab, p.ID, p.Logprob))
	}
	return probOf(a.vocab, chosen.ID, chosen.Logprob), top
}

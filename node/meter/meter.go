package meter

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"kvasird/p2p"
	"kvasird/settle"
)

// askedAtOnce bounds the workers that are asked at a time about one request.
const askedAtOnce = 64

// Dialer opens a stream of Protocol to a peer, before ctx ends. It is safe for concurrent
// use.
type Dialer interface {
	Dial(ctx context.Context, peerID string) (Conn, error)
}

// Config configures a Meter. The first block has no defaults.
type Config struct {
	Network settle.Hash
	Self    string             // peer id of this node
	Key     ed25519.PrivateKey // of this node
	Dialer  Dialer

	Wait   time.Duration    // for all workers to state what they did: 5 s
	Logger *slog.Logger     // nil: none
	Now    func() time.Time // nil: the clock
}

// Meter knows what was done for the requests of this node, by whom.
type Meter struct {
	cfg  Config
	self settle.Node

	mu    sync.Mutex // guards pools
	pools map[string]*Pool
}

// New returns a meter without pools. Error: the key is not that of Self.
func New(cfg Config) (*Meter, error) {
	if cfg.Dialer == nil {
		return nil, errors.New("meter: no dialer")
	}
	if cfg.Wait == 0 {
		cfg.Wait = 5 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	self, err := ownNode(cfg.Self, cfg.Key)
	return &Meter{cfg: cfg, self: self, pools: map[string]*Pool{}}, err
}

// Pool is where what is done of a model is counted, from now on under that model's id.
func (m *Meter) Pool(model *Model) *Pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pools[model.ID]
	if p == nil {
		p = newPool(model, m.cfg.Self, m.cfg.Now)
		m.pools[model.ID] = p
	}
	return p
}

// Draw takes what a request of a model with so many tokens, prompt included, needs out of
// the pool, by worker ascending: the work of its receipt. Of a model that is not counted
// it is nothing. Requests that nobody pays draw too, as do failed ones.
func (m *Meter) Draw(model string, tokens uint64) []settle.Work {
	m.mu.Lock()
	p := m.pools[model]
	m.mu.Unlock()
	if p == nil {
		return nil
	}
	return p.Draw(tokens)
}

// Statements asks the workers of a request what they did, all at once, and signs what
// this node did itself. Whoever does not answer in time, or not well, is left out: it has
// nothing. It is called once for a request.
func (m *Meter) Statements(ctx context.Context, model string, request settle.QuoteID, work []settle.Work) [][]byte {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Wait)
	defer cancel()
	records := make([][]byte, len(work))
	room := make(chan struct{}, askedAtOnce)
	var asked sync.WaitGroup
	for i, w := range work {
		asked.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			var err error
			if records[i], err = m.stated(ctx, model, request, w); err != nil {
				m.cfg.Logger.Info("a worker states nothing", "peer", PeerOf(w.Worker).String(), "request", request.String(), "error", err)
			}
		})
	}
	asked.Wait()
	var out [][]byte
	for _, r := range records {
		if r != nil {
			out = append(out, r)
		}
	}
	return out
}

// stated is the statement of one worker.
func (m *Meter) stated(ctx context.Context, model string, request settle.QuoteID, w settle.Work) ([]byte, error) {
	if w.Worker == m.self {
		return settle.Report{
			Role: settle.Statement, Network: m.cfg.Network, Request: request, Signer: m.self, Seq: 1, Work: []settle.Work{w},
		}.Sign(m.cfg.Key)
	}
	c, err := m.cfg.Dialer.Dial(ctx, PeerOf(w.Worker).String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	record, err := ask(c, question{version, m.cfg.Network, request, model, w.Lines})
	if err != nil {
		return nil, err
	}
	r, err := settle.ParseReport(record)
	if err == nil && (r.Role != settle.Statement || r.Signer != w.Worker || r.Request != request || r.Network != m.cfg.Network) {
		err = fmt.Errorf("the answer is a %s of %s about request %s", r.Role, r.Signer, r.Request)
	}
	if err != nil {
		return nil, err
	}
	return record, nil
}

// ask puts a question, and returns the statement that answers it.
func ask(c Conn, q question) ([]byte, error) {
	if err := p2p.NewFrameWriter(c, maxAsk).Write(p2p.Frame{Type: frameAsk, Payload: encodeAsk(q)}); err != nil {
		return nil, err
	}
	f, err := p2p.NewFrameReader(c, maxAnswer).Next()
	switch {
	case err != nil:
		return nil, fmt.Errorf("answer: %w", err)
	case f.Flags != 0 || f.ID != 0:
		return nil, fmt.Errorf("frame with flags %d and id %d", f.Flags, f.ID)
	case f.Type == frameStatement:
		return f.Payload, nil
	case f.Type == frameRefused && len(f.Payload) <= maxText && utf8.Valid(f.Payload):
		return nil, fmt.Errorf("it refuses: %s", f.Payload)
	}
	return nil, fmt.Errorf("frame of type %d and %d bytes answers the question", f.Type, len(f.Payload))
}

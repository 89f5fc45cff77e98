package meter

import (
	"context"
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
	Signer *Signer // of this node
	Dialer Dialer

	Grants *Grants // what passes of others allow here; nil: nothing is asked of passes
	// Workers are those who compute a model for this node now; nil: nobody does.
	Workers func(model string) []string

	Wait   time.Duration    // for workers to state what they did, twice that where they ask others: 5 s
	Logger *slog.Logger     // nil: none
	Now    func() time.Time // nil: the clock
}

// Meter knows what was done for the requests of this node, by whom.
type Meter struct {
	cfg     Config
	self    settle.Node
	running *showing

	mu    sync.Mutex // guards what follows
	pools map[string]*Pool
	told  divisions
}

// New returns a meter without pools. Error: there is no signer or no dialer.
func New(cfg Config) (*Meter, error) {
	if cfg.Signer == nil || cfg.Dialer == nil {
		return nil, errors.New("meter: no signer or no dialer")
	}
	if cfg.Wait == 0 {
		cfg.Wait = 5 * time.Second
	}
	if cfg.Workers == nil {
		cfg.Workers = func(string) []string { return nil }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Meter{cfg: cfg, self: cfg.Signer.self, running: newShowing(), pools: map[string]*Pool{},
		told: divisions{by: map[asked]*told{}}}, nil
}

// Serve answers the question of a peer, and does not close the connection. How many a peer
// asks at a time is bounded by the streams that the host lets it have; one that does not
// come, or does not read, holds up nobody else.
func (m *Meter) Serve(peerID string, c Conn) error { return m.cfg.Signer.serve(peerID, c, m) }

// Pool is where what is done of a model is counted, from now on under that model's id.
func (m *Meter) Pool(model *Model) *Pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pools[model.ID]
	if p == nil {
		p = newPool(model, m.cfg.Signer.cfg.Self, m.cfg.Now)
		m.pools[model.ID] = p
	}
	return p
}

// pool is the pool of a model, nil of one that is not counted.
func (m *Meter) pool(model string) *Pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pools[model]
}

// Drop takes what so many tokens of a model need out of the pool for nobody: requests that
// nobody pays, and failed ones.
func (m *Meter) Drop(model string, tokens uint64) {
	if p := m.pool(model); p != nil {
		p.draw(p.tokens(tokens))
	}
}

// Forfeit takes from a worker of a model all that it did and was not drawn yet.
func (m *Meter) Forfeit(model, peerID string) {
	if p := m.pool(model); p != nil {
		p.Forfeit(peerID)
	}
}

// Report takes what a request of a model with so many tokens, prompt included, needs out of the
// pool, by worker ascending: the work of its receipt. It asks the workers what they did, all at
// once, those that carried it by whom they had it done, and signs what this node did itself.
// Whoever does not state it in time, or not well, is in the work without a statement, and has
// nothing. Of a model that is not counted it is nothing. It is called once for a request.
func (m *Meter) Report(ctx context.Context, model string, request settle.QuoteID, tokens uint64) ([]settle.Work, [][]byte) {
	p := m.pool(model)
	if p == nil {
		return nil, nil
	}
	direct, carried := p.draw(p.tokens(tokens))
	about := question{Version: version, Network: m.cfg.Signer.cfg.Network, Request: request, Model: model}
	shares := make([][]share, 1+len(carried))
	room := roomBeside(direct, len(carried))
	var all sync.WaitGroup
	all.Go(func() { shares[0] = m.statements(ctx, about, m.cfg.Signer.cfg.Self, direct) })
	all.Go(func() {
		each(len(carried), func(i int) { shares[1+i] = m.carriedBy(ctx, about, carried[i], room) })
	})
	all.Wait()
	return join(shares...)
}

// each does something for so many, some at a time.
func each(n int, do func(i int)) {
	room := make(chan struct{}, askedAtOnce)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			do(i)
		})
	}
	all.Wait()
}

// share is what a worker did of a request, and its statement of that; nil: it makes none.
type share struct {
	work      settle.Work
	statement []byte
}

// statements asks the workers of a peer's request what they did.
func (m *Meter) statements(ctx context.Context, about question, peerID string, work []settle.Work) []share {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Wait)
	defer cancel()
	shares := make([]share, len(work))
	each(len(work), func(i int) {
		w := work[i]
		record, err := m.statement(ctx, about, peerID, w)
		if err != nil {
			m.cfg.Logger.Info("a worker states nothing", "peer", p2p.PeerOf(w.Worker).String(), "request", about.Request.String(), "error", err)
		}
		shares[i] = share{w, record}
	})
	return shares
}

// statement is what one worker says.
func (m *Meter) statement(ctx context.Context, about question, peerID string, w settle.Work) ([]byte, error) {
	if w.Worker == m.self {
		return m.cfg.Signer.own(ctx, peerID, about.Request, w.Lines)
	}
	about.Lines = w.Lines
	record, err := m.ask(ctx, w.Worker, frameAsk, about)
	if err != nil {
		return nil, err
	}
	signer, err := signerOf(about, record)
	if err == nil && signer != w.Worker {
		err = fmt.Errorf("the answer is a statement of %s", signer)
	}
	if err != nil {
		return nil, err
	}
	return record, nil
}

// signerOf is whose statement about a request a record is.
func signerOf(about question, record []byte) (settle.Node, error) {
	r, err := settle.ParseReport(record)
	if err == nil && (r.Role != settle.Statement || r.Request != about.Request || r.Network != about.Network) {
		err = fmt.Errorf("the answer is a %s about request %s", r.Role, r.Request)
	}
	return r.Signer, err
}

// ask puts a question to a worker, and returns what answers it.
func (m *Meter) ask(ctx context.Context, worker settle.Node, kind uint8, q question) ([]byte, error) {
	c, err := m.cfg.Dialer.Dial(ctx, p2p.PeerOf(worker).String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	return ask(c, kind, q)
}

// ask puts a question, and returns the statement or division that answers it.
func ask(c Conn, kind uint8, q question) ([]byte, error) {
	if kind == frameDivide {
		return exchange(c, kind, encodeAsk(q), frameDivision, maxDivision)
	}
	return exchange(c, kind, encodeAsk(q), frameStatement, maxStatement)
}

// exchange sends a frame, and returns the payload of the one that answers it, of at most so many
// bytes.
func exchange(c Conn, kind uint8, payload []byte, want uint8, most int) ([]byte, error) {
	if err := p2p.NewFrameWriter(c, maxAsk).Write(p2p.Frame{Type: kind, Payload: payload}); err != nil {
		return nil, err
	}
	f, err := p2p.NewFrameReader(c, max(most, maxText)).Next()
	switch {
	case err != nil:
		return nil, fmt.Errorf("answer: %w", err)
	case f.Flags != 0 || f.ID != 0:
		return nil, fmt.Errorf("frame with flags %d and id %d", f.Flags, f.ID)
	case f.Type == want && len(f.Payload) <= most:
		return f.Payload, nil
	case f.Type == frameRefused && len(f.Payload) <= maxText && utf8.Valid(f.Payload):
		return nil, fmt.Errorf("it refuses: %s", f.Payload)
	}
	return nil, fmt.Errorf("frame of type %d and %d bytes answers the question", f.Type, len(f.Payload))
}

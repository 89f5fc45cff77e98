package pay

import (
	"context"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"sync"
	"time"

	"kvasird/node/cashier"
	"kvasird/settle"
)

// Requests is the part of a settlement that knows requests, for this node alone. All but
// Request are cashier.Service's.
type Requests interface {
	Quote(ctx context.Context, ask cashier.Ask) (cashier.Offer, error)
	Request(ctx context.Context, id settle.QuoteID) (settle.Request, error)
	Run(ctx context.Context, id settle.QuoteID) (cashier.Started, error)
	End(ctx context.Context, e cashier.Ended) (cashier.Settled, error)
}

// Settlement is what a Door asks of who settles. Its errors are *cashier.Refusal where
// something can be done about them.
type Settlement interface {
	Requests
	Terms(ctx context.Context) (cashier.Terms, error)
	Pay(ctx context.Context, p cashier.Proof) (settle.Request, error)
	PayX402(ctx context.Context, p cashier.Partial) (settle.Request, error)
	Debit(ctx context.Context, id settle.QuoteID) (settle.Request, error)
}

// Meter knows who computed what of a model. It is safe for concurrent use.
type Meter interface {
	// Report takes the work of so many tokens of a request out of what was counted for a
	// model, by worker in ascending order: no more of a part than the tokens need. The
	// statements are the workers' own signed word on it. Those of workers that do not
	// answer before ctx ends are missing.
	Report(ctx context.Context, model string, request settle.QuoteID, tokens uint64) (work []settle.Work, statements [][]byte)
	// Drop takes work out that nobody is paid for.
	Drop(model string, tokens uint64)
}

// Config is what a Door works with.
type Config struct {
	Settlement Settlement
	Key        ed25519.PrivateKey // of this node: it signs receipts
	Meter      Meter              // nil: nobody's work is reported, and nobody paid for it
	Wait       time.Duration      // for an x402 payment to be final; 0: a minute
	Logger     *slog.Logger       // nil: none
	Now        func() time.Time   // nil: the clock
}

// Limits.
const (
	maxOpen  = 512         // paid requests that are not reported yet; more get 503
	termsFor = time.Minute // that terms are good for: what is used of them never changes
)

// Door takes payments. It has to Run, or no request that it took is ever reported.
type Door struct {
	cfg   Config
	node  settle.Node
	ended chan ended // has room for every open request

	mu     sync.Mutex                // guards what follows
	open   map[settle.QuoteID]bool   // from before they run until they are reported
	unpaid map[settle.QuoteID]unpaid // that count for who asked
	terms  cashier.Terms
	known  time.Time // when terms were asked for
}

// New checks the configuration.
func New(cfg Config) (*Door, error) {
	if cfg.Settlement == nil || len(cfg.Key) != ed25519.PrivateKeySize {
		return nil, errors.New("a paying door needs a settlement and the node's key")
	}
	if cfg.Wait == 0 {
		cfg.Wait = time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Door{cfg: cfg, node: settle.Node(cfg.Key.Public().(ed25519.PublicKey)), ended: make(chan ended, maxOpen),
		open: map[settle.QuoteID]bool{}, unpaid: map[settle.QuoteID]unpaid{}}, nil
}

// Paid is what an engine may know of the payment of what it computes.
type Paid struct {
	Request settle.QuoteID
	Seed    settle.Hash // replicas are drawn by it: nobody knew it before the payment
}

type paidKey struct{}

// From is the payment of the request that ctx is of, where there is one.
func From(ctx context.Context) (Paid, bool) {
	p, ok := ctx.Value(paidKey{}).(Paid)
	return p, ok
}

// termsOf are the network's terms, asked for once in a while.
func (d *Door) termsOf(ctx context.Context) (cashier.Terms, error) {
	d.mu.Lock()
	terms, known := d.terms, d.known
	d.mu.Unlock()
	if !known.IsZero() && d.cfg.Now().Sub(known) < termsFor {
		return terms, nil
	}
	terms, err := d.cfg.Settlement.Terms(ctx)
	if err != nil {
		return terms, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.terms, d.known = terms, d.cfg.Now()
	return terms, nil
}

// take opens a request here, so that the same one does not run twice.
func (d *Door) take(id settle.QuoteID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[id] {
		return settle.ErrRunning
	}
	if len(d.open) >= maxOpen {
		return errFull
	}
	d.open[id] = true
	return nil
}

func (d *Door) opened() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open)
}

func (d *Door) leave(id settle.QuoteID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, id)
}

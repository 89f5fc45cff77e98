package cashier

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kvasird/market"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/solana"
)

// Chain is what a Desk asks of the chain, as solana.Client does.
type Chain interface {
	Payment(ctx context.Context, c solana.Claim) (solana.Payment, error)
	Stake(ctx context.Context, c solana.Claim) (solana.Payment, error)
	Vault() solana.Vault
	Slot(ctx context.Context) (uint64, error)
	Sponsor
}

// Sponsor takes transactions whose fee it pays, as solana.Client does.
type Sponsor interface {
	CoSign(ctx context.Context, fee ed25519.PrivateKey, partial []byte, due solana.Due) (solana.CoSigned, error)
	Try(ctx context.Context, s solana.Signed) error
	Send(ctx context.Context, s solana.Signed) error
	Resolve(ctx context.Context, s solana.Signed) (solana.Outcome, error)
}

// DeskConfig is what a Desk works with. What is after Models may be zero.
type DeskConfig struct {
	Network  settle.Hash
	Cluster  settle.Key         // hash of the chain's genesis block
	Key      ed25519.PrivateKey // of this node: it signs price records
	Books    *Books
	Chain    Chain
	Vault    Vault // signs payouts
	Governor *govern.Governor
	Decimals uint8
	FirstRaw uint64    // price of a model that has none yet, see market.Price
	Began    time.Time // of epoch 0: the network's creation
	// Models is what is known of a model, by its id, for a node that asks. It is called for
	// quotes of models that nobody has paid for. A Refusal of it is the answer to that, any
	// other error means that there is no such model.
	Models func(id string, by settle.Node) (Model, error)

	Operators []settle.Wallet    // of the network: they pay nothing here
	Fee       ed25519.PrivateKey // pays the fees of x402 transactions; nil: none are taken
	// Among says from how many independent replicas a seed drew a node, as this machine
	// sees the market. Nil: that is not known, so that nothing is emitted and prices stay.
	Among func(model string, seed settle.Hash, node settle.Node) int
	// Auditors are the nodes that were drawn to audit a request. Nil: none are, so that no
	// verdict is carried out.
	Auditors func(settle.Request) []settle.Node
	// Publish is called with every new price record. It must not block, nor call the Desk.
	Publish func(record []byte)

	Logger *slog.Logger
	Now    func() time.Time
	Random func([]byte)
}

// Model is what is known of a model from its own header, and never from who serves it.
type Model struct {
	Name  string
	Parts []settle.Part
}

// Desk settles: it is the Service of every node of a network, on the one machine that
// holds the books. It is safe for concurrent use.
type Desk struct {
	cfg    DeskConfig
	node   settle.Node
	secret settle.Hash // in the seeds of draws

	mu    sync.Mutex              // guards what follows
	slot  uint64                  // finalized on the chain
	asked time.Time               // when
	open  seats                   // quotes that nobody pays yet
	named seats                   // those whose payment is not proved
	busy  map[settle.QuoteID]bool // payments that are being proved
	fees  map[settle.Node][]sponsored
	runs  map[settle.Node]map[settle.QuoteID]settle.Amount // what requests that run may use; those before a restart are not in it
	burnt uint64                                           // the epoch that began to burn last, plus one

	pricing sync.Mutex // guards what follows, and is held while a record is made
	chains  map[settle.Hash]*market.PriceChain
	fresh   map[settle.Hash]*freshPrice // of other models than chains
}

// Teller is a Desk as one node sees it.
type Teller struct {
	*Desk
	node settle.Node
}

var _ Service = (*Teller)(nil)

// As is the desk for a node, whose key the caller has verified.
func (d *Desk) As(node settle.Node) *Teller { return &Teller{d, node} }

// OpenDesk reads the prices of the books, and refuses those that do not follow from one
// another. It asks nothing of the chain.
func OpenDesk(cfg DeskConfig) (*Desk, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("the settlement: %w", err)
	}
	d := &Desk{cfg: cfg, node: settle.Node(cfg.Key.Public().(ed25519.PublicKey)),
		secret: sha256.Sum256(slices.Concat([]byte("kvasir draw secret 1\n"), cfg.Network[:], cfg.Key.Seed())),
		open:   seats{}, named: seats{}, busy: map[settle.QuoteID]bool{}, fees: map[settle.Node][]sponsored{}, runs: map[settle.Node]map[settle.QuoteID]settle.Amount{},
		fresh: map[settle.Hash]*freshPrice{}}
	if err := d.startPrices(); err != nil {
		return nil, fmt.Errorf("the settlement: %w", err)
	}
	return d, nil
}

func (cfg *DeskConfig) validate() error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Random == nil {
		cfg.Random = func(b []byte) { rand.Read(b) } // it never fails
	}
	for what, missing := range map[string]bool{
		"the network's id": cfg.Network == settle.Hash{}, "the node's key": len(cfg.Key) != ed25519.PrivateKeySize,
		"the books": cfg.Books == nil, "the chain": cfg.Chain == nil, "the vault's key": cfg.Vault == nil, "governance": cfg.Governor == nil,
		"the first price": cfg.FirstRaw == 0, "when the network began": cfg.Began.Unix() <= 0, "the models": cfg.Models == nil,
	} {
		if missing {
			return fmt.Errorf("%s is missing", what)
		}
	}
	if cfg.Fee != nil && len(cfg.Fee) != ed25519.PrivateKeySize {
		return fmt.Errorf("the fee key has %d bytes, not %d", len(cfg.Fee), ed25519.PrivateKeySize)
	}
	return nil
}

func (d *Desk) seconds() uint64 { return uint64(d.cfg.Now().Unix()) }

// tickEvery is how often what is due is looked for.
const tickEvery = 5 * time.Second

// Run does what is due from time to time, until ctx ends.
func (d *Desk) Run(ctx context.Context) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		if err := d.Tick(ctx); err != nil && ctx.Err() == nil {
			d.cfg.Logger.Warn("the settlement could not do all that is due", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Tick ends the epochs that are over, and does what is due about requests that nobody
// came for, about bonds, and about payouts.
func (d *Desk) Tick(ctx context.Context) error {
	d.forgetQuotes()
	return errors.Join(d.endEpochs(), d.collect(ctx), d.Mature(ctx))
}

// Terms is part of Service.
func (d *Desk) Terms(context.Context) (Terms, error) {
	m := d.moment()
	p, sequence, _ := d.cfg.Governor.Params(m.Epoch)
	v := d.cfg.Chain.Vault()
	t := Terms{Network: d.cfg.Network, Node: d.node, Cluster: d.cfg.Cluster, Mint: v.Mint, Program: v.Program, Decimals: d.cfg.Decimals,
		Owner: v.Owner, Vault: v.Account, FeePayer: d.feePayer(), Epoch: m.Epoch, Sequence: sequence, Ref: p.Ref, Params: map[string]uint64{}}
	for _, f := range settle.Fields() {
		t.Params[f.Name] = f.Get(p)
	}
	var err error
	t.Prices, err = d.prices()
	return t, err
}

// feePayer is zero when no x402 transactions are taken.
func (d *Desk) feePayer() (w settle.Wallet) {
	if d.cfg.Fee != nil {
		copy(w[:], d.cfg.Fee.Public().(ed25519.PublicKey))
	}
	return w
}

func (d *Desk) operator(w settle.Wallet) bool {
	return w == d.cfg.Chain.Vault().Owner || slices.Contains(d.cfg.Operators, w)
}

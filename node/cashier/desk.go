package cashier

import (
	"context"
	"crypto/ed25519"
	"log/slog"
	"time"

	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/solana"
)

// Chain is what a Desk asks of the chain, as solana.Client does.
type Chain interface {
	Payment(ctx context.Context, c solana.Claim) (solana.Payment, error)
	Stake(ctx context.Context, c solana.Claim) (solana.Payment, error)
	Vault() solana.Vault
}

// DeskConfig is what a Desk works with. All fields but the last three are required.
type DeskConfig struct {
	Network   settle.Hash
	Cluster   settle.Key         // hash of the chain's genesis block
	Key       ed25519.PrivateKey // of this node: it signs price records
	Books     *Books
	Chain     Chain
	Vault     Vault // signs payouts
	Governor  *govern.Governor
	Decimals  uint8
	FirstRaw  uint64    // price of a model that has none yet, see market.Price
	Began     time.Time // of epoch 0: the network's creation
	Models    func(id string) (Model, error)
	Operators []settle.Wallet // of the network: they pay nothing here

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
	cfg DeskConfig
}

// Teller is a Desk as one node sees it.
type Teller struct {
	*Desk
	node settle.Node
}

// As is the desk for a node, whose key the caller has verified.
func (d *Desk) As(node settle.Node) *Teller { return &Teller{d, node} }

package node

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/cashier"
	"kvasird/node/meter"
	"kvasird/p2p"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/solana"
)

const (
	// chainTime bounds the checks of the chain at the start, modelTime the fetching of the
	// header of a model that is quoted first.
	chainTime = 30 * time.Second
	modelTime = 10 * time.Second
	// maxKnown bounds the models whose parts are remembered.
	maxKnown = 1024
	// maxFinding bounds the headers that are fetched at a time, of which each asking node has one.
	maxFinding = 16
)

// settling is the desk of the role settle, with what belongs to it.
type settling struct {
	desk  *cashier.Desk
	door  *cashier.Door
	drawn *drawn
}

// openDesk opens the books and refuses to settle where anything is not as it should be:
// keys, books, governance, and what the chain has of cluster, mint and vault.
func (n *Node) openDesk(ctx context.Context, t *token, identity p2p.Identity) (*settling, error) {
	if identity.ID() != t.peer {
		return nil, fmt.Errorf("the network file names %s as who settles, and this node is %s: use the data folder of that one", t.peer, identity.ID())
	}
	keys, err := readVaultKeys(n.cfg.Settle, t)
	if err != nil {
		return nil, err
	}
	client, err := solana.New(solana.Config{
		Providers: n.cfg.Settle.RPC, Genesis: t.authority.Cluster, Vault: t.vault, Decimals: t.decimals, Operators: t.operators,
		Alarm: func(err error) {
			n.log.Error("somebody has to look at the chain's providers, or at the vault", "error", err)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("settle.rpc: %w", err)
	}
	limit, cancel := context.WithTimeout(ctx, chainTime)
	defer cancel()
	if err := client.Check(limit); err != nil {
		return nil, fmt.Errorf("the chain is not as the network file has it: %w", err)
	}
	books, err := cashier.Open(n.cfg.Settle.Books, n.log, nil)
	if err != nil {
		return nil, err
	}
	n.onStop(books.Close)
	if _, err := books.Verify(); err != nil {
		return nil, err
	}
	governor, err := openGovernor(n.cfg.Settle, t, books)
	if err != nil {
		return nil, err
	}
	s := &settling{}
	s.drawn = newDrawn(n.exchange.table, func(of settle.Node) (settle.Standing, error) { return s.desk.Standing(of) })
	models := &modelBook{find: n.learnParts, known: map[string]cashier.Model{}, finding: map[settle.Node]string{}}
	s.desk, err = cashier.OpenDesk(cashier.DeskConfig{
		Network: t.authority.Network, Cluster: t.authority.Cluster, Key: identity.PrivateKey(), Books: books, Chain: client,
		Vault: vaultOf{client, keys}, Governor: governor, Decimals: t.decimals, FirstRaw: t.firstRaw, Began: t.began,
		Models: models.model, Operators: t.operators, Fee: keys.fee, Among: s.drawn.Among, Publish: n.exchange.prices.Publish, Logger: n.log,
	})
	if err != nil {
		return nil, err
	}
	if err := n.exchange.prices.keepIn(ctx, books, s.desk); err != nil {
		return nil, err
	}
	s.door = cashier.NewDoor(cashier.DoorConfig{As: s.as, Logger: n.log})
	return s, n.host.HandleStream(cashier.Protocol, func(p *p2p.Peer, c p2p.Conn) {
		if err := s.door.Serve(p.ID, c); err != nil {
			n.host.Blame(p.ID, p2p.Malformed, err.Error())
		}
	})
}

// as is the settlement as a node sees it.
func (s *settling) as(node settle.Node) cashier.Service { return s.desk.As(node) }

// vaultKeys sign for the operator.
type vaultKeys struct {
	vault ed25519.PrivateKey
	fee   ed25519.PrivateKey // nil: the vault's owner pays the fees of payouts, and x402 is not taken
}

func readVaultKeys(s SettleConfig, t *token) (k vaultKeys, err error) {
	if k.vault, err = readKeyPair(s.VaultKey); err == nil {
		err = ofWallet(k.vault, t.vault.Owner)
	}
	if err != nil {
		return k, fmt.Errorf("settle.vault_key: %w", err)
	}
	if s.FeeKey == "" {
		return k, nil
	}
	if k.fee, err = readKeyPair(s.FeeKey); err != nil {
		return k, fmt.Errorf("settle.fee_key: %w", err)
	}
	if ofWallet(k.fee, t.vault.Owner) == nil {
		return k, fmt.Errorf("settle.fee_key is the key of the vault's owner: whoever makes transactions for the fee key to sign must not come near that one; take another")
	}
	return k, nil
}

// vaultOf makes a client with keys a cashier.Vault.
type vaultOf struct {
	*solana.Client
	keys vaultKeys
}

// Sign makes vaultOf a cashier.Vault.
func (v vaultOf) Sign(ctx context.Context, p solana.Payout) (solana.Signed, error) {
	fee := v.keys.fee
	if fee == nil {
		fee = v.keys.vault
	}
	return v.Client.Sign(ctx, v.keys.vault, fee, p)
}

func openGovernor(s SettleConfig, t *token, books *cashier.Books) (*govern.Governor, error) {
	sealed, err := readSecret(s.Authenticator)
	if err != nil {
		return nil, fmt.Errorf("settle.authenticator: %w", err)
	}
	key, err := readSecret(s.AuthenticatorKey)
	if err == nil && len(key) != 32 {
		err = fmt.Errorf("%s holds %d bytes, not 32", s.AuthenticatorKey, len(key))
	}
	if err != nil {
		return nil, fmt.Errorf("settle.authenticator_key: %w", err)
	}
	return govern.Open(govern.Config{Authority: t.authority, Since: t.since(), Store: books.GovernStore(), Secret: sealed, Key: [32]byte(key)})
}

// modelBook remembers the parts of models that were quoted.
type modelBook struct {
	find func(id string) (cashier.Model, error)

	mu      sync.Mutex // guards what follows
	known   map[string]cashier.Model
	finding map[settle.Node]string // the model whose header is fetched for a node
}

// model is cashier.DeskConfig's Models. A slow header keeps nobody but who asked for it from learning
// of another model.
func (b *modelBook) model(id string, by settle.Node) (cashier.Model, error) {
	if m, ok, err := b.begin(id, by); ok || err != nil {
		return m, err
	}
	m, err := b.find(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.finding, by)
	if err == nil {
		for other := range b.known {
			if len(b.known) < maxKnown {
				break
			}
			delete(b.known, other) // it is learnt again when it is asked for
		}
		b.known[id] = m
	}
	return m, err
}

// begin gives a model that is known, or lets the caller find it. Error: a Refusal.
func (b *modelBook) begin(id string, by settle.Node) (m cashier.Model, ok bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m, ok = b.known[id]; ok {
		return m, true, nil
	}
	_, asks := b.finding[by]
	if asks || len(b.finding) >= maxFinding || slices.Contains(slices.Collect(maps.Values(b.finding)), id) {
		return m, false, &cashier.Refusal{Code: cashier.CodeBusy, Text: "the settlement learns of this model, or of another for you: ask again", Retry: 1}
	}
	b.finding[by] = id
	return m, false, nil
}

// isServed says whether somebody announces that a model is computed by him, or a part of it.
func isServed(holders []market.Holder) bool {
	return slices.ContainsFunc(holders, func(h market.Holder) bool {
		return h.News.Backbone || h.News.Service.Slots > 0 || len(servedBlocks(h.News.Holdings)) > 0 ||
			slices.ContainsFunc(h.News.Windows, func(w market.WindowHolding) bool { return w.State == market.Serving })
	})
}

// learnParts reads the parts of a model that somebody serves from its own header.
func (n *Node) learnParts(text string) (cashier.Model, error) {
	id, err := gguf.ParseModelID(text)
	if err != nil || id.String() != text {
		return cashier.Model{}, &cashier.Refusal{Code: cashier.CodeNotFound, Field: "model", Text: fmt.Sprintf("%.80q is no id of a model", text)}
	}
	if !isServed(n.exchange.table.Holders(id, time.Now())) {
		// Who has just come may not have been heard of yet.
		return cashier.Model{}, &cashier.Refusal{Code: cashier.CodeNotYet, Field: "model", Retry: 2,
			Text: fmt.Sprintf("the settlement has not heard of anybody who serves model %s: ask again", text)}
	}
	g := n.weights.known(id)
	if g == nil {
		ctx, cancel := context.WithTimeout(context.Background(), modelTime)
		defer cancel()
		if _, g, err = n.headerOf(ctx, id); err != nil {
			return cashier.Model{}, &cashier.Refusal{Code: cashier.CodeNotYet, Field: "model", Text: err.Error(), Retry: 5}
		}
	}
	m, err := meter.NewModel(text, g)
	if err != nil {
		return cashier.Model{}, err
	}
	return cashier.Model{Name: text, Parts: m.Parts()}, nil
}

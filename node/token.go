package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/solana"
)

// The token programs of the chain, of which a network uses one.
const (
	tokenProgram     = "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA"
	token2022Program = "TokenzQdBNbLqP5VEhdkAS6EPFLC1PHnBqCXEpPxuEb"
)

// token is the token section of a network file, as what settles understands it.
type token struct {
	peer      peer.ID // who settles
	vault     solana.Vault
	decimals  uint8
	operators []settle.Wallet
	firstRaw  uint64
	began     time.Time
	authority govern.Authority
}

// readToken understands the section of a network; nil when it has none. Errors name the
// key of the file.
func readToken(g *p2p.Genesis) (*token, error) {
	if g == nil || g.Token == nil {
		return nil, nil
	}
	from := g.Token
	t := &token{peer: from.Settlement, decimals: uint8(from.Decimals), firstRaw: from.FirstPrice, began: g.Created}
	a := govern.Authority{Network: g.Hash(), Threshold: from.Threshold, Devnet: from.Devnet}
	for _, k := range []struct {
		key, text string
		to        *settle.Key
	}{
		{"mint", from.Mint, &t.vault.Mint}, {"token_program", from.Program, &t.vault.Program},
		{"cluster", from.Cluster, &a.Cluster}, {"vault_owner", from.VaultOwner, &t.vault.Owner},
	} {
		var err error
		if *k.to, err = settle.ParseKey(k.text); err != nil {
			return nil, fmt.Errorf("token.%s: %w", k.key, err)
		}
	}
	if from.Program != tokenProgram && from.Program != token2022Program {
		return nil, fmt.Errorf("token.token_program = %q: want %s, or %s for Token-2022", from.Program, tokenProgram, token2022Program)
	}
	if err := settle.CheckKey(t.vault.Owner); err != nil {
		return nil, fmt.Errorf("token.vault_owner: %w", err)
	}
	var err error
	if a.Wallets, err = readWallets("token.wallets", from.Wallets); err != nil {
		return nil, err
	}
	if t.operators, err = readWallets("token.operators", from.Operators); err != nil {
		return nil, err
	}
	if a.Params, err = readParameters(from); err != nil {
		return nil, err
	}
	if t.firstRaw < a.Params.FloorRaw || t.firstRaw > a.Params.CeilingRaw {
		return nil, fmt.Errorf("token.first_price = %d: want %d to %d, the floor and the ceiling", t.firstRaw, a.Params.FloorRaw, a.Params.CeilingRaw)
	}
	t.authority = a
	if _, err := govern.NewHistory(a, t.since()); err != nil {
		return nil, fmt.Errorf("token.wallets: %w", err)
	}
	return t, nil
}

func readWallets(key string, list []string) (out []settle.Wallet, err error) {
	for _, s := range list {
		w, err := settle.ParseKey(s)
		if err == nil {
			err = settle.CheckKey(w)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		out = append(out, w)
	}
	return out, nil
}

// readParameters are the defaults with what the file says, checked as a whole.
func readParameters(from *p2p.Token) (settle.Params, error) {
	p := settle.DefaultParams()
	for _, name := range slices.Sorted(maps.Keys(from.Parameters)) {
		f, err := settle.FieldByName(name)
		if err != nil {
			return p, fmt.Errorf("token.parameters.%s: there is no such parameter%s", name, Suggest(name, parameterNames()))
		}
		f.Set(&p, from.Parameters[name])
	}
	if err := p.Validate(from.Devnet); err != nil {
		return p, fmt.Errorf("token.parameters: %w", err)
	}
	return p, nil
}

func parameterNames() (names []string) {
	for _, f := range settle.Fields() {
		names = append(names, f.Name)
	}
	return names
}

// since is when the reference of the file was set, in unix seconds.
func (t *token) since() uint64 { return uint64(t.began.Unix()) }

// errNoToken is for what only a network with a token has.
var errNoToken = errors.New("this network has no token: nothing is paid in it")

package p2p

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/mr-tron/base58"
)

// Token is what a network with a token says of money. This package checks its form and
// takes its keys for texts: what they mean is the settlement's matter.
//
//	[token]
//	mint = "…"               # keys of the chain are base58 of 32 bytes
//	token_program = "…"
//	decimals = 6             # of the mint, 0 to 18
//	cluster = "…"            # hash of the chain's first block
//	vault_owner = "…"        # wallet that is paid
//	settlement = "12D3KooW…" # peer id of the node that settles
//	wallets = ["…"]          # that sign changes of parameters, 1 to 16
//	threshold = 1            # so many of them
//	devnet = false           # a network to try things in, with wide bounds
//	operators = []           # other wallets of the operator, which pay nothing here
//	first_price = 300000000000
//
//	[token.parameters]       # other than their defaults, by name
//	fee = 100000
//
//	hashed: 1 mint, bytes         2 token_program  3 decimals   4 cluster    5 vault_owner  6 settlement, bytes
//	        7 wallets, ascending  8 threshold      9 devnet    10 operators, ascending     11 first_price
//	       12 parameters, by name
//
// 9, 10 and 12 are left out when they are empty.
type Token struct {
	Mint, Program, Cluster, VaultOwner string
	Decimals                           int
	Settlement                         peer.ID
	Wallets                            []string // ascending
	Threshold                          int
	Devnet                             bool
	Operators                          []string // ascending
	FirstPrice                         uint64
	Parameters                         map[string]uint64
}

// Limits of a token section.
const (
	maxDecimals   = 18
	maxWallets    = 16
	maxOperators  = 64
	maxParameters = 64
)

var parameterName = regexp.MustCompile(`^[a-z0-9_]{1,40}$`)

// tokenFile is the TOML form.
type tokenFile struct {
	Mint       string           `toml:"mint"`
	Program    string           `toml:"token_program"`
	Decimals   *int             `toml:"decimals"`
	Cluster    string           `toml:"cluster"`
	VaultOwner string           `toml:"vault_owner"`
	Settlement string           `toml:"settlement"`
	Wallets    []string         `toml:"wallets"`
	Threshold  int              `toml:"threshold"`
	Devnet     bool             `toml:"devnet"`
	Operators  []string         `toml:"operators"`
	FirstPrice int64            `toml:"first_price"`
	Parameters map[string]int64 `toml:"parameters"`
}

// tokenCBOR is the hashed form.
type tokenCBOR struct {
	Mint       []byte            `cbor:"1,keyasint"`
	Program    []byte            `cbor:"2,keyasint"`
	Decimals   uint              `cbor:"3,keyasint"`
	Cluster    []byte            `cbor:"4,keyasint"`
	VaultOwner []byte            `cbor:"5,keyasint"`
	Settlement []byte            `cbor:"6,keyasint"`
	Wallets    [][]byte          `cbor:"7,keyasint"`
	Threshold  uint              `cbor:"8,keyasint"`
	Devnet     bool              `cbor:"9,keyasint,omitempty"`
	Operators  [][]byte          `cbor:"10,keyasint,omitempty"`
	FirstPrice uint64            `cbor:"11,keyasint"`
	Parameters map[string]uint64 `cbor:"12,keyasint,omitempty"`
}

// token gives the values of the file their types.
func (f *tokenFile) token() (*Token, error) {
	if f == nil {
		return nil, nil
	}
	if f.Decimals == nil {
		return nil, errors.New("token.decimals is missing: say how many the mint has")
	}
	if f.FirstPrice <= 0 {
		return nil, fmt.Errorf("token.first_price = %d: want fiat micro-units · 10⁶ per 10⁶ tokens, more than 0", f.FirstPrice)
	}
	if len(f.Parameters) > maxParameters {
		return nil, fmt.Errorf("token.parameters: %d of them, at most %d", len(f.Parameters), maxParameters)
	}
	t := &Token{
		Mint: f.Mint, Program: f.Program, Cluster: f.Cluster, VaultOwner: f.VaultOwner, Decimals: *f.Decimals,
		Wallets: slices.Sorted(slices.Values(f.Wallets)), Threshold: f.Threshold, Devnet: f.Devnet,
		Operators: slices.Sorted(slices.Values(f.Operators)), FirstPrice: uint64(f.FirstPrice),
	}
	for _, name := range slices.Sorted(maps.Keys(f.Parameters)) {
		v := f.Parameters[name]
		if v < 0 {
			return nil, fmt.Errorf("token.parameters.%s = %d: want 0 or more", name, v)
		}
		if t.Parameters == nil {
			t.Parameters = map[string]uint64{}
		}
		t.Parameters[name] = uint64(v)
	}
	var err error
	if t.Settlement, err = peer.Decode(f.Settlement); err != nil {
		return nil, fmt.Errorf("token.settlement = %q: want a peer id like 12D3KooW…", f.Settlement)
	}
	return t, nil
}

// check refuses what no token section can be.
func (t *Token) check() error {
	if t == nil {
		return nil
	}
	for _, k := range []struct{ key, text string }{
		{"mint", t.Mint}, {"token_program", t.Program}, {"cluster", t.Cluster}, {"vault_owner", t.VaultOwner},
	} {
		if _, err := chainKey(k.text); err != nil {
			return fmt.Errorf("token.%s = %q: %w", k.key, k.text, err)
		}
	}
	if _, err := KeyOf(t.Settlement); err != nil {
		return fmt.Errorf("token.settlement: %w", err)
	}
	switch {
	case t.Decimals < 0 || t.Decimals > maxDecimals:
		return fmt.Errorf("token.decimals = %d: want 0 to %d", t.Decimals, maxDecimals)
	case len(t.Wallets) == 0:
		return errors.New("token.wallets is empty: name who signs changes of parameters")
	case t.Threshold < 1 || t.Threshold > len(t.Wallets):
		return fmt.Errorf("token.threshold = %d: want 1 to %d, the number of wallets", t.Threshold, len(t.Wallets))
	}
	for name, v := range t.Parameters {
		if !parameterName.MatchString(name) {
			return fmt.Errorf("token.parameters: %.60q is no name of a parameter", name)
		}
		if v > 1<<63-1 { // TOML has no more
			return fmt.Errorf("token.parameters.%s = %d: at most 2⁶³ − 1", name, v)
		}
	}
	if t.FirstPrice == 0 || t.FirstPrice > 1<<63-1 {
		return fmt.Errorf("token.first_price = %d: want 1 to 2⁶³ − 1", t.FirstPrice)
	}
	if err := checkKeys("token.wallets", t.Wallets, maxWallets); err != nil {
		return err
	}
	return checkKeys("token.operators", t.Operators, maxOperators)
}

func checkKeys(key string, list []string, most int) error {
	if len(list) > most {
		return fmt.Errorf("%s: %d of them, at most %d", key, len(list), most)
	}
	for i, s := range list {
		if _, err := chainKey(s); err != nil {
			return fmt.Errorf("%s: %q: %w", key, s, err)
		}
		if i > 0 && list[i-1] == s {
			return fmt.Errorf("%s: %q is there twice", key, s)
		}
	}
	return nil
}

// chainKey reads a key of the chain.
func chainKey(s string) ([]byte, error) {
	if len(s) <= 44 { // 32 bytes take no more
		if b, err := base58.Decode(s); err == nil && len(b) == 32 {
			return b, nil
		}
	}
	return nil, errors.New("want base58 of 32 bytes")
}

func chainKeys(list []string) (out [][]byte) {
	for _, s := range list {
		b, _ := chainKey(s)
		out = append(out, b)
	}
	return out
}

// hashed is what the network's id is made of. Of what check refuses it is something.
func (t *Token) hashed() *tokenCBOR {
	if t == nil {
		return nil
	}
	key := func(s string) []byte { b, _ := chainKey(s); return b }
	return &tokenCBOR{
		Mint: key(t.Mint), Program: key(t.Program), Decimals: uint(t.Decimals), Cluster: key(t.Cluster), VaultOwner: key(t.VaultOwner),
		Settlement: []byte(t.Settlement), Wallets: chainKeys(t.Wallets), Threshold: uint(t.Threshold), Devnet: t.Devnet,
		Operators: chainKeys(t.Operators), FirstPrice: t.FirstPrice, Parameters: t.Parameters,
	}
}

// write adds the section to a network file.
func (t *Token) write(b *strings.Builder) {
	if t == nil {
		return
	}
	fmt.Fprintf(b, "\n# What is paid with, and who settles.\n[token]\nmint = %q\ntoken_program = %q\ndecimals = %d\n", t.Mint, t.Program, t.Decimals)
	fmt.Fprintf(b, "cluster = %q # hash of the chain's first block\nvault_owner = %q # wallet that is paid\n", t.Cluster, t.VaultOwner)
	fmt.Fprintf(b, "settlement = %q # peer that settles\n", t.Settlement)
	writeList(b, "wallets", t.Wallets, "wallets that sign changes of parameters")
	fmt.Fprintf(b, "threshold = %d # so many of them\ndevnet = %t # a network to try things in, with wide bounds\n", t.Threshold, t.Devnet)
	writeList(b, "operators", t.Operators, "other wallets of the operator, which pay nothing here")
	fmt.Fprintf(b, "first_price = %d # of every model, fiat micro-units · 10⁶ per 10⁶ tokens\n", t.FirstPrice)
	if len(t.Parameters) == 0 {
		return
	}
	b.WriteString("\n# Parameters other than their defaults.\n[token.parameters]\n")
	for _, name := range slices.Sorted(maps.Keys(t.Parameters)) {
		fmt.Fprintf(b, "%s = %d\n", name, t.Parameters[name])
	}
}

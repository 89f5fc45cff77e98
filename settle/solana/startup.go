package solana

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	sdk "github.com/gagliardetto/solana-go"

	"kvasird/settle"
)

var (
	tokenProgram     = settle.Key(sdk.TokenProgramID)
	token2022Program = settle.Key(sdk.Token2022ProgramID)
)

// Why a client must not be used: the start-up of a settlement ends here.
var (
	ErrCluster = errors.New("a provider is of another cluster than the genesis hash says")
	ErrMint    = errors.New("the mint is not what is pinned")
	ErrVault   = errors.New("the vault is not fit to be paid")
)

// The layout of accounts of the token programs: a mint has 82 bytes, a token account
// 165. Token-2022's with extensions are both filled up to 165, then have a byte for
// their type and the extensions, each a type and a length of 2 bytes and its bytes.
const (
	mintLength      = 82
	accountLength   = 165
	extensionsStart = accountLength + 1
)

// harmless are the extensions of Token-2022 that change neither what a transfer moves
// nor who may move it. All others are refused, those of the future too.
var harmless = []uint16{
	7,  // the owner cannot change
	8,  // incoming transfers need a memo
	10, // interest, in display only
	11, // guard against CPI
	18, // metadata pointer
	19, // metadata
	20, // group pointer
	21, // group
	22, // member pointer
	23, // member
	25, // scaled display
}

var extensionNames = map[uint16]string{1: "transfer fee", 2: "withheld fees", 3: "close authority", 4: "confidential transfers",
	5: "confidential transfers", 6: "default account state", 9: "not transferable", 12: "permanent delegate",
	14: "transfer hook", 16: "confidential fees", 24: "confidential mint and burn", 26: "pausable"}

// Check asks all providers whether cluster, mint and vault are what is pinned, and fit
// to be used. Its errors are ErrCluster, ErrMint, ErrVault and ErrProvider.
func (cl *Client) Check(ctx context.Context) error {
	for _, p := range cl.providers {
		var genesis settle.Key
		if err := p.call(ctx, "getGenesisHash", []any{}, &genesis); err != nil {
			return err
		}
		if genesis != cl.genesis {
			return fmt.Errorf("%w: provider %d has %s, not %s", ErrCluster, p.number, genesis, cl.genesis)
		}
		found, err := cl.accounts(ctx, p, cl.vault.Mint, cl.vault.Account)
		if err != nil {
			return err
		}
		if err := cl.checkMint(found[0]); err != nil {
			return err
		}
		if err := cl.checkVault(found[1]); err != nil {
			return err
		}
	}
	return nil
}

type account struct {
	Owner settle.Key
	Data  []string
	bytes []byte
}

// accounts are those of the addresses, finalized; nil where there is none.
func (cl *Client) accounts(ctx context.Context, p *provider, addresses ...settle.Key) ([]*account, error) {
	var result struct{ Value []*account }
	err := p.call(ctx, "getMultipleAccounts", []any{addresses,
		map[string]string{"encoding": "base64", "commitment": "finalized"}}, &result)
	if err != nil {
		return nil, err
	}
	if len(result.Value) != len(addresses) {
		return nil, fmt.Errorf("%w: provider %d: %d accounts, not %d", ErrMalformed, p.number, len(result.Value), len(addresses))
	}
	for _, a := range result.Value {
		if a == nil {
			continue
		}
		if len(a.Data) != 2 || a.Data[1] != "base64" {
			return nil, fmt.Errorf("%w: provider %d: an account that is not in base64", ErrMalformed, p.number)
		}
		if a.bytes, err = base64.StdEncoding.DecodeString(a.Data[0]); err != nil {
			return nil, fmt.Errorf("%w: provider %d: an account that is not in base64", ErrMalformed, p.number)
		}
	}
	return result.Value, nil
}

func (cl *Client) checkMint(a *account) error {
	switch {
	case a == nil:
		return fmt.Errorf("%w: there is no account %s", ErrMint, cl.vault.Mint)
	case a.Owner != cl.vault.Program:
		return fmt.Errorf("%w: its program is %s, not %s", ErrMint, a.Owner, cl.vault.Program)
	case len(a.bytes) < mintLength || len(a.bytes) > mintLength && len(a.bytes) < extensionsStart || a.bytes[45] != 1:
		return fmt.Errorf("%w: %s is not a mint", ErrMint, cl.vault.Mint)
	case a.bytes[44] != cl.decimals:
		return fmt.Errorf("%w: it has %d decimals, not %d", ErrMint, a.bytes[44], cl.decimals)
	}
	return checkExtensions(ErrMint, a.bytes)
}

func (cl *Client) checkVault(a *account) error {
	if a == nil {
		return fmt.Errorf("%w: there is no account %s: create the associated token account of %s", ErrVault, cl.vault.Account, cl.vault.Owner)
	}
	b := a.bytes
	if a.Owner != cl.vault.Program || len(b) < accountLength {
		return fmt.Errorf("%w: %s is no token account of %s", ErrVault, cl.vault.Account, cl.vault.Program)
	}
	closer := settle.Key(b[133:165])
	switch {
	case settle.Key(b[:32]) != cl.vault.Mint:
		return fmt.Errorf("%w: its mint is another", ErrVault)
	case settle.Key(b[32:64]) != cl.vault.Owner:
		return fmt.Errorf("%w: its owner is %s, not %s", ErrVault, settle.Key(b[32:64]), cl.vault.Owner)
	case b[108] == 2:
		return fmt.Errorf("%w: it is frozen", ErrVault)
	case b[108] != 1:
		return fmt.Errorf("%w: it is not initialised", ErrVault)
	case binary.LittleEndian.Uint32(b[72:]) != 0:
		return fmt.Errorf("%w: it has a delegate, who can spend from it: revoke that", ErrVault)
	case binary.LittleEndian.Uint32(b[129:]) != 0 && closer != cl.vault.Owner:
		return fmt.Errorf("%w: %s can close it: take that back", ErrVault, closer)
	}
	return checkExtensions(ErrVault, b)
}

// checkExtensions refuses accounts with extensions that are not harmless.
func checkExtensions(class error, b []byte) error {
	if len(b) <= extensionsStart {
		return nil
	}
	for b = b[extensionsStart:]; len(b) >= 4; {
		kind, n := binary.LittleEndian.Uint16(b), int(binary.LittleEndian.Uint16(b[2:]))
		if kind == 0 { // the rest is not used
			return nil
		}
		if n > len(b)-4 {
			return fmt.Errorf("%w: an extension of %d bytes in %d", class, n, len(b)-4)
		}
		if !slices.Contains(harmless, kind) {
			return fmt.Errorf("%w: it has the extension %d (%s), with which balances or payers are not what transfers say", class, kind, extensionNames[kind])
		}
		b = b[4+n:]
	}
	return nil
}

// ataOf is the associated token account of a wallet.
func ataOf(owner, mint, program settle.Key) (settle.Key, error) {
	address, _, err := sdk.FindAssociatedTokenAddressWithProgram(sdk.PublicKey(owner), sdk.PublicKey(mint), sdk.PublicKey(program))
	if err != nil {
		return settle.Key{}, fmt.Errorf("the associated token account of %s: %w", owner, err)
	}
	return settle.Key(address), nil
}

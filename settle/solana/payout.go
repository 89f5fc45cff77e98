package solana

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"

	sdk "github.com/gagliardetto/solana-go"

	"kvasird/settle"
)

// A payout is done in this order, so that a crash at any point neither loses nor
// repeats it: Sign, write the Signed down as an intent, Send (again, as often as one
// likes: it is one transaction), and Resolve until it is no longer Pending. Only an
// intent that is Failed or Expired may be replaced by another one.

// Payout is what leaves the vault.
type Payout struct {
	To     settle.Wallet // its associated token account is paid, which has to be there
	Burn   bool          // the tokens are destroyed, and To is zero
	Amount settle.Amount
	Memo   string // the intent's id, so that no two payouts are the same transaction
}

// Signed is a payout's transaction, as the ledger keeps it.
type Signed struct {
	Raw       []byte
	Signature settle.Signature
	Message   settle.Hash // of what was signed
	Slot      uint64      // at which it was signed; it cannot be in an earlier one
	LastValid uint64      // the last block height at which it can land
}

// Outcome is what became of a payout.
type Outcome int

// Outcomes. All but Pending are for ever.
const (
	Pending Outcome = iota
	Landed
	Failed  // it is in a block and moved nothing
	Expired // it is in no block and can be in none any more
)

func (o Outcome) String() string {
	return [...]string{"pending", "landed", "failed", "expired"}[o]
}

// ErrPayout is a payout that cannot be signed.
var ErrPayout = errors.New("the payout cannot be made")

// expiryMargin is how many blocks beyond the last valid one an absent transaction is
// waited for: the nodes behind one URL are not all at the same height.
const expiryMargin = 150

// Sign builds and signs a payout. The vault key is its owner's; the fee key pays for the
// transaction, and may be the same. It pays for no account: its owner could close that,
// keep what was paid for it, and claim again.
func (cl *Client) Sign(ctx context.Context, vault, fee ed25519.PrivateKey, p Payout) (Signed, error) {
	if err := cl.validatePayout(vault, fee, p); err != nil {
		return Signed{}, err
	}
	out := cl.burnInstruction(p)
	if !p.Burn {
		to, err := cl.recipient(ctx, p.To)
		if err != nil {
			return Signed{}, err
		}
		out = cl.transferInstruction(to, p)
	}
	latest, err := cl.latest(ctx)
	if err != nil {
		return Signed{}, err
	}
	feePayer := sdk.PublicKeyFromBytes(fee.Public().(ed25519.PublicKey))
	tx, err := sdk.NewTransaction([]sdk.Instruction{out, cl.memoInstruction(p)}, sdk.Hash(latest.Value.Blockhash), sdk.TransactionPayer(feePayer))
	if err != nil {
		return Signed{}, fmt.Errorf("%w: %v", ErrPayout, err)
	}
	_, err = tx.Sign(func(k sdk.PublicKey) *sdk.PrivateKey {
		for _, key := range []ed25519.PrivateKey{vault, fee} {
			if private := sdk.PrivateKey(key); private.PublicKey() == k {
				return &private
			}
		}
		return nil
	})
	if err != nil {
		return Signed{}, fmt.Errorf("%w: %v", ErrPayout, err)
	}
	raw, err := tx.MarshalBinary()
	if err != nil {
		return Signed{}, fmt.Errorf("%w: %v", ErrPayout, err)
	}
	return Signed{Raw: raw, Signature: settle.Signature(tx.Signatures[0]), Message: sha256.Sum256(messageOf(tx, raw)),
		Slot: latest.Context.Slot, LastValid: latest.Value.LastValidBlockHeight}, nil
}

// latestHash is a blockhash, with the last block height at which it is valid.
type latestHash struct {
	Context struct{ Slot uint64 }
	Value   struct {
		Blockhash            settle.Key
		LastValidBlockHeight uint64
	}
}

// latest is the newest finalized blockhash: that one is of no fork that is given up.
func (cl *Client) latest(ctx context.Context) (l latestHash, err error) {
	err = cl.providers[0].call(ctx, "getLatestBlockhash", []any{map[string]string{"commitment": "finalized"}}, &l)
	if err == nil && (l.Value.Blockhash == (settle.Key{}) || l.Value.LastValidBlockHeight == 0) {
		err = fmt.Errorf("%w: no blockhash", ErrMalformed)
	}
	return l, err
}

func (cl *Client) validatePayout(vault, fee ed25519.PrivateKey, p Payout) error {
	if len(vault) != ed25519.PrivateKeySize || len(fee) != ed25519.PrivateKeySize {
		return fmt.Errorf("%w: a key has not %d bytes", ErrPayout, ed25519.PrivateKeySize)
	}
	switch {
	case settle.Key(vault.Public().(ed25519.PublicKey)) != cl.vault.Owner:
		return fmt.Errorf("%w: the vault key is not that of %s", ErrPayout, cl.vault.Owner)
	case p.Amount == 0:
		return fmt.Errorf("%w: an amount of 0", ErrPayout)
	case p.Memo == "" || len(p.Memo) > memoLimit:
		return fmt.Errorf("%w: a memo of %d bytes, it has 1 to %d", ErrPayout, len(p.Memo), memoLimit)
	case p.Burn && p.To != settle.Wallet{}:
		return fmt.Errorf("%w: what is burnt goes to nobody, and not to %s", ErrPayout, p.To)
	case p.Burn:
		return nil
	case p.To == cl.vault.Owner || p.To == cl.vault.Account:
		return fmt.Errorf("%w: %s is the vault", ErrPayout, p.To)
	case settle.SmallOrder(p.To) || !sdk.PublicKey(p.To).IsOnCurve():
		return fmt.Errorf("%w: nobody has the key of %s: it is no wallet", ErrPayout, p.To)
	}
	return nil
}

// recipient is a wallet's associated token account, as the first provider has it: if
// that errs, the transaction moves nothing.
func (cl *Client) recipient(ctx context.Context, w settle.Wallet) (settle.Key, error) {
	to, err := ataOf(w, cl.vault.Mint, cl.vault.Program)
	if err != nil {
		return to, err
	}
	found, err := cl.accounts(ctx, cl.providers[0], to)
	if err != nil {
		return to, err
	}
	bad := ""
	switch a := found[0]; {
	case a == nil:
		bad = "is not there"
	case a.Owner != cl.vault.Program || len(a.bytes) < accountLength || settle.Key(a.bytes[:32]) != cl.vault.Mint:
		bad = "is no token account of the mint"
	case settle.Key(a.bytes[32:64]) != w:
		bad = "was given away to " + settle.Key(a.bytes[32:64]).String()
	case a.bytes[108] != 1:
		bad = "is frozen, or not initialised"
	default:
		return to, nil
	}
	return to, fmt.Errorf("%w: the account %s of %s and the mint %s %s: create the wallet's token account first", ErrPayout, to, w, cl.vault.Mint, bad)
}

func (cl *Client) transferInstruction(to settle.Key, p Payout) sdk.Instruction {
	v := cl.vault
	return cl.tokenInstruction(tokenTransferChecked, p.Amount, sdk.AccountMetaSlice{sdk.Meta(sdk.PublicKey(v.Account)).WRITE(),
		sdk.Meta(sdk.PublicKey(v.Mint)), sdk.Meta(sdk.PublicKey(to)).WRITE(), sdk.Meta(sdk.PublicKey(v.Owner)).SIGNER()})
}

func (cl *Client) burnInstruction(p Payout) sdk.Instruction {
	v := cl.vault
	return cl.tokenInstruction(tokenBurnChecked, p.Amount, sdk.AccountMetaSlice{sdk.Meta(sdk.PublicKey(v.Account)).WRITE(),
		sdk.Meta(sdk.PublicKey(v.Mint)).WRITE(), sdk.Meta(sdk.PublicKey(v.Owner)).SIGNER()})
}

// tokenInstruction is one whose data are its number, an amount and the mint's decimals.
func (cl *Client) tokenInstruction(number byte, amount settle.Amount, accounts sdk.AccountMetaSlice) sdk.Instruction {
	data := binary.LittleEndian.AppendUint64([]byte{number}, uint64(amount))
	return sdk.NewInstruction(sdk.PublicKey(cl.vault.Program), accounts, append(data, cl.decimals))
}

func (cl *Client) memoInstruction(p Payout) sdk.Instruction {
	return sdk.NewInstruction(sdk.MemoProgramID, sdk.AccountMetaSlice{sdk.Meta(sdk.PublicKey(cl.vault.Owner)).SIGNER()}, []byte(p.Memo))
}

// Send gives a payout to all providers. An error says that none took it; whether it
// landed all the same only Resolve knows.
func (cl *Client) Send(ctx context.Context, s Signed) error {
	var errs []error
	for _, p := range cl.providers {
		var sig settle.Signature
		err := p.call(ctx, "sendTransaction", []any{base64.StdEncoding.EncodeToString(s.Raw),
			map[string]any{"encoding": "base64", "preflightCommitment": "confirmed"}}, &sig)
		if wasSent(err) {
			err = nil
		}
		errs = append(errs, err)
	}
	for _, err := range errs {
		if err == nil {
			return nil
		}
	}
	return errors.Join(errs...)
}

// wasSent says whether a node refuses a transaction because it has it.
func wasSent(err error) bool {
	var e *rpcError
	return errors.As(err, &e) && e.Code == codePreflight && e.failure() == "AlreadyProcessed"
}

// Resolve says what became of a payout. All providers have to say the same, or it is
// Pending, or an error that means nothing about the payout.
func (cl *Client) Resolve(ctx context.Context, s Signed) (Outcome, error) {
	var all Outcome
	for i, p := range cl.providers {
		o, err := cl.resolveAt(ctx, p, s)
		if err != nil {
			return Pending, err
		}
		if o == Pending {
			return Pending, nil
		}
		if i > 0 && o != all {
			err := fmt.Errorf("%w: the payout %s is %s and %s", ErrDisagree, s.Signature, all, o)
			cl.tell(err)
			return Pending, err
		}
		all = o
	}
	return all, nil
}

// resolveAt asks for the height before it asks for the transaction: what is not in the
// chain then, above its last height, never will be.
func (cl *Client) resolveAt(ctx context.Context, p *provider, s Signed) (Outcome, error) {
	var height, first uint64
	finalized := map[string]string{"commitment": "finalized"}
	if err := p.call(ctx, "getBlockHeight", []any{finalized}, &height); err != nil {
		return Pending, err
	}
	e, err := cl.fetchFrom(ctx, p, s.Signature)
	switch {
	case err == nil && settle.Signature(e.tx.Signatures[0]) != s.Signature, err == nil && e.message != s.Message:
		cl.tell(ErrSwapped)
		return Pending, fmt.Errorf("%w (provider %d)", ErrSwapped, p.number)
	case err == nil && e.failed:
		return Failed, nil
	case err == nil:
		return Landed, nil
	case !errors.Is(err, ErrNotYet):
		return Pending, err
	case height <= s.LastValid+expiryMargin:
		return Pending, nil
	}
	if err := p.call(ctx, "getFirstAvailableBlock", []any{}, &first); err != nil {
		return Pending, err
	}
	if first > s.Slot {
		return Pending, fmt.Errorf("%w: provider %d keeps blocks from slot %d on, the payout is of %d: ask one with a longer memory",
			ErrProvider, p.number, first, s.Slot)
	}
	return cl.statusAt(ctx, p, s)
}

// statusAt asks another way whether a payout is in the chain, before it is given up.
func (cl *Client) statusAt(ctx context.Context, p *provider, s Signed) (Outcome, error) {
	var statuses struct {
		Value []*struct{ Slot uint64 }
	}
	err := p.call(ctx, "getSignatureStatuses", []any{[]settle.Signature{s.Signature}, map[string]bool{"searchTransactionHistory": true}}, &statuses)
	if err != nil {
		return Pending, err
	}
	if len(statuses.Value) != 1 {
		return Pending, fmt.Errorf("%w: provider %d: %d statuses, not 1", ErrMalformed, p.number, len(statuses.Value))
	}
	if statuses.Value[0] != nil {
		return Pending, nil
	}
	return Expired, nil
}

package solana

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	sdk "github.com/gagliardetto/solana-go"

	"kvasird/settle"
)

// Vault is the account that is paid, as it is pinned.
type Vault struct {
	Account settle.Key // the associated token account of Owner
	Owner   settle.Wallet
	Mint    settle.Key
	Program settle.Key // Token, or Token-2022
}

// rule is one thing that a payment has to hold. Rules are pure and are asked in the
// order of the list; each may lean on those before it.
type rule struct {
	name  string
	claim bool // looks at the claim alone: asked before any provider is
	memo  bool // binds to a quote: not asked of a stake
	check func(*Client, *evidence, Claim) error
}

var rules = []rule{
	{name: "small order", claim: true, check: ownerIsNotSmall},
	{name: "operator", claim: true, check: ownerIsNotOperator},
	{name: "swapped", check: signatureIsTheOneAsked},
	{name: "signatures", check: signaturesFit},
	{name: "failed", check: transactionSucceeded},
	{name: "early", check: notTooEarly},
	{name: "late", check: notTooLate},
	{name: "vault", check: vaultIsThere},
	{name: "vault account", check: vaultIsAsPinned},
	{name: "delta", check: vaultGrew},
	{name: "debit", check: ownerPaid},
	{name: "touched", check: vaultOnlyReceived},
	{name: "authority", check: ownerAuthorised},
	{name: "source", check: sourcesWereOwners},
	{name: "traced", check: transfersAddUp},
	{name: "signer", check: ownerSigned},
	{name: "memo", memo: true, check: memoIsOne},
	{name: "memo text", memo: true, check: memoIsTheQuotes},
	{name: "memo signer", memo: true, check: ownerSignedMemo},
}

func ownerIsNotSmall(_ *Client, _ *evidence, c Claim) error {
	if settle.SmallOrder(c.Owner) {
		return ErrSmallOrder
	}
	return nil
}

func ownerIsNotOperator(cl *Client, _ *evidence, c Claim) error {
	if c.Owner == cl.vault.Owner || c.Owner == cl.vault.Account || slices.Contains(cl.operators, c.Owner) {
		return ErrOperator
	}
	return nil
}

func signatureIsTheOneAsked(_ *Client, e *evidence, c Claim) error {
	if settle.Signature(e.tx.Signatures[0]) != c.Signature {
		return ErrSwapped
	}
	return nil
}

func signaturesFit(_ *Client, e *evidence, _ Claim) error {
	if err := e.tx.VerifySignatures(); err != nil {
		return ErrForged
	}
	return nil
}

func transactionSucceeded(_ *Client, e *evidence, _ Claim) error {
	if e.failed {
		return ErrFailed
	}
	return nil
}

func notTooEarly(_ *Client, e *evidence, c Claim) error {
	if e.slot < c.NotBefore {
		return fmt.Errorf("%w: slot %d, the quote is of slot %d", ErrEarly, e.slot, c.NotBefore)
	}
	return nil
}

func notTooLate(_ *Client, e *evidence, c Claim) error {
	if c.NotAfter == 0 {
		return nil
	}
	if e.time == 0 {
		return fmt.Errorf("%w: no time of the block", ErrUnverifiable)
	}
	if e.time > c.NotAfter {
		return fmt.Errorf("%w: by %d s", ErrLate, e.time-c.NotAfter)
	}
	return nil
}

func find(hs []holding, account settle.Key) *holding {
	for i := range hs {
		if hs[i].account == account {
			return &hs[i]
		}
	}
	return nil
}

func vaultIsThere(cl *Client, e *evidence, _ Claim) error {
	if find(e.post, cl.vault.Account) == nil {
		return ErrNoVault
	}
	return nil
}

func vaultIsAsPinned(cl *Client, e *evidence, _ Claim) error {
	v := cl.vault
	for _, hs := range [][]holding{e.pre, e.post} {
		if h := find(hs, v.Account); h != nil && (h.mint != v.Mint || h.owner != v.Owner || h.program != v.Program) {
			return ErrVaultAccount
		}
	}
	return nil
}

// received is what the vault has more than before.
func (e *evidence) received(v Vault) settle.Amount {
	var before, after settle.Amount
	if h := find(e.pre, v.Account); h != nil {
		before = h.amount
	}
	if h := find(e.post, v.Account); h != nil {
		after = h.amount
	}
	return max(after, before) - before
}

func vaultGrew(cl *Client, e *evidence, c Claim) error {
	if got := e.received(cl.vault); got < c.Amount {
		return fmt.Errorf("%w: %s of %s", ErrShort, got, c.Amount)
	}
	return nil
}

var errTooMuch = fmt.Errorf("%w: sums of more than 64 bits", ErrMalformed)

// debit is what the owner's accounts have less than before. Whose an account is may
// change: before and after each count by the owner of that moment.
func (e *evidence) debit(v Vault, owner settle.Wallet) (settle.Amount, error) {
	sum := func(hs []holding) (total settle.Amount, err error) {
		for _, h := range hs {
			if h.owner == owner && h.mint == v.Mint && h.program == v.Program && h.account != v.Account {
				if total, err = total.Add(h.amount); err != nil {
					return 0, errTooMuch
				}
			}
		}
		return total, nil
	}
	before, err := sum(e.pre)
	if err != nil {
		return 0, err
	}
	after, err := sum(e.post)
	return max(before, after) - after, err
}

func ownerPaid(cl *Client, e *evidence, c Claim) error {
	paid, err := e.debit(cl.vault, c.Owner)
	if err == nil && paid < c.Amount {
		return fmt.Errorf("%w: %s of %s", ErrDebit, paid, c.Amount)
	}
	return err
}

// transfer is a transfer of tokens to the vault.
type transfer struct {
	source, authority settle.Key
	amount            settle.Amount
}

// Instructions of the token programs, by their first byte.
const (
	tokenTransfer        = 3
	tokenTransferChecked = 12
	tokenBurnChecked     = 15
)

var errOtherCall = errors.New("the call does more than transfer to the vault")

// transferOf reads a call of the token program that names the vault.
func transferOf(c call, vault settle.Key) (transfer, error) {
	var source, destination, authority int
	switch {
	case len(c.data) == 9 && c.data[0] == tokenTransfer && len(c.accounts) >= 3:
		source, destination, authority = 0, 1, 2
	case len(c.data) == 10 && c.data[0] == tokenTransferChecked && len(c.accounts) >= 4:
		source, destination, authority = 0, 2, 3
	default:
		return transfer{}, errOtherCall
	}
	if c.accounts[destination] != vault || c.accounts[source] == vault {
		return transfer{}, errOtherCall
	}
	return transfer{c.accounts[source], c.accounts[authority], settle.Amount(binary.LittleEndian.Uint64(c.data[1:9]))}, nil
}

// transfers gives the transfers to the vault, inner ones too, and whether the token
// program did anything else with it: every other instruction that names the vault
// counts, those of future releases as well.
func (e *evidence) transfers(v Vault) (ts []transfer, others bool) {
	for _, c := range e.calls {
		if c.program != v.Program || !slices.Contains(c.accounts, v.Account) {
			continue
		}
		t, err := transferOf(c, v.Account)
		if err != nil {
			others = true
			continue
		}
		ts = append(ts, t)
	}
	return ts, others
}

func vaultOnlyReceived(cl *Client, e *evidence, _ Claim) error {
	if _, others := e.transfers(cl.vault); others {
		return ErrVaultTouched
	}
	return nil
}

func ownerAuthorised(cl *Client, e *evidence, c Claim) error {
	ts, _ := e.transfers(cl.vault)
	if slices.ContainsFunc(ts, func(t transfer) bool { return t.authority != c.Owner }) {
		return ErrAuthority
	}
	return nil
}

func sourcesWereOwners(cl *Client, e *evidence, c Claim) error {
	ts, _ := e.transfers(cl.vault)
	for _, t := range ts {
		if h := find(e.pre, t.source); h == nil || h.owner != c.Owner {
			return ErrSource
		}
	}
	return nil
}

func (e *evidence) traced(v Vault) (total settle.Amount, err error) {
	ts, _ := e.transfers(v)
	for _, t := range ts {
		if total, err = total.Add(t.amount); err != nil {
			return 0, errTooMuch
		}
	}
	return total, nil
}

func transfersAddUp(cl *Client, e *evidence, c Claim) error {
	total, err := e.traced(cl.vault)
	if err == nil && total < c.Amount {
		return fmt.Errorf("%w: %s of %s", ErrTraced, total, c.Amount)
	}
	return err
}

func ownerSigned(_ *Client, e *evidence, c Claim) error {
	if !slices.Contains(e.keys[:len(e.tx.Signatures)], c.Owner) {
		return ErrNotSigner
	}
	return nil
}

// memos are the transaction's own. A memo in an inner call is some program's.
func (e *evidence) memos() (ms []call) {
	for _, c := range e.calls {
		if !c.inner && c.program == settle.Key(sdk.MemoProgramID) {
			ms = append(ms, c)
		}
	}
	return ms
}

func memoIsOne(_ *Client, e *evidence, _ Claim) error {
	switch len(e.memos()) {
	case 0:
		return ErrNoMemo
	case 1:
		return nil
	}
	return ErrMemos
}

func memoIsTheQuotes(_ *Client, e *evidence, c Claim) error {
	for _, m := range e.memos() {
		if string(m.data) == c.Memo {
			return nil
		}
	}
	return ErrMemo
}

// ownerSignedMemo needs no look at who is a signer: the memo program fails unless all
// of its accounts are.
func ownerSignedMemo(_ *Client, e *evidence, c Claim) error {
	signers := e.keys[:len(e.tx.Signatures)]
	sponsored := len(signers) == 2 && signers[0] == c.Sponsor && signers[1] == c.Owner
	for _, m := range e.memos() {
		if slices.Contains(m.accounts, c.Owner) || sponsored && len(m.accounts) == 0 {
			return nil
		}
	}
	return ErrMemoSigner
}

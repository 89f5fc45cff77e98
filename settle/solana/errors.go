package solana

import "errors"

// The classes of refusals.
var (
	ErrInvalid = errors.New("the payment is not valid")
	ErrNotYet  = errors.New("the payment is not final yet: ask again in some seconds")
	ErrUnknown = errors.New("it cannot be told now whether the payment is valid: ask again")
)

// reason is why a payment is refused, of one class.
type reason struct {
	class error
	text  string
}

func (r *reason) Error() string { return r.text }
func (r *reason) Unwrap() error { return r.class }

func invalid(text string) error { return &reason{ErrInvalid, text} }
func unknown(text string) error { return &reason{ErrUnknown, text} }

// Why a payment is not valid.
var (
	ErrClaim        = invalid("the claim cannot be checked")
	ErrSmallOrder   = invalid("the owner's key is of small order: anybody can sign for it, so name another wallet")
	ErrOperator     = invalid("the owner is an account of the network itself: pay from a wallet of your own")
	ErrFailed       = invalid("the transaction failed on the chain: nothing was paid, send another one")
	ErrEarly        = invalid("the transaction is older than the quote: pay after asking for the quote")
	ErrLate         = invalid("the transaction came after the quote's end: ask for another quote")
	ErrNoVault      = invalid("the transaction does not touch the vault: pay to the account that the quote names")
	ErrVaultAccount = invalid("the account that was paid is not the vault as it is pinned: another mint, owner or token program")
	ErrShort        = invalid("the vault received less than the amount: pay it in full, in one transaction")
	ErrDebit        = invalid("the owner's own token accounts paid less than the amount: pay from accounts of the owner alone")
	ErrVaultTouched = invalid("the transaction does more to the vault than transfer to it: send a transfer alone")
	ErrAuthority    = invalid("somebody else than the owner authorised a transfer to the vault: the owner has to sign for all of it")
	ErrSource       = invalid("a transfer to the vault came from an account that was not the owner's before: pay from an account of the owner")
	ErrTraced       = invalid("the transfers to the vault add up to less than the amount")
	ErrNotSigner    = invalid("the owner did not sign the transaction")
	ErrNoMemo       = invalid("the transaction has no memo of its own: write the quote's memo into it")
	ErrMemos        = invalid("the transaction has several memos: write the quote's alone")
	ErrMemo         = invalid("the memo is not the quote's, byte for byte")
	ErrMemoSigner   = invalid("the owner did not sign the memo")
)

// Why it cannot be told.
var (
	ErrProvider     = unknown("a provider gave no answer")
	ErrDisagree     = unknown("the providers say different things of one transaction")
	ErrVersion      = unknown("the transaction has a version that this release cannot read: the operator has to update")
	ErrSwapped      = unknown("a provider answered with another transaction")
	ErrForged       = unknown("a provider answered with a transaction whose signatures do not fit")
	ErrMalformed    = unknown("a provider's answer is malformed")
	ErrUnverifiable = unknown("a provider's answer lacks what a proof needs: whether it succeeded, balances with owners, inner calls, the block's time")
)

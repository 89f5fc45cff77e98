package settle

import (
	"errors"
	"fmt"
)

// State is where a quote is on its way.
type State uint8

// The states. A quote that expires unpaid stays Open, and nothing can be done with it.
//
//	Open → Reserved → Paid → Running → Done
//	  ↑________|  |      |_______|→ Failed → Credit
//	  (refused)   |→ Credit (paid too late)
const (
	Open     State = iota + 1
	Reserved       // a signature is recorded, the chain has not answered
	Paid           // finalized, or debited from a balance
	Running
	Done
	Failed // something may have been delivered; the rest is to be credited
	Credit // what was not delivered is in the payer's balance
)

var stateNames = [...]string{Open: "OPEN", Reserved: "RESERVED", Paid: "PAID", Running: "RUNNING", Done: "DONE", Failed: "FAILED", Credit: "CREDIT"}

func (s State) String() string {
	if s == 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("state %d", uint8(s))
	}
	return stateNames[s]
}

// Request is a quote and what became of it. Its methods return the next record and
// change nothing; each succeeds once, and repeats of the same step give the same record.
type Request struct {
	Quote     Quote
	State     State
	Signature Signature // reserved; zero when paid from a balance
	Message   Hash      // of the payment's signed message, which other signatures share
	Payer     Wallet
	Paid      Amount // by the chain, or Quote.Amount from a balance
	Lease     uint64 // until when one worker settles or runs it, Unix seconds
	Started   uint64 // epoch in which it began to run: receipts are timed from here
	Tokens    uint64 // delivered, prompt included
	Reason    string // why the last payment was refused, or why it failed
}

// Payment is what the chain proves about a signature, finalized.
type Payment struct {
	Signature Signature
	Message   Hash
	Memo      string
	Payer     Wallet
	Amount    Amount // that reached the vault
	Slot      uint64
	Time      uint64 // of its block, Unix seconds
}

// Refusals of a step.
var (
	ErrState        = errors.New("the quote is not in a state for that")
	ErrExpired      = errors.New("the quote has expired: ask for a new one")
	ErrOtherPayment = errors.New("the quote is reserved by another signature")
	ErrOtherRequest = errors.New("the quote is for another request body")
	ErrNotClaimed   = errors.New("neither the claim secret nor the payer's signature opens the quote")
	ErrRunning      = errors.New("the request is running: ask again later")
	ErrLease        = errors.New("the request is leased to somebody else")
	ErrWrongMemo    = errors.New("the payment's memo is of another quote")
	ErrWrongPayer   = errors.New("the payment is of another wallet than the quote's owner")
	ErrTooLittle    = errors.New("the payment is below the quoted amount")
	ErrTooEarly     = errors.New("the payment is older than the quote")
	ErrNotLate      = errors.New("the payment was in time: it pays the request")
	ErrTooMany      = errors.New("more tokens than were quoted")
)

// NewRequest opens a quote. Error: ErrQuote.
func NewRequest(q Quote) (Request, error) { return Request{Quote: q, State: Open}, q.check() }

func (r Request) must(what string, states ...State) error {
	for _, s := range states {
		if r.State == s {
			return nil
		}
	}
	return fmt.Errorf("%w: %s a quote that is %s", ErrState, what, r.State)
}

// Reserve records a signature, before the chain is asked. That no other quote has it is
// the ledger's part. It may be up to LateSeconds after the quote's end: whether the payment
// was in time, its block says. Errors: ErrState, ErrExpired, ErrOtherPayment, ErrLease.
func (r Request) Reserve(sig Signature, now, lease uint64) (Request, error) {
	if r.State == Reserved {
		if sig != r.Signature {
			return r, ErrOtherPayment
		}
		if now < r.Lease {
			return r, fmt.Errorf("%w for %d s", ErrLease, r.Lease-now)
		}
		r.Lease = lease
		return r, nil
	}
	if err := r.must("reserve", Open); err != nil {
		return r, err
	}
	if sig == (Signature{}) {
		return r, fmt.Errorf("%w: it is all zero", ErrOtherPayment)
	}
	if now > r.Quote.Expires+LateSeconds {
		return r, ErrExpired
	}
	r.State, r.Signature, r.Lease, r.Reason = Reserved, sig, lease, ""
	return r, nil
}

// Refuse opens the quote again after the chain's definite no, and keeps the reason. A
// chain that does not answer is no reason: the quote stays reserved.
func (r Request) Refuse(reason string) (Request, error) {
	if err := r.must("refuse the payment of", Reserved); err != nil {
		return r, err
	}
	r.State, r.Signature, r.Lease, r.Reason = Open, Signature{}, 0, reason
	return r, nil
}

// checkPayment refuses a payment that is not this quote's at all.
func (r Request) checkPayment(p Payment) error {
	q := r.Quote
	switch {
	case p.Signature != r.Signature:
		return ErrOtherPayment
	case p.Memo != q.ID.Memo():
		return fmt.Errorf("%w: %.60q instead of %q", ErrWrongMemo, p.Memo, q.ID.Memo())
	case p.Payer == Wallet{} || q.Owner != Wallet{} && p.Payer != q.Owner:
		return fmt.Errorf("%w: %s instead of %s", ErrWrongPayer, p.Payer, q.Owner)
	case p.Slot < q.CreatedSlot:
		return fmt.Errorf("%w: slot %d, the quote is of %d", ErrTooEarly, p.Slot, q.CreatedSlot)
	}
	return nil
}

// Pay takes the proven payment of a reserved quote. More than the amount is fine: the
// rest is credited with the refund. A late or a short payment is Late's. Errors:
// ErrState, ErrOtherPayment, ErrWrongMemo, ErrWrongPayer, ErrTooEarly, ErrExpired,
// ErrTooLittle.
func (r Request) Pay(p Payment) (Request, error) {
	if r.repeats(p) && r.State != Credit {
		return r, nil
	}
	if err := r.must("pay", Reserved); err != nil {
		return r, err
	}
	if err := r.checkPayment(p); err != nil {
		return r, err
	}
	if p.Time > r.Quote.Expires {
		return r, fmt.Errorf("%w: paid %d s after it", ErrExpired, p.Time-r.Quote.Expires)
	}
	if p.Amount < r.Quote.Amount {
		return r, fmt.Errorf("%w: %d of %d", ErrTooLittle, p.Amount, r.Quote.Amount)
	}
	r.State, r.Payer, r.Paid, r.Message, r.Lease = Paid, p.Payer, p.Amount, p.Message, 0
	return r, nil
}

func (r Request) repeats(p Payment) bool {
	return r.State >= Paid && r.Signature == p.Signature && r.Message == p.Message && r.Signature != (Signature{})
}

// Late turns a payment that came too late or is too small into a credit of all of it:
// money that reached the vault never vanishes. Errors: those of Pay, ErrNotLate.
func (r Request) Late(p Payment) (Request, error) {
	if r.repeats(p) && r.State == Credit {
		return r, nil
	}
	if err := r.must("credit a late payment of", Reserved); err != nil {
		return r, err
	}
	if err := r.checkPayment(p); err != nil {
		return r, err
	}
	if p.Time <= r.Quote.Expires && p.Amount >= r.Quote.Amount {
		return r, ErrNotLate
	}
	r.State, r.Payer, r.Paid, r.Message, r.Lease, r.Reason = Credit, p.Payer, p.Amount, p.Message, 0, "late or short payment"
	return r, nil
}

// Debit pays a quote from the prepaid balance of a wallet. Errors: ErrState, ErrExpired,
// ErrWrongPayer.
func (r Request) Debit(owner Wallet, now uint64) (Request, error) {
	if r.State == Paid && r.Payer == owner && r.Signature == (Signature{}) {
		return r, nil
	}
	if err := r.must("debit", Open); err != nil {
		return r, err
	}
	if now > r.Quote.Expires {
		return r, ErrExpired
	}
	if owner == (Wallet{}) || r.Quote.Owner != (Wallet{}) && owner != r.Quote.Owner {
		return r, fmt.Errorf("%w: %s instead of %s", ErrWrongPayer, owner, r.Quote.Owner)
	}
	r.State, r.Payer, r.Paid = Paid, owner, r.Quote.Amount
	return r, nil
}

// Run starts the request in an epoch, or again after its lease ran out. Errors: ErrState,
// ErrRunning.
func (r Request) Run(now, lease, epoch uint64) (Request, error) {
	if r.State == Running {
		if now < r.Lease {
			return r, fmt.Errorf("%w, in %d s", ErrRunning, r.Lease-now)
		}
		r.Lease = lease
		return r, nil
	}
	if err := r.must("run", Paid); err != nil {
		return r, err
	}
	r.State, r.Lease, r.Started = Running, lease, epoch
	return r, nil
}

// Finish ends a request that delivered so many tokens, prompt included. Errors: ErrState,
// ErrTooMany.
func (r Request) Finish(tokens uint64) (Request, error) {
	if r.State == Done && tokens == r.Tokens {
		return r, nil
	}
	return r.end(Done, tokens, "")
}

// Fail ends a request that did not start or stopped: what was delivered until then is
// used, the rest goes back. Errors: ErrState, ErrTooMany.
func (r Request) Fail(tokens uint64, reason string) (Request, error) {
	if r.State == Failed && tokens == r.Tokens {
		return r, nil
	}
	if r.State == Paid && tokens == 0 {
		r.State, r.Reason = Failed, reason
		return r, nil
	}
	return r.end(Failed, tokens, reason)
}

func (r Request) end(to State, tokens uint64, reason string) (Request, error) {
	if err := r.must("end", Running); err != nil {
		return r, err
	}
	if most := r.Quote.PromptTokens + r.Quote.AnswerTokens; tokens > most {
		return r, fmt.Errorf("%w: %d, at most %d", ErrTooMany, tokens, most)
	}
	r.State, r.Tokens, r.Lease, r.Reason = to, tokens, 0, reason
	return r, nil
}

// Credited marks that the ledger has what a failed request gives back. Error: ErrState.
func (r Request) Credited() (Request, error) {
	if r.State == Credit {
		return r, nil
	}
	if err := r.must("credit", Failed); err != nil {
		return r, err
	}
	r.State = Credit
	return r, nil
}

// Used is what of Paid was delivered, in base units.
func (r Request) Used() (Amount, error) {
	if r.State != Done && r.State != Failed && r.State != Credit {
		return 0, r.must("settle", Done, Failed)
	}
	used, err := r.Quote.Used(r.Tokens)
	return min(used, r.Paid), err
}

// Again says what the same call made again gets: nil means the stored result (Done,
// Failed, Credit) or that it goes on (Open, Reserved, Paid). opened is that the claim
// secret or the payer's signature was right. Errors: ErrNotClaimed, ErrOtherRequest,
// ErrOtherPayment, ErrRunning.
func (r Request) Again(sig Signature, request Hash, opened bool, now uint64) error {
	switch {
	case !opened:
		return ErrNotClaimed
	case request != r.Quote.RequestHash:
		return ErrOtherRequest
	case r.State != Open && sig != r.Signature:
		return ErrOtherPayment
	case r.State == Running && now < r.Lease:
		return fmt.Errorf("%w, in %d s", ErrRunning, r.Lease-now)
	}
	return nil
}

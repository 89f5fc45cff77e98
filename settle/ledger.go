package settle

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Kind is what an account is for. Kinds are only ever added.
type Kind uint8

// The kinds. Inflow is the one source: its balance is what the chain proved came in.
// Always the sum of all the others = Inflow, and PaidOut never falls.
const (
	Inflow    Kind = iota + 1
	Balance        // of an owner: a wallet, or a node until it links one
	Escrow         // of a request
	Held           // of a node: pay whose audits are open
	Bonded         // of a node
	Unbonding      // of a node: leaving, can still be taken
	Leaving        // of an owner: a payout that is under way
	Pool
	Treasury
	Burnt // to be burnt on the chain by a payout
	Emission
	PaidOut
)

var kindNames = [...]string{Inflow: "inflow", Balance: "balance", Escrow: "escrow", Held: "held", Bonded: "bonded", Unbonding: "unbonding",
	Leaving: "leaving", Pool: "pool", Treasury: "treasury", Burnt: "burnt", Emission: "emission", PaidOut: "paid out"}

func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return kindNames[k]
}

// single says whether a network has one account of that kind, whose ID is zero.
func (k Kind) single() bool { return k == Inflow || k >= Pool }

// Account is one account. ID is its owner, node, or request (EscrowOf).
type Account struct {
	Kind Kind
	ID   Key
}

// EscrowOf is the account of a request.
func EscrowOf(id QuoteID) Account {
	a := Account{Kind: Escrow}
	copy(a.ID[:], id[:])
	return a
}

func (a Account) String() string {
	switch {
	case a.Kind.single():
		return a.Kind.String()
	case a.Kind == Escrow:
		return "escrow " + QuoteID(a.ID[:16]).String()
	}
	return a.Kind.String() + " " + a.ID.String()
}

func (a Account) compare(b Account) int {
	if a.Kind != b.Kind {
		return int(a.Kind) - int(b.Kind)
	}
	return bytes.Compare(a.ID[:], b.ID[:])
}

// Action is why money moves. Actions are only ever added.
type Action uint8

// The actions. The ID of an entry makes each of them happen once: a message hash of the
// chain, a request, or the hash of what was decided.
const (
	ActDeposit      Action = iota + 1 // the chain: to a balance
	ActStake                          // the chain: to a bond
	ActFund                           // the chain: to the emission or the pool
	ActPayment                        // the chain: to an escrow, the surplus to a balance
	ActDebit                          // a balance: to an escrow
	ActSettle                         // an escrow: to all whom a request pays
	ActEmit                           // the emission: to workers
	ActVest                           // pay whose audits are over
	ActUnbond                         // begin to leave
	ActUnbondDone                     // has left
	ActSlash                          // to the payer, the reporter, the pool
	ActClaim                          // the pool: to a balance
	ActPayout                         // intent is recorded
	ActPayoutDone                     // the chain has it
	ActPayoutFailed                   // the chain will never have it
	ActWithdraw                       // treasury, or burnt, leaves by the chain
)

// flow is the kinds that an action takes from and gives to. Actions with the same once
// share their IDs: a message of the chain comes in once, whatever for, and a payout
// ends once.
type flow struct {
	name     string
	from, to []Kind
	once     Action
}

var flows = [...]flow{
	ActDeposit:      {"deposit", []Kind{Inflow}, []Kind{Balance}, ActDeposit},
	ActStake:        {"stake", []Kind{Inflow}, []Kind{Bonded}, ActDeposit},
	ActFund:         {"fund", []Kind{Inflow}, []Kind{Emission, Pool}, ActDeposit},
	ActPayment:      {"payment", []Kind{Inflow}, []Kind{Escrow, Balance}, ActDeposit},
	ActDebit:        {"debit", []Kind{Balance}, []Kind{Escrow}, ActDebit},
	ActSettle:       {"settle", []Kind{Escrow}, []Kind{Balance, Held, Bonded, Pool, Treasury, Burnt}, ActSettle},
	ActEmit:         {"emit", []Kind{Emission}, []Kind{Held, Bonded}, ActEmit},
	ActVest:         {"vest", []Kind{Held}, []Kind{Balance}, ActVest},
	ActUnbond:       {"unbond", []Kind{Bonded}, []Kind{Unbonding}, ActUnbond},
	ActUnbondDone:   {"unbond done", []Kind{Unbonding}, []Kind{Balance}, ActUnbondDone},
	ActSlash:        {"slash", []Kind{Held, Bonded, Unbonding}, []Kind{Balance, Pool}, ActSlash},
	ActClaim:        {"claim", []Kind{Pool}, []Kind{Balance}, ActClaim},
	ActPayout:       {"payout", []Kind{Balance}, []Kind{Leaving}, ActPayout},
	ActPayoutDone:   {"payout done", []Kind{Leaving}, []Kind{PaidOut}, ActPayoutDone},
	ActPayoutFailed: {"payout failed", []Kind{Leaving}, []Kind{Balance}, ActPayoutDone},
	ActWithdraw:     {"withdraw", []Kind{Treasury, Burnt}, []Kind{PaidOut}, ActWithdraw},
}

func (a Action) String() string {
	if a == 0 || int(a) >= len(flows) {
		return fmt.Sprintf("action %d", uint8(a))
	}
	return flows[a].name
}

// EntryKey is what one entry happens for: there is never a second under it.
type EntryKey struct {
	Once Action
	ID   Hash
}

// Refusals of an entry.
var (
	ErrEntry     = errors.New("the entry is not well formed")
	ErrFlow      = errors.New("the action does not move money so")
	ErrUnbalance = errors.New("the postings do not sum to zero")
	ErrFunds     = errors.New("the balance does not reach")
	ErrKeyReused = errors.New("the key has another entry: nothing was posted")
	ErrTotal     = errors.New("more came in than a ledger holds")
)

// Book is the state that Post reads. A balance that was never posted to is 0. Reads of
// one Post are of one state: who keeps it holds its lock or its transaction.
type Book interface {
	Balance(Account) (Amount, error)
	// Entry returns the hash of the entry under a key, and whether there is one.
	Entry(EntryKey) (Hash, bool, error)
}

// Change is an account's new balance.
type Change struct {
	Account Account
	Amount  Amount
}

// Post says what an entry makes of a book: the changes to store, with the entry and its
// hash, in one step. posted is false for an entry that the book has: nothing is to be
// stored. Errors: ErrEntry, ErrFlow, ErrUnbalance, ErrFunds, ErrKeyReused, ErrTotal, and
// the book's.
func Post(b Book, e Entry) (changes []Change, posted bool, err error) {
	if err := e.check(); err != nil {
		return nil, false, err
	}
	old, has, err := b.Entry(e.Key())
	if err != nil {
		return nil, false, err
	}
	if has && old != e.Hash() {
		return nil, false, fmt.Errorf("%w: %s %x", ErrKeyReused, e.Action, e.ID)
	}
	if has {
		return nil, false, nil
	}
	for _, p := range e.Postings {
		balance, err := b.Balance(p.Account)
		if err != nil {
			return nil, false, err
		}
		next, err := p.apply(balance)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", e.Action, err)
		}
		changes = append(changes, Change{p.Account, next})
	}
	return changes, true, nil
}

func (p Posting) apply(balance Amount) (Amount, error) {
	size := p.size()
	if p.Account.Kind == Inflow { // its balance is what came in: it grows as it gives
		sum, err := balance.Add(size)
		if err != nil || sum > noMax {
			return 0, fmt.Errorf("%w: %d after %d", ErrTotal, size, balance)
		}
		return sum, nil
	}
	if p.Delta > 0 {
		return balance.Add(size)
	}
	if size > balance {
		return 0, fmt.Errorf("%w: %s has %d, %d is taken", ErrFunds, p.Account, balance, size)
	}
	return balance - size, nil
}

// Ledger is a Book in memory. It is not safe for concurrent use.
type Ledger struct {
	balances map[Account]Amount
	entries  map[EntryKey]Hash
}

// NewLedger is an empty one.
func NewLedger() *Ledger { return &Ledger{map[Account]Amount{}, map[EntryKey]Hash{}} }

// Balance is part of Book; the error is nil.
func (l *Ledger) Balance(a Account) (Amount, error) { return l.balances[a], nil }

// Entry is part of Book; the error is nil.
func (l *Ledger) Entry(k EntryKey) (Hash, bool, error) {
	h, ok := l.entries[k]
	return h, ok, nil
}

// Apply posts an entry; posted is false when the ledger had it. An error changes nothing.
func (l *Ledger) Apply(e Entry) (posted bool, err error) {
	changes, posted, err := Post(l, e)
	if err != nil || !posted {
		return false, err
	}
	for _, c := range changes {
		if c.Amount == 0 {
			delete(l.balances, c.Account)
		} else {
			l.balances[c.Account] = c.Amount
		}
	}
	l.entries[e.Key()] = e.Hash()
	return true, nil
}

// Accounts lists every account that is not empty, in order.
func (l *Ledger) Accounts() []Change {
	list := make([]Change, 0, len(l.balances))
	for _, a := range slices.SortedFunc(maps.Keys(l.balances), Account.compare) {
		list = append(list, Change{a, l.balances[a]})
	}
	return list
}

// Hash names the balances: two ledgers with the same ones have the same hash.
func (l *Ledger) Hash() Hash {
	h := sha256.New()
	for _, c := range l.Accounts() {
		fmt.Fprintf(h, "%d %x %d\n", c.Account.Kind, c.Account.ID, c.Amount)
	}
	return Hash(h.Sum(nil))
}

// Verify checks that all accounts sum to what came in. Error: ErrUnbalance.
func (l *Ledger) Verify() error {
	var sum Amount
	for a, amount := range l.balances {
		if a.Kind == Inflow {
			continue
		}
		var err error
		if sum, err = sum.Add(amount); err != nil {
			return err
		}
	}
	if in := l.balances[Account{Kind: Inflow}]; sum != in {
		return fmt.Errorf("%w: %d came in, the accounts have %d", ErrUnbalance, in, sum)
	}
	return nil
}

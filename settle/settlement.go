package settle

import (
	"bytes"
	"fmt"
)

// Outcome is what settling a request gives.
type Outcome struct {
	Split   Split
	Workers []WorkPay // by worker, ascending
	Emitted Amount
	Reserve Reserve // after it
	Entries []Entry // the settlement, then the emission when there is one
}

// WorkPay is what one worker has of a request: Pay and Emission together are Bonded and
// Vesting, and Bond is its state after.
type WorkPay struct {
	Worker                         Node
	Pay, Emission, Bonded, Vesting Amount
	Bond                           Bond
}

// Settling is what a settlement starts from.
type Settling struct {
	Job     Job
	Work    []Work // by Job.Credit
	Timing  Timing
	Counted bool // replicas were drawn by hash among independent ones: it may emit
	// Drawn are the workers that were, and alone have of the emission. Nil: all of them.
	Drawn   map[Node]bool
	Reserve Reserve
	Bonds   map[Node]Bond
	Now     uint64 // Unix seconds
	Epoch   uint64
}

// RequestKey is the ID of the entries of a request.
func RequestKey(id QuoteID) (h Hash) {
	copy(h[:], id[:])
	return h
}

// SettleRequest divides the escrow of a request that ended over who is paid, and adds
// the emission. A receipt that is too late gives all back to the payer. Errors:
// ErrState, and those of Shares and Split.
func (p Params) SettleRequest(s Settling) (o Outcome, err error) {
	r := s.Job.Request
	if r.State != Done && r.State != Failed {
		return Outcome{}, r.must("settle", Done, Failed)
	}
	used, work := Amount(0), s.Work
	if s.Timing == TooLate {
		work = nil
	} else if used, err = r.Used(); err != nil {
		return Outcome{}, err
	}
	by, rest, err := Shares(s.Job.Parts, r.Tokens, work)
	if err != nil {
		return Outcome{}, err
	}
	shares := []Share{}
	for i, w := range by {
		if i > 0 && by[i-1].Worker == w.Worker {
			return Outcome{}, fmt.Errorf("%w: worker %s twice", ErrLines, w.Worker)
		}
		shares = append(shares, w.Share)
	}
	if o.Split, err = p.Split(r.escrow(), used, shares); err != nil {
		return Outcome{}, err
	}
	o.Reserve = s.Reserve
	bonus := make([]Amount, len(by))
	if s.Counted && s.Timing == OnTime && rest < Whole {
		drawn := append([]Share{}, shares...)
		for i, w := range by {
			if s.Drawn != nil && !s.Drawn[w.Worker] {
				drawn[i] = 0
			}
		}
		if bonus, err = o.emit(p, drawn); err != nil {
			return Outcome{}, err
		}
	}
	for i, w := range by {
		wp := WorkPay{Worker: w.Worker, Pay: o.Split.Pay[i], Emission: bonus[i]}
		wp.Bond, wp.Bonded, wp.Vesting, err = p.Earn(s.Bonds[w.Worker], wp.Pay+wp.Emission, s.Now, s.Epoch)
		if err != nil {
			return Outcome{}, err
		}
		o.Workers = append(o.Workers, wp)
	}
	return o, o.post(r, s.Now)
}

// escrow is what the ledger holds for the request: a surplus went to the balance.
func (r Request) escrow() Amount { return min(r.Paid, r.Quote.Amount) }

func (o *Outcome) emit(p Params, shares []Share) ([]Amount, error) {
	e, err := p.Emission(o.Reserve, o.Split.Fee)
	if err != nil {
		return nil, err
	}
	bonus, rest, err := Divide(e, shares)
	if err != nil {
		return nil, err
	}
	o.Emitted = e - rest
	o.Reserve, err = o.Reserve.Pay(o.Emitted)
	return bonus, err
}

// post writes the entries: the pay first, out of which the bond is filled.
func (o *Outcome) post(r Request, now uint64) error {
	from, emission := EscrowOf(r.Quote.ID), Account{Kind: Emission}
	pay := []Transfer{
		{from, Account{Balance, r.Payer}, o.Split.Refund},
		{from, Account{Kind: Pool}, o.Split.Insurance + o.Split.Dust},
		{from, Account{Kind: Burnt}, o.Split.Burn},
		{from, Account{Kind: Treasury}, o.Split.Treasury},
	}
	var bonus []Transfer
	for _, w := range o.Workers {
		bonded := min(w.Bonded, w.Pay)
		pay = append(pay, Transfer{from, Account{Bonded, w.Worker}, bonded}, Transfer{from, Account{Held, w.Worker}, w.Pay - bonded})
		bonus = append(bonus, Transfer{emission, Account{Bonded, w.Worker}, w.Bonded - bonded},
			Transfer{emission, Account{Held, w.Worker}, w.Emission - (w.Bonded - bonded)})
	}
	e, err := NewEntry(ActSettle, RequestKey(r.Quote.ID), now, pay...)
	if err != nil {
		return err
	}
	o.Entries = []Entry{e}
	if o.Emitted > 0 {
		if e, err = NewEntry(ActEmit, RequestKey(r.Quote.ID), now, bonus...); err != nil {
			return err
		}
		o.Entries = append(o.Entries, e)
	}
	return nil
}

// PaymentEntry books the proven payment of a request: the quoted amount to its escrow,
// more than that to the payer's balance. A late one is all balance. r is as Pay or Late left
// it.
func PaymentEntry(r Request, now uint64) (Entry, error) {
	escrow := r.escrow()
	if r.State == Credit {
		escrow = 0
	}
	in := Account{Kind: Inflow}
	return NewEntry(ActPayment, r.Message, now,
		Transfer{in, EscrowOf(r.Quote.ID), escrow}, Transfer{in, Account{Balance, r.Payer}, r.Paid - escrow})
}

// DepositEntry books a proven payment that pays no request: all of it is the payer's
// balance. A message that paid a request is refused there by its key.
func DepositEntry(p Payment, now uint64) (Entry, error) {
	return NewEntry(ActDeposit, p.Message, now, Transfer{Account{Kind: Inflow}, Account{Balance, p.Payer}, p.Amount})
}

// DebitEntry books a request that a prepaid balance pays.
func DebitEntry(r Request, now uint64) (Entry, error) {
	return NewEntry(ActDebit, RequestKey(r.Quote.ID), now, Transfer{Account{Balance, r.Payer}, EscrowOf(r.Quote.ID), r.Paid})
}

// SlashEntry books what was taken from a node for a request, by SplitSlash. A reporter
// without a wallet leaves its part to the pool.
func SlashEntry(id QuoteID, node Node, s Slash, price Amount, payer, reporter Wallet, now uint64) (Entry, error) {
	toPayer, toReporter, toPool := SplitSlash(s.Total(), price)
	if reporter == (Wallet{}) {
		toReporter, toPool = 0, toPool+toReporter
	}
	give := []Transfer{{To: Account{Balance, payer}, Amount: toPayer}, {To: Account{Balance, reporter}, Amount: toReporter}, {To: Account{Kind: Pool}, Amount: toPool}}
	var moves []Transfer
	for _, from := range []struct {
		kind   Kind
		amount Amount
	}{{Held, s.FromVesting}, {Bonded, s.FromBonded}, {Unbonding, s.FromUnbonding}} {
		for i := range give {
			a := min(from.amount, give[i].Amount)
			from.amount -= a
			give[i].Amount -= a
			moves = append(moves, Transfer{Account{from.kind, node}, give[i].To, a})
		}
	}
	h := signedHash("kvasir slash 1\n", bytes.Join([][]byte{id[:], node[:]}, nil))
	return NewEntry(ActSlash, h, now, moves...)
}

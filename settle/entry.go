package settle

import (
	"fmt"
	"slices"
)

// Limits of an entry: a request pays at most MaxWorkers in two accounts each.
const (
	MaxEntry    = 256 << 10 // bytes
	MaxPostings = 2*MaxWorkers + 8
)

// Entry is one movement of money, in a journal for ever.
//
// Its encoding is core deterministic CBOR, a map with integer keys: 1 action, 2 id of 32
// bytes, 3 time, 4 array of postings, each an array of kind, id of 32 bytes, delta.
// Postings ascend by kind and id. Nothing follows.
type Entry struct {
	Action   Action
	ID       Hash
	Time     uint64 // Unix seconds
	Postings []Posting
}

// Posting adds Delta to an account, or takes it. What Inflow gives is taken.
type Posting struct {
	Account Account
	Delta   int64
}

type entryWire struct {
	Action   Action        `cbor:"1,keyasint"`
	ID       Hash          `cbor:"2,keyasint"`
	Time     uint64        `cbor:"3,keyasint"`
	Postings []postingWire `cbor:"4,keyasint"`
}

type postingWire struct {
	_     struct{} `cbor:",toarray"`
	Kind  Kind
	ID    Key
	Delta int64
}

// size is |Delta|.
func (p Posting) size() Amount {
	if p.Delta < 0 {
		return Amount(-p.Delta)
	}
	return Amount(p.Delta)
}

// Transfer is an amount from one account to another.
type Transfer struct {
	From, To Account
	Amount   Amount
}

// NewEntry makes an entry of transfers: those of nothing are left out, those of one
// account are summed, so that it balances. Errors: ErrEntry, ErrFlow.
func NewEntry(action Action, id Hash, time uint64, transfers ...Transfer) (Entry, error) {
	sums := map[Account]int64{}
	for _, t := range transfers {
		if t.Amount > noMax || sums[t.To] > noMax-int64(t.Amount) || sums[t.From] < int64(t.Amount)-noMax {
			return Entry{}, fmt.Errorf("%w: %d from %s to %s: %w", ErrEntry, t.Amount, t.From, t.To, errOverflow)
		}
		sums[t.From] -= int64(t.Amount)
		sums[t.To] += int64(t.Amount)
	}
	e := Entry{Action: action, ID: id, Time: time}
	for a, delta := range sums {
		if delta != 0 {
			e.Postings = append(e.Postings, Posting{a, delta})
		}
	}
	slices.SortFunc(e.Postings, func(a, b Posting) int { return a.Account.compare(b.Account) })
	return e, e.check()
}

func (e Entry) check() error {
	if e.Action == 0 || int(e.Action) >= len(flows) || e.ID == (Hash{}) {
		return fmt.Errorf("%w: %s %x", ErrEntry, e.Action, e.ID)
	}
	if len(e.Postings) < 2 || len(e.Postings) > MaxPostings {
		return fmt.Errorf("%w: %d postings, 2 to %d", ErrEntry, len(e.Postings), MaxPostings)
	}
	f := flows[e.Action]
	var in, out Amount
	for i, p := range e.Postings {
		if err := p.check(); err != nil {
			return err
		}
		if i > 0 && e.Postings[i-1].Account.compare(p.Account) >= 0 {
			return fmt.Errorf("%w: %s is not in order", ErrEntry, p.Account)
		}
		kinds, sum, verb := f.to, &in, "gives to"
		if p.Delta < 0 {
			kinds, sum, verb = f.from, &out, "takes from"
		}
		if !slices.Contains(kinds, p.Account.Kind) {
			return fmt.Errorf("%w: %s %s %s", ErrFlow, e.Action, verb, p.Account.Kind)
		}
		var err error
		if *sum, err = sum.Add(p.size()); err != nil {
			return fmt.Errorf("%w: %w", ErrEntry, err)
		}
	}
	if in != out {
		return fmt.Errorf("%w: %d taken, %d given", ErrUnbalance, out, in)
	}
	return nil
}

func (p Posting) check() error {
	a := p.Account
	switch {
	case a.Kind == 0 || int(a.Kind) >= len(kindNames):
		return fmt.Errorf("%w: %s", ErrEntry, a.Kind)
	case a.Kind.single() != (a.ID == Key{}):
		return fmt.Errorf("%w: account %s with id %s", ErrEntry, a.Kind, a.ID)
	case a.Kind == Escrow && [16]byte(a.ID[16:]) != [16]byte{}:
		return fmt.Errorf("%w: escrow of %x, which is no request", ErrEntry, a.ID)
	case p.Delta == 0 || p.Delta > noMax || p.Delta < -noMax:
		return fmt.Errorf("%w: %s by %d", ErrEntry, a, p.Delta)
	}
	return nil
}

// Encode gives the entry's one encoding. Errors: those of a malformed entry.
func (e Entry) Encode() ([]byte, error) {
	if err := e.check(); err != nil {
		return nil, err
	}
	b, err := e.marshal()
	if err == nil && len(b) > MaxEntry {
		err = fmt.Errorf("%w: %d bytes, at most %d", ErrEntry, len(b), MaxEntry)
	}
	return b, err
}

func (e Entry) marshal() ([]byte, error) {
	w := entryWire{Action: e.Action, ID: e.ID, Time: e.Time}
	for _, p := range e.Postings {
		w.Postings = append(w.Postings, postingWire{Kind: p.Account.Kind, ID: p.Account.ID, Delta: p.Delta})
	}
	return encMode.Marshal(w)
}

// DecodeEntry reads an entry. Errors: ErrRecord, ErrEntry, ErrFlow, ErrUnbalance.
func DecodeEntry(b []byte) (Entry, error) {
	var w entryWire
	if err := decode(b, MaxEntry, &w); err != nil {
		return Entry{}, err
	}
	e := Entry{Action: w.Action, ID: w.ID, Time: w.Time}
	for _, p := range w.Postings {
		e.Postings = append(e.Postings, Posting{Account{p.Kind, p.ID}, p.Delta})
	}
	return e, e.check()
}

const entryDomain = "kvasir ledger entry 1\n"

// Key is what the entry happens once for. Its action is a known one.
func (e Entry) Key() EntryKey { return EntryKey{flows[e.Action].once, e.ID} }

// Hash names what an entry moves: not when, so that a retry is the same entry.
func (e Entry) Hash() Hash {
	e.Time = 0
	return signedHash(entryDomain, must(e.marshal())) // integers and bytes: it cannot fail
}

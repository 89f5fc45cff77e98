// Package cashier keeps the money of a network with a token, on the disk of the machine
// that settles: the journal and the balances of package settle, the requests on their
// way from quote to credit, and the payouts on theirs to the chain.
//
// Every method that changes something is one update of a kv.Store: it is on the disk when
// it returns, whole or not at all, and it sees all earlier ones. So each of them may be
// called twice, after a crash too: the second call changes nothing.
//
// A signature is reserved before the chain is asked about it, and belongs to one request
// then; what came in is booked under the hash of its message, for ever. A payout is
// written down with its signed transaction before that is sent.
//
// Keys in the store, numbers big-endian:
//
//	a kind account       a balance
//	b node               settle.Bond
//	c signature          Credit: of a transfer that paid no request
//	e action id          hash of the entry
//	g number             record of governance, from 0 on
//	i wallet             settle.Premiums
//	j number             entry, from 1 on
//	l node               Linked
//	n                    number of the last entry
//	p id                 Payout
//	o id                 nothing: that payout is open
//	r quote              settle.Request
//	s signature          quote that it was reserved for; zero: a Credit
//	m                    settle.Reserve
//	t node               totals
//	w seconds node       nothing: something of the node's bond is free then
//	y wallet             ids of its newest payouts
//	d seconds quote      the state in which something is due about the request then
//	x quote              intent: the payment of a quote that is reserved, or was booked
//	k quote              kept: reports of a request, and what came of it
//	S quote              shared: what of that was credited
//	v model epoch        signed market.PriceRecord
//	M model              its parts, once a request for it ran
//	T model              when it was last paid for
//	u model epoch quote  done: what was settled, for the price
//	h model node         shown: the rate of a node
//	f epoch              fees that were settled in it
//	z                    the first epoch whose fees the reserve has not taken
//	q quote              insured: a settled request, and its claim on the pool
//	P quote              workerPays: what its workers were paid
//	C seconds quote      amount of a claim that is due then
//	R                    round: the newest epoch in which claims were paid
//	V quote node         penalised: what came of a verdict
//
// A Books is safe for concurrent use.
package cashier

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/fxamacker/cbor/v2"

	"kvasird/node/kv"
	"kvasird/settle"
)

// Books is the ledger of a network.
type Books struct {
	store *kv.Store
	now   func() time.Time

	resolved atomic.Pointer[settle.Hash] // the payout that Resolve asked about last
}

// ErrBooks says that the books do not agree with themselves.
var ErrBooks = errors.New("the books are wrong: stop settling and look at the journal")

// Open opens the books in a folder, or begins them. now may be nil: the clock.
func Open(dir string, log *slog.Logger, now func() time.Time) (*Books, error) {
	if now == nil {
		now = time.Now
	}
	store, err := kv.OpenStore(dir, log)
	if err != nil {
		return nil, fmt.Errorf("the books: %w", err)
	}
	return &Books{store: store, now: now}, nil
}

// Close waits for what is being written.
func (b *Books) Close() error { return b.store.Close() }

func (b *Books) seconds() uint64 { return uint64(b.now().Unix()) }

// page is the settle.Book of one update.
type page struct{ *kv.Tx }

func balanceKey(a settle.Account) []byte { return append([]byte{'a', byte(a.Kind)}, a.ID[:]...) }

func entryKey(k settle.EntryKey) []byte { return append([]byte{'e', byte(k.Once)}, k.ID[:]...) }

func journalKey(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{'j'}, n) }

func number(v []byte) (uint64, error) {
	if len(v) != 8 {
		return 0, fmt.Errorf("%w: a number of %d bytes", ErrBooks, len(v))
	}
	return binary.BigEndian.Uint64(v), nil
}

// Balance is part of settle.Book.
func (p page) Balance(a settle.Account) (settle.Amount, error) {
	v, ok, err := p.Get(balanceKey(a))
	if err != nil || !ok {
		return 0, err
	}
	n, err := number(v)
	return settle.Amount(n), err
}

// Entry is part of settle.Book.
func (p page) Entry(k settle.EntryKey) (h settle.Hash, ok bool, err error) {
	v, ok, err := p.Get(entryKey(k))
	if err != nil || !ok {
		return settle.Hash{}, false, err
	}
	if copy(h[:], v) != len(h) || len(v) != len(h) {
		return h, false, fmt.Errorf("%w: a hash of %d bytes", ErrBooks, len(v))
	}
	return h, true, nil
}

// post books an entry, with its place in the journal, unless it is there.
func (p page) post(e settle.Entry) (posted bool, err error) {
	changes, posted, err := settle.Post(p, e)
	if err != nil || !posted {
		return false, err
	}
	raw, err := e.Encode()
	if err != nil {
		return false, err
	}
	last, err := p.last()
	if err != nil {
		return false, err
	}
	hash := e.Hash()
	errs := []error{p.Put(entryKey(e.Key()), hash[:]), p.Put(journalKey(last+1), raw), p.Put([]byte{'n'}, binary.BigEndian.AppendUint64(nil, last+1))}
	for _, c := range changes {
		errs = append(errs, p.Put(balanceKey(c.Account), binary.BigEndian.AppendUint64(nil, uint64(c.Amount))))
	}
	return true, errors.Join(errs...)
}

// last is the number of the last entry, or 0.
func (p page) last() (uint64, error) {
	v, ok, err := p.Get([]byte{'n'})
	if err != nil || !ok {
		return 0, err
	}
	return number(v)
}

// Post books an entry; posted is false when the books had it. Errors: those of
// settle.Post and of the store.
func (b *Books) Post(e settle.Entry) (posted bool, err error) {
	err = b.store.Update(func(tx *kv.Tx) (err error) {
		posted, err = page{tx}.post(e)
		return err
	})
	return posted && err == nil, err
}

// Balance is what an account has.
func (b *Books) Balance(a settle.Account) (amount settle.Amount, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		amount, err = page{tx}.Balance(a)
		return err
	})
	return amount, err
}

// Verify replays the whole journal and compares what it gives with every balance and
// every bond that is kept. It returns the replayed ledger. Error: ErrBooks, and those of the store.
func (b *Books) Verify() (*settle.Ledger, error) {
	l := settle.NewLedger()
	err := b.store.View(func(tx *kv.Tx) error {
		if err := replay(tx, l); err != nil {
			return err
		}
		kept := 0
		err := tx.Each([]byte{'a'}, func(k, v []byte) error {
			a := settle.Account{Kind: settle.Kind(k[1])}
			copy(a.ID[:], k[2:])
			n, err := number(v)
			if err != nil {
				return err
			}
			if want, _ := l.Balance(a); want != settle.Amount(n) {
				return fmt.Errorf("%w: %s has %d, its entries make %d", ErrBooks, a, n, want)
			}
			if n > 0 {
				kept++
			}
			return nil
		})
		if all := len(l.Accounts()); err == nil && kept != all {
			err = fmt.Errorf("%w: %d accounts are kept, the entries make %d", ErrBooks, kept, all)
		}
		if err != nil {
			return err
		}
		return verifyBonds(tx, l)
	})
	if err != nil {
		return nil, err
	}
	return l, l.Verify()
}

func replay(tx *kv.Tx, l *settle.Ledger) error {
	var next uint64
	return tx.Each([]byte{'j'}, func(k, v []byte) error {
		n, err := number(k[1:])
		if next++; err != nil || n != next {
			return fmt.Errorf("%w: entry %d is where %d should be", ErrBooks, n, next)
		}
		e, err := settle.DecodeEntry(v)
		if err != nil {
			return fmt.Errorf("%w: entry %d: %w", ErrBooks, n, err)
		}
		posted, err := l.Apply(e)
		if err == nil && !posted {
			err = errors.New("it is there twice")
		}
		if err != nil {
			err = fmt.Errorf("%w: entry %d, %s: %w", ErrBooks, n, e.Action, err)
		}
		return err
	})
}

// load reads a record. ok is false when there is none.
func (p page) load(key []byte, record any) (ok bool, err error) {
	v, ok, err := p.Get(key)
	if err != nil || !ok {
		return false, err
	}
	return true, decode(key, v, record)
}

func decode(key, v []byte, record any) error {
	if err := cbor.Unmarshal(v, record); err != nil {
		return fmt.Errorf("%w: record %x: %w", ErrBooks, key, err)
	}
	return nil
}

func (p page) save(key []byte, record any) error {
	v, err := cbor.Marshal(record)
	if err != nil {
		return err
	}
	return p.Put(key, v)
}

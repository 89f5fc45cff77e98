package cashier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"kvasird/node/kv"
	"kvasird/settle"
)

// matureAtOnce is how many nodes are looked after in one update: a bond has up to a
// thousand parts.
const matureAtOnce = 16

func wakeKey(at uint64, n settle.Node) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{'w'}, at), n[:]...)
}

func totalsKey(n settle.Node) []byte { return append([]byte{'t'}, n[:]...) }

func premiumsKey(w settle.Wallet) []byte { return append([]byte{'i'}, w[:]...) }

// totals is what a node was paid in all.
type totals struct {
	Earned   settle.Amount
	Requests uint64
}

func (p page) bond(n settle.Node) (b settle.Bond, err error) {
	_, err = p.load(bondKey(n), &b)
	return b, err
}

// saveBond keeps a node's bond, and when the next part of it is free.
func (p page) saveBond(n settle.Node, b settle.Bond) error {
	old, err := p.bond(n)
	if err != nil {
		return err
	}
	if was, is := nextFree(old), nextFree(b); was != is {
		if err := errors.Join(p.Delete(wakeKey(was, n)), p.wake(n, b)); err != nil {
			return err
		}
	}
	return p.save(bondKey(n), b)
}

func (p page) wake(n settle.Node, b settle.Bond) error {
	if at := nextFree(b); at > 0 {
		return p.Put(wakeKey(at, n), []byte{1})
	}
	return nil
}

// nextFree is when the first part of a bond is free, or 0.
func nextFree(b settle.Bond) (at uint64) {
	for _, list := range [][]settle.Pending{b.Vesting, b.Unbonding} {
		for _, p := range list {
			if at == 0 || p.Free < at {
				at = p.Free
			}
		}
	}
	return at
}

// once is an id for something that happens with the next entry.
func (p page) once(what string, n settle.Node) (settle.Hash, error) {
	last, err := p.last()
	return sha256.Sum256(fmt.Appendf(nil, "kvasir %s 1\n%x %d", what, n, last+1)), err
}

// mature gives a node's wallet what of its bond is free. Without a wallet it stays.
func (p page) mature(n settle.Node, now uint64) error {
	l, err := p.linked(n)
	if err != nil || l.Wallet == (settle.Wallet{}) {
		return err
	}
	b, err := p.bond(n)
	if err != nil {
		return err
	}
	b, vested := b.Vest(now)
	b, out := b.Unbonded(now)
	for _, m := range []struct {
		action settle.Action
		from   settle.Kind
		amount settle.Amount
	}{{settle.ActVest, settle.Held, vested}, {settle.ActUnbondDone, settle.Unbonding, out}} {
		if m.amount == 0 {
			continue
		}
		id, err := p.once(m.action.String(), n)
		if err != nil {
			return err
		}
		err = p.transfer(m.action, id, now, settle.Account{Kind: m.from, ID: n}, settle.Account{Kind: settle.Balance, ID: l.Wallet}, m.amount)
		if err != nil {
			return err
		}
	}
	return p.saveBond(n, b)
}

func (p page) transfer(a settle.Action, id settle.Hash, now uint64, from, to settle.Account, amount settle.Amount) error {
	e, err := settle.NewEntry(a, id, now, settle.Transfer{From: from, To: to, Amount: amount})
	if err == nil {
		_, err = p.post(e)
	}
	return err
}

var errEnough = errors.New("as many as one update takes")

// Mature gives the wallets of all nodes what of their bonds is free by now, and returns
// how many nodes that was asked of.
func (b *Books) Mature() (nodes int, err error) {
	for {
		var due [][]byte
		err := b.store.View(func(tx *kv.Tx) error {
			return tx.Each([]byte{'w'}, func(k, _ []byte) error {
				if binary.BigEndian.Uint64(k[1:]) > b.seconds() || len(due) == matureAtOnce {
					return errEnough
				}
				due = append(due, bytes.Clone(k))
				return nil
			})
		})
		if err != nil && !errors.Is(err, errEnough) || len(due) == 0 {
			return nodes, ignore(err, errEnough)
		}
		err = b.store.Update(func(tx *kv.Tx) error {
			for _, k := range due {
				if err := errors.Join(tx.Delete(k), page{tx}.mature(settle.Node(k[9:]), b.seconds())); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return nodes, err
		}
		nodes += len(due)
	}
}

func ignore(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// Unstake begins to take an amount out of a node's bond, once for an id. Errors:
// settle.ErrBonded, settle.ErrTooManyLeave, settle.ErrKeyReused when the id was of
// another amount or node.
func (b *Books) Unstake(p settle.Params, n settle.Node, id settle.Hash, amount settle.Amount) error {
	return b.store.Update(func(tx *kv.Tx) error {
		pg, now := page{tx}, b.seconds()
		bond, err := pg.bond(n)
		if err != nil {
			return err
		}
		if amount == 0 {
			return fmt.Errorf("%w: an amount of 0", settle.ErrBonded)
		}
		e, err := settle.NewEntry(settle.ActUnbond, id, now, settle.Transfer{
			From: settle.Account{Kind: settle.Bonded, ID: n}, To: settle.Account{Kind: settle.Unbonding, ID: n}, Amount: amount})
		if err != nil {
			return err
		}
		posted, err := pg.post(e)
		if errors.Is(err, settle.ErrFunds) {
			err = fmt.Errorf("%w: %d of %d", settle.ErrBonded, amount, bond.Bonded)
		}
		if err != nil || !posted {
			return err
		}
		if bond, err = p.Unbond(bond, amount, now); err != nil {
			return err
		}
		return pg.saveBond(n, bond)
	})
}

// pay keeps what a settlement changed for its workers, and the payer's premium.
func (b *Books) pay(p page, r settle.Request, out settle.Outcome) error {
	for _, w := range out.Workers {
		if err := p.saveBond(w.Worker, w.Bond); err != nil {
			return err
		}
		var t totals
		if _, err := p.load(totalsKey(w.Worker), &t); err != nil {
			return err
		}
		sum, err := t.Earned.Add(w.Pay + w.Emission)
		if err != nil {
			return err
		}
		if sum > t.Earned {
			t.Requests++
		}
		t.Earned = sum
		if err := p.save(totalsKey(w.Worker), t); err != nil {
			return err
		}
	}
	if out.Split.Insurance == 0 {
		return nil
	}
	premiums, day, err := p.premiums(r.Payer, b.seconds())
	if err == nil {
		premiums, err = premiums.Pay(day, out.Split.Insurance)
	}
	if err != nil {
		return err
	}
	return p.save(premiumsKey(r.Payer), premiums)
}

// Premiums is what a wallet paid into the pool, by day.
func (b *Books) Premiums(w settle.Wallet) (p settle.Premiums, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		_, err = page{tx}.load(premiumsKey(w), &p)
		return err
	})
	return p, err
}

// KeepReserve begins the emission reserve once what it is to have has come in, and lowers
// it when its total was lowered.
func (b *Books) KeepReserve(total settle.Amount) error {
	return b.store.Update(func(tx *kv.Tx) error {
		pg := page{tx}
		var r settle.Reserve
		begun, err := pg.load([]byte{'m'}, &r)
		if err != nil {
			return err
		}
		has, err := pg.Balance(settle.Account{Kind: settle.Emission})
		if err != nil {
			return err
		}
		switch {
		case !begun && total > 0 && has >= total:
			r = settle.NewReserve(total)
		case begun && total < r.Total:
			if r, err = r.Lower(total); err != nil {
				return err
			}
		default:
			return nil
		}
		return pg.save([]byte{'m'}, r)
	})
}

// verifyBonds compares every bond with the accounts of its node. Error: ErrBooks.
func verifyBonds(tx *kv.Tx, l *settle.Ledger) error {
	bonds := map[settle.Node]bool{}
	err := tx.Each([]byte{'b'}, func(k, _ []byte) error {
		n := settle.Node(k[1:])
		bonds[n] = true
		b, err := page{tx}.bond(n)
		if err != nil {
			return err
		}
		for kind, want := range map[settle.Kind]settle.Amount{settle.Held: sum(b.Vesting), settle.Bonded: b.Bonded, settle.Unbonding: sum(b.Unbonding)} {
			if has, _ := l.Balance(settle.Account{Kind: kind, ID: n}); has != want {
				return fmt.Errorf("%w: %s of %s is %d, its bond says %d", ErrBooks, kind, n, has, want)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, c := range l.Accounts() {
		if k := c.Account.Kind; (k == settle.Held || k == settle.Bonded || k == settle.Unbonding) && !bonds[c.Account.ID] {
			return fmt.Errorf("%w: %s has %d and no bond", ErrBooks, c.Account, c.Amount)
		}
	}
	return nil
}

func sum(list []settle.Pending) (s settle.Amount) {
	for _, p := range list {
		s += p.Amount
	}
	return s
}

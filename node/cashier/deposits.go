package cashier

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// A transfer to the vault says in its memo what it is for, or has none:
//
//	kvr1:<quote>     pays a quote, and is no deposit while it can
//	kvs1:<node>      a stake of that node, by its key in 64 hexadecimal digits
//	kvf1:emission    fills the emission reserve
//	kvf1:pool        fills the insurance pool
//
// Without a memo it is its sender's balance, or a stake of a node that the sender is
// linked to. So nobody can have it booked for what its sender did not mean.
const (
	stakePrefix  = "kvs1:"
	fundEmission = "kvf1:emission"
	fundPool     = "kvf1:pool"
)

// lateSeconds is how long after a quote's end its payment may still be asked about as
// such. After that it can be a deposit.
const lateSeconds = settle.LateSeconds

// Refusals of a transfer.
var (
	ErrPaysQuote = errors.New("the transfer pays a quote")
	ErrMeant     = errors.New("the transfer is meant for something else")
)

// StakeMemo is the memo of a transfer that is a stake of a node.
func StakeMemo(n settle.Node) string { return stakePrefix + hex.EncodeToString(n[:]) }

// FundMemos are the memos of transfers that are nobody's balance, by what they fill.
func FundMemos() map[string]string {
	return map[string]string{"emission": fundEmission, "pool": fundPool}
}

// Credit is a transfer that was booked and paid no request.
type Credit struct {
	Owner  settle.Wallet
	Node   settle.Node // whose stake it is, or zero
	Action settle.Action
	Amount settle.Amount
}

func creditKey(s settle.Signature) []byte { return append([]byte{'c'}, s[:]...) }

// Deposit is part of Service.
func (t *Teller) Deposit(ctx context.Context, d Deposit) (Ledger, error) {
	for field, missing := range map[string]bool{"signature": d.Signature == settle.Signature{}, "owner": d.Owner == settle.Wallet{}, "amount": d.Amount == 0} {
		if missing {
			return Ledger{}, refusal(CodeBad, field, "the %s of the transfer is missing", field)
		}
	}
	owner := d.Owner
	if d.Stake {
		owner = t.node
	}
	booked, ok, err := t.cfg.Books.Credit(d.Signature)
	if err != nil {
		return Ledger{}, err
	}
	if !ok {
		paid, err := t.cfg.Chain.Stake(ctx, solana.Claim{Signature: d.Signature, Owner: d.Owner, Amount: d.Amount})
		if err != nil {
			return Ledger{}, explained("signature", err)
		}
		booked, err = t.creditOf(paid, d.Stake)
		if err == nil {
			err = t.cfg.Books.Deposit(paid, booked)
		}
		if err != nil {
			return Ledger{}, explained("signature", err)
		}
	}
	if booked.Owner != d.Owner || d.Stake != (booked.Action == settle.ActStake) || d.Stake && booked.Node != t.node {
		return Ledger{}, refusal(CodeInvalid, "signature", "the transfer was booked as a %s of %s", booked.Action, booked.Owner)
	}
	return t.Ledger(ctx, owner)
}

// creditOf says what a transfer is booked as, by its memo, or by the link of this node.
func (t *Teller) creditOf(p solana.Payment, stake bool) (Credit, error) {
	c := Credit{Owner: p.Owner, Action: settle.ActDeposit, Amount: p.Amount}
	_, notQuote := settle.ParseMemo(p.Memo)
	fund, named := p.Memo == fundEmission || p.Memo == fundPool, strings.HasPrefix(p.Memo, stakePrefix)
	switch {
	case stake && (fund || notQuote == nil), named && (!stake || p.Memo != StakeMemo(t.node)):
		return c, fmt.Errorf("%w: its memo is %.80q", ErrMeant, p.Memo)
	case fund:
		c.Action = settle.ActFund
	case stake:
		c.Action, c.Node = settle.ActStake, t.node
	}
	if !stake || named {
		return c, nil
	}
	l, err := t.cfg.Books.Linked(t.node)
	if err == nil && l.Wallet != p.Owner {
		err = refusal(CodeRights, "owner", "%s is not linked to this node: link it, or write the memo %s into the transfer", p.Owner, StakeMemo(t.node))
	}
	return c, err
}

// Credit is what a signature was booked as, if it paid no request.
func (b *Books) Credit(s settle.Signature) (c Credit, ok bool, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		ok, err = page{tx}.load(creditKey(s), &c)
		return err
	})
	return c, ok, err
}

// Deposit books what the chain proved of a transfer that pays no request. Its signature
// and its message are used then, for ever. Errors: ErrPaysQuote, ErrUsed,
// settle.ErrKeyReused when the message was booked for something else.
func (b *Books) Deposit(p solana.Payment, as Credit) error {
	return b.store.Update(func(tx *kv.Tx) error {
		pg := page{tx}
		if err := b.free(pg, p); err != nil {
			return err
		}
		to := settle.Account{Kind: settle.Balance, ID: as.Owner}
		switch {
		case as.Action == settle.ActStake:
			to = settle.Account{Kind: settle.Bonded, ID: as.Node}
		case p.Memo == fundEmission:
			to = settle.Account{Kind: settle.Emission}
		case p.Memo == fundPool:
			to = settle.Account{Kind: settle.Pool}
		}
		e, err := settle.NewEntry(as.Action, p.Message, b.seconds(), settle.Transfer{From: settle.Account{Kind: settle.Inflow}, To: to, Amount: p.Amount})
		if err != nil {
			return err
		}
		posted, err := pg.post(e)
		if err != nil {
			return err
		}
		if posted && as.Action == settle.ActStake {
			if err := pg.stake(as.Node, p.Amount); err != nil {
				return err
			}
		}
		return errors.Join(pg.save(creditKey(p.Signature), as), pg.Put(signatureKey(p.Signature), make([]byte, len(settle.QuoteID{}))))
	})
}

func (p page) stake(n settle.Node, amount settle.Amount) error {
	bond, err := p.bond(n)
	if err == nil {
		bond, err = bond.Stake(amount)
	}
	if err != nil {
		return err
	}
	return p.saveBond(n, bond)
}

// free refuses a transfer that pays a request, or still can. Who reserved its signature
// for another quote than the transfer names loses it: the chain has said whose it is.
func (b *Books) free(p page, paid solana.Payment) error {
	var r settle.Request
	if id, err := settle.ParseMemo(paid.Memo); err == nil {
		ok, err := p.load(requestKey(id), &r)
		if err != nil {
			return err
		}
		if ok && r.State <= settle.Reserved && b.seconds() <= r.Quote.Expires+lateSeconds {
			return fmt.Errorf("%w: %s: pay that with it", ErrPaysQuote, id)
		}
	}
	_, err := b.wrest(p, paid.Signature, "the transfer is a deposit")
	return err
}

//go:build svm

package cashier

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

// branch is an office at a chain. Its clock is the chain's.
type branch struct {
	*office
	w          *bank
	slot, time uint64 // of one moment
}

func newBranch(t *testing.T, vault settle.Amount) *branch {
	w := newBank(t, vault)
	v := w.client(t).(keyed)
	b := &branch{office: newOffice(t, v.Client, v), w: w}
	sig := w.Run([]settletest.Wallet{w.operator}, settletest.Memo("clock", w.operator.Key))
	w.Advance(1)
	answer := w.Answer(sig)
	b.slot, b.time = uint64(answer["slot"].(float64)), uint64(answer["blockTime"].(float64))
	b.pass(40)
	b.cfg.Began = time.Unix(int64(b.time), 0)
	b.reopen()
	return b
}

// pass lets slots pass.
func (b *branch) pass(slots int) {
	b.Helper()
	b.at.Store(int64(b.time + (b.w.Advance(slots)-b.slot)*2/5))
}

// wallet is one with tokens.
func (b *branch) wallet(name string, amount settle.Amount) settletest.Wallet {
	b.Helper()
	w := b.w.NewWallet(name)
	b.w.mint.Fund(w.Key, amount)
	return w
}

func (b *branch) vault() settle.Amount { return b.w.has(b.w.operator.Key) }

// transfer sends an amount to the vault, with a memo unless it is empty.
func (b *branch) transfer(from settletest.Wallet, amount settle.Amount, memo string) settle.Signature {
	b.Helper()
	in := []settletest.Instruction{b.w.mint.TransferChecked(b.w.mint.ATA(from.Key), b.w.mint.ATA(b.w.operator.Key), from.Key, amount)}
	if memo != "" {
		in = append(in, settletest.Memo(memo, from.Key))
	}
	return b.w.Run([]settletest.Wallet{from}, in...)
}

// deposit asks a node to have a transfer booked.
func (b *branch) deposit(n settle.Node, sig settle.Signature, owner settle.Wallet, stake bool) (Ledger, error) {
	return b.As(n).Deposit(b.Context(), Deposit{Signature: sig, Owner: owner, Amount: 1, Stake: stake})
}

func (b *branch) has(kind settle.Kind, id settle.Key, want settle.Amount) {
	b.Helper()
	b.cfg.Books.mustHave(b.T, kind, id, want)
}

func TestDeposits(t *testing.T) {
	b := newBranch(t, 0)
	alice, eve := b.wallet("alice", 1e6), b.wallet("eve", 1e6)
	n := keyOf("node")
	plain := b.transfer(alice, 700, "")
	_, err := b.deposit(n, plain, alice.Key, false)
	refused(t, "not final", err, CodeNotYet, "signature")
	b.pass(40)
	_, err = b.deposit(n, plain, eve.Key, false)
	refused(t, "by another", err, CodeInvalid, "signature")
	_, err = b.As(n).Deposit(t.Context(), Deposit{Signature: plain, Owner: alice.Key, Amount: 701})
	refused(t, "more than it was", err, CodeInvalid, "signature")
	_, err = b.deposit(n, plain, alice.Key, true)
	refused(t, "a stake of a node that is not linked", err, CodeRights, "owner")
	for range 2 {
		if l := must[Ledger](t)(b.deposit(n, plain, alice.Key, false)); l.Owner != alice.Key || l.Balance != 700 {
			t.Errorf("%+v", l)
		}
		b.w.Fault(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 503}}) // the second time nobody is asked
	}
	for name, again := range map[string]func() (Ledger, error){
		"as a stake": func() (Ledger, error) { return b.deposit(n, plain, alice.Key, true) },
		"as another": func() (Ledger, error) { return b.deposit(n, plain, eve.Key, false) },
	} {
		_, err := again()
		refused(t, "booked, and now "+name, err, CodeInvalid, "signature")
	}
	b.w.ClearFaults()
	b.has(settle.Balance, alice.Key, 700)

	named, other := b.transfer(eve, 50, StakeMemo(n)), b.transfer(eve, 50, StakeMemo(keyOf("other")))
	b.link(n, alice)
	byLink := b.transfer(alice, 80, "")
	b.pass(40)
	for name, do := range map[string]func() (Ledger, error){
		"a stake as a deposit":   func() (Ledger, error) { return b.deposit(n, named, eve.Key, false) },
		"another node's stake":   func() (Ledger, error) { return b.deposit(n, other, eve.Key, true) },
		"another's, not by memo": func() (Ledger, error) { return b.deposit(n, other, eve.Key, false) },
	} {
		_, err := do()
		refused(t, name, err, CodeInvalid, "signature")
	}
	for range 2 {
		must[Ledger](t)(b.deposit(n, named, eve.Key, true))
		if l := must[Ledger](t)(b.deposit(n, byLink, alice.Key, true)); l.Bonded != 130 || l.Owner != n || l.Wallet != alice.Key || l.Balance != 700 {
			t.Errorf("staked: %+v", l)
		}
	}
	b.reopen()
	b.cfg.Books.verified(t)
	b.has(settle.Inflow, settle.Key{}, 830)
	if got := b.vault(); got != 880 { // the other node's stake was never asked for
		t.Errorf("the vault has %d", got)
	}
}

// TestFunds fill the reserve and the pool, by their memo alone.
func TestFunds(t *testing.T) {
	b := newBranch(t, 0)
	treasury, n := b.wallet("treasury", 1e6), keyOf("node")
	emission, pool := b.transfer(treasury, 5000, fundEmission), b.transfer(treasury, 300, fundPool)
	b.pass(40)
	_, err := b.deposit(n, pool, treasury.Key, true)
	refused(t, "a fund as a stake", err, CodeInvalid, "signature")
	for range 2 {
		must[Ledger](t)(b.deposit(n, emission, treasury.Key, false))
		must[Ledger](t)(b.deposit(n, pool, treasury.Key, false))
	}
	b.has(settle.Emission, settle.Key{}, 5000)
	b.has(settle.Pool, settle.Key{}, 300)
	b.has(settle.Balance, treasury.Key, 0)
	must[int](t)(0, b.Mature(t.Context()))
	b.pass(1)
	w := b.earn(keyOf("worker"), 1, 2000)
	if w.Emission != 0 {
		t.Errorf("%d was emitted for what nobody drew", w.Emission)
	}
	b.cfg.Books.verified(t)
}

// TestDepositsAndQuotes: a transfer pays a quote or is a deposit, once, whoever asks first.
func TestDepositsAndQuotes(t *testing.T) {
	b := newBranch(t, 0)
	alice, n := b.wallet("alice", 1e9), keyOf("node")
	books := b.cfg.Books
	quote := func(id uint64) settle.Quote {
		t.Helper()
		q := quoteOf(id, settle.Wallet{})
		q.Created, q.Expires = uint64(b.at.Load()), uint64(b.at.Load())+60
		must[int](t)(0, books.Quote(q))
		return q
	}
	q := quote(1)
	pays := b.transfer(alice, q.Amount, q.ID.Memo())
	b.pass(40)
	_, err := b.deposit(n, pays, alice.Key, false)
	refused(t, "pays an open quote", err, CodeState, "signature")
	must[settle.Request](t)(books.Reserve(q.ID, pays, 0))
	_, err = b.deposit(n, pays, alice.Key, false)
	refused(t, "pays a reserved quote", err, CodeState, "signature")
	b.pay(t, q, pays, alice)
	_, err = b.deposit(n, pays, alice.Key, false)
	refused(t, "has paid", err, CodeInvalid, "signature")

	// Eve's quote has Alice's transfer: what the chain says goes before.
	eves, plain := quote(2), b.transfer(alice, 900, "")
	b.pass(40)
	must[settle.Request](t)(books.Reserve(eves.ID, plain, 0))
	must[Ledger](t)(b.deposit(n, plain, alice.Key, false))
	if r := must[settle.Request](t)(books.Request(eves.ID)); r.State != settle.Open {
		t.Errorf("the quote is %s", r.State)
	}
	if _, err := books.Reserve(eves.ID, plain, 0); !errors.Is(err, ErrUsed) {
		t.Errorf("a deposit is reserved: %v", err)
	}
	b.has(settle.Balance, alice.Key, 900)

	// A payment that nobody asked about in time is its payer's.
	q = quote(3)
	late := b.transfer(alice, q.Amount, q.ID.Memo())
	must[settle.Request](t)(books.Reserve(q.ID, late, 0))
	b.pass(40)
	b.at.Store(int64(q.Expires) + lateSeconds)
	_, err = b.deposit(n, late, alice.Key, false)
	refused(t, "can still pay", err, CodeState, "signature")
	b.at.Add(1)
	must[Ledger](t)(b.deposit(n, late, alice.Key, false))
	b.has(settle.Balance, alice.Key, 900+q.Amount)
	books.verified(t)
}

// pay has the chain's proof of a reserved quote booked.
func (b *branch) pay(t *testing.T, q settle.Quote, sig settle.Signature, from settletest.Wallet) settle.Request {
	t.Helper()
	p := must[solana.Payment](t)(b.cfg.Chain.Payment(t.Context(), solana.Claim{Signature: sig, Owner: from.Key, Amount: 1, Memo: q.ID.Memo()}))
	return must[settle.Request](t)(b.cfg.Books.Pay(q.ID, settle.Payment{Signature: p.Signature, Message: p.Message, Memo: q.ID.Memo(),
		Payer: p.Owner, Amount: p.Amount, Slot: p.Slot, Time: uint64(p.Time)}))
}

// TestDepositsAtOnce: of one transfer, asked for many times by many nodes, one is booked.
func TestDepositsAtOnce(t *testing.T) {
	b := newBranch(t, 0)
	alice := b.wallet("alice", 1e6)
	sig := b.transfer(alice, 700, "")
	b.pass(40)
	var all sync.WaitGroup
	for i := range 50 {
		n := keyOf(fmt.Sprint("node", i%5))
		if i < 5 {
			b.link(n, alice)
		}
		all.Go(func() {
			if _, err := b.deposit(n, sig, alice.Key, i%2 == 1); err != nil {
				refused(t, "one of many", err, CodeInvalid, "signature")
			}
		})
	}
	all.Wait()
	b.has(settle.Inflow, settle.Key{}, 700)
	b.cfg.Books.verified(t)
}

// TestClaims of several nodes of one wallet, at once: as many are paid as it has money
// for, to the wallet, and again is the same.
func TestClaims(t *testing.T) {
	b := newBranch(t, 0)
	alice := b.wallet("alice", 3500)
	sig := b.transfer(alice, 3500, "")
	b.pass(40)
	nodes := []settle.Node{keyOf("a"), keyOf("b")}
	must[Ledger](t)(b.deposit(nodes[0], sig, alice.Key, false))
	for _, n := range nodes {
		b.link(n, alice)
	}
	var paid, poor atomic.Int64
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			if _, err := b.As(nodes[i%2]).Claim(t.Context(), Move{hashOf("claim", i), 3000}); err == nil {
				paid.Add(1)
			} else {
				poor.Add(1)
				refused(t, "one of many", err, CodeBusy, "")
			}
		})
	}
	all.Wait()
	if paid.Load() != 1 || poor.Load() != 99 {
		t.Errorf("%d paid, %d refused", paid.Load(), poor.Load())
	}
	b.has(settle.Leaving, alice.Key, 3000)
	if l := must[Ledger](t)(b.As(nodes[0]).Ledger(t.Context(), nodes[1])); l.Leaving != 3000 || l.Balance != 500 || len(l.Payouts) != 1 || l.Payouts[0].Amount != 3000 {
		t.Errorf("while it leaves: %+v", l)
	}
	for range 20 {
		b.pass(40)
		if b.Mature(t.Context()) == nil && must[settle.Amount](t)(b.cfg.Books.Balance(settle.Account{Kind: settle.Leaving, ID: alice.Key})) == 0 {
			break
		}
	}
	if got := b.w.has(alice.Key); got != 3000 || b.vault() != 500 {
		t.Errorf("%d arrived, the vault has %d", got, b.vault())
	}
	b.cfg.Books.verified(t)
}

// TestClaimAgain: one id is one payout, of one node.
func TestClaimAgain(t *testing.T) {
	b := newBranch(t, 9000)
	alice, n := b.wallet("alice", 0), keyOf("a")
	deposit(t, b.cfg.Books, alice.Key, 9000)
	b.link(n, alice)
	b.link(keyOf("b"), alice)
	first := must[Payout](t)(b.As(n).Claim(t.Context(), Move{hashOf(1), 2000}))
	if again := must[Payout](t)(b.As(n).Claim(t.Context(), Move{hashOf(1), 2000})); again.ID != first.ID || again.Signed.Signature != first.Signed.Signature {
		t.Errorf("the same claim is paid by %s and %s", first.Signed.Signature, again.Signed.Signature)
	}
	_, busy := b.As(keyOf("b")).Claim(t.Context(), Move{hashOf(1), 2000})
	refused(t, "one more of the wallet", busy, CodeBusy, "")
	b.w.resolve(t, b.cfg.Books, b.cfg.Vault)
	if other := must[Payout](t)(b.As(keyOf("b")).Claim(t.Context(), Move{hashOf(1), 2000})); other.ID == first.ID {
		t.Error("two nodes share an id")
	}
	_, err := b.As(n).Claim(t.Context(), Move{hashOf(1), 2001})
	refused(t, "another amount", err, CodeBad, "id")
	b.w.resolve(t, b.cfg.Books, b.cfg.Vault)
	carol := b.w.NewWallet("carol, who has no account")
	deposit(t, b.cfg.Books, carol.Key, 9000)
	b.link(keyOf("c"), carol)
	_, err = b.As(keyOf("c")).Claim(t.Context(), Move{hashOf(1), 2000})
	if refused(t, "no token account", err, CodeBad, ""); !strings.Contains(fmt.Sprint(err), "create the wallet's token account first") {
		t.Error(err)
	}
	b.has(settle.Balance, carol.Key, 9000)
	b.w.mint.Open(carol.Key)
	b.pass(40)
	must[Payout](t)(b.As(keyOf("c")).Claim(t.Context(), Move{hashOf(1), 2000}))
	b.w.Fault(settletest.Fault{HTTP: &settletest.HTTPFault{Status: 503}})
	_, err = b.As(n).Claim(t.Context(), Move{hashOf(2), 1000})
	refused(t, "no chain", err, CodeNotYet, "")
	b.has(settle.Balance, alice.Key, 5000)
}

// TestWithdraw pays the treasury out, once, and what fails is the treasury's again.
func TestWithdraw(t *testing.T) {
	b := newBranch(t, 0)
	boss, payer := b.wallet("boss", 0), b.wallet("payer", 1e9)
	sig := b.transfer(payer, 1e6, "")
	b.pass(40)
	must[Ledger](t)(b.deposit(keyOf("n"), sig, payer.Key, false))
	q := quoteOf(1, payer.Key)
	q.Created, q.Expires = uint64(b.at.Load()), uint64(b.at.Load())+50
	q.Amount, q.PriceRaw, q.Ref = 1e6, 500_000_000_000, 1_000_000_000
	b.serve(q, keyOf("worker"), 2000)
	has := must[settle.Amount](t)(b.cfg.Books.Balance(settle.Account{Kind: settle.Treasury}))
	if has < 1000 {
		t.Fatalf("the treasury has %d", has)
	}
	ctx := t.Context()
	if _, err := b.cfg.Books.Withdraw(ctx, b.cfg.Vault, hashOf(1), boss.Key, has+1); !errors.Is(err, settle.ErrFunds) {
		t.Errorf("more than there is: %v", err)
	}
	var begun atomic.Int64
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			if _, err := b.cfg.Books.Withdraw(ctx, b.cfg.Vault, hashOf(i), boss.Key, has/3); err == nil {
				begun.Add(1)
			} else if !errors.Is(err, ErrUnderWay) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if begun.Load() != 1 {
		t.Errorf("%d withdrawals began", begun.Load())
	}
	b.w.resolve(t, b.cfg.Books, b.cfg.Vault)
	b.has(settle.Treasury, settle.Key{}, has-has/3)
	b.has(settle.PaidOut, settle.Key{}, has/3)
	if got := b.w.has(boss.Key); got != has/3 {
		t.Errorf("%d arrived", got)
	}
	b.w.Fault(settletest.Fault{Path: "/a", Method: "sendTransaction", HTTP: &settletest.HTTPFault{Status: 503}})
	p := must[Payout](t)(b.cfg.Books.Withdraw(ctx, b.cfg.Vault, hashOf(99), boss.Key, 10))
	if _, err := b.cfg.Books.Withdraw(ctx, b.cfg.Vault, hashOf(99), boss.Key, 11); !errors.Is(err, ErrOtherClaim) {
		t.Errorf("another amount: %v", err)
	}
	for range 20 {
		b.pass(40)
		b.cfg.Books.Resolve(ctx, b.cfg.Vault) // it cannot be sent until it has expired
	}
	if p, _, err := b.cfg.Books.Payout(p.ID); err != nil || p.Outcome != solana.Expired {
		t.Errorf("it is %s, %v", p.Outcome, err)
	}
	b.has(settle.Treasury, settle.Key{}, has-has/3)
	b.cfg.Books.verified(t)
}

// TestMatureInTime: payouts have so long in a Tick, whatever the chain does.
func TestMatureInTime(t *testing.T) {
	b := newBranch(t, 9000)
	alice, n := b.wallet("alice", 0), keyOf("a")
	deposit(t, b.cfg.Books, alice.Key, 9000)
	b.link(n, alice)
	must[Payout](t)(b.As(n).Claim(t.Context(), Move{hashOf(1), 2000}))
	v := &slowVault{Vault: b.cfg.Vault, stop: func() {}}
	b.Desk.cfg.Vault = v
	must[int](t)(0, b.Mature(t.Context()))
	if len(v.asked) != 1 || v.had <= 0 || v.had > resolveFor {
		t.Errorf("asked %d times, with %v to answer, at most %v", len(v.asked), v.had, resolveFor)
	}
}

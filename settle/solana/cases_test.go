//go:build svm

package solana

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// verdict is one transaction of the table of adversarial ones, and what has to be said
// of it. The numbers are the table's.
type verdict struct {
	id, name string
	build    func(*world) ask
	want     error // nil: it is a payment
}

// ask is what is asked of a client once all transactions are final.
type ask struct {
	claim     Claim
	amount    settle.Amount // of the payment; 0 is the price
	mint      settletest.Mint
	providers []string // nil: one
	stake     bool
	faults    func(*world) []settletest.Fault
	slow      bool // it runs into a time limit
}

// verify asks, without a rule if it is named.
func (a *ask) verify(w *world, without string) (Payment, error) {
	w.t.Helper()
	w.ClearFaults()
	if a.faults != nil {
		made := a.faults(w)
		a.faults = func(*world) []settletest.Fault { return made }
		for _, f := range made {
			w.Fault(f)
		}
	}
	if a.providers == nil {
		a.providers = []string{"a?api-key=secret"}
	}
	if a.slow {
		defer func(usual time.Duration) { w.timeout = usual }(w.timeout)
		w.timeout = 300 * time.Millisecond
	}
	cl := w.client(a.mint, a.providers...)
	cl.without = without
	if a.stake {
		return cl.Stake(context.Background(), a.claim)
	}
	return cl.Payment(context.Background(), a.claim)
}

// built are the verdicts with what they ask: first those that need to be final, then
// those that must not be.
func built(w *world) (all []verdict, asks []*ask) {
	add := func(vs []verdict) {
		for _, v := range vs {
			a := v.build(w)
			all, asks = append(all, v), append(asks, &a)
			w.Advance(1)
		}
	}
	add(payments)
	add(identities)
	add(accounts)
	add(lies)
	w.Advance(40)
	add(young)
	return all, asks
}

func TestVerdicts(t *testing.T) {
	w := newWorld(t)
	all, asks := built(w)
	seen := map[string]bool{}
	for i, v := range all {
		if seen[v.id] {
			t.Errorf("two cases %s", v.id)
		}
		seen[v.id] = true
		w.alarms = nil
		p, err := asks[i].verify(w, "")
		v.judge(t, *asks[i], p, err)
		if err != nil {
			w.checkError(v, err)
		}
	}
	t.Logf("%d cases", len(all))
}

func (v verdict) judge(t *testing.T, a ask, p Payment, err error) {
	t.Helper()
	if !errors.Is(err, v.want) {
		t.Errorf("case %s, %s: %v, want %v", v.id, v.name, err, v.want)
		return
	}
	if v.want != nil {
		return
	}
	amount := a.amount
	if amount == 0 {
		amount = price
	}
	if p.Amount != amount || p.Owner != a.claim.Owner || p.Signature != a.claim.Signature || p.Message == (settle.Hash{}) || p.Slot == 0 || p.Time == 0 {
		t.Errorf("case %s, %s: %+v, want %d", v.id, v.name, p, amount)
	}
}

// checkError wants an error of exactly one class, and no word of the provider's URL.
func (w *world) checkError(v verdict, err error) {
	w.t.Helper()
	classes := 0
	for _, class := range []error{ErrInvalid, ErrNotYet, ErrUnknown} {
		if errors.Is(err, class) {
			classes++
		}
	}
	if classes != 1 {
		w.t.Errorf("case %s, %s: %v is of %d classes", v.id, v.name, err, classes)
	}
	if text := err.Error(); strings.Contains(text, "127.0.0.1") || strings.Contains(text, "secret") || len(text) > 500 {
		w.t.Errorf("case %s, %s: an error with the URL, or too long: %s", v.id, v.name, text)
	}
	alarming := false
	for _, e := range []error{ErrDisagree, ErrSwapped, ErrForged, ErrMalformed, ErrUnverifiable, ErrVersion, ErrVaultAccount} {
		alarming = alarming || errors.Is(err, e)
	}
	if alarming != (len(w.alarms) == 1) {
		w.t.Errorf("case %s, %s: %d alarms", v.id, v.name, len(w.alarms))
	}
}

// TestEveryRuleCounts drops one rule after the other: some verdict has to change, or the
// rule is not tested, or not needed.
func TestEveryRuleCounts(t *testing.T) {
	w := newWorld(t)
	all, asks := built(w)
	names := []string{agreement, finality}
	for _, r := range rules {
		names = append(names, r.name)
	}
	for _, name := range names {
		var changed, fooled []string
		for i, v := range all {
			if asks[i].slow {
				continue
			}
			_, err := asks[i].verify(w, name)
			if !errors.Is(err, v.want) {
				changed = append(changed, v.id)
			}
			if err == nil && v.want != nil {
				fooled = append(fooled, v.id)
			}
		}
		t.Logf("without %q: %v change, %v would be paid", name, changed, fooled)
		if len(changed) == 0 {
			t.Errorf("without the rule %q all verdicts stay", name)
		}
	}
}

// payments are cases 1 to 33 that are about a payment's shape.
var payments = []verdict{
	{"2", "exact payment", func(w *world) ask { return ask{claim: w.paid()} }, nil},
	{"2b", "a stake, which has no memo", func(w *world) ask {
		sig := w.Run(w.wallets(w.alice), w.transfer(w.alice, price+1))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: 1}, amount: price + 1, stake: true}
	}, nil},
	{"4", "the transaction of another quote", func(w *world) ask {
		c := w.paid()
		c.Memo = w.memo()
		return ask{claim: c}
	}, ErrMemo},
	{"6", "unknown signature", func(w *world) ask {
		c := w.paid()
		c.Signature[5] ^= 1
		return ask{claim: c}
	}, ErrNotYet},
	{"7", "one unit short", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price-1))}
	}, ErrShort},
	{"8", "overpaid", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price+50)), amount: price + 50}
	}, nil},
	{"9", "another mint", func(w *world) ask {
		m := w.other
		return ask{claim: w.claimOf(w.wallets(w.alice), m.TransferChecked(m.ATA(w.alice.Key), m.ATA(w.operator.Key), w.alice.Key, price))}
	}, ErrNoVault},
	{"10", "another account", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), w.mint.TransferChecked(w.mint.ATA(w.alice.Key), w.mint.ATA(w.bob.Key), w.alice.Key, price))}
	}, ErrNoVault},
	{"11", "failed on the chain", func(w *world) ask {
		memo := w.memo()
		sig := w.landed(w.wallets(w.alice), w.transfer(w.alice, 1000*price), settletest.Memo(memo, w.alice.Key))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrFailed},
	{"12", "paid and refunded", func(w *world) ask {
		back := w.mint.TransferChecked(w.vault(), w.mint.ATA(w.alice.Key), w.operator.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice, w.operator), w.transfer(w.alice, price), back)}
	}, ErrShort},
	{"12b", "paid twice as much, half of it handed on", func(w *world) ask {
		on := w.mint.TransferChecked(w.vault(), w.mint.ATA(w.eve.Key), w.operator.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice, w.operator), w.transfer(w.alice, 2*price), on)}
	}, ErrVaultTouched},
	{"13", "from the vault to the vault", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice, w.operator), w.mint.TransferChecked(w.vault(), w.vault(), w.operator.Key, price))}
	}, ErrShort},
	{"17", "from two accounts, one of them closed", func(w *world) ask {
		second := w.mint.NewAccount("alice 17", w.alice.Key, price)
		return ask{claim: w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price*7/10),
			w.mint.TransferChecked(second, w.vault(), w.alice.Key, price*3/10),
			w.mint.TransferChecked(second, w.mint.ATA(w.alice.Key), w.alice.Key, price*7/10), w.mint.Close(second, w.alice.Key, w.alice.Key))}
	}, nil},
	{"21", "minted to the vault", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice, w.mint.Authority), w.mint.MintTo(w.vault(), price))}
	}, ErrDebit},
	{"22", "minted to the vault, burnt from Alice", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice, w.mint.Authority), w.mint.MintTo(w.vault(), price), w.mint.Burn(w.mint.ATA(w.alice.Key), w.alice.Key, price))}
	}, ErrVaultTouched},
	{"23", "no memo", func(w *world) ask {
		sig := w.Run(w.wallets(w.alice), w.transfer(w.alice, price+23))
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: w.memo()}}
	}, ErrNoMemo},
	{"24", "two memos", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), w.transfer(w.alice, price), settletest.Memo(w.memo(), w.alice.Key))}
	}, ErrMemos},
	{"26", "somebody else pays the fee", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.bob, w.alice), w.transfer(w.alice, price))}
	}, nil},
	{"27", "plain transfer", func(w *world) ask {
		return ask{claim: w.claimOf(w.wallets(w.alice), w.mint.Transfer(w.mint.ATA(w.alice.Key), w.vault(), w.alice.Key, price))}
	}, nil},
	{"29", "version 0, both accounts from a lookup table", func(w *world) ask {
		memo := w.memo()
		table := w.NewTable("table 29", w.vault(), w.mint.ATA(w.alice.Key), w.mint.Key)
		sig := w.Send(settletest.Tx{Version: settletest.V0, Tables: []settletest.Table{table}, Signers: w.wallets(w.alice),
			Instructions: []settletest.Instruction{w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, nil},
	{"30", "a durable nonce, landed after the quote's end", func(w *world) ask {
		before := w.paid()
		account, nonce := w.NewNonce("nonce 30", w.alice)
		memo := w.memo()
		raw := settletest.Sign(settletest.Tx{Blockhash: nonce, Signers: w.wallets(w.alice), Instructions: []settletest.Instruction{
			settletest.AdvanceNonce(account, w.alice.Key), w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		w.Advance(300)
		sig, err := w.SendRaw(raw, true)
		if err != nil {
			w.t.Fatal(err)
		}
		w.refused(raw, codePreflight)
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo, NotAfter: w.blockTime(before.Signature) + 100}}
	}, ErrLate},
	{"31", "version 1", func(w *world) ask {
		memo := w.memo()
		sig := w.Send(settletest.Tx{Version: settletest.V1, Signers: w.wallets(w.alice),
			Instructions: []settletest.Instruction{w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		return ask{claim: Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, nil},
	{"32", "a version of the future", func(w *world) ask {
		c := w.paid()
		return ask{claim: c, faults: func(*world) []settletest.Fault {
			return []settletest.Fault{{Method: "getTransaction", Error: &settletest.RPCFault{Code: codeVersion, Message: "Transaction version (2) is not supported"}}}
		}}
	}, ErrVersion},
	{"33a", "sent after its blockhash's end", func(w *world) ask {
		memo := w.memo()
		raw := w.Sign(settletest.Tx{Signers: w.wallets(w.alice), Instructions: []settletest.Instruction{w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		w.Advance(200)
		return ask{claim: Claim{Signature: w.refused(raw, codePreflight), Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrNotYet},
	{"33b", "sent again", func(w *world) ask {
		memo := w.memo()
		raw := w.Sign(settletest.Tx{Signers: w.wallets(w.alice), Instructions: []settletest.Instruction{w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		if _, err := w.SendRaw(raw, true); err != nil {
			w.t.Fatal(err)
		}
		return ask{claim: Claim{Signature: w.refused(raw, codePreflight), Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, nil},
	{"33c", "a forged signature", func(w *world) ask {
		memo := w.memo()
		raw := w.Sign(settletest.Tx{Signers: w.wallets(w.alice), Instructions: []settletest.Instruction{w.transfer(w.alice, price), settletest.Memo(memo, w.alice.Key)}})
		raw[20] ^= 1
		return ask{claim: Claim{Signature: w.refused(raw, codeSignature), Owner: w.alice.Key, Amount: price, Memo: memo}}
	}, ErrNotYet},
}

// young are cases of transactions that are not final.
var young = []verdict{
	{"28", "confirmed, then forked away", func(w *world) ask {
		fork := w.Slot()
		w.Advance(1)
		c := w.paid()
		w.Advance(1)
		if p, err := (&ask{claim: c}).verify(w, finality); err != nil || p.Amount != price {
			w.t.Errorf("it was not even confirmed: %v", err)
		}
		w.Rollback(fork)
		w.Advance(40)
		return ask{claim: c}
	}, ErrNotYet},
	{"1b", "confirmed only", func(w *world) ask {
		c := w.paid()
		w.Advance(1)
		return ask{claim: c}
	}, ErrNotYet},
	{"1a", "processed only", func(w *world) ask { return ask{claim: w.paid()} }, ErrNotYet},
}

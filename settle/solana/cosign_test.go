//go:build svm

package solana

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// partial is what an x402 client makes: signed by the payer, and not by the fee payer.
func (w *world) partial(tx settletest.Tx) []byte {
	w.t.Helper()
	raw := w.Sign(tx)
	if raw[0] < 0x80 { // version 1 has its signatures at the end
		clear(raw[1:65])
	}
	return raw
}

// x402 is Alice's payment as the client of x402 writes it, of version 0 and with a memo
// that names no signer.
func (w *world) x402(fee settletest.Wallet, memo string) settletest.Tx {
	return settletest.Tx{Version: settletest.V0, Signers: w.wallets(fee, w.alice), Instructions: []settletest.Instruction{
		budget(2, 20_000, 4), budget(3, 1, 8), w.transfer(w.alice, price), settletest.Memo(memo)}}
}

func TestCoSign(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	w.Advance(40)
	fee := w.NewWallet("fee")
	cl := w.client(w.mint, "a", "b")
	before := w.Balance(w.vault())
	due := Due{price, w.memo()}
	for _, version := range []int{settletest.Legacy, settletest.V0} {
		due.Memo = w.memo()
		tx := w.x402(fee, due.Memo)
		tx.Version = version
		raw := w.partial(tx)
		s, err := cl.CoSign(ctx, fee.Private, raw, due)
		if err != nil {
			t.Fatal(err)
		}
		again, err := cl.CoSign(ctx, fee.Private, raw, due)
		if err != nil || !bytes.Equal(s.Raw, again.Raw) || s.Payer != w.alice.Key || !bytes.Equal(s.Raw[65:], raw[65:]) {
			t.Errorf("signed again: %+v, %v", again, err)
		}
		if got := w.Balance(w.vault()); got != before {
			t.Errorf("before it was sent %d arrived", got-before)
		}
		if err := cl.Try(ctx, s.Signed); err != nil {
			t.Error(err)
		}
		if err := cl.Send(ctx, s.Signed); err != nil {
			t.Fatal(err)
		}
		w.Advance(40)
		if o, err := cl.Resolve(ctx, s.Signed); o != Landed || err != nil {
			t.Errorf("it is %s, %v", o, err)
		}
		claim := Claim{Signature: s.Signature, Owner: w.alice.Key, Amount: price, Memo: due.Memo, Sponsor: fee.Key}
		p, err := cl.Payment(ctx, claim)
		if err != nil || p.Message != s.Message || p.Amount != price {
			t.Errorf("%+v, %v", p, err)
		}
		for _, other := range []settle.Key{{}, w.bob.Key} {
			claim.Sponsor = other
			if _, err := cl.Payment(ctx, claim); !errors.Is(err, ErrMemoSigner) {
				t.Errorf("a memo without a signer, sponsored by %s: %v", other, err)
			}
		}
		before += price
	}
}

// TestSponsorMustBeAlone: with a third signer nobody knows whose the memo is.
func TestSponsorMustBeAlone(t *testing.T) {
	w := newWorld(t)
	w.Advance(40)
	memo := w.memo()
	sig := w.Run(w.wallets(w.bob, w.alice, w.eve), w.transfer(w.alice, price), settletest.Memo(memo),
		settletest.SendSOL(w.eve.Key, w.bob.Key, 1))
	w.Advance(40)
	_, err := w.client(w.mint, "a").Payment(context.Background(), Claim{Signature: sig, Owner: w.alice.Key, Amount: price, Memo: memo, Sponsor: w.bob.Key})
	if !errors.Is(err, ErrMemoSigner) {
		t.Error(err)
	}
}

func TestCoSignRefuses(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	w.Advance(40)
	fee, vaultOwner := w.NewWallet("fee"), w.operator
	account := w.mint.NewAccount("alice's second", w.alice.Key, 10*price)
	table := w.NewTable("table", w.vault(), w.mint.ATA(w.alice.Key), w.mint.Key)
	// replaced is the usual transaction with its transfer replaced.
	replaced := func(in ...settletest.Instruction) func(*settletest.Tx) {
		return func(tx *settletest.Tx) {
			tx.Instructions = append(append(tx.Instructions[:2:2], in...), tx.Instructions[3])
		}
	}
	added := func(in settletest.Instruction) func(*settletest.Tx) {
		return func(tx *settletest.Tx) { tx.Instructions = append(tx.Instructions, in) }
	}
	lighthouseCall := settletest.Instruction{Program: lighthouse, Data: []byte{1}, Accounts: []settletest.Account{{Key: w.alice.Key}}}
	for _, tt := range []struct {
		name   string
		change func(*settletest.Tx)
		bytes  func([]byte) []byte
		want   error
		says   string
	}{
		{name: "as it should be"},
		{name: "with an assertion", change: added(lighthouseCall)},
		{name: "memo signed by the payer", change: func(tx *settletest.Tx) {
			tx.Instructions[3].Accounts = []settletest.Account{{Key: w.alice.Key, Signer: true}}
		}},
		{name: "nothing", bytes: func([]byte) []byte { return nil }, want: ErrPartial, says: "read"},
		{name: "too long", bytes: func(b []byte) []byte { return append(b, make([]byte, MaxPartial)...) }, want: ErrPartial, says: "1232"},
		{name: "followed by a byte", bytes: func(b []byte) []byte { return append(b, 0) }, want: ErrPartial, says: "written"},
		{name: "not signed", bytes: func(b []byte) []byte { clear(b[65:129]); return b }, want: ErrPartial, says: "does not hold"},
		{name: "changed after it was signed", bytes: func(b []byte) []byte { b[len(b)-2] ^= 1; return b }, want: ErrPartial},
		{name: "version 1", change: func(tx *settletest.Tx) { tx.Version = settletest.V1 }, want: ErrPartial, says: "version 1"},
		{name: "a lookup table", change: func(tx *settletest.Tx) { tx.Tables = []settletest.Table{table} }, want: ErrPartial, says: "table"},
		{name: "another fee payer", change: func(tx *settletest.Tx) { tx.Signers[0] = w.bob }, want: ErrPartial, says: "fee payer is"},
		{name: "three signers", change: func(tx *settletest.Tx) {
			tx.Instructions[3].Accounts = []settletest.Account{{Key: w.bob.Key, Signer: true}}
			tx.Signers = append(tx.Signers, w.bob)
		}, want: ErrPartial, says: "3 signers"},
		{name: "paid by the fee payer itself", change: func(tx *settletest.Tx) {
			tx.Instructions[2] = w.mint.TransferChecked(w.mint.ATA(fee.Key), w.vault(), fee.Key, price)
			tx.Signers = tx.Signers[:1]
		}, want: ErrPartial, says: "1 signers"},
		{name: "the operator pays", change: func(tx *settletest.Tx) {
			tx.Instructions[2], tx.Signers[1] = w.transfer(w.operator2, price), w.operator2
		}, want: ErrOperator},
		{name: "the vault's owner pays", change: func(tx *settletest.Tx) {
			tx.Instructions[2], tx.Signers[1] = w.transfer(vaultOwner, price), vaultOwner
		}, want: ErrOperator},
		{name: "less", change: replaced(w.transfer(w.alice, price-1)), want: ErrPartialPay, says: "it pays 99999"},
		{name: "more", change: replaced(w.transfer(w.alice, price+1)), want: ErrPartialPay, says: "it pays 100001"},
		{name: "twice", change: replaced(w.transfer(w.alice, price), w.transfer(w.alice, price)), want: ErrPartialPay, says: "2 transfers"},
		{name: "no transfer", change: func(tx *settletest.Tx) {
			tx.Instructions = []settletest.Instruction{settletest.Memo(string(tx.Instructions[3].Data), w.alice.Key)}
		}, want: ErrPartialPay, says: "0 transfers"},
		{name: "without the mint", change: replaced(w.mint.Transfer(w.mint.ATA(w.alice.Key), w.vault(), w.alice.Key, price)), want: ErrPartialPay, says: "TransferChecked"},
		{name: "another mint", change: replaced(w.other.TransferChecked(w.other.ATA(w.alice.Key), w.vault(), w.alice.Key, price)), want: ErrPartialPay, says: "mint"},
		{name: "to somebody else", change: replaced(w.mint.TransferChecked(w.mint.ATA(w.alice.Key), w.mint.ATA(w.eve.Key), w.alice.Key, price)), want: ErrPartialPay, says: "not the vault"},
		{name: "from another account", change: replaced(w.mint.TransferChecked(account, w.vault(), w.alice.Key, price)), want: ErrPartialPay, says: "associated account"},
		{name: "an approval too", change: added(w.mint.Approve(w.mint.ATA(w.alice.Key), w.eve.Key, w.alice.Key, 1)), want: ErrPartialPay, says: "something else"},
		{name: "SOL of the fee payer", change: added(settletest.SendSOL(fee.Key, w.alice.Key, 5)), want: ErrPartial, says: "fee payer among"},
		{name: "an assertion of the fee payer", change: added(settletest.Instruction{Program: lighthouse, Accounts: []settletest.Account{{Key: fee.Key}}}), want: ErrPartial, says: "fee payer among"},
		{name: "SOL of the payer", change: added(settletest.SendSOL(w.alice.Key, w.eve.Key, 5)), want: ErrPartial, says: "it calls 1111"},
		{name: "another program", change: added(settletest.Instruction{Program: w.forwarder}), want: ErrPartial, says: "it calls"},
		{name: "no memo", change: func(tx *settletest.Tx) { tx.Instructions = tx.Instructions[:3] }, want: ErrPartialPay, says: "0 memos"},
		{name: "two memos", change: func(tx *settletest.Tx) { tx.Instructions = append(tx.Instructions, tx.Instructions[3]) }, want: ErrPartialPay, says: "2 memos"},
		{name: "another memo", change: func(tx *settletest.Tx) { tx.Instructions[3].Data = []byte("kvr1:") }, want: ErrMemo},
		{name: "a memo with a newline", change: func(tx *settletest.Tx) { tx.Instructions[3].Data = append(tx.Instructions[3].Data, '\n') }, want: ErrMemo},
		{name: "many units", change: func(tx *settletest.Tx) { tx.Instructions[0] = budget(2, maxUnits+1, 4) }, want: ErrPartial, says: "400001"},
		{name: "a high price", change: func(tx *settletest.Tx) { tx.Instructions[1] = budget(3, maxPrice+1, 8) }, want: ErrPartial, says: "100001"},
		{name: "a price alone", change: func(tx *settletest.Tx) { tx.Instructions = tx.Instructions[1:] }, want: ErrPartial, says: "no limit of them"},
		{name: "a price twice", change: func(tx *settletest.Tx) { tx.Instructions[0] = tx.Instructions[1] }, want: ErrPartial, says: "twice"},
		{name: "a heap", change: func(tx *settletest.Tx) { tx.Instructions[0] = budget(1, 1<<15, 4) }, want: ErrPartial, says: "another budget"},
		{name: "a short budget", change: func(tx *settletest.Tx) { tx.Instructions[0] = budget(2, 1, 2) }, want: ErrPartial, says: "another budget"},
	} {
		due := Due{price, w.memo()}
		tx := w.x402(fee, due.Memo)
		if tt.change != nil {
			tt.change(&tx)
		}
		raw := w.partial(tx)
		if tt.bytes != nil {
			raw = tt.bytes(raw)
		}
		_, err := w.client(w.mint, "a").CoSign(ctx, fee.Private, raw, due)
		if !errors.Is(err, tt.want) || tt.want != nil && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.says)) {
			t.Errorf("%s: %v, want %v with %q", tt.name, err, tt.want, tt.says)
		}
	}
	if _, err := w.client(w.mint, "a").CoSign(ctx, fee.Private[:5], nil, Due{}); !errors.Is(err, ErrPayout) {
		t.Errorf("half a key: %v", err)
	}
}

// TestTry: what would fail is not sent, and a provider that is down says nothing.
func TestTry(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	w.Advance(40)
	fee, cl, memo := w.NewWallet("fee"), w.client(w.mint, "a", "b"), w.memo()
	tx := w.x402(fee, memo)
	tx.Instructions[2] = w.transfer(w.alice, 1000*price)
	s, err := cl.CoSign(ctx, fee.Private, w.partial(tx), Due{1000 * price, memo})
	if err != nil {
		t.Fatal(err)
	}
	if err := cl.Try(ctx, s.Signed); !errors.Is(err, ErrTried) || !errors.Is(err, ErrInvalid) {
		t.Errorf("more than Alice has: %v", err)
	}
	broken := s.Signed
	broken.Raw = bytes.Clone(s.Raw)
	broken.Raw[5] ^= 1
	if err := cl.Try(ctx, broken); !errors.Is(err, ErrTried) {
		t.Errorf("a wrong signature: %v", err)
	}
	w.Fault(settletest.Fault{Method: "simulateTransaction", Result: []byte(`{"value":{}}`)})
	if err := cl.Try(ctx, s.Signed); !errors.Is(err, ErrMalformed) {
		t.Errorf("no word of success: %v", err)
	}
	w.ClearFaults()
	w.Fault(settletest.Fault{Path: "/a", HTTP: &settletest.HTTPFault{Status: 503}})
	if err := cl.Try(ctx, s.Signed); !errors.Is(err, ErrProvider) || errors.Is(err, ErrInvalid) {
		t.Errorf("a provider that is down: %v", err)
	}
	if _, err := cl.CoSign(ctx, fee.Private, w.partial(w.x402(fee, memo)), Due{price, memo}); !errors.Is(err, ErrProvider) {
		t.Errorf("signed without a chain: %v", err)
	}
}

func TestSlot(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	cl := w.client(w.mint, "a", "b")
	want := w.Advance(100) - 32
	if got, err := cl.Slot(ctx); got != want || err != nil {
		t.Errorf("%d, %v, want %d", got, err, want)
	}
	w.Fault(settletest.Fault{Path: "/b", Method: "getSlot", Result: []byte("5000000")})
	if got, err := cl.Slot(ctx); got != want || err != nil {
		t.Errorf("one is ahead: %d, %v, want %d", got, err, want)
	}
	w.Fault(settletest.Fault{Path: "/a", Drop: true})
	w.Fault(settletest.Fault{Path: "/b", Method: "getSlot", Result: []byte("7")})
	if got, err := cl.Slot(ctx); got != 7 || err != nil {
		t.Errorf("one alone answers: %d, %v", got, err)
	}
	w.Fault(settletest.Fault{Path: "/b", Drop: true})
	if _, err := cl.Slot(ctx); !errors.Is(err, ErrProvider) {
		t.Errorf("none: %v", err)
	}
}

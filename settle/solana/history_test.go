//go:build svm

package solana

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// history is random transactions between three payers, the vault and a mint, of all that
// the token program lets them do, some by inner calls.
type history struct {
	*world
	rand   *rand.Rand
	payers []settletest.Wallet
	extra  map[settle.Key]settle.Key // a second account of each payer
}

func (h *history) payer() settletest.Wallet { return h.payers[h.rand.IntN(len(h.payers))] }

func (h *history) account(owner settle.Key) settle.Key {
	if h.rand.IntN(3) == 0 {
		return h.extra[owner]
	}
	return h.mint.ATA(owner)
}

// step is one instruction and who signs it besides the memo's signer.
func (h *history) step() (settletest.Instruction, settletest.Wallet) {
	a, b := h.payer(), h.payer()
	amount := settle.Amount(1 + h.rand.IntN(2*price))
	switch h.rand.IntN(8) {
	case 0:
		return h.mint.TransferChecked(h.vault(), h.account(b.Key), h.operator.Key, amount), h.operator
	case 1:
		return h.mint.MintTo(h.vault(), amount), h.mint.Authority
	case 2:
		return h.mint.Burn(h.account(a.Key), a.Key, amount), a
	case 3:
		return h.mint.Transfer(h.account(a.Key), h.account(b.Key), a.Key, amount), a
	case 4:
		return h.mint.SetOwner(h.extra[a.Key], a.Key, b.Key), a
	case 5:
		return h.mint.Transfer(h.account(a.Key), h.vault(), a.Key, amount), a
	}
	return h.mint.TransferChecked(h.account(a.Key), h.vault(), a.Key, amount), a
}

// send sends one to three steps with a memo. Some fail, with or without landing.
func (h *history) send() (sig settle.Signature, memo string) {
	var signers []settletest.Wallet
	var in []settletest.Instruction
	for range 1 + h.rand.IntN(3) {
		step, signer := h.step()
		if h.rand.IntN(3) == 0 {
			step = settletest.Forward(h.forwarder, step)
		}
		in, signers = append(in, step), append(signers, signer)
	}
	memo = h.memo()
	writer := signers[0]
	if h.rand.IntN(4) == 0 {
		writer = h.payer()
	}
	in, signers = append(in, settletest.Memo(memo, writer.Key)), append(signers, writer)
	sig, err := h.SendRaw(h.Sign(settletest.Tx{Signers: signers, Instructions: in}), false)
	if err != nil {
		h.t.Fatal(err)
	}
	return sig, memo
}

// TestCreditedIsWithinInflow claims every transaction of random histories for everybody,
// and as a stake too: what is credited is never more than what the vault received, nor,
// of a wallet, than what its accounts paid.
func TestCreditedIsWithinInflow(t *testing.T) {
	w := newWorld(t)
	h := &history{world: w, rand: rand.New(rand.NewPCG(6, 57)), payers: w.wallets(w.alice, w.bob, w.eve), extra: map[settle.Key]settle.Key{}}
	for _, p := range h.payers {
		h.extra[p.Key] = w.mint.NewAccount(fmt.Sprint("second of ", p.Key), p.Key, 50*price)
	}
	type sent struct {
		sig  settle.Signature
		memo string
	}
	var all []sent
	for range 300 {
		sig, memo := h.send()
		all = append(all, sent{sig, memo})
		w.Advance(1)
	}
	w.Advance(40)
	cl := w.client(w.mint, "a")
	credited, landed := 0, 0
	for _, s := range all {
		e, err := cl.fetch(context.Background(), s.sig)
		if errors.Is(err, ErrNotYet) {
			continue // dropped
		}
		if err != nil {
			t.Fatal(err)
		}
		landed++
		winners := 0
		for _, p := range h.payers {
			for _, stake := range []bool{false, true} {
				c := Claim{Signature: s.sig, Owner: p.Key, Amount: 1, Memo: s.memo}
				got, err := cl.verify(context.Background(), c, stake)
				if err != nil {
					continue
				}
				paid, err := e.debit(cl.vault, p.Key)
				if inflow := e.received(cl.vault); err != nil || got.Amount > inflow || got.Amount > paid || e.failed {
					t.Errorf("%s: credited %d of %d received, %d paid, failed %v, %v", s.sig, got.Amount, inflow, paid, e.failed, err)
				}
				if stake {
					winners++
				} else {
					credited++
				}
			}
		}
		if winners > 1 {
			t.Errorf("%s: %d owners are credited for one transaction", s.sig, winners)
		}
	}
	t.Logf("%d transactions, %d landed, %d payments credited", len(all), landed, credited)
	if credited < 20 || landed < 200 {
		t.Errorf("%d credited of %d that landed: the histories show too little", credited, landed)
	}
}

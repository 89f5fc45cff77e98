package govern

import (
	"errors"
	"strings"
	"testing"

	"kvasird/settle"
)

// A withdrawal is taken like a change, once, and changes no parameter.
func TestWithdrawals(t *testing.T) {
	x := newTown(t)
	to := Withdrawal{wallet(9), 1500}
	for name, tt := range map[string]struct {
		w    Withdrawal
		want error
	}{
		"nothing": {Withdrawal{To: wallet(9)}, ErrProposal}, "nobody": {Withdrawal{Amount: 1}, settle.ErrWeakKey}, "neither": {Withdrawal{}, ErrProposal},
		"a key that anybody signs for": {Withdrawal{settle.Wallet{1}, 5}, settle.ErrWeakKey},
	} {
		if _, err := x.g.ProposeWithdrawal(x.now, x.now.Epoch+1, settle.Day, tt.w); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	p, err := x.g.ProposeWithdrawal(x.now, x.now.Epoch+1, settle.Day, to)
	if err != nil {
		t.Fatal(err)
	}
	if text := p.Text(wallet(1)); !strings.Contains(text, "\nwithdraw from the treasury, in base units: 1500\nto: "+wallet(9).String()+"\nfrom epoch: 101\n") {
		t.Errorf("to sign: %q", text)
	}
	both := *p
	both.Changes = []Change{{"fee", 150_000, 200_000}}
	if err := x.activate(&both); !errors.Is(err, ErrProposal) {
		t.Errorf("beside a change: %v", err)
	}
	other := *p
	other.Withdrawal.Amount++
	if _, err := x.g.Activate(x.now, &other, []Signature{sign(t, p, 1, Raw), sign(t, p, 2, Raw)}, x.code()); !errors.Is(err, ErrText) {
		t.Errorf("another amount than was signed: %v", err)
	}
	before, _, ref := x.g.Params(200)
	if err := x.activate(p); err != nil {
		t.Fatal(err)
	}
	if err := x.activate(p); !errors.Is(err, ErrSequence) {
		t.Errorf("again: %v", err)
	}
	for range 2 {
		if all := x.g.Withdrawals(); len(all) != 1 || all[0] != (Granted{to, 1, 101}) {
			t.Errorf("%+v", all)
		}
		if after, sequence, set := x.g.Params(200); after != before || sequence != 1 || set != ref {
			t.Errorf("parameters of change %d, reference of %d", sequence, set)
		}
		x.open()
	}
}

// A withdrawal that is paid late keeps no change from holding before it, and waits for none.
func TestLateWithdrawal(t *testing.T) {
	x := newTown(t)
	withdraw := func(epoch uint64) *Proposal {
		t.Helper()
		p, err := x.g.ProposeWithdrawal(x.now, epoch, settle.Day, Withdrawal{wallet(9), 1500})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	x.must(x.activate(withdraw(100 + maxAhead)))
	x.pass(1)
	x.must(x.change(2, map[string]uint64{"fee": 200_000}))
	x.pass(1)
	x.must(x.activate(withdraw(103)))
	for range 2 {
		if got := x.g.Withdrawals(); len(got) != 2 || got[0].Epoch != 100+maxAhead || got[1].Epoch != 103 {
			t.Errorf("%+v", got)
		}
		for epoch, want := range map[uint64]uint64{102: 150_000, 103: 200_000, 2000: 200_000} {
			if fee := x.fee(epoch); fee != want {
				t.Errorf("epoch %d: a fee of %d, want %d", epoch, fee, want)
			}
		}
		x.open()
	}
	for _, epoch := range []uint64{102, 103 + maxAhead} {
		if _, err := x.g.ProposeWithdrawal(x.now, epoch, settle.Day, Withdrawal{wallet(9), 1500}); !errors.Is(err, ErrEpoch) {
			t.Errorf("in epoch %d: %v", epoch, err)
		}
	}
}

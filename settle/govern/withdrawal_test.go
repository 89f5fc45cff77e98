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

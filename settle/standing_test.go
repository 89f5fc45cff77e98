package settle

import (
	"errors"
	"testing"
)

// TestStanding: who has not been paid, or takes out what is held, is no holder, whatever it stakes.
func TestStanding(t *testing.T) {
	p, w := DefaultParams(), Wallet{1}
	paid := earn(t, p, Bond{}, 1000, 0, 10)
	staked := func(b Bond, amount Amount) Bond {
		b, err := b.Stake(amount)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	unbonded := func(b Bond, amount Amount) Bond {
		b, err := p.Unbond(b, amount, 0)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, tt := range map[string]struct {
		wallet Wallet
		bond   Bond
		epoch  uint64
		pay    Amount // 0: no holder
	}{
		"paid":                         {w, paid, 10, 1000},
		"no wallet":                    {Wallet{}, paid, 10, 0},
		"nothing":                      {w, Bond{}, 10, 0},
		"a stake alone":                {w, staked(Bond{}, 1_000_000), 10, 0},
		"what is held was taken":       {w, unbonded(paid, 1), 10, 0},
		"and paid in again":            {w, staked(unbonded(paid, 1), 1), 10, 1000},
		"paid long ago":                {w, paid, 10_000, 7},
		"less pay asks for less of it": {w, unbonded(paid, 50), 12, 766},
	} {
		got, err := p.Standing(tt.wallet, tt.bond, tt.epoch)
		want := Standing{}
		if tt.pay > 0 {
			want = Standing{w, tt.pay}
		}
		if err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, want)
		}
	}
	if _, err := p.Standing(w, paid, 9); !errors.Is(err, ErrPast) {
		t.Errorf("an epoch before its pay: %v", err)
	}
}

func TestBeside(t *testing.T) {
	one := Standing{Wallet{1}, 8000}
	for pay, want := range map[Amount]bool{0: false, 999: false, 1000: true, 8000: true, 64_007: true, 64_008: false} {
		other := Standing{Wallet{2}, pay}
		if got := other.Beside(one); got != want || one.Beside(other) != want {
			t.Errorf("paid %d beside %d: %v, and %v", pay, one.Pay, got, one.Beside(other))
		}
	}
	if (Standing{Pay: 8000}).Beside(one) || one.Beside(Standing{Pay: 8000}) || (Standing{}).Beside(Standing{}) {
		t.Error("without a wallet it counts")
	}
}

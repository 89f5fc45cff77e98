package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// Test 4: what a request emits is less than its fee.
func TestEmissionBelowFee(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	for range 50_000 {
		p := randomParams(r)
		p.EmissionPPM = 450_000 // the most, whatever the rest allows
		fee := Amount(1 + r.Uint64N(1<<(1+r.IntN(62))))
		e, err := p.Emission(NewReserve(noMax), fee)
		if err != nil || e >= fee {
			t.Fatalf("fee %d: %d, %v", fee, e, err)
		}
	}
}

// Test 8: the reserve is never overdrawn and never rises, over restarts and governance.
func TestReserveIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	p := DefaultParams()
	p.TaperRevenue = 1e9
	const total = Amount(50_000_000_000)
	reserve, emitted := NewReserve(total), Amount(0)
	for i := range 1_000_000 {
		before := reserve
		fee := Amount(1 + r.Uint64N(1<<(1+r.IntN(22))))
		e, err := p.Emission(reserve, fee)
		if err != nil {
			t.Fatal(err)
		}
		pays, _, err := Divide(e, []Share{Whole / 3, Whole / 3, Whole - 2*(Whole/3)})
		if err != nil {
			t.Fatal(err)
		}
		sum := pays[0] + pays[1] + pays[2]
		if reserve, err = reserve.Pay(sum); err != nil {
			t.Fatal(err)
		}
		emitted += sum
		if i%500 == 0 {
			if reserve, err = p.EndEpoch(reserve, Amount(r.Uint64N(4e9))); err != nil {
				t.Fatal(err)
			}
			reserve = Reserve{reserve.Total, reserve.Remaining, reserve.TaperPPM, reserve.Revenue} // a restart
		}
		if reserve.Remaining > before.Remaining || reserve.TaperPPM > before.TaperPPM || reserve.Remaining+emitted != total {
			t.Fatalf("%+v after %+v, emitted %d", reserve, before, emitted)
		}
	}
	if emitted < total/10 || reserve.TaperPPM >= PPM {
		t.Errorf("emitted %d, taper %d: the test saw no emission or no taper", emitted, reserve.TaperPPM)
	}
}

// After fees of 1, 2 and 4 times the total at 30 % it has given a quarter to two thirds,
// as was simulated, with no cliff.
func TestEmissionSchedule(t *testing.T) {
	p := DefaultParams()
	p.EmissionPPM = 300_000
	const total = Amount(10_000_000_000)
	reserve, fees := NewReserve(total), Amount(0)
	want := map[Amount][2]Amount{1: {25, 27}, 2: {44, 46}, 4: {69, 71}}
	for fees < 4*total {
		e, err := p.Emission(reserve, 1_000_000)
		if err != nil {
			t.Fatal(err)
		}
		reserve, _ = reserve.Pay(e)
		fees += 1_000_000
		if w, ok := want[fees/total]; ok && fees%total == 0 {
			if got := (total - reserve.Remaining) * 100 / total; got < w[0] || got > w[1] {
				t.Errorf("after fees of %d × the total: %d %%", fees/total, got)
			}
		}
	}
}

func TestTaperOnlyFalls(t *testing.T) {
	p := DefaultParams()
	p.TaperRevenue = 1000
	r := NewReserve(1e9)
	var err error
	for range 100 {
		if r, err = p.EndEpoch(r, 1e6); err != nil {
			t.Fatal(err)
		}
	}
	low := r.TaperPPM
	for range 10_000 {
		if r, err = p.EndEpoch(r, 0); err != nil {
			t.Fatal(err)
		}
	}
	if low >= PPM/10 || r.TaperPPM != low || r.Revenue > 1000 {
		t.Errorf("taper %d then %d, revenue %d", low, r.TaperPPM, r.Revenue)
	}
}

func TestReserveRefuses(t *testing.T) {
	r := Reserve{Total: 100, Remaining: 40, TaperPPM: PPM}
	if _, err := r.Pay(41); !errors.Is(err, ErrReserve) {
		t.Error(err)
	}
	if _, err := r.Lower(101); !errors.Is(err, ErrReserve) {
		t.Error(err)
	}
	for total, left := range map[Amount]Amount{100: 40, 70: 10, 60: 0, 5: 0, 0: 0} {
		if got, err := r.Lower(total); err != nil || got.Remaining != left || got.Total != total {
			t.Errorf("lowered to %d: %+v, %v", total, got, err)
		}
	}
	if e, err := DefaultParams().Emission(r, 1e6); e != 40 || err != nil {
		t.Errorf("a fee beyond the reserve emits %d, %v", e, err)
	}
	if e, err := DefaultParams().Emission(NewReserve(0), 1e6); e != 0 || err != nil {
		t.Errorf("no reserve: %d, %v", e, err)
	}
}

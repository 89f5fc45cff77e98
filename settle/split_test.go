package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// Test 1 of the economics: value is kept, whatever the request and the parameters.
func TestSplitKeepsValue(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		checkSplit(t, randomParams(r), Amount(r.Uint64N(1<<r.IntN(63)+1)), r.Uint64(), 1+r.IntN(1+r.IntN(1000)), r)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add(uint64(1000), uint64(999), uint64(3), 7)
	f.Add(uint64(1<<63), uint64(1<<63), uint64(9), 1000)
	f.Fuzz(func(t *testing.T, escrow, used, seed uint64, payees int) {
		r := rand.New(rand.NewPCG(seed, 2))
		checkSplit(t, randomParams(r), Amount(escrow>>1), used, 1+(payees&0x3ff)%1000, r)
	})
}

func checkSplit(t *testing.T, p Params, escrow Amount, used uint64, payees int, r *rand.Rand) {
	t.Helper()
	parts := make([]Part, payees)
	for i := range parts {
		parts[i] = Part{Weight: 1 + r.Uint64N(1<<40), PerToken: 1}
	}
	shares, err := PartShares(parts)
	if err != nil {
		t.Fatal(err)
	}
	u := Amount(used % (uint64(escrow) + 1))
	s, err := p.Split(escrow, u, shares)
	if err != nil {
		t.Fatalf("%d of %d: %v", u, escrow, err)
	}
	sum := s.Refund + s.Dust + s.Insurance + s.Burn + s.Treasury
	for _, pay := range s.Pay {
		sum += pay
	}
	if sum != escrow || s.Dust >= Amount(payees) || s.Fee != s.Insurance+s.Burn+s.Treasury || u >= 1 && s.Fee < 1 {
		t.Fatalf("escrow %d, used %d: %+v", escrow, u, s)
	}
}

// The roundings, one by one: a fee of 15.15, then 35, 35 and 30 % of it.
func TestSplitGolden(t *testing.T) {
	p := DefaultParams()
	p.InsurancePPM, p.BurnPPM, p.TreasuryPPM = 350_000, 350_000, 300_000
	s, err := p.Split(110, 101, []Share{Whole / 3, Whole / 3})
	if err != nil || s.Refund != 9 || s.Fee != 16 || s.Insurance != 5 || s.Burn != 6 || s.Treasury != 5 || s.Pay[0] != 28 || s.Pay[1] != 28 || s.Dust != 29 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestSplitRefuses(t *testing.T) {
	p := DefaultParams()
	for _, tt := range []struct {
		escrow, used Amount
		shares       []Share
		want         error
	}{
		{1000, 1001, []Share{Whole}, ErrAboveEscrow},
		{1000, 1000, []Share{Whole, 1}, ErrShares},
		{1000, 1000, []Share{1, Whole}, ErrShares},
		{1000, 1000, []Share{^Share(0), 2}, ErrShares},
		{1000, 1000, []Share{Whole / 2, Whole / 2}, nil},
		{1000, 1000, nil, nil},
		{0, 0, []Share{Whole}, nil},
	} {
		if _, err := p.Split(tt.escrow, tt.used, tt.shares); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
	p.BurnPPM = 400_001
	if _, err := p.Split(100_000_000, 100_000_000, nil); err == nil && p.Validate(false) == nil {
		t.Error("a fee of more than its whole was divided")
	}
}

// Test 3: no fee is rounded away, and dust requests save nothing.
func TestFeeRoundsUp(t *testing.T) {
	for fee := uint64(50_000); fee <= 300_000; fee += 12_345 {
		p := DefaultParams()
		p.FeePPM = fee
		for used := Amount(1); used <= 3000; used++ {
			s, err := p.Split(used, used, []Share{Whole})
			if err != nil || s.Fee < 1 || uint64(s.Fee)*PPM < uint64(used)*fee {
				t.Fatalf("used %d at %d ppm: fee %d, %v", used, fee, s.Fee, err)
			}
		}
		for _, n := range []Amount{2, 3, 7, 1000} {
			whole, _ := p.Split(100_000, 100_000, nil)
			var sum Amount
			for i := range n {
				piece := 100_000*(i+1)/n - 100_000*i/n
				s, err := p.Split(piece, piece, nil)
				if err != nil {
					t.Fatal(err)
				}
				sum += s.Fee
			}
			if sum < whole.Fee {
				t.Errorf("%d pieces pay %d instead of %d", n, sum, whole.Fee)
			}
		}
	}
}

func TestCharge(t *testing.T) {
	for _, tt := range []struct {
		tokens, raw, ref uint64
		want             Amount
		ok               bool
	}{
		{1_000_000, 1e12, 1e9, 1e9, true}, // one fiat unit per 10⁶ tokens
		{1, 1e12, 1e9, 1000, true}, {1, 1e6, 1, 1, true}, {0, 1e12, 1e9, 0, true}, {1, 1e12, 1_000_001, 2, true},
		{1, 0, 1, 0, false}, {1, 1, 0, 0, false}, {1 << 63, 1e17, 1e17, 0, false}, {4_611_686_018_427_387_904, 1e18, 1, 1 << 62, true},
		{4_611_686_018_427_387_905, 1e18, 1, 0, false},
	} {
		got, err := Charge(tt.tokens, tt.raw, tt.ref)
		if got != tt.want || (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrCharge) {
			t.Errorf("%+v: %d, %v", tt, got, err)
		}
	}
}

package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// coalition plays n requests in which one party pays, works, audits and claims, with or
// without the treasury, and returns its balance in the end. capped is the premium rule.
func coalition(t *testing.T, r *rand.Rand, p Params, treasury, capped bool) (net int64, some bool) {
	t.Helper()
	reserve, pool := NewReserve(noMax), Amount(0)
	wallets := make([]Premiums, 1+r.IntN(3))
	var claims []Amount
	day := uint64(100)
	for range 20 {
		day += r.Uint64N(12)
		used := Amount(1 + r.Uint64N(1<<(1+r.IntN(30))))
		escrow := used + Amount(r.Uint64N(1000))
		s, err := p.Split(escrow, used, []Share{Whole / 2, Whole / 2})
		if err != nil {
			t.Fatal(err)
		}
		some = some || used >= MinQuote
		e, err := p.Emission(reserve, s.Fee)
		if err != nil {
			t.Fatal(err)
		}
		pays, _, err := Divide(e, []Share{Whole})
		if err != nil {
			t.Fatal(err)
		}
		net += int64(s.Refund+s.Pay[0]+s.Pay[1]+pays[0]) - int64(escrow)
		if treasury {
			net += int64(s.Treasury)
		}
		pool += s.Insurance + s.Dust
		w := &wallets[r.IntN(len(wallets))]
		if *w, err = w.Pay(day, s.Insurance); err != nil {
			t.Fatal(err)
		}
		if capped && r.IntN(2) == 0 {
			continue
		}
		ask := used - s.Fee // what CheckClaim allows
		if err := p.CheckClaim(Insured{Used: used, Fee: s.Fee, Delivered: true}, Wallet{}, max(ask, 1), 0); ask > 0 && err != nil {
			t.Fatal(err)
		}
		if capped {
			left, err := w.Left(day, p.ClaimsPPM)
			if err != nil {
				t.Fatal(err)
			}
			ask = min(ask, left)
			if *w, err = w.Claim(day, p.ClaimsPPM, ask); err != nil {
				t.Fatal(err)
			}
		}
		claims = append(claims, ask)
	}
	pool += noMax / 4 // others' premiums: the pool pays whatever is approved
	paid, err := p.PayClaims(pool, claims)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range paid {
		net += int64(c)
	}
	return net, some
}

// Test 5: whoever pays itself loses, with the treasury too, at every set of parameters
// within the bounds.
func TestCoalitionLoses(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 9000 {
		p := randomParams(r)
		for _, treasury := range []bool{false, true} {
			if net, some := coalition(t, r, p, treasury, true); net >= 0 && some || net > 0 {
				t.Fatalf("treasury %v: net %d with %+v", treasury, net, p)
			}
		}
	}
}

// Test 6: without the premium cap, or with parameters that Validate refuses, the same
// test fails.
func TestCoalitionWinsWithoutTheRules(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	wins := 0
	for range 500 {
		if net, _ := coalition(t, r, DefaultParams(), false, false); net > 0 {
			wins++
		}
	}
	if wins < 500 {
		t.Errorf("without the cap %d of 500 coalitions win", wins)
	}
	p := DefaultParams()
	p.InsurancePPM, p.TreasuryPPM, p.EmissionPPM, p.ClaimsPPM = 500_000, 500_000, 450_000, PPM
	if err := p.Validate(false); !errors.Is(err, ErrCoalition) {
		t.Fatal(err)
	}
	wins = 0
	for range 500 {
		if net, _ := coalition(t, r, p, true, true); net > 0 {
			wins++
		}
	}
	if wins < 350 {
		t.Errorf("with refused parameters %d of 500 coalitions win", wins)
	}
}

// Test 22: fraudsters, bad answers and an outage do not empty the pool, and the
// fraudsters get at most their share of what they paid.
func TestPoolOutlivesFraud(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 22))
	p := DefaultParams()
	const wallets = 100 // the first 20 claim everything
	var premiums [wallets]Premiums
	var paidIn, paidOut [wallets]Amount
	pool, scarce := Amount(0), false
	for epoch := range uint64(24 * 60) {
		day, outage := epoch/24, epoch/24 == 40
		var claims []Amount
		var who []int
		for range 20 {
			w := r.IntN(wallets)
			used := Amount(1000 + r.Uint64N(1e6))
			s, err := p.Split(used, used, []Share{Whole})
			if err != nil {
				t.Fatal(err)
			}
			pool += s.Insurance + s.Dust
			paidIn[w] += s.Insurance
			if premiums[w], err = premiums[w].Pay(day, s.Insurance); err != nil {
				t.Fatal(err)
			}
			if w >= 20 && r.IntN(100) >= 5 && !(outage && r.IntN(100) < 30) {
				continue
			}
			left, _ := premiums[w].Left(day, p.ClaimsPPM)
			ask := min(left, used-s.Fee)
			if premiums[w], err = premiums[w].Claim(day, p.ClaimsPPM, ask); err != nil {
				t.Fatal(err)
			}
			claims, who = append(claims, ask), append(who, w)
		}
		paid, err := p.PayClaims(pool, claims)
		if err != nil {
			t.Fatal(err)
		}
		for i, c := range paid {
			if c > claims[i] || c > pool {
				t.Fatalf("paid %d of %d from %d", c, claims[i], pool)
			}
			scarce = scarce || c < claims[i]
			pool -= c
			paidOut[who[i]] += c
		}
	}
	for w := range wallets {
		if most := paidIn[w] / 2; paidOut[w] > most {
			t.Errorf("wallet %d paid in %d and got %d", w, paidIn[w], paidOut[w])
		}
	}
	if !scarce {
		t.Error("no claim was paid in part: the test is too easy")
	}
}

func TestPayClaims(t *testing.T) {
	p := DefaultParams() // a tenth per epoch
	for _, tt := range []struct {
		pool         Amount
		claims, want []Amount
	}{
		{1000, []Amount{60, 40}, []Amount{60, 40}},
		{1000, []Amount{60, 41}, []Amount{59, 40}},
		{1000, []Amount{600, 400}, []Amount{60, 40}},
		{9, []Amount{1}, []Amount{0}},
		{0, []Amount{5, 5}, []Amount{0, 0}},
		{1000, nil, nil},
	} {
		got, err := p.PayClaims(tt.pool, tt.claims)
		if err != nil || len(got) != len(tt.want) {
			t.Fatal(got, err)
		}
		for i := range got {
			if got[i] != tt.want[i] {
				t.Errorf("%v of %d: %v", tt.claims, tt.pool, got)
			}
		}
	}
	if _, err := p.PayClaims(1, []Amount{1 << 63, 1 << 63}); err == nil {
		t.Error("claims that wrap were paid")
	}
}

func TestPremiumsAge(t *testing.T) {
	var p Premiums
	var err error
	pay := func(day uint64, a Amount) {
		t.Helper()
		if p, err = p.Pay(day, a); err != nil {
			t.Fatal(err)
		}
	}
	left := func(day uint64, want Amount) {
		t.Helper()
		if got, err := p.Left(day, 500_000); got != want || err != nil {
			t.Errorf("day %d: %d left, want %d; %v", day, got, want, err)
		}
	}
	pay(10, 100)
	left(10, 50)
	left(39, 50)
	left(40, 0)
	if p, err = p.Claim(12, 500_000, 30); err != nil {
		t.Fatal(err)
	}
	left(12, 20)
	pay(30, 40)
	left(39, 40)
	left(41, 0) // the first premium is gone, its claim not yet: 20 − 30
	left(42, 20)
	left(1000, 0)
	if _, err := p.Claim(39, 500_000, 41); !errors.Is(err, ErrPremiumCap) {
		t.Error(err)
	}
	if _, err := p.Pay(29, 1); !errors.Is(err, ErrPast) {
		t.Error(err)
	}
}

func TestCheckClaim(t *testing.T) {
	p := DefaultParams()
	in := Insured{Payer: Wallet{1}, Used: 1000, Fee: 150, SettledAt: 5000, Delivered: true}
	claimed, failed := in, in
	claimed.Claimed, failed.Delivered = true, false
	for _, tt := range []struct {
		in     Insured
		wallet Wallet
		amount Amount
		now    uint64
		want   error
	}{
		{in, Wallet{1}, 850, 5000 + Day, nil}, {in, Wallet{1}, 850, 5001 + Day, ErrClaimLate}, {in, Wallet{1}, 1, 4999, ErrPast},
		{in, Wallet{1}, 851, 5000, ErrClaimAmount}, {in, Wallet{1}, 0, 5000, ErrClaimAmount}, {in, Wallet{2}, 1, 5000, ErrClaimWallet},
		{claimed, Wallet{1}, 1, 5000, ErrClaimTwice}, {failed, Wallet{1}, 1, 5000, ErrClaimState},
	} {
		if err := p.CheckClaim(tt.in, tt.wallet, tt.amount, tt.now); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
	back := in
	back.Back = 849
	if err := p.CheckClaim(back, Wallet{1}, 2, 5000); !errors.Is(err, ErrClaimAmount) {
		t.Errorf("more than what did not come back yet: %v", err)
	}
	if back.Back = 1 << 63; back.Loss() != 0 || in.Loss() != 850 {
		t.Errorf("a loss of %d and %d", back.Loss(), in.Loss())
	}
	if due := p.ClaimDue(in); due != 5000+72*Hour {
		t.Errorf("due at %d", due)
	}
}

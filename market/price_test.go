package market

import (
	"errors"
	"math"
	mathbig "math/big"
	"testing"

	"kvasird/settle"
)

// hourly are the defaults of economics: an hour, a mean of 72 hours, 0.2 %, 1 %, 0.65.
var hourly = PriceRules{EpochSeconds: 3600, EMASeconds: 72 * 3600, GainPPB: 2_000_000, StepPPB: 10_000_000,
	TargetPPB: 650_000_000, Floor: 325_000_000_000, Ceiling: 3_200_000_000_000}

func (r PriceRules) next(t *testing.T, s PriceState, l Load) PriceState {
	t.Helper()
	n, err := r.Next(s, s.Epoch+1, l)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestPriceAmount(t *testing.T) {
	const unit = 1_000_000_000_000 // one fiat unit for 10⁶ tokens
	for _, tt := range []struct {
		p      Price
		tokens uint64
		ref    settle.Amount
		want   settle.Amount
	}{
		{unit, 1_000_000, 5_000_000, 5_000_000}, {unit, 0, 5_000_000, 0}, {unit, 1, 5_000_000, 5},
		{unit + 1, 1, 5_000_000, 6}, // up, whatever remains
		{MinFloor, 1, 1, 1},         // never nothing
	} {
		if got, err := tt.p.Amount(tt.tokens, tt.ref); got != tt.want || err != nil {
			t.Errorf("%d tokens at %d, %d: %d, %v, want %d", tt.tokens, tt.p, tt.ref, got, err, tt.want)
		}
	}
	for _, tokens := range []uint64{math.MaxUint64, math.MaxUint64 / 2} {
		if got, err := MaxPrice.Amount(tokens, 1<<62); !errors.Is(err, settle.ErrCharge) {
			t.Errorf("%d tokens at the highest price: %d, %v", tokens, got, err)
		}
	}
}

// bigExp is e^y in ppb, to 60 digits, floored.
func bigExp(y int64) *mathbig.Int {
	one := new(mathbig.Int).Exp(mathbig.NewInt(10), mathbig.NewInt(60), nil)
	sum, term := new(mathbig.Int).Set(one), new(mathbig.Int).Set(one)
	for i := int64(1); i < 40; i++ {
		term.Mul(term, mathbig.NewInt(y)).Quo(term, mathbig.NewInt(ppb*i))
		sum.Add(sum, term)
	}
	return sum.Quo(sum.Mul(sum, mathbig.NewInt(ppb)), one)
}

// Economics, test 13.
func TestExp(t *testing.T) {
	var before uint64
	for y := int64(-maxStep); y <= maxStep; y += 4999 {
		got := expPPB(y)
		if d := int64(got) - bigExp(y).Int64(); d > 300 || d < -300 {
			t.Fatalf("e^%d is %d ppb off", y, d)
		}
		if got < before {
			t.Fatalf("e^%d is %d, less than %d a little before", y, got, before)
		}
		before = got
	}
	for y := int64(-20_000); y < 20_000; y++ {
		if expPPB(y+1) < expPPB(y) {
			t.Fatalf("e^%d > e^%d", y, y+1)
		}
	}
	if expPPB(0) != ppb || expPPB(1) <= ppb || expPPB(-1) >= ppb {
		t.Error("the smallest step does not move")
	}
}

// Economics, test 9: no price of the whole band holds the market.
func TestNoPriceIsATrap(t *testing.T) {
	r := hourly
	r.Floor, r.Ceiling = MinFloor, 100*MinFloor
	idle, full := Load{Capacity: 1000, Heard: true}, Load{Counted: 1000, Capacity: 1000, Heard: true}
	walk := func(s PriceState, l Load, up bool, end Price) {
		t.Helper()
		for s.Price != end {
			n := r.next(t, s, l)
			if up != (n.Price > s.Price) {
				t.Fatalf("from %d to %d, up %v", s.Price, n.Price, up)
			}
			s = n
		}
	}
	up := r.Start(0, r.Floor)
	up.Smooth = ppb << smoothBits
	walk(up, full, true, r.Ceiling)
	down := r.Start(0, r.Ceiling)
	down.Smooth = 0
	walk(down, idle, false, r.Floor)
	r.GainPPB, r.StepPPB = 3, 3 // the slowest that moves at all
	walk(up, full, true, r.Floor+1000)
	down.Price = MinFloor + 1000
	walk(down, idle, false, MinFloor)
}

// Economics, test 11.
func TestEpochsAreAppliedOnceAndInOrder(t *testing.T) {
	busy := Load{Counted: 900, Capacity: 1000, Heard: true}
	s := hourly.next(t, hourly.Start(4, 1_000_000_000_000), busy)
	for _, e := range []uint64{0, 4, 5} {
		if n, err := hourly.Next(s, e, busy); !errors.Is(err, ErrEpochOrder) || n != s {
			t.Errorf("epoch %d after 5: %+v, %v", e, n, err)
		}
	}
	near, _ := hourly.Next(s, 6, busy)
	far, err := hourly.Next(s, 600, busy)
	if near.Epoch, far.Epoch = 0, 0; near != far || err != nil {
		t.Errorf("after a gap: %+v, at once: %+v, %v", far, near, err)
	}
}

// Economics, test 12.
func TestEpochsWithoutData(t *testing.T) {
	s := hourly.next(t, hourly.Start(0, 1_000_000_000_000), Load{Counted: 1, Capacity: 1000, Heard: true})
	for _, l := range []Load{{}, {Counted: 500, Heard: true}, {Counted: 500, Capacity: 1000}, {Counted: math.MaxUint64, Heard: true}} {
		if n := hourly.next(t, s, l); n.Price != s.Price || n.Smooth != s.Smooth || !n.NoData {
			t.Errorf("%+v: %+v after %+v", l, n, s)
		}
	}
	for _, l := range []Load{{math.MaxUint64, 1, true}, {math.MaxUint64, math.MaxUint64, true}, {1, math.MaxUint64, true}, {0, math.MaxUint64, true}} {
		n := hourly.next(t, s, l)
		if n.NoData || n.Smooth > ppb<<smoothBits || n.Price < s.Price.moved(-10_000_000) || n.Price > s.Price.moved(10_000_000) {
			t.Errorf("%+v: %+v", l, n)
		}
	}
	idle := Load{Capacity: 1000, Heard: true} // canaries ran, and it is too dear for everybody
	if n := hourly.next(t, s, idle); n.NoData || n.Smooth >= s.Smooth {
		t.Errorf("nobody paid: %+v after %+v", n, s)
	}
}

func TestTheBandMovesThePriceByAStep(t *testing.T) {
	s, r := hourly.Start(0, 1_000_000_000_000), hourly
	r.Ceiling = 500_000_000_000
	for s.Price != r.Ceiling {
		want := max(s.Price*990_049/1_000_000, r.Ceiling) // e^-0.01
		if s = r.next(t, s, Load{}); s.Price < want || s.Price > want+want/100_000 {
			t.Fatalf("epoch %d: %d, %d was due", s.Epoch, s.Price, want)
		}
	}
	if s.Epoch != 70 { // ln 2 / 0.01, rounded up
		t.Errorf("halved in %d epochs", s.Epoch)
	}
	r.Floor, r.Ceiling = 600_000_000_000, 700_000_000_000
	s = r.next(t, s, Load{})
	if want := Price(500_000_000_000).moved(10_000_000); s.Price != want {
		t.Errorf("a floor above moved it to %d, want %d", s.Price, want)
	}
}

func TestRulesOfParameters(t *testing.T) {
	p := settle.DefaultParams()
	r := RulesOf(p)
	if err := r.Check(); err != nil {
		t.Error(err)
	}
	if want := (PriceRules{p.EpochSeconds, p.EMASeconds, p.GainPPB, p.StepPPB, p.TargetPPB, Price(p.FloorRaw), Price(p.CeilingRaw)}); r != want {
		t.Errorf("got %+v, want %+v", r, want)
	}
	for _, f := range settle.Fields() { // whatever governance allows, the arithmetic can take
		for _, devnet := range []bool{false, true} {
			low, high := f.Bounds(devnet)
			for _, v := range []uint64{low, high} {
				q := p
				if f.Set(&q, v); q.Validate(devnet) == nil && RulesOf(q).Check() != nil {
					t.Errorf("%s = %d: %v", f.Name, v, RulesOf(q).Check())
				}
			}
		}
	}
	r.EMASeconds = 1 // shorter than an epoch: no smoothing
	if n := r.next(t, r.Start(0, 1e11), busy); n.Smooth != 900_000_000<<smoothBits {
		t.Errorf("smoothed to %d", n.Smooth>>smoothBits)
	}
}

func TestPriceRulesAreChecked(t *testing.T) {
	for name, change := range map[string]func(*PriceRules){
		"no epoch":            func(r *PriceRules) { r.EpochSeconds = 0 },
		"an endless epoch":    func(r *PriceRules) { r.EpochSeconds = math.MaxUint64 },
		"an endless mean":     func(r *PriceRules) { r.EMASeconds = math.MaxUint64 },
		"no mean":             func(r *PriceRules) { r.EMASeconds = 0 },
		"gain above the step": func(r *PriceRules) { r.GainPPB = r.StepPPB + 1 },
		"step above 5 %":      func(r *PriceRules) { r.StepPPB = maxStep + 1 },
		"target above 1":      func(r *PriceRules) { r.TargetPPB = ppb + 1 },
		"floor of dust":       func(r *PriceRules) { r.Floor = MinFloor - 1 },
		"floor above ceiling": func(r *PriceRules) { r.Floor = r.Ceiling + 1 },
		"endless ceiling":     func(r *PriceRules) { r.Ceiling = MaxPrice + 1 },
	} {
		r := hourly
		change(&r)
		if _, err := r.Next(hourly.Start(0, 1e12), 1, Load{}); !errors.Is(err, ErrPriceRules) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, s := range []PriceState{{Price: MinFloor - 1}, {Price: MaxPrice + 1}, {Price: MinFloor, Smooth: ppb<<smoothBits + 1}} {
		if _, err := hourly.Next(s, 1, Load{}); !errors.Is(err, ErrPriceState) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

func TestReference(t *testing.T) {
	const day = 24 * 3600
	r := Reference{PerFiat: 1000, Set: 100 * day}
	for _, tt := range []struct {
		now  uint64
		warn bool
		want error
	}{
		{100 * day, false, nil}, {107*day - 1, false, nil}, {107 * day, true, nil}, {130*day - 1, true, nil},
		{130 * day, true, ErrRefStale}, {math.MaxUint64, true, ErrRefStale}, {100*day - 1, true, ErrRefFuture},
	} {
		if warn, err := r.At(tt.now); warn != tt.warn || !errors.Is(err, tt.want) {
			t.Errorf("at %d: %v, %v", tt.now, warn, err)
		}
	}
	if _, err := (Reference{}).At(5); !errors.Is(err, ErrRefMissing) {
		t.Errorf("none: %v", err)
	}
	for name, tt := range map[string]struct {
		history []Reference
		next    Reference
		want    error
	}{
		"first":                      {nil, Reference{1, 0}, nil},
		"doubles":                    {[]Reference{{1000, 5}}, Reference{2000, 6}, nil},
		"more than doubles":          {[]Reference{{1000, 5}}, Reference{2001, 6}, ErrRefJump},
		"halves":                     {[]Reference{{1001, 5}}, Reference{501, 6}, nil},
		"more than halves":           {[]Reference{{1001, 5}}, Reference{500, 6}, ErrRefJump},
		"doubles twice in a day":     {[]Reference{{1000, 0}, {2000, day}}, Reference{4000, 2*day - 1}, ErrRefJump},
		"doubles twice in two days":  {[]Reference{{1000, 0}, {2000, day}}, Reference{4000, 2 * day}, nil},
		"up and down":                {[]Reference{{1000, 0}, {2000, day}}, Reference{900, day + 1}, ErrRefJump},
		"what held before the span":  {[]Reference{{9000, 0}, {1000, 5}, {1000, 6}}, Reference{2000, day + 6}, nil},
		"what held into the span":    {[]Reference{{1000, 5}, {2000, 6}}, Reference{4000, day + 5}, ErrRefJump},
		"zero":                       {[]Reference{{1, 5}}, Reference{0, 6}, ErrRefMissing},
		"at the same time":           {[]Reference{{1000, 5}}, Reference{1001, 5}, ErrRefOrder},
		"earlier":                    {[]Reference{{1000, 5}}, Reference{1001, 4}, ErrRefOrder},
		"beyond what doubling holds": {[]Reference{{1 << 63, 5}}, Reference{math.MaxUint64, 6}, nil},
	} {
		if err := Follow(tt.history, tt.next); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func earn(t *testing.T, p Params, b Bond, pay Amount, now, epoch uint64) Bond {
	t.Helper()
	next, bonded, vesting, err := p.Earn(b, pay, now, epoch)
	if err != nil || bonded+vesting != pay {
		t.Fatal(bonded, vesting, err)
	}
	return next
}

// The bond fills from half of the pay, and then all of it vests after the audits.
func TestHeldPayFillsTheBond(t *testing.T) {
	p := DefaultParams()
	var b Bond
	full, free := 0, Amount(0)
	for epoch := range uint64(200) {
		now := epoch * Hour
		var vested Amount
		b, vested = b.Vest(now)
		free += vested
		before := b.Bonded
		b = earn(t, p, b, 1000, now, epoch)
		if b.Bonded > b.Target() {
			t.Fatalf("epoch %d: bond %d above its target %d", epoch, b.Bonded, b.Target())
		}
		if b.Bonded == before {
			full++
		}
		if sum := b.Bonded + total(b.Vesting) + free; sum != Amount(1000*(epoch+1)) {
			t.Fatalf("epoch %d: %d", epoch, sum)
		}
	}
	if b.Bonded < 7000 || b.Bonded > 8000 || full < 100 || len(b.Vesting) != 72 {
		t.Errorf("bond %d, full in %d of 200 epochs, %d pays vest", b.Bonded, full, len(b.Vesting))
	}
	idle, err := p.AtEpoch(b, 1<<60) // a long absence ends, and the target with it
	if err != nil || idle.Target() > Amount(p.BondEpochs) || idle.Bonded != b.Bonded {
		t.Errorf("after years: target %d, bond %d, %v", idle.Target(), idle.Bonded, err)
	}
	if _, err := p.AtEpoch(b, 3); !errors.Is(err, ErrPast) {
		t.Error(err)
	}
}

// Test 25: who cheats at an audit rate of 1/32 loses what it staked, and earns nothing.
func TestCheatingDoesNotPay(t *testing.T) {
	r := rand.New(rand.NewPCG(25, 25))
	p := DefaultParams()
	const stake = 1_000_000
	for _, cheats := range []bool{true, false} {
		b, err := Bond{}.Stake(stake)
		if err != nil {
			t.Fatal(err)
		}
		net, caught := -int64(stake), 0
		for i := range uint64(100_000) {
			now := i * 600
			var vested Amount
			b, vested = b.Vest(now)
			net += int64(vested)
			if b, _, _, err = p.Earn(b, 1000, now, now/Hour); err != nil {
				t.Fatal(err)
			}
			if cheats && r.Uint64N(p.AuditInterval) == 0 {
				caught++
				b, _ = b.Slash(now/Hour, p.PenaltyOf(1000))
			}
		}
		net += int64(b.Bonded + total(b.Vesting))
		if cheats && (net >= 0 || caught < 2800) || !cheats && net != 100_000_000 {
			t.Errorf("cheats %v: caught %d times, net %d", cheats, caught, net)
		}
	}
}

func TestUnbonding(t *testing.T) {
	p := DefaultParams()
	b, err := Bond{}.Stake(1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []Amount{0, 1001, ^Amount(0)} {
		if _, err := p.Unbond(b, bad, 0); !errors.Is(err, ErrBonded) {
			t.Errorf("%d: %v", bad, err)
		}
	}
	b, err = p.Unbond(b, 600, 100)
	if err != nil || b.Bonded != 400 {
		t.Fatal(b, err)
	}
	if got, out := b.Unbonded(99 + 7*Day); out != 0 || len(got.Unbonding) != 1 {
		t.Error("it left before its time")
	}
	// During an audit it can still be taken.
	slashed, s := b.Slash(1, 900)
	if s != (Slash{0, 400, 500}) || total(slashed.Unbonding) != 100 {
		t.Errorf("%+v, left %+v", s, slashed)
	}
	if got, out := b.Unbonded(100 + 7*Day); out != 600 || len(got.Unbonding) != 0 {
		t.Errorf("%d left", out)
	}
	// Fifty withdrawals of one bond give it once, and a flood is refused.
	b = Bond{Bonded: 1000}
	won := 0
	for range 50 {
		if next, err := p.Unbond(b, 1000, 0); err == nil {
			b = next
			won++
		}
	}
	if won != 1 {
		t.Errorf("%d of 50 withdrawals won", won)
	}
	b = Bond{Bonded: 1000}
	for i := range MaxUnbonding + 1 {
		if b, err = p.Unbond(b, 1, 0); (i == MaxUnbonding) != errors.Is(err, ErrTooManyLeave) {
			t.Fatalf("withdrawal %d: %v", i, err)
		}
	}
}

func TestSlashOrder(t *testing.T) {
	p := DefaultParams()
	b := Bond{Bonded: 50, Recent: 50, Vesting: []Pending{{100, 9, 1}, {100, 9, 2}}, Unbonding: []Pending{{30, 9, 0}}}
	for _, tt := range []struct {
		amount Amount
		want   Slash
	}{
		{0, Slash{}}, {80, Slash{80, 0, 0}}, {120, Slash{100, 20, 0}}, {170, Slash{100, 50, 20}}, {200, Slash{120, 50, 30}},
		{280, Slash{200, 50, 30}}, {p.PenaltyOf(1 << 60), Slash{200, 50, 30}},
	} {
		next, s := b.Slash(2, tt.amount)
		if s != tt.want || next.Bonded+total(next.Vesting)+total(next.Unbonding)+s.Total() != 280 {
			t.Errorf("%d: %+v, left %+v", tt.amount, s, next)
		}
	}
	if len(b.Vesting) != 2 || b.Vesting[0].Amount != 100 {
		t.Error("a slash changed the old record")
	}
}

// A culprit bears the penalty, or what the payer lost when that is more.
func TestPenalise(t *testing.T) {
	p := DefaultParams()
	b := Bond{Bonded: 10_000, Vesting: []Pending{{300, 9, 2}}}
	for _, tt := range []struct{ reward, loss, want Amount }{
		{0, 0, 0}, {2, 5, 2 * 64}, {2, 500, 500}, {0, 70, 70}, {1000, 5, 10_300}, {1, 20_000, 10_300},
	} {
		next, s := p.Penalise(b, 2, tt.reward, tt.loss)
		if s.Total() != tt.want || next.Bonded+total(next.Vesting) != 10_300-tt.want {
			t.Errorf("reward %d, loss %d: %+v", tt.reward, tt.loss, s)
		}
	}
}

func TestSplitSlash(t *testing.T) {
	for _, tt := range [][5]Amount{ // taken, price → payer, reporter, pool
		{1000, 300, 300, 100, 600}, {1000, 0, 0, 100, 900}, {1000, 950, 950, 50, 0}, {1000, 5000, 1000, 0, 0}, {9, 0, 0, 0, 9}, {},
	} {
		payer, reporter, pool := SplitSlash(tt[0], tt[1])
		if payer != tt[2] || reporter != tt[3] || pool != tt[4] {
			t.Errorf("%v: %d %d %d", tt, payer, reporter, pool)
		}
		if uint64(reporter)*PPM > uint64(tt[0])*ReporterRewardPPM {
			t.Errorf("%v: who reports itself has %d back", tt, reporter)
		}
	}
}

func TestVestingIsBounded(t *testing.T) {
	p := DefaultParams()
	var b Bond
	for i := range uint64(2 * (MaxVesting + 100)) {
		b = earn(t, p, b, 10_000, i, i/2)
	}
	if len(b.Vesting) != MaxVesting || b.Bonded+total(b.Vesting) != 20_000*(MaxVesting+100) {
		t.Errorf("%d pending, %d in all", len(b.Vesting), b.Bonded+total(b.Vesting))
	}
	if first := b.Vesting[0]; first.Free != 1+p.AuditSeconds || first.Epoch != 0 {
		t.Errorf("the first epoch's pay: %+v", first)
	}
	if last := b.Vesting[MaxVesting-1]; last.Free != 2*(MaxVesting+100)-1+p.AuditSeconds {
		t.Errorf("what joined the last pay is free at %d", last.Free)
	}
}

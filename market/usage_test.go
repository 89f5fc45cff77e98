package market

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"testing"

	"kvasird/settle"
)

func payer(n byte) settle.Wallet { return settle.Wallet{n} }

func closed(t *testing.T, u *Usage, epoch uint64, announced map[string]uint64) Load {
	t.Helper()
	l, err := u.Close(epoch, hourly, announced)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Economics, test 20: what is announced and not shown is no capacity.
func TestAnnouncedCapacityDoesNotCount(t *testing.T) {
	u := NewUsage(0)
	for e := uint64(1); e <= 30; e++ {
		if err := u.Count(e, Work{payer(1), 1_000_000, ppb, 3}); err != nil {
			t.Fatal(err)
		}
		if e <= 2 {
			u.Show(e, "a", 1_000_000) // 1,000 tokens per second
			u.Show(e, "b", 500_000)
		}
		announced := map[string]uint64{"a": 1_000_000, "b": 400_000, "boaster": 1 << 60}
		if e > 10 {
			announced["a"] = 10_000_000 // ten times what it can
		}
		want := Load{Counted: 1_000_000_000, Capacity: 1_400_000 * 3600, Heard: true}
		if e > 25 { // what was shown in epoch 2 is older than 24 h
			want.Capacity, want.Counted = 0, 0
		}
		if want.Counted > want.Capacity/5 {
			want.Counted = want.Capacity / 5
		}
		if got := closed(t, u, e, announced); got != want {
			t.Fatalf("epoch %d: %+v, want %+v", e, got, want)
		}
	}
	if len(u.shown)+len(u.work)+len(u.heard)+u.payers != 0 {
		t.Errorf("old epochs are kept: %+v", u)
	}
}

func TestWhatCountsOfWork(t *testing.T) {
	u := NewUsage(0)
	u.Show(1, "a", 1000) // 3,600,000 in an epoch, of which a wallet counts with 720,000
	for _, w := range []Work{
		{payer(1), 100, ppb, 3},       // 100,000
		{payer(1), 100, ppb / 2, 9},   // 50,000
		{payer(1), 100, 1_000_001, 3}, // 100, rounded down
		{payer(2), 5000, ppb, 2},      // too few to draw from
		{payer(3), 5000, ppb, 0},      // the payer chose
		{payer(4), 5000, ppb, 3},      // more than a wallet's part
		{payer(5), 5000, ppb, 3},
	} {
		if err := u.Count(1, w); err != nil {
			t.Fatalf("%+v: %v", w, err)
		}
	}
	want := Load{Counted: 150_100 + 2*720_000, Capacity: 3_600_000, Heard: true}
	if got := closed(t, u, 1, map[string]uint64{"a": 5000}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// Economics, test 21, first half: load that a payer sends to its own nodes counts nothing, but it
// is data.
func TestSelfRoutedWork(t *testing.T) {
	u := NewUsage(0)
	for i := range byte(200) {
		u.Count(1, Work{payer(i), 1 << 30, ppb, MinDraw - 1})
	}
	u.Show(1, "a", 1000)
	if got := closed(t, u, 1, map[string]uint64{"a": 5000}); got != (Load{0, 3_600_000, true}) {
		t.Errorf("got %+v", got)
	}
	if got := closed(t, u, 2, map[string]uint64{"a": 5000}); got != (Load{0, 3_600_000, false}) {
		t.Errorf("a silent epoch: %+v", got)
	}
}

// Economics, test 10: the order in which receipts come changes nothing.
func TestLoadDoesNotDependOnOrder(t *testing.T) {
	type event struct {
		epoch uint64
		node  string
		rate  uint64
		work  Work
	}
	rng := rand.New(rand.NewSource(7))
	var events []event
	announced := map[string]uint64{}
	for i := range 600 {
		node := fmt.Sprint("n", i%17)
		announced[node] = 1 << uint(i%40)
		tokens := rng.Uint64() >> uint(20+rng.Intn(40))
		events = append(events, event{1 + uint64(rng.Intn(3)), node, rng.Uint64() >> uint(rng.Intn(50)),
			Work{payer(byte(rng.Intn(20))), tokens, uint64(rng.Intn(ppb + 1)), rng.Intn(6)}})
	}
	var want []Load
	for round := range 20 {
		u := NewUsage(0)
		rng.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		for _, e := range events {
			if err := errors.Join(u.Show(e.epoch, e.node, e.rate), u.Count(e.epoch, e.work)); err != nil {
				t.Fatal(err)
			}
		}
		var got []Load
		for e := uint64(1); e <= 3; e++ {
			got = append(got, closed(t, u, e, announced))
		}
		if round == 0 {
			want = got
		} else if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

// Epochs are open beside each other: what is of a later one stays for that one.
func TestEpochsAreOpenBesideEachOther(t *testing.T) {
	u, announced := NewUsage(0), map[string]uint64{"a": 5000}
	u.Show(2, "a", 1000)
	u.Count(2, Work{payer(1), 100, ppb, 3})
	u.Count(1, Work{payer(1), 50, ppb, 3})
	if got := closed(t, u, 1, announced); got != (Load{0, 0, true}) { // nothing was shown yet
		t.Errorf("epoch 1: %+v", got)
	}
	if got := closed(t, u, 2, announced); got != (Load{100_000, 3_600_000, true}) {
		t.Errorf("epoch 2: %+v", got)
	}
}

func TestUsageRefuses(t *testing.T) {
	u := NewUsage(5)
	good := Work{payer(1), 1, ppb, 3}
	for name, tt := range map[string]struct{ got, want error }{
		"work of a closed epoch":  {u.Count(5, good), ErrUsageClosed},
		"a rate of a closed one":  {u.Show(4, "a", 1), ErrUsageClosed},
		"work of the far future":  {u.Count(6+maxFutureEpochs, good), ErrUsageFull},
		"a share above 1":         {u.Count(6, Work{payer(1), 1, ppb + 1, 3}), ErrWork},
		"tokens beyond 64 bits":   {u.Count(6, Work{payer(1), math.MaxUint64, ppb, 3}), ErrWork},
		"tokens that nobody asks": {u.Count(6, Work{payer(1), 1 << 55, ppb, 3}), ErrWork},
	} {
		if !errors.Is(tt.got, tt.want) {
			t.Errorf("%s: %v, want %v", name, tt.got, tt.want)
		}
	}
	if _, err := u.Close(5, hourly, nil); !errors.Is(err, ErrUsageClosed) {
		t.Errorf("closed twice: %v", err)
	}
	if _, err := u.Close(6, PriceRules{}, nil); !errors.Is(err, ErrPriceRules) {
		t.Errorf("closed by no rules: %v", err)
	}
	for i := range MaxShown {
		if err := u.Show(6, fmt.Sprint(i), 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := u.Show(6, "one more", 1); !errors.Is(err, ErrUsageFull) {
		t.Errorf("one node more: %v", err)
	}
}

func TestLoadsStayAtTheLargestNumber(t *testing.T) {
	u := NewUsage(0)
	for _, n := range []string{"a", "b"} {
		u.Show(1, n, math.MaxUint64)
	}
	for i := range byte(12) {
		for range 3 {
			if err := u.Count(1, Work{payer(i), 1 << 53, ppb, 3}); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := closed(t, u, 1, map[string]uint64{"a": math.MaxUint64, "b": math.MaxUint64})
	if got.Capacity != math.MaxUint64 || got.Counted != math.MaxUint64 {
		t.Errorf("got %+v", got)
	}
}

package sim

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"kvasird/settle"
)

func play(t *testing.T, s Scenario) *Result {
	t.Helper()
	r, err := Run(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func named(t *testing.T, name string) Scenario {
	t.Helper()
	s, err := Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// within fails unless low ≤ got ≤ high.
func within(t *testing.T, what string, got, low, high float64) {
	t.Helper()
	if !(got >= low && got <= high) {
		t.Errorf("%s: %.3f, want %.3f to %.3f", what, got, low, high)
	}
}

func fastExit(s *Scenario) { s.Agents.Exit = 24 }

func TestBalanceStays(t *testing.T) {
	r := play(t, named(t, "balance"))
	within(t, "price", r.Price, 0.999, 1.001)
	within(t, "supply", r.Supply, 0.999, 1.001)
	within(t, "served", r.Served, 0.999, 1.001)
	within(t, "rejecting", r.Rejecting, 0, 0)
}

// Economics, test 14: more nodes, a lower price, and more is served.
func TestSupplyTimesTen(t *testing.T) {
	for name, exit := range map[string]func(*Scenario){"slow": slowExit, "fast": fastExit} {
		r := play(t, named(t, "supply-x10").with(exit))
		within(t, name+" exit: price", r.Price, 0.60, 0.75)
		within(t, name+" exit: days", r.Settled, 1, 60)
		within(t, name+" exit: swing", r.Swing, 0, 0.05)
		within(t, name+" exit: served", r.Served, 1.3, 1.6)
	}
}

// Economics, test 15.
func TestDemandDown(t *testing.T) {
	slow := play(t, named(t, "demand-down-90").with(slowExit))
	within(t, "slow exit: least supply", slow.SupplyMin, 0.12, 1)
	within(t, "slow exit: rejected", slow.RejectedPeak, 0, 0)
	fast := play(t, named(t, "demand-down-90").with(fastExit))
	within(t, "fast exit: least supply", fast.SupplyMin, 0.05, 1)
	within(t, "fast exit: rejected", fast.RejectedPeak, 0, 0.20)
}

// Economics, test 16: the ceiling holds, and nobody pays more than what the record says.
func TestDemandTimesTen(t *testing.T) {
	r := play(t, named(t, "demand-x10"))
	within(t, "price", r.Price, 3.199, 3.2)
	within(t, "utilisation", r.Utilisation, 0.65, 0.90)
	for _, s := range r.Samples {
		if s.Price > 3.2 || s.Rewards > 0.86*s.Price*s.Served*tokensAnHour/1e6 {
			t.Fatalf("hour %d: %+v", s.Hour, s)
		}
	}
	within(t, "price after three times the demand", play(t, named(t, "demand-x3")).Price, 1.2, 2)
}

func sweep(gain, delay, ema uint64, event Event) Scenario {
	s := usual(fmt.Sprintf("gain %d, delay %d h", gain, delay), "", 240, event)
	s.Agents.Delay = float64(delay)
	s.Params.GainPPB, s.Params.StepPPB = gain, max(s.Params.StepPPB, gain)
	s.Params.SupplyDelaySeconds = max(delay, 24) * settle.Hour
	s.Params.EMASeconds = ema * settle.Hour
	return s
}

// Economics, test 17: no swings below the bound on the gain, and the simulator sees them above it.
func TestGainAndDelay(t *testing.T) {
	shocks := map[string]Event{"supply ×10": supply(10), "demand −90 %": demand(0.1), "demand ×2": demand(2), "demand −50 %": demand(0.5)}
	for _, delay := range []uint64{6, 24, 72, 168} {
		lag := max(delay, 24)
		gain := uint64(settle.SafeGain) / lag
		for name, shock := range shocks {
			t.Run(fmt.Sprint(delay, " h, ", name), func(t *testing.T) {
				t.Parallel()
				r := play(t, sweep(gain, delay, lag, shock))
				within(t, "swing", r.Swing, 0, 0.15)
				if r.Dead {
					t.Error("a death spiral")
				}
			})
		}
		if _, err := Run(sweep(gain+1_000, delay, lag, supply(10))); !errors.Is(err, settle.ErrUnstable) {
			t.Errorf("%d h: a gain of %d: %v", delay, gain+1_000, err)
		}
	}
	wild := sweep(50_000_000, 72, 24, supply(10))
	wild.Mutation.Unbounded = true
	within(t, "swing of a gain that governance refuses", play(t, wild).Swing, 1, 10)
}

// Economics, test 18.
func TestCrashOfTheToken(t *testing.T) {
	within(t, "least supply", play(t, named(t, "crash")).SupplyMin, 0.7, 1)
	governed := play(t, named(t, "crash-governed"))
	within(t, "governed, least supply", governed.SupplyMin, 0.3, 1)
	within(t, "governed, price", governed.Price, 0.95, 1.05)
	if r := play(t, named(t, "crash-token-band")); !r.Dead {
		t.Errorf("a band in the token lives with a supply of %.2f: the simulator does not see the spiral", r.Supply)
	}
	both := named(t, "crash")
	both.Events = append(both.Events, demand(0.5))
	within(t, "with half of the demand gone, least supply", play(t, both).SupplyMin, 0.3, 1)
}

// Economics, test 19.
func TestMercenaries(t *testing.T) {
	r := play(t, named(t, "mercenaries"))
	within(t, "rejected", r.RejectedPeak, 0, 0)
	within(t, "price", r.Price, 0.92, 0.999)
	var emitted float64
	for _, s := range r.Samples {
		emitted += s.Emission
	}
	fees := r.Samples[len(r.Samples)-1].Treasury / 0.4
	within(t, "emission as a part of the fees", emitted/fees, 0.2, 0.25)
	within(t, "pot, slow exit, rejected", play(t, named(t, "mercenaries-pot").with(slowExit)).RejectedPeak, 0.25, 1)
	within(t, "pot, fast exit, rejected", play(t, named(t, "mercenaries-pot").with(fastExit)).RejectedPeak, 0.5, 1)
}

// Economics, test 20.
func TestAnnouncedCapacity(t *testing.T) {
	with, without := play(t, named(t, "boasters")), play(t, named(t, "balance"))
	var price, used float64 // the greatest differences
	for i, s := range without.Samples {
		price = max(price, math.Abs(with.Samples[i].Price-s.Price))
		used = max(used, math.Abs(with.Samples[i].Utilisation-s.Utilisation))
	}
	within(t, "price moved by", price, 0, 1e-4) // what is there goes up and down by roundings
	within(t, "utilisation moved by", used, 0, 1e-4)
	if r := play(t, named(t, "boasters-counted")); !r.Dead {
		t.Errorf("counted, a supply of %.2f lives: the simulator does not see the spiral", r.Supply)
	}
}

// pumping is what a coalition with a part of the supply makes in an hour of the last ten days, if
// it also buys so much from itself, while nobody comes or leaves.
func pumping(t *testing.T, part, volume float64, counted bool) float64 {
	s := usual("pump", "", 240, at(0, func(m *Market) { m.kinds[0].fixed = true; m.volume = volume }))
	s.Agents.Elasticity = 0.3
	s.Mutation.CountSelfRouted = counted
	r := play(t, s)
	var sum float64
	last := r.Samples[len(r.Samples)-240:]
	for _, x := range last {
		sum += part * (x.Rewards - s.Agents.Marginal*x.Served*tokensAnHour/1e6) / float64(len(last))
		sum -= 0.15 * volume * x.Price * tokensAnHour / 1e6 / float64(len(last))
	}
	return sum
}

// Economics, test 21: who buys from itself pays the fee, and pushes the price only if that counts.
func TestPumping(t *testing.T) {
	honest := pumping(t, 0.3, 0, false)
	for _, volume := range []float64{0.05, 0.1, 0.2, 0.3} {
		if got := pumping(t, 0.3, volume, false); got >= honest {
			t.Errorf("volume %.2f: %.3f an hour, honest %.3f", volume, got, honest)
		}
	}
	if got := pumping(t, 0.3, 0.2, true); got < 1.2*honest {
		t.Errorf("counted: %.3f an hour, honest %.3f: the simulator does not see that pumping pays", got, honest)
	}
	r, still := play(t, named(t, "wash")), play(t, named(t, "balance"))
	within(t, "price beside wash traders", r.Price, still.Price-1e-9, still.Price+1e-9)
	within(t, "what they pay in fees, by hours", r.Washed/(0.15*0.3*tokensAnHour/1e6)/float64(119*24), 0.99, 1.01)
}

// In no scenario the price leaves its band.
func TestTheBandHolds(t *testing.T) {
	var results []*Result
	for _, s := range Scenarios() {
		r := play(t, s)
		results = append(results, r)
		for _, x := range r.Samples {
			if uint64(x.Raw) < s.Params.FloorRaw || uint64(x.Raw) > s.Params.CeilingRaw {
				t.Fatalf("%s, hour %d: price %d", s.Name, x.Hour, x.Raw)
			}
		}
	}
	var b bytes.Buffer
	if err := Table(&b, results); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", b.String())
	if n := strings.Count(b.String(), "death spiral"); n != 2 || strings.Count(b.String(), "\n") != len(results)+1 {
		t.Errorf("%d death spirals in\n%s", n, b.String())
	}
	again := play(t, named(t, "whale"))
	for i, x := range play(t, named(t, "whale")).Samples {
		if x != again.Samples[i] {
			t.Fatalf("hour %d: %+v, the second time %+v", i, x, again.Samples[i])
		}
	}
}

func TestScenariosThatCannotBePlayed(t *testing.T) {
	if _, err := Find("nothing"); err == nil || !strings.Contains(err.Error(), "supply-x10") {
		t.Errorf("got %v", err)
	}
	s := named(t, "balance")
	s.Params.FeePPM = 1
	if _, err := Run(s); !errors.Is(err, settle.ErrBounds) {
		t.Errorf("got %v", err)
	}
	s = named(t, "balance")
	s.Params.EpochSeconds = 7200
	if _, err := Run(s); err == nil {
		t.Error("an epoch of two hours was simulated as one")
	}
}

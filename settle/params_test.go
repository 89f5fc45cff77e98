package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func set(t *testing.T, p *Params, name string, v uint64) {
	t.Helper()
	f, err := FieldByName(name)
	if err != nil {
		t.Fatal(err)
	}
	f.Set(p, v)
}

func TestDefaultsAreValid(t *testing.T) {
	p := DefaultParams()
	for _, devnet := range []bool{false, true} {
		if err := p.Validate(devnet); err != nil {
			t.Error(err)
		}
	}
	// The variant with a burn, and the fastest devnet.
	for name, v := range map[string]uint64{"fee_insurance": 350_000, "fee_burn": 350_000, "fee_treasury": 300_000, "emission": 300_000, "claims": PPM} {
		set(t, &p, name, v)
	}
	if err := p.Validate(false); err != nil {
		t.Error(err)
	}
	for name, v := range map[string]uint64{"epoch_seconds": 1, "supply_delay_seconds": 2, "ema_seconds": 6, "gain": 50_000_000, "step": 50_000_000} {
		set(t, &p, name, v)
	}
	if err := p.Validate(true); err != nil {
		t.Error(err)
	}
	if err := p.Validate(false); !errors.Is(err, ErrBounds) {
		t.Errorf("a devnet's epoch on a real network: %v", err)
	}
}

func TestFieldsAreApart(t *testing.T) {
	seen := map[string]bool{}
	for i, f := range Fields() {
		if seen[f.Name] || f.Unit == "" || f.Min > f.Default || f.Default > f.Max || f.DevnetMin > f.Min || f.DevnetMax < f.Max {
			t.Errorf("field %+v", f)
		}
		seen[f.Name] = true
		var p Params
		f.Set(&p, 7)
		for j, g := range Fields() {
			if want := map[bool]uint64{true: 7}[i == j]; g.Get(p) != want {
				t.Errorf("setting %s: %s is %d", f.Name, g.Name, g.Get(p))
			}
		}
	}
	if _, err := FieldByName("Fee"); !errors.Is(err, ErrUnknownField) {
		t.Error(err)
	}
}

func TestEveryBoundIsHard(t *testing.T) {
	for _, f := range Fields() {
		for _, v := range []uint64{f.Min - 1, f.Max + 1, ^uint64(0)} {
			p := DefaultParams()
			f.Set(&p, v)
			if v >= f.Min && v <= f.Max { // Min 0
				continue
			}
			if err := p.Validate(false); !errors.Is(err, ErrBounds) {
				t.Errorf("%s = %d: %v", f.Name, v, err)
			}
		}
	}
}

func TestRulesOverTheSet(t *testing.T) {
	type fields = map[string]uint64
	for _, tt := range []struct {
		change fields
		want   error
	}{
		{fields{"gain": 8_333_333}, nil}, // 0.2e9·3600/86400
		{fields{"gain": 8_333_334}, ErrUnstable},
		{fields{"gain": 8_333_333, "supply_delay_seconds": Day + 4}, ErrUnstable},
		{fields{"epoch_seconds": 900}, nil},
		{fields{"epoch_seconds": 900, "gain": 2_083_334}, ErrUnstable},
		{fields{"step": 1_999_999}, ErrStep},
		{fields{"supply_delay_seconds": Day - 1}, ErrEMA},
		{fields{"ceiling": 4e11 - 1}, ErrBand},
		{fields{"ceiling": 4e11}, nil},
		{fields{"ceiling": 1e13 + 1}, ErrBand},
		{fields{"fee_burn": 1}, ErrFeeSplit},
		{fields{"emission": 270_000}, nil}, // 0.27 + 0.5·0.6 = 0.95·0.6
		{fields{"emission": 270_001}, ErrCoalition},
		{fields{"claims": 533_334}, ErrCoalition},
		{fields{"claims": 533_333}, nil},
		{fields{"fee_insurance": 500_000, "fee_treasury": 500_000, "emission": 450_000, "claims": PPM}, ErrCoalition},
		{fields{"penalty": 61}, ErrPenalty},
		{fields{"penalty": 62}, nil},
		{fields{"audit_interval": 128}, ErrPenalty},
		{fields{"audit_seconds": 120*Hour + 1}, ErrUnbonding},
		{fields{"audit_seconds": 120 * Hour}, nil},
		{fields{"receipts_on_time": 3, "receipts_late": 2}, ErrReceiptSpan},
		{fields{"voucher_window_new": 65}, ErrVoucher},
	} {
		p := DefaultParams()
		for name, v := range tt.change {
			set(t, &p, name, v)
		}
		if err := p.Validate(false); !errors.Is(err, tt.want) {
			t.Errorf("%v: %v, want %v", tt.change, err, tt.want)
		}
	}
}

// Test 7 of the economics: each change is legal alone, both together are not.
func TestTwoLegalChangesDoNotReachACoalition(t *testing.T) {
	for _, order := range [][2]string{{"emission", "claims"}, {"claims", "emission"}} {
		to := map[string]uint64{"emission": 265_000, "claims": 533_000}
		p := DefaultParams()
		set(t, &p, order[0], to[order[0]])
		if err := p.Validate(false); err != nil {
			t.Fatalf("%s alone: %v", order[0], err)
		}
		set(t, &p, order[1], to[order[1]])
		if err := p.Validate(false); !errors.Is(err, ErrCoalition) {
			t.Errorf("%v: %v", order, err)
		}
	}
}

func TestMoves(t *testing.T) {
	for _, tt := range []struct {
		name              string
		dayAgo, now, next uint64
		ok                bool
	}{
		{"reference", 1000, 1000, 2000, true}, {"reference", 1000, 1000, 2001, false}, {"reference", 1000, 1000, 500, true},
		{"reference", 1000, 1000, 499, false}, {"reference", 1000, 2000, 2001, false}, {"reference", 1000, 500, 2000, true},
		{"reference", 1001, 1001, 500, false}, {"reference", 1 << 63, 1 << 63, 1<<64 - 1, true}, {"reference", 1, 1, 0, false},
		{"floor", 1000, 1000, 1250, true}, {"floor", 1000, 1000, 1251, false}, {"ceiling", 1000, 1000, 750, true}, {"ceiling", 1000, 1000, 749, false},
		{"emission", 0, 250_000, 250_000, true}, {"emission", 300_000, 250_000, 250_001, false}, {"emission_total", 9, 5, 6, false},
		{"fee", 50_000, 50_000, 300_000, true},
	} {
		f, err := FieldByName(tt.name)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.CheckMove(tt.dayAgo, tt.now, tt.next); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrMove) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

// randomParams is a valid set, as far out as the bounds go.
func randomParams(r *rand.Rand) Params {
	for {
		p := DefaultParams()
		for _, f := range fields {
			switch r.IntN(4) {
			case 0:
				f.Set(&p, f.Min)
			case 1:
				f.Set(&p, f.Max)
			case 2:
				f.Set(&p, f.Min+r.Uint64N(f.Max-f.Min+1))
			}
		}
		// The parts of the fee are drawn together, else none would sum.
		p.TreasuryPPM = r.Uint64N(500_001)
		p.InsurancePPM = 300_000 + r.Uint64N(PPM-p.TreasuryPPM-300_000+1)
		p.BurnPPM = PPM - p.TreasuryPPM - p.InsurancePPM
		p.CeilingRaw = p.FloorRaw * (4 + r.Uint64N(97))
		p.GainPPB, p.StepPPB, p.EMASeconds, p.SupplyDelaySeconds = 0, 1, 6*Hour, 2*Hour
		p.Penalty, p.UnbondingSeconds = 2*p.AuditInterval, p.AuditSeconds+2*Day
		p.OnTimeEpochs, p.VoucherWindowNew = min(p.OnTimeEpochs, p.LateEpochs), min(p.VoucherWindowNew, p.VoucherWindow)
		if p.CeilingRaw > 1e17 {
			continue
		}
		if p.Validate(false) == nil {
			return p
		}
	}
}

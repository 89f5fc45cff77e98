package settle

import (
	"errors"
	"fmt"
)

// Parts per million and per billion, and seconds.
const (
	PPM  = 1_000_000
	PPB  = 1_000_000_000
	Hour = 3600
	Day  = 24 * Hour
)

// Rules that no parameter moves.
const (
	MinQuote          Amount = 1000      // so that no rounding of one unit matters
	RefWarnAfter             = 7 * Day   // a reference that old raises an alarm
	RefRefuseAfter           = 30 * Day  // and one that old is not quoted by
	SafeGain                 = PPB / 5   // k · max(d, 24 h) / h above it swings the price
	CoalitionPPM             = 950_000   // of 1 − τ: the most that a coalition gets back of a fee
	PremiumSpan              = 30 * Day  // a wallet's claims are bounded by the premiums of so long
	WalletCountedPPM         = 200_000   // of the capacity: more work of one payer counts nothing
	ReporterRatePPM          = 1_250_000 // of the demonstrated rate: faster work is refused
	ReporterBonds            = 10        // unsettled claims of a reporter, in its bonds
	ReporterRewardPPM        = 100_000   // of a slash, at most
	NewWalletRequests        = 20        // settled requests until the wide voucher window
)

// Params is every economic number that governance moves. The zero value is not valid:
// start from DefaultParams. Fields names them and gives units and hard bounds.
type Params struct {
	// Price: the thermostat (k, d, s, u*), its band and the reference.
	EpochSeconds, GainPPB, SupplyDelaySeconds, StepPPB, TargetPPB, EMASeconds uint64
	FloorRaw, CeilingRaw                                                      uint64 // fiat micro-units · 10⁶ per 10⁶ tokens
	Ref                                                                       uint64 // base units per fiat unit

	// Fee φ and its parts ι, τ, b; emission β and its schedule; claims ρ and the pool.
	FeePPM, InsurancePPM, TreasuryPPM, BurnPPM uint64
	EmissionPPM, EmissionTotal, TaperRevenue   uint64
	ClaimsPPM, PoolEpochPPM                    uint64

	// Audits, bonds, receipts, vouchers.
	AuditInterval, Penalty                uint64
	HeldPPM, BondEpochs, UnbondingSeconds uint64
	AuditSeconds, ClaimSeconds            uint64
	OnTimeEpochs, LateEpochs              uint64
	VoucherWindow, VoucherWindowNew       uint64
}

// Move says how far one field may go, whatever the rest of the set allows.
type Move uint8

// The moves. Down only: never up again. Quarter: by at most a quarter of the value of
// 24 hours ago. Double: to at most twice and at least half of it.
const (
	MoveFree Move = iota
	MoveDown
	MoveQuarter
	MoveDouble
)

// Field is one parameter: its name for people and records, its unit, and the hard
// bounds, which governance cannot pass.
type Field struct {
	Name, Unit           string
	Default, Min, Max    uint64
	DevnetMin, DevnetMax uint64 // on a network flagged devnet
	Move                 Move
	NoticeSeconds        uint64 // from the signed change to its effect, at least
	at                   func(*Params) *uint64
}

// Get returns the field of p.
func (f Field) Get(p Params) uint64 { return *f.at(&p) }

// Set changes the field of p, unchecked: Params.Validate judges the whole set.
func (f Field) Set(p *Params, v uint64) { *f.at(p) = v }

// Bounds returns the least and the greatest value.
func (f Field) Bounds(devnet bool) (low, high uint64) {
	if devnet {
		return f.DevnetMin, f.DevnetMax
	}
	return f.Min, f.Max
}

// CheckMove refuses a change of the field from dayAgo, its value 24 hours before, and
// now, its value, to next. Error: ErrMove.
func (f Field) CheckMove(dayAgo, now, next uint64) error {
	least, most := uint64(0), ^uint64(0)
	switch f.Move {
	case MoveDown:
		most = now
	case MoveQuarter:
		least, most = dayAgo-dayAgo/4, addCapped(dayAgo, dayAgo/4)
	case MoveDouble:
		least, most = dayAgo/2+dayAgo%2, addCapped(dayAgo, dayAgo)
	}
	if next < least || next > most {
		return fmt.Errorf("%w: %s from %d to %d, today %d to %d is allowed: take a smaller step", ErrMove, f.Name, now, next, least, most)
	}
	return nil
}

func addCapped(a, b uint64) uint64 {
	if a+b < a {
		return ^uint64(0)
	}
	return a + b
}

const (
	ppm     = "ppm"
	ppb     = "ppb"
	seconds = "s"
	epochs  = "epochs"
	units   = "base units"
	tokens  = "tokens"
	noMax   = 1 << 62 // of an amount: sums of two fit
)

// field is a Field with the same bounds on a devnet, where spans may be as short as a
// second.
func field(name, unit string, def, low, high uint64, at func(*Params) *uint64) Field {
	f := Field{Name: name, Unit: unit, Default: def, Min: low, Max: high, DevnetMin: low, DevnetMax: high, at: at}
	if unit == seconds {
		f.DevnetMin = 1
	}
	return f
}

func (f Field) devnetMax(v uint64) Field          { f.DevnetMax = v; return f }
func (f Field) moves(m Move, notice uint64) Field { f.Move, f.NoticeSeconds = m, notice; return f }

// fields in the order of records; ones are only ever added, at the end.
var fields = []Field{
	field("epoch_seconds", seconds, Hour, 900, 6*Hour, func(p *Params) *uint64 { return &p.EpochSeconds }),
	field("gain", ppb, 2_000_000, 0, 10_000_000, func(p *Params) *uint64 { return &p.GainPPB }).devnetMax(50_000_000),
	field("supply_delay_seconds", seconds, Day, 2*Hour, 30*Day, func(p *Params) *uint64 { return &p.SupplyDelaySeconds }),
	field("step", ppb, 10_000_000, 1, 50_000_000, func(p *Params) *uint64 { return &p.StepPPB }),
	field("target_utilisation", ppb, 650_000_000, 500_000_000, 800_000_000, func(p *Params) *uint64 { return &p.TargetPPB }),
	field("ema_seconds", seconds, 72*Hour, 6*Hour, 168*Hour, func(p *Params) *uint64 { return &p.EMASeconds }),
	field("floor", "fiat micro-units·10⁶ per 10⁶ tokens", 1e11, 1e6, 1e16, func(p *Params) *uint64 { return &p.FloorRaw }).moves(MoveQuarter, 2*Day),
	field("ceiling", "fiat micro-units·10⁶ per 10⁶ tokens", 1e12, 4e6, 1e17, func(p *Params) *uint64 { return &p.CeilingRaw }).moves(MoveQuarter, 2*Day),
	field("reference", "base units per fiat unit", 1e9, 1, 1e17, func(p *Params) *uint64 { return &p.Ref }).moves(MoveDouble, 0),
	field("fee", ppm, 150_000, 50_000, 300_000, func(p *Params) *uint64 { return &p.FeePPM }),
	field("fee_insurance", ppm, 600_000, 300_000, PPM, func(p *Params) *uint64 { return &p.InsurancePPM }),
	field("fee_treasury", ppm, 400_000, 0, 500_000, func(p *Params) *uint64 { return &p.TreasuryPPM }),
	field("fee_burn", ppm, 0, 0, 700_000, func(p *Params) *uint64 { return &p.BurnPPM }),
	field("emission", ppm, 250_000, 0, 450_000, func(p *Params) *uint64 { return &p.EmissionPPM }).moves(MoveDown, 0),
	field("emission_total", units, 0, 0, noMax, func(p *Params) *uint64 { return &p.EmissionTotal }).moves(MoveDown, 0),
	field("taper_revenue", "base units of fees per epoch", 1e12, 1, noMax, func(p *Params) *uint64 { return &p.TaperRevenue }),
	field("claims", ppm, 500_000, 0, PPM, func(p *Params) *uint64 { return &p.ClaimsPPM }),
	field("pool_per_epoch", ppm, 100_000, 10_000, 200_000, func(p *Params) *uint64 { return &p.PoolEpochPPM }),
	field("audit_interval", "requests per audit", 32, 1, 128, func(p *Params) *uint64 { return &p.AuditInterval }),
	field("penalty", "rewards of the failed request", 64, 1, 10_000, func(p *Params) *uint64 { return &p.Penalty }),
	field("held", ppm, 500_000, 250_000, 750_000, func(p *Params) *uint64 { return &p.HeldPPM }),
	field("bond_epochs", epochs, 8, 2, 720, func(p *Params) *uint64 { return &p.BondEpochs }),
	field("unbonding_seconds", seconds, 7*Day, Day, 90*Day, func(p *Params) *uint64 { return &p.UnbondingSeconds }),
	field("audit_seconds", seconds, 72*Hour, Day, 168*Hour, func(p *Params) *uint64 { return &p.AuditSeconds }),
	field("claim_seconds", seconds, Day, Hour, 72*Hour, func(p *Params) *uint64 { return &p.ClaimSeconds }),
	field("receipts_on_time", epochs, 2, 1, 6, func(p *Params) *uint64 { return &p.OnTimeEpochs }),
	field("receipts_late", epochs, 24, 2, 168, func(p *Params) *uint64 { return &p.LateEpochs }),
	field("voucher_window", tokens, 64, 8, 512, func(p *Params) *uint64 { return &p.VoucherWindow }),
	field("voucher_window_new", tokens, 16, 8, 512, func(p *Params) *uint64 { return &p.VoucherWindowNew }),
}

// Fields returns every parameter in the order of records.
func Fields() []Field { return append([]Field(nil), fields...) }

// FieldByName finds a parameter. Error: ErrUnknownField.
func FieldByName(name string) (Field, error) {
	for _, f := range fields {
		if f.Name == name {
			return f, nil
		}
	}
	return Field{}, fmt.Errorf("%w: %.40q; the parameters are listed by Fields", ErrUnknownField, name)
}

// DefaultParams is the set that economics simulated, with no emission: a genesis that
// has a reserve names its total.
func DefaultParams() (p Params) {
	for _, f := range fields {
		f.Set(&p, f.Default)
	}
	return p
}

// Refusals of a set of parameters, by errors.Is.
var (
	ErrUnknownField = errors.New("no such parameter")
	ErrMove         = errors.New("the parameter moves too far at once")
	ErrBounds       = errors.New("the parameter is outside its hard bounds")
	ErrUnstable     = errors.New("the price would swing: gain · max(delay, 24 h) / epoch is above 0.2")
	ErrStep         = errors.New("the step is below the gain")
	ErrEMA          = errors.New("the average is longer than three supply delays")
	ErrBand         = errors.New("the ceiling is not 4 to 100 times the floor")
	ErrFeeSplit     = errors.New("the parts of the fee do not sum to 1,000,000 ppm")
	ErrCoalition    = errors.New("paying oneself would pay: emission + claims · insurance is above 0.95 · (1 − treasury)")
	ErrPenalty      = errors.New("the penalty does not deter at that audit rate: it is at least 2 · (interval − 1)")
	ErrUnbonding    = errors.New("a bond would leave before its audits: unbonding is at least the audit window + 48 h (no 48 h on a devnet)")
	ErrReceiptSpan  = errors.New("late receipts would end before those on time")
	ErrVoucher      = errors.New("a new wallet's voucher window is above the ordinary one")
)

// Validate checks each field against its bounds and the set as a whole: a change of one
// field is judged with all the others. The error names the rule and the numbers.
func (p Params) Validate(devnet bool) error {
	for _, f := range fields {
		low, high := f.Bounds(devnet)
		if v := f.Get(p); v < low || v > high {
			return fmt.Errorf("%w: %s is %d %s, it is %d to %d", ErrBounds, f.Name, v, f.Unit, low, high)
		}
	}
	if err := p.validatePrice(devnet); err != nil {
		return err
	}
	if sum := p.InsurancePPM + p.TreasuryPPM + p.BurnPPM; sum != PPM {
		return fmt.Errorf("%w: %d + %d + %d = %d", ErrFeeSplit, p.InsurancePPM, p.TreasuryPPM, p.BurnPPM, sum)
	}
	// In 10⁻¹²: below 2·10¹², so 64 bits hold it, and nothing is rounded.
	back, most := p.EmissionPPM*PPM+p.ClaimsPPM*p.InsurancePPM, CoalitionPPM*(PPM-p.TreasuryPPM)
	if back > most {
		return fmt.Errorf("%w: %d > %d (·10⁻¹²): lower emission, claims or fee_insurance", ErrCoalition, back, most)
	}
	if least := 2 * (p.AuditInterval - 1); p.Penalty < least {
		return fmt.Errorf("%w: penalty %d, interval %d needs %d", ErrPenalty, p.Penalty, p.AuditInterval, least)
	}
	appeal := uint64(2 * Day)
	if devnet {
		appeal = 0
	}
	if p.UnbondingSeconds < p.AuditSeconds+appeal {
		return fmt.Errorf("%w: %d s, audits take %d s", ErrUnbonding, p.UnbondingSeconds, p.AuditSeconds)
	}
	if p.LateEpochs < p.OnTimeEpochs {
		return fmt.Errorf("%w: %d < %d epochs", ErrReceiptSpan, p.LateEpochs, p.OnTimeEpochs)
	}
	if p.VoucherWindowNew > p.VoucherWindow {
		return fmt.Errorf("%w: %d > %d tokens", ErrVoucher, p.VoucherWindowNew, p.VoucherWindow)
	}
	return nil
}

// validatePrice keeps the thermostat on the stable side. A devnet, whose time is scaled,
// counts its lags in epochs: there the delay is at least one epoch instead of 24 h.
func (p Params) validatePrice(devnet bool) error {
	lag := max(p.SupplyDelaySeconds, Day)
	if devnet {
		lag = max(p.SupplyDelaySeconds, p.EpochSeconds)
	}
	if p.GainPPB*lag > SafeGain*p.EpochSeconds {
		return fmt.Errorf("%w: gain %d ppb, lag %d s, epoch %d s allow a gain of %d ppb",
			ErrUnstable, p.GainPPB, lag, p.EpochSeconds, SafeGain*p.EpochSeconds/lag)
	}
	if p.StepPPB < p.GainPPB {
		return fmt.Errorf("%w: %d < %d ppb", ErrStep, p.StepPPB, p.GainPPB)
	}
	if p.EMASeconds > 3*p.SupplyDelaySeconds {
		return fmt.Errorf("%w: %d s, the delay is %d s", ErrEMA, p.EMASeconds, p.SupplyDelaySeconds)
	}
	if p.CeilingRaw < 4*p.FloorRaw || p.CeilingRaw > 100*p.FloorRaw {
		return fmt.Errorf("%w: floor %d, ceiling %d", ErrBand, p.FloorRaw, p.CeilingRaw)
	}
	return nil
}

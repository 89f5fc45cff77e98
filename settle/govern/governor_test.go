package govern

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pquerna/otp/totp"

	"kvasird/settle"
)

// memoryStore keeps records, judges its writer, and fails when told to: before storing, or after.
type memoryStore struct {
	t                     *testing.T
	records               [][]byte
	failBefore, failAfter bool
}

var errDisk = errors.New("disk is full")

func (m *memoryStore) Append(n uint64, record []byte) error {
	if n != uint64(len(m.records)) {
		m.t.Errorf("record %d is written as number %d", len(m.records), n)
	}
	if len(record) > MaxRecord {
		m.t.Errorf("a record of %d bytes", len(record))
	}
	if m.failBefore {
		return errDisk
	}
	m.records = append(m.records, bytes.Clone(record))
	if m.failAfter {
		return errDisk
	}
	return nil
}

func (m *memoryStore) Replay(fn func([]byte) error) error {
	for _, r := range m.records {
		if err := fn(r); err != nil {
			return err
		}
	}
	return nil
}

func walletKey(n byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, ed25519.SeedSize))
}

func wallet(n byte) settle.Wallet { return settle.Wallet(walletKey(n).Public().(ed25519.PublicKey)) }

// town is a network with three wallets of which two must sign.
type town struct {
	*testing.T
	cfg    Config
	store  *memoryStore
	secret string
	g      *Governor
	now    Moment
}

const start = 1_800_000_000

func newTown(t *testing.T) *town {
	t.Helper()
	x := &town{T: t, store: &memoryStore{t: t}, now: Moment{start, 100, start}}
	params := settle.DefaultParams()
	params.EmissionTotal = 1_000_000
	x.cfg = Config{Authority: Authority{Network: settle.Hash{1}, Cluster: settle.Key{2},
		Wallets: []settle.Wallet{wallet(1), wallet(2), wallet(3)}, Threshold: 2, Params: params},
		Since: start - settle.Day, Store: x.store, Key: [32]byte{9}}
	var err error
	if x.secret, x.cfg.Secret, err = NewSecret(bytes.NewReader(bytes.Repeat([]byte{7}, 64)), x.cfg.Key, settle.Hash{1}); err != nil {
		t.Fatal(err)
	}
	x.open()
	return x
}

func (x *town) open() {
	x.Helper()
	var err error
	if x.g, err = Open(x.cfg); err != nil {
		x.Fatal(err)
	}
}

// pass lets whole epochs of an hour go by.
func (x *town) pass(epochs uint64) {
	x.now = Moment{x.now.At + epochs*settle.Hour, x.now.Epoch + epochs, x.now.Began + epochs*settle.Hour}
}

func (x *town) propose(ahead uint64, values map[string]uint64) *Proposal {
	x.Helper()
	p, err := x.g.Propose(x.now, x.now.Epoch+ahead, settle.Day, values)
	if err != nil {
		x.Fatal(err)
	}
	return p
}

func sign(t testing.TB, p *Proposal, n byte, f Format) Signature {
	t.Helper()
	m, err := p.Message(wallet(n), f)
	if err != nil {
		t.Fatal(err)
	}
	return Signature{wallet(n), f, m, settle.Signature(ed25519.Sign(walletKey(n), m))}
}

func (x *town) code() string {
	x.Helper()
	c, err := totp.GenerateCode(x.secret, time.Unix(int64(x.now.At), 0))
	if err != nil {
		x.Fatal(err)
	}
	return c
}

func (x *town) activate(p *Proposal) error {
	_, err := x.g.Activate(x.now, p, []Signature{sign(x, p, 1, OffchainV0), sign(x, p, 3, Raw)}, x.code())
	return err
}

func (x *town) change(ahead uint64, values map[string]uint64) error {
	p, err := x.g.Propose(x.now, x.now.Epoch+ahead, settle.Day, values)
	if err != nil {
		return err
	}
	return x.activate(p)
}

func (x *town) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

func (x *town) fee(epoch uint64) uint64 {
	p, _, _ := x.g.Params(epoch)
	return p.FeePPM
}

func TestChangesHoldFromTheirEpoch(t *testing.T) {
	x := newTown(t)
	x.must(x.change(1, map[string]uint64{"fee": 200_000}))
	x.pass(1)
	x.must(x.change(10, map[string]uint64{"fee": 250_000, "held": 600_000}))
	x.pass(1)
	x.must(x.change(9, map[string]uint64{"fee": 100_000})) // of the same epoch: after it
	for range 2 {                                          // the second time after a restart
		for epoch, want := range map[uint64]uint64{0: 150_000, 100: 150_000, 101: 200_000, 110: 200_000, 111: 100_000, 9999: 100_000} {
			if got := x.fee(epoch); got != want {
				t.Errorf("epoch %d: fee %d, want %d", epoch, got, want)
			}
		}
		if p, sequence, _ := x.g.Params(200); sequence != 3 || p.HeldPPM != 600_000 || p.BondEpochs != 8 {
			t.Errorf("epoch 200: change %d: %+v", sequence, p)
		}
		x.open()
	}
	follower, err := NewHistory(x.cfg.Authority, x.cfg.Since) // without the secret
	x.must(err)
	for _, b := range x.store.records {
		r, err := ParseRecord(b)
		x.must(err)
		x.must(follower.Apply(r))
		if err := follower.Apply(r); !errors.Is(err, ErrSequence) {
			t.Errorf("applied twice: %v", err)
		}
	}
	a, _, _ := follower.Params(200)
	if b, _, _ := x.g.Params(200); a != b {
		t.Errorf("a follower has %+v, want %+v", a, b)
	}
}

// Every reason to refuse a proposal, each by one change of one that is taken.
func TestProposalsThatAreRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(x *town, p *Proposal)
		want   error
	}{
		"another network":     {func(_ *town, p *Proposal) { p.Network[0]++ }, ErrNetwork},
		"another cluster":     {func(_ *town, p *Proposal) { p.Cluster[0]++ }, ErrNetwork},
		"an old sequence":     {func(_ *town, p *Proposal) { p.Sequence-- }, ErrSequence},
		"a later sequence":    {func(_ *town, p *Proposal) { p.Sequence++ }, ErrSequence},
		"a clock set back":    {func(x *town, _ *Proposal) { x.now.At = start - 1 }, ErrClock},
		"an epoch set back":   {func(x *town, _ *Proposal) { x.now.Epoch = 99 }, ErrClock},
		"began in the future": {func(x *town, _ *Proposal) { x.now.Began = x.now.At + 1 }, ErrClock},
		"began too early":     {func(x *town, _ *Proposal) { x.now.Began = start - 1 }, ErrClock},
		"expired":             {func(x *town, p *Proposal) { p.Expires = x.now.At }, ErrExpired},
		"never expires":       {func(x *town, p *Proposal) { p.Expires = x.now.At + 8*settle.Day }, ErrExpired},
		"this epoch":          {func(x *town, p *Proposal) { p.Epoch = x.now.Epoch }, ErrEpoch},
		"far ahead":           {func(x *town, p *Proposal) { p.Epoch = x.now.Epoch + 1001 }, ErrEpoch},
		"before another":      {func(x *town, p *Proposal) { p.Epoch-- }, ErrEpoch},
		"no change":           {func(_ *town, p *Proposal) { p.Changes = nil }, ErrProposal},
		"a change twice":      {func(_ *town, p *Proposal) { p.Changes = append(p.Changes, p.Changes[0]) }, ErrProposal},
		"too many":            {func(_ *town, p *Proposal) { p.Changes = make([]Change, MaxChanges+1) }, ErrProposal},
		"no such parameter":   {func(_ *town, p *Proposal) { p.Changes[0].Name = "fees" }, settle.ErrUnknownField},
		"of another value":    {func(_ *town, p *Proposal) { p.Changes[0].Old++ }, ErrOldValue},
		"to the same value":   {func(_ *town, p *Proposal) { p.Changes[0].New = p.Changes[0].Old }, ErrNoChange},
		"out of bounds":       {func(_ *town, p *Proposal) { p.Changes[0].New = 300_001 }, settle.ErrBounds},
	} {
		x := newTown(t)
		x.must(x.change(5, map[string]uint64{"held": 600_000}))
		x.pass(1)
		p := x.propose(4, map[string]uint64{"fee": 200_000})
		tt.change(x, p)
		stored := len(x.store.records)
		if err := x.activate(p); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		if len(x.store.records) != stored || x.fee(1000) != 150_000 {
			t.Errorf("%s: was stored, or holds", name)
		}
	}
}

func TestTimesThatAreRefused(t *testing.T) {
	x := newTown(t)
	if _, err := x.g.Propose(x.now, x.now.Epoch, settle.Day, map[string]uint64{"fee": 200_000}); !errors.Is(err, ErrEpoch) {
		t.Errorf("in the epoch that runs: %v", err)
	}
	x.now.At += 100
	x.must(x.change(1, map[string]uint64{"fee": 200_000}))
	x.now.At -= 50 // within the same epoch
	if err := x.change(1, map[string]uint64{"fee": 100_000}); !errors.Is(err, ErrClock) {
		t.Errorf("a clock set back by less than an epoch: %v", err)
	}
}

// Economics, test 7: two changes that are legal by themselves do not pass together.
func TestTheWholeSetIsChecked(t *testing.T) {
	x := newTown(t)
	x.must(x.change(1, map[string]uint64{"claims": 520_000})) // 0.25 + 0.52·0.6 = 0.562 ≤ 0.57
	x.pass(1)
	for _, values := range []map[string]uint64{{"claims": 540_000}, {"fee_insurance": 620_000, "fee_treasury": 380_000, "claims": 560_000}} {
		if err := x.change(1, values); !errors.Is(err, settle.ErrCoalition) {
			t.Errorf("%v: %v", values, err)
		}
	}
	if err := x.change(1, map[string]uint64{"gain": 2_000_001, "supply_delay_seconds": 100 * settle.Hour}); !errors.Is(err, settle.ErrUnstable) {
		t.Errorf("a gain that swings: %v", err)
	}
	x.must(x.change(1, map[string]uint64{"emission": 200_000, "claims": 600_000})) // both at once
	x.pass(1)
	if err := x.change(1, map[string]uint64{"emission": 200_001}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("emission goes up: %v", err)
	}
}

func TestPace(t *testing.T) {
	x := newTown(t)
	ref := settle.DefaultParams().Ref
	x.must(x.change(1, map[string]uint64{"reference": 2 * ref}))
	x.pass(1)
	if err := x.change(23, map[string]uint64{"reference": 2*ref + 1}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("more than twice within a day: %v", err)
	}
	x.must(x.change(1, map[string]uint64{"reference": ref}))
	x.pass(1)
	if err := x.change(1, map[string]uint64{"reference": ref - 1}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("less than half of what held two hours ago: %v", err)
	}
	x.must(x.change(25, map[string]uint64{"reference": 2*ref - 2}))
	_, _, set := x.g.Params(x.now.Epoch + 25)
	if want := x.now.Began + 25*settle.Hour; set != want {
		t.Errorf("the reference is of %d, want %d", set, want)
	}
	x.pass(26)
	x.must(x.change(1, map[string]uint64{"reference": 2*ref - 2})) // it is still right
	if _, _, again := x.g.Params(x.now.Epoch + 1); again != x.now.Began+settle.Hour {
		t.Errorf("renewed at %d, want %d", again, x.now.Began+settle.Hour)
	}
	x.pass(2)
	if err := x.change(47, map[string]uint64{"ceiling": 1_100_000_000_000}); !errors.Is(err, ErrNotice) {
		t.Errorf("without notice: %v", err)
	}
	if err := x.change(48, map[string]uint64{"ceiling": 1_250_000_000_001}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("more than a quarter: %v", err)
	}
	x.must(x.change(48, map[string]uint64{"ceiling": 1_250_000_000_000}))
	x.pass(1)
	if err := x.change(48, map[string]uint64{"ceiling": 1_300_000_000_000}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("more, an hour later: %v", err)
	}
	x.must(x.change(71, map[string]uint64{"ceiling": 1_300_000_000_000}))
}

// Epochs that are made shorter do not bring a day's steps together.
func TestPaceCountsTheEpochsThatAreTaken(t *testing.T) {
	x := newTown(t)
	ref := settle.DefaultParams().Ref
	x.must(x.change(1, map[string]uint64{"reference": 2 * ref}))
	x.pass(1)
	x.must(x.change(2, map[string]uint64{"gain": 500_000, "epoch_seconds": 900}))
	x.pass(1)
	if err := x.change(24, map[string]uint64{"reference": 4 * ref}); !errors.Is(err, settle.ErrMove) {
		t.Errorf("24 epochs of a quarter of an hour: %v", err)
	}
	x.must(x.change(1+4*23, map[string]uint64{"reference": 4 * ref}))
}

// A service that was down knows that an epoch is overdue: notice counts from now.
func TestNoticeAfterAPause(t *testing.T) {
	x := newTown(t)
	x.now.At += 10 * settle.Day
	if err := x.change(1, map[string]uint64{"ceiling": 1_100_000_000_000}); !errors.Is(err, ErrNotice) {
		t.Errorf("got %v", err)
	}
}

func TestSignaturesThatAreRefused(t *testing.T) {
	x := newTown(t)
	p := x.propose(1, map[string]uint64{"fee": 200_000})
	other := x.propose(2, map[string]uint64{"fee": 200_000})
	good, also := sign(t, p, 1, OffchainV1), sign(t, p, 2, Raw)
	with := func(change func(*Signature)) []Signature {
		s := good
		s.Signed = bytes.Clone(s.Signed)
		change(&s)
		return []Signature{also, s}
	}
	for name, tt := range map[string]struct {
		s    []Signature
		want error
	}{
		"none":                 {nil, ErrThreshold},
		"one":                  {[]Signature{good}, ErrThreshold},
		"one twice":            {[]Signature{good, good}, ErrTwice},
		"one in two formats":   {[]Signature{good, sign(t, p, 1, Raw)}, ErrTwice},
		"more than wallets":    {[]Signature{good, also, good, also}, ErrTwice},
		"a stranger":           {[]Signature{good, sign(t, p, 4, Raw)}, ErrSigner},
		"no format":            {with(func(s *Signature) { s.Format = 0 }), ErrFormat},
		"a format to come":     {with(func(s *Signature) { s.Format = 4 }), ErrFormat},
		"another format":       {with(func(s *Signature) { s.Format = OffchainV0 }), ErrText},
		"a changed text":       {with(func(s *Signature) { s.Signed[80]++ }), ErrText},
		"no text":              {with(func(s *Signature) { s.Signed = nil }), ErrText},
		"a flipped signature":  {with(func(s *Signature) { s.Bytes[3]++ }), ErrSignature},
		"another's signature":  {with(func(s *Signature) { s.Bytes = also.Bytes }), ErrSignature},
		"of another proposal":  {[]Signature{also, sign(t, other, 1, OffchainV1)}, ErrText},
		"for another wallet":   {with(func(s *Signature) { s.Wallet = wallet(3) }), ErrText},
		"a signature of zeros": {with(func(s *Signature) { s.Bytes = settle.Signature{} }), ErrSignature},
	} {
		if _, err := x.g.Activate(x.now, p, tt.s, x.code()); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if len(x.store.records) != 0 {
		t.Error("somebody without authority made a record")
	}
	if _, err := x.g.Activate(x.now, p, []Signature{good, also}, x.code()); err != nil {
		t.Errorf("the honest ones after all these: %v", err)
	}
}

func TestAuthorityIsChecked(t *testing.T) {
	identity := settle.Wallet{1}
	for name, change := range map[string]func(*Config){
		"no wallet":       func(c *Config) { c.Authority.Wallets = nil },
		"none has to":     func(c *Config) { c.Authority.Threshold = 0 },
		"more than there": func(c *Config) { c.Authority.Threshold = 4 },
		"too many":        func(c *Config) { c.Authority.Wallets = make([]settle.Wallet, MaxWallets+1) },
		"named twice":     func(c *Config) { c.Authority.Wallets[2] = wallet(1) },
		"small order":     func(c *Config) { c.Authority.Wallets[0] = identity },
		"no parameters":   func(c *Config) { c.Authority.Params = settle.Params{} },
	} {
		x := newTown(t)
		change(&x.cfg)
		if _, err := Open(x.cfg); !errors.Is(err, ErrAuthority) {
			t.Errorf("%s: %v", name, err)
		}
	}
	x := newTown(t)
	x.cfg.Key[0]++
	if _, err := Open(x.cfg); !errors.Is(err, ErrSecret) {
		t.Errorf("another key: %v", err)
	}
}

func TestCodes(t *testing.T) {
	x := newTown(t)
	p := x.propose(1, map[string]uint64{"fee": 200_000})
	signatures := []Signature{sign(t, p, 1, Raw), sign(t, p, 2, Raw)}
	try := func(code string, want error) {
		t.Helper()
		if _, err := x.g.Activate(x.now, p, signatures, code); !errors.Is(err, want) {
			t.Errorf("%s at %d: %v, want %v", code, x.now.At-start, err, want)
		}
	}
	wrong := func() string { return fmt.Sprintf("%06d", (atoi(x.code())+1)%1_000_000) }
	for range freeFailures {
		try(wrong(), ErrCode)
	}
	try(x.code(), ErrLocked)
	x.open() // a restart does not open the lock
	try(x.code(), ErrLocked)
	x.now.At += 15*60 - 1
	try(x.code(), ErrLocked)
	x.now.At++
	try(wrong(), ErrCode)
	x.now.At += 30*60 - 1
	try(x.code(), ErrLocked)
	x.now.At++
	if len(x.store.records) != freeFailures+1 {
		t.Errorf("%d records", len(x.store.records))
	}
	code := x.code()
	try(code, nil)
	x.now.At += 10
	p = x.propose(2, map[string]uint64{"fee": 100_000})
	signatures = []Signature{sign(t, p, 1, Raw), sign(t, p, 2, Raw)}
	try(code, ErrCodeUsed) // the same once more
	x.open()
	try(code, ErrCodeUsed)
	x.now.At += 30
	try(x.code(), nil)
	if x.fee(1000) != 100_000 {
		t.Errorf("fee %d", x.fee(1000))
	}
}

func atoi(s string) (n int) {
	for _, c := range s {
		n = n*10 + int(c-'0')
	}
	return n
}

// After an error of the store it is not known what is stored: nothing more is taken until the
// store is read again, and both outcomes are good.
func TestAStoreThatFails(t *testing.T) {
	for _, stored := range []bool{false, true} {
		x := newTown(t)
		p := x.propose(1, map[string]uint64{"fee": 200_000})
		x.store.failBefore, x.store.failAfter = !stored, stored
		for range 2 {
			if err := x.activate(p); !errors.Is(err, ErrStore) || !errors.Is(err, errDisk) {
				t.Errorf("got %v", err)
			}
		}
		if x.fee(1000) != 150_000 {
			t.Error("a change that may not be stored holds")
		}
		x.store.failBefore, x.store.failAfter = false, false
		x.open()
		if holds := x.fee(1000) == 200_000; holds != stored {
			t.Errorf("stored %v, holds %v", stored, holds)
		}
		if err := x.activate(p); stored != errors.Is(err, ErrSequence) || stored == (err == nil) {
			t.Errorf("once more: %v", err)
		}
	}
}

// A store that somebody changed is refused, whatever was changed.
func TestAStoreThatWasChanged(t *testing.T) {
	x := newTown(t)
	x.must(x.change(1, map[string]uint64{"fee": 200_000}))
	x.pass(1)
	x.must(x.change(1, map[string]uint64{"fee": 100_000}))
	good := x.store.records
	refused := func(name string, want error, records ...[]byte) {
		t.Helper()
		x.store.records = records
		if _, err := Open(x.cfg); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	refused("the first is gone", ErrSequence, good[1])
	refused("in another order", ErrSequence, good[1], good[0])
	refused("one twice", ErrSequence, good[0], good[0])
	refused("cut", ErrRecord, good[0][:len(good[0])-1])
	rewrite := func(change func(*Record)) []byte {
		r, err := ParseRecord(good[1])
		x.must(err)
		change(r)
		b, err := r.encode()
		x.must(err)
		return b
	}
	refused("another value", ErrSignature, good[0], rewrite(func(r *Record) { r.Proposal.Changes[0].New++ }))
	refused("another epoch", ErrSignature, good[0], rewrite(func(r *Record) { r.Proposal.Epoch++ }))
	refused("one signature", ErrThreshold, good[0], rewrite(func(r *Record) { r.Signatures = r.Signatures[:1] }))
	refused("an old step", ErrStep, good[0], rewrite(func(r *Record) { r.Step = start/30 - 2 }))
	refused("an old time", ErrClock, good[0], rewrite(func(r *Record) { r.At, r.Began = start-1, start-1 }))
	x.store.records = good
	x.open()
}

package market

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

var (
	priceKey    = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize))
	publisher   = settle.Key(priceKey.Public().(ed25519.PublicKey))
	priceNet    = settle.Hash{1}
	priceModel  = gguf.ModelID{2}
	firstIssued = uint64(1_800_000_000)
)

// firstPrice is a record that may begin a chain, and after is one that may follow another.
func firstPrice() *PriceRecord {
	return &PriceRecord{Network: priceNet, Model: priceModel, State: hourly.Start(0, 1_000_000_000_000), Rules: hourly,
		Sequence: 1, Ref: Reference{5_000_000, firstIssued - 60}, Issued: firstIssued}
}

func (p *PriceRecord) after(t testing.TB, epoch uint64, l Load) *PriceRecord {
	t.Helper()
	n := *p
	var err error
	if n.State, err = p.Rules.Next(p.State, epoch, l); err != nil {
		t.Fatal(err)
	}
	if n.Previous, err = p.Hash(); err != nil {
		t.Fatal(err)
	}
	n.Load, n.Issued = l, p.Issued+(epoch-p.State.Epoch)*p.Rules.EpochSeconds
	return &n
}

func sign(t testing.TB, p *PriceRecord) []byte {
	t.Helper()
	b, err := p.Sign(priceKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var busy = Load{Counted: 900, Capacity: 1000, Heard: true}

func TestPriceRecordBytes(t *testing.T) {
	b := sign(t, firstPrice().after(t, 1, busy))
	want := "af" + "0101" + "02582001" + strings.Repeat("00", 31) + "03582002" + strings.Repeat("00", 31) + "0401" +
		"0558204" + "29eef7179ee0f464308cfa3077de5039d774c101656d9c9e0393358e772318a" + // the hash of the first
		"061b000000e8d50f0500" + "071b000026f331de309c" + "0802" + "09190384" + "0a1903e8" +
		"0b87" + "190e10" + "1a0003f480" + "1a001e8480" + "1a00989680" + "1a26be3680" + "1b0000004bab827200" + "1b000002e90edd0000" +
		"0c01" + "0d1a004c4b40" + "0e1a6b49d1c4" + "0f1a6b49e010"
	if got := hex.EncodeToString(b[:len(b)-ed25519.SignatureSize]); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	back, err := ParsePriceRecord(b, publisher)
	if err != nil || *back != *firstPrice().after(t, 1, busy) {
		t.Errorf("read back %+v, %v", back, err)
	}
}

// resign makes a record of any body.
func resign(body []byte) []byte {
	return append(bytes.Clone(body), ed25519.Sign(priceKey, append([]byte(priceDomain), body...))...)
}

func TestPriceRecordsThatAreRefused(t *testing.T) {
	good := sign(t, firstPrice())
	body := good[:len(good)-ed25519.SignatureSize]
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	changed := bytes.Clone(good)
	changed[8] ^= 1
	swap := func(old, by string) []byte {
		t.Helper()
		o, _ := hex.DecodeString(old)
		n, _ := hex.DecodeString(by)
		if bytes.Count(body, o) != 1 {
			t.Fatalf("%s is in %x %d times", old, body, bytes.Count(body, o))
		}
		return resign(bytes.Replace(body, o, n, 1))
	}
	zeros := strings.Repeat("00", 31)
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"nothing":               {nil, ErrPriceFormat},
		"a signature alone":     {good[len(good)-64:], ErrPriceFormat},
		"too long":              {append(bytes.Clone(good), make([]byte, MaxPriceRecord)...), ErrPriceFormat},
		"cut":                   {good[:len(good)-1], ErrPriceSignature},
		"a flipped signature":   {flipped, ErrPriceSignature},
		"a changed body":        {changed, ErrPriceSignature},
		"no map":                {resign([]byte{1}), ErrPriceFormat},
		"trailing bytes":        {resign(append(bytes.Clone(body), 0)), ErrPriceFormat},
		"another version":       {swap("aa0101", "aa0102"), ErrPriceFormat},
		"an unknown key":        {swap("aa0101", "ab01011000"), ErrPriceFormat},
		"a key twice":           {swap("aa0101", "ab01010101"), ErrPriceFormat},
		"a longer integer":      {swap("aa0101", "aa011801"), ErrPriceFormat},
		"a short network":       {swap("02582001"+zeros, "02581f"+zeros), ErrPriceFormat},
		"a short model":         {swap("03582002"+zeros, "03581f"+zeros), ErrPriceFormat},
		"a zero hash":           {swap("03582002"+zeros, "03582002"+zeros+"055820"+zeros+"00"), ErrPriceFormat},
		"a short hash":          {swap("aa0101", "ab0101"), ErrPriceFormat},
		"a negative epoch":      {swap("03582002"+zeros, "03582002"+zeros+"0420"), ErrPriceFormat},
		"a reference of 0":      {resign(mustBody(t, func(p *PriceRecord) { p.Ref.PerFiat = 0 })), ErrRefMissing},
		"a reference to come":   {resign(mustBody(t, func(p *PriceRecord) { p.Ref.Set = p.Issued + 1 })), ErrRefFuture},
		"rules that are none":   {resign(mustBody(t, func(p *PriceRecord) { p.Rules.StepPPB = 0 })), ErrPriceRules},
		"a price of dust":       {resign(mustBody(t, func(p *PriceRecord) { p.State.Price = 1 })), ErrPriceState},
		"a utilisation above 1": {resign(mustBody(t, func(p *PriceRecord) { p.State.Smooth = 1 << 60 })), ErrPriceState},
		"unknown flags, 8 bits": {flagged(t, 4), ErrPriceFormat},
		"a hash of three bytes": {hashed(t, 3), ErrPriceFormat},
		"a hash of forty bytes": {hashed(t, 40), ErrPriceFormat},
	} {
		if p, err := ParsePriceRecord(tt.b, publisher); !errors.Is(err, tt.want) || p != nil {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := ParsePriceRecord(good, settle.Key{9}); !errors.Is(err, ErrPriceSignature) {
		t.Errorf("another publisher: %v", err)
	}
	bad := firstPrice()
	bad.Rules.Floor = 1
	if _, err := bad.Sign(priceKey); !errors.Is(err, ErrPriceRules) {
		t.Errorf("signing what nobody takes: %v", err)
	}
}

func mustBody(t *testing.T, change func(*PriceRecord)) []byte {
	t.Helper()
	p := firstPrice()
	change(p)
	b, err := p.body()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func wireBody(t *testing.T, change func(*wirePrice)) []byte {
	t.Helper()
	var w wirePrice
	if err := decMode.Unmarshal(mustBody(t, func(*PriceRecord) {}), &w); err != nil {
		t.Fatal(err)
	}
	change(&w)
	b, err := encMode.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	return resign(b)
}

func flagged(t *testing.T, bits uint64) []byte {
	return wireBody(t, func(w *wirePrice) { w.Flags |= bits })
}

func hashed(t *testing.T, n int) []byte {
	return wireBody(t, func(w *wirePrice) { w.Previous = make([]byte, n) })
}

func TestPriceChain(t *testing.T) {
	c := NewPriceChain(priceNet, priceModel, publisher)
	first := firstPrice()
	second := first.after(t, 1, busy)
	third := second.after(t, 5, Load{}) // a gap
	for i, p := range []*PriceRecord{first, first, second, second, third} {
		if err := c.Append(sign(t, p)); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
	}
	last, hash := c.Last()
	if want, _ := third.Hash(); *last != *third || hash != want {
		t.Errorf("the last is %+v", last)
	}
	refused := func(name string, want error, change func(*PriceRecord)) {
		t.Helper()
		p := third.after(t, 6, busy)
		change(p)
		if err := c.Append(sign(t, p)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if now, _ := c.Last(); now != last {
			t.Fatalf("%s: was taken", name)
		}
	}
	refused("another network", ErrPriceNetwork, func(p *PriceRecord) { p.Network[5] = 1 })
	refused("another model", ErrPriceModel, func(p *PriceRecord) { p.Model[5] = 1 })
	refused("an old one", ErrPriceOld, func(p *PriceRecord) { p.State.Epoch = 4 })
	refused("two of one epoch", ErrPriceFork, func(p *PriceRecord) { p.State.Epoch = 5 })
	refused("two after one", ErrPriceFork, func(p *PriceRecord) { p.Previous, p.State.Epoch = third.Previous, 9 })
	refused("after what nobody knows", ErrPriceFork, func(p *PriceRecord) { p.Previous = settle.Hash{1} })
	refused("with others before it", ErrPriceGap, func(p *PriceRecord) { p.Previous, p.State.Epoch = settle.Hash{1}, 7 })
	refused("a price of its own", ErrPriceStep, func(p *PriceRecord) { p.State.Price++ })
	refused("a mean of its own", ErrPriceStep, func(p *PriceRecord) { p.State.Smooth++ })
	refused("data that is none", ErrPriceStep, func(p *PriceRecord) { p.State.NoData = true })
	refused("less work than it says", ErrPriceStep, func(p *PriceRecord) { p.Load.Counted = 10 })
	refused("another band", ErrPriceStep, func(p *PriceRecord) { p.Rules.Ceiling = p.Rules.Floor })
	refused("issued too early", ErrPriceIssued, func(p *PriceRecord) { p.Issued = third.Issued })
	refused("a token of twice the worth", ErrRefJump, func(p *PriceRecord) { p.Ref = Reference{2_499_999, p.Issued} })
	refused("a reference of before", ErrRefOrder, func(p *PriceRecord) { p.Ref = Reference{5_000_001, first.Ref.Set} })
	if err := c.Append(sign(t, third.after(t, 6, busy))); err != nil {
		t.Errorf("the honest one after all these: %v", err)
	}
}

// A reference that moves by little in every record is held to the same as one that moves at once.
func TestPriceChainBoundsTheReferenceOfADay(t *testing.T) {
	c := NewPriceChain(priceNet, priceModel, publisher)
	p := firstPrice()
	start := p.Ref.PerFiat
	var highest settle.Amount
	for e := uint64(1); e <= 60; e++ {
		if err := c.Append(sign(t, p)); err != nil {
			if !errors.Is(err, ErrRefJump) {
				t.Fatal(err)
			}
			break
		}
		highest = p.Ref.PerFiat
		p = p.after(t, e, busy)
		p.Ref = Reference{p.Ref.PerFiat * 11 / 10, p.Issued}
	}
	if highest <= start || highest > 2*start {
		t.Errorf("from %s to %s within a day", start, highest)
	}
	if len(c.refs) > 26 {
		t.Errorf("%d references are kept", len(c.refs))
	}
}

func FuzzParsePriceRecord(f *testing.F) {
	good := sign(f, firstPrice().after(f, 1, busy))
	f.Add(good[:len(good)-ed25519.SignatureSize])
	f.Add([]byte{0xa0})
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := ParsePriceRecord(resign(body), publisher)
		if err != nil {
			return
		}
		again, err := p.Sign(priceKey)
		if err != nil || !bytes.Equal(again, resign(body)) {
			t.Errorf("%x is read, and written as %x, %v", body, again, err)
		}
	})
}

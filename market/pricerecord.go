package market

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// The price record, version 1: what the network's publisher of prices says of one model after an
// epoch. It stands alone, on the gossip topic PriceTopic and where it is asked for: a body, then
// the publisher's Ed25519 signature (64 bytes) over priceDomain and the body; at most MaxPriceRecord
// bytes. A quote names it by its hash, the SHA-256 of the body.
//
// The body is deterministic CBOR (RFC 8949, 4.2.1) of unsigned integers and byte strings: a map
// with integer keys, a key left out where its value is zero. Decoding refuses any other encoding
// of the same value, unknown keys, keys given twice, and trailing bytes.
//
//	1 version, 2 network (32 bytes), 3 model (32 bytes), 4 epoch, 5 hash of the record before
//	(32 bytes, left out in the first), 6 price, 7 smoothed utilisation in 2⁻¹⁶ ppb, 8 flags,
//	9 counted work, 10 capacity, both in thousandths of a token, 11 rules, 12 sequence of the
//	parameters that the rules are from, 13 base units per fiat unit, 14 since when (unix seconds),
//	15 issued (unix seconds)
//	flags: bit 0, no data; bit 1, anything was heard
//	rules: [seconds of an epoch, seconds of the mean, gain, step, target, floor, ceiling]
//
// Version history: 1.
const (
	priceVersion = 1
	priceDomain  = "kvasird price record 1\n"

	// PriceTopic names the gossip topic of price records.
	PriceTopic = "prices"
	// MaxPriceRecord bounds a price record, in bytes.
	MaxPriceRecord = 512

	flagNoData = 1
	flagHeard  = 2
)

// Errors of price records. Each is a reason to refuse one; ErrPriceFork is evidence against the
// publisher, ErrPriceGap a reason to fetch what is between.
var (
	ErrPriceFormat    = errors.New("not a price record")
	ErrPriceSignature = errors.New("the price record is not signed by the network's publisher")
	ErrPriceNetwork   = errors.New("the price record is of another network")
	ErrPriceModel     = errors.New("the price record is of another model")
	ErrPriceOld       = errors.New("the price record is older than the last")
	ErrPriceFork      = errors.New("two price records claim the same place in the chain")
	ErrPriceGap       = errors.New("price records are missing before this one")
	ErrPriceStep      = errors.New("the price does not follow from the record before")
	ErrPriceIssued    = errors.New("the price record is not issued after the one before")
)

// PriceRecord is the price of a model after an epoch, with all that it follows from.
type PriceRecord struct {
	Network  settle.Hash
	Model    gguf.ModelID
	Previous settle.Hash // zero in the first
	State    PriceState
	Load     Load // that led to State
	Rules    PriceRules
	Sequence uint64 // of the parameters that Rules are from
	Ref      Reference
	Issued   uint64 // unix seconds
}

type wirePrice struct {
	Version  int       `cbor:"1,keyasint"`
	Network  []byte    `cbor:"2,keyasint"`
	Model    []byte    `cbor:"3,keyasint"`
	Epoch    uint64    `cbor:"4,keyasint,omitempty"`
	Previous []byte    `cbor:"5,keyasint,omitempty"`
	Price    uint64    `cbor:"6,keyasint"`
	Smooth   uint64    `cbor:"7,keyasint,omitempty"`
	Flags    uint64    `cbor:"8,keyasint,omitempty"`
	Counted  uint64    `cbor:"9,keyasint,omitempty"`
	Capacity uint64    `cbor:"10,keyasint,omitempty"`
	Rules    wireRules `cbor:"11,keyasint"`
	Sequence uint64    `cbor:"12,keyasint,omitempty"`
	PerFiat  uint64    `cbor:"13,keyasint,omitempty"`
	Set      uint64    `cbor:"14,keyasint,omitempty"`
	Issued   uint64    `cbor:"15,keyasint,omitempty"`
}

type wireRules struct {
	_                              struct{} `cbor:",toarray"`
	Epoch, EMA, Gain, Step, Target uint64
	Floor, Ceiling                 Price
}

func (p *PriceRecord) body() ([]byte, error) {
	r := p.Rules
	w := wirePrice{Version: priceVersion, Network: p.Network[:], Model: p.Model[:], Epoch: p.State.Epoch,
		Price: uint64(p.State.Price), Smooth: p.State.Smooth, Counted: p.Load.Counted, Capacity: p.Load.Capacity,
		Rules:    wireRules{Epoch: r.EpochSeconds, EMA: r.EMASeconds, Gain: r.GainPPB, Step: r.StepPPB, Target: r.TargetPPB, Floor: r.Floor, Ceiling: r.Ceiling},
		Sequence: p.Sequence, PerFiat: uint64(p.Ref.PerFiat), Set: p.Ref.Set, Issued: p.Issued}
	if p.Previous != (settle.Hash{}) {
		w.Previous = p.Previous[:]
	}
	if p.State.NoData {
		w.Flags |= flagNoData
	}
	if p.Load.Heard {
		w.Flags |= flagHeard
	}
	return encMode.Marshal(w)
}

// Hash is the name of the record: what a quote and the next record hold.
func (p *PriceRecord) Hash() (settle.Hash, error) {
	body, err := p.body()
	return sha256.Sum256(body), err
}

// Sign returns the record as it travels.
func (p *PriceRecord) Sign(publisher ed25519.PrivateKey) ([]byte, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	body, err := p.body()
	if err != nil {
		return nil, err
	}
	return append(body, ed25519.Sign(publisher, append([]byte(priceDomain), body...))...), nil
}

// ParsePriceRecord reads a record of a publisher. Whether it follows from others a PriceChain says.
func ParsePriceRecord(b []byte, publisher settle.Key) (*PriceRecord, error) {
	n := len(b) - ed25519.SignatureSize
	if n <= 0 || len(b) > MaxPriceRecord {
		return nil, fmt.Errorf("market: %w: %d bytes, at most %d", ErrPriceFormat, len(b), MaxPriceRecord)
	}
	body, sig := b[:n], b[n:]
	if !ed25519.Verify(publisher[:], append([]byte(priceDomain), body...), sig) {
		return nil, fmt.Errorf("market: %w, %s", ErrPriceSignature, publisher)
	}
	var w wirePrice
	if err := decMode.Unmarshal(body, &w); err != nil {
		return nil, fmt.Errorf("market: %w: %v", ErrPriceFormat, err)
	}
	p, err := w.record()
	if err != nil {
		return nil, err
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	if again, err := p.body(); err != nil || !bytes.Equal(again, body) {
		return nil, fmt.Errorf("market: %w: not in its deterministic encoding", ErrPriceFormat)
	}
	return p, nil
}

func (w *wirePrice) record() (*PriceRecord, error) {
	p := &PriceRecord{
		State: PriceState{Epoch: w.Epoch, Price: Price(w.Price), Smooth: w.Smooth, NoData: w.Flags&flagNoData != 0},
		Load:  Load{Counted: w.Counted, Capacity: w.Capacity, Heard: w.Flags&flagHeard != 0},
		Rules: PriceRules{EpochSeconds: w.Rules.Epoch, EMASeconds: w.Rules.EMA, GainPPB: w.Rules.Gain, StepPPB: w.Rules.Step,
			TargetPPB: w.Rules.Target, Floor: w.Rules.Floor, Ceiling: w.Rules.Ceiling},
		Sequence: w.Sequence, Ref: Reference{PerFiat: settle.Amount(w.PerFiat), Set: w.Set}, Issued: w.Issued,
	}
	switch {
	case w.Version != priceVersion:
		return nil, fmt.Errorf("market: %w of version %d, this side reads %d", ErrPriceFormat, w.Version, priceVersion)
	case w.Flags&^(flagNoData|flagHeard) != 0:
		return nil, fmt.Errorf("market: %w: unknown flags %#x", ErrPriceFormat, w.Flags)
	case len(w.Network) != len(p.Network) || len(w.Model) != len(p.Model):
		return nil, fmt.Errorf("market: %w: a network of %d bytes, a model of %d, want 32", ErrPriceFormat, len(w.Network), len(w.Model))
	case len(w.Previous) != 0 && len(w.Previous) != len(p.Previous):
		return nil, fmt.Errorf("market: %w: a hash of %d bytes, want 32", ErrPriceFormat, len(w.Previous))
	}
	copy(p.Network[:], w.Network)
	copy(p.Model[:], w.Model)
	copy(p.Previous[:], w.Previous)
	return p, nil
}

// check applies every rule that needs no other record.
func (p *PriceRecord) check() error {
	if err := p.Rules.Check(); err != nil {
		return err
	}
	if s := p.State; s.Price < MinFloor || s.Price > MaxPrice || s.Smooth > ppb<<smoothBits {
		return fmt.Errorf("market: %w: price %d, utilisation %d", ErrPriceState, s.Price, s.Smooth)
	}
	if p.Ref.PerFiat == 0 {
		return fmt.Errorf("market: %w", ErrRefMissing)
	}
	if p.Ref.Set > p.Issued {
		return fmt.Errorf("market: %w: set at %d, issued at %d", ErrRefFuture, p.Ref.Set, p.Issued)
	}
	return nil
}

// PriceChain follows the prices of one model. Everybody who quotes or pays keeps one, and computes
// each price again: the publisher is believed in what it counted, and in nothing else. The first
// record taken is where trust begins, so whoever wants the whole proof begins at epoch 0. Not safe
// for concurrent use.
type PriceChain struct {
	network   settle.Hash
	model     gguf.ModelID
	publisher settle.Key
	last      *PriceRecord
	hash      settle.Hash
	refs      []Reference // of the last 24 hours, and one that held before, oldest first
}

// NewPriceChain is empty: it takes any record of the publisher as its first.
func NewPriceChain(network settle.Hash, model gguf.ModelID, publisher settle.Key) *PriceChain {
	return &PriceChain{network: network, model: model, publisher: publisher}
}

// Last is the newest record and its hash; nil while there is none. The record is not changed.
func (c *PriceChain) Last() (*PriceRecord, settle.Hash) { return c.last, c.hash }

// Append takes the next record; a repetition of the last changes nothing, and is no error.
func (c *PriceChain) Append(b []byte) error {
	p, err := ParsePriceRecord(b, c.publisher)
	if err != nil {
		return err
	}
	hash := settle.Hash(sha256.Sum256(b[:len(b)-ed25519.SignatureSize]))
	switch {
	case p.Network != c.network:
		return fmt.Errorf("market: %w", ErrPriceNetwork)
	case p.Model != c.model:
		return fmt.Errorf("market: %w, %s", ErrPriceModel, p.Model)
	case c.last != nil && hash == c.hash:
		return nil
	case c.last != nil:
		err = c.follows(p)
	}
	if err != nil {
		return err
	}
	c.last, c.hash = p, hash
	if n := len(c.refs); n == 0 || c.refs[n-1] != p.Ref {
		c.refs = append(c.refs, p.Ref)
	}
	for len(c.refs) > 1 && p.Ref.Set-c.refs[1].Set >= settle.Day {
		c.refs = c.refs[1:]
	}
	return nil
}

func (c *PriceChain) follows(p *PriceRecord) error {
	last := c.last
	switch {
	case p.State.Epoch < last.State.Epoch:
		return fmt.Errorf("market: epoch %d: %w: %d", p.State.Epoch, ErrPriceOld, last.State.Epoch)
	case p.State.Epoch == last.State.Epoch, p.Previous == last.Previous:
		return fmt.Errorf("market: epochs %d and %d: %w: keep both records, and stop paying", last.State.Epoch, p.State.Epoch, ErrPriceFork)
	case p.Previous != c.hash && p.State.Epoch > last.State.Epoch+1:
		return fmt.Errorf("market: epoch %d: %w: the last is %d", p.State.Epoch, ErrPriceGap, last.State.Epoch)
	case p.Previous != c.hash:
		return fmt.Errorf("market: epoch %d: %w: keep both records, and stop paying", p.State.Epoch, ErrPriceFork)
	case p.Issued <= last.Issued:
		return fmt.Errorf("market: epoch %d: %w: at %d, not after %d", p.State.Epoch, ErrPriceIssued, p.Issued, last.Issued)
	}
	want, err := p.Rules.Next(last.State, p.State.Epoch, p.Load)
	if err != nil {
		return err
	}
	if want != p.State {
		return fmt.Errorf("market: epoch %d: %w: %d, which should be %d", p.State.Epoch, ErrPriceStep, p.State.Price, want.Price)
	}
	if p.Ref == last.Ref {
		return nil
	}
	return Follow(c.refs, p.Ref)
}

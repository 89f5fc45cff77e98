package govern

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"kvasird/settle"
)

// The record, version 1: deterministic CBOR (RFC 8949, 4.2.1), at most MaxRecord bytes. Maps have
// integer keys, a key is left out where its value is zero. Decoding refuses any other encoding of
// the same value, unknown keys, keys given twice, and trailing bytes.
//
//	record     1 version, 2 at (unix seconds), 3 epoch at that time, 4 when it began (unix seconds),
//	           5 step of the authenticator, 6 proposal, 7 signatures
//	           a wrong code: 1 to 4 only
//	proposal   1 network (32 bytes), 2 cluster (32 bytes), 3 sequence, 4 from epoch, 5 expires
//	           (unix seconds), 6 changes, 7 withdrawal: it has one of both
//	change     [name, old value, new value], names ascending
//	withdrawal [wallet (32 bytes), amount]
//	signature  [wallet (32 bytes), format: 1 v0, 2 v1, 3 raw, signature (64 bytes)]
//
// Version history: 1.
const (
	recordVersion = 1

	// MaxRecord bounds a record, in bytes, MaxChanges the changes of a proposal, MaxWallets the
	// wallets with authority.
	MaxRecord  = 8 << 10
	MaxChanges = 32
	MaxWallets = 16
)

// ErrRecord is a record that no Governor wrote.
var ErrRecord = errors.New("not a record of governance")

// A Store keeps records for ever, in order. The Governor is its only writer, one call at a time.
// It may keep the slices that it is given, and nobody changes those that it gives.
type Store interface {
	// Append makes the record durable as number n, counted from 0, before it returns nil. After an
	// error it may be stored or not; the Governor then takes nothing more until it is opened again.
	Append(n uint64, record []byte) error
	// Replay calls fn with every record, the oldest first, and stops at its first error.
	Replay(fn func(record []byte) error) error
}

// Record is a change that was taken, or a wrong code.
type Record struct {
	Moment
	Step       uint64 // of the authenticator; 0: a wrong code, and there is no proposal
	Proposal   *Proposal
	Signatures []Signature // without Signed, which follows from the proposal
}

type wireRecord struct {
	Version    int             `cbor:"1,keyasint"`
	At         uint64          `cbor:"2,keyasint"`
	Epoch      uint64          `cbor:"3,keyasint,omitempty"`
	Began      uint64          `cbor:"4,keyasint,omitempty"`
	Step       uint64          `cbor:"5,keyasint,omitempty"`
	Proposal   *wireProposal   `cbor:"6,keyasint,omitempty"`
	Signatures []wireSignature `cbor:"7,keyasint,omitempty"`
}

type wireProposal struct {
	Network  []byte       `cbor:"1,keyasint"`
	Cluster  []byte       `cbor:"2,keyasint"`
	Sequence uint64       `cbor:"3,keyasint"`
	Epoch    uint64       `cbor:"4,keyasint"`
	Expires  uint64       `cbor:"5,keyasint"`
	Changes  []wireChange `cbor:"6,keyasint,omitempty"`

	Withdrawal *wireWithdrawal `cbor:"7,keyasint,omitempty"`
}

type wireWithdrawal struct {
	_      struct{} `cbor:",toarray"`
	Wallet []byte
	Amount uint64
}

type wireChange struct {
	_        struct{} `cbor:",toarray"`
	Name     string
	Old, New uint64
}

type wireSignature struct {
	_      struct{} `cbor:",toarray"`
	Wallet []byte
	Format Format
	Bytes  []byte
}

var (
	encMode = mustMode(cbor.CoreDetEncOptions().EncMode())
	decMode = mustMode(cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		MaxArrayElements:  MaxChanges,
		MaxMapPairs:       16,
		MaxNestedLevels:   5,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
	}.DecMode())
)

func mustMode[T any](mode T, err error) T {
	if err != nil {
		panic(err)
	}
	return mode
}

func (r *Record) encode() ([]byte, error) {
	w := wireRecord{Version: recordVersion, At: r.At, Epoch: r.Epoch, Began: r.Began, Step: r.Step}
	if r.Proposal != nil {
		w.Proposal = r.Proposal.wire()
	}
	for _, s := range r.Signatures {
		w.Signatures = append(w.Signatures, wireSignature{Wallet: s.Wallet[:], Format: s.Format, Bytes: s.Bytes[:]})
	}
	return encMode.Marshal(w)
}

func (p *Proposal) wire() *wireProposal {
	w := &wireProposal{Network: p.Network[:], Cluster: p.Cluster[:], Sequence: p.Sequence, Epoch: p.Epoch, Expires: p.Expires}
	for _, c := range p.Changes {
		w.Changes = append(w.Changes, wireChange{Name: c.Name, Old: c.Old, New: c.New})
	}
	if p.Withdrawal != (Withdrawal{}) {
		w.Withdrawal = &wireWithdrawal{Wallet: p.Withdrawal.To[:], Amount: uint64(p.Withdrawal.Amount)}
	}
	return w
}

// Encode gives the proposal as records have it.
func (p *Proposal) Encode() ([]byte, error) { return encMode.Marshal(p.wire()) }

// ParseProposal reads what Encode writes. It says nothing about bounds.
func ParseProposal(b []byte) (*Proposal, error) {
	var w wireProposal
	if err := unmarshal(b, &w); err != nil {
		return nil, err
	}
	p, err := w.proposal()
	if err != nil {
		return nil, err
	}
	if again, err := p.Encode(); err != nil || !bytes.Equal(again, b) {
		return nil, fmt.Errorf("govern: %w: not in its deterministic encoding", ErrRecord)
	}
	return p, nil
}

func unmarshal(b []byte, into any) error {
	if len(b) > MaxRecord {
		return fmt.Errorf("govern: %w: %d bytes, at most %d", ErrRecord, len(b), MaxRecord)
	}
	if err := decMode.Unmarshal(b, into); err != nil {
		return fmt.Errorf("govern: %w: %v", ErrRecord, err)
	}
	return nil
}

// ParseRecord reads a record. It says nothing about signatures and bounds.
func ParseRecord(b []byte) (*Record, error) {
	var w wireRecord
	if err := unmarshal(b, &w); err != nil {
		return nil, err
	}
	r, err := w.record()
	if err != nil {
		return nil, err
	}
	if again, err := r.encode(); err != nil || !bytes.Equal(again, b) {
		return nil, fmt.Errorf("govern: %w: not in its deterministic encoding", ErrRecord)
	}
	return r, nil
}

func (w *wireRecord) record() (*Record, error) {
	r := &Record{Moment: Moment{At: w.At, Epoch: w.Epoch, Began: w.Began}, Step: w.Step}
	if w.Version != recordVersion {
		return nil, fmt.Errorf("govern: %w of version %d, this side reads %d", ErrRecord, w.Version, recordVersion)
	}
	if accepted := w.Proposal != nil; accepted != (w.Step != 0) || accepted != (len(w.Signatures) > 0) {
		return nil, fmt.Errorf("govern: %w: neither a change nor a wrong code", ErrRecord)
	}
	if w.Proposal != nil {
		var err error
		if r.Proposal, err = w.Proposal.proposal(); err != nil {
			return nil, err
		}
	}
	if len(w.Signatures) > MaxWallets {
		return nil, fmt.Errorf("govern: %w: %d signatures, at most %d", ErrRecord, len(w.Signatures), MaxWallets)
	}
	for _, s := range w.Signatures {
		var x Signature
		if !fill(x.Wallet[:], s.Wallet) || !fill(x.Bytes[:], s.Bytes) {
			return nil, fmt.Errorf("govern: %w: a wallet has 32 bytes, a signature 64", ErrRecord)
		}
		x.Format = s.Format
		r.Signatures = append(r.Signatures, x)
	}
	return r, nil
}

func (w *wireProposal) proposal() (*Proposal, error) {
	p := &Proposal{Sequence: w.Sequence, Epoch: w.Epoch, Expires: w.Expires}
	if !fill(p.Network[:], w.Network) || !fill(p.Cluster[:], w.Cluster) {
		return nil, fmt.Errorf("govern: %w: network and cluster have 32 bytes", ErrRecord)
	}
	for _, c := range w.Changes {
		p.Changes = append(p.Changes, Change{c.Name, c.Old, c.New})
	}
	if x := w.Withdrawal; x != nil {
		p.Withdrawal.Amount = settle.Amount(x.Amount)
		if !fill(p.Withdrawal.To[:], x.Wallet) || p.Withdrawal == (Withdrawal{}) {
			return nil, fmt.Errorf("govern: %w: a withdrawal is to a wallet of 32 bytes", ErrRecord)
		}
	}
	return p, nil
}

// fill copies what has the right length.
func fill(dst, src []byte) bool { return len(src) == len(dst) && copy(dst, src) == len(dst) }

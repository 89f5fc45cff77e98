package p2p

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
)

// An envelope, version 1: what a peer says to all, whoever passes it on.
//
//	record     a map of deterministic CBOR (RFC 8949, 4.2.1) with integer keys
//	signature  64 bytes, ed25519
//
//	record:  1 topic, text                  2 author's peer id, bytes
//	         3 sequence number, uint        4 issued, uint, ms since 1970
//	         5 validity, uint, ms           6 body, bytes
//	         7 anchor, 16 bytes             8 step, uint, ms
//
// Keys 1 to 6 are there, and 7 and 8 both or neither: an envelope that its author renews has
// them, see renewal.go. There are no others: an envelope has exactly one encoding. Refused are also duplicate keys, indefinite lengths, tags,
// floats, trailing bytes, lengths that are not the shortest, and what the checks of
// OpenEnvelope name.
//
// The signature is over
//
//	"kvasir envelope 1" 0x00 network-id 0x00 record
//
// which no other signature of this program can be taken for, nor one of another network.
// The author's key is in its peer id, so an envelope can be judged by itself.
//
// Version history: 1; keys 7 and 8 were added later, and a reader without them refuses the record.
const (
	// MaxBody bounds the body of an envelope in bytes.
	MaxBody = 16 << 10
	// MaxValidity bounds the time for which an envelope counts that is not renewed.
	MaxValidity = time.Hour
	// maxFuture is by how much the author's clock may be ahead of the reader's.
	maxFuture = time.Minute

	envelopeDomain   = "kvasir envelope 1\x00"
	envelopeOverhead = 256 // bytes around the body at most
	maxEnvelope      = MaxBody + envelopeOverhead
)

// Why an envelope is refused.
var (
	ErrEnvelope  = errors.New("malformed envelope")       // not of this format
	ErrOversized = errors.New("oversized envelope")       // over a limit
	ErrForged    = errors.New("forged envelope")          // not signed by its author for this network
	ErrExpired   = errors.New("expired envelope")         // its time is over
	ErrFuture    = errors.New("envelope from the future") // over a minute ahead of the reader's clock
)

var topicPattern = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// Envelope is one statement of a peer on a topic. It counts from Issued for Validity, and for
// as long as it was renewed beyond that, or until one with a greater Seq of the same author on
// the same topic.
type Envelope struct {
	Topic    string  // a-z 0-9 -, 1 to 32 bytes
	From     peer.ID // author
	Seq      uint64  // µs since 1970 when it was made, or more: each multiple of 65,536 parts two of an author
	Issued   time.Time
	Validity time.Duration // over 0, at most MaxValidity
	Body     []byte        // at most MaxBody

	Anchor  []byte        // of its renewals, 16 bytes; nil: it is not renewed
	Step    time.Duration // by which each renewal extends it; 0 without an Anchor
	Renewed time.Duration // by which it has been extended; no part of what is signed
}

// Expires is when the envelope no longer counts.
func (e *Envelope) Expires() time.Time { return e.Issued.Add(e.Validity + e.Renewed) }

// envelopeRecord is the signed part on the wire.
type envelopeRecord struct {
	Topic    string `cbor:"1,keyasint"`
	From     []byte `cbor:"2,keyasint"`
	Seq      uint64 `cbor:"3,keyasint"`
	Issued   uint64 `cbor:"4,keyasint"`
	Validity uint64 `cbor:"5,keyasint"`
	Body     []byte `cbor:"6,keyasint"`
	Anchor   []byte `cbor:"7,keyasint,omitempty"`
	Step     uint64 `cbor:"8,keyasint,omitempty"`
}

// Seal encodes and signs e for a network. Times are cut to milliseconds. It fails when
// e is not this identity's or breaks a limit.
func (i Identity) Seal(network string, e Envelope) ([]byte, error) {
	if e.From != i.id {
		return nil, fmt.Errorf("seal envelope of %s with the key of %s", e.From, i.id)
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	body := e.Body
	if body == nil {
		body = []byte{}
	}
	record, err := encMode.Marshal(envelopeRecord{
		Topic: e.Topic, From: []byte(e.From), Seq: e.Seq,
		Issued: uint64(e.Issued.UnixMilli()), Validity: uint64(e.Validity.Milliseconds()), Body: body,
		Anchor: e.Anchor, Step: uint64(e.Step.Milliseconds()),
	})
	if err != nil {
		return nil, err
	}
	sig, err := i.key.Sign(envelopeMessage(network, record))
	if err != nil {
		return nil, fmt.Errorf("sign envelope: %w", err)
	}
	return append(record, sig...), nil
}

// check applies the limits that do not depend on the time.
func (e *Envelope) check() error {
	switch {
	case !topicPattern.MatchString(e.Topic):
		return fmt.Errorf("%w: topic %q: want 1 to 32 of a-z 0-9 -", ErrEnvelope, clip(e.Topic))
	case e.Issued.UnixMilli() <= 0:
		return fmt.Errorf("%w: issued at %v", ErrEnvelope, e.Issued)
	case e.Validity < time.Millisecond || e.Validity > MaxValidity:
		return fmt.Errorf("%w: validity of %v: want at most %v", ErrOversized, e.Validity, MaxValidity)
	case len(e.Body) > MaxBody:
		return fmt.Errorf("%w: body of %d bytes, at most %d", ErrOversized, len(e.Body), MaxBody)
	case len(e.Anchor) == 0 && e.Step == 0:
		return nil
	case len(e.Anchor) != renewalBytes:
		return fmt.Errorf("%w: anchor of %d bytes, step of %v", ErrEnvelope, len(e.Anchor), e.Step)
	case e.Step < minStep || e.Step > MaxValidity:
		return fmt.Errorf("%w: step of %v: want %v to %v", ErrEnvelope, e.Step, minStep, MaxValidity)
	}
	return nil
}

// OpenEnvelope decodes an envelope and judges it by itself at the time now. Its error
// wraps ErrEnvelope, ErrOversized, ErrForged, ErrExpired or ErrFuture.
func OpenEnvelope(network string, raw []byte, now time.Time) (Envelope, error) {
	e, err := parseEnvelope(raw)
	if err != nil {
		return Envelope{}, err
	}
	if err := e.checkTime(now); err != nil {
		return Envelope{}, err
	}
	return e, verifyEnvelope(network, e.From, raw)
}

// parseEnvelope reads an envelope without looking at clock or signature: nothing in it is
// proved yet.
func parseEnvelope(raw []byte) (Envelope, error) {
	if len(raw) > maxEnvelope {
		return Envelope{}, fmt.Errorf("%w: %d bytes, at most %d", ErrOversized, len(raw), maxEnvelope)
	}
	if len(raw) < ed25519.SignatureSize {
		return Envelope{}, fmt.Errorf("%w: %d bytes are less than a signature", ErrEnvelope, len(raw))
	}
	record := raw[:len(raw)-ed25519.SignatureSize]
	var r envelopeRecord
	if err := decMode.Unmarshal(record, &r); err != nil {
		return Envelope{}, fmt.Errorf("%w: %v", ErrEnvelope, err)
	}
	// Encoding it again shows every other way to write the same: there must be none.
	again, err := encMode.Marshal(r)
	if err != nil || r.Body == nil || !bytes.Equal(again, record) {
		return Envelope{}, fmt.Errorf("%w: not deterministic CBOR of all keys and no others", ErrEnvelope)
	}
	const maxMilli = uint64(1) << 50 // far from overflows; the year 37648
	if most := uint64(MaxValidity.Milliseconds()); r.Issued > maxMilli || r.Validity > most || r.Step > most {
		return Envelope{}, fmt.Errorf("%w: issued %d ms, validity %d ms, step %d ms, at most %d", ErrOversized, r.Issued, r.Validity, r.Step, most)
	}
	from, err := peer.IDFromBytes(r.From)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: author: %v", ErrEnvelope, err)
	}
	if _, err := authorKey(from); err != nil {
		return Envelope{}, fmt.Errorf("%w: author: %v", ErrEnvelope, err)
	}
	e := Envelope{
		Topic: r.Topic, From: from, Seq: r.Seq, Body: r.Body,
		Issued: time.UnixMilli(int64(r.Issued)), Validity: time.Duration(r.Validity) * time.Millisecond,
		Anchor: r.Anchor, Step: time.Duration(r.Step) * time.Millisecond,
	}
	return e, e.check()
}

// checkTime refuses what does not count yet or no more.
func (e *Envelope) checkTime(now time.Time) error {
	latest := now.Add(maxFuture)
	switch {
	case e.Issued.After(latest):
		return fmt.Errorf("%w: issued %v from now: is a clock wrong?", ErrFuture, e.Issued.Sub(now))
	case e.Seq > uint64(latest.UnixMicro()):
		return fmt.Errorf("%w: sequence number %d is over %v ahead of the clock", ErrFuture, e.Seq, maxFuture)
	case !now.Before(e.Expires()):
		return fmt.Errorf("%w: %v ago", ErrExpired, now.Sub(e.Expires()))
	}
	return nil
}

func verifyEnvelope(network string, from peer.ID, raw []byte) error {
	key, err := authorKey(from)
	if err != nil {
		return err
	}
	cut := len(raw) - ed25519.SignatureSize
	ok, err := key.Verify(envelopeMessage(network, raw[:cut]), raw[cut:])
	if err != nil || !ok {
		return fmt.Errorf("%w: signature is not by %s for network %q", ErrForged, from, network)
	}
	return nil
}

// authorKey takes the key out of a peer id; only ed25519 ids hold theirs.
func authorKey(id peer.ID) (crypto.PubKey, error) {
	key, err := id.ExtractPublicKey()
	if err != nil || key.Type() != crypto.Ed25519 {
		return nil, errors.New("peer id holds no ed25519 key")
	}
	if own, err := peer.IDFromPublicKey(key); err != nil || own != id {
		return nil, errors.New("peer id is not the one of its key")
	}
	return key, nil
}

// envelopeMessage is what is signed. Network ids and topics hold no zero byte.
func envelopeMessage(network string, record []byte) []byte {
	msg := make([]byte, 0, len(envelopeDomain)+len(network)+1+len(record))
	msg = append(msg, envelopeDomain...)
	msg = append(msg, network...)
	msg = append(msg, 0)
	return append(msg, record...)
}

package p2p

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"
)

// A renewal says that the author of an envelope is still there and still means it, in 18 bytes
// instead of the envelope again. The author draws a random seed and signs, as the envelope's
// anchor, the end of a chain of hashes that begins with it:
//
//	anchor = link^m(seed)      link(v) = the first 16 bytes of SHA-256("kvasir renewal 1" 0x00 v)
//
// Renewal n is link^(m-n)(seed), told when the envelope is n steps old: whoever has the anchor,
// or an earlier renewal, checks it by hashing, and nobody else can make the next one. So it may
// come from anybody, as the envelope may, and an author that is gone cannot be kept alive by
// others. It extends the envelope by n steps. All of an envelope's life, renewals included, is
// at most MaxLife.
const (
	// MaxLife bounds the time for which an envelope counts, however often it is renewed.
	// A renewal costs who checks it at most MaxLife / minStep hashes, under a millisecond.
	MaxLife = 24 * time.Hour

	minStep       = 10 * time.Second
	renewalBytes  = 16 // of an anchor, and of the value of a renewal
	renewalSize   = 2 + renewalBytes
	renewalDomain = "kvasir renewal 1\x00"
)

// renewal is the n-th of an envelope; 0 is none.
//
// On the wire: n, 2 bytes little-endian; the value.
type renewal struct {
	n     int
	value [renewalBytes]byte
}

func (r renewal) append(b []byte) []byte {
	return append(binary.LittleEndian.AppendUint16(b, uint16(r.n)), r.value[:]...)
}

// parseRenewal reads the renewalSize bytes at the beginning of b.
func parseRenewal(b []byte) renewal {
	return renewal{int(binary.LittleEndian.Uint16(b)), [renewalBytes]byte(b[2:renewalSize])}
}

// link is the next value towards the anchor.
func link(v [renewalBytes]byte) [renewalBytes]byte {
	var in [len(renewalDomain) + renewalBytes]byte
	copy(in[:], renewalDomain)
	copy(in[len(renewalDomain):], v[:])
	sum := sha256.Sum256(in[:])
	return [renewalBytes]byte(sum[:])
}

// renewals makes those of one own envelope.
type renewals struct {
	seed [renewalBytes]byte
	most int
}

// newRenewals draws the renewals of an envelope of this validity.
func newRenewals(validity, step time.Duration) (renewals, error) {
	if step < minStep || step > MaxValidity {
		return renewals{}, fmt.Errorf("renew every %v: want %v to %v", step, minStep, MaxValidity)
	}
	r := renewals{most: int((MaxLife - validity) / step)}
	_, err := rand.Read(r.seed[:])
	return r, err
}

// at returns the n-th; the 0th has the anchor.
func (r *renewals) at(n int) renewal {
	v := r.seed
	for range r.most - n {
		v = link(v)
	}
	return renewal{n, v}
}

// checkRenewal reports whether r extends an envelope of which an earlier renewal is known, or
// none: known is the zero renewal then. Its work is bounded by MaxLife and minStep.
func (e *Envelope) checkRenewal(r, known renewal, now time.Time) error {
	if known.n == 0 {
		copy(known.value[:], e.Anchor)
	}
	age := time.Duration(r.n) * e.Step
	switch {
	case e.Step == 0 || r.n <= known.n:
		return fmt.Errorf("%w: renewal %d after %d, every %v", ErrEnvelope, r.n, known.n, e.Step)
	case age+e.Validity > MaxLife:
		return fmt.Errorf("%w: renewed for %v, at most %v in all", ErrOversized, age, MaxLife)
	case e.Issued.Add(age).After(now.Add(maxFuture)):
		return fmt.Errorf("%w: renewal %d, before its time", ErrFuture, r.n)
	}
	v := r.value
	for range r.n - known.n {
		v = link(v)
	}
	if !bytes.Equal(v[:], known.value[:]) {
		return fmt.Errorf("%w: renewal %d is none of this envelope", ErrForged, r.n)
	}
	return nil
}

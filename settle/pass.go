package settle

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"unicode/utf8"
)

// MaxPass bounds a signed pass, in bytes.
const MaxPass = 1 << 10

const (
	passDomain = "kvasir pass 1\n"
	lendDomain = "kvasir pass lent 1\n"
)

// Pass is the settlement's word that a request is paid: its entry shows it to those who are to
// compute for it. It says how much at most, and nothing of what will be paid: that follows from
// the receipt.
//
// On the wire it is an envelope as a Report's: a map 1: the pass, itself a map in bytes, 2: the
// signature over SHA-256 of the domain and those bytes.
type Pass struct {
	Network Hash    `cbor:"1,keyasint"`
	Request QuoteID `cbor:"2,keyasint"`
	Signer  Node    `cbor:"3,keyasint"` // who settles
	Entry   Node    `cbor:"4,keyasint"` // who alone may have it computed
	Model   string  `cbor:"5,keyasint"` // id
	Tokens  uint64  `cbor:"6,keyasint"` // of prompts and answers, at most
	Expires uint64  `cbor:"7,keyasint"` // Unix seconds
}

// ErrPass refuses a pass.
var ErrPass = errors.New("the pass is not well formed")

func (p Pass) check() error {
	bad := ""
	switch {
	case p.Network == Hash{} || p.Request == QuoteID{} || p.Entry == Node{}:
		bad = "it names no network, request or entry"
	case p.Model == "" || len(p.Model) > MaxModelName || !utf8.ValidString(p.Model):
		bad = fmt.Sprintf("the model's name is not 1 to %d bytes of UTF-8", MaxModelName)
	case p.Tokens == 0 || p.Tokens > 2*MaxTokens:
		bad = fmt.Sprintf("%d tokens, 1 to %d", p.Tokens, 2*MaxTokens)
	default:
		return nil
	}
	return fmt.Errorf("%w: %s", ErrPass, bad)
}

// Sign encodes the pass with a signature by its signer's key. Error: ErrPass.
func (p Pass) Sign(key ed25519.PrivateKey) ([]byte, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	if !bytes.Equal(key.Public().(ed25519.PublicKey), p.Signer[:]) {
		return nil, fmt.Errorf("%w: the key is not its signer's", ErrPass)
	}
	body, err := encMode.Marshal(p)
	if err != nil {
		return nil, err
	}
	h := signedHash(passDomain, body)
	return encMode.Marshal(envelope{body, Signature(ed25519.Sign(key, h[:]))})
}

// ParsePass reads and verifies a signed pass. Whether its signer settles, the network is the own
// one, and it is in time, is the caller's part. Errors: ErrRecord, ErrPass, ErrWeakKey,
// ErrSignature.
func ParsePass(b []byte) (p Pass, err error) {
	var e envelope
	if err := decode(b, MaxPass, &e); err != nil {
		return p, err
	}
	if err := decode(e.Body, MaxPass, &p); err != nil {
		return Pass{}, err
	}
	if err := p.check(); err != nil {
		return Pass{}, err
	}
	h := signedHash(passDomain, e.Body)
	if err := Verify(p.Signer, h[:], e.Signature); err != nil {
		return Pass{}, err
	}
	return p, nil
}

// lendHash is what an entry signs to let another node have its request computed.
func (p Pass) lendHash(to Node) Hash {
	return signedHash(lendDomain, bytes.Join([][]byte{p.Network[:], p.Request[:], to[:]}, nil))
}

// Lend signs that to has the request computed for the entry, whose key it is.
func (p Pass) Lend(key ed25519.PrivateKey, to Node) Signature {
	h := p.lendHash(to)
	return Signature(ed25519.Sign(key, h[:]))
}

// VerifyLent checks that the entry lent the pass to a node. Errors: ErrWeakKey, ErrSignature.
func (p Pass) VerifyLent(to Node, sig Signature) error {
	h := p.lendHash(to)
	return Verify(p.Entry, h[:], sig)
}

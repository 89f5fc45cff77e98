package settle

import (
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"

	"filippo.io/edwards25519"
	"github.com/fxamacker/cbor/v2"
)

// Refusals of a signature.
var (
	ErrWeakKey   = errors.New("the key cannot sign: it is not a point of the curve, not written in the one way, or of small order")
	ErrSignature = errors.New("the signature does not hold")
)

// CheckKey refuses a key under which signatures can be made without a secret: the
// standard library verifies those of points of small order. Error: ErrWeakKey.
func CheckKey(k Key) error {
	p, err := new(edwards25519.Point).SetBytes(k[:])
	if err != nil || [32]byte(p.Bytes()) != k {
		return fmt.Errorf("%w: %s", ErrWeakKey, k)
	}
	if smallOrder(p) {
		return fmt.Errorf("%w: %s", ErrWeakKey, k)
	}
	return nil
}

// SmallOrder says whether a key, however it is written, is of a point for which anybody can
// sign. It says nothing of what is no point: such an address of the chain belongs to a program.
func SmallOrder(k Key) bool {
	p, err := new(edwards25519.Point).SetBytes(k[:])
	return err == nil && smallOrder(p)
}

func smallOrder(p *edwards25519.Point) bool {
	return new(edwards25519.Point).MultByCofactor(p).Equal(edwards25519.NewIdentityPoint()) == 1
}

// Verify checks a signature of ed25519 by a key that is not weak. Errors: ErrWeakKey,
// ErrSignature.
func Verify(k Key, message []byte, sig Signature) error {
	if err := CheckKey(k); err != nil {
		return err
	}
	if !ed25519.Verify(k[:], message, sig[:]) {
		return fmt.Errorf("%w: by %s", ErrSignature, k)
	}
	return nil
}

// signedHash is what is signed of a record: SHA-256 over its domain and its bytes.
func signedHash(domain string, body []byte) Hash {
	return sha256.Sum256(append([]byte(domain), body...))
}

const (
	claimDomain = "kvasir claim 1\n"
)

// ClaimHash is what a wallet signs to take the inference that its payment paid for.
func ClaimHash(network Hash, quote QuoteID, payment Signature, request Hash) Hash {
	body := append(network[:], quote[:]...)
	body = append(body, payment[:]...)
	return signedHash(claimDomain, append(body, request[:]...))
}

// VerifyClaim checks the signature of the payer over ClaimHash. Errors: ErrWeakKey,
// ErrSignature.
func VerifyClaim(payer Wallet, network Hash, quote QuoteID, payment Signature, request Hash, sig Signature) error {
	h := ClaimHash(network, quote, payment, request)
	return Verify(payer, h[:], sig)
}

// Records have exactly one encoding: core deterministic CBOR. A decoder encodes again
// what it read and compares.
var (
	encMode = must(cbor.CoreDetEncOptions().EncMode())
	decMode = must(cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
		MaxNestedLevels:   8,
		MaxArrayElements:  MaxParts,
		MaxMapPairs:       16,
	}.DecMode())
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// ErrRecord refuses bytes that are not a record in its one encoding.
var ErrRecord = errors.New("the record is not well formed")

// decode reads v from at most most bytes, which must be the one encoding of it.
func decode(b []byte, most int, v any) error {
	if len(b) > most {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrRecord, len(b), most)
	}
	if err := decMode.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %v", ErrRecord, err)
	}
	again, err := encMode.Marshal(v)
	if err != nil || string(again) != string(b) {
		return fmt.Errorf("%w: its encoding is not the shortest, in order", ErrRecord)
	}
	return nil
}

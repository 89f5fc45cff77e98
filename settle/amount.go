package settle

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"strconv"

	"github.com/mr-tron/base58"
)

// Amount is a number of the token's base units.
type Amount uint64

var errOverflow = errors.New("the amount does not fit 64 bits")

// ParseAmount reads a decimal number without sign, leading zeros, point or exponent,
// at most 2⁶⁴ − 1.
func ParseAmount(s string) (Amount, error) {
	if s == "" || len(s) > 20 || s[0] == '0' && len(s) > 1 {
		return 0, fmt.Errorf("amount %.24q is not a whole number of base units such as 1500", s)
	}
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return 0, fmt.Errorf("amount %.24q is not a whole number of base units such as 1500", s)
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("amount %s: %w", s, errOverflow)
	}
	return Amount(n), nil
}

func (a Amount) String() string { return strconv.FormatUint(uint64(a), 10) }

// MarshalText gives the decimal digits: in JSON an amount is a string, since other
// readers keep numbers as floats.
func (a Amount) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText is ParseAmount.
func (a *Amount) UnmarshalText(text []byte) (err error) {
	*a, err = ParseAmount(string(text))
	return err
}

// Add returns a + b, or an error when it does not fit.
func (a Amount) Add(b Amount) (Amount, error) {
	sum, carry := bits.Add64(uint64(a), uint64(b), 0)
	if carry != 0 {
		return 0, errOverflow
	}
	return Amount(sum), nil
}

// mulDiv returns ⌊a·b/c⌋ through 128 bits, and whether something remains. Errors: c is
// 0, or the quotient does not fit.
func mulDiv(a, b, c uint64) (q uint64, rest bool, err error) {
	hi, lo := bits.Mul64(a, b)
	if c == 0 {
		return 0, false, errors.New("division by zero")
	}
	if hi >= c {
		return 0, false, errOverflow
	}
	q, r := bits.Div64(hi, lo, c)
	return q, r != 0, nil
}

// Key is a public key of the chain: a wallet, a mint, an account, a program.
type Key [32]byte

// Wallet is the key of a person's or a node's account holder.
type Wallet = Key

// Signature is the 64 bytes of a transaction's first signature, which name it.
type Signature [64]byte

// ParseKey reads base58 of exactly 32 bytes.
func ParseKey(s string) (k Key, err error) {
	err = fromBase58(k[:], "key", s)
	return k, err
}

// ParseSignature reads base58 of exactly 64 bytes.
func ParseSignature(s string) (sig Signature, err error) {
	err = fromBase58(sig[:], "transaction signature", s)
	return sig, err
}

func fromBase58(dst []byte, what, s string) error {
	if len(s) > 2*len(dst) { // base58 needs 1.37 characters a byte
		return fmt.Errorf("%s of %d characters: it is base58 of %d bytes", what, len(s), len(dst))
	}
	b, err := base58.Decode(s)
	if err != nil || len(b) != len(dst) {
		return fmt.Errorf("%s %q is not base58 of %d bytes", what, s, len(dst))
	}
	copy(dst, b)
	return nil
}

func (k Key) String() string       { return base58.Encode(k[:]) }
func (s Signature) String() string { return base58.Encode(s[:]) }

// MarshalText gives base58.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText is ParseKey.
func (k *Key) UnmarshalText(text []byte) (err error) {
	*k, err = ParseKey(string(text))
	return err
}

// MarshalText gives base58.
func (s Signature) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is ParseSignature.
func (s *Signature) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSignature(string(text))
	return err
}

// Hash is a SHA-256 sum.
type Hash [sha256.Size]byte

// MarshalText gives hexadecimal digits in lower case.
func (h Hash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText reads 64 hexadecimal digits in lower case.
func (h *Hash) UnmarshalText(text []byte) error {
	if n, err := hex.Decode(h[:], text[:min(len(text), 2*len(h))]); err != nil || n != len(h) || hex.EncodeToString(h[:]) != string(text) {
		return fmt.Errorf("hash %.70q is not 64 hexadecimal digits in lower case", text)
	}
	return nil
}

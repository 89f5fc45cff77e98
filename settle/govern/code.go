package govern

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/pquerna/otp"
	"github.com/pquerna/otp/hotp"

	"kvasird/settle"
)

// The authenticator: TOTP as every app has it, SHA-1, 6 digits, a step of 30 seconds, one step of
// skew to either side.
const (
	stepSeconds = 30
	skewSteps   = 1
	secretBytes = 20
	codeDigits  = 6

	freeFailures = 5                // wrong codes in a row before there is a lock
	firstLock    = 15 * time.Minute // doubled for each wrong code more
	longestLock  = 24 * time.Hour
)

// Errors of the authenticator.
var (
	ErrCode     = errors.New("wrong code of the authenticator")
	ErrCodeUsed = errors.New("the code of the authenticator, or a later one, was used already")
	ErrLocked   = errors.New("too many wrong codes of the authenticator")
	ErrSecret   = errors.New("the secret of the authenticator cannot be opened")
)

// NewSecret makes the secret of an authenticator: what the operator's app gets, in base32, and
// what is stored, which only the key opens, for this network.
func NewSecret(random io.Reader, key [32]byte, network settle.Hash) (text string, sealed []byte, err error) {
	b := make([]byte, secretBytes+12)
	if _, err := io.ReadFull(random, b); err != nil {
		return "", nil, fmt.Errorf("govern: secret of the authenticator: %w", err)
	}
	secret, nonce := b[:secretBytes], b[secretBytes:]
	gcm := sealer(key)
	return base32.StdEncoding.EncodeToString(secret), gcm.Seal(nonce, nonce, secret, network[:]), nil
}

// openSecret returns the secret in base32.
func openSecret(key [32]byte, network settle.Hash, sealed []byte) (string, error) {
	gcm := sealer(key)
	if len(sealed) != gcm.NonceSize()+secretBytes+gcm.Overhead() {
		return "", fmt.Errorf("govern: %w: %d bytes", ErrSecret, len(sealed))
	}
	secret, err := gcm.Open(nil, sealed[:gcm.NonceSize()], sealed[gcm.NonceSize():], network[:])
	if err != nil {
		return "", fmt.Errorf("govern: %w: another key or network, or it was changed", ErrSecret)
	}
	return base32.StdEncoding.EncodeToString(secret), nil
}

// sealer is AES-256-GCM under a key derived for this use alone. A new secret has a new nonce.
func sealer(key [32]byte) cipher.AEAD {
	k := sha256.Sum256(append([]byte("kvasird authenticator\n"), key[:]...))
	block, err := aes.NewCipher(k[:])
	if err != nil {
		panic(err) // 32 bytes are a key
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return gcm
}

// attempts is what was tried of the authenticator.
type attempts struct {
	step        uint64 // the last that was taken
	failures    int    // since then
	lastFailure uint64 // unix seconds
}

// lockedUntil is in unix seconds.
func (a attempts) lockedUntil() uint64 {
	if a.failures < freeFailures {
		return 0
	}
	lock := longestLock
	if n := a.failures - freeFailures; n < 7 {
		lock = min(firstLock<<n, longestLock)
	}
	return a.lastFailure + uint64(lock/time.Second)
}

// check returns the step of a code that may be taken now.
func (a attempts) check(secret, code string, now uint64) (step uint64, err error) {
	if until := a.lockedUntil(); now < until {
		return 0, fmt.Errorf("govern: %w: try again in %d s", ErrLocked, until-now)
	}
	var found uint64
	for s := now/stepSeconds - min(skewSteps, now/stepSeconds); s <= now/stepSeconds+skewSteps; s++ {
		want, err := hotp.GenerateCodeCustom(secret, s, hotp.ValidateOpts{Digits: codeDigits, Algorithm: otp.AlgorithmSHA1})
		if err != nil {
			return 0, fmt.Errorf("govern: %w: %v", ErrSecret, err)
		}
		if subtle.ConstantTimeCompare([]byte(want), []byte(code)) == 1 {
			found = s // the latest, if two steps have the same code
		}
	}
	switch {
	case found == 0:
		return 0, fmt.Errorf("govern: %w: 6 digits, and a clock that is right on both sides", ErrCode)
	case found <= a.step:
		return 0, fmt.Errorf("govern: %w: wait for the next", ErrCodeUsed)
	}
	return found, nil
}

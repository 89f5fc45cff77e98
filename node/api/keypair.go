package api

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
)

// MaxKeyPair bounds the file of a key pair, in bytes.
const MaxKeyPair = 4 << 10

// ParseKeyPair reads a wallet's key pair as Solana's tools write it: a JSON list of the 64 bytes of
// secret and public key. The error names path, where text is from.
func ParseKeyPair(path string, text []byte) (ed25519.PrivateKey, error) {
	var numbers []int
	if len(text) > MaxKeyPair || json.Unmarshal(text, &numbers) != nil || len(numbers) != ed25519.PrivateKeySize {
		return nil, fmt.Errorf("%s is no key pair: want a JSON list of 64 numbers, as `solana-keygen new` writes it", path)
	}
	raw := make([]byte, len(numbers))
	for i, n := range numbers {
		if n < 0 || n > 255 {
			return nil, fmt.Errorf("%s is no key pair: number %d is not a byte", path, i+1)
		}
		raw[i] = byte(n)
	}
	key := ed25519.NewKeyFromSeed(raw[:ed25519.SeedSize])
	if !bytes.Equal(key, raw) {
		return nil, fmt.Errorf("%s is no key pair: its public key is of another secret", path)
	}
	return key, nil
}

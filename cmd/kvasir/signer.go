package main

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/mr-tron/base58"
)

// maxKeyPair bounds a key pair's file in bytes.
const maxKeyPair = 4 << 10

// signer is how a wallet signs: with a key pair in a file, here; or elsewhere.
type signer struct {
	keypair, signature, format string
}

func (f *flags) signerFlags() *signer {
	s := new(signer)
	f.StringVar(&s.keypair, "keypair", "", "`file` with the wallet's key pair, as Solana's tools write it, to sign with")
	f.StringVar(&s.signature, "signature", "", "`signature` that the wallet made elsewhere, in base58")
	f.StringVar(&s.format, "format", "v0", "how it was made elsewhere: v0 or v1 (off-chain message), or raw (the text alone)")
	return s
}

func (s *signer) check() error {
	if s.keypair != "" && s.signature != "" {
		return usagef("--keypair signs here, --signature was made elsewhere: give one")
	}
	return nil
}

// sign signs a text with the key pair, as it is.
func (s *signer) sign(text string) (wallet, format, signature string, err error) {
	key, err := readKeyPair(s.keypair)
	if err != nil {
		return "", "", "", err
	}
	return walletOf(key), "raw", base58.Encode(ed25519.Sign(key, []byte(text))), nil
}

func walletOf(key ed25519.PrivateKey) string { return base58.Encode(key[ed25519.SeedSize:]) }

// readKeyPair reads a JSON list of the 64 bytes of secret and public key.
func readKeyPair(path string) (ed25519.PrivateKey, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxKeyPair+1))
	if err != nil {
		return nil, err
	}
	bad := fmt.Errorf("%s is no key pair: want a JSON list of 64 numbers, as `solana-keygen new` writes it", path)
	var numbers []int
	if len(text) > maxKeyPair || json.Unmarshal(text, &numbers) != nil || len(numbers) != ed25519.PrivateKeySize {
		return nil, bad
	}
	raw := make([]byte, len(numbers))
	for i, n := range numbers {
		if n < 0 || n > 255 {
			return nil, bad
		}
		raw[i] = byte(n)
	}
	if key := ed25519.NewKeyFromSeed(raw[:ed25519.SeedSize]); bytes.Equal(key, raw) {
		return key, nil
	}
	return nil, bad
}

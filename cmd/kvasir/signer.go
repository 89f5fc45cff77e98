package main

import (
	"crypto/ed25519"
	"io"
	"os"

	"github.com/mr-tron/base58"

	"kvasird/node/api"
)

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

// readKeyPair reads a wallet's key pair.
func readKeyPair(path string) (ed25519.PrivateKey, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, api.MaxKeyPair+1))
	if err != nil {
		return nil, err
	}
	return api.ParseKeyPair(path, text)
}

package node

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"

	"kvasird/node/api"
	"kvasird/settle"
)

// maxProviders bounds the RPC providers of a settlement.
const maxProviders = 8

// SettleConfig says how the role settle works. Key files are key pairs as Solana's tools
// write them, mode 0600.
type SettleConfig struct {
	RPC              []string `toml:"rpc"`               // URLs of providers, which have to agree; never logged
	VaultKey         string   `toml:"vault_key"`         // of the vault's owner
	FeeKey           string   `toml:"fee_key"`           // of who pays fees; "": the vault's owner, and no x402
	Books            string   `toml:"books"`             // folder; "": books in the data folder
	Authenticator    string   `toml:"authenticator"`     // sealed secret; "": beside the network file
	AuthenticatorKey string   `toml:"authenticator_key"` // what opens it; "": beside the network file
}

// LogValue keeps URLs, which may have keys in them, out of logs.
func (s SettleConfig) LogValue() slog.Value {
	return slog.GroupValue(slog.Int("rpc", len(s.RPC)), slog.String("vault_key", s.VaultKey), slog.String("fee_key", s.FeeKey))
}

// checkSettle checks the table of the role settle. Errors name no URL.
func (c *Config) checkSettle() error {
	s := &c.Settle
	if !c.Has(RoleSettle) {
		return nil
	}
	if c.Genesis == nil || c.Genesis.Token == nil {
		return errors.New("the role settle needs a network file with a token: make one with `kvasir network create NAME --token mint=…`")
	}
	if len(s.RPC) == 0 || len(s.RPC) > maxProviders {
		return fmt.Errorf("settle.rpc has %d URLs: name 1 to %d providers, better two of different operators", len(s.RPC), maxProviders)
	}
	for i, text := range s.RPC {
		if u, err := url.Parse(text); err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
			return fmt.Errorf("settle.rpc: the %d. is no http or https URL", i+1)
		}
	}
	if s.VaultKey == "" {
		return errors.New("settle.vault_key is missing: name the file with the key pair of the vault's owner")
	}
	setDefault(&s.Books, filepath.Join(c.Data, "books"))
	setDefault(&s.Authenticator, beside(c.Network, authenticatorSuffix))
	setDefault(&s.AuthenticatorKey, beside(c.Network, authenticatorKeySuffix))
	return nil
}

// readKeyPair reads a wallet's key pair from a file that nobody else reads.
func readKeyPair(path string) (ed25519.PrivateKey, error) {
	text, err := readPrivate(path)
	if err != nil {
		return nil, err
	}
	return api.ParseKeyPair(path, text)
}

// ofWallet refuses the key of another wallet.
func ofWallet(key ed25519.PrivateKey, want settle.Wallet) error {
	if got := settle.Wallet(key.Public().(ed25519.PublicKey)); got != want {
		return fmt.Errorf("it is the key of %s, not of %s", got, want)
	}
	return nil
}

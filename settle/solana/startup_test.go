//go:build svm

package solana

import (
	"context"
	"errors"
	"strings"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// spoiltVault is a vault of its own owner's, changed by instructions.
func (w *world) spoiltVault(name string, signer func(owner settletest.Wallet) settletest.Wallet, in func(vault settle.Key, owner settletest.Wallet) settletest.Instruction) settle.Wallet {
	w.t.Helper()
	owner := w.NewWallet(name)
	vault := w.mint.Open(owner.Key)
	w.Run(w.wallets(signer(owner)), in(vault, owner))
	return owner.Key
}

func TestCheck(t *testing.T) {
	w := newWorld(t)
	self := func(owner settletest.Wallet) settletest.Wallet { return owner }
	frozen := w.spoiltVault("frozen", func(settletest.Wallet) settletest.Wallet { return w.mint.Authority },
		func(vault settle.Key, _ settletest.Wallet) settletest.Instruction { return w.mint.Freeze(vault) })
	delegated := w.spoiltVault("delegated", self, func(vault settle.Key, owner settletest.Wallet) settletest.Instruction {
		return w.mint.Approve(vault, w.eve.Key, owner.Key, 1)
	})
	closable := w.spoiltVault("closable", self, func(vault settle.Key, owner settletest.Wallet) settletest.Instruction {
		return w.mint.SetCloser(vault, owner.Key, w.eve.Key)
	})
	own := w.spoiltVault("closable by itself", self, func(vault settle.Key, owner settletest.Wallet) settletest.Instruction {
		return w.mint.SetCloser(vault, owner.Key, owner.Key)
	})
	given := w.spoiltVault("given away", self, func(vault settle.Key, owner settletest.Wallet) settletest.Instruction {
		return w.mint.SetOwner(vault, owner.Key, w.eve.Key)
	})
	hidden := w.NewMint("hidden", settletest.Token2022, settletest.ConfidentialTransfers(w.eve.Key))
	plain := w.NewMint("plain", settletest.Token2022)
	plain.Open(w.operator.Key)
	base := Config{Providers: []string{w.URL("a"), w.URL("b")}, Genesis: w.genesis, Decimals: 6,
		Vault: Vault{Owner: w.operator.Key, Mint: w.mint.Key, Program: w.mint.Program}}
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   error
		says   string
	}{
		{"as it should be", func(*Config) {}, nil, ""},
		{"closable by its owner", func(c *Config) { c.Vault.Owner = own }, nil, ""},
		{"Token-2022 without extensions", func(c *Config) { c.Vault.Mint, c.Vault.Program = plain.Key, plain.Program }, nil, ""},
		{"another cluster", func(c *Config) { c.Genesis[0]++ }, ErrCluster, "not"},
		{"other decimals", func(c *Config) { c.Decimals = 9 }, ErrMint, "6 decimals"},
		{"no mint", func(c *Config) { c.Vault.Mint = w.alice.Key }, ErrMint, "its program"},
		{"no such account", func(c *Config) { c.Vault.Mint = settle.Key{1, 2, 3} }, ErrMint, "no account"},
		{"a token account as mint", func(c *Config) { c.Vault.Mint = w.vault() }, ErrMint, "not a mint"},
		{"the mint of another program", func(c *Config) { c.Vault.Mint = w.fee.Key }, ErrMint, "its program"},
		{"fees", func(c *Config) { c.Vault.Mint, c.Vault.Program = w.fee.Key, w.fee.Program }, ErrMint, "transfer fee"},
		{"a permanent delegate", func(c *Config) { c.Vault.Mint, c.Vault.Program = w.drained.Key, w.drained.Program }, ErrMint, "permanent delegate"},
		{"confidential transfers", func(c *Config) { c.Vault.Mint, c.Vault.Program = hidden.Key, hidden.Program }, ErrMint, "confidential"},
		{"no vault", func(c *Config) { c.Vault.Owner = w.NewWallet("poor").Key }, ErrVault, "create"},
		{"a frozen vault", func(c *Config) { c.Vault.Owner = frozen }, ErrVault, "frozen"},
		{"a vault with a delegate", func(c *Config) { c.Vault.Owner = delegated }, ErrVault, "delegate"},
		{"a vault that others can close", func(c *Config) { c.Vault.Owner = closable }, ErrVault, "close"},
		{"a vault that was given away", func(c *Config) { c.Vault.Owner = given }, ErrVault, "owner"},
		{"a provider that is down", func(c *Config) { c.Providers[1] = "http://127.0.0.1:1/?key=secret" }, ErrProvider, "provider 2"},
	} {
		cfg := base
		cfg.Providers = append([]string(nil), base.Providers...)
		tt.change(&cfg)
		cl, err := New(cfg)
		if err == nil {
			err = cl.Check(context.Background())
		}
		if !errors.Is(err, tt.want) || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %v with %q", tt.name, err, tt.want, tt.says)
		}
		if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "127.0.0.1")) {
			t.Errorf("%s: an error with the URL: %v", tt.name, err)
		}
	}
}

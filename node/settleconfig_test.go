package node

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeKeyPair writes the key of a test's wallet as Solana's tools do.
func writeKeyPair(t testing.TB, path, name string) {
	t.Helper()
	_, key := walletOf(name)
	var numbers []int
	for _, b := range key {
		numbers = append(numbers, int(b))
	}
	if err := os.WriteFile(path, must(json.Marshal(numbers))(t), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestReadKeyPair(t *testing.T) {
	path := filepath.Join(t.TempDir(), "id.json")
	writeKeyPair(t, path, "a")
	key := must(readKeyPair(path))(t)
	a, _ := walletOf("a")
	b, _ := walletOf("b")
	if err := ofWallet(key, a); err != nil {
		t.Error(err)
	}
	if err := ofWallet(key, b); err == nil || !strings.Contains(err.Error(), "not of "+b.String()) {
		t.Errorf("another wallet's: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readKeyPair(path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a file that others read: %v", err)
	}
}

func TestSettleConfig(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, opts := range map[string]NewNetwork{"paid": {Token: tokenSettings()}, "free": {}} {
		opts.Name = name
		if err := CreateNetwork(opts, new(bytes.Buffer)); err != nil {
			t.Fatal(err)
		}
	}
	good := SettleConfig{RPC: []string{"https://rpc.example/key-that-is-secret"}, VaultKey: "vault.json"}
	c := Config{Network: "./paid.toml", Data: "data", Roles: []Role{RoleSettle}, Settle: good}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if s := c.Settle; s.Books != "data/books" || s.Authenticator != "./paid.authenticator" || s.AuthenticatorKey != "./paid.authenticator.key" {
		t.Errorf("defaults %+v", s)
	}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("configuration", "settle", c.Settle)
	if strings.Contains(log.String(), "secret") {
		t.Errorf("logged %s", &log)
	}
	for name, tt := range map[string]struct {
		network string
		change  func(*SettleConfig)
		want    string
	}{
		"no token":     {"./free.toml", func(*SettleConfig) {}, "network file with a token"},
		"no file":      {"kvasir", func(*SettleConfig) {}, "network file with a token"},
		"no provider":  {"./paid.toml", func(s *SettleConfig) { s.RPC = nil }, "settle.rpc has 0 URLs"},
		"many":         {"./paid.toml", func(s *SettleConfig) { s.RPC = make([]string, maxProviders+1) }, "settle.rpc has 9 URLs"},
		"no URL":       {"./paid.toml", func(s *SettleConfig) { s.RPC = []string{"https://a", "ftp://key-that-is-secret"} }, "the 2. is no http or https URL"},
		"no host":      {"./paid.toml", func(s *SettleConfig) { s.RPC = []string{"key-that-is-secret"} }, "the 1. is no http or https URL"},
		"no vault key": {"./paid.toml", func(s *SettleConfig) { s.VaultKey = "" }, "settle.vault_key is missing"},
	} {
		s := good
		tt.change(&s)
		c := Config{Network: tt.network, Data: "data", Roles: []Role{RoleSettle}, Settle: s}
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(fmt.Sprint(err), "secret") {
			t.Errorf("%s: %v, want an error with %q and no URL", name, err, tt.want)
		}
	}
}

package node

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvasird/settle"
	"kvasird/settle/govern"
)

// walletOf is a wallet of a test, with its key.
func walletOf(name string) (settle.Wallet, ed25519.PrivateKey) {
	seed := sha256.Sum256([]byte(name))
	key := ed25519.NewKeyFromSeed(seed[:])
	return settle.Wallet(key.Public().(ed25519.PublicKey)), key
}

func walletText(name string) string {
	w, _ := walletOf(name)
	return w.String()
}

// tokenSettings are a whole token section, as flags have it.
func tokenSettings(more ...string) []string {
	all := []string{"mint=" + walletText("mint"), "decimals=6", "cluster=" + walletText("cluster"), "vault_owner=" + walletText("vault"),
		"wallets=" + walletText("a") + "," + walletText("b"), "threshold=2", "settlement=12D3KooWGsFTMJhHS4zJ6Pn8BGWZTPDw8y3KQF6dPx3ZcbfBKsYf"}
	for _, m := range more {
		key, _, _ := strings.Cut(m, "=")
		all = slices.DeleteFunc(all, func(s string) bool { return strings.HasPrefix(s, key+"=") })
		if !strings.HasSuffix(m, "=") {
			all = append(all, m)
		}
	}
	return all
}

func TestCreateNetworkWithToken(t *testing.T) {
	t.Chdir(t.TempDir())
	var out bytes.Buffer
	opts := NewNetwork{Name: "paid", Token: tokenSettings("fee=100000", "operators="+walletText("c")), Devnet: true}
	if err := CreateNetwork(opts, &out); err != nil {
		t.Fatal(err)
	}
	g, err := ReadNetwork("paid.toml")
	if err != nil {
		t.Fatal(err)
	}
	k := must(readToken(g))(t)
	p := settle.DefaultParams()
	p.FeePPM = 100_000
	if k.vault.Owner.String() != walletText("vault") || k.decimals != 6 || k.firstRaw != 2*p.FloorRaw || k.authority.Params != p ||
		!k.authority.Devnet || k.authority.Threshold != 2 || len(k.authority.Wallets) != 2 || len(k.operators) != 1 ||
		k.authority.Network != g.Hash() || !k.began.Equal(g.Created) || k.peer != g.Token.Settlement {
		t.Errorf("got %+v", k)
	}
	var shown bytes.Buffer
	if err := ShowNetwork("paid.toml", &shown); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"devnet", "mint " + walletText("mint"), "2 of them sign", "fee = 100000 ppm (default 150000)", "operators   " + walletText("c")} {
		if !strings.Contains(shown.String(), want) {
			t.Errorf("%s\ndoes not contain %q", &shown, want)
		}
	}
	checkAuthenticator(t, out.String(), g.Hash())
}

// checkAuthenticator sees that the secret is told once, kept sealed, and for us alone.
func checkAuthenticator(t *testing.T, said string, network settle.Hash) {
	t.Helper()
	uri := regexp.MustCompile(`otpauth://totp/kvasir:paid\?\S*secret=([A-Z2-7]{32})`).FindStringSubmatch(said)
	if uri == nil {
		t.Fatalf("%s\nhas no URI for an authenticator", said)
	}
	for _, name := range []string{"paid.authenticator", "paid.authenticator.key"} {
		info, err := os.Stat(name)
		text, _ := os.ReadFile(name)
		if err != nil || info.Mode().Perm() != 0o600 || strings.Contains(string(text), uri[1]) {
			t.Errorf("%s: %v, %v, %s", name, info, err, text)
		}
	}
	sealed, key := must(readSecret("paid.authenticator"))(t), must(readSecret("paid.authenticator.key"))(t)
	a := must(readToken(must(ReadNetwork("paid.toml"))(t)))(t).authority
	if _, err := govern.Open(govern.Config{Authority: a, Since: 1, Store: noRecords{}, Secret: sealed, Key: [32]byte(key)}); err != nil {
		t.Error(err)
	}
	a.Network[0]++
	if _, err := govern.Open(govern.Config{Authority: a, Since: 1, Store: noRecords{}, Secret: sealed, Key: [32]byte(key)}); err == nil {
		t.Error("the secret opens for another network")
	}
}

// noRecords is the store of a government that did nothing yet.
type noRecords struct{}

func (noRecords) Append(uint64, []byte) error            { panic("nothing is decided here") }
func (noRecords) Replay(func(record []byte) error) error { return nil }

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestCreateNetworkRefusesToken(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	for _, name := range []string{"sealed.authenticator", "keyed.authenticator.key"} {
		if err := os.WriteFile(name, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	zero := settle.Key{}.String() // of small order
	for _, tt := range []struct {
		name string
		opts NewNetwork
		want string
	}{
		{"devnet alone", NewNetwork{Devnet: true}, "a devnet is a network with a token"},
		{"no value", NewNetwork{Token: []string{"mint"}}, "want KEY=VALUE"},
		{"key twice", NewNetwork{Token: append(tokenSettings(), "mint=a")}, "each key once"},
		{"unknown key", NewNetwork{Token: tokenSettings("mnit=a")}, `"mnit"; did you mean "mint"?`},
		{"unknown parameter", NewNetwork{Token: tokenSettings("fees=1")}, `"fees"; did you mean "fee"?`},
		{"no mint", NewNetwork{Token: tokenSettings("mint=")}, `token.mint = ""`},
		{"no decimals", NewNetwork{Token: tokenSettings("decimals=")}, "decimals is missing"},
		{"decimals", NewNetwork{Token: tokenSettings("decimals=1e1")}, `decimals = "1e1"`},
		{"large decimals", NewNetwork{Token: tokenSettings("decimals=19")}, "token.decimals = 19"},
		{"program", NewNetwork{Token: tokenSettings("token_program=" + walletText("x"))}, "for Token-2022"},
		{"no wallets", NewNetwork{Token: tokenSettings("wallets=")}, "token.wallets is empty"},
		{"weak wallet", NewNetwork{Token: tokenSettings("wallets="+zero, "threshold=1")}, "token.wallets"},
		{"weak operator", NewNetwork{Token: tokenSettings("operators=" + zero)}, "token.operators"},
		{"weak vault owner", NewNetwork{Token: tokenSettings("vault_owner=" + zero)}, "token.vault_owner"},
		{"threshold", NewNetwork{Token: tokenSettings("threshold=3")}, "token.threshold = 3"},
		{"settlement", NewNetwork{Token: tokenSettings("settlement=me")}, `settlement = "me"`},
		{"no node here", NewNetwork{Token: tokenSettings("settlement=")}, "settlement is missing"},
		{"amount", NewNetwork{Token: tokenSettings("fee=+1")}, `fee = "+1"`},
		{"out of bounds", NewNetwork{Token: tokenSettings("fee=1")}, "token.parameters"},
		{"together out of bounds", NewNetwork{Token: tokenSettings("fee_treasury=0")}, "do not sum to 1,000,000"},
		{"bounds of a devnet", NewNetwork{Token: tokenSettings("epoch_seconds=60")}, "token.parameters"},
		{"price below the floor", NewNetwork{Token: tokenSettings("first_price=5")}, "token.first_price = 5"},
		{"secret is there", NewNetwork{Name: "sealed", Token: tokenSettings()}, "sealed.authenticator is there already"},
		{"its key is there", NewNetwork{Name: "keyed", Token: tokenSettings()}, "keyed.authenticator.key is there already"},
	} {
		if tt.opts.Name == "" {
			tt.opts.Name = "paid"
		}
		if err := CreateNetwork(tt.opts, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want an error with %q", tt.name, err, tt.want)
		}
	}
	if left, err := filepath.Glob("*"); err != nil || len(left) != 2 {
		t.Errorf("left %v, %v", left, err)
	}
}

// A file that somebody edited is refused by its name and the key.
func TestReadNetworkRefusesToken(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := CreateNetwork(NewNetwork{Name: "paid", Token: tokenSettings("fee=100000")}, new(bytes.Buffer)); err != nil {
		t.Fatal(err)
	}
	text := must(os.ReadFile("paid.toml"))(t)
	for name, tt := range map[string]struct{ old, new, want string }{
		"bounds":    {"fee = 100000", "fee = 1", "token.parameters: the parameter is outside its hard bounds: fee is 1"},
		"unknown":   {"fee = 100000", "feee = 100000", `token.parameters.feee: there is no such parameter; did you mean "fee"?`},
		"wrong key": {"decimals = 6", "decimal = 6", `unknown key "token.decimal"; did you mean "token.decimals"?`},
		"program":   {tokenProgram, walletText("x"), "token.token_program"},
	} {
		changed := strings.Replace(string(text), tt.old, tt.new, 1)
		if err := os.WriteFile("bad.toml", []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadNetwork("bad.toml"); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "bad.toml") {
			t.Errorf("%s: %v, want an error with bad.toml and %q", name, err, tt.want)
		}
	}
}

func TestReadPrivateRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"open":  {"00", 0o640, "chmod 600"},
		"large": {strings.Repeat("0", maxKeyText+2), 0o600, "larger than"},
		"text":  {"xx", 0o600, "hexadecimal"},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(tt.text), tt.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := readSecret(path); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	if _, err := readSecret(dir); err == nil {
		t.Error("a folder is read as a secret")
	}
	if _, err := readSecret(filepath.Join(dir, "none")); err == nil || !strings.Contains(fmt.Sprint(err), "no such file") {
		t.Errorf("no file: %v", err)
	}
}

package p2p

import (
	"encoding/hex"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/mr-tron/base58"
)

// chainKeyOf is the key of 32 times a byte, as text.
func chainKeyOf(b byte) string { return base58.Encode(slices.Repeat([]byte{b}, 32)) }

func testToken(t testing.TB) *Token {
	return &Token{
		Mint: chainKeyOf(1), Program: chainKeyOf(2), Decimals: 6, Cluster: chainKeyOf(3), VaultOwner: chainKeyOf(4), Settlement: testID(t),
		Wallets: []string{chainKeyOf(5), chainKeyOf(6)}, Threshold: 2, FirstPrice: 300_000_000_000,
	}
}

func TestTokenLiteralBytes(t *testing.T) {
	g := testGenesis(t)
	g.Token = testToken(t)
	bytes32 := func(b string) string { return "5820" + strings.Repeat(b, 32) }
	want := "aa 01" + bytes32("01") + "02" + bytes32("02") + "03 06 04" + bytes32("03") + "05" + bytes32("04") + "06" + idHex +
		"07 82" + bytes32("05") + bytes32("06") + "08 02 0b 1b 00000045d964b800 0c a1 63 666565 19 03e8"
	g.Token.Parameters = map[string]uint64{"fee": 1000}
	raw, err := encMode.Marshal(g.Token.hashed())
	if err != nil || hex.EncodeToString(raw) != hex.EncodeToString(unhex(t, want)) {
		t.Errorf("bytes\n got %x, %v\nwant %s", raw, err, want)
	}
	if got := hex.EncodeToString(g.hashed()); !strings.HasPrefix(got, "a9") || !strings.HasSuffix(got, "09"+hex.EncodeToString(raw)) {
		t.Errorf("the network's bytes are %s", got)
	}
	if h := g.Hash(); g.ID() != "home-"+hex.EncodeToString(h[:10]) {
		t.Errorf("id %s, hash %x", g.ID(), h)
	}
}

// Everything in the section makes another network.
func TestTokenIDCovers(t *testing.T) {
	seen := map[string]string{testGenesis(t).ID(): "none"}
	for name, change := range map[string]func(*Token){
		"nothing":    func(*Token) {},
		"mint":       func(k *Token) { k.Mint = chainKeyOf(9) },
		"program":    func(k *Token) { k.Program = chainKeyOf(9) },
		"decimals":   func(k *Token) { k.Decimals = 0 },
		"cluster":    func(k *Token) { k.Cluster = chainKeyOf(9) },
		"owner":      func(k *Token) { k.VaultOwner = chainKeyOf(9) },
		"settlement": func(k *Token) { k.Settlement = must(NewIdentity()).ID() },
		"wallets":    func(k *Token) { k.Wallets = append(k.Wallets, chainKeyOf(9)) },
		"threshold":  func(k *Token) { k.Threshold = 1 },
		"devnet":     func(k *Token) { k.Devnet = true },
		"operators":  func(k *Token) { k.Operators = []string{chainKeyOf(9)} },
		"price":      func(k *Token) { k.FirstPrice++ },
		"parameters": func(k *Token) { k.Parameters = map[string]uint64{"fee": 1} },
	} {
		g := testGenesis(t)
		g.Token = testToken(t)
		change(g.Token)
		if old, there := seen[g.ID()]; there {
			t.Errorf("%s and %s have one id", name, old)
		}
		seen[g.ID()] = name
	}
}

func TestTokenRoundTrip(t *testing.T) {
	full := testToken(t)
	full.Devnet, full.Operators = true, []string{chainKeyOf(8), chainKeyOf(7)}
	slices.Sort(full.Operators)
	full.Parameters = map[string]uint64{"fee": 100_000, "emission_total": 1<<63 - 1}
	for _, k := range []*Token{testToken(t), full} {
		g := testGenesis(t)
		g.Token = k
		back, err := ParseGenesis([]byte(g.String()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, g)
		}
		if !reflect.DeepEqual(back.Token, k) || back.ID() != g.ID() || back.String() != g.String() {
			t.Errorf("got %+v, want %+v", back.Token, k)
		}
	}
}

// tokenFileWith is a network file whose line of a key is another; "" takes it out.
func tokenFileWith(t *testing.T, key, value string) string {
	t.Helper()
	g := testGenesis(t)
	g.Token = testToken(t)
	g.Token.Parameters = map[string]uint64{"fee": 1000}
	before, rest, ok := strings.Cut(g.String(), "\n"+key+" = ")
	_, after, found := strings.Cut(rest, "\n")
	if key == "wallets" || key == "operators" {
		after = rest[strings.IndexByte(rest, ']')+1:]
	}
	if !ok || !found {
		t.Fatalf("%q is not in the file", key)
	}
	if value != "" {
		value = key + " = " + value
	}
	return before + "\n" + value + "\n" + after
}

func TestTokenRefuses(t *testing.T) {
	line := func(key, value string) string { return tokenFileWith(t, key, value) }
	quoted := func(s string) string { return fmt.Sprintf("%q", s) }
	var many, names []string
	for i := range byte(maxOperators + 1) {
		many = append(many, quoted(chainKeyOf(i+1)))
		names = append(names, fmt.Sprintf("a%d = 1", i))
	}
	tests := []struct{ name, text, want string }{
		{"unknown key", line("devnet", "true\ndevnets = true"), `unknown key "token.devnets"`},
		{"no mint", line("mint", ""), `token.mint = ""`},
		{"mint of 31 bytes", line("mint", quoted(base58.Encode(make([]byte, 31)))), "base58 of 32 bytes"},
		{"mint with a space", line("mint", quoted(chainKeyOf(1)+" ")), "token.mint"},
		{"long mint", line("mint", quoted(strings.Repeat("1", 100_000))), "token.mint"},
		{"program", line("token_program", quoted("0OIl")), "token.token_program"},
		{"cluster", line("cluster", quoted("x")), "token.cluster"},
		{"owner", line("vault_owner", quoted("x")), "token.vault_owner"},
		{"no decimals", line("decimals", ""), "token.decimals is missing"},
		{"decimals", line("decimals", "19"), "token.decimals = 19"},
		{"negative decimals", line("decimals", "-1"), "token.decimals = -1"},
		{"no settlement", line("settlement", ""), `token.settlement = ""`},
		{"settlement without a key", line("settlement", quoted("QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ")), "token.settlement: peer id"},
		{"no wallets", line("wallets", "[]"), "token.wallets is empty"},
		{"wallet twice", line("wallets", "["+quoted(chainKeyOf(5))+","+quoted(chainKeyOf(5))+"]"), "token.wallets"},
		{"wallet", line("wallets", `["a", "b"]`), `token.wallets: "a"`},
		{"many wallets", line("wallets", "["+strings.Join(many[:maxWallets+1], ",")+"]"), "at most 16"},
		{"threshold", line("threshold", "3"), "token.threshold = 3: want 1 to 2"},
		{"no threshold", line("threshold", ""), "token.threshold = 0"},
		{"many operators", line("operators", "["+strings.Join(many, ",")+"]"), "token.operators: 65"},
		{"operator", line("operators", `["me"]`), `token.operators: "me"`},
		{"no price", line("first_price", ""), "token.first_price = 0"},
		{"price", line("first_price", "-1"), "token.first_price = -1"},
		{"price as a float", line("first_price", "1e3"), ": "},
		{"negative parameter", line("fee", "-1"), "token.parameters.fee = -1"},
		{"name of a parameter", line("fee", "1\n\"a b\" = 1"), "no name of a parameter"},
		{"many parameters", line("fee", "1\n"+strings.Join(names, "\n")), "at most 64"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if g, err := ParseGenesis([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, %v, want an error with %q", g, err, tt.want)
			}
		})
	}
}

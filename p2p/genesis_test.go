package p2p

import (
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

const (
	somePeer  = "12D3KooWGsFTMJhHS4zJ6Pn8BGWZTPDw8y3KQF6dPx3ZcbfBKsYf"
	someAddr  = "/ip4/192.168.1.5/tcp/19001/p2p/" + somePeer
	someModel = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
)

func testGenesis(t testing.TB) *Genesis {
	t.Helper()
	g := &Genesis{
		Name: "home", Admission: Invitation, Authority: testID(t), Created: time.Unix(1767366245, 0).UTC(),
		TargetReplicas: 2, AuditInterval: defaultAuditInterval, Models: []string{someModel},
	}
	for i := range g.Nonce {
		g.Nonce[i] = byte(i)
	}
	return g
}

func TestGenesisLiteralBytes(t *testing.T) {
	g := testGenesis(t)
	want := "a8 01 01 02 64686f6d65 03 6a696e7669746174696f6e 04" + idHex +
		"05 1a 6957de65 06 50 000102030405060708090a0b0c0d0e0f 07 02 08 81 7840" + hex.EncodeToString([]byte(someModel))
	if got := hex.EncodeToString(g.hashed()); got != hex.EncodeToString(unhex(t, want)) {
		t.Errorf("bytes\n got %s\nwant %s", got, want)
	}
	if got, want := g.ID(), "home-c36f7a020bd378834da6"; got != want {
		t.Errorf("id %s, want %s", got, want)
	}
	g.Admission, g.Authority, g.Models = Open, "", nil
	if got, want := g.ID(), "home-c4f2330130c93b412fae"; got != want {
		t.Errorf("id of an open network %s, want %s", got, want)
	}
	if !networkPattern.MatchString(g.ID()) {
		t.Errorf("%s can not be part of a protocol id", g.ID())
	}
}

// Everything outside of [contact] makes another network, and nothing in it does.
func TestGenesisIDCovers(t *testing.T) {
	id := testGenesis(t).ID()
	other, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Genesis){
		"name":      func(g *Genesis) { g.Name = "hom" },
		"admission": func(g *Genesis) { g.Admission = Closed },
		"authority": func(g *Genesis) { g.Authority = other.ID() },
		"created":   func(g *Genesis) { g.Created = g.Created.Add(time.Second) },
		"nonce":     func(g *Genesis) { g.Nonce[15]++ },
		"replicas":  func(g *Genesis) { g.TargetReplicas = 3 },
		"audits":    func(g *Genesis) { g.AuditInterval = 32 },
		"models":    func(g *Genesis) { g.Models = nil },
	} {
		g := testGenesis(t)
		change(g)
		if g.ID() == id {
			t.Errorf("another %s, the same id", name)
		}
	}
	g := testGenesis(t)
	g.Contact = Contact{Bootstrap: []string{someAddr}, Relays: []string{someAddr}, Members: []peer.ID{testID(t)}}
	if g.ID() != id {
		t.Error("another contact, another id")
	}
}

func TestGenesisRoundTrip(t *testing.T) {
	full := testGenesis(t)
	full.Contact = Contact{Bootstrap: []string{someAddr, someAddr}, Relays: []string{someAddr}, Members: []peer.ID{testID(t)}}
	fresh, err := NewGenesis("a", Open, "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range []*Genesis{testGenesis(t), full, fresh} {
		back, err := ParseGenesis([]byte(g.String()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, g)
		}
		if back.String() != g.String() || back.ID() != g.ID() || !back.Created.Equal(g.Created) ||
			len(back.Contact.Members) != len(g.Contact.Members) {
			t.Errorf("got\n%s\nwant\n%s", back, g)
		}
	}
	again, err := NewGenesis("a", Open, "", fresh.Created)
	if err != nil || again.ID() == fresh.ID() {
		t.Errorf("two networks of one name have the same id %s (%v)", again.ID(), err)
	}
}

// What may be left out, and the order of models, does not change the network.
func TestGenesisDefaults(t *testing.T) {
	second := strings.Repeat("f", 64)
	text := func(models string) string {
		return "version = 1\nname = \"home\"\nadmission = \"open\"\ncreated = \"2026-01-02T15:04:05Z\"\n" +
			"nonce = \"000102030405060708090a0b0c0d0e0f\"\n" + models
	}
	a, err := ParseGenesis([]byte(text(fmt.Sprintf("models = [%q, %q]\n", second, someModel))))
	if err != nil {
		t.Fatal(err)
	}
	b, err := ParseGenesis([]byte(text(fmt.Sprintf("target_replicas = 2\nmodels = [%q, %q]\n[contact]\n", someModel, second))))
	if err != nil || a.ID() != b.ID() || a.TargetReplicas != 2 || !reflect.DeepEqual(a.Models, []string{someModel, second}) {
		t.Errorf("%+v and %+v, %v", a, b, err)
	}
}

func TestGenesisRefuses(t *testing.T) {
	good := testGenesis(t).String()
	change := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("%q is not in the file", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	list := func(n int, item string) string {
		return "[" + strings.Repeat(fmt.Sprintf("%q,", item), n) + "]"
	}
	rsa := "QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"
	tests := []struct{ name, text, want string }{
		{"too large", "#" + strings.Repeat("a", MaxGenesis), "larger than"},
		{"not TOML", "version 1", "1:"},
		{"wrong type", "version = \"1\"", "1:"},
		{"unknown key", "version = 1\nadmision = \"open\"", `2: unknown key "admision"`},
		{"unknown key in contact", change("bootstrap =", "bootstraps ="), `unknown key "contact.bootstraps"`},
		{"later version", "version = 2\nnew = 1", "update it"},
		{"no version", change("version = 1", ""), "version = 0"},
		{"negative version", change("version = 1", "version = -1"), "version = -1"},
		{"no name", change(`name = "home"`, ""), "name = \"\""},
		{"name", change(`"home"`, `"Home"`), "name = \"Home\""},
		{"long name", change(`"home"`, `"`+strings.Repeat("a", 33)+`"`), "1 to 32"},
		{"admission", change(`"invitation"`, `"maybe"`), `admission = "maybe"`},
		{"no authority", change(`authority = "`+testID(t).String()+`"`, ""), "authority is missing"},
		{"authority", change(testID(t).String(), "me"), `authority = "me"`},
		{"authority without a key", change(testID(t).String(), rsa), "not the peer id of an ed25519 key"},
		{"no time", change("2026-01-02T15:04:05Z", ""), "created = \"\""},
		{"time zone", change("2026-01-02T15:04:05Z", "2026-01-02T15:04:05+01:00"), "created ="},
		{"fraction", change("2026-01-02T15:04:05Z", "2026-01-02T15:04:05.5Z"), "created ="},
		{"before 1970", change("2026-01-02T15:04:05Z", "1969-01-02T15:04:05Z"), "1969"},
		{"short nonce", change("000102030405060708090a0b0c0d0e0f", "00"), "nonce = \"00\""},
		{"long nonce", change("000102030405060708090a0b0c0d0e0f", strings.Repeat("0", 34)), "nonce ="},
		{"nonce in capitals", change("0a0b0c0d0e0f", "0A0B0C0D0E0F"), "nonce ="},
		{"no replicas", change("target_replicas = 2", "target_replicas = 0"), "target_replicas = 0"},
		{"no audits", change("audit_interval = 64", "audit_interval = 0"), "audit_interval = 0"},
		{"few audits", change("audit_interval = 64", "audit_interval = 65537"), "audit_interval = 65537"},
		{"many replicas", change("target_replicas = 2", "target_replicas = 17"), "target_replicas = 17"},
		{"model", change(someModel, "aa"), `"aa" is no model id`},
		{"model twice", change(`"`+someModel+`",`, `"`+someModel+`","`+someModel+`"`), "twice"},
		{"many models", change("models = [", "models = ["+strings.Trim(list(maxModels, someModel), "[]")), "at most 64"},
		{"bootstrap", change("bootstrap = []", `bootstrap = ["/ip4/1.2.3.4/tcp/1"]`), "contact.bootstrap: \"/ip4/1.2.3.4/tcp/1\""},
		{"unprintable", change("relays = []", `relays = ["/dns4/a\u007fb/tcp/1/p2p/`+somePeer+`"]`), "contact.relays"},
		{"long address", change("relays = []", `relays = ["`+strings.Repeat("a", maxContactText+1)+`"]`), "513 bytes"},
		{"many relays", change("relays = []", "relays = "+list(maxContacts+1, someAddr)), "at most 64"},
		{"member", change("members = []", `members = ["me"]`), `"me" is no peer id`},
		{"many members", change("members = []", "members = "+list(maxMembers+1, somePeer)), "at most 4096"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if g, err := ParseGenesis([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, %v, want an error with %q", g, err, tt.want)
			}
		})
	}
	var unknown *UnknownKeyError
	if _, err := ParseGenesis([]byte("nam = 1")); !errors.As(err, &unknown) || *unknown != (UnknownKeyError{1, "nam"}) {
		t.Errorf("unknown key: %v", err)
	}
}

// GenesisKeys is written by hand: it must name what the file has.
func TestGenesisKeys(t *testing.T) {
	var want []string
	for f := range reflect.TypeFor[genesisFile]().Fields() {
		want = append(want, f.Tag.Get("toml"))
		if f.Name == "Token" {
			for f := range reflect.TypeFor[tokenFile]().Fields() {
				want = append(want, "token."+f.Tag.Get("toml"))
			}
		}
	}
	for f := range reflect.TypeFor[contactFile]().Fields() {
		want = append(want, "contact."+f.Tag.Get("toml"))
	}
	if !reflect.DeepEqual(GenesisKeys, want) {
		t.Errorf("got %q, want %q", GenesisKeys, want)
	}
}

func FuzzGenesis(f *testing.F) {
	g := testGenesis(f)
	f.Add([]byte(g.String()))
	g.Contact = Contact{Bootstrap: []string{someAddr}, Members: []peer.ID{testID(f)}}
	f.Add([]byte(g.String()))
	g.Token = testToken(f)
	g.Token.Parameters = map[string]uint64{"fee": 1000}
	f.Add([]byte(g.String()))
	f.Fuzz(func(t *testing.T, text []byte) {
		g, err := ParseGenesis(text)
		if err != nil {
			return
		}
		back, err := ParseGenesis([]byte(g.String()))
		if err != nil || back.ID() != g.ID() || back.String() != g.String() || !networkPattern.MatchString(g.ID()) {
			t.Fatalf("%v: %s\nread as %s", err, text, g)
		}
	})
}

package p2p

import (
	"bytes"
	"encoding/hex"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/libp2p/go-libp2p/core/peer"
)

// signedList is what the authority's signature makes a list of any body.
func signedList(t testing.TB, by Identity, body []byte) []byte {
	t.Helper()
	sig, err := by.Sign(append([]byte(revokeDomain), body...))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(body, sig)
}

func TestRevocationsLiteralBytes(t *testing.T) {
	g, authority := invitationOnly(t), seedIdentity(t, 1)
	me := seedIdentity(t, 2).ID()
	first, err := g.Revoke(authority, nil, []Serial{{15: 7}}, []peer.ID{me})
	if err != nil {
		t.Fatal(err)
	}
	want := "a5 01 01 02 7819" + hex.EncodeToString([]byte(g.ID())) + "03 01 04 81 50 00000000000000000000000000000007" +
		"05 81 5826" + hex.EncodeToString([]byte(me))
	if got := first.Bytes()[:len(first.Bytes())-signatureSize]; !bytes.Equal(got, unhex(t, want)) {
		t.Errorf("bytes\n got %x\nwant %x", got, unhex(t, want))
	}
	// The next list has all that the first has, once.
	second, err := g.Revoke(authority, first, []Serial{{15: 9}, {15: 1}, {15: 7}}, []peer.ID{me})
	if err != nil {
		t.Fatal(err)
	}
	if second.Version != 2 || !slices.Equal(second.Serials, []Serial{{15: 1}, {15: 7}, {15: 9}}) || !slices.Equal(second.Peers, first.Peers) {
		t.Errorf("got %+v", second)
	}
	for _, s := range []byte{1, 7, 9} {
		if !second.hasSerial(Serial{15: s}) {
			t.Errorf("serial %d is not found", s)
		}
	}
	if !second.hasPeer(me) || second.hasPeer(authority.ID()) || second.hasSerial(Serial{15: 2}) {
		t.Error("wrong members")
	}
}

func TestRevokeRefuses(t *testing.T) {
	g, authority := invitationOnly(t), seedIdentity(t, 1)
	many := make([]Serial, maxRevoked+1)
	for i := range many {
		many[i] = Serial{byte(i >> 8), byte(i)}
	}
	full, err := g.Revoke(authority, nil, many[1:], nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(full.Bytes()) > MaxRevocations {
		t.Errorf("a full list has %d bytes", len(full.Bytes()))
	}
	if _, err := g.Revoke(authority, full, many, nil); err == nil || !strings.Contains(err.Error(), "at most 4096") {
		t.Errorf("too many: %v", err)
	}
	if _, err := g.Revoke(seedIdentity(t, 2), nil, nil, nil); err == nil || !strings.Contains(err.Error(), "this is the key of") {
		t.Errorf("another key: %v", err)
	}
	if _, err := g.Revoke(authority, nil, nil, []peer.ID{g.Authority}); err == nil || !strings.Contains(err.Error(), "can not be revoked") {
		t.Errorf("the authority: %v", err)
	}
}

func TestOpenRevocationsRefuses(t *testing.T) {
	g, authority := invitationOnly(t), seedIdentity(t, 1)
	open, elsewhere := *g, *g
	open.Admission, open.Authority, elsewhere.Name = Open, "", "away"
	good, err := g.Revoke(authority, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	away, err := elsewhere.Revoke(authority, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	head := "01 01 02 7819" + hex.EncodeToString([]byte(g.ID())) + "03 01"
	serial := func(b string) string { return "50" + strings.Repeat("00", 15) + b }
	list := func(hex string) []byte { return signedList(t, authority, unhex(t, hex)) }
	tests := []struct {
		name string
		g    *Genesis
		raw  []byte
		want string
	}{
		{"empty", g, nil, "list of 0 bytes"},
		{"signature alone", g, make([]byte, signatureSize), "list of 64 bytes"},
		{"too long", g, make([]byte, MaxRevocations+1), "list of 262145 bytes"},
		{"no authority", &open, good.Bytes(), "no authority"},
		{"no network file", nil, good.Bytes(), "no authority"},
		{"forged", g, signedList(t, seedIdentity(t, 2), unhex(t, "a3"+head)), "not signed by the network's authority"},
		{"changed", g, append([]byte{0xa4}, good.Bytes()[1:]...), "not signed by the network's authority"},
		{"of another network", g, away.Bytes(), "is for network \"away-"},
		{"not CBOR", g, list("ff"), "cbor"},
		{"trailing byte", g, list("a3" + head + "00"), "extraneous"},
		{"format", g, list(strings.Replace("a3"+head, "01 01", "01 02", 1)), "format 2"},
		{"version 0", g, list(strings.TrimSuffix("a3"+head, "01") + "00"), "version 0"},
		{"unknown key", g, list("a4" + head + "06 01"), "unknown field"},
		{"long form of a number", g, list(strings.TrimSuffix("a3"+head, "01") + "1801"), "deterministic"},
		{"empty list", g, list("a4" + head + "04 80"), "deterministic"},
		{"not sorted", g, list("a4" + head + "04 82" + serial("02") + serial("01")), "not sorted"},
		{"twice", g, list("a4" + head + "04 82" + serial("02") + serial("02")), "not sorted"},
		{"short serial", g, list("a4" + head + "04 81 41 01"), "serial of 1 bytes"},
		{"no peer id", g, list("a4" + head + "05 81 41 01"), "peer id"},
		{"too many", g, list("a4" + head + "04 99 1001" + strings.Repeat(serial("01"), maxRevoked+1)), "max"},
		{"claims 2^32", g, list("a4" + head + "04 9a ffffffff" + serial("01")), "max"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if r, err := tt.g.OpenRevocations(tt.raw); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%+v, %v, want an error with %q", r, err, tt.want)
			}
		})
	}
}

func FuzzRevocations(f *testing.F) {
	g, authority := invitationOnly(f), seedIdentity(f, 1)
	r, err := g.Revoke(authority, nil, []Serial{{1}, {2}}, []peer.ID{seedIdentity(f, 2).ID()})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(r.Bytes()[:len(r.Bytes())-signatureSize])
	// The authority signs whatever it is: what lies behind the signature is parsed too.
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := g.OpenRevocations(signedList(t, authority, body))
		if err != nil || r.Version == math.MaxUint64 {
			return
		}
		next, err := g.Revoke(authority, r, nil, nil)
		if err != nil || next.Version != r.Version+1 || len(next.Serials) != len(r.Serials) || len(next.Peers) != len(r.Peers) {
			t.Fatalf("%+v is followed by %+v, %v", r, next, err)
		}
		if _, err := g.OpenRevocations(body); err == nil {
			t.Fatalf("%x is taken without a signature", body)
		}
	})
}

package settle

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

func testPass() Pass {
	return Pass{Network: testNetwork, Request: QuoteID{7}, Signer: keyOf("desk"), Entry: keyOf("entry"), Model: "m", Tokens: 300, Expires: 1 << 31}
}

func signPass(t testing.TB, p Pass) []byte {
	t.Helper()
	b, err := p.Sign(seedOf("desk"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPassBytes(t *testing.T) {
	p := testPass()
	body, err := encMode.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	want := "a7" + "015820" + "2a" + strings.Repeat("00", 31) + "025007" + strings.Repeat("00", 15) + "035820" + hex.EncodeToString(p.Signer[:]) +
		"045820" + hex.EncodeToString(p.Entry[:]) + "05616d" + "0619012c" + "071a80000000"
	if got := hex.EncodeToString(body); got != want {
		t.Errorf("the body is\n%s, want\n%s", got, want)
	}
	if got, err := ParsePass(signPass(t, p)); err != nil || got != p {
		t.Errorf("%+v, %v", got, err)
	}
	longest := p
	longest.Model, longest.Tokens, longest.Expires = strings.Repeat("m", MaxModelName), 2*MaxTokens, ^uint64(0)
	if b := signPass(t, longest); len(b) > MaxPass {
		t.Errorf("%d bytes, at most %d", len(b), MaxPass)
	}
}

func TestPassRefused(t *testing.T) {
	forge := func(domain string, change func(*Pass)) []byte { // signed, whatever it says
		p := testPass()
		change(&p)
		body, _ := encMode.Marshal(p)
		h := signedHash(domain, body)
		b, err := encMode.Marshal(envelope{body, Signature(ed25519.Sign(seedOf("desk"), h[:]))})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := signPass(t, testPass())
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"a bit":          {flipped, ErrSignature},
		"other signer":   {forge(passDomain, func(p *Pass) { p.Signer = keyOf("a") }), ErrSignature},
		"weak signer":    {forge(passDomain, func(p *Pass) { p.Signer = Node{} }), ErrWeakKey},
		"other domain":   {forge(reportDomains[Statement], func(*Pass) {}), ErrSignature},
		"no network":     {forge(passDomain, func(p *Pass) { p.Network = Hash{} }), ErrPass},
		"no request":     {forge(passDomain, func(p *Pass) { p.Request = QuoteID{} }), ErrPass},
		"no entry":       {forge(passDomain, func(p *Pass) { p.Entry = Node{} }), ErrPass},
		"no model":       {forge(passDomain, func(p *Pass) { p.Model = "" }), ErrPass},
		"a long model":   {forge(passDomain, func(p *Pass) { p.Model = strings.Repeat("m", MaxModelName+1) }), ErrPass},
		"no text":        {forge(passDomain, func(p *Pass) { p.Model = "\xff" }), ErrRecord},
		"no tokens":      {forge(passDomain, func(p *Pass) { p.Tokens = 0 }), ErrPass},
		"too many":       {forge(passDomain, func(p *Pass) { p.Tokens = 2*MaxTokens + 1 }), ErrPass},
		"trailing bytes": {append(bytes.Clone(good), 0), ErrRecord},
		"too long":       {make([]byte, MaxPass+1), ErrRecord},
	} {
		if _, err := ParsePass(tt.b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := testPass().Sign(seedOf("a")); !errors.Is(err, ErrPass) {
		t.Errorf("another key signs: %v", err)
	}
}

// TestPassLent: only who the entry named may have the request computed, and only that one.
func TestPassLent(t *testing.T) {
	p, to := testPass(), keyOf("worker")
	sig := p.Lend(seedOf("entry"), to)
	if err := p.VerifyLent(to, sig); err != nil {
		t.Error(err)
	}
	other := p
	other.Request = QuoteID{8}
	for name, err := range map[string]error{
		"another node":    p.VerifyLent(keyOf("a"), sig),
		"another request": other.VerifyLent(to, sig),
		"another's key":   p.VerifyLent(to, p.Lend(seedOf("desk"), to)),
	} {
		if !errors.Is(err, ErrSignature) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParsePass(f *testing.F) {
	f.Add(signPass(f, testPass()))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePass(b)
		if err != nil {
			return
		}
		if again := signPassBody(t, p); !bytes.Contains(b, again) {
			t.Errorf("%x has another encoding", b)
		}
	})
}

func signPassBody(t *testing.T, p Pass) []byte {
	body, err := encMode.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

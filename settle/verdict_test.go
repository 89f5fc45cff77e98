package settle

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

var testVerdict = Verdict{Network: testNetwork, Request: QuoteID{7}, Culprit: keyOf("a"), Why: WrongWork, Evidence: Hash{9}, Reporter: keyOf("carol")}

func consent(t testing.TB, v Verdict, auditor string) Consent {
	t.Helper()
	c, err := v.Sign(seedOf(auditor))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func verdictOf(t testing.TB, v Verdict, auditors ...string) []byte {
	t.Helper()
	var all []Consent
	for _, a := range auditors {
		all = append(all, consent(t, v, a))
	}
	b, err := v.Encode(all...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestVerdictBytes(t *testing.T) {
	v := testVerdict
	v.Reporter = Node{}
	b := verdictOf(t, v, "x")
	c := consent(t, v, "x")
	body := "a6" + "015820" + "2a" + strings.Repeat("00", 31) + "025007" + strings.Repeat("00", 15) + "035820" + hex.EncodeToString(v.Culprit[:]) +
		"0401" + "055820" + "09" + strings.Repeat("00", 31) + "065820" + strings.Repeat("00", 32)
	want := "a2" + "0158" + hex.EncodeToString([]byte{byte(len(body) / 2)}) + body + "0281" + "82" + "5820" + hex.EncodeToString(c.Auditor[:]) + "5840" + hex.EncodeToString(c.Signature[:])
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("the verdict is\n%s, want\n%s", got, want)
	}
	if got, signers, err := ParseVerdict(b); got != v || err != nil || len(signers) != 1 || signers[0] != keyOf("x") {
		t.Errorf("%+v, %v, %v", got, signers, err)
	}
}

func TestVerdictRefused(t *testing.T) {
	ok := verdictOf(t, testVerdict, "x", "y")
	forge := func(body []byte, consents ...Consent) []byte { // as it is
		b, err := encMode.Marshal(verdictEnvelope{body, consents})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	resign := func(body []byte, domain string) []byte {
		h := signedHash(domain, body)
		return forge(body, Consent{Auditor: keyOf("x"), Signature: Signature(ed25519.Sign(seedOf("x"), h[:]))})
	}
	with := func(change func(*Verdict)) []byte {
		v := testVerdict
		change(&v)
		body, err := encMode.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return resign(body, verdictDomain)
	}
	body, err := encMode.Marshal(testVerdict)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := ParseVerdict(with(func(*Verdict) {})); err != nil {
		t.Fatal(err)
	}
	x, y := consent(t, testVerdict, "x"), consent(t, testVerdict, "y")
	if bytes.Compare(x.Auditor[:], y.Auditor[:]) > 0 {
		x, y = y, x
	}
	stolen := x
	stolen.Auditor = y.Auditor
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":            {nil, ErrRecord},
		"trailing byte":    {append(bytes.Clone(ok), 0), ErrRecord},
		"cut":              {ok[:len(ok)-1], ErrRecord},
		"too long":         {make([]byte, maxVerdict+1), ErrRecord},
		"a report":         {sign(t, statement("a", 1, Line{2, 40}), "a"), ErrRecord},
		"report's domain":  {resign(body, reportDomains[Receipt]), ErrSignature},
		"unknown key":      {resign(append([]byte{0xa7}, append(bytes.Clone(body[1:]), 7, 0)...), verdictDomain), ErrRecord},
		"missing key":      {resign(append([]byte{0xa5}, body[1:len(body)-35]...), verdictDomain), ErrRecord},
		"no network":       {with(func(v *Verdict) { v.Network = Hash{} }), ErrVerdict},
		"no request":       {with(func(v *Verdict) { v.Request = QuoteID{} }), ErrVerdict},
		"no culprit":       {with(func(v *Verdict) { v.Culprit = Node{} }), ErrVerdict},
		"no evidence":      {with(func(v *Verdict) { v.Evidence = Hash{} }), ErrVerdict},
		"no reason":        {with(func(v *Verdict) { v.Why = 0 }), ErrVerdict},
		"a later reason":   {with(func(v *Verdict) { v.Why = lastWhy + 1 }), ErrVerdict},
		"another's":        {forge(body, stolen), ErrSignature},
		"signed twice":     {forge(body, x, x), ErrVerdict},
		"out of order":     {forge(body, y, x), ErrVerdict},
		"a small key":      {forge(body, Consent{}), ErrWeakKey},
		"too many signers": {verdictOf(t, testVerdict, "u", "v", "x", "y"), ErrVerdict},
	} {
		if _, _, err := ParseVerdict(tt.b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	bad := testVerdict
	bad.Why = 0
	if _, err := bad.Sign(seedOf("x")); !errors.Is(err, ErrVerdict) {
		t.Errorf("signed without a reason: %v", err)
	}
	if _, err := bad.Encode(); !errors.Is(err, ErrVerdict) {
		t.Errorf("written without a reason: %v", err)
	}
}

func TestJudged(t *testing.T) {
	nodes := func(names ...string) (all []Node) {
		for _, n := range names {
			all = append(all, keyOf(n))
		}
		return all
	}
	drawn, involved := nodes("x", "y", "z"), nodes("entry", "a", "b")
	for _, tt := range []struct {
		signers, drawn []Node
		want           error
	}{
		{nodes("x", "y"), drawn, nil}, {nodes("x", "z", "y"), drawn, nil},
		{nodes("x"), drawn, ErrJudges}, {nil, drawn, ErrJudges}, {nodes("x", "y"), nil, ErrJudges},
		{nodes("x", "eve"), drawn, ErrJudges}, {nodes("x", "y", "eve"), drawn, ErrJudges},
		{nodes("x", "y"), nodes("x", "y", "z", "w"), ErrJudges},
		{nodes("x", "b"), nodes("x", "b", "z"), ErrInvolved}, {nodes("entry", "y"), nodes("entry", "y", "z"), ErrInvolved},
		{nodes("a", "y"), nodes("a", "y"), ErrInvolved}, {nodes("x", "carol"), nodes("x", "carol"), ErrInvolved},
	} {
		if err := testVerdict.Judged(tt.signers, tt.drawn, involved); !errors.Is(err, tt.want) {
			t.Errorf("%d of %d: %v, want %v", len(tt.signers), len(tt.drawn), err, tt.want)
		}
	}
}

func FuzzVerdict(f *testing.F) {
	f.Add(verdictOf(f, testVerdict, "x", "y"))
	f.Add(verdictOf(f, testVerdict))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, signers, err := ParseVerdict(b)
		if err != nil {
			return
		}
		var e verdictEnvelope
		if err := decode(b, maxVerdict, &e); err != nil || len(e.Consents) != len(signers) {
			t.Fatal(err)
		}
		if again, err := v.Encode(e.Consents...); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x was read as %+v", b, v)
		}
	})
}

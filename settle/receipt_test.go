package settle

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"filippo.io/edwards25519"
)

func statement(worker string, seq uint64, lines ...Line) Report {
	return Report{Role: Statement, Network: testNetwork, Request: QuoteID{7}, Signer: keyOf(worker), Seq: seq, Work: []Work{{keyOf(worker), lines}}}
}

func receipt(seq, tokens uint64, work ...Work) Report {
	sortWork(work)
	return Report{Role: Receipt, Network: testNetwork, Request: QuoteID{7}, Signer: keyOf("entry"), Seq: seq, Tokens: tokens, Work: work}
}

func sign(t testing.TB, r Report, signer string) []byte {
	t.Helper()
	b, err := r.Sign(seedOf(signer))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReportBytes(t *testing.T) {
	r := statement("a", 3, Line{2, 40}, Line{5, 41})
	body, err := encMode.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	worker := hex.EncodeToString(r.Signer[:])
	want := "a7" + "0101" + "025820" + "2a" + strings.Repeat("00", 31) + "035007" + strings.Repeat("00", 15) + "045820" + worker +
		"0503" + "0600" + "0781" + "a2" + "015820" + worker + "0282" + "a201020218" + "28" + "a201050218" + "29"
	if got := hex.EncodeToString(body); got != want {
		t.Errorf("the body is\n%s, want\n%s", got, want)
	}
	got, err := ParseReport(sign(t, r, "a"))
	if err != nil || got.Hash() != r.Hash() {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestReportRefused(t *testing.T) {
	good := statement("a", 1, Line{2, 40})
	resign := func(body []byte, domain string) []byte {
		h := signedHash(domain, body)
		b, err := encMode.Marshal(envelope{body, Signature(ed25519.Sign(seedOf("a"), h[:]))})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	forge := func(change func(*Report)) []byte { // signed, whatever it says
		r := good
		r.Work = []Work{{good.Signer, []Line{{2, 40}}}}
		change(&r)
		body, err := encMode.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		return resign(body, reportDomains[Statement])
	}
	body, _ := encMode.Marshal(good)
	ok := sign(t, good, "a")
	flipped := bytes.Clone(ok)
	flipped[len(flipped)-1] ^= 1
	weak := forge(func(r *Report) { r.Signer, r.Work[0].Worker = Node{}, Node{} })
	if _, err := ParseReport(forge(func(*Report) {})); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":              {nil, ErrRecord},
		"trailing byte":      {append(bytes.Clone(ok), 0), ErrRecord},
		"cut":                {ok[:len(ok)-1], ErrRecord},
		"too long":           {make([]byte, MaxReport+1), ErrRecord},
		"flipped signature":  {flipped, ErrSignature},
		"receipt's domain":   {resign(body, reportDomains[Receipt]), ErrSignature},
		"no domain":          {resign(body, ""), ErrSignature},
		"body of two":        {resign(append(bytes.Clone(body), body...), reportDomains[Statement]), ErrRecord},
		"long integer":       {resign(bytes.Replace(body, []byte{5, 1, 6}, []byte{5, 0x18, 1, 6}, 1), reportDomains[Statement]), ErrRecord},
		"unknown key":        {resign(append([]byte{0xa8}, append(bytes.Clone(body[1:]), 8, 0)...), reportDomains[Statement]), ErrRecord},
		"missing key":        {resign(append([]byte{0xa6}, body[3:]...), reportDomains[Statement]), ErrRecord},
		"indefinite":         {resign(append([]byte{0xbf}, append(bytes.Clone(body[1:]), 0xff)...), reportDomains[Statement]), ErrRecord},
		"small order key":    {weak, ErrWeakKey},
		"other signer":       {forge(func(r *Report) { r.Signer, r.Work[0].Worker = keyOf("b"), keyOf("b") }), ErrSignature},
		"role 0":             {forge(func(r *Report) { r.Role = 0 }), ErrReport},
		"role 3":             {forge(func(r *Report) { r.Role = 3 }), ErrReport},
		"sequence 0":         {forge(func(r *Report) { r.Seq = 0 }), ErrReport},
		"last sequence":      {forge(func(r *Report) { r.Seq = ^uint64(0) }), ErrReport},
		"no request":         {forge(func(r *Report) { r.Request = QuoteID{} }), ErrReport},
		"no network":         {forge(func(r *Report) { r.Network = Hash{} }), ErrReport},
		"tokens stated":      {forge(func(r *Report) { r.Tokens = 1 }), ErrReport},
		"many tokens":        {forge(func(r *Report) { r.Role, r.Tokens = Receipt, 2*MaxTokens+1 }), ErrReport},
		"others' work":       {forge(func(r *Report) { r.Work[0].Worker = keyOf("b") }), ErrReport},
		"no work stated":     {forge(func(r *Report) { r.Work = nil }), ErrReport},
		"two workers stated": {forge(func(r *Report) { r.Work = append(r.Work, Work{keyOf("b"), nil}) }), ErrReport},
		"workers twice":      {forge(func(r *Report) { r.Role = Receipt; r.Work = append(r.Work, r.Work[0]) }), ErrReport},
		"lines out of order": {forge(func(r *Report) { r.Work[0].Lines = []Line{{2, 1}, {1, 1}} }), ErrReport},
		"line twice":         {forge(func(r *Report) { r.Work[0].Lines = []Line{{2, 1}, {2, 1}} }), ErrReport},
		"no units":           {forge(func(r *Report) { r.Work[0].Lines = []Line{{2, 0}} }), ErrReport},
		"part too high":      {forge(func(r *Report) { r.Work[0].Lines = []Line{{MaxParts, 1}} }), ErrReport},
	} {
		if _, err := ParseReport(tt.b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := good.Sign(seedOf("b")); !errors.Is(err, ErrReport) {
		t.Errorf("signed by another: %v", err)
	}
	many := receipt(1, 1)
	for i := range MaxWorkers + 1 {
		many.Work = append(many.Work, Work{Worker: Node{byte(i >> 8), byte(i)}})
	}
	if _, err := many.Sign(seedOf("entry")); !errors.Is(err, ErrReport) {
		t.Errorf("%d workers: %v", len(many.Work), err)
	}
}

// The standard library verifies a fixed signature under keys of small order: Verify
// must not.
func TestWeakKeysAreRefused(t *testing.T) {
	identity := Key{1}
	forged := Signature{0: 1} // R is the identity, S is 0
	if !ed25519.Verify(identity[:], []byte("anything"), forged[:]) {
		t.Error("the standard library refuses it now: this test proves nothing")
	}
	small := map[string]string{
		"identity":         "0100000000000000000000000000000000000000000000000000000000000000",
		"order 2":          "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
		"order 4, system":  "0000000000000000000000000000000000000000000000000000000000000000",
		"order 4":          "0000000000000000000000000000000000000000000000000000000000000080",
		"order 8":          "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
		"order 8, other":   "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
		"not canonical":    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
		"not on the curve": "0200000000000000000000000000000000000000000000000000000000000000",
	}
	for name, s := range small {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := Verify(Key(b), []byte("anything"), forged); !errors.Is(err, ErrWeakKey) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := CheckKey(keyOf("a")); err != nil {
		t.Error(err)
	}
	// A second way to write a point: y + p below 2²⁵⁵.
	second := 0
	for y := byte(2); y < 19; y++ {
		k := Key(bytes.Repeat([]byte{0xff}, 32))
		k[0], k[31] = 0xed+y, 0x7f
		if p, err := new(edwards25519.Point).SetBytes(k[:]); err != nil || new(edwards25519.Point).MultByCofactor(p).Equal(edwards25519.NewIdentityPoint()) == 1 {
			continue
		}
		second++
		if err := CheckKey(k); !errors.Is(err, ErrWeakKey) {
			t.Errorf("y = p + %d: %v", y, err)
		}
	}
	if second == 0 {
		t.Error("no second way was found: this proves nothing")
	}
}

func TestVerifyClaim(t *testing.T) {
	h := ClaimHash(testNetwork, QuoteID{7}, Signature{1}, Hash{2})
	sig := Signature(ed25519.Sign(seedOf("alice"), h[:]))
	if err := VerifyClaim(keyOf("alice"), testNetwork, QuoteID{7}, Signature{1}, Hash{2}, sig); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"eve":           VerifyClaim(keyOf("eve"), testNetwork, QuoteID{7}, Signature{1}, Hash{2}, sig),
		"other network": VerifyClaim(keyOf("alice"), Hash{1}, QuoteID{7}, Signature{1}, Hash{2}, sig),
		"other quote":   VerifyClaim(keyOf("alice"), testNetwork, QuoteID{8}, Signature{1}, Hash{2}, sig),
		"other payment": VerifyClaim(keyOf("alice"), testNetwork, QuoteID{7}, Signature{2}, Hash{2}, sig),
		"other request": VerifyClaim(keyOf("alice"), testNetwork, QuoteID{7}, Signature{1}, Hash{3}, sig),
	} {
		if !errors.Is(err, ErrSignature) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Test 23: permuted, doubled, lost reports give the same end; two contents under one
// number, or one that takes back, are an equivocation.
func TestChain(t *testing.T) {
	r := rand.New(rand.NewPCG(23, 23))
	var reports []Report
	for i := range uint64(20) {
		work := []Work{{keyOf("a"), []Line{{1, 10 + i}}}, {keyOf("b"), []Line{{1, 5 + i/2}, {2, 1 + i}}}}
		reports = append(reports, receipt(i+1, 10*i, work...))
	}
	for range 100 {
		var c Chain
		var err error
		order := append(append([]Report(nil), reports...), reports[r.IntN(20)], reports[19])
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, one := range order {
			if one.Seq != 20 && r.IntN(3) == 0 {
				continue
			}
			if c, err = c.Take(one); err != nil {
				t.Fatal(err)
			}
		}
		if c.Last.Hash() != reports[19].Hash() {
			t.Fatalf("the end is number %d", c.Last.Seq)
		}
	}
	var c Chain
	for _, i := range []int{4, 9, 14} {
		c, _ = c.Take(reports[i])
	}
	changed := func(seq, tokens uint64, work ...Work) Report { return receipt(seq, tokens, work...) }
	full := reports[14].Work
	for name, bad := range map[string]Report{
		"other content":        changed(15, 141, full...),
		"other content, older": changed(5, 41, reports[4].Work...),
		"fewer tokens":         changed(16, 139, full...),
		"a line less":          changed(16, 150, Work{keyOf("a"), []Line{{1, 24}}}),
		"units less":           changed(16, 150, Work{keyOf("a"), []Line{{1, 23}}}, full[1]),
		"older with more":      changed(12, 141, full...),
	} {
		before := len(c.Seen)
		_, err := c.Take(bad)
		var e *Equivocation
		if !errors.Is(err, ErrEquivocation) || !errors.As(err, &e) || e.New.Hash != bad.Hash() || e.Old.Hash == e.New.Hash || len(c.Seen) != before {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := reports[3]
	other.Request = QuoteID{8}
	if _, err := c.Take(other); !errors.Is(err, ErrOtherChain) {
		t.Error(err)
	}
	var long Chain
	for i := range uint64(MaxReports + 1) {
		next, err := long.Take(receipt(i+1, i))
		if (i == MaxReports) != errors.Is(err, ErrReports) {
			t.Fatalf("report %d: %v", i, err)
		}
		long = next
	}
}

func FuzzParseReport(f *testing.F) {
	f.Add(sign(f, statement("a", 1, Line{2, 40}), "a"))
	f.Add(sign(f, receipt(2, 9, Work{keyOf("a"), []Line{{0, 1}}}, Work{keyOf("b"), nil}), "entry"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseReport(b)
		if err != nil {
			return
		}
		if r.check() != nil || CheckKey(r.Signer) != nil {
			t.Errorf("%x is taken", b)
		}
		if body, err := encMode.Marshal(r); err != nil || !bytes.Contains(b, body) {
			t.Errorf("%x has another encoding, %v", b, err)
		}
	})
}

package settle

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

func TestParseAmount(t *testing.T) {
	for _, tt := range []struct {
		text string
		want Amount
		ok   bool
	}{
		{"0", 0, true}, {"1", 1, true}, {"1500", 1500, true}, {"18446744073709551615", math.MaxUint64, true},
		{"18446744073709551616", 0, false}, {"99999999999999999999", 0, false}, {"100000000000000000000", 0, false},
		{"", 0, false}, {"01", 0, false}, {"00", 0, false}, {"+1", 0, false}, {"-1", 0, false}, {"1e3", 0, false}, {"1.0", 0, false},
		{" 1", 0, false}, {"1 ", 0, false}, {"0x10", 0, false}, {"1_000", 0, false}, {"١", 0, false}, {"1\x00", 0, false},
	} {
		got, err := ParseAmount(tt.text)
		if got != tt.want || (err == nil) != tt.ok {
			t.Errorf("%q: %d, %v", tt.text, got, err)
		}
		if tt.ok && got.String() != tt.text {
			t.Errorf("%q is written %q", tt.text, got)
		}
	}
}

func TestKeysAndSignatures(t *testing.T) {
	const system, token = "11111111111111111111111111111111", "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA"
	for _, s := range []string{system, token} {
		k, err := ParseKey(s)
		if err != nil || k.String() != s {
			t.Errorf("%s: %s, %v", s, k, err)
		}
	}
	sig := strings.Repeat("1", 64)
	if s, err := ParseSignature(sig); err != nil || s != (Signature{}) || s.String() != sig {
		t.Errorf("64 zero bytes: %v, %v", s, err)
	}
	for _, bad := range []string{"", system + "1", system[1:], " " + system, system + " ", "0" + token[1:], token + "\n", sig, strings.Repeat("z", 1<<20)} {
		if k, err := ParseKey(bad); err == nil {
			t.Errorf("key %.50q was read as %s", bad, k)
		} else if len(err.Error()) > 300 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	}
	for _, bad := range []string{"", sig + "1", sig[1:], " " + sig, token, strings.Repeat("z", 1<<20)} {
		if s, err := ParseSignature(bad); err == nil {
			t.Errorf("signature %.50q was read as %s", bad, s)
		}
	}
}

func TestJSON(t *testing.T) {
	type record struct {
		A Amount
		K Key
		S Signature
	}
	in := record{A: math.MaxUint64, K: Key{1, 2}, S: Signature{3}}
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out record
	if err := json.Unmarshal(b, &out); err != nil || out != in {
		t.Errorf("%s is read as %+v, %v", b, out, err)
	}
	if err := json.Unmarshal([]byte(`{"A":1500}`), &out); err == nil {
		t.Error("an amount that is a JSON number, which others round, was taken")
	}
}

func TestMulDiv(t *testing.T) {
	for _, tt := range []struct {
		a, b, c, want uint64
		rest, ok      bool
	}{
		{math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64, false, true},
		{math.MaxUint64, 3, 2, 0, false, false}, {7, 3, 2, 10, true, true}, {1, 1, 0, 0, false, false}, {0, 5, 1, 0, false, true},
		{math.MaxUint64, 2, 3, 12297829382473034410, false, true},
	} {
		got, rest, err := mulDiv(tt.a, tt.b, tt.c)
		if got != tt.want || rest != tt.rest || (err == nil) != tt.ok {
			t.Errorf("%d·%d/%d = %d, %v, %v", tt.a, tt.b, tt.c, got, rest, err)
		}
	}
	if _, err := Amount(math.MaxUint64).Add(1); err == nil {
		t.Error("a sum wrapped")
	}
}

func FuzzParseAmount(f *testing.F) {
	f.Add("1500")
	f.Add("1e3")
	f.Fuzz(func(t *testing.T, s string) {
		if a, err := ParseAmount(s); err == nil && a.String() != s {
			t.Errorf("%q was read as %s", s, a)
		}
	})
}

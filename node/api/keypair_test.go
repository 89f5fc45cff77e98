package api

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"strings"
	"testing"
)

// keyPairText is a key pair as `solana-keygen new` writes it.
func keyPairText(t testing.TB) (ed25519.PrivateKey, string) {
	t.Helper()
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	numbers := make([]int, len(key))
	for i, b := range key {
		numbers[i] = int(b)
	}
	text, err := json.Marshal(numbers)
	if err != nil {
		t.Fatal(err)
	}
	return key, string(text)
}

func TestParseKeyPair(t *testing.T) {
	key, good := keyPairText(t)
	if got, err := ParseKeyPair("id.json", []byte(good+"\n")); err != nil || !bytes.Equal(got, key) {
		t.Errorf("got %x, %v", got, err)
	}
	for name, text := range map[string]string{
		"empty": "", "no list": `"a"`, "63 numbers": strings.Replace(good, ",", "", 1), "65 numbers": strings.Replace(good, "[", "[0,", 1),
		"more behind": good + "1", "a byte that is none": "[256" + good[strings.IndexByte(good, ','):], "negative": "[-1" + good[strings.IndexByte(good, ','):],
		"a fraction": "[1.5" + good[strings.IndexByte(good, ','):], "another public key": good[:strings.LastIndexByte(good, ',')+1] + "7]",
		"too long": good + strings.Repeat(" ", MaxKeyPair),
	} {
		if _, err := ParseKeyPair("id.json", []byte(text)); err == nil || !strings.Contains(err.Error(), "id.json is no key pair") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParseKeyPair(f *testing.F) {
	_, good := keyPairText(f)
	for _, text := range []string{good, "[]", "[1e1]", "[[1]]"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if key, err := ParseKeyPair("x", text); err == nil && !ed25519.Verify(key.Public().(ed25519.PublicKey), text, ed25519.Sign(key, text)) {
			t.Errorf("%q is a key pair that does not sign", text)
		}
	})
}

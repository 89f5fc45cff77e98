package settle

import (
	"crypto/ed25519"
	"encoding/hex"
	"math/big"
	"testing"
)

// TestSmallOrder: all encodings of the points whose eightfold is the identity, for which the
// standard library lets forged signatures pass.
func TestSmallOrder(t *testing.T) {
	forged := make([]byte, ed25519.SignatureSize)
	forged[0] = 1 // R is the identity, S is 0
	for _, s := range []string{
		"0000000000000000000000000000000000000000000000000000000000000000", // order 4
		"0100000000000000000000000000000000000000000000000000000000000000", // the identity
		"26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05", // order 8
		"c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a", // order 8
		"ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // order 2
		"edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // 0, not reduced
		"eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // 1, not reduced
	} {
		var k Key
		if _, err := hex.Decode(k[:], []byte(s)); err != nil {
			t.Fatal(err)
		}
		for _, sign := range []byte{0, 0x80} {
			k[31] = k[31]&0x7f | sign
			passed := 0
			for i := range 1000 {
				if ed25519.Verify(k[:], big.NewInt(int64(i)).Bytes(), forged) {
					passed++
				}
			}
			if !SmallOrder(k) || CheckKey(k) == nil || passed == 0 {
				t.Errorf("%x: small order: %v, %v, %d forged signatures pass", k, SmallOrder(k), CheckKey(k), passed)
			}
		}
	}
	for name, k := range map[string]Key{"a good key": keyOf("alice"), "no point": {2}} {
		if SmallOrder(k) {
			t.Errorf("%s is of small order", name)
		}
	}
}

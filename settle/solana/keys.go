package solana

import (
	"encoding/hex"

	"kvasird/settle"
)

// smallOrder are the encodings of the points of edwards25519 whose order divides 8, the
// sign bit cleared: under these keys forged signatures pass the standard library.
var smallOrder = func() (keys [7]settle.Key) {
	for i, s := range []string{
		"0000000000000000000000000000000000000000000000000000000000000000", // order 4
		"0100000000000000000000000000000000000000000000000000000000000000", // the identity
		"26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05", // order 8
		"c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a", // order 8
		"ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // order 2
		"edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // 0, not reduced
		"eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", // 1, not reduced
	} {
		if _, err := hex.Decode(keys[i][:], []byte(s)); err != nil {
			panic(err)
		}
	}
	return keys
}()

// SmallOrder says whether a key is one for which anybody can sign.
func SmallOrder(k settle.Key) bool {
	k[31] &= 0x7f
	for _, s := range smallOrder {
		if k == s {
			return true
		}
	}
	return false
}

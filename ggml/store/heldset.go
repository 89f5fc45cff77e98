package store

import (
	"encoding/binary"
	"errors"

	"lukechampine.com/blake3"
)

// The set of verified groups of a file, on disk, all integers little-endian:
//
//	magic "kvheld1\n" | u64 size of the file | its root hash, 32 bytes
//	one bit per group, group i in bit i%8 of byte i/8; the bits after the last are 0
//	BLAKE3 of everything before, 32 bytes
//
// There is one encoding of a set. It is replaced as a whole, never changed in place.
const heldMagic = "kvheld1\n"

const heldHeader = len(heldMagic) + 8 + 32

func heldSize(size int64) int64 { return int64(heldHeader + (groupCount(size)+7)/8 + 32) }

func encodeHeld(root [32]byte, g *groupSet) []byte {
	b := append(make([]byte, 0, heldSize(g.size)), heldMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(g.size))
	b = append(b, root[:]...)
	for i := range (groupCount(g.size) + 7) / 8 {
		b = append(b, byte(g.words[i/8]>>(i%8*8)))
	}
	sum := blake3.Sum256(b)
	return append(b, sum[:]...)
}

var errHeld = errors.New("the set of verified groups is damaged")

// decodeHeld reads what encodeHeld writes of this file, and nothing else.
func decodeHeld(size int64, root [32]byte, b []byte) (*groupSet, error) {
	if int64(len(b)) != heldSize(size) {
		return nil, errHeld
	}
	body := b[:len(b)-32]
	if blake3.Sum256(body) != [32]byte(b[len(body):]) || string(body[:len(heldMagic)]) != heldMagic ||
		binary.LittleEndian.Uint64(body[len(heldMagic):]) != uint64(size) || [32]byte(body[heldHeader-32:heldHeader]) != root {
		return nil, errHeld
	}
	g := newGroupSet(size)
	for i, x := range body[heldHeader:] {
		for bit := range 8 {
			if x>>bit&1 == 0 {
				continue
			}
			if i*8+bit >= groupCount(size) {
				return nil, errHeld
			}
			g.add(i*8 + bit)
		}
	}
	return g, nil
}

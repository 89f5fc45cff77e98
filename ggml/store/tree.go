package store

import (
	"encoding/binary"
	"math/bits"

	"lukechampine.com/blake3/guts"
)

// Group is the unit in which bytes are verified and held: 256 chunks of BLAKE3, what
// the Bao library calls group 8. Only the last group of a file may be shorter.
const Group = 256 << 10

// A tree is the outboard Bao encoding of a file with chunk groups of 256 KiB:
//
//	u64 size of the file, little-endian
//	per inner node, in pre-order: 32 bytes left, 32 bytes right chaining value
//
// A node over n bytes, n > Group, has on its left the largest power of two of groups
// that is smaller than n. A file of one group has no inner node.
const treeHeader = 8

// groupCount returns the number of groups of a file; size > 0.
func groupCount(size int64) int { return int((size + Group - 1) / Group) }

func treeSize(size int64) int64 { return treeHeader + 64*int64(groupCount(size)-1) }

// words is a chaining value as the hash works on it.
type words = [8]uint32

func toWords(b []byte) (w words) {
	for i := range w {
		w[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return w
}

func appendWords(b []byte, w words) []byte {
	for _, x := range w {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	return b
}

// hashGroup returns the chaining value of group i; root says that it is all of the
// file, whose hash this then is. 0 < len(p) <= Group.
func hashGroup(p []byte, i int, root bool) words {
	const block = guts.MaxSIMD * guts.ChunkSize
	var stack [8]words // of full subtrees, as Group is 16 blocks
	done := uint64(0)  // blocks on the stack
	counter := uint64(i) * (Group / guts.ChunkSize)
	var buf [block]byte // a copy is half as fast again: the hash reads 16 chunks at once
	for len(p) > block {
		copy(buf[:], p)
		cv := guts.ChainingValue(guts.CompressBuffer(&buf, block, &guts.IV, counter, 0))
		level := 0
		for ; done&(1<<level) != 0; level++ {
			cv = guts.ChainingValue(guts.ParentNode(stack[level], cv, &guts.IV, 0))
		}
		stack[level] = cv
		done++
		counter += guts.MaxSIMD
		p = p[block:]
	}
	n := guts.CompressBuffer(&buf, copy(buf[:], p), &guts.IV, counter, 0)
	for level := range bits.Len64(done) {
		if done&(1<<level) != 0 {
			n = guts.ParentNode(stack[level], guts.ChainingValue(n), &guts.IV, 0)
		}
	}
	if root {
		n.Flags |= guts.FlagRoot
	}
	return guts.ChainingValue(n)
}

// leftGroups returns how many of n groups are on the left of their node; n > 1.
func leftGroups(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

// rootFlag marks the topmost node.
func rootFlag(root bool) uint32 {
	if root {
		return guts.FlagRoot
	}
	return 0
}

// buildTree makes the tree of a file from the chaining values of its groups.
func buildTree(size int64, leaves []words) (tree []byte, root [32]byte) {
	tree = binary.LittleEndian.AppendUint64(make([]byte, 0, treeSize(size)), uint64(size))
	var build func(leaves []words, top bool) words
	build = func(leaves []words, top bool) words {
		if len(leaves) == 1 {
			return leaves[0]
		}
		at := len(tree)
		tree = tree[:at+64]
		mid := leftGroups(len(leaves))
		l, r := build(leaves[:mid], false), build(leaves[mid:], false)
		appendWords(appendWords(tree[:at], l), r)
		return guts.ChainingValue(guts.ParentNode(l, r, &guts.IV, rootFlag(top)))
	}
	appendWords(root[:0], build(leaves, true))
	return tree, root
}

// checkTree walks a whole tree. It returns the chaining values of the groups, or why
// this is not the tree of the file with that size and hash.
func checkTree(size int64, root [32]byte, tree []byte) (leaves []words, reason string) {
	if int64(len(tree)) != treeSize(size) {
		return nil, "its size is not that of the file's tree"
	}
	if binary.LittleEndian.Uint64(tree) != uint64(size) {
		return nil, "it is of a file of another size"
	}
	rest := tree[treeHeader:]
	leaves = make([]words, 0, groupCount(size))
	var walk func(want words, n int, top bool) bool
	walk = func(want words, n int, top bool) bool {
		if n == 1 {
			leaves = append(leaves, want)
			return true
		}
		l, r := toWords(rest), toWords(rest[32:])
		rest = rest[64:]
		if guts.ChainingValue(guts.ParentNode(l, r, &guts.IV, rootFlag(top))) != want {
			return false
		}
		mid := leftGroups(n)
		return walk(l, mid, false) && walk(r, n-mid, false)
	}
	if !walk(toWords(root[:]), groupCount(size), true) {
		return nil, "a node does not hash to its parent"
	}
	return leaves, ""
}

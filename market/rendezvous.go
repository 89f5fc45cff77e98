package market

import "kvasird/ggml/gguf"

// Rendezvous hashing: everybody computes the same pseudo-random number for a peer and a thing,
// so that peers spread over equal things, and rivals for one thing are ranked, without talking.
// A peer may choose its identity so as to rank first; it gains only work.

// hash is 64-bit FNV-1a.
func hash(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

func hashID(id gguf.ModelID) uint64 { return hash(string(id[:])) }

// mix combines hashes (the finalizer of MurmurHash3 after every one).
func mix(h uint64, more ...uint64) uint64 {
	for _, x := range more {
		h ^= x + 0x9e3779b97f4a7c15 + h<<6 + h>>2
		h = (h ^ h>>33) * 0xff51afd7ed558ccd
		h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
		h ^= h >> 33
	}
	return h
}

// rank orders the peers that want cells of one layer: the lower goes first.
func rank(peer, model uint64, layer int) uint64 { return mix(peer, model, uint64(layer)) }

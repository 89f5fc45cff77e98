// Package gguf reads and writes GGUF model files: header, tensor index, the identity
// of a model, and the parts of it that nodes hold: expert slices, stages of a ring
// and sparse backbones.
//
// It is not for computing, and not for fetching or verifying ranges (see ggml/store).
// It is pure Go and needs no llama.cpp.
//
// Invariants. A Header that Parse returned fits its file: 0 <= Offset, Offset + Bytes
// <= Size for every tensor, offsets contiguous up to alignment, names unique. What
// Parse accepts, ggml's own parser accepts, and both say the same of it; the reverse
// does not hold: the limits here are narrower (see the constants beside Parse).
// A Model's expert tensors have one slab per expert that metadata announces.
//
// Values, headers and models do not change after they were made, and are safe for
// concurrent use; Close ends that.
package gguf

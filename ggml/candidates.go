//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "llama.h"
*/
import "C"

import (
	"fmt"
	"math"
	"unsafe"
)

// candidates are tokens with their logits, which samplers change, in C memory.
type candidates struct {
	data  *C.llama_token_data // [vocab]
	array *C.llama_token_data_array
	vocab int
}

func newCandidates(vocab int) *candidates {
	return &candidates{
		data:  (*C.llama_token_data)(C.calloc(C.size_t(max(vocab, 1)), C.sizeof_llama_token_data)),
		array: (*C.llama_token_data_array)(C.calloc(1, C.sizeof_llama_token_data_array)),
		vocab: vocab,
	}
}

// fill makes every token a candidate, at the place of its id, with the logits of the
// i-th entry of c's last batch.
func (s *candidates) fill(c *Context, i int) error {
	logits := c.Logits(i)
	if len(logits) != s.vocab || s.vocab == 0 {
		return fmt.Errorf("entry %d of the batch has no logits of %d tokens", i, s.vocab)
	}
	data := unsafe.Slice(s.data, s.vocab)
	for t, l := range logits {
		data[t] = C.llama_token_data{id: C.llama_token(t), logit: C.float(l)}
	}
	s.size(s.vocab)
	return nil
}

// size makes the first n the candidates, unsorted and none of them chosen.
func (s *candidates) size(n int) {
	*s.array = C.llama_token_data_array{data: s.data, size: C.size_t(n), selected: -1}
}

// left are those that no sampler dropped.
func (s *candidates) left() []C.llama_token_data {
	return unsafe.Slice(s.array.data, int(s.array.size))
}

// selected is the one that a sampler chose, unless it was refused or is no number.
func (s *candidates) selected() (Token, bool) {
	left := s.left()
	if s.array.selected < 0 || int(s.array.selected) >= len(left) {
		return 0, false
	}
	chosen := left[s.array.selected]
	return Token(chosen.id), possible(chosen)
}

// possible says that no sampler refused it, which its logit tells.
func possible(d C.llama_token_data) bool { return float64(d.logit) > math.Inf(-1) }

func (s *candidates) free() {
	C.free(unsafe.Pointer(s.data))
	C.free(unsafe.Pointer(s.array))
}

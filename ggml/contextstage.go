//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "boundary.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// stageState is what a context has more when its model is a stage of a ring, or the
// context is to give the rows after its last layer.
type stageState struct {
	boundary *C.struct_kv_boundary // nil without ContextConfig.Boundary
	width    int                   // f32 per row
	asRows   bool                  // of the batch in progress
	rows     []float32             // its rows; Go memory
	lookup   []float32             // [batch*width] rows of tokens, for a first stage that takes rows
	stored   []byte                // one of them as it is stored
	pos4     *C.llama_pos          // [4*batch] for models with four positions per token; else nil
	order    []int32               // batch entry of every row, as the library took them
	at       []int32               // row of every batch entry
	split    splitter
}

func (c *Context) newStage(cfg ContextConfig, p *C.struct_llama_context_params) {
	s := &c.stage
	s.width = c.model.EmbeddingLength()
	posPerToken := 1
	if r := C.llama_model_rope_type(c.model.c); r == C.LLAMA_ROPE_TYPE_MROPE || r == C.LLAMA_ROPE_TYPE_IMROPE {
		posPerToken = 4
		s.pos4 = (*C.llama_pos)(C.calloc(C.size_t(4*cfg.Batch), C.sizeof_llama_pos))
	}
	if c.model.takesRows() {
		s.lookup = make([]float32, cfg.Batch*s.width)
	}
	if !cfg.Boundary {
		return
	}
	s.order, s.at = make([]int32, 0, cfg.Batch), make([]int32, cfg.Batch)
	s.split = splitter{
		ubatch: cfg.UBatch, equal: !c.model.CanTruncate() || !cfg.UnifiedKV && cfg.Sequences > 1,
		consecutive: !cfg.UnifiedKV || bool(C.llama_model_is_recurrent(c.model.c)),
	}
	b := (*C.struct_kv_boundary)(C.calloc(1, C.sizeof_struct_kv_boundary))
	setName(&b.name, fmt.Sprintf("l_out-%d", c.model.Layers()-1))
	b.width, b.capacity, b.pos_per_token = C.int64_t(s.width), C.int64_t(cfg.Batch), C.int32_t(posPerToken)
	b.rows = (*C.float)(C.calloc(C.size_t(cfg.Batch*s.width), 4))
	b.pos = (*C.int32_t)(C.calloc(C.size_t(cfg.Batch), 4))
	C.kv_set_boundary(p, b)
	s.boundary = b
}

func (s *stageState) free() {
	if s.boundary != nil {
		C.free(unsafe.Pointer(s.boundary.rows))
		C.free(unsafe.Pointer(s.boundary.pos))
		C.free(unsafe.Pointer(s.boundary))
	}
	C.free(unsafe.Pointer(s.pos4))
}

// firstLayer is the number of the model's first layer in the model that it is a stage of.
func (m *Model) firstLayer() int {
	if m.image == nil {
		return 0
	}
	return m.image.Window().Begin
}

// takesRows says whether the model has no token embedding of its own, because it is
// the first stage as gguf's RowStage makes it.
func (m *Model) takesRows() bool { return m.image != nil && m.image.Tokens() > 0 }

// tokens is the number of tokens that a batch may name.
func (c *Context) tokens() int {
	if c.model.takesRows() {
		return c.model.image.Tokens()
	}
	return c.vocab
}

// fillInput takes over what a batch has of tokens or rows.
func (c *Context) fillInput(b *Batch) error {
	s, n := &c.stage, b.Len()
	s.asRows, s.rows = false, nil
	if b.width != 0 {
		if b.width != s.width || len(b.rows) != n*s.width || len(b.tokens) != 0 {
			return fmt.Errorf("%d f32 in %d rows of %d, where the model has rows of %d", len(b.rows), n, b.width, s.width)
		}
		s.asRows, s.rows = true, b.rows
		return nil
	}
	if len(b.tokens) != n || len(b.rows) != 0 {
		return errors.New("rows in a batch of tokens: use NewRowBatch")
	}
	limit := c.tokens()
	for i, t := range b.tokens {
		if t < 0 || int(t) >= limit {
			return fmt.Errorf("batch entry %d: token %d of %d", i, t, limit)
		}
	}
	if c.model.takesRows() {
		s.asRows, s.rows = true, s.lookup[:n*s.width]
		return c.lookUp(b.tokens)
	}
	tokens := unsafe.Slice(c.batch.token, n)
	for i, t := range b.tokens {
		tokens[i] = C.llama_token(t)
	}
	return nil
}

// lookUp does what the graph does with tokens: it takes their rows from the embedding.
func (c *Context) lookUp(tokens []Token) error {
	s, image := &c.stage, c.model.image
	dtype, width, scale := image.TokenType()
	for i, t := range tokens {
		var err error
		if s.stored, err = image.TokenRow(s.stored, int(t)); err != nil {
			return err
		}
		row := s.lookup[i*width : (i+1)*width]
		if err := dequantizeRow(dtype, row, s.stored); err != nil {
			return fmt.Errorf("token embedding: %w", err)
		}
		if scale != 1 {
			for j := range row {
				row[j] *= scale
			}
		}
	}
	return nil
}

// spreadPositions gives rows four positions each (time, height, width and one that text
// does not use) where the model wants them; for tokens the library does that itself.
func (c *Context) spreadPositions(n int) {
	if c.stage.pos4 == nil || !c.stage.asRows {
		return
	}
	pos, to := unsafe.Slice(c.batch.pos, n), unsafe.Slice(c.stage.pos4, 4*n)
	for i := range 3 {
		copy(to[i*n:], pos)
	}
	clear(to[3*n:])
}

// input is the batch as the library gets it. Its rows are Go memory, which the library
// reads only while it decodes.
func (c *Context) input() C.struct_llama_batch {
	batch := c.batch
	if c.stage.asRows {
		batch.token = nil
		batch.embd = (*C.float)(unsafe.SliceData(c.stage.rows))
		if c.stage.pos4 != nil {
			batch.pos = c.stage.pos4
		}
	}
	if b := c.stage.boundary; b != nil {
		b.n, b.n_pos, b.error = 0, 0, 0
	}
	return batch
}

// checkBoundary finds out which row belongs to which entry of the batch.
func (c *Context) checkBoundary() error {
	s := &c.stage
	if s.boundary == nil {
		return nil
	}
	n := int(c.batch.n_tokens)
	if s.boundary.error != 0 || int(s.boundary.n) != n {
		return fmt.Errorf("layer %d gave %d of %d rows: this model cannot be cut here", c.model.Layers()-1, int(s.boundary.n), n)
	}
	seq, pos := unsafe.Slice(c.batch.seq_id, n), unsafe.Slice(c.batch.pos, n)
	s.order = s.split.order(s.order[:0], n, func(i int) int { return int(*seq[i]) })
	if len(s.order) != n {
		return fmt.Errorf("the library took %d of %d rows", len(s.order), n)
	}
	seen := unsafe.Slice((*int32)(unsafe.Pointer(s.boundary.pos)), n)
	for row, i := range s.order {
		if seen[row] >= 0 && seen[row] != int32(pos[i]) {
			return fmt.Errorf("row %d of the batch has position %d, not %d: the library took the rows in another order", row, seen[row], int32(pos[i]))
		}
		s.at[i] = int32(row)
	}
	return nil
}

// Hidden is the row after the last layer of the i-th entry of the last batch,
// [EmbeddingLength], before any norm; nil without ContextConfig.Boundary. The memory is
// the context's, valid until the next Decode.
func (c *Context) Hidden(i int) []float32 {
	s := &c.stage
	if s.boundary == nil || i < 0 || i >= int(c.batch.n_tokens) {
		return nil
	}
	rows := unsafe.Slice((*float32)(unsafe.Pointer(s.boundary.rows)), c.max*s.width)
	at := int(s.at[i]) * s.width
	return rows[at : at+s.width : at+s.width]
}

//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "boundary.h"
#include "bridge.h"
#include "swarm.h"
#include "trace.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"runtime/cgo"
	"sync/atomic"
	"time"
	"unsafe"
)

func (c *ContextConfig) fill() error {
	if c.Batch == 0 {
		c.Batch = 512
	}
	if c.UBatch == 0 {
		c.UBatch = c.Batch
	}
	c.Sequences = max(c.Sequences, 1)
	c.Threads = max(c.Threads, 1)
	const limit = 1 << 24
	switch {
	case c.Tokens < 0 || c.Tokens > limit, c.Batch < 1 || c.Batch > 1<<16, c.UBatch < 1 || c.UBatch > c.Batch:
		return fmt.Errorf("context of %d tokens, batch %d, ubatch %d", c.Tokens, c.Batch, c.UBatch)
	case c.Boundary && c.Watch[0] != "":
		return errors.New("a context cannot have both Boundary and Watch")
	case c.Trace != nil && (c.Boundary || c.Watch[0] != ""):
		return errors.New("a context cannot have Trace beside Boundary or Watch")
	case c.Embeddings && (c.Boundary || c.UBatch != c.Batch):
		return errors.New("a context of embeddings has no Boundary, and computes a batch at once")
	case c.Sequences > int(C.llama_max_parallel_sequences()):
		return fmt.Errorf("%d sequences, at most %d", c.Sequences, int(C.llama_max_parallel_sequences()))
	}
	return nil
}

// Context is a model's state for a set of sequences.
type Context struct {
	model   *Model
	c       *C.struct_llama_context
	mem     C.llama_memory_t
	batch   C.struct_llama_batch
	max     int // tokens in batch
	seqs    int
	vocab   int
	embeds  int    // f32 of a sequence's vector; 0 without ContextConfig.Embeddings
	abort   *int32 // C memory, polled by the library
	watch   *C.struct_kv_stopwatch
	stage   stageState
	trace   func(Traced)
	handle  cgo.Handle
	release func() bool
	guesses guesses
	current decodeCall
	call    ExpertCall // of the split in progress
}

// NewContext reserves the KV cache and the compute buffers.
func (m *Model) NewContext(cfg ContextConfig) (*Context, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	if cfg.Embeddings {
		if err := m.Pooling().Check(); err != nil {
			return nil, err
		}
	}
	if err := m.open(); err != nil {
		return nil, err
	}
	c := &Context{model: m, max: cfg.Batch, seqs: cfg.Sequences, vocab: m.VocabSize(), guesses: newGuesses(cfg.Sequences)}
	c.abort = (*int32)(C.calloc(1, 4))
	c.handle = cgo.NewHandle(c)
	p := C.llama_context_default_params()
	p.n_ctx = C.uint32_t(cfg.Tokens)
	p.n_batch, p.n_ubatch = C.uint32_t(cfg.Batch), C.uint32_t(cfg.UBatch)
	p.n_seq_max = C.uint32_t(cfg.Sequences)
	p.n_threads, p.n_threads_batch = C.int32_t(cfg.Threads), C.int32_t(cfg.Threads)
	p.kv_unified = C.bool(cfg.UnifiedKV)
	p.no_perf = true
	if cfg.Embeddings {
		c.embeds = m.EmbeddingSize()
		p.embeddings, p.pooling_type = true, C.enum_llama_pooling_type(m.Pooling())
	}
	C.kv_set_abort(&p, (*C.int32_t)(unsafe.Pointer(c.abort)))
	if cfg.Watch[0] != "" {
		c.watch = (*C.struct_kv_stopwatch)(C.calloc(1, C.sizeof_struct_kv_stopwatch))
		setName(&c.watch.from, cfg.Watch[0])
		setName(&c.watch.to, cfg.Watch[1])
		C.kv_set_stopwatch(&p, c.watch)
	}
	if c.trace = cfg.Trace; c.trace != nil {
		C.kv_set_trace(&p, C.uintptr_t(c.handle))
	}
	c.newStage(cfg, &p)
	loadMu.Lock()
	logs.clear()
	C.kv_swarm_set_context(C.uintptr_t(c.handle))
	c.c = C.llama_init_from_model(m.c, p)
	C.kv_swarm_set_context(0)
	err := logs.failure("llama.cpp cannot make a context")
	loadMu.Unlock()
	if c.c == nil {
		c.free()
		return nil, err
	}
	c.mem = C.llama_get_memory(c.c)
	c.batch = C.llama_batch_init(C.int32_t(cfg.Batch), 0, 1)
	c.release = track(c, "context", m.log)
	return c, nil
}

func (c *Context) free() {
	if c.c != nil {
		C.llama_batch_free(c.batch)
		C.llama_free(c.c)
	}
	C.free(unsafe.Pointer(c.abort))
	C.free(unsafe.Pointer(c.watch))
	c.stage.free()
	c.handle.Delete()
	c.model.contextClosed()
}

// Close frees the context. It may be called again.
func (c *Context) Close() error {
	if c.release() {
		c.free()
	}
	return nil
}

// setName puts a name into a C array, cut to fit.
func setName(dst *[64]C.char, name string) {
	for i := range min(len(name), len(dst)-1) {
		dst[i] = C.char(name[i])
	}
}

// Watched is the time and number of laps of ContextConfig.Watch so far.
func (c *Context) Watched() (total time.Duration, laps int) {
	if c.watch == nil {
		return 0, 0
	}
	return time.Duration(c.watch.total_us) * time.Microsecond, int(c.watch.laps)
}

// Tokens is the number of KV cells, as the library rounded it.
func (c *Context) Tokens() int { return int(C.llama_n_ctx(c.c)) }

// Decode runs the batch through the model. When ctx ends it stops and returns
// ctx's error; when an expert call fails it returns that error. After an error
// the cells of this batch's tokens must be removed (SeqRemove) before the next.
func (c *Context) Decode(ctx context.Context, b *Batch) error { return c.decode(ctx, b, false) }

func (c *Context) decode(ctx context.Context, b *Batch, draft bool) error {
	if err := c.fill(b); err != nil {
		return err
	}
	if err := c.beginDraft(b, draft); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if ctx.Done() != nil {
		stored := make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			atomic.StoreInt32(c.abort, 1)
			close(stored)
		})
		defer func() {
			if !stop() {
				<-stored // or a late store would abort the next decode
			}
			atomic.StoreInt32(c.abort, 0)
		}()
	}
	c.current = decodeCall{ctx: ctx, draft: draft}
	rc := int(C.llama_decode(c.c, c.input()))
	failed := c.current.err
	c.current = decodeCall{}
	switch {
	case rc == 0:
		return c.checkBoundary()
	case failed != nil:
		return failed
	case ctx.Err() != nil:
		return ctx.Err()
	case rc == 1:
		return ErrNoRoom
	}
	return fmt.Errorf("llama_decode failed with status %d", rc)
}

func (c *Context) fill(b *Batch) error {
	n := b.Len()
	if n == 0 || n > c.max {
		return fmt.Errorf("batch of %d tokens, 1 to %d allowed", n, c.max)
	}
	if err := c.fillInput(b); err != nil {
		return err
	}
	pos := unsafe.Slice(c.batch.pos, n)
	nSeq := unsafe.Slice(c.batch.n_seq_id, n)
	seq := unsafe.Slice(c.batch.seq_id, n)
	logits := unsafe.Slice(c.batch.logits, n)
	for i := range n {
		if b.pos[i] < 0 || b.seq[i] < 0 || int(b.seq[i]) >= c.seqs {
			return fmt.Errorf("batch entry %d: position %d, sequence %d", i, b.pos[i], b.seq[i])
		}
		pos[i], nSeq[i] = C.llama_pos(b.pos[i]), 1
		*seq[i] = C.llama_seq_id(b.seq[i])
		logits[i] = 0
		if b.output[i] || c.stage.boundary != nil || c.embeds > 0 {
			logits[i] = 1
		}
	}
	c.batch.n_tokens = C.int32_t(n)
	c.spreadPositions(n)
	return nil
}

// Logits are those of the i-th token of the last batch, [vocabulary]; nil when
// it was added without output. The memory is the library's, valid until the
// next Decode.
func (c *Context) Logits(i int) []float32 {
	if i < 0 || i >= int(c.batch.n_tokens) || unsafe.Slice(c.batch.logits, c.max)[i] == 0 {
		return nil
	}
	p := C.llama_get_logits_ith(c.c, C.int32_t(i))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(p)), c.vocab)
}

// Embedding is the vector of a sequence of the last batch, [EmbeddingSize] as the model
// gives it, of any length; nil without ContextConfig.Embeddings, or where the sequence
// was not in the batch. The memory is the library's, valid until the next Decode.
func (c *Context) Embedding(seq int) []float32 {
	if c.embeds == 0 || seq < 0 || seq >= c.seqs {
		return nil
	}
	p := C.llama_get_embeddings_seq(c.c, C.llama_seq_id(seq))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(p)), c.embeds)
}

// SeqRemove drops a sequence's cells at positions [p0, p1); a negative bound is
// open. False: this memory cannot drop part of a sequence.
func (c *Context) SeqRemove(seq, p0, p1 int) bool {
	ok := bool(C.llama_memory_seq_rm(c.mem, C.llama_seq_id(seq), C.llama_pos(p0), C.llama_pos(p1)))
	if ok && c.guesses.count > 0 {
		c.guesses.removed(seq, p0, p1)
	}
	return ok
}

// SeqCopy puts all cells of one sequence into another one, which is empty. With
// UnifiedKV they share them, and none are used up.
func (c *Context) SeqCopy(from, to int) {
	C.llama_memory_seq_cp(c.mem, C.llama_seq_id(from), C.llama_seq_id(to), -1, -1)
	if at := c.guesses.from[from]; at >= 0 {
		c.guesses.add(to, at)
	}
}

// SeqMin is the first position of a sequence whose cells are all there, from it to
// the last; -1 when it has none. It is above 0 only where Model.Window is.
func (c *Context) SeqMin(seq int) int {
	return int(C.llama_memory_seq_pos_min(c.mem, C.llama_seq_id(seq)))
}

//export kvExperts
func kvExperts(s *C.struct_kv_split) C.int {
	if s.context == 0 {
		logs.add(C.GGML_LOG_LEVEL_ERROR, "an expert call outside Decode\n")
		return 1
	}
	c := cgo.Handle(s.context).Value().(*Context)
	if err := c.experts(s); err != nil {
		c.current.err = err
		return 1
	}
	return 0
}

// experts answers one split. A panic in an ExpertFunc is an error like others:
// it must not unwind through the library.
func (c *Context) experts(s *C.struct_kv_split) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("expert call of layer %d panicked: %v", s.layer, r)
		}
	}()
	if s.error[0] != 0 {
		return fmt.Errorf("%w: layer %d: %s", ErrProgram, s.layer, C.GoString(&s.error[0]))
	}
	m := c.model
	if uintptr(s.model) != uintptr(m.handle) || m.experts == nil {
		return errors.New("expert call for another model")
	}
	program, err := m.program(s)
	if err != nil {
		return err
	}
	rows, pairs := int(s.tokens)*int(s.rows_per_token), int(s.tokens)*int(s.used)
	c.call = ExpertCall{
		Layer: m.firstLayer() + int(s.layer), Program: program,
		RowWidth: int(s.row_width), OutWidth: int(s.out_width),
		RowsPerToken: int(s.rows_per_token), Used: int(s.used),
		Rows: unsafe.Slice((*float32)(unsafe.Pointer(s.rows)), rows*int(s.row_width)),
		IDs:  unsafe.Slice((*int32)(unsafe.Pointer(s.ids)), pairs),
		Out:  unsafe.Slice((*float32)(unsafe.Pointer(s.out)), pairs*int(s.out_width)),

		Draft: c.current.draft,
	}
	if s.sum != nil {
		c.call.Weights = unsafe.Slice((*float32)(unsafe.Pointer(s.router)), pairs)
		c.call.Sum = unsafe.Slice((*float32)(unsafe.Pointer(s.sum)), int(s.tokens)*int(s.out_width))
	}
	err = m.experts(c.current.ctx, &c.call)
	if c.call.Summed {
		s.summed = 1
	}
	return err
}

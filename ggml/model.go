//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "image.h"
#include "llama.h"
#include "swarm.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/cgo"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"kvasird/ggml/gguf"
)

// expertPattern matches the tensors that the swarm device takes: the stacked
// experts with their biases and per-expert scales. Adjugate experts ("chexps")
// stay with the backbone: their ids are not the router's.
const expertPattern = `ffn_(up|gate|down|gate_up)_exps\.(weight|bias|scale)`

// Model is a loaded model.
type Model struct {
	c        *C.struct_llama_model
	vocab    *C.struct_llama_vocab
	buft     C.ggml_backend_buffer_type_t // of the experts, or nil
	handle   cgo.Handle
	release  func() bool
	experts  ExpertFunc
	programs []atomic.Pointer[layerProgram]
	image    *gguf.Image // that it was loaded from, or nil
	noLayers bool        // only its vocabulary was loaded
	log      *slog.Logger
	unsound  func() unsoundTokens

	mu       sync.Mutex // guards contexts and closed
	contexts int
	closed   bool
}

// LoadModel loads a GGUF file (the first of a split set) or an image of one. A file
// that is hostile can abort the process inside the library: what is not yet known to
// be good goes through Probe first.
func (rt *Runtime) LoadModel(cfg ModelConfig) (*Model, error) {
	source, err := cfg.open()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	defer source.Close()
	for _, o := range cfg.Overrides {
		if _, err := rt.Device(o.Device); err != nil {
			return nil, fmt.Errorf("tensors %s: %w", o.Pattern, err)
		}
	}
	m := &Model{experts: cfg.Experts, image: cfg.Image, noLayers: cfg.VocabOnly, log: rt.log}
	m.handle = cgo.NewHandle(m)
	params := C.llama_model_default_params()
	params.n_gpu_layers = C.int32_t(cfg.GPULayers)
	params.use_extra_bufts = C.bool(!cfg.NoRepack)
	params.vocab_only = C.bool(cfg.VocabOnly)
	params.load_mode = C.LLAMA_LOAD_MODE_MMAP
	if cfg.NoMmap || cfg.Experts != nil || cfg.Image != nil {
		params.load_mode = C.LLAMA_LOAD_MODE_NONE
	}
	if cfg.Experts != nil {
		m.buft = C.kv_swarm_buft_new(C.uintptr_t(m.handle), C.bool(source.image != nil && !imagesAsFiles))
	}
	overrides, free := m.overrides(cfg.Overrides)
	defer free()
	params.tensor_buft_overrides = overrides
	loadMu.Lock()
	defer loadMu.Unlock()
	logs.clear()
	if m.c, err = source.load(cfg.name(), params); err != nil {
		m.drop()
		return nil, err
	}
	if m.buft != nil {
		C.kv_swarm_buft_loaded(m.buft)
	}
	m.vocab = C.llama_model_get_vocab(m.c)
	m.programs = make([]atomic.Pointer[layerProgram], m.Layers()+int(C.llama_model_n_layer_nextn(m.c)))
	m.unsound = sync.OnceValue(m.findUnsound)
	m.release = track(m, "model "+cfg.name(), rt.log)
	return m, nil
}

// overrides is the list of where tensors lie, which ends with a zero, for the time of
// the load.
func (m *Model) overrides(list []Override) (first *C.struct_llama_model_tensor_buft_override, free func()) {
	n := len(list) + 2
	p := C.calloc(C.size_t(n), C.sizeof_struct_llama_model_tensor_buft_override)
	all := unsafe.Slice((*C.struct_llama_model_tensor_buft_override)(p), n)[:0]
	if m.buft != nil {
		all = append(all, C.struct_llama_model_tensor_buft_override{pattern: C.CString(expertPattern), buft: m.buft})
	}
	for _, o := range list {
		device := C.CString(o.Device)
		all = append(all, C.struct_llama_model_tensor_buft_override{
			pattern: C.CString(o.Pattern), buft: C.ggml_backend_dev_buffer_type(C.ggml_backend_dev_by_name(device)),
		})
		C.free(unsafe.Pointer(device))
	}
	return (*C.struct_llama_model_tensor_buft_override)(p), func() {
		for _, o := range all {
			C.free(unsafe.Pointer(o.pattern))
		}
		C.free(p)
	}
}

// name says what is loaded.
func (cfg ModelConfig) name() string {
	if cfg.Image != nil {
		return fmt.Sprintf("the stage of layers %v", cfg.Image.Window())
	}
	return cfg.Path
}

// modelSource is what the library reads a model from: an image, or else a file.
type modelSource struct {
	path  string
	image *gguf.Image
	file  *gguf.Model // of the image, if it is closed after the load
}

// open finds what is to be loaded. A file without its experts is read through an image,
// in which they are holes.
func (cfg ModelConfig) open() (s modelSource, err error) {
	s = modelSource{path: cfg.Path, image: cfg.Image}
	if s.image == nil {
		if _, err := os.Stat(s.path); err != nil {
			return s, err
		}
		if cfg.Experts != nil && !imagesAsFiles {
			if s.file, err = gguf.OpenModel(s.path); err != nil {
				return s, err
			}
			if s.image, err = s.file.BackboneImage(); err != nil {
				return s, errors.Join(err, s.Close())
			}
		}
	}
	if s.image != nil && cfg.Experts != nil {
		s.image = s.image.WithoutExperts()
	}
	return s, nil
}

func (s modelSource) Close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// load gives the library the file or the image. The caller holds loadMu.
func (s modelSource) load(name string, params C.struct_llama_model_params) (c *C.struct_llama_model, err error) {
	if s.image != nil {
		c, err = loadImage(s.image, name, params)
	} else {
		path := C.CString(s.path)
		defer C.free(unsafe.Pointer(path))
		c = C.llama_model_load_from_file(path, params)
	}
	if c == nil && err == nil {
		err = logs.failure("llama.cpp cannot load " + name)
	}
	return c, err
}

func (m *Model) drop() {
	if m.buft != nil {
		C.kv_swarm_buft_free(m.buft)
	}
	m.handle.Delete()
}

// Close frees the model. With contexts open it does nothing and says so.
func (m *Model) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	if m.contexts > 0 {
		return fmt.Errorf("the model has %d open contexts; close them first", m.contexts)
	}
	m.closed = true
	m.release()
	C.llama_model_free(m.c)
	m.drop()
	return nil
}

// open counts a context in, unless the model is closed.
func (m *Model) open() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return errors.New("the model is closed")
	case m.noLayers:
		return errors.New("only the vocabulary of the model was loaded")
	}
	m.contexts++
	return nil
}

func (m *Model) contextClosed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.contexts--
}

// Arch is the architecture's name, such as "qwen3moe".
func (m *Model) Arch() string {
	arch, _ := m.Meta("general.architecture")
	return arch
}

// Meta is a scalar metadata value as text; arrays are not given.
func (m *Model) Meta(key string) (string, bool) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	buf := make([]byte, 256)
	for {
		n := int(C.llama_model_meta_val_str(m.c, k, (*C.char)(unsafe.Pointer(&buf[0])), C.size_t(len(buf))))
		if n < 0 {
			return "", false
		}
		if n < len(buf) {
			return string(buf[:n]), true
		}
		buf = make([]byte, n+1)
	}
}

// ChatTemplate is the model's own template, or "".
func (m *Model) ChatTemplate() string {
	if t := C.llama_model_chat_template(m.c, nil); t != nil {
		return C.GoString(t)
	}
	return ""
}

// Layers is the number of blocks.
func (m *Model) Layers() int { return int(C.llama_model_n_layer(m.c)) }

// EmbeddingLength is the f32 per row between blocks.
func (m *Model) EmbeddingLength() int { return int(C.llama_model_n_embd(m.c)) }

// EmbeddingSize is the f32 of the vector that a model of embeddings makes of an input.
func (m *Model) EmbeddingSize() int { return int(C.llama_model_n_embd_out(m.c)) }

// Pooling is how the model makes that vector, gguf.NoPooling for one that makes text.
func (m *Model) Pooling() gguf.Pooling {
	text, _ := m.Meta(m.Arch() + ".pooling_type")
	kind, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		kind = 0
	}
	return gguf.PoolingOf(m.Arch(), kind)
}

// CanTruncate says whether the positions at the end of a sequence can be dropped
// (Context.SeqRemove). A recurrent state cannot be taken back.
func (m *Model) CanTruncate() bool {
	return !bool(C.llama_model_is_recurrent(m.c)) && !bool(C.llama_model_is_hybrid(m.c))
}

// Window is how many positions back the layers of sliding-window attention look, 0
// without such layers. Their cells of earlier positions may be gone.
func (m *Model) Window() int { return int(C.llama_model_n_swa(m.c)) }

// TrainContext is the context length in tokens that the model was trained with.
func (m *Model) TrainContext() int { return int(C.llama_model_n_ctx_train(m.c)) }

// VocabSize is the number of tokens; valid ids are [0, VocabSize).
func (m *Model) VocabSize() int { return int(C.llama_vocab_n_tokens(m.vocab)) }

// HasDecoder is false for encoders, which cannot generate.
func (m *Model) HasDecoder() bool { return bool(C.llama_model_has_decoder(m.c)) }

// BOS and EOS are -1 when the vocabulary has none.
func (m *Model) BOS() Token   { return Token(C.llama_vocab_bos(m.vocab)) }
func (m *Model) EOS() Token   { return Token(C.llama_vocab_eos(m.vocab)) }
func (m *Model) AddBOS() bool { return bool(C.llama_vocab_get_add_bos(m.vocab)) }

// IsEOG says whether the token ends a generation.
func (m *Model) IsEOG(t Token) bool {
	return m.valid(t) && bool(C.llama_vocab_is_eog(m.vocab, C.llama_token(t)))
}

func (m *Model) valid(t Token) bool { return t >= 0 && int(t) < m.VocabSize() }

const maxTextBytes = 64 << 20

// Tokenize splits text. addSpecial adds what the model wants at the ends;
// parseSpecial reads the text of control tokens as those tokens.
func (m *Model) Tokenize(text string, addSpecial, parseSpecial bool) ([]Token, error) {
	if len(text) > maxTextBytes {
		return nil, fmt.Errorf("text of %d bytes, at most %d", len(text), maxTextBytes)
	}
	if C.llama_vocab_type(m.vocab) == C.LLAMA_VOCAB_TYPE_NONE {
		return nil, errors.New("the model has no vocabulary")
	}
	c := C.CString(text)
	defer C.free(unsafe.Pointer(c))
	out := make([]Token, len(text)+8)
	for range 2 {
		n := int(C.llama_tokenize(m.vocab, c, C.int32_t(len(text)), (*C.llama_token)(unsafe.Pointer(&out[0])),
			C.int32_t(len(out)), C.bool(addSpecial), C.bool(parseSpecial)))
		if n >= 0 {
			return out[:n], nil
		}
		out = make([]Token, -n)
	}
	return nil, errors.New("the vocabulary cannot tokenize this text")
}

// Piece is the bytes of a token, which may be part of a UTF-8 rune. special
// gives the text of control tokens, else they are empty.
func (m *Model) Piece(t Token, special bool) []byte {
	if !m.valid(t) {
		return nil
	}
	buf := make([]byte, 32)
	for range 2 {
		n := int(C.llama_token_to_piece(m.vocab, C.llama_token(t), (*C.char)(unsafe.Pointer(&buf[0])),
			C.int32_t(len(buf)), 0, C.bool(special)))
		if n >= 0 {
			return buf[:n]
		}
		buf = make([]byte, -n)
	}
	return nil
}

// decodeCall is set on the Context for the time of a Decode.
type decodeCall struct {
	ctx   context.Context
	draft bool
	err   error // of the expert call that failed
}

//go:build !cgo

package ggml

import (
	"context"
	"errors"
	"time"

	"kvasird/ggml/gguf"
)

// ErrNoLibrary is what this build answers: it was made without cgo, so it has
// no llama.cpp. The expert Program and the plain Go reference kernel remain.
var ErrNoLibrary = errors.New("this kvasird was built without cgo and has no llama.cpp: build it with CGO_ENABLED=1 after `make deps`")

// The types of the cgo build; their constructors return ErrNoLibrary, so the
// methods are never reached.
type (
	Runtime struct{}
	Model   struct{}
	Context struct{}
	Sampler struct{}
	Kernel  struct{}

	PositionSampler struct{}
)

func Open(Config) (*Runtime, error)                         { return nil, ErrNoLibrary }
func (*Runtime) LoadModel(ModelConfig) (*Model, error)      { return nil, ErrNoLibrary }
func (*Runtime) NewKernel(KernelConfig) (*Kernel, error)    { return nil, ErrNoLibrary }
func (*Runtime) GenerateModel(string, GenerateConfig) error { return ErrNoLibrary }
func (*Runtime) Device(string) (Device, error)              { return Device{}, ErrNoLibrary }
func (*Model) NewContext(ContextConfig) (*Context, error)   { return nil, ErrNoLibrary }
func (*Model) NewSampler(SamplerConfig) (*Sampler, error)   { return nil, ErrNoLibrary }
func (*Model) NewPositionSampler(SamplerConfig) (*PositionSampler, error) {
	return nil, ErrNoLibrary
}
func (*Sampler) Sample(*Context, int) (Token, error) { return 0, ErrNoLibrary }
func (*PositionSampler) Sample(*Context, int, int, []Token) (Token, error) {
	return 0, ErrNoLibrary
}
func (*Model) Tokenize(string, bool, bool) ([]Token, error) { return nil, ErrNoLibrary }
func (*Context) Decode(context.Context, *Batch) error       { return ErrNoLibrary }
func (*Context) Draft(context.Context, *Batch) error        { return ErrNoLibrary }
func (*Kernel) Load(*gguf.Model, int, ...gguf.Range) error  { return ErrNoLibrary }
func (*Kernel) LoadSlices(*gguf.Model, ...gguf.Slice) error { return ErrNoLibrary }
func (*Kernel) DropSlice(gguf.Slice) error                  { return ErrNoLibrary }
func (*Kernel) LoadSlice(context.Context, *gguf.Model, gguf.Slice) error {
	return ErrNoLibrary
}
func (*Kernel) ReplaceSlice(context.Context, *gguf.Model, gguf.Slice, ...gguf.Slice) error {
	return ErrNoLibrary
}
func (*Kernel) SliceBytes(*gguf.Model, gguf.Slice) (held, passing int64, err error) {
	return 0, 0, ErrNoLibrary
}
func (*Kernel) SetProgram(int, []byte) (int, int, int, error) {
	return 0, 0, 0, ErrNoLibrary
}
func (*Kernel) Compute(int, []float32, []int32, []int32, []float32) error { return ErrNoLibrary }

func (*Runtime) RowOp(string, RowOp, []float32, int) ([]float32, error) {
	return nil, ErrNoLibrary
}

func (*Runtime) Devices() []Device             { return nil }
func (*Runtime) Features() []string            { return nil }
func (*Runtime) Variant() string               { return "none" }
func (*Runtime) LibDir() string                { return "" }
func (*Runtime) Release() string               { return "none" }
func (*Model) Close() error                    { return nil }
func (*Model) Arch() string                    { return "" }
func (*Model) Meta(string) (string, bool)      { return "", false }
func (*Model) ChatTemplate() string            { return "" }
func (*Model) Layers() int                     { return 0 }
func (*Model) EmbeddingLength() int            { return 0 }
func (*Model) EmbeddingSize() int              { return 0 }
func (*Model) Pooling() gguf.Pooling           { return gguf.NoPooling }
func (*Model) CanTruncate() bool               { return false }
func (*Model) Window() int                     { return 0 }
func (*Model) TrainContext() int               { return 0 }
func (*Model) VocabSize() int                  { return 0 }
func (*Model) HasDecoder() bool                { return false }
func (*Model) BOS() Token                      { return -1 }
func (*Model) EOS() Token                      { return -1 }
func (*Model) AddBOS() bool                    { return false }
func (*Model) IsEOG(Token) bool                { return false }
func (*Model) Piece(Token, bool) []byte        { return nil }
func (*Context) Watched() (time.Duration, int) { return 0, 0 }
func (*Context) Tokens() int                   { return 0 }
func (*Context) Logits(int) []float32          { return nil }
func (*Context) Hidden(int) []float32          { return nil }
func (*Context) Embedding(int) []float32       { return nil }
func (*Context) SeqRemove(int, int, int) bool  { return false }
func (*Context) SeqCopy(int, int)              {}
func (*Context) SeqMin(int) int                { return -1 }
func (*Context) Close() error                  { return nil }
func (*Sampler) Close()                        {}
func (*PositionSampler) Close()                {}
func (*Kernel) Forget(int)                     {}
func (*Kernel) Bytes() int64                   { return 0 }
func (*Kernel) Repacked() int                  { return 0 }
func (*Kernel) Close() error                   { return nil }

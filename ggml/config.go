package ggml

import (
	"cmp"
	"errors"
	"log/slog"

	"kvasird/ggml/gguf"
)

// Config says how the libraries are used.
type Config struct {
	LibDir  string // folder of the CPU variants and GPU backends; "" = where the linked library lies
	Variant string // CPU variant, "zen4", "haswell", …; "" = the best for this machine
	Logger  *slog.Logger
}

// Device is a ggml device of this process.
type Device struct {
	Index       int
	Name        string
	Description string
	Kind        string // "cpu", "gpu", "igpu", "accel"
	Backend     string
	FreeBytes   uint64
	TotalBytes  uint64
}

// ModelConfig says how a model is loaded.
type ModelConfig struct {
	Path string // with Experts nothing of the experts is read
	// Image is loaded instead of Path: the whole of it is read now, and where it has
	// TokenRow that is read later too, so its model stays open until Close. With
	// Experts their bytes are not read.
	Image     *gguf.Image
	VocabOnly bool       // the tokenizer alone: the header of Path is enough, nothing can be decoded
	Experts   ExpertFunc // nil: the model holds its own experts
	NoRepack  bool       // plain CPU layouts, for comparison
	NoMmap    bool       // read the file instead of mapping it; always so with Experts
	GPULayers int        // layers that lie on the first GPU, counted from the last, the output being one more; -1 all
	Overrides []Override // where tensors lie instead; the first that matches counts
}

// Override places tensors on a device, as llama.cpp's --override-tensor does.
type Override struct {
	Pattern string `json:"pattern"` // regular expression (ECMAScript), searched for in names
	Device  string `json:"device"`  // as Device.Name
}

// ContextConfig sizes a context.
type ContextConfig struct {
	Tokens    int // KV cells of all sequences together; 0 = what the model was trained with
	Batch     int // tokens per Decode at most; 0 = 512
	UBatch    int // tokens computed at a time; 0 = Batch
	Sequences int // 0 = 1
	Threads   int // 0 = 1; explicit, since the library's default fights its neighbours
	// Watch measures, in every Decode, the time between the ends of the graph's
	// nodes whose names begin so: see Context.Watched. It slows the decode.
	Watch     [2]string
	UnifiedKV bool // sequences share all cells, instead of Tokens/Sequences each
	// Boundary keeps the rows after the last layer of every token: see Context.Hidden.
	// It excludes Watch.
	Boundary bool
	// Trace is called in every Decode, on its thread, for the rows after each layer and for
	// the experts that each router chose, in the order in which the library takes the
	// tokens. It slows the decode, and excludes Watch and Boundary.
	Trace func(Traced)
	// Embeddings gives a vector for every sequence of a batch, by the model's pooling,
	// instead of logits: see Context.Embedding. A batch has all of a sequence, from
	// position 0, and its cells are removed before the next. It excludes Boundary.
	Embeddings bool
}

// Batch is the input of one Decode: tokens or rows.
type Batch struct {
	width  int // f32 per row; 0: tokens
	tokens []Token
	rows   []float32 // [Len*width]
	pos    []int32
	seq    []int32
	output []bool
}

// NewBatch makes room for capacity tokens.
func NewBatch(capacity int) *Batch {
	b := newBatch(capacity)
	b.tokens = make([]Token, 0, capacity)
	return b
}

// NewRowBatch makes room for capacity rows of width f32, which is the model's
// EmbeddingLength.
func NewRowBatch(capacity, width int) *Batch {
	b := newBatch(capacity)
	b.width, b.rows = width, make([]float32, 0, capacity*width)
	return b
}

func newBatch(capacity int) *Batch {
	return &Batch{pos: make([]int32, 0, capacity), seq: make([]int32, 0, capacity), output: make([]bool, 0, capacity)}
}

// Reset empties the batch.
func (b *Batch) Reset() {
	b.tokens, b.rows = b.tokens[:0], b.rows[:0]
	b.pos, b.seq, b.output = b.pos[:0], b.seq[:0], b.output[:0]
}

// Add appends a token at a position of a sequence. With output its logits can
// be read after Decode.
func (b *Batch) Add(t Token, pos, seq int, output bool) {
	b.tokens = append(b.tokens, t)
	b.place(pos, seq, output)
}

// AddRow appends a copy of a row that another stage computed, as Add a token.
func (b *Batch) AddRow(row []float32, pos, seq int, output bool) {
	b.rows = append(b.rows, row...)
	b.place(pos, seq, output)
}

func (b *Batch) place(pos, seq int, output bool) {
	b.pos = append(b.pos, int32(pos))
	b.seq = append(b.seq, int32(seq))
	b.output = append(b.output, output)
}

// Len is the number of tokens or rows.
func (b *Batch) Len() int { return len(b.pos) }

// ErrNoRoom is returned by Decode when the KV cache has no cells for the batch.
var ErrNoRoom = errors.New("the KV cache is full")

// SamplerConfig chooses how a token is drawn from the logits.
type SamplerConfig struct {
	Temperature      float32 // <= 0: greedy
	TopK             int     // 0: all
	TopP             float32 // 0 or 1: off
	MinP             float32 // 0: off
	Seed             uint32
	RepeatPenalty    float32 // 0 or 1: off
	FrequencyPenalty float32
	PresencePenalty  float32
	PenaltyLast      int // tokens that the penalties look back on; 0 = 64
	LogitBias        map[Token]float32

	// Grammar is the GBNF, start rule "root", that the answer must match; "" = free.
	// With Triggers the answer is free until its text has one of them, and matches
	// from the beginning of that on. Where the rest of the token that brings it is
	// not in the grammar, the answer is free until the next one.
	Grammar  string
	Triggers []string
	// ControlText says that the answer has the text of control tokens. A grammar lets
	// those through whose text it writes out; without ControlText it lets none.
	ControlText bool
}

// ErrNoToken is returned by Sample when the grammar takes no token of the vocabulary.
var ErrNoToken = errors.New("the grammar takes no token of the vocabulary here")

func (cfg SamplerConfig) penalises() bool {
	return cmp.Or(cfg.RepeatPenalty, 1) != 1 || cfg.FrequencyPenalty != 0 || cfg.PresencePenalty != 0
}

func (cfg SamplerConfig) penaltyLast() int { return cmp.Or(cfg.PenaltyLast, 64) }

// KernelConfig says where experts are computed.
type KernelConfig struct {
	Device   string // a Device's Name; "" = the CPU
	Threads  int    // 0 = 1
	NoRepack bool   // plain CPU layouts; sums may then round differently from a repacked model's
}

// ErrNotLoaded is wrapped when a call names an expert that is not loaded.
var ErrNotLoaded = errors.New("expert is not loaded")

// Traced is what a layer of a traced Decode gave. Its memory is valid during the call.
type Traced struct {
	Layer   int
	Width   int       // of a row: the model's EmbeddingLength, or the experts per token
	Rows    []float32 // after the layer; nil where it is Experts
	Experts []int32
}

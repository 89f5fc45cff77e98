package ggml

import "context"

// Token is an id of the model's vocabulary.
type Token int32

// An ExpertFunc computes the expert part of one layer for the rows of one
// ubatch. It is called once per MoE layer, on the thread inside Decode, with
// the context given to Decode. An error fails that Decode and is returned by it.
type ExpertFunc func(ctx context.Context, call *ExpertCall) error

// ExpertCall is the work of one layer. A pair is one row with one of the
// experts that the router chose for it; pair p = token*Used + k.
type ExpertCall struct {
	Layer        int
	Program      []byte    // encoded Program; the same bytes for every call of a model and layer
	RowWidth     int       // f32 per input row
	OutWidth     int       // f32 per output row
	RowsPerToken int       // 1, or Used when every pair has a row of its own
	Used         int       // experts per token
	Rows         []float32 // [tokens*RowsPerToken*RowWidth]; ggml's memory, valid during the call
	IDs          []int32   // [tokens*Used] expert of each pair, as the router numbers them
	Out          []float32 // [len(IDs)*OutWidth] to be filled in the order of the pairs; ggml's memory

	// Where the graph goes on with a sum over each token's experts, weighted by the router, it may
	// be filled in place of Out, which then Summed says: product by product, added in the order of
	// the pairs, each result rounded to f32. Both are ggml's memory, and nil elsewhere.
	Weights []float32 // [len(IDs)]
	Sum     []float32 // [tokens*OutWidth]
	Summed  bool

	// Draft says that the call is of Context.Draft: what comes of it is a guess, which may do
	// without some experts.
	Draft bool
}

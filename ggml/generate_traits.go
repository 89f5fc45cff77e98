//go:build cgo

package ggml

import "slices"

// constant is a trait that sets one key to the same value in every shape.
func constant(key string, value any) trait {
	return func(m metadata, _ shape) { m[key] = value }
}

// Traits that only set constants.
var (
	layerNorm    = constant("attention.layer_norm_epsilon", float32(1e-5))
	leadingDense = constant("leading_dense_block_count", uint32(1))
	sharedExpert = constant("expert_shared_count", uint32(1))
	sigmoidGate  = constant("expert_gating_func", uint32(2))
	weightsScale = constant("expert_weights_scale", float32(1))
	weightsNorm  = constant("expert_weights_norm", true)
	moeEveryTwo  = constant("interleave_moe_layer_step", uint32(2))
	logitScale   = constant("logit_scale", float32(1))
	convCache    = constant("shortconv.l_cache", uint32(3))
	halfLinear   = constant("full_attention_interval", uint32(2))
)

// unnamed is for architectures whose name makes the library look for special tokens,
// when it is in the name of the model.
func unnamed(m metadata, _ shape) { delete(m, "general.name") }

// bothSides is an encoder: a token sees all others, and the input's vector is the mean.
func bothSides(m metadata, _ shape) {
	m["attention.causal"] = false
	m["pooling_type"] = uint32(1)
	m["tokenizer.ggml.token_type_count"] = uint32(2)
}

// sharedWidth gives the shared expert half the width of the others, so that a
// mix-up of the two shows.
func sharedWidth(m metadata, s shape) { m["expert_shared_feed_forward_length"] = uint32(s.ff / 2) }

// slidingWindow makes every other layer a sliding-window layer, given as a
// period.
func slidingWindow(m metadata, _ shape) {
	m["attention.sliding_window"] = uint32(8)
	m["attention.sliding_window_pattern"] = uint32(2)
}

// slidingLayers is slidingWindow with the pattern given layer by layer.
func slidingLayers(m metadata, s shape) {
	slidingWindow(m, s)
	m["attention.sliding_window_pattern"] = s.perLayer(odd)
}

// sections splits the rotary dimensions for multi-section rotary positions.
func sections(m metadata, s shape) {
	quarter := uint32(s.headSize() / 4)
	m["rope.dimension_sections"] = []uint32{quarter, quarter, quarter, quarter}
}

// hybridHeads gives the odd layers no attention heads: they are recurrent.
func hybridHeads(m metadata, s shape) {
	heads := s.perLayer(func(layer int) uint32 {
		if layer%2 == 1 {
			return 0
		}
		return uint32(s.heads)
	})
	kvHeads := slices.Clone(heads)
	if _, latent := m["attention.kv_lora_rank"]; latent {
		kvHeads = s.perLayer(func(layer int) uint32 { return 1 - odd(layer) })
	}
	m["attention.head_count"] = heads
	m["attention.head_count_kv"] = kvHeads
}

// Sizes of latent attention; small, as only the experts need wide rows.
const (
	latentRank = 64
	latentRope = 16
	latentNope = 32
)

// latentAttention is multi-head latent attention: keys and values are
// compressed to latentRank, plus latentRope rotary dimensions, for all heads.
func latentAttention(m metadata, _ shape) {
	m["attention.head_count_kv"] = uint32(1)
	m["attention.q_lora_rank"] = uint32(latentRank)
	m["attention.kv_lora_rank"] = uint32(latentRank)
	m["attention.key_length"] = uint32(latentRank + latentRope)
	m["attention.value_length"] = uint32(latentRank)
	m["attention.key_length_mla"] = uint32(latentNope + latentRope)
	m["attention.value_length_mla"] = uint32(latentNope)
	m["rope.dimension_count"] = uint32(latentRope)
}

// indexer is the top-k token selection of sparse attention. It selects all
// tokens: a cut at k would let a rounding difference change the result.
func indexer(m metadata, _ shape) {
	m["attention.indexer.head_count"] = uint32(4)
	m["attention.indexer.key_length"] = uint32(2 * latentRank)
	m["attention.indexer.top_k"] = uint32(1 << 17)
}

// sharedIndexer lets the odd layers use the indexer of the layer before.
func sharedIndexer(m metadata, s shape) {
	m["attention.indexer.types"] = s.perLayer(func(layer int) uint32 { return 1 - odd(layer) })
}

const stateSize = 128

// stateSpace is a recurrent layer with one state of stateSize per head.
func stateSpace(m metadata, s shape) {
	m["ssm.conv_kernel"] = uint32(4)
	m["ssm.inner_size"] = uint32(stateSize * s.heads)
	m["ssm.state_size"] = uint32(stateSize)
	m["ssm.time_step_rank"] = uint32(s.heads)
	m["ssm.group_count"] = uint32(2)
}

// wideState is stateSpace with an inner size of twice the embedding, the only
// one that the Mamba layers know.
func wideState(m metadata, s shape) {
	stateSpace(m, s)
	m["ssm.inner_size"] = uint32(2 * s.embd)
}

// deltaAttention is Kimi's gated delta rule on the layers without heads.
func deltaAttention(m metadata, s shape) {
	hybridHeads(m, s)
	m["ssm.conv_kernel"] = uint32(4)
	m["kda.head_dim"] = uint32(128)
	m["kda.safe_gate"] = true
	m["kda.gate_lower_bound"] = float32(-5)
}

// hyperConnections replaces the residual stream by four.
func hyperConnections(m metadata, _ shape) {
	m["hyper_connection.count"] = uint32(4)
	m["hyper_connection.epsilon"] = float32(1e-6)
}

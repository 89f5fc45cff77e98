//go:build cgo

package ggml

// architectures lists, before some without experts and some for embeddings, every architecture of llama.cpp
// v0.5.0 whose loader creates expert tensors and whose graph gives logits by itself. Left out:
//   - dflash and eagle3 draft for another model, whose hidden rows they read;
//   - llama-embed gives embeddings, no logits;
//   - nemotron_h is nemotron_h_moe by its older name;
//   - ernie4_5, paddleocr, lfm2 and gemma4-assistant share a loader with an
//     architecture of this list, but create no experts.
var architectures = []architecture{
	{name: "afmoe", layers: 3, heads: 4, kvHeads: 2, traits: []trait{leadingDense, slidingWindow, sharedExpert, sigmoidGate}},
	{name: "arctic"},
	{name: "bailingmoe", traits: []trait{leadingDense, sharedExpert, weightsScale}},
	{name: "bailingmoe2", layers: 3, traits: []trait{leadingDense, sharedExpert, sharedWidth, sigmoidGate, weightsScale}},
	{name: "bailingmoe3", layers: 4, traits: []trait{leadingDense, sharedExpert, sharedWidth, sigmoidGate, weightsScale, latentAttention, deltaAttention, clampedLayers}},
	{name: "cohere2moe", layers: 3, fused: true, traits: []trait{layerNorm, leadingDense, slidingLayers, sharedExpert, sharedWidth, sigmoidGate, logitScale}},
	{name: "dbrx", traits: []trait{layerNorm, constant("attention.clamp_kqv", float32(8))}},
	{name: "deepseek", layers: 3, traits: []trait{leadingDense, sharedExpert, weightsScale}},
	{name: "deepseek2", layers: 3, fused: true, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention}},
	{name: "deepseek2-ocr", layers: 3, fused: true, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale}},
	{name: "deepseek32", layers: 3, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention, indexer, sections}},
	{name: "deepseek4", layers: 4, embd: 512, heads: 8, kvHeads: 1, traits: []trait{deepseek4}},
	{name: "dots1", layers: 3, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale}},
	{name: "dots3note", layers: 4, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention, indexer, sharedIndexer, slidingLayers, slidingLatent}},
	{name: "ernie4_5-moe", layers: 3, traits: []trait{leadingDense, sharedExpert, sharedWidth, moeEveryTwo}},
	{name: "exaone-moe", layers: 3, traits: []trait{leadingDense, slidingWindow, sharedExpert, sharedWidth, sigmoidGate}},
	{name: "gemma4", layers: 5, fused: true, traits: []trait{gemma4}},
	{name: "glm-dsa", layers: 3, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention, indexer, sections}},
	{name: "glm4moe", layers: 3, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, sections}},
	{name: "gpt-oss", traits: []trait{slidingWindow}},
	{name: "granite", traits: []trait{logitScale}},
	{name: "granite_swa", fused: true, traits: []trait{logitScale, slidingLayers}},
	{name: "granitehybrid", traits: []trait{logitScale, sharedWidth, hybridHeads, wideState}},
	{name: "granitemoe", traits: []trait{logitScale, sharedWidth}},
	{name: "grok"},
	{name: "grovemoe", traits: []trait{groupedExperts}},
	{name: "hunyuan-moe", traits: []trait{sharedWidth}},
	{name: "hy_v3", layers: 3, fused: true, traits: []trait{sharedWidth, sigmoidGate, weightsScale}},
	{name: "hy_v4", layers: 4, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, weightsNorm, latentAttention, indexer, sharedIndexer,
		hyperConnections, constant("hyper_connection.magnitude", float32(2)), constant("swiglu_clamp_exp", float32(10))}},
	{name: "jamba", traits: []trait{hybridHeads, wideState}},
	{name: "kimi-k3", layers: 4, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention, deltaAttention, situ}},
	{name: "kimi-linear", layers: 4, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention, deltaAttention}},
	{name: "laguna", layers: 4, traits: []trait{leadingDense, slidingWindow, sharedExpert, sharedWidth, sigmoidGate}},
	{name: "lfm2moe", layers: 3, traits: []trait{leadingDense, hybridHeads, convCache, sigmoidGate}},
	{name: "llada-moe"},
	{name: "llama"},
	{name: "llama4", layers: 4, traits: []trait{moeEveryTwo}},
	{name: "maple", traits: []trait{slidingLayers, constant("swiglu_clamp_exp", float32(7))}},
	{name: "mellum", traits: []trait{slidingWindow}},
	{name: "mimo2", traits: []trait{slidingLayers}},
	{name: "minicpm"},
	{name: "minimax-01", traits: []trait{halfLinear, constant("residual_scale", float32(3.5))}},
	{name: "minimax-m2", traits: []trait{sigmoidGate}},
	{name: "minimax-m3", layers: 3, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, indexer, blockIndexer}},
	{name: "mistral3"},
	{name: "mistral4", layers: 3, fused: true, traits: []trait{leadingDense, sharedExpert, sigmoidGate, weightsScale, latentAttention}},
	{name: "nemotron_h_moe", layers: 6, traits: []trait{layerNorm, sharedWidth, sharedExpert, wideState, nemotron}},
	{name: "olmoe"},
	{name: "phimoe"},
	{name: "qwen2moe", traits: []trait{sharedWidth}},
	{name: "qwen35moe", fused: true, traits: []trait{sharedWidth, halfLinear, stateSpace, sections}},
	{name: "qwen3moe"},
	{name: "qwen3next", fused: true, traits: []trait{sharedWidth, halfLinear, stateSpace}},
	{name: "qwen3vlmoe", traits: []trait{sections}},
	{name: "qwen4exp", fused: true, traits: []trait{sharedWidth, halfLinear, stateSpace, sections, indexer, qwen4}},
	{name: "refact"},
	{name: "rnd1"},
	{name: "smallthinker", traits: []trait{slidingWindow, sigmoidGate}},
	{name: "step35", traits: []trait{slidingLayers, sharedWidth, sigmoidGate}},

	{name: "arcee", dense: true},
	{name: "cohere2", dense: true, traits: []trait{layerNorm, slidingWindow, logitScale}},
	{name: "command-r", dense: true, traits: []trait{layerNorm, logitScale}},
	{name: "exaone4", dense: true, traits: []trait{slidingWindow}},
	{name: "falcon-h1", dense: true, traits: []trait{wideState}},
	{name: "gemma3", dense: true, traits: []trait{slidingWindow}},
	{name: "glm4", dense: true, traits: []trait{sections}},
	{name: "hunyuan-dense", dense: true},
	{name: "internlm2", dense: true},
	{name: "lfm2", dense: true, traits: []trait{hybridHeads, convCache}},
	{name: "mamba2", dense: true, traits: []trait{wideState}},
	{name: "nemotron", dense: true, traits: []trait{layerNorm}},
	{name: "olmo2", dense: true, traits: []trait{slidingWindow}},
	{name: "phi3", dense: true, optional: []optional{{"attn_qkv.weight", "attn_norm.weight"}}, traits: []trait{unnamed}},
	{name: "qwen2", dense: true},
	{name: "qwen2vl", dense: true, traits: []trait{sections}},
	{name: "qwen3", dense: true},
	{name: "qwen35", dense: true, traits: []trait{halfLinear, stateSpace, sections}},
	{name: "qwen3vl", dense: true, traits: []trait{sections}},
	{name: "seed_oss", dense: true},
	{name: "smollm3", dense: true},
	{name: "stablelm", dense: true, traits: []trait{layerNorm}},
	{name: "starcoder2", dense: true, traits: []trait{layerNorm}},

	{name: "bert", encoder: true, dense: true, traits: []trait{layerNorm, bothSides}},
	{name: "nomic-bert-moe", encoder: true, traits: []trait{layerNorm, bothSides, constant("moe_every_n_layers", uint32(2))}},
}

// clampedLayers clamps the activations of every layer but the first.
func clampedLayers(m metadata, s shape) {
	limits := func(limit float32) []float32 {
		v := make([]float32, s.layers)
		for i := 1; i < s.layers; i++ {
			v[i] = limit
		}
		return v
	}
	m["swiglu_clamp_exp"] = limits(4)
	m["swiglu_clamp_shexp"] = limits(5)
}

// deepseek4 has compressed caches of three kinds, by ratio.
func deepseek4(m metadata, s shape) {
	hyperConnections(m, s)
	indexer(m, s)
	sharedExpert(m, s)
	weightsScale(m, s)
	weightsNorm(m, s)
	m["expert_gating_func"] = uint32(4) // sqrt(softplus), the only one it has
	m["attention.key_length"] = uint32(s.headSize())
	m["attention.value_length"] = uint32(s.headSize())
	m["rope.dimension_count"] = uint32(s.headSize() / 2)
	m["attention.q_lora_rank"] = uint32(latentRank)
	m["attention.output_lora_rank"] = uint32(32)
	m["attention.output_group_count"] = uint32(8)
	m["attention.sliding_window"] = uint32(32)
	m["attention.compress_rope_freq_base"] = float32(160000)
	m["attention.compress_ratios"] = s.perLayer(func(layer int) uint32 { return []uint32{0, 0, 4, 128}[layer%4] })
	m["hyper_connection.sinkhorn_iterations"] = uint32(2)
	m["hash_layer_count"] = uint32(0)
	m["swiglu_clamp_exp"] = float32(10)
}

// slidingLatent gives the sliding-window layers the latent sizes of the rest.
func slidingLatent(m metadata, _ shape) {
	m["attention.kv_lora_rank_swa"] = uint32(latentRank)
	m["attention.key_length_swa"] = uint32(latentRank + latentRope)
	m["attention.value_length_swa"] = uint32(latentRank)
	m["attention.key_length_mla_swa"] = uint32(latentNope + latentRope)
	m["attention.value_length_mla_swa"] = uint32(latentNope)
	m["rope.freq_base_swa"] = float32(10000)
}

func gemma4(m metadata, s shape) {
	slidingLayers(m, s)
	m["embedding_length_per_layer_input"] = uint32(0)
	m["attention.key_length_swa"] = uint32(s.headSize())
	m["attention.value_length_swa"] = uint32(s.headSize())
}

// groupedExperts adds GroveMoE's second expert bank: one for every two.
func groupedExperts(m metadata, s shape) {
	m["expert_group_scale"] = float32(0.5)
	m["experts_per_group"] = uint32(2)
	m["expert_chunk_feed_forward_length"] = uint32(s.ff / 2)
}

// situ is Kimi K3's activation, latent experts and attention residuals.
func situ(m metadata, s shape) {
	m["attn_res.block_size"] = uint32(12)
	m["activation.situ_beta"] = float32(4)
	m["activation.situ_linear_beta"] = float32(25)
	m["expert_latent_length"] = uint32(s.ff)
}

// blockIndexer selects blocks of tokens; one indexer head per KV head, and
// the rotary dimensions must fit its key.
func blockIndexer(m metadata, s shape) {
	m["attention.indexer.head_count"] = uint32(s.kvHeads)
	m["attention.indexer.block_size"] = uint32(4)
	m["attention.indexer.local_blocks"] = uint32(1)
	m["rope.dimension_count"] = uint32(64)
}

// nemotron layers are of three kinds in turn: recurrent (no heads, no feed
// forward), attention (no feed forward), experts.
func nemotron(m metadata, s shape) {
	heads := s.perLayer(func(layer int) uint32 {
		if layer%3 == 1 {
			return uint32(s.heads)
		}
		return 0
	})
	heads[0] = 0
	m["attention.head_count"] = uint32(s.heads)
	m["attention.head_count_kv"] = heads
	m["feed_forward_length"] = s.perLayer(func(layer int) uint32 {
		if layer%3 == 2 {
			return uint32(s.ff)
		}
		return 0
	})
}

// qwen4 adds n-gram embeddings on layer 0 (they need a recurrent layer) and
// compressed attention everywhere.
func qwen4(m metadata, s shape) {
	const ngram, headsPerNgram = 3, 2
	const heads = (ngram - 1) * headsPerNgram
	offsets, sizes := make([]uint64, heads), make([]uint64, heads)
	for i := range offsets {
		offsets[i], sizes[i] = uint64(i*s.vocab), uint64(s.vocab)
	}
	m["hyper_connection.count"] = uint32(4)
	m["hyper_connection.low_rank"] = uint32(8)
	m["attention.indexer.key_length"] = uint32(s.headSize()) // as wide as the rotary dimensions
	m["attention.compress_ratios"] = s.perLayer(func(int) uint32 { return 4 })
	m["ple.layers"] = []uint32{0}
	m["ple.ngram_size"] = uint32(ngram)
	m["ple.heads_per_ngram"] = uint32(headsPerNgram)
	m["ple.conv_kernel"] = uint32(4)
	m["ple.eos_token_id"] = uint32(0)
	m["embedding_length_per_layer_input"] = uint32(s.embd / heads)
	m["ple.layer_multipliers"] = []uint64{1, 3, 5}
	m["ple.head_offsets"] = offsets
	m["ple.head_vocab_sizes"] = sizes
}

package gguf

import (
	"fmt"
	"math"
)

// The parts of the rules that several architectures share.
var (
	sliding  = "attention.sliding_window_pattern"
	hybrid   = []string{"attention.head_count_kv"}
	swaList  = []string{sliding}
	interval = cutRule{every: []period{{"full_attention_interval", 4}}, kinds: []string{"attention.recurrent_layers"}}
)

// slidingEvery is the rule of architectures in which llama.cpp takes every n-th layer
// for one of full attention, unless an array says which are.
func slidingEvery(n int) cutRule { return cutRule{every: []period{{sliding, n}}, kinds: swaList} }

// cutRules are the architectures that are exact when cut so: the tests of package
// ggml compare the logits of every cut, bit for bit, with those of the whole model.
//
// Left out on purpose, of those that were tried: afmoe (scales all rows as embeddings),
// gemma and gemma2 (the same), bloom, gpt2, starcoder, mpt, openelm and muse-glimmer
// (do something else with all rows that is for embeddings only), minicpm3 (a scale by the number of layers), gemma4,
// gemma3n and qwen4exp (a second embedding by token and layer), deepseek4, hy_v4 and
// step35 (the rows between their layers are not one vector), glm-dsa and dots3note
// (indexers shared between layers), kimi-k3 (residuals of earlier layers),
// nemotron_h_moe and smallthinker (kinds by the layer's number), kimi-linear and
// minimax-01 (llama.cpp aborts with several sequences), llada-moe and rnd1 (not one
// token after the other), baichuan (the number of layers decides its positions).
var cutRules = map[string]cutRule{
	"arcee":         {},
	"arctic":        {},
	"bailingmoe":    {},
	"bailingmoe2":   {},
	"bailingmoe3":   {kinds: hybrid},
	"cohere2":       slidingEvery(4),
	"command-r":     {},
	"cohere2moe":    slidingEvery(4),
	"dbrx":          {},
	"deepseek":      {},
	"deepseek2":     latent,
	"deepseek2-ocr": {},
	"deepseek32":    {},
	"dots1":         {},
	"ernie4_5-moe":  {every: []period{{"interleave_moe_layer_step", 1}}},
	"exaone4":       {every: []period{{sliding, 4}}, kinds: swaList, check: variantOf(64), counts: []int{64}},
	"exaone-moe":    slidingEvery(4),
	"falcon-h1":     {},
	"gemma3":        {every: []period{{sliding, 6}}, kinds: swaList, embeddingScale: rootOfWidth, check: variantOf(62), counts: []int{62}},
	"glm4":          {check: needsSections},
	"glm4moe":       {mend: textSections},
	"gpt-oss":       slidingEvery(2),
	"granite":       {},
	"granite_swa":   {kinds: swaList},
	"granitehybrid": {kinds: hybrid},
	"granitemoe":    {},
	"grok":          {},
	"grovemoe":      {},
	"hunyuan-dense": {},
	"hunyuan-moe":   {},
	"hy_v3":         {},
	"internlm2":     {},
	"jamba":         {kinds: hybrid},
	"laguna":        slidingEvery(4),
	"lfm2":          {kinds: hybrid},
	"lfm2moe":       {kinds: hybrid},
	"llama":         {},
	"llama4":        {every: []period{{sliding, 4}, {"interleave_moe_layer_step", 1}, {"no_rope_layer_step", 4}}, kinds: swaList},
	"mamba2":        {},
	"maple":         {kinds: swaList},
	"mellum":        slidingEvery(4),
	"mimo2":         {kinds: swaList},
	"minicpm":       {mend: minicpmResidual},
	"minimax-m2":    {},
	"minimax-m3":    {pastLead: true},
	"mistral3":      {},
	"mistral4":      latent,
	"nemotron":      {},
	"olmo2":         slidingEvery(4),
	"olmoe":         {},
	"phi3":          {},
	"phimoe":        {},
	"qwen2":         {},
	"qwen2moe":      {},
	"qwen2vl":       {},
	"qwen3":         {},
	"qwen35":        interval,
	"qwen35moe":     interval,
	"qwen3moe":      {},
	"qwen3next":     interval,
	"qwen3vl":       {},
	"qwen3vlmoe":    {},
	"refact":        {},
	"seed_oss":      {},
	"smollm3":       {every: []period{{"no_rope_layer_step", 4}}},
	"stablelm":      {},
	"starcoder2":    {},
}

func rootOfWidth(width int) float32 { return float32(math.Sqrt(float64(width))) }

// variantOf refuses the models of a number of layers, by which llama.cpp knows a
// variant, whose attention differs.
func variantOf(layers int) func(*Model, int) string {
	return func(_ *Model, main int) string {
		if main != layers {
			return ""
		}
		return fmt.Sprintf("llama.cpp knows the variant of %d layers, whose attention differs, by their number", layers)
	}
}

// needsSections refuses a model whose rotary positions have no sections: llama.cpp
// aborts when rows are given to it.
func needsSections(m *Model, _ int) string {
	if m.hasSections() {
		return ""
	}
	return "llama.cpp takes rows only for those with sections of rotary dimensions"
}

// textSections gives such a model sections. With text, whose positions are the same in
// all of them, they change nothing but that llama.cpp takes rows.
func textSections(m *Model, _ int, meta *Metadata) {
	if !m.hasSections() {
		meta.set(m.arch+".rope.dimension_sections", NewArray[int32](1, 1, 0, 0))
	}
}

func (m *Model) hasSections() bool {
	list, err := m.Meta().Ints(m.arch + ".rope.dimension_sections")
	return err == nil && len(list) >= 2 && list[0] > 0 && list[1] > 0
}

// latent is the rule of the models of DeepSeek V2 and V3 and of those like them.
// llama.cpp takes one of 26 or 27 layers (48 with a certain vocabulary) for a lite one,
// with another attention, and, without the key, derives how experts are gated from the
// number of layers and tokens.
var latent = cutRule{
	counts: []int{26, 27},
	check: func(m *Model, main int) string {
		if main == 26 || main == 27 || main >= 48 && m.vocab() == 128256 {
			return "llama.cpp knows the lite models, which have another attention, by their number of layers"
		}
		return ""
	},
	mend: func(m *Model, main int, meta *Metadata) {
		key := m.arch + ".expert_gating_func"
		if n, err := m.Meta().Int(key); err == nil && n != 0 {
			return
		}
		const softmax, sigmoid = 1, 2
		gating := uint32(softmax)
		if (main == 47 || main == 48) && m.vocab() == 154880 {
			gating = sigmoid
		}
		meta.set(key, NewValue(gating))
	},
}

// minicpmResidual is what the residuals are scaled by in older files, which do not say.
func minicpmResidual(m *Model, main int, meta *Metadata) {
	if key := m.arch + ".residual_scale"; !meta.has(key) {
		meta.set(key, NewValue(float32(1.4)/float32(math.Sqrt(float64(main)))))
	}
}

// vocab returns the number of tokens.
func (m *Model) vocab() int {
	t, _ := m.Tensor("token_embd.weight")
	return int(t.Shape[1])
}

package plan

import (
	"fmt"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

// small starts the header of a model of some layers, 256 wide, 1000 tokens.
func small(t *testing.T, arch string, layers uint32, fields map[string]uint32) *header {
	h := &header{t: t}
	h.text("general.architecture", arch)
	h.number(arch+".block_count", layers)
	h.number(arch+".embedding_length", 256)
	for key, v := range fields {
		h.number(arch+"."+key, v)
	}
	h.tensor("token_embd.weight", f16, 256, 1000)
	return h
}

// block adds a layer of an F16 matrix 256 × 256 and of further tensors.
func (h *header) block(l int, names ...string) {
	h.tensor(fmt.Sprintf("blk.%d.attn_q.weight", l), f16, 256, 256)
	for _, n := range names {
		h.tensor(fmt.Sprintf("blk.%d.%s", l, n), f32, 256)
	}
}

// TestCache compares what layers remember with the formulas of llama.cpp, worked
// out by hand.
func TestCache(t *testing.T) {
	heads := map[string]uint32{"attention.head_count": 8, "attention.head_count_kv": 2}
	with := func(more map[string]uint32) map[string]uint32 {
		all := map[string]uint32{}
		for _, m := range []map[string]uint32{heads, more} {
			for k, v := range m {
				all[k] = v
			}
		}
		return all
	}
	type want struct {
		kv    int64
		slide int
		state int64
	}
	tests := []struct {
		name   string
		make   func() *header
		layers []want
	}{
		{"grouped queries, sizes from the width", func() *header { return small(t, "llama", 1, heads) }, []want{{2 * (32 + 32) * 2, 0, 0}}},
		{"key and value sizes are given", func() *header {
			return small(t, "qwen3", 1, with(map[string]uint32{"attention.key_length": 128, "attention.value_length": 64}))
		}, []want{{2 * (128 + 64) * 2, 0, 0}}},
		{"latent attention keeps keys only", func() *header {
			return small(t, "deepseek2", 1, map[string]uint32{"attention.head_count": 8, "attention.head_count_kv": 1,
				"attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128})
		}, []want{{576 * 2, 0, 0}}},
		{"gpt-oss: every other layer slides", func() *header {
			return small(t, "gpt-oss", 2, with(map[string]uint32{"attention.sliding_window": 128}))
		}, []want{{256, 128, 0}, {256, 0, 0}}},
		{"a pattern per layer", func() *header {
			h := small(t, "gemma3", 3, with(map[string]uint32{"attention.sliding_window": 512}))
			h.list("gemma3.attention.sliding_window_pattern", gguf.Bool, 0, 1, 1)
			return h
		}, []want{{256, 0, 0}, {256, 512, 0}, {256, 512, 0}}},
		{"a period in the header", func() *header {
			return small(t, "gemma3", 3, with(map[string]uint32{"attention.sliding_window": 512, "attention.sliding_window_pattern": 3}))
		}, []want{{256, 512, 0}, {256, 512, 0}, {256, 0, 0}}},
		{"a window without a pattern: all is kept", func() *header {
			return small(t, "unheard", 1, with(map[string]uint32{"attention.sliding_window": 512}))
		}, []want{{256, 0, 0}}},
		{"heads per layer", func() *header {
			h := small(t, "openelm", 2, map[string]uint32{"attention.key_length": 64, "attention.value_length": 64})
			h.list("openelm.attention.head_count", gguf.Uint32, 8, 16)
			h.list("openelm.attention.head_count_kv", gguf.Uint32, 2, 4)
			return h
		}, []want{{2 * 128 * 2, 0, 0}, {4 * 128 * 2, 0, 0}}},
		{"a delta net and an attention layer", func() *header {
			h := small(t, "qwen35moe", 2, with(map[string]uint32{"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 64, "ssm.group_count": 4}))
			h.block(0, "ssm_conv1d.weight")
			h.block(1, "attn_k.weight")
			return h
		}, []want{{0, 0, 4 * (3*(512+2*4*64) + 64*512)}, {256, 0, 0}}},
		{"attention beside a recurrence in one layer", func() *header {
			h := small(t, "falcon-h1", 1, with(map[string]uint32{"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 64, "ssm.group_count": 1}))
			h.block(0, "ssm_in.weight", "attn_k.weight")
			return h
		}, []want{{256, 0, 4 * (3*(512+2*64) + 64*512)}}},
		{"short convolutions", func() *header {
			h := small(t, "lfm2", 1, with(map[string]uint32{"shortconv.l_cache": 3}))
			h.block(0, "shortconv.conv.weight")
			return h
		}, []want{{0, 0, 4 * 256 * 2}}},
		{"rwkv", func() *header {
			h := small(t, "rwkv7", 1, map[string]uint32{"wkv.head_size": 64, "token_shift_count": 2})
			h.block(0, "time_mix_w0.weight")
			return h
		}, []want{{0, 0, 4 * 256 * (64 + 2)}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m, err := Describe(tt.make().write())
			if err != nil {
				t.Fatal(err)
			}
			for i, w := range tt.layers {
				if l := m.Layers[i]; (want{l.KV, l.Slide, l.State}) != w {
					t.Errorf("layer %d: %d bytes of a token, window %d, %d bytes of a sequence; want %+v", i, l.KV, l.Slide, l.State, w)
				}
			}
		})
	}
}

func TestDescribe(t *testing.T) {
	h := small(t, "glm4moe", 3, map[string]uint32{"expert_count": 4, "expert_used_count": 2, "nextn_predict_layers": 1, "attention.head_count": 8})
	h.tensor("output_norm.weight", f32, 256)
	h.block(0)
	h.block(1)
	h.tensor("blk.1.ffn_gate_up_exps.weight", f16, 256, 128, 4)
	h.tensor("blk.1.ffn_gate_inp.weight", f32, 256, 4)
	h.block(2)
	m, err := Describe(h.write())
	if err != nil {
		t.Fatal(err)
	}
	const matrix, table = 256 * 256 * 2, 256 * 1000 * 2
	all, experts := m.Bytes()
	for _, c := range []struct {
		what      string
		got, want int64
	}{
		{"layers", int64(len(m.Layers)), 2}, {"extra", int64(m.Extra), 1}, {"unused", m.Unused, matrix},
		{"embedding", m.Embedding, table}, {"head", m.Head, table + 1024}, {"dense 0", m.Layers[0].Dense, matrix},
		{"dense 1", m.Layers[1].Dense, matrix + 4096}, {"expert", m.Layers[1].Expert, 256 * 128 * 2},
		{"used", int64(m.Layers[1].Used), 2}, {"experts", experts, 4 * 256 * 128 * 2},
		{"all", all, table + 1024 + 2*matrix + 4096 + experts},
		{"active", m.Active(), table + 1024 + 2*matrix + 4096 + experts/2},
	} {
		if c.got != c.want {
			t.Errorf("%s: %d, want %d", c.what, c.got, c.want)
		}
	}
	if !m.Tied || !m.Layers[1].Fused || m.Layers[0].Expert != 0 {
		t.Errorf("tied %v, fused %v, experts of the dense layer %d", m.Tied, m.Layers[1].Fused, m.Layers[0].Expert)
	}
	if r := Rule(1, true); !strings.Contains(r, "(up|down|gate|gate_up)") {
		t.Errorf("the rule of a fused layer is %q", r)
	}
}

// TestDescribeRefuses: numbers that would overflow sums, and what is no model.
func TestDescribeRefuses(t *testing.T) {
	heads := func(n uint32) map[string]uint32 { return map[string]uint32{"attention.head_count": n} }
	tests := []struct {
		name string
		make func() *header
		want string
	}{
		{"more heads than any model", func() *header { return small(t, "llama", 1, heads(1<<31)) }, "want 0 to"},
		{"a huge cache", func() *header {
			return small(t, "llama", 1, map[string]uint32{"attention.head_count": 1 << 16, "attention.key_length": 1 << 16})
		}, "header is wrong"},
		{"a huge state", func() *header {
			h := small(t, "mamba", 1, map[string]uint32{"ssm.inner_size": 1 << 20, "ssm.state_size": 1 << 20})
			h.block(0, "ssm_in.weight")
			return h
		}, "header is wrong"},
		{"more layers that do not compute than there are", func() *header {
			return small(t, "llama", 2, map[string]uint32{"attention.head_count": 8, "nextn_predict_layers": 3})
		}, "no layers"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if m, err := Describe(tt.make().write()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%+v, %v; want an error with %q", m, err, tt.want)
			}
		})
	}
}

func TestParseRule(t *testing.T) {
	pattern, device, err := ParseRule(Rule(7, false))
	if err != nil || pattern != `blk\.7\.ffn_(up|down|gate)_(ch|)exps` || device != "CPU" {
		t.Errorf("%q, %q, %v", pattern, device, err)
	}
	for _, bad := range []string{"", "=", "a", "a=", "=CPU", "a(=CPU", strings.Repeat("a", 256) + "=CPU"} {
		if _, _, err := ParseRule(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestMakeRefuses(t *testing.T) {
	good := func() Query {
		return Query{Model: dense(4), Nodes: same(2, "a", ram(16, 20e9)), Context: 1024, Sequences: 2}
	}
	for _, tt := range []struct {
		change func(*Query)
		want   string
	}{
		{func(q *Query) { q.Model = Model{} }, "not described"},
		{func(q *Query) { q.Nodes = nil }, "no node"},
		{func(q *Query) { q.Nodes = same(65, "a", ram(1, 1)) }, "at most 64"},
		{func(q *Query) { q.Nodes[1].Name = "a0" }, "two nodes are named a0"},
		{func(q *Query) { q.Nodes[1].Name = "" }, "no name"},
		{func(q *Query) { q.Nodes[1].RAM = -1 }, "negative"},
		{func(q *Query) { q.Sequences = 0 }, "0 sequences"},
		{func(q *Query) { q.Context = 1 }, "context of 1 tokens"},
		{func(q *Query) { q.Context = 1 << 25 }, "context of"},
		{func(q *Query) { q.Cuts = []int{0} }, "layer 0"},
		{func(q *Query) { q.Cuts = []int{2, 1} }, "layer 1"},
		{func(q *Query) { q.Cuts = []int{4} }, "layer 4"},
	} {
		q := good()
		tt.change(&q)
		if _, err := Make(q); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v, want an error with %q", err, tt.want)
		}
	}
}

// TestPlanOfMany is about time: as many nodes and layers as a query may have.
func TestPlanOfMany(t *testing.T) {
	nodes := same(MaxNodes-1, "box", ram(3, 20e9))
	q := Query{Model: describe122B(t), Nodes: append(nodes, same(1, "pc", ram(16, 40e9))...), Cuts: every(1, 49),
		Context: 16384, Sequences: 64}
	p, err := Make(q)
	if err != nil {
		t.Fatal(err)
	}
	if c, ok := p.Best(); !ok {
		t.Errorf("nothing fits: %+v", p.Candidates)
	} else if c.Kind != Ring {
		t.Errorf("the best is a %s", c.Kind)
	}
}

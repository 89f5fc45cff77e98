package plan

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"kvasird/ggml/gguf"
)

// header writes a GGUF file whose data are a hole, so that models of any size can
// be described without weights.
type header struct {
	t       *testing.T
	keys    []byte
	nKeys   uint64
	index   []byte
	tensors uint64
	end     uint64
}

const headerAlignment = 32

func str(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

func (h *header) text(key, value string) {
	h.nKeys++
	h.keys = binary.LittleEndian.AppendUint32(str(h.keys, key), uint32(gguf.String))
	h.keys = str(h.keys, value)
}

func (h *header) number(key string, value uint32) {
	h.nKeys++
	h.keys = binary.LittleEndian.AppendUint32(str(h.keys, key), uint32(gguf.Uint32))
	h.keys = binary.LittleEndian.AppendUint32(h.keys, value)
}

// list writes an array of u32 or of bools (as 0 and 1).
func (h *header) list(key string, typ gguf.ValueType, values ...uint32) {
	h.nKeys++
	h.keys = binary.LittleEndian.AppendUint32(str(h.keys, key), uint32(gguf.Array))
	h.keys = binary.LittleEndian.AppendUint32(h.keys, uint32(typ))
	h.keys = binary.LittleEndian.AppendUint64(h.keys, uint64(len(values)))
	for _, v := range values {
		if typ == gguf.Bool {
			h.keys = append(h.keys, byte(v))
		} else {
			h.keys = binary.LittleEndian.AppendUint32(h.keys, v)
		}
	}
}

// dtype is a ggml type: its number in files, and how many bytes a block of values
// takes.
type dtype struct {
	number        uint32
	values, bytes int64
}

var (
	f32 = dtype{0, 1, 4}
	f16 = dtype{1, 1, 2}
	q80 = dtype{8, 32, 34}
	q4K = dtype{12, 256, 144}
	q6K = dtype{14, 256, 210}
)

func (h *header) tensor(name string, typ dtype, dims ...int64) {
	h.tensors++
	h.index = binary.LittleEndian.AppendUint32(str(h.index, name), uint32(len(dims)))
	n := int64(1)
	for _, d := range dims {
		h.index = binary.LittleEndian.AppendUint64(h.index, uint64(d))
		n *= d
	}
	h.index = binary.LittleEndian.AppendUint32(h.index, typ.number)
	h.index = binary.LittleEndian.AppendUint64(h.index, h.end)
	h.end += padded(uint64(n / typ.values * typ.bytes))
}

func padded(n uint64) uint64 { return (n + headerAlignment - 1) / headerAlignment * headerAlignment }

// write makes the file and opens it.
func (h *header) write() *gguf.Model {
	h.t.Helper()
	b := binary.LittleEndian.AppendUint32([]byte("GGUF"), 3)
	b = binary.LittleEndian.AppendUint64(b, h.tensors)
	b = binary.LittleEndian.AppendUint64(b, h.nKeys)
	b = append(append(b, h.keys...), h.index...)
	path := filepath.Join(h.t.TempDir(), "model.gguf")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		h.t.Fatal(err)
	}
	if err := os.Truncate(path, int64(padded(uint64(len(b)))+h.end)); err != nil {
		h.t.Fatal(err)
	}
	m, err := gguf.OpenModel(path)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { m.Close() })
	return m
}

// qwen122B is the header of Qwen3.5-122B-A10B Q4_K_M: three of four layers are
// recurrent (gated delta net), every one has 256 experts of 5.3 MB.
func qwen122B(t *testing.T) *gguf.Model {
	const (
		layers, experts, width, ff = 49, 256, 3072, 1024
		heads, kvHeads, head       = 32, 2, 256
		state, groups, rank        = 128, 16, 64
	)
	h := &header{t: t}
	h.text("general.architecture", "qwen35moe")
	for key, v := range map[string]uint32{
		"block_count": layers, "expert_count": experts, "expert_used_count": 8, "embedding_length": width,
		"expert_feed_forward_length": ff, "expert_shared_feed_forward_length": ff,
		"attention.head_count": heads, "attention.head_count_kv": kvHeads,
		"attention.key_length": head, "attention.value_length": head, "full_attention_interval": 4,
		"ssm.conv_kernel": 4, "ssm.inner_size": rank * state, "ssm.state_size": state,
		"ssm.time_step_rank": rank, "ssm.group_count": groups,
	} {
		h.number("qwen35moe."+key, v)
	}
	h.tensor("token_embd.weight", q80, width, 248320)
	h.tensor("output.weight", q6K, width, 248320)
	h.tensor("output_norm.weight", f32, width)
	for l := range int64(layers) {
		add := func(name string, typ dtype, dims ...int64) {
			h.tensor(fmt.Sprintf("blk.%d.%s", l, name), typ, dims...)
		}
		add("attn_norm.weight", f32, width)
		add("post_attention_norm.weight", f32, width)
		if (l+1)%4 == 0 {
			add("attn_q.weight", f16, width, 2*heads*head)
			add("attn_k.weight", f16, width, kvHeads*head)
			add("attn_v.weight", f16, width, kvHeads*head)
			add("attn_output.weight", f16, heads*head, width)
		} else {
			add("attn_qkv.weight", f16, width, 2*groups*state+rank*state)
			add("attn_gate.weight", f16, width, rank*state)
			add("ssm_conv1d.weight", f32, 4, 2*groups*state+rank*state)
			add("ssm_out.weight", f16, rank*state, width)
		}
		add("ffn_gate_inp.weight", f32, width, experts)
		for _, which := range []string{"gate", "up"} {
			add("ffn_"+which+"_exps.weight", q4K, width, ff, experts)
			add("ffn_"+which+"_shexp.weight", f16, width, ff)
		}
		add("ffn_down_exps.weight", q4K, ff, width, experts)
		add("ffn_down_shexp.weight", f16, ff, width)
	}
	return h.write()
}

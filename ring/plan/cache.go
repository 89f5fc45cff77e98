package plan

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvasird/ggml/gguf"
)

// cacheType is the bytes of a number in the KV cache (f16), stateType in a
// recurrent state (f32).
const (
	cacheType = 2
	stateType = 4
)

// Bounds of what metadata says and what it amounts to per layer, so that sums over
// a model and its context do not overflow.
const (
	maxField = 1 << 20
	maxKV    = 1 << 22
	maxState = 1 << 36
)

// slidePeriods are the architectures whose metadata may leave out which layers
// slide: every n-th layer does not; the first of a period when it is negative.
var slidePeriods = map[string]int{
	"cohere2": 4, "cohere2moe": 4, "exaone4": 4, "exaone-moe": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2,
	"llama4": 4, "olmo2": 4, "plamo3": 8, "smallthinker": -4, "laguna": -4,
}

// recurrentParts begin the names of a layer's tensors when it keeps a state.
var recurrentParts = []string{"ssm_", "shortconv.", "time_mix_"}

// reader reads numbers of one architecture and keeps the first error.
type reader struct {
	m      *gguf.Model
	prefix string
	err    error
}

// int reads a number, or missing when the key is not there.
func (r *reader) int(key string, missing int) int { return r.at(key, 0, missing) }

// at reads a number that may be given per layer.
func (r *reader) at(key string, layer, missing int) int {
	list, err := r.m.Meta().Ints(r.prefix + key)
	var n int64
	switch {
	case err == nil && layer < len(list):
		n = list[layer]
	case err == nil:
		return missing
	default:
		n, err = r.m.Meta().Int(r.prefix + key)
	}
	if errors.Is(err, gguf.ErrNoKey) {
		return missing
	}
	if err == nil && (n < 0 || n > maxField) {
		err = fmt.Errorf("%s%s is %d: want 0 to %d", r.prefix, key, n, maxField)
	}
	if err != nil {
		r.fail(err)
		return missing
	}
	return int(n)
}

func (r *reader) has(layer int, part string) bool {
	_, ok := r.m.Tensor(fmt.Sprintf("blk.%d.%s", layer, part))
	return ok
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// isRecurrent says whether a tensor of a layer shows that it keeps a state.
func isRecurrent(name string) bool {
	return slices.ContainsFunc(recurrentParts, func(part string) bool { return strings.HasPrefix(name, part) })
}

// cache fills in what a layer remembers.
func (r *reader) cache(i, layers int, l *Layer) {
	if l.recurrent {
		l.State = int64(min(r.state(i), 2*maxState))
		if !r.has(i, "attn_k.weight") {
			return
		}
	}
	heads := r.at("attention.head_count", i, 0)
	kv := r.at("attention.head_count_kv", i, heads)
	each := 0
	if heads > 0 {
		each = r.int("embedding_length", 0) / heads
	}
	key, value := r.int("attention.key_length", each), r.int("attention.value_length", each)
	l.Slide = r.slide(i, layers)
	if l.Slide > 0 {
		key, value = r.int("attention.key_length_swa", key), r.int("attention.value_length_swa", value)
	}
	if r.int("attention.key_length_mla", 0) > 0 {
		value = 0 // multi-head latent attention: the values are a view of the keys
	}
	l.KV = int64(kv) * int64(key+value) * cacheType
}

// check refuses sizes that no model has.
func (l *Layer) check(i int) error {
	if l.KV > maxKV || l.State > maxState {
		return fmt.Errorf("layer %d would keep %d bytes of a token and %d of a sequence: the header is wrong", i, l.KV, l.State)
	}
	return nil
}

// slide is the sliding window of a layer, 0 where it has none.
func (r *reader) slide(i, layers int) int {
	window := r.int("attention.sliding_window", 0)
	if window == 0 {
		return 0
	}
	const key = "attention.sliding_window_pattern"
	v, given := r.m.Meta().Get(r.prefix + key)
	if list, ok := v.Bools(); given && ok && len(list) >= layers {
		if list[i] {
			return window
		}
		return 0
	}
	period := r.at(key, i, slidePeriods[r.m.Arch()])
	first := slidePeriods[r.m.Arch()] < 0
	if period < 0 {
		period = -period
	}
	switch {
	case period <= 1: // not known which: all is kept
		return 0
	case first && i%period == 0, !first && i%period == period-1:
		return 0
	}
	return window
}

// state is the bytes that a recurrent layer keeps of a sequence, as llama.cpp
// sizes it; a float, which does not overflow.
func (r *reader) state(i int) float64 {
	field := func(key string, missing int) float64 { return float64(r.int(key, missing)) }
	width, heads := field("embedding_length", 0), float64(r.at("attention.head_count", i, 0))
	conv := max(field("ssm.conv_kernel", 0)-1, 0)
	inner, state := field("ssm.inner_size", 0), field("ssm.state_size", 0)
	n := conv*(inner+2*field("ssm.group_count", 0)*state) + state*inner
	if head := field("wkv.head_size", 0); head > 0 {
		n = width * (field("token_shift_count", 2) + head)
	} else if kernel := field("shortconv.l_cache", 0); kernel > 0 {
		n = width * (kernel - 1)
	} else if head := field("kda.head_dim", 0); head > 0 {
		n = heads * head * (3*conv + head)
	}
	return n * stateType
}

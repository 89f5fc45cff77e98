//go:build cgo

package ggml

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// genuineFile builds GGUF files byte by byte, without the writers of package gguf.
type genuineFile struct {
	version   uint32
	alignment int // 0: the key is absent
	keys      []string
	tensors   []ggufDumpTensor
}

func le(x any) string {
	b, err := binary.Append(nil, binary.LittleEndian, x)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func ggufString(s string) string { return le(uint64(len(s))) + s }

// key adds an entry; body is the value as it is stored, after its type.
func (f *genuineFile) key(name string, typ gguf.ValueType, body string) {
	f.keys = append(f.keys, ggufString(name)+le(uint32(typ))+body)
}

func (f *genuineFile) array(name string, elem gguf.ValueType, count int, body string) {
	f.key(name, gguf.Array, le(uint32(elem))+le(uint64(count))+body)
}

func (f *genuineFile) tensor(name string, dtype tensor.DType, ne ...int64) {
	t := ggufDumpTensor{name: name, dtype: uint32(dtype), ne: [4]int64{1, 1, 1, 1}}
	copy(t.ne[:], ne)
	f.tensors = append(f.tensors, t)
}

func (f *genuineFile) bytes() []byte {
	alignment := 32
	keys := f.keys
	if f.alignment > 0 {
		alignment = f.alignment
		keys = append(keys, ggufString("general.alignment")+le(uint32(gguf.Uint32))+le(uint32(alignment)))
	}
	s := "GGUF" + le(f.version) + le(uint64(len(f.tensors))) + le(uint64(len(keys))) + strings.Join(keys, "")
	align := func(n int) int { return (n + alignment - 1) / alignment * alignment }
	offset := 0
	for _, t := range f.tensors {
		s += ggufString(t.name) + le(uint32(4)) + le(t.ne[:]) + le(t.dtype) + le(uint64(offset))
		block := tensor.DType(t.dtype)
		elements := t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]
		offset = align(offset + int(elements/block.BlockSize()*block.BlockBytes()))
	}
	if len(f.tensors) > 0 {
		s += strings.Repeat("\x00", align(len(s))-len(s)+offset)
	}
	return []byte(s)
}

// everyValue adds every value type, as scalar and as array of several lengths.
func (f *genuineFile) everyValue() {
	for _, x := range []struct {
		typ    gguf.ValueType
		values []string
	}{
		{gguf.Uint8, []string{le(uint8(0)), le(uint8(255))}},
		{gguf.Int8, []string{le(int8(-128)), le(int8(127))}},
		{gguf.Uint16, []string{le(uint16(0)), le(uint16(65535))}},
		{gguf.Int16, []string{le(int16(-32768)), le(int16(32767))}},
		{gguf.Uint32, []string{le(uint32(7)), le(uint32(math.MaxUint32))}},
		{gguf.Int32, []string{le(int32(math.MinInt32)), le(int32(math.MaxInt32))}},
		{gguf.Float32, []string{le(float32(-1.25)), le(float32(math.Inf(1))), le(float32(1e-40))}},
		{gguf.Bool, []string{"\x00", "\x01", "\x02", "\xff"}},
		{gguf.String, []string{ggufString(""), ggufString("\xfe\xff not utf-8"), ggufString(strings.Repeat("long ", 5000))}},
		{gguf.Uint64, []string{le(uint64(0)), le(uint64(math.MaxUint64))}},
		{gguf.Int64, []string{le(int64(math.MinInt64)), le(int64(math.MaxInt64))}},
		{gguf.Float64, []string{le(math.Pi), le(math.Inf(-1)), le(math.SmallestNonzeroFloat64)}},
	} {
		for i, v := range x.values {
			f.key(fmt.Sprintf("scalar.%v.%d", x.typ, i), x.typ, v)
			f.array(fmt.Sprintf("array.%v.%d", x.typ, i), x.typ, i+1, strings.Join(x.values[:i+1], ""))
		}
		f.array(fmt.Sprintf("array.%v.none", x.typ), x.typ, 0, "")
	}
}

// differentialFiles returns a varied set of acceptable files.
func differentialFiles() map[string][]byte {
	files := make(map[string][]byte)
	for _, version := range []uint32{2, 3} {
		for _, alignment := range []int{0, 1, 8, 32, 64, 4096} {
			f := &genuineFile{version: version, alignment: alignment}
			f.everyValue()
			f.tensor("scalar", tensor.F32)
			f.tensor("empty", tensor.F32, 4, 0, 3)
			f.tensor("", tensor.I8, 5)
			f.tensor(strings.Repeat("n", 63), tensor.F16, 3, 5, 7, 2)
			for _, d := range tensor.DTypes() {
				f.tensor("t."+d.String(), d, 512, 3)
			}
			files[fmt.Sprintf("everything, version %d, alignment %d", version, alignment)] = f.bytes()
		}
		files[fmt.Sprintf("nothing, version %d", version)] = (&genuineFile{version: version}).bytes()
	}
	for i := range 3 { // a split set whose first part has metadata only
		f := &genuineFile{version: 3}
		f.key("split.no", gguf.Uint16, le(uint16(i)))
		f.key("split.count", gguf.Uint16, le(uint16(3)))
		f.key("split.tensors.count", gguf.Int32, le(int32(2)))
		f.key("general.architecture", gguf.String, ggufString("llama"))
		if i > 0 {
			f.tensor(fmt.Sprintf("blk.%d.ffn_up.weight", i), tensor.Q4_K, 256, 2)
		}
		files[fmt.Sprintf("split part %d", i)] = f.bytes()
	}
	return files
}

// compareParsers checks that package gguf and ggml say the same of a file that
// package gguf accepts.
func compareParsers(t *testing.T, name string, h *gguf.Header, path string) {
	t.Helper()
	d, err := dumpGGUF(path)
	if err != nil {
		t.Errorf("%s: only package gguf accepts the file", name)
		return
	}
	if h.Version != d.version || uint64(h.Alignment) != d.alignment || uint64(h.DataOffset) != d.dataOffset ||
		h.Meta.Len() != len(d.keys) || len(h.Tensors) != len(d.tensors) {
		t.Errorf("%s: version %d, alignment %d, data at %d, %d keys, %d tensors; ggml: %d, %d, %d, %d, %d", name,
			h.Version, h.Alignment, h.DataOffset, h.Meta.Len(), len(h.Tensors), d.version, d.alignment, d.dataOffset, len(d.keys), len(d.tensors))
		return
	}
	for i, want := range d.keys {
		kv := h.Meta.At(i)
		if kv.Key != want.key || uint32(kv.Value.Type()) != want.typ || !sameValue(kv.Value, want) {
			t.Errorf("%s: entry %d is %q %v %v; ggml: %q %d %x %q", name, i, kv.Key, kv.Value.Type(), kv.Value, want.key, want.typ, want.raw, want.strs)
		}
	}
	for i, want := range d.tensors {
		x := h.Tensors[i]
		got := ggufDumpTensor{x.Name, uint32(x.DType), x.Shape, uint64(x.Offset - h.DataOffset), uint64(x.Bytes)}
		if got != want {
			t.Errorf("%s: tensor %d is %+v; ggml: %+v", name, i, got, want)
		}
	}
}

func sameValue(v gguf.Value, want ggufDumpKey) bool {
	if uint32(v.Elem()) != want.elem && want.typ == uint32(gguf.Array) {
		return false
	}
	if v.Elem() == gguf.String {
		if v.Len() != len(want.strs) {
			return false
		}
		for i, s := range want.strs {
			got, _ := v.Index(i).Text()
			if cut, _, _ := strings.Cut(got, "\x00"); cut != s {
				return false
			}
		}
		return true
	}
	size := ggufTypeSize(want.elem)
	if v.Len()*size != len(want.raw) {
		return false
	}
	for i := range v.Len() {
		if v.Index(i).String() != numberString(v.Elem(), want.raw[i*size:]) {
			return false
		}
	}
	return true
}

// numberString writes a number as ggml stores it.
func numberString(typ gguf.ValueType, raw []byte) string {
	u64 := func() uint64 { return binary.NativeEndian.Uint64(raw) }
	u32 := func() uint32 { return binary.NativeEndian.Uint32(raw) }
	u16 := func() uint16 { return binary.NativeEndian.Uint16(raw) }
	switch typ {
	case gguf.Uint8:
		return fmt.Sprint(raw[0])
	case gguf.Int8:
		return fmt.Sprint(int8(raw[0]))
	case gguf.Bool:
		return fmt.Sprint(raw[0] == 1)
	case gguf.Uint16:
		return fmt.Sprint(u16())
	case gguf.Int16:
		return fmt.Sprint(int16(u16()))
	case gguf.Uint32:
		return fmt.Sprint(u32())
	case gguf.Int32:
		return fmt.Sprint(int32(u32()))
	case gguf.Uint64:
		return fmt.Sprint(u64())
	case gguf.Int64:
		return fmt.Sprint(int64(u64()))
	case gguf.Float32:
		return gguf.NewValue(math.Float32frombits(u32())).String()
	}
	return gguf.NewValue(math.Float64frombits(u64())).String()
}

// parseFile parses bytes with package gguf after writing them for ggml.
func parseFile(t *testing.T, path string, data []byte) (*gguf.Header, error) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return gguf.Parse(strings.NewReader(string(data)), int64(len(data)))
}

func TestGGUFParsersAgree(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file.gguf")
	for name, data := range differentialFiles() {
		h, err := parseFile(t, path, data)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		compareParsers(t, name, h, path)
	}
	m, err := gguf.OpenModel("tiny/kvasir-tiny-q4_k_m.gguf")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	compareParsers(t, "the shipped model", m.Parts()[0].Header, m.Parts()[0].Path)
}

// What package gguf accepts, ggml must accept too and read alike: files with a few
// bytes changed find out where the checks of one go further.
func TestGGUFParsersAgreeOnDamage(t *testing.T) {
	const rounds = 1000
	path := filepath.Join(t.TempDir(), "file.gguf")
	rng := rand.New(rand.NewPCG(1, 2))
	f := &genuineFile{version: 3, alignment: 8}
	f.key("n", gguf.Uint32, le(uint32(1)))
	f.key("b", gguf.Bool, "\x01")
	f.array("s", gguf.String, 2, ggufString("a")+ggufString("bc"))
	f.array("x", gguf.Int16, 3, le([]int16{1, 2, 3}))
	f.tensor("a", tensor.Q8_0, 32, 2)
	f.tensor("b", tensor.F32, 3)
	good := f.bytes()
	accepted := 0
	for round := range rounds {
		data := append([]byte(nil), good...)
		for range 1 + rng.IntN(2) {
			data[rng.IntN(len(data))] = byte(rng.IntN(256) >> rng.IntN(8))
		}
		h, err := parseFile(t, path, data)
		if err != nil {
			continue
		}
		accepted++
		compareParsers(t, fmt.Sprintf("round %d", round), h, path)
	}
	if accepted < rounds/10 || accepted > rounds*9/10 {
		t.Errorf("%d of %d damaged files were accepted: the test shows little", accepted, rounds)
	}
}

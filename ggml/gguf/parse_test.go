package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/tensor"
)

func le32(x uint32) string { return string(binary.LittleEndian.AppendUint32(nil, x)) }
func le64(x uint64) string { return string(binary.LittleEndian.AppendUint64(nil, x)) }
func str(s string) string  { return le64(uint64(len(s))) + s }

// head is a header of the given version with counts of tensors and keys.
func head(version uint32, tensors, keys uint64) string {
	return magic + le32(version) + le64(tensors) + le64(keys)
}

// entry is a tensor of the index.
func entry(name string, dtype tensor.DType, offset uint64, dims ...uint64) string {
	s := str(name) + le32(uint32(len(dims)))
	for _, d := range dims {
		s += le64(d)
	}
	return s + le32(uint32(dtype)) + le64(offset)
}

// padded adds zeros to a multiple of 32, and then data.
func padded(s string, data int) string {
	return s + strings.Repeat("\x00", (32-len(s)%32)%32+data)
}

func TestParseRefuses(t *testing.T) {
	u8key := str("k") + le32(uint32(Uint8)) + "\x01"
	tests := []struct{ name, file, reason string }{
		{"empty", "", "magic: 4 bytes are announced, 0 are left"},
		{"magic", strings.Replace(head(3, 0, 0), "GGUF", "GGML", 1), `magic is "GGML"`},
		{"version 0", head(0, 0, 0), "version 0"},
		{"version 1", head(1, 0, 0), "version 1"},
		{"version 4", head(4, 0, 0), "version 4"},
		{"big-endian", head(3<<24, 0, 0), "big-endian"},
		{"cut header", head(3, 0, 0)[:20], "key count: 8 bytes are announced, 4 are left"},
		{"negative tensors", head(3, math.MaxUint64, 0), "tensor count is 18446744073709551615"},
		{"too many tensors", head(3, MaxTensors+1, 0), "at most 262144"},
		{"tensors past the end", head(3, 2, 0), "tensor count: 48 bytes are announced"},
		{"too many keys", head(3, 0, MaxKeys+1), "at most 65536"},
		{"keys past the end", head(3, 0, 3) + u8key, "key count: 39 bytes are announced"},
		{"empty key", head(3, 0, 1) + str("") + le32(0) + "\x01\x00", "empty or holds a zero byte"},
		{"zero in key", head(3, 0, 1) + str("a\x00") + le32(0) + "\x01", "empty or holds a zero byte"},
		{"long key", head(3, 0, 1) + le64(1<<16) + strings.Repeat("k", 1<<16), "a string of 65536 bytes, at most 65535"},
		{"huge key", head(3, 0, 1) + le64(math.MaxUint64) + "12345", "a string of 18446744073709551615 bytes"},
		{"key past the end", head(3, 0, 1) + le64(9) + "12345", "key: 9 bytes are announced, 5 are left"},
		{"duplicate key", head(3, 0, 2) + u8key + u8key, `key "k" is there twice`},
		{"unknown value type", head(3, 0, 1) + str("k") + le32(13) + "\x01", "unknown type 13"},
		{"unknown element type", head(3, 0, 1) + str("k") + le32(9) + le32(99) + le64(0), "unknown type 99"},
		{"nested array", head(3, 0, 1) + str("k") + le32(9) + le32(9) + le64(0), "array of arrays"},
		{"value past the end", head(3, 0, 1) + str("k") + le32(uint32(Uint64)) + "1234", "8 bytes are announced, 4 are left"},
		{"array past the end", head(3, 0, 1) + str("k") + le32(9) + le32(4) + le64(3) + "12345678", "12 bytes are announced"},
		{"array overflows", head(3, 0, 1) + str("k") + le32(9) + le32(10) + le64(1<<61), "an array of"},
		{"string array past the end", head(3, 0, 1) + str("k") + le32(9) + le32(8) + le64(1<<30) + str("a"), "8589934592 bytes are announced"},
		{"huge string", head(3, 0, 1) + str("k") + le32(8) + le64(1<<40), "a string of 1099511627776 bytes"},
		{"string past the end", head(3, 0, 1) + str("k") + le32(8) + le64(100) + "a", "100 bytes are announced, 1 are left"},
		{"alignment type", head(3, 0, 1) + str(alignmentKey) + le32(uint32(Int32)) + le32(32), "must be a u32 power of two"},
		{"alignment 0", head(3, 0, 1) + str(alignmentKey) + le32(uint32(Uint32)) + le32(0), "must be a u32 power of two"},
		{"alignment 48", head(3, 0, 1) + str(alignmentKey) + le32(uint32(Uint32)) + le32(48), "must be a u32 power of two"},
		{"alignment array", head(3, 0, 1) + str(alignmentKey) + le32(9) + le32(4) + le64(1) + le32(32), "must be a u32 power of two"},
		{"long tensor name", padded(head(3, 1, 0)+entry(strings.Repeat("n", 64), tensor.F32, 0, 8), 32), "at most 63 are accepted"},
		{"zero in tensor name", padded(head(3, 1, 0)+entry("a\x00b", tensor.F32, 0, 8), 32), "holds a zero byte"},
		{"duplicate tensor", padded(head(3, 2, 0)+entry("a", tensor.F32, 0, 8)+entry("a", tensor.F32, 32, 8), 64), `tensor "a" is there twice`},
		{"five dimensions", padded(head(3, 1, 0)+entry("a", tensor.F32, 0, 1, 1, 1, 1, 1), 32), "5 dimensions"},
		{"cut tensor entry", head(3, 1, 0) + entry("abcd", tensor.F32, 0, 8)[:27], "are left in the file"},
		{"negative dimension", padded(head(3, 1, 0)+entry("a", tensor.F32, 0, math.MaxUint64), 32), "negative dimension"},
		{"shape overflows", padded(head(3, 1, 0)+entry("a", tensor.F32, 0, 1<<32, 1<<31), 32), "overflows the number of elements"},
		{"bytes overflow", padded(head(3, 1, 0)+entry("a", tensor.F32, 0, 1<<61), 32), "overflows the number of bytes"},
		{"unknown dtype", padded(head(3, 1, 0)+entry("a", 43, 0, 8), 32), "unknown type number 43"},
		{"removed dtype", padded(head(3, 1, 0)+entry("a", 31, 0, 8), 32), "unknown type number 31"},
		{"part of a block", padded(head(3, 1, 0)+entry("a", tensor.Q4_0, 0, 33), 32), "not whole q4_0 blocks"},
		{"no padding", head(3, 1, 0) + entry("a", tensor.F32, 0), "the data would begin at byte 64 of a file of"},
		{"misaligned", padded(head(3, 1, 0)+entry("a", tensor.F32, 8, 8), 64), "not a multiple of the alignment"},
		{"offset past the end", padded(head(3, 1, 0)+entry("a", tensor.F32, 1<<40, 8), 32), "end past the file's 32 bytes"},
		{"offset overflows", padded(head(3, 1, 0)+entry("a", tensor.F32, math.MaxUint64-31, 8), 32), "end past the file's 32 bytes"},
		{"data past the end", padded(head(3, 1, 0)+entry("a", tensor.F32, 0, 16), 32), "64 bytes at offset 0 end past"},
		{"overlap", padded(head(3, 2, 0)+entry("a", tensor.F32, 0, 16)+entry("b", tensor.F32, 32, 8), 64), "overlaps the tensor before it"},
		{"gap", padded(head(3, 2, 0)+entry("a", tensor.F32, 0, 8)+entry("b", tensor.F32, 64, 8), 96), "leaves a gap"},
	}
	for _, tt := range tests {
		h, err := Parse(strings.NewReader(tt.file), int64(len(tt.file)))
		var format *FormatError
		if h != nil || !errors.As(err, &format) || !strings.Contains(err.Error(), tt.reason) {
			t.Errorf("%s: Parse error = %v, want a FormatError with %q", tt.name, err, tt.reason)
		}
	}
}

func TestParseHeaderLimit(t *testing.T) {
	size := int64(MaxHeaderBytes) * 2
	file := head(3, 0, 1) + str("k") + le32(9) + le32(uint32(Uint8)) + le64(MaxHeaderBytes)
	_, err := Parse(&sparse{[]byte(file)}, size)
	if err == nil || !strings.Contains(err.Error(), "the header is longer than the limit") {
		t.Errorf("Parse error = %v, want the header limit", err)
	}
}

func TestParseReadError(t *testing.T) {
	want := errors.New("disk on fire")
	_, err := Parse(readerAtFunc(func([]byte, int64) (int, error) { return 0, want }), 100)
	if !errors.Is(err, want) {
		t.Errorf("Parse error = %v, want %v", err, want)
	}
	short := head(3, 0, 9)
	if _, err := Parse(strings.NewReader(short), 1000); !errors.Is(err, io.EOF) {
		t.Errorf("Parse of a file that shrank: %v, want EOF", err)
	}
}

type readerAtFunc func([]byte, int64) (int, error)

func (f readerAtFunc) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }

// sparse is a file of some bytes followed by zeros, of which only the first maxZeros
// can be read: a fuzzer would spend its time on headers of 256 MiB otherwise.
type sparse struct{ head []byte }

const maxZeros = 1 << 20

func (s *sparse) ReadAt(p []byte, off int64) (int, error) {
	if off > int64(len(s.head)+maxZeros) {
		return 0, errors.New("far past the bytes of the test")
	}
	clear(p)
	if off < int64(len(s.head)) {
		copy(p, s.head[off:])
	}
	return len(p), nil
}

func allValues() Metadata {
	return metaOf(
		"u8", NewValue(uint8(255)), "i8", NewValue(int8(-128)),
		"u16", NewValue(uint16(65535)), "i16", NewValue(int16(-32768)),
		"u32", NewValue(uint32(math.MaxUint32)), "i32", NewValue(int32(math.MinInt32)),
		"u64", NewValue(uint64(math.MaxUint64)), "i64", NewValue(int64(math.MinInt64)),
		"f32", NewValue(float32(1.5)), "f64", NewValue(math.Pi),
		"yes", NewValue(true), "no", NewValue(false),
		"str", NewValue("\xff not utf-8"), "empty", NewValue(""),
		"a.u8", NewArray[uint8](1, 2), "a.i16", NewArray[int16](-1, 2), "a.bool", NewArray(true, false),
		"a.f32", NewArray[float32](0.5, float32(math.Inf(1))), "a.str", NewArray("x", "", "yy"),
		"a.i64", NewArray[int64](math.MinInt64, 7), "a.none", NewArray[uint32](), "a.nostr", NewArray[string](),
	)
}

func TestParseRoundTrip(t *testing.T) {
	for _, alignment := range []int64{1, 8, 32, 64, 4096} {
		tensors := []outTensor{randomTensor(t, "scalar", tensor.F32)}
		for _, d := range tensor.DTypes() {
			tensors = append(tensors, randomTensor(t, d.String(), d, 256, 3, 1, 2))
		}
		im, err := newImage(allValues(), alignment, tensors)
		if err != nil {
			t.Fatal(err)
		}
		file := imageBytes(t, im)
		h, err := Parse(bytes.NewReader(file), int64(len(file)))
		if err != nil {
			t.Fatal(err)
		}
		if h.Version != 3 || h.Alignment != alignment || len(h.Tensors) != len(tensors) {
			t.Errorf("header: version %d, alignment %d, %d tensors", h.Version, h.Alignment, len(h.Tensors))
		}
		want := allValues()
		for i := range want.Len() {
			if got := h.Meta.At(i); !reflect.DeepEqual(got, want.At(i)) {
				t.Errorf("entry %d = %v, want %v", i, got, want.At(i))
			}
		}
		for i, got := range h.Tensors {
			w := tensors[i]
			data := make([]byte, got.Bytes)
			w.src.ReadAt(data, 0)
			if got.Name != w.name || got.DType != w.dtype || got.Shape != w.shape || !bytes.Equal(file[got.Offset:][:got.Bytes], data) {
				t.Errorf("tensor %d = %+v, want %+v", i, got, w)
			}
		}
	}
}

func TestValueGetters(t *testing.T) {
	m := allValues()
	for key, want := range map[string]int64{"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": math.MaxUint32, "i32": math.MinInt32, "i64": math.MinInt64} {
		if got, err := m.Int(key); err != nil || got != want {
			t.Errorf("Int(%s) = %d, %v, want %d", key, got, err, want)
		}
	}
	for key, want := range map[string]float64{"f32": 1.5, "f64": math.Pi, "u8": 255} {
		if got, err := m.Float(key); err != nil || got != want {
			t.Errorf("Float(%s) = %v, %v, want %v", key, got, err, want)
		}
	}
	for _, tt := range []struct {
		key string
		err error
	}{
		{"u64", second(m.Int("u64"))}, {"f32", second(m.Int("f32"))}, {"str", second(m.Int("str"))}, {"a.u8", second(m.Int("a.u8"))},
		{"yes", second(m.Int("yes"))}, {"u8", second(m.Bool("u8"))}, {"u8", second(m.Text("u8"))}, {"a.str", second(m.Text("a.str"))},
		{"str", second(m.Strings("str"))}, {"a.str", second(m.Ints("a.str"))}, {"a.f32", second(m.Ints("a.f32"))}, {"str", second(m.Float("str"))},
	} {
		if tt.err == nil || !strings.Contains(tt.err.Error(), tt.key) || errors.Is(tt.err, ErrNoKey) {
			t.Errorf("getter of the wrong type for %s: %v", tt.key, tt.err)
		}
	}
	if _, err := m.Int("absent"); !errors.Is(err, ErrNoKey) {
		t.Errorf("Int(absent) = %v, want ErrNoKey", err)
	}
	list, _ := m.Get("a.bool")
	if got, ok := list.Bools(); !ok || !reflect.DeepEqual(got, []bool{true, false}) {
		t.Errorf("Bools = %v, %v", got, ok)
	}
	floats, _ := m.Get("a.f32")
	if got, ok := floats.Floats(); !ok || got[0] != 0.5 || !math.IsInf(got[1], 1) {
		t.Errorf("Floats = %v, %v", got, ok)
	}
	if got, err := m.Strings("a.str"); err != nil || !reflect.DeepEqual(got, []string{"x", "", "yy"}) {
		t.Errorf("Strings = %q, %v", got, err)
	}
	for key, want := range map[string]string{"u64": "18446744073709551615", "i8": "-128", "f32": "1.5", "yes": "true", "str": `"\xff not utf-8"`, "a.str": `["x", "", "yy"]`} {
		if v, _ := m.Get(key); v.String() != want {
			t.Errorf("%s.String() = %s, want %s", key, v, want)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// Bools are stored as bytes, of which ggml takes any but 0 for true.
func TestParseBoolBytes(t *testing.T) {
	file := head(2, 0, 1) + str("k") + le32(9) + le32(uint32(Bool)) + le64(3) + "\x00\x01\xff"
	h, err := Parse(strings.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	v, _ := h.Meta.Get("k")
	if got, _ := v.Bools(); !reflect.DeepEqual(got, []bool{false, true, true}) {
		t.Errorf("Bools = %v", got)
	}
}

func TestParseTiny(t *testing.T) {
	m := openModel(t, tinyPath)
	if m.Arch() != "qwen3moe" || m.Layers() != 4 || m.Experts() != 32 || m.ExpertsUsed() != 4 || m.Kind() != Full {
		t.Errorf("arch %s, %d layers, %d experts, %d used, %v", m.Arch(), m.Layers(), m.Experts(), m.ExpertsUsed(), m.Kind())
	}
	if got, err := m.Meta().Strings("tokenizer.ggml.tokens"); err != nil || len(got) != 1536 {
		t.Errorf("%d tokens, %v", len(got), err)
	}
	last := m.Tensors()[len(m.Tensors())-1]
	if got, want := int64(pad(uint64(last.Offset+last.Bytes), 32)), m.Parts()[0].Size; got != want {
		t.Errorf("tensors end at %d of %d bytes", got, want)
	}
}

// The vocabulary of the largest tokenizers must not slow a start down.
func TestParseMillionTokens(t *testing.T) {
	tokens := make([]string, 1_000_000)
	for i := range tokens {
		tokens[i] = fmt.Sprintf("token %d", i)
	}
	im, err := newImage(metaOf("tokenizer.ggml.tokens", NewArray(tokens...)), 32, nil)
	if err != nil {
		t.Fatal(err)
	}
	file := imageBytes(t, im)
	start := time.Now()
	h, err := Parse(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes in %v", len(file), time.Since(start))
	if v, _ := h.Meta.Get("tokenizer.ggml.tokens"); v.Len() != len(tokens) || v.strs[999_999] != "token 999999" {
		t.Errorf("%d tokens", v.Len())
	}
}

func BenchmarkParseTiny(b *testing.B) {
	f, err := os.Open(tinyPath)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	info, _ := f.Stat()
	for b.Loop() {
		if _, err := Parse(f, info.Size()); err != nil {
			b.Fatal(err)
		}
	}
}

// FuzzParse gives Parse files of some bytes and a tail of zeros. What it accepts must
// be inside the file, and must be the same after it was written again.
func FuzzParse(f *testing.F) {
	header, data := trimmedTiny(f)
	f.Add(header, data)
	im, err := newImage(allValues(), 64, []outTensor{randomTensor(f, "a", tensor.Q4_K, 256, 2), randomTensor(f, "b", tensor.F32, 3)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(imageBytes(f, im), uint64(0))
	f.Add([]byte(head(2, 1, 0)+entry("a", tensor.I8, 0, 1<<40)), uint64(1<<41))
	f.Fuzz(func(t *testing.T, data []byte, tail uint64) {
		size := int64(len(data)) + int64(tail%(1<<48))
		h, err := Parse(&sparse{data}, size)
		if err != nil {
			return
		}
		checkHeader(t, h, size)
		var tensors []outTensor
		for _, x := range h.Tensors {
			tensors = append(tensors, outTensor{name: x.Name, dtype: x.DType, shape: x.Shape})
		}
		again, _, err := encodeHeader(h.Meta, h.Alignment, tensors)
		if err != nil {
			t.Fatalf("encode: %v", err)
		}
		h2, err := Parse(&sparse{again}, size+int64(len(again)))
		if err != nil {
			t.Fatalf("parse again: %v", err)
		}
		if !reflect.DeepEqual(h.Meta, h2.Meta) || len(h.Tensors) != len(h2.Tensors) {
			t.Fatalf("written again: %+v, was %+v", h2, h)
		}
	})
}

// trimmedTiny returns the header of the shipped model with short arrays and few
// tensors, and the number of data bytes that it announces.
func trimmedTiny(t testing.TB) ([]byte, uint64) {
	m := openModel(t, tinyPath)
	var meta Metadata
	for _, kv := range m.Meta().list {
		if kv.Value.Type() == Array {
			kv.Value = kv.Value.cut(0, 4)
		}
		meta.set(kv.Key, kv.Value)
	}
	var tensors []outTensor
	for _, x := range m.Tensors()[:6] {
		tensors = append(tensors, outTensor{name: x.Name, dtype: x.DType, shape: x.Shape})
	}
	header, sizes, err := encodeHeader(meta, defaultAlignment, tensors)
	if err != nil {
		t.Fatal(err)
	}
	var data int64
	for _, n := range sizes {
		data += n
	}
	return header, uint64(data)
}

func checkHeader(t *testing.T, h *Header, size int64) {
	names := make(map[string]bool)
	end := h.DataOffset
	for _, x := range h.Tensors {
		if x.Offset < end || x.Bytes < 0 || x.Offset > size || x.Bytes > size-x.Offset || (x.Offset-h.DataOffset)%h.Alignment != 0 {
			t.Fatalf("tensor %+v of a file of %d bytes, the one before ends at %d", x, size, end)
		}
		if names[x.Name] {
			t.Fatalf("tensor %q twice", x.Name)
		}
		names[x.Name] = true
		end = x.Offset + x.Bytes
	}
}

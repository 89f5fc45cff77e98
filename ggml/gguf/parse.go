package gguf

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"strings"

	"kvasird/ggml/tensor"
)

// The GGUF format, all integers little-endian:
//
//	magic "GGUF" | u32 version | i64 tensors | i64 keys
//	per key:     string key | u32 type | value
//	             an array value: u32 element type | u64 count | elements
//	per tensor:  string name | u32 dims | i64 × dims | u32 dtype | u64 offset
//	padding to general.alignment (u32, a power of two, 32 if absent), then the data,
//	every tensor padded to the alignment; offsets count from the start of the data
//
// A string is a u64 length and that many bytes. Version 2 and 3 have one layout
// (3 allows big-endian files, which are refused); version 1 is refused.
const (
	magic            = "GGUF"
	alignmentKey     = "general.alignment"
	defaultAlignment = 32
)

// Limits of what Parse accepts, checked before anything is allocated. Memory stays
// below about four times the header's bytes, so below four times MaxHeaderBytes.
const (
	MaxHeaderBytes = 256 << 20 // magic up to the last tensor's entry
	MaxKeys        = 1 << 16
	MaxTensors     = 1 << 18
	MaxKeyBytes    = 1<<16 - 1
	MaxNameBytes   = 63 // of a tensor, as in ggml
)

// FormatError says why bytes are not an acceptable GGUF header.
type FormatError struct {
	Offset int64 // where in the file reading stopped
	Reason string
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("gguf: not a usable GGUF file: %s (at byte %d)", e.Reason, e.Offset)
}

// Tensor is an entry of the tensor index.
type Tensor struct {
	Name   string
	DType  tensor.DType
	Shape  tensor.Shape
	Offset int64 // in bytes, from the start of the file
	Bytes  int64
}

// Header is everything in a GGUF file but the tensor data.
type Header struct {
	Version    uint32
	Alignment  int64
	DataOffset int64 // where the tensor data begin, from the start of the file
	Size       int64 // of the file, in bytes
	Meta       Metadata
	Tensors    []Tensor
}

// Parse reads the header of a GGUF file of size bytes. It reads no tensor data.
// What is wrong with the bytes is a *FormatError; other errors come from r.
func Parse(r io.ReaderAt, size int64) (*Header, error) {
	p := &parser{size: size, limit: min(size, MaxHeaderBytes)}
	p.r = bufio.NewReaderSize(io.NewSectionReader(r, 0, p.limit), 1<<16)
	h := &Header{Size: size}
	p.header(h)
	if p.err != nil {
		return nil, p.err
	}
	return h, nil
}

// parser reads fields in order. After the first error it reads nothing more and
// every read returns zero, so that loops only need to look at err.
type parser struct {
	r     *bufio.Reader
	size  int64 // of the file
	limit int64 // pos <= limit <= size
	pos   int64
	buf   [8]byte
	err   error
}

func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = &FormatError{p.pos, fmt.Sprintf(format, args...)}
	}
}

// need refuses n more bytes when the header cannot have them.
func (p *parser) need(n uint64, what string) bool {
	if p.err == nil && n > uint64(p.limit-p.pos) {
		if p.limit < p.size {
			p.fail("%s: the header is longer than the limit of %d bytes", what, MaxHeaderBytes)
		} else {
			p.fail("%s: %d bytes are announced, %d are left in the file", what, n, p.limit-p.pos)
		}
	}
	return p.err == nil
}

func (p *parser) read(dst []byte, what string) {
	if !p.need(uint64(len(dst)), what) {
		return
	}
	n, err := io.ReadFull(p.r, dst)
	p.pos += int64(n)
	if err != nil {
		p.err = fmt.Errorf("gguf: %s: read at byte %d: %w", what, p.pos, err)
	}
}

func (p *parser) uint32(what string) uint32 {
	p.buf = [8]byte{}
	p.read(p.buf[:4], what)
	return binary.LittleEndian.Uint32(p.buf[:])
}

func (p *parser) uint64(what string) uint64 {
	p.buf = [8]byte{}
	p.read(p.buf[:], what)
	return binary.LittleEndian.Uint64(p.buf[:])
}

// bytes reads n bytes; n is checked against the file before it is allocated.
func (p *parser) bytes(n uint64, what string) string {
	if !p.need(n, what) {
		return ""
	}
	var b strings.Builder
	b.Grow(int(n))
	for left := int(n); left > 0 && p.err == nil; {
		chunk, err := p.r.Peek(min(left, p.r.Size()))
		b.Write(chunk)
		p.pos += int64(len(chunk))
		left -= len(chunk)
		if err != nil {
			p.err = fmt.Errorf("gguf: %s: read at byte %d: %w", what, p.pos, err)
		}
		p.r.Discard(len(chunk)) // cannot fail: the bytes were peeked
	}
	return b.String()
}

func (p *parser) string(limit uint64, what string) string {
	n := p.uint64(what)
	if p.err == nil && n > limit {
		p.fail("%s: a string of %d bytes, at most %d are accepted", what, n, limit)
	}
	return p.bytes(n, what)
}

func (p *parser) header(h *Header) {
	if got := p.bytes(uint64(len(magic)), "magic"); p.err == nil && got != magic {
		p.fail("magic is %q, want %q", got, magic)
	}
	h.Version = p.uint32("version")
	switch {
	case p.err != nil:
	case h.Version&0xffff == 0 && h.Version != 0:
		p.fail("version %#x: the file is big-endian; convert it for this machine", h.Version)
	case h.Version != 2 && h.Version != 3:
		p.fail("version %d, only 2 and 3 are supported", h.Version)
	}
	tensors := p.count("tensor count", MaxTensors, 8+4+4+8)
	keys := p.count("key count", MaxKeys, 8+4+1)
	for range keys {
		p.keyValue(&h.Meta)
	}
	p.alignment(h)
	// The smallest entry takes 24 bytes of the file, so growing by append is bounded.
	seen := make(map[string]bool)
	for i := 0; i < tensors && p.err == nil; i++ {
		h.Tensors = append(h.Tensors, p.tensor(seen))
	}
	p.layout(h)
}

// count reads a number of entries of at least minBytes each.
func (p *parser) count(what string, limit, minBytes uint64) int {
	n := p.uint64(what)
	if p.err == nil && n > limit {
		p.fail("%s is %d, at most %d are accepted", what, n, limit)
	}
	if !p.need(n*minBytes, what) {
		return 0
	}
	return int(n)
}

func (p *parser) keyValue(meta *Metadata) {
	key := p.string(MaxKeyBytes, "key")
	if p.err != nil {
		return
	}
	if key == "" || strings.ContainsRune(key, 0) {
		p.fail("key %q is empty or holds a zero byte", key)
		return
	}
	if _, dup := meta.Get(key); dup {
		p.fail("key %q is there twice", key)
		return
	}
	v := Value{typ: ValueType(p.uint32(key))}
	count := uint64(1)
	if v.typ == Array {
		v.arr = true
		v.typ = ValueType(p.uint32(key))
		count = p.uint64(key)
	}
	switch {
	case p.err != nil:
		return
	case v.typ == Array:
		p.fail("key %q is an array of arrays, which ggml does not read", key)
		return
	case v.typ > Float64:
		p.fail("key %q has the unknown type %d", key, uint32(v.typ))
		return
	}
	p.value(&v, count, key)
	if p.err == nil {
		meta.set(key, v)
	}
}

func (p *parser) value(v *Value, count uint64, key string) {
	minBytes := uint64(8) // a string's length
	if v.typ != String {
		minBytes = uint64(valueSizes[v.typ])
	}
	hi, total := bits.Mul64(count, minBytes)
	if hi != 0 {
		p.fail("%s: an array of %d elements", key, count)
	}
	if !p.need(total, key) {
		return
	}
	if v.typ != String {
		v.raw = p.bytes(total, key)
		if v.typ == Bool {
			v.raw = normalBools(v.raw)
		}
		return
	}
	if count > 0 {
		v.strs = make([]string, count) // 16 bytes of memory per 8 bytes of file
	}
	for i := range v.strs {
		if v.strs[i] = p.string(MaxHeaderBytes, key); p.err != nil {
			return
		}
	}
}

// normalBools makes every byte 0 or 1, as ggml reads any other byte as true.
func normalBools(raw string) string {
	for i := range len(raw) {
		if raw[i] > 1 {
			b := []byte(raw)
			for j := range b {
				b[j] = min(b[j], 1)
			}
			return string(b)
		}
	}
	return raw
}

func (p *parser) alignment(h *Header) {
	h.Alignment = defaultAlignment
	v, ok := h.Meta.Get(alignmentKey)
	if !ok || p.err != nil {
		return
	}
	n, _ := v.Int()
	if v.Type() != Uint32 || bits.OnesCount64(uint64(n)) != 1 {
		p.fail("%s is %s %v, must be a u32 power of two", alignmentKey, v.Type(), v)
		return
	}
	h.Alignment = n
}

// tensor reads one entry. Its Offset still counts from the start of the data.
func (p *parser) tensor(seen map[string]bool) Tensor {
	t := Tensor{Name: p.string(MaxNameBytes, "tensor name"), Shape: tensor.Shape{1, 1, 1, 1}}
	if p.err == nil && seen[t.Name] {
		p.fail("tensor %q is there twice", t.Name)
	}
	if strings.ContainsRune(t.Name, 0) {
		p.fail("tensor name %q holds a zero byte", t.Name)
	}
	seen[t.Name] = true
	dims := p.uint32(t.Name)
	if p.err == nil && dims > tensor.MaxDims {
		p.fail("tensor %q has %d dimensions, at most %d are possible", t.Name, dims, tensor.MaxDims)
	}
	for i := 0; i < int(dims) && p.err == nil; i++ {
		t.Shape[i] = int64(p.uint64(t.Name))
	}
	t.DType = tensor.DType(p.uint32(t.Name))
	t.Offset = int64(p.uint64(t.Name))
	if p.err != nil {
		return t
	}
	var err error
	if t.Bytes, err = t.DType.Bytes(t.Shape); err != nil {
		p.fail("tensor %q: %v", t.Name, err)
	}
	return t
}

// layout checks that the tensors lie one after the other, aligned, inside the file,
// and makes their offsets count from the start of the file.
func (p *parser) layout(h *Header) {
	h.DataOffset = p.pos
	if p.err != nil || len(h.Tensors) == 0 {
		return
	}
	// No sum below overflows: every term is at most 2^63 and is compared before it is kept.
	h.DataOffset = int64(pad(uint64(p.pos), uint64(h.Alignment)))
	if h.DataOffset > h.Size {
		p.fail("the data would begin at byte %d of a file of %d bytes", h.DataOffset, h.Size)
		return
	}
	next, room := uint64(0), uint64(h.Size-h.DataOffset)
	for i := range h.Tensors {
		t := &h.Tensors[i]
		offset := uint64(t.Offset)
		switch {
		case offset%uint64(h.Alignment) != 0:
			p.fail("tensor %q: offset %d is not a multiple of the alignment %d", t.Name, offset, h.Alignment)
		case offset > room || uint64(t.Bytes) > room-offset:
			p.fail("tensor %q: its %d bytes at offset %d end past the file's %d bytes of data", t.Name, t.Bytes, offset, room)
		case offset < next:
			p.fail("tensor %q: offset %d overlaps the tensor before it, want %d", t.Name, offset, next)
		case offset > next:
			p.fail("tensor %q: offset %d leaves a gap, want %d", t.Name, offset, next)
		}
		if p.err != nil {
			return
		}
		next = pad(offset+uint64(t.Bytes), uint64(h.Alignment))
		t.Offset += h.DataOffset
	}
}

func pad(n, alignment uint64) uint64 { return (n + alignment - 1) &^ (alignment - 1) }

package tensor

import (
	"fmt"
	"math"
	"math/bits"
	"strings"
)

// MaxDims is the number of dimensions of a ggml tensor.
const MaxDims = 4

// Shape holds the dimensions of a tensor, in elements, innermost (contiguous) first
// as ggml stores them. Dimensions that a tensor does not have are 1. The zero value
// is a tensor of no elements.
type Shape [MaxDims]int64

// NewShape returns the shape with the given dimensions, at most MaxDims, none negative.
func NewShape(dims ...int64) (Shape, error) {
	s := Shape{1, 1, 1, 1}
	if len(dims) > MaxDims {
		return Shape{}, fmt.Errorf("tensor: %d dimensions, at most %d are possible", len(dims), MaxDims)
	}
	copy(s[:], dims)
	if _, err := s.Elements(); err != nil {
		return Shape{}, err
	}
	return s, nil
}

// Dims returns the number of dimensions, not counting outer ones of length 1; at least 1.
func (s Shape) Dims() int {
	n := MaxDims
	for n > 1 && s[n-1] == 1 {
		n--
	}
	return n
}

// String writes the dimensions innermost first, such as "256x768x32".
func (s Shape) String() string {
	parts := make([]string, s.Dims())
	for i := range parts {
		parts[i] = fmt.Sprint(s[i])
	}
	return strings.Join(parts, "x")
}

// Elements returns the number of elements. The product of the dimensions that are
// not zero must stay below 2^63-1, as ggml demands, even when another one is zero.
func (s Shape) Elements() (int64, error) {
	total, empty := uint64(1), false
	for _, d := range s {
		if d < 0 {
			return 0, fmt.Errorf("tensor: negative dimension %d", d)
		}
		if d == 0 {
			empty = true
			continue
		}
		hi, lo := bits.Mul64(total, uint64(d))
		if hi != 0 || lo >= math.MaxInt64 {
			return 0, fmt.Errorf("tensor: shape %d overflows the number of elements", s[:])
		}
		total = lo
	}
	if empty {
		return 0, nil
	}
	return int64(total), nil
}

// Bytes returns the number of bytes of a tensor of type t and shape s.
func (t DType) Bytes(s Shape) (int64, error) {
	if !t.Valid() {
		return 0, fmt.Errorf("tensor: unknown type number %d", uint32(t))
	}
	n, err := s.Elements()
	if err != nil {
		return 0, err
	}
	block := table[t]
	if s[0]%block.elems != 0 {
		return 0, fmt.Errorf("tensor: rows of %d elements are not whole %s blocks of %d", s[0], block.name, block.elems)
	}
	hi, lo := bits.Mul64(uint64(n/block.elems), uint64(block.bytes))
	if hi != 0 || lo > math.MaxInt64 {
		return 0, fmt.Errorf("tensor: %s tensor of shape %d overflows the number of bytes", block.name, s[:])
	}
	return int64(lo), nil
}

// RowBytes returns the number of bytes of one row of n elements of type t.
func (t DType) RowBytes(n int64) (int64, error) { return t.Bytes(Shape{n, 1, 1, 1}) }

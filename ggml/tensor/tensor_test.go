package tensor

import (
	"math"
	"strings"
	"testing"
)

func TestDTypeNames(t *testing.T) {
	all := DTypes()
	if got, want := len(all), 35; got != want {
		t.Fatalf("DTypes() has %d types, want %d", got, want)
	}
	for _, d := range all {
		for _, name := range []string{d.String(), strings.ToUpper(d.String())} {
			got, err := ParseDType(name)
			if err != nil || got != d {
				t.Errorf("ParseDType(%q) = %v, %v, want %v", name, got, err, d)
			}
		}
		if d.BlockSize() < 1 || d.BlockBytes() < 1 {
			t.Errorf("%v: block of %d elements in %d bytes", d, d.BlockSize(), d.BlockBytes())
		}
	}
}

func TestDTypeInvalid(t *testing.T) {
	for _, d := range []DType{4, 5, 31, 32, 33, 36, 37, 38, 43, math.MaxUint32} {
		if d.Valid() || d.BlockSize() != 0 || d.BlockBytes() != 0 {
			t.Errorf("removed type %d is taken for valid", uint32(d))
		}
		if _, err := d.Bytes(Shape{32, 1, 1, 1}); err == nil {
			t.Errorf("type %d has a size", uint32(d))
		}
		if _, err := ParseDType(d.String()); err == nil {
			t.Errorf("ParseDType(%q) succeeded", d.String())
		}
	}
	if _, err := ParseDType(""); err == nil {
		t.Error(`ParseDType("") succeeded`)
	}
}

func TestBytes(t *testing.T) {
	tests := []struct {
		name  string
		dtype DType
		shape Shape
		want  int64
		err   string
	}{
		{"scalar", F32, Shape{1, 1, 1, 1}, 4, ""},
		{"matrix", BF16, Shape{3, 5, 1, 1}, 30, ""},
		{"experts", Q4_K, Shape{256, 768, 32, 1}, 768 * 32 * 144, ""},
		{"mxfp4", MXFP4, Shape{64, 2, 1, 1}, 68, ""},
		{"empty", F32, Shape{0, 7, 1, 1}, 0, ""},
		{"part of a block", Q4_0, Shape{33, 1, 1, 1}, 0, "not whole q4_0 blocks"},
		{"negative", F32, Shape{-1, 1, 1, 1}, 0, "negative dimension"},
		{"elements overflow", I8, Shape{1 << 32, 1 << 31, 1, 1}, 0, "overflows the number of elements"},
		{"largest count", I8, Shape{math.MaxInt64, 1, 1, 1}, 0, "overflows the number of elements"},
		{"hidden by a zero", F32, Shape{1 << 62, 1 << 62, 0, 1}, 0, "overflows the number of elements"},
		{"bytes overflow", F32, Shape{1 << 61, 1, 1, 1}, 0, "overflows the number of bytes"},
		{"large but possible", I8, Shape{1 << 62, 1, 1, 1}, 1 << 62, ""},
	}
	for _, tt := range tests {
		got, err := tt.dtype.Bytes(tt.shape)
		if got != tt.want || (err == nil) != (tt.err == "") || (err != nil && !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: Bytes = %d, %v, want %d, error with %q", tt.name, got, err, tt.want, tt.err)
		}
	}
}

func TestShape(t *testing.T) {
	s, err := NewShape(256, 768, 32)
	if err != nil || s.Dims() != 3 || s.String() != "256x768x32" {
		t.Errorf("NewShape = %v (%d dims), %v", s, s.Dims(), err)
	}
	if s, err := NewShape(); err != nil || s.Dims() != 1 || s.String() != "1" {
		t.Errorf("NewShape() = %v, %v", s, err)
	}
	for _, dims := range [][]int64{{1, 2, 3, 4, 5}, {-3}, {1 << 40, 1 << 40}} {
		if _, err := NewShape(dims...); err == nil {
			t.Errorf("NewShape(%v) succeeded", dims)
		}
	}
}

package gguf

import (
	"fmt"
	"strconv"
	"strings"
)

// Range is the half-open range of indices [Begin, End). The zero value is empty.
type Range struct{ Begin, End int }

// maxIndex bounds layers and experts, far above any model.
const maxIndex = 1 << 16

// ParseRange reads what String writes, "begin:end" in decimal with
// 0 <= begin < end <= 65536.
func ParseRange(s string) (Range, error) {
	var r Range
	left, right, ok := strings.Cut(s, ":")
	if ok {
		var err1, err2 error
		r.Begin, err1 = strconv.Atoi(left)
		r.End, err2 = strconv.Atoi(right)
		ok = err1 == nil && err2 == nil && r.String() == s
	}
	if !ok || !r.within(maxIndex) {
		return Range{}, fmt.Errorf("gguf: %.40q is not a range like 0:16 with begin < end <= %d", s, maxIndex)
	}
	return r, nil
}

// String writes "begin:end".
func (r Range) String() string { return strconv.Itoa(r.Begin) + ":" + strconv.Itoa(r.End) }

// Len returns the number of indices; 0 when the range is empty.
func (r Range) Len() int { return max(r.End-r.Begin, 0) }

// Contains reports whether i is in the range.
func (r Range) Contains(i int) bool { return r.Begin <= i && i < r.End }

// Covers reports whether every index of o is in r.
func (r Range) Covers(o Range) bool { return o.Len() == 0 || r.Begin <= o.Begin && o.End <= r.End }

// Intersect returns the indices that are in both.
func (r Range) Intersect(o Range) Range {
	x := Range{max(r.Begin, o.Begin), min(r.End, o.End)}
	if x.Len() == 0 {
		return Range{}
	}
	return x
}

// within reports whether the range is not empty and 0 <= Begin < End <= n.
func (r Range) within(n int) bool { return 0 <= r.Begin && r.Begin < r.End && r.End <= n }

// MarshalText writes what String writes.
func (r Range) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what ParseRange reads.
func (r *Range) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRange(string(b))
	return err
}

// Slice is the unit of volunteering: every expert of a range in every layer of a range.
type Slice struct {
	Layers  Range `json:"layers"`
	Experts Range `json:"experts"`
}

// ParseSlice reads what String writes, "layers/experts" such as "0:2/0:16".
func ParseSlice(s string) (Slice, error) {
	layers, experts, _ := strings.Cut(s, "/")
	l, err := ParseRange(layers)
	if err != nil {
		return Slice{}, err
	}
	e, err := ParseRange(experts)
	return Slice{l, e}, err
}

// String writes "layers/experts".
func (s Slice) String() string { return s.Layers.String() + "/" + s.Experts.String() }

package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ValueType is the type of a metadata value; its number is what files store.
type ValueType uint32

// The value types of GGUF v2 and v3.
const (
	Uint8   ValueType = 0
	Int8    ValueType = 1
	Uint16  ValueType = 2
	Int16   ValueType = 3
	Uint32  ValueType = 4
	Int32   ValueType = 5
	Float32 ValueType = 6
	Bool    ValueType = 7
	String  ValueType = 8
	Array   ValueType = 9
	Uint64  ValueType = 10
	Int64   ValueType = 11
	Float64 ValueType = 12
)

var valueTypeNames = [...]string{"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"}

// valueSizes holds the bytes of one value; 0 for strings and arrays.
var valueSizes = [...]int{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}

// String returns ggml's short name of the type, such as "u32".
func (t ValueType) String() string {
	if int64(t) >= int64(len(valueTypeNames)) {
		return fmt.Sprintf("type(%d)", uint32(t))
	}
	return valueTypeNames[t]
}

// Value is one metadata value: a scalar, a string, or an array of one of those.
// Values are immutable. The zero value is the number 0 of type u8.
type Value struct {
	typ  ValueType // of the value, or of the elements of an array
	arr  bool
	raw  string   // numbers and bools, little-endian, bools 0 or 1
	strs []string // strings
}

// Type returns the type of the value; Array for arrays.
func (v Value) Type() ValueType {
	if v.arr {
		return Array
	}
	return v.typ
}

// Elem returns the type of an array's elements, or the type of a scalar.
func (v Value) Elem() ValueType { return v.typ }

// Len returns the number of elements of an array, and 1 for a scalar.
func (v Value) Len() int {
	switch {
	case !v.arr:
		return 1
	case v.typ == String:
		return len(v.strs)
	default:
		return len(v.raw) / valueSizes[v.typ]
	}
}

// Index returns element i of an array as a scalar, and a scalar itself for i = 0. It
// panics when i is not in [0, Len).
func (v Value) Index(i int) Value {
	if !v.arr && i == 0 {
		return v
	}
	x := v.cut(i, i+1)
	x.arr = false
	return x
}

// bits returns element i of a number or bool as its unsigned little-endian bits.
func (v Value) bits(i int) uint64 {
	size := valueSizes[v.typ]
	var buf [8]byte
	if v.raw != "" {
		copy(buf[:size], v.raw[i*size:])
	}
	return binary.LittleEndian.Uint64(buf[:])
}

// int64At returns element i; ok is false when it is no integer that fits.
func (v Value) int64At(i int) (n int64, ok bool) {
	u := v.bits(i)
	switch v.typ {
	case Uint8, Uint16, Uint32, Uint64:
		return int64(u), u <= math.MaxInt64
	case Int8:
		return int64(int8(u)), true
	case Int16:
		return int64(int16(u)), true
	case Int32:
		return int64(int32(u)), true
	case Int64:
		return int64(u), true
	}
	return 0, false
}

func (v Value) float64At(i int) (f float64, ok bool) {
	switch v.typ {
	case Float32:
		return float64(math.Float32frombits(uint32(v.bits(i)))), true
	case Float64:
		return math.Float64frombits(v.bits(i)), true
	}
	n, ok := v.int64At(i)
	return float64(n), ok
}

// Int returns an integer scalar of any width that fits in an int64.
func (v Value) Int() (n int64, ok bool) {
	if v.arr || v.typ == String {
		return 0, false
	}
	return v.int64At(0)
}

// Float returns a number scalar; integers are converted.
func (v Value) Float() (f float64, ok bool) {
	if v.arr || v.typ == String {
		return 0, false
	}
	return v.float64At(0)
}

// Bool returns a bool scalar.
func (v Value) Bool() (b, ok bool) {
	if v.arr || v.typ != Bool {
		return false, false
	}
	return v.bits(0) != 0, true
}

// Text returns a string scalar. Its bytes are those of the file, not always UTF-8.
func (v Value) Text() (s string, ok bool) {
	if v.arr || v.typ != String {
		return "", false
	}
	return v.strs[0], true
}

// Ints returns an array of integers.
func (v Value) Ints() (list []int64, ok bool) {
	if !v.arr || v.typ == String {
		return nil, false
	}
	list = make([]int64, v.Len())
	for i := range list {
		if list[i], ok = v.int64At(i); !ok {
			return nil, false
		}
	}
	return list, true
}

// Floats returns an array of numbers; integers are converted.
func (v Value) Floats() (list []float64, ok bool) {
	if !v.arr || v.typ == String {
		return nil, false
	}
	list = make([]float64, v.Len())
	for i := range list {
		if list[i], ok = v.float64At(i); !ok {
			return nil, false
		}
	}
	return list, true
}

// Bools returns an array of bools.
func (v Value) Bools() (list []bool, ok bool) {
	if !v.arr || v.typ != Bool {
		return nil, false
	}
	list = make([]bool, v.Len())
	for i := range list {
		list[i] = v.raw[i] != 0
	}
	return list, true
}

// Strings returns an array of strings.
func (v Value) Strings() (list []string, ok bool) {
	if !v.arr || v.typ != String {
		return nil, false
	}
	return slices.Clone(v.strs), true
}

// cut returns the elements [begin, end) of an array; 0 <= begin <= end <= Len.
func (v Value) cut(begin, end int) Value {
	if v.typ == String {
		v.strs = v.strs[begin:end]
		return v
	}
	size := valueSizes[v.typ]
	v.raw = v.raw[begin*size : end*size]
	return v
}

// maxShown is how many array elements and string bytes String writes.
const maxShown = 8

// String writes the value for people: strings quoted, long arrays and strings cut.
func (v Value) String() string {
	if !v.arr {
		return v.show(0)
	}
	shown := min(v.Len(), maxShown)
	parts := make([]string, shown, shown+1)
	for i := range parts {
		parts[i] = v.show(i)
	}
	if v.Len() > shown {
		parts = append(parts, fmt.Sprintf("… (%d in all)", v.Len()))
	}
	return "[" + strings.Join(parts, ", ") + "]"
}

func (v Value) show(i int) string {
	switch v.typ {
	case String:
		s := v.strs[i]
		if len(s) > maxShown*8 {
			return fmt.Sprintf("%q… (%d bytes)", s[:maxShown*8], len(s))
		}
		return strconv.Quote(s)
	case Bool:
		return strconv.FormatBool(v.bits(i) != 0)
	case Float32:
		f, _ := v.float64At(i)
		return strconv.FormatFloat(f, 'g', -1, 32)
	case Float64:
		f, _ := v.float64At(i)
		return strconv.FormatFloat(f, 'g', -1, 64)
	case Uint64:
		return strconv.FormatUint(v.bits(i), 10)
	}
	n, _ := v.int64At(i)
	return strconv.FormatInt(n, 10)
}

// Scalar is a Go type that a metadata value can be made of.
type Scalar interface {
	uint8 | int8 | uint16 | int16 | uint32 | int32 | uint64 | int64 | float32 | float64 | bool | string
}

// NewValue returns a scalar value of the matching type.
func NewValue[T Scalar](x T) Value {
	v := NewArray(x)
	v.arr = false
	return v
}

// NewArray returns an array value of the matching element type.
func NewArray[T Scalar](list ...T) Value {
	if strs, ok := any(list).([]string); ok {
		return Value{typ: String, arr: true, strs: slices.Clone(strs)}
	}
	raw, err := binary.Append(nil, binary.LittleEndian, list)
	if err != nil {
		panic("gguf: " + err.Error()) // every Scalar has a fixed size
	}
	return Value{typ: typeOf[T](), arr: true, raw: string(raw)}
}

func typeOf[T Scalar]() ValueType {
	var zero T
	switch any(zero).(type) {
	case uint8:
		return Uint8
	case int8:
		return Int8
	case uint16:
		return Uint16
	case int16:
		return Int16
	case uint32:
		return Uint32
	case int32:
		return Int32
	case uint64:
		return Uint64
	case int64:
		return Int64
	case float32:
		return Float32
	case float64:
		return Float64
	case bool:
		return Bool
	}
	return String
}

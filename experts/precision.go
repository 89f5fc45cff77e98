package experts

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Precision is how the elements of rows are encoded on the wire.
type Precision uint8

const (
	F32  Precision = 1 // exact
	F16  Precision = 2 // IEEE 754 binary16, 11 bits of mantissa, up to 65504
	BF16 Precision = 3 // the upper half of an f32, 8 bits of mantissa
	// Q8 is blocks of 32 elements of a row, the last one of what is left: a scale, which is a bf16,
	// and a signed byte for each element, which is the byte times the scale.
	Q8 Precision = 4
)

// precisions are all that a worker computes with.
var precisions = []Precision{F32, F16, BF16, Q8}

var precisionNames = []string{"f32", "f16", "bf16", "q8"}

func (p Precision) String() string {
	if p < F32 || p > Q8 {
		return fmt.Sprintf("precision %d", uint8(p))
	}
	return precisionNames[p-F32]
}

// ParsePrecision reads what String writes.
func ParsePrecision(name string) (Precision, error) {
	if i := slices.Index(precisionNames, name); i >= 0 {
		return F32 + Precision(i), nil
	}
	return 0, fmt.Errorf("precision %q: want one of %s", name, strings.Join(precisionNames, ", "))
}

const (
	q8Block = 32
	q8Most  = 127 // of a byte's absolute value, as encoded here
	// q8Least is the largest element of a block below which it is sent as zeros: the inverse of
	// its scale would not be finite.
	q8Least = 1.0 / (1 << 60) / (1 << 40)
)

// size is the bytes of rows of so many elements each.
func (p Precision) size(rows, width int) int {
	switch p {
	case F32:
		return 4 * rows * width
	case Q8:
		return rows * (width + 2*((width+q8Block-1)/q8Block))
	}
	return 2 * rows * width
}

// largest is the largest absolute value that is encoded as a finite number, as f32 bits: in f16
// what still rounds to 65504, in bf16 what does not round to infinity, in q8 what 127 times
// a scale that was rounded up can reach.
func (p Precision) largest() uint32 {
	switch p {
	case F16:
		return 0x477fefff
	case BF16:
		return 0x7f7f7fff
	case Q8:
		return 0x7e7fffff
	}
	return 0xffffffff // f32 carries everything
}

// fits says whether all of src can be encoded. What cannot is sent as f32.
func (p Precision) fits(src []float32) bool { return p == F32 || maxAbs(src) <= p.largest() }

// orF32 is the precision that src is sent in.
func (p Precision) orF32(src []float32) Precision {
	if p.fits(src) {
		return p
	}
	return F32
}

const signless = 0x7fffffff

// maxAbs is the largest absolute value as bits, in whose order infinity and what is not a
// number come last.
func maxAbs(src []float32) uint32 {
	var a, b, c, d uint32
	for ; len(src) >= 4; src = src[4:] {
		a = max(a, math.Float32bits(src[0])&signless)
		b = max(b, math.Float32bits(src[1])&signless)
		c = max(c, math.Float32bits(src[2])&signless)
		d = max(d, math.Float32bits(src[3])&signless)
	}
	for _, x := range src {
		a = max(a, math.Float32bits(x)&signless)
	}
	return max(a, b, c, d)
}

// put encodes rows that fit into dst, which has the size of them.
func (p Precision) put(dst []byte, src []float32, width int) {
	switch p {
	case F32:
		copy(float32s(dst), src)
	case F16:
		for ; len(src) >= 4 && len(dst) >= 8; src, dst = src[4:], dst[8:] {
			binary.LittleEndian.PutUint64(dst, uint64(toHalf(src[0]))|uint64(toHalf(src[1]))<<16|
				uint64(toHalf(src[2]))<<32|uint64(toHalf(src[3]))<<48)
		}
		for i, x := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], toHalf(x))
		}
	case BF16:
		for ; len(src) >= 4 && len(dst) >= 8; src, dst = src[4:], dst[8:] {
			binary.LittleEndian.PutUint64(dst, uint64(toBrain(src[0]))|uint64(toBrain(src[1]))<<16|
				uint64(toBrain(src[2]))<<32|uint64(toBrain(src[3]))<<48)
		}
		for i, x := range src {
			binary.LittleEndian.PutUint16(dst[2*i:], toBrain(x))
		}
	case Q8:
		for ; len(src) > 0; src = src[width:] {
			dst = putQ8(dst, src[:width])
		}
	}
}

// get decodes rows that are finite.
func (p Precision) get(dst []float32, src []byte, width int) {
	switch p {
	case F32:
		copy(dst, float32s(src))
	case F16:
		for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] {
			w := binary.LittleEndian.Uint64(src)
			dst[0], dst[1] = fromHalf(uint16(w)), fromHalf(uint16(w>>16))
			dst[2], dst[3] = fromHalf(uint16(w>>32)), fromHalf(uint16(w>>48))
		}
		for i := range dst {
			dst[i] = fromHalf(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case BF16:
		for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] {
			w := binary.LittleEndian.Uint64(src)
			dst[0], dst[1] = fromBrain(uint16(w)), fromBrain(uint16(w>>16))
			dst[2], dst[3] = fromBrain(uint16(w>>32)), fromBrain(uint16(w>>48))
		}
		for i := range dst {
			dst[i] = fromBrain(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case Q8:
		for ; len(dst) > 0; dst = dst[width:] {
			src = getQ8(dst[:width], src)
		}
	}
}

// finite says whether rows hold neither infinities nor what is not a number.
func (p Precision) finite(b []byte, width int) bool {
	switch p {
	case F32:
		return finite(b)
	case F16:
		return finite16(b, 0x7c00)
	case BF16:
		return finite16(b, 0x7f80)
	}
	for row := p.size(1, width); len(b) > 0; b = b[row:] {
		for block := b[:row]; len(block) > 0; block = block[min(2+q8Block, len(block)):] {
			// from there on -128 times the scale is infinite
			if binary.LittleEndian.Uint16(block)&0x7fff >= 0x7c00 {
				return false
			}
		}
	}
	return true
}

// finite16 says whether no number of 16 bits has all of these exponent bits set. As in finite,
// adding the lowest of them carries into the sign's place then.
func finite16(b []byte, exponent uint64) bool {
	const each, carry = 0x0001_0001_0001_0001, 0x8000_8000_8000_8000
	var bad uint64
	mask, one := exponent*each, (exponent&-exponent)*each
	for ; len(b) >= 8; b = b[8:] {
		bad |= binary.LittleEndian.Uint64(b)&mask + one
	}
	for ; len(b) >= 2; b = b[2:] {
		bad |= uint64(binary.LittleEndian.Uint16(b))&exponent + exponent&-exponent
	}
	return bad&carry == 0
}

// toHalf rounds a number that fits to the nearest f16, ties to even.
func toHalf(x float32) uint16 {
	const (
		half        = 0.5       // whose last place is that of the subnormals
		smallest    = 113 << 23 // bits of the smallest normal number
		lessOffset  = 112 << 23 // between the exponents
		belowTheTie = 0xfff
	)
	bits := math.Float32bits(x)
	sign, abs := uint16(bits>>16)&0x8000, bits&signless
	if abs < smallest {
		return sign | uint16(math.Float32bits(math.Float32frombits(abs)+half)-math.Float32bits(half))
	}
	return sign | uint16((abs-lessOffset+belowTheTie+abs>>13&1)>>13)
}

func fromHalf(h uint16) float32 {
	sign, abs := uint32(h&0x8000)<<16, uint32(h&0x7fff)
	if abs < 0x400 { // subnormal
		return math.Float32frombits(sign | math.Float32bits(float32(abs)/(1<<24)))
	}
	return math.Float32frombits(sign | abs<<13 + 112<<23)
}

// toBrain rounds a number that fits to the nearest bf16, ties to even.
func toBrain(x float32) uint16 {
	bits := math.Float32bits(x)
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

func fromBrain(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// putQ8 encodes a row and returns what follows it. The scale is rounded up, so that no byte
// is above q8Most.
func putQ8(dst []byte, row []float32) []byte {
	for len(row) > 0 {
		n := min(q8Block, len(row))
		putBlock(dst[:2+n], row[:n])
		dst, row = dst[2+n:], row[n:]
	}
	return dst
}

func putBlock(dst []byte, block []float32) {
	most := math.Float32frombits(maxAbs(block))
	if most < q8Least {
		clear(dst)
		return
	}
	scale := (math.Float32bits(most/q8Most) + 0xffff) >> 16
	binary.LittleEndian.PutUint16(dst, uint16(scale))
	inverse := 1 / math.Float32frombits(scale<<16)
	// With 1.5·2^23 added the last place is 1, so this rounds; the lowest byte is the number.
	for dst = dst[2:]; len(block) >= 4 && len(dst) >= 4; block, dst = block[4:], dst[4:] {
		dst[0] = byte(math.Float32bits(float32(block[0]*inverse) + 3<<22))
		dst[1] = byte(math.Float32bits(float32(block[1]*inverse) + 3<<22))
		dst[2] = byte(math.Float32bits(float32(block[2]*inverse) + 3<<22))
		dst[3] = byte(math.Float32bits(float32(block[3]*inverse) + 3<<22))
	}
	for i, x := range block {
		dst[i] = byte(math.Float32bits(float32(x*inverse) + 3<<22))
	}
}

// getQ8 decodes a row and returns what follows it.
func getQ8(row []float32, src []byte) []byte {
	for len(row) > 0 {
		n := min(q8Block, len(row))
		scale := math.Float32frombits(uint32(binary.LittleEndian.Uint16(src)) << 16)
		bytes := src[2 : 2+n]
		for i, b := range bytes {
			row[i] = scale * float32(int8(b))
		}
		row, src = row[n:], src[2+n:]
	}
	return src
}

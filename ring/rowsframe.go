package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unsafe"
)

// Precision is the element type of rows on the wire.
type Precision uint8

const (
	F32 Precision = 1 // exact
	F16 Precision = 2 // half the bytes; what does not fit is clipped to ±65504
)

func (p Precision) size() int {
	if p == F16 {
		return 2
	}
	return 4
}

// Flags of a row.
const (
	rowWant  = 1 // a token is to be drawn after it
	rowDraft = 2 // its token is a draft; the row before it is in the same Decode
)

const (
	rowsHead    = 8
	segmentSize = 24
)

// segment is the rows of one session in a ROWS frame.
type segment struct {
	session uint64
	epoch   uint32
	pos, n  int
}

// rowsFrame is a ROWS frame; its slices are views of the payload.
type rowsFrame struct {
	precision Precision
	width     int
	segments  []byte
	tokens    []int32
	flags     []byte
	rows      []byte
}

func rowsSize(segments, rows, width int, p Precision) int {
	return rowsHead + segmentSize*segments + 4*rows + (rows+3)&^3 + rows*width*p.size()
}

// mostRows is the rows of one ROWS frame with so many segments.
func mostRows(segments, width int, p Precision) int {
	return (MaxFrame - rowsHead - segmentSize*segments - 4) / (5 + width*p.size())
}

// layRows writes the header of a ROWS frame into payload, which has the size that rowsSize says,
// and returns views of the rest, to be filled.
func layRows(payload []byte, segments, rows, width int, p Precision) rowsFrame {
	binary.LittleEndian.PutUint16(payload, uint16(segments))
	payload[2], payload[3] = byte(p), 0
	binary.LittleEndian.PutUint32(payload[4:], uint32(width))
	f := viewRows(payload, segments, rows, width, p)
	clear(f.flags[rows:cap(f.flags)][:(rows+3)&^3-rows])
	return f
}

func viewRows(payload []byte, segments, rows, width int, p Precision) rowsFrame {
	s := rowsHead + segmentSize*segments
	t := s + 4*rows
	padded := t + (rows+3)&^3
	return rowsFrame{
		precision: p, width: width, segments: payload[rowsHead:s],
		tokens: int32s(payload[s:t]), flags: payload[t : t+rows : padded], rows: payload[padded:],
	}
}

func (f *rowsFrame) setSegment(i int, s segment) {
	le, b := binary.LittleEndian, f.segments[segmentSize*i:]
	le.PutUint64(b, s.session)
	le.PutUint32(b[8:], s.epoch)
	le.PutUint32(b[12:], uint32(s.pos))
	le.PutUint32(b[16:], uint32(s.n))
	le.PutUint32(b[20:], 0)
}

func (f *rowsFrame) count() int { return len(f.segments) / segmentSize }

func (f *rowsFrame) segment(i int) segment {
	le, b := binary.LittleEndian, f.segments[segmentSize*i:]
	return segment{le.Uint64(b), le.Uint32(b[8:]), int(le.Uint32(b[12:])), int(le.Uint32(b[16:]))}
}

// row is the bytes of row i.
func (f *rowsFrame) row(i int) []byte {
	n := f.width * f.precision.size()
	return f.rows[i*n : (i+1)*n]
}

// decodeRows checks a ROWS frame and returns views of payload. The rows themselves are not
// looked at.
func decodeRows(payload []byte, width int) (f rowsFrame, err error) {
	if len(payload) < rowsHead {
		return f, fmt.Errorf("rows frame of %d bytes, want at least %d", len(payload), rowsHead)
	}
	le := binary.LittleEndian
	n, p, w := int(le.Uint16(payload)), Precision(payload[2]), le.Uint32(payload[4:])
	switch {
	case n == 0:
		return f, errors.New("rows frame without a segment")
	case p != F32 && p != F16 || payload[3] != 0:
		return f, fmt.Errorf("rows frame with precision word %#x", le.Uint16(payload[2:]))
	case uint64(w) != uint64(width):
		return f, fmt.Errorf("rows of %d elements, want %d", w, width)
	case len(payload) < rowsHead+segmentSize*n:
		return f, fmt.Errorf("rows frame of %d bytes with %d segments", len(payload), n)
	}
	rows := int64(0) // no overflow: at most 2^16 segments of 2^32 rows
	for i := range n {
		b := payload[rowsHead+segmentSize*i:]
		pos, count := le.Uint32(b[12:]), le.Uint32(b[16:])
		if count == 0 || count > maxContext || pos > maxContext-count || le.Uint32(b[20:]) != 0 {
			return f, fmt.Errorf("segment %d has %d rows at position %d", i, count, pos)
		}
		rows += int64(count)
	}
	if rows > int64(mostRows(n, width, p)) || len(payload) != rowsSize(n, int(rows), width, p) {
		return f, fmt.Errorf("rows frame of %d bytes, its counts say %d rows of %d", len(payload), rows, width)
	}
	f = viewRows(payload, n, int(rows), width, p)
	for i, flags := range f.flags[:cap(f.flags)] {
		if flags > rowWant|rowDraft || i >= len(f.flags) && flags != 0 {
			return f, fmt.Errorf("row %d has flags %#x", i, flags)
		}
	}
	return f, checkTokens(f.tokens)
}

// packRow writes a row in the precision of the wire.
func packRow(dst []byte, row []float32, p Precision) {
	if p == F32 {
		copy(float32s(dst), row)
		return
	}
	for i, v := range row {
		binary.LittleEndian.PutUint16(dst[2*i:], toHalf(v))
	}
}

// unpackRow reads a row and says whether all of it is finite.
func unpackRow(dst []float32, row []byte, p Precision) bool {
	if p == F32 {
		copy(dst, float32s(row))
	} else {
		for i := range dst {
			dst[i] = fromHalf(binary.LittleEndian.Uint16(row[2*i:]))
		}
	}
	for _, v := range dst {
		if !finite(v) {
			return false
		}
	}
	return true
}

// toHalf rounds to the nearest f16, ties to even. Finite values stay finite.
func toHalf(f float32) uint16 {
	bits := math.Float32bits(f)
	sign, abs := uint16(bits>>16)&0x8000, bits&0x7fffffff
	switch {
	case abs > 0x7f800000:
		return sign | 0x7e00
	case abs == 0x7f800000:
		return sign | 0x7c00
	case abs >= 0x477ff000: // above 65519.99 it would round to infinity
		return sign | 0x7bff
	case abs < 0x33000001: // at most half of the smallest subnormal
		return sign
	case abs < 0x38800000: // subnormal
		shift := 126 - abs>>23
		m := abs&0x7fffff | 0x800000
		half := m >> shift
		rest, tie := m&(1<<shift-1), uint32(1)<<(shift-1)
		if rest > tie || rest == tie && half&1 == 1 {
			half++
		}
		return sign | uint16(half)
	}
	abs -= 112 << 23
	half, rest := abs>>13, abs&0x1fff
	if rest > 0x1000 || rest == 0x1000 && half&1 == 1 {
		half++
	}
	return sign | uint16(half)
}

func fromHalf(h uint16) float32 {
	sign, exp, m := uint32(h&0x8000)<<16, uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch exp {
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | m<<13)
	case 0:
		v := float32(m) / (1 << 24)
		return math.Float32frombits(sign | math.Float32bits(v))
	}
	return math.Float32frombits(sign | (exp+112)<<23 | m<<13)
}

// hostIsLittleEndian is what lets the wire's bytes be used in place as numbers.
var hostIsLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

var errBigEndian = errors.New("ring: rows are exchanged in place, which needs a little-endian machine")

// float32s views b, whose length is a multiple of 4 and whose address is aligned, as numbers.
func float32s(b []byte) []float32 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(b)/4)
}

func int32s(b []byte) []int32 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b[0])), len(b)/4)
}

package experts

// The wire format of /kvasir/<net>/experts/1, version 4.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, request id)
// and a payload. Flags are 0. Integers and floats are little-endian. A payload has exactly the
// length that its fields say: trailing bytes are refused, and so is a length above MaxFrame,
// before anything is allocated for it.
//
//	type        from        id        payload
//	1 OFFER     worker      0         CBOR, first frame of a session
//	            worker      above 0   the same as it is from now on, see below
//	2 WANT      dispatcher  0         CBOR, answers OFFER
//	3 PROGRAM   dispatcher  request   number u32, layer u32, program bytes (1 to MaxProgram)
//	4 RESULT    worker      request   row width u32, out width u32; answers PROGRAM
//	5 CALL      dispatcher  request   see below
//	6 REPLY     worker      request   out rows, one per pair, in the order of the pairs, or, for a
//	                                  call for sums, one per row of the call; in the precision of
//	                                  the call, or in f32 where that could not hold them: the
//	                                  length says which
//	7 ERROR     worker      request   code u16, zero u16, UTF-8 text (up to maxText bytes);
//	                                  answers PROGRAM or CALL. Id 0: the session ends
//	8 CANCEL    dispatcher  request   empty; the call need not be answered
//	9 PING      dispatcher  any       empty
//	10 PONG     worker      of PING   empty
//	11 GOAWAY   worker      0         empty; send no more, what was sent is answered
//	12 TAKEN    dispatcher  of OFFER  needed u8: 1 if only this worker computes something that
//	                                  the dispatcher has computed, else 0
//
// The dispatcher uses a request id once per session. It chooses the number of a program, below
// MaxPrograms, which names that program for the rest of the session.
//
//	CALL    0  program number u32
//	        4  precision u8 (of rows and reply): f32 or the one of WANT
//	        5  sums u8: 1 if the reply is to be sums, else 0; zero u16
//	        8  deadline u32, milliseconds from arrival, not 0
//	       12  rows u32
//	       16  pairs u32
//	       20  row width u32, elements
//	       24  row index of each pair, u32
//	           global expert id of each pair, u32
//	           if the reply is to be sums: weight of each pair, f32, finite
//	           rows, one after the other, each encoded as precision.go says
//
// In a call for sums the pairs are in the order of their rows, of which each has one at least. The
// sum of a row is that of what its pairs give, each multiplied by its weight: every product is
// rounded to f32, and so is every sum, one product added after the other in the order of the pairs.
//
// OFFER and WANT are deterministic CBOR maps with integer keys; decoding refuses any other
// encoding of the same value, unknown keys and keys given twice.
//
//	OFFER  1 wire version, 2 model id, 3 slices [[first layer, end, first expert, end]…],
//	       4 most rows per call, 5 most pairs per call, 6 calls outstanding per session,
//	       7 precisions, a byte each, as a byte string, 8 state: 0 serving, 1 leaving
//	WANT   1 wire version, 2 model id, 3 precision
//
// A worker offers f32 and what else it can; WANT names one of these. Whatever the precision, a
// call and its reply are no larger than MaxFrame in f32.
//
// Both sides compare the model ids; where they differ both end the session. A worker may have
// no slices yet. Slices do not overlap.
//
// When its slices or its state change the worker sends another OFFER, with an id above that of
// the one before, in which all else is as it was, and the next one only after TAKEN for this
// one, which the dispatcher may delay. The dispatcher's frames after TAKEN know of the change:
// then the worker may refuse what it no longer offers (error 4), and not before. A leaving
// worker computes what it is sent, and is sent only what no other computes; TAKEN may be
// repeated when "needed" changes.
//
// Version 3 had no sums. Version 2 had no error 10, and rows in f32 only. Version 1 had neither these later offers,
// nor TAKEN, state, workers without slices, nor error 9.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"
	"unsafe"

	"kvasird/p2p"
)

const (
	wireVersion = 4

	// MaxFrame bounds the payload of every frame, in bytes. Larger calls travel in pieces.
	MaxFrame = 8 << 20
	// MaxProgram bounds an encoded expert program, in bytes.
	MaxProgram = 64 << 10
	// MaxPrograms bounds the program numbers of one session.
	MaxPrograms = 4096
	// MaxWidth bounds the elements of a row.
	MaxWidth = 1 << 18

	maxText    = 1 << 10
	maxSlices  = 1024
	maxModelID = 128
	maxControl = 1 << 17 // payload of OFFER and WANT
	maxCount   = 1 << 20 // rows, pairs, layers, experts, outstanding calls
	callHead   = 24
)

const (
	frameOffer uint8 = 1 + iota
	frameWant
	frameProgram
	frameResult
	frameCall
	frameReply
	frameError
	frameCancel
	framePing
	framePong
	frameGoAway
	frameTaken
)

// ModelID names a model by the hash over its manifest, as text.
type ModelID string

// Slice is a range of layers and experts that a worker serves: [FirstLayer, EndLayer) and, in
// each of these layers, the experts [FirstExpert, EndExpert).
type Slice struct {
	_                      struct{} `cbor:",toarray"`
	FirstLayer, EndLayer   int
	FirstExpert, EndExpert int
}

func (s Slice) valid() bool {
	return 0 <= s.FirstLayer && s.FirstLayer < s.EndLayer && s.EndLayer <= maxCount &&
		0 <= s.FirstExpert && s.FirstExpert < s.EndExpert && s.EndExpert <= maxCount
}

func (s Slice) holds(layer int, expert int32) bool {
	return s.FirstLayer <= layer && layer < s.EndLayer &&
		s.FirstExpert <= int(expert) && int(expert) < s.EndExpert
}

// overlaps says whether some expert of some layer is in both.
func (s Slice) overlaps(o Slice) bool {
	return max(s.FirstLayer, o.FirstLayer) < min(s.EndLayer, o.EndLayer) &&
		max(s.FirstExpert, o.FirstExpert) < min(s.EndExpert, o.EndExpert)
}

// String writes "layers 0:2, experts 16:32".
func (s Slice) String() string {
	return fmt.Sprintf("layers %d:%d, experts %d:%d", s.FirstLayer, s.EndLayer, s.FirstExpert, s.EndExpert)
}

// workerState says whether calls may be sent elsewhere.
type workerState uint8

const (
	serving workerState = iota
	leaving             // soon there will be no answers: go elsewhere where that is possible
)

// offer is what a worker serves and how much of it at once.
type offer struct {
	Version    uint        `cbor:"1,keyasint"`
	Model      ModelID     `cbor:"2,keyasint"`
	Slices     []Slice     `cbor:"3,keyasint"`
	MaxRows    int         `cbor:"4,keyasint"`
	MaxPairs   int         `cbor:"5,keyasint"`
	Queue      int         `cbor:"6,keyasint"`
	Precisions []Precision `cbor:"7,keyasint"`
	State      workerState `cbor:"8,keyasint"`
}

// want is what the dispatcher came for.
type want struct {
	Version   uint      `cbor:"1,keyasint"`
	Model     ModelID   `cbor:"2,keyasint"`
	Precision Precision `cbor:"3,keyasint"`
}

var encodeControl, decodeControl = p2p.ControlCodec(maxControl, maxSlices, 16)

func (id ModelID) validate() error {
	if id == "" || len(id) > maxModelID || !utf8.ValidString(string(id)) {
		return fmt.Errorf("model id %.32q: want 1 to %d bytes of text", string(id), maxModelID)
	}
	return nil
}

func decodeOffer(payload []byte) (o offer, err error) {
	if err := decodeControl(payload, &o); err != nil {
		return o, fmt.Errorf("offer: %w", err)
	}
	if o.Version != wireVersion {
		return o, fmt.Errorf("offer: wire version %d, this side speaks %d", o.Version, wireVersion)
	}
	if err := o.validate(); err != nil {
		return o, fmt.Errorf("offer: %w", err)
	}
	return o, nil
}

func (o *offer) validate() error {
	if err := o.Model.validate(); err != nil {
		return err
	}
	if err := checkSlices(o.Slices); err != nil {
		return err
	}
	if o.State > leaving {
		return fmt.Errorf("state %d, at most %d", o.State, leaving)
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"rows per call", o.MaxRows}, {"pairs per call", o.MaxPairs}, {"outstanding calls", o.Queue}} {
		if n.value < 1 || n.value > maxCount {
			return fmt.Errorf("%s is %d, want 1 to %d", n.name, n.value, maxCount)
		}
	}
	if !slices.Contains(o.Precisions, F32) {
		return errors.New("f32 is not among the precisions")
	}
	return nil
}

func checkSlices(list []Slice) error {
	if len(list) > maxSlices {
		return fmt.Errorf("%d slices, at most %d", len(list), maxSlices)
	}
	for i, s := range list {
		if !s.valid() {
			return fmt.Errorf("slice of %v is empty or out of bounds", s)
		}
		if j := slices.IndexFunc(list[:i], s.overlaps); j >= 0 {
			return fmt.Errorf("slices of %v and of %v overlap", list[j], s)
		}
	}
	return nil
}

func decodeTaken(payload []byte) (needed bool, err error) {
	if len(payload) != 1 || payload[0] > 1 {
		return false, fmt.Errorf("an offer is taken with %x, want 00 or 01", payload[:min(len(payload), 8)])
	}
	return payload[0] == 1, nil
}

func decodeWant(payload []byte) (w want, err error) {
	if err := decodeControl(payload, &w); err != nil {
		return w, fmt.Errorf("want: %w", err)
	}
	if w.Version != wireVersion {
		return w, fmt.Errorf("want: wire version %d, this side speaks %d", w.Version, wireVersion)
	}
	if err := w.Model.validate(); err != nil {
		return w, fmt.Errorf("want: %w", err)
	}
	if !slices.Contains(precisions, w.Precision) {
		return w, fmt.Errorf("want: %v is not offered", w.Precision)
	}
	return w, nil
}

func putProgram(dst []byte, number uint32, layer int, program []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, number)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(layer))
	return append(dst, program...)
}

func decodeProgram(payload []byte) (number uint32, layer int, program []byte, err error) {
	if len(payload) <= 8 || len(payload) > 8+MaxProgram {
		return 0, 0, nil, fmt.Errorf("program frame of %d bytes, want 9 to %d", len(payload), 8+MaxProgram)
	}
	number = binary.LittleEndian.Uint32(payload)
	l := binary.LittleEndian.Uint32(payload[4:])
	if number >= MaxPrograms {
		return 0, 0, nil, fmt.Errorf("program number %d, at most %d", number, MaxPrograms-1)
	}
	if l >= maxCount {
		return 0, 0, nil, fmt.Errorf("program for layer %d, at most %d", l, maxCount-1)
	}
	return number, int(l), payload[8:], nil
}

func putResult(dst []byte, rowWidth, outWidth int) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(rowWidth))
	return binary.LittleEndian.AppendUint32(dst, uint32(outWidth))
}

func decodeResult(payload []byte) (rowWidth, outWidth int, err error) {
	if len(payload) != 8 {
		return 0, 0, fmt.Errorf("program result of %d bytes, want 8", len(payload))
	}
	r, o := binary.LittleEndian.Uint32(payload), binary.LittleEndian.Uint32(payload[4:])
	if r == 0 || o == 0 || r > MaxWidth || o > MaxWidth {
		return 0, 0, fmt.Errorf("program result with widths %d and %d, want 1 to %d", r, o, MaxWidth)
	}
	return int(r), int(o), nil
}

func putError(dst []byte, code Code, text string) []byte {
	text = text[:min(len(text), maxText)]
	for !utf8.ValidString(text) && len(text) > 0 { // cut inside a rune
		text = text[:len(text)-1]
	}
	dst = binary.LittleEndian.AppendUint16(dst, uint16(code))
	return append(append(dst, 0, 0), text...)
}

func decodeError(payload []byte) (*RemoteError, error) {
	if len(payload) < 4 || len(payload) > 4+maxText {
		return nil, fmt.Errorf("error frame of %d bytes, want 4 to %d", len(payload), 4+maxText)
	}
	code := Code(binary.LittleEndian.Uint16(payload))
	if payload[2]|payload[3] != 0 || code == 0 || code > lastCode || !utf8.Valid(payload[4:]) {
		return nil, fmt.Errorf("error frame with code %d is malformed", code)
	}
	return &RemoteError{Code: code, Text: string(payload[4:])}, nil
}

// callFrame is a CALL; its slices are views of the payload that it was laid out in.
type callFrame struct {
	program     uint32
	deadline    uint32 // milliseconds
	precision   Precision
	rows, width int
	sums        bool
	row, expert []int32
	weight      []float32 // of a call for sums
	data        []byte    // the rows, encoded
}

// callSize is the payload length of a call.
func callSize(p Precision, rows, pairs, width int, sums bool) int {
	return callHead + pairBytes(sums)*pairs + p.size(rows, width)
}

// pairBytes is the bytes of a call for each of its pairs.
func pairBytes(sums bool) int {
	if sums {
		return 12
	}
	return 8
}

// size is the call's payload length in f32.
func (c *callFrame) size() int { return callSize(F32, c.rows, len(c.row), c.width, c.sums) }

// appendRows decodes the rows to the end of dst.
func (c *callFrame) appendRows(dst []float32) []float32 {
	from := len(dst)
	dst = slices.Grow(dst, c.rows*c.width)[:from+c.rows*c.width]
	c.precision.get(dst[from:], c.data, c.width)
	return dst
}

// layCall writes the header of a call into payload, which has the size that callSize says, and
// returns views of the rest, to be filled. Of c the fields up to sums are given.
func layCall(payload []byte, c callFrame, pairs int) callFrame {
	le := binary.LittleEndian
	le.PutUint32(payload, c.program)
	le.PutUint32(payload[4:], uint32(c.precision))
	if c.sums {
		payload[5] = 1
	}
	le.PutUint32(payload[8:], c.deadline)
	le.PutUint32(payload[12:], uint32(c.rows))
	le.PutUint32(payload[16:], uint32(pairs))
	le.PutUint32(payload[20:], uint32(c.width))
	c.view(payload, pairs)
	return c
}

func (c *callFrame) view(payload []byte, pairs int) {
	data := callHead + pairBytes(c.sums)*pairs
	ids := int32s(payload[callHead : callHead+8*pairs])
	c.row, c.expert = ids[:pairs:pairs], ids[pairs:]
	c.weight = float32s(payload[callHead+8*pairs : data])
	c.data = payload[data:]
}

// decodeCall checks a call against the limits of the receiver and returns views of payload.
// Its rows are in f32 or in what was agreed. Expert ids are only known to be in [0, maxCount).
func decodeCall(payload []byte, agreed Precision, maxRows, maxPairs int) (c callFrame, err error) {
	if len(payload) < callHead {
		return c, fmt.Errorf("call of %d bytes, want at least %d", len(payload), callHead)
	}
	le := binary.LittleEndian
	sums := payload[5] == 1
	precision := le.Uint32(payload[4:])
	if sums {
		precision &^= 1 << 8
	}
	program, deadline := le.Uint32(payload), le.Uint32(payload[8:])
	rows, pairs, width := le.Uint32(payload[12:]), le.Uint32(payload[16:]), le.Uint32(payload[20:])
	switch {
	case precision != uint32(F32) && precision != uint32(agreed):
		return c, fmt.Errorf("call with precision word %#x, want %#x or %#x", precision, uint32(F32), uint32(agreed))
	case program >= MaxPrograms:
		return c, fmt.Errorf("call of program %d, at most %d", program, MaxPrograms-1)
	case deadline == 0:
		return c, errors.New("call without a deadline")
	case rows == 0 || uint64(rows) > uint64(maxRows):
		return c, fmt.Errorf("call with %d rows, want 1 to %d", rows, maxRows)
	case pairs == 0 || uint64(pairs) > uint64(maxPairs):
		return c, fmt.Errorf("call with %d pairs, want 1 to %d", pairs, maxPairs)
	case width == 0 || width > MaxWidth:
		return c, fmt.Errorf("call with rows of %d, want 1 to %d", width, MaxWidth)
	}
	c = callFrame{program: program, deadline: deadline, precision: Precision(precision), rows: int(rows), width: int(width), sums: sums}
	// No overflow: each factor is at most 2^20.
	if n := callHead + int64(pairBytes(sums))*int64(pairs) + 4*int64(rows)*int64(width); n > MaxFrame {
		return c, fmt.Errorf("call of %d bytes in f32, at most %d", n, MaxFrame)
	}
	if want := callSize(c.precision, c.rows, int(pairs), c.width, sums); len(payload) != want {
		return c, fmt.Errorf("call of %d bytes, its counts say %d", len(payload), want)
	}
	c.view(payload, int(pairs))
	return c, c.checkData()
}

// checkData checks what the pairs name, and that rows which are not f32 are finite: their
// sender could not have encoded others.
func (c *callFrame) checkData() error {
	for i, r := range c.row {
		if uint32(r) >= uint32(c.rows) {
			return fmt.Errorf("pair %d names row %d of %d", i, uint32(r), c.rows)
		}
		if uint32(c.expert[i]) >= maxCount {
			return fmt.Errorf("pair %d names expert %d, at most %d", i, uint32(c.expert[i]), maxCount-1)
		}
	}
	if c.precision != F32 && !c.precision.finite(c.data, c.width) {
		return fmt.Errorf("call with %v rows that are not finite", c.precision)
	}
	if c.sums {
		return c.checkSums()
	}
	return nil
}

// checkSums checks what only a call for sums must have.
func (c *callFrame) checkSums() error {
	before := int32(-1)
	for i, r := range c.row {
		if r != before && r != before+1 {
			return fmt.Errorf("call for sums: pair %d names row %d, after row %d", i, r, before)
		}
		before = r
	}
	if int(before) != c.rows-1 {
		return fmt.Errorf("call for sums: %d rows, of which the last that a pair names is %d", c.rows, before)
	}
	if maxAbs(c.weight) >= infinite {
		return errors.New("call for sums with weights that are not finite")
	}
	return nil
}

// hostIsLittleEndian is what lets the wire's bytes be used in place as numbers.
var hostIsLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

var errBigEndian = errors.New("experts: activations are exchanged in place, which needs a little-endian machine")

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

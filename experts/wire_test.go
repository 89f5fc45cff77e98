package experts

import (
	"encoding/hex"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func testOffer() offer {
	return offer{
		Version: 4, Model: "m", Slices: []Slice{{FirstLayer: 0, EndLayer: 2, FirstExpert: 16, EndExpert: 300}},
		MaxRows: 4096, MaxPairs: 10, Queue: 64, Precisions: []Precision{F32},
	}
}

// testPayload is a call of program 7 with two pairs over one row of two elements.
func testPayload() []byte { return testPayloadAs(F32) }

func testPayloadAs(p Precision) []byte {
	b := make([]byte, callSize(p, 1, 2, 2, false))
	c := layCall(b, callFrame{program: 7, deadline: 250, precision: p, rows: 1, width: 2}, 2)
	copy(c.row, []int32{0, 0})
	copy(c.expert, []int32{5, 258})
	p.put(c.data, []float32{1, -2}, 2)
	return b
}

// testSums is a call for sums of one row each, of the same numbers in f32.
func testSums() []byte {
	b := make([]byte, callSize(F32, 2, 3, 1, true))
	c := layCall(b, callFrame{program: 7, deadline: 250, precision: F32, rows: 2, width: 1, sums: true}, 3)
	copy(c.row, []int32{0, 0, 1})
	copy(c.expert, []int32{5, 258, 5})
	copy(c.weight, []float32{1, 2, -2})
	copy(float32s(c.data), []float32{1, -2})
	return b
}

func TestGoldenBytes(t *testing.T) {
	tests := []struct {
		name string
		got  []byte
		want string
	}{
		{"offer", encodeControl(testOffer()), "a8 0104 02616d 0381840002101901 2c 04191000 050a 061840 074101 0800"},
		{"want", encodeControl(want{4, "m", F32}), "a3 0104 02616d 0301"},
		{"program", putProgram(nil, 3, 48, []byte{0xaa, 0xbb}), "03000000 30000000 aabb"},
		{"result", putResult(nil, 3072, 1024), "000c0000 00040000"},
		{"error", putError(nil, CodeBusy, "full"), "0200 0000 66756c6c"},
		{"call", testPayload(), "07000000 01000000 fa000000 01000000 02000000 02000000" +
			"00000000 00000000 05000000 02010000 0000803f 000000c0"},
		{"call for sums", testSums(), "07000000 01010000 fa000000 02000000 03000000 01000000" +
			"00000000 00000000 01000000 05000000 02010000 05000000 0000803f 00000040 000000c0 0000803f 000000c0"},
		{"call in q8", testPayloadAs(Q8), "07000000 04000000 fa000000 01000000 02000000 02000000" +
			"00000000 00000000 05000000 02010000 823c 3f 82"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got, want := hex.EncodeToString(test.got), strings.ReplaceAll(test.want, " ", ""); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

func TestFrameTypes(t *testing.T) {
	got := []uint8{frameOffer, frameWant, frameProgram, frameResult, frameCall, frameReply, frameError,
		frameCancel, framePing, framePong, frameGoAway, frameTaken}
	for i, v := range got {
		if int(v) != i+1 {
			t.Errorf("frame type %d has the number %d", i+1, v)
		}
	}
	codes := []Code{CodeProtocol, CodeBusy, CodeExpired, CodeExpert, CodeProgram, CodeLimit, CodeKernel, CodeClosing, CodeRights}
	for i, c := range codes {
		if int(c) != i+1 || c.String() == "" {
			t.Errorf("code %d has the number %d and the name %q", i+1, c, c)
		}
	}
}

func TestRoundTrips(t *testing.T) {
	o, err := decodeOffer(encodeControl(testOffer()))
	if err != nil || !reflect.DeepEqual(o, testOffer()) {
		t.Errorf("offer: got %+v, %v", o, err)
	}
	w, err := decodeWant(encodeControl(want{4, "m", F32}))
	if err != nil || w != (want{4, "m", F32}) {
		t.Errorf("want: got %+v, %v", w, err)
	}
	n, layer, program, err := decodeProgram(putProgram(nil, 3, 48, []byte("abc")))
	if err != nil || n != 3 || layer != 48 || string(program) != "abc" {
		t.Errorf("program: got %d, %d, %q, %v", n, layer, program, err)
	}
	e, err := decodeError(putError(nil, CodeKernel, strings.Repeat("é", maxText)))
	if err != nil || e.Code != CodeKernel || e.Text != strings.Repeat("é", maxText/2) {
		t.Errorf("error: got %v, %v", e, err)
	}
	for _, p := range []Precision{F32, F16, BF16} { // which hold these numbers exactly
		c, err := decodeCall(testPayloadAs(p), p, 1, 2)
		if err != nil || c.program != 7 || c.deadline != 250 || c.width != 2 || c.precision != p ||
			!slices.Equal(c.row, []int32{0, 0}) || !slices.Equal(c.expert, []int32{5, 258}) || !slices.Equal(c.appendRows(nil), []float32{1, -2}) {
			t.Errorf("call: got %+v, %v", c, err)
		}
	}
}

// TestRefusals has one vector per reason to refuse.
func TestRefusals(t *testing.T) {
	offerWith := func(change func(*offer)) []byte {
		o := testOffer()
		change(&o)
		return encodeControl(o)
	}
	callWith := func(at int, bytes ...byte) []byte {
		b := testPayload()
		copy(b[at:], bytes)
		return b
	}
	offerOf := func(b []byte) error { _, err := decodeOffer(b); return err }
	wantOf := func(b []byte) error { _, err := decodeWant(b); return err }
	takenOf := func(b []byte) error { _, err := decodeTaken(b); return err }
	programOf := func(b []byte) error { _, _, _, err := decodeProgram(b); return err }
	resultOf := func(b []byte) error { _, _, err := decodeResult(b); return err }
	errorOf := func(b []byte) error { _, err := decodeError(b); return err }
	callOf := func(b []byte) error { _, err := decodeCall(b, F16, 1, 2); return err }
	sumsWith := func(at int, bytes ...byte) []byte {
		b := testSums()
		copy(b[at:], bytes)
		return b
	}
	sumsOf := func(b []byte) error { _, err := decodeCall(b, F16, 2, 3); return err }
	max32 := []byte{0xff, 0xff, 0xff, 0xff}
	tests := []struct {
		name    string
		decode  func([]byte) error
		payload []byte
		want    string
	}{
		{"offer: not cbor", offerOf, []byte{0xff}, "offer"},
		{"offer: trailing bytes", offerOf, append(encodeControl(testOffer()), 0), "extraneous"},
		{"offer: too long", offerOf, make([]byte, maxControl+1), "at most"},
		{"offer: version", offerOf, offerWith(func(o *offer) { o.Version = 1 }), "wire version 1"},
		{"offer: no model", offerOf, offerWith(func(o *offer) { o.Model = "" }), "model id"},
		{"offer: long model", offerOf, offerWith(func(o *offer) { o.Model = ModelID(strings.Repeat("x", 129)) }), "model id"},
		{"offer: overlap", offerOf, offerWith(func(o *offer) {
			o.Slices = append(o.Slices, Slice{FirstLayer: 1, EndLayer: 3, FirstExpert: 299, EndExpert: 301})
		}), "and of layers 1:3, experts 299:301 overlap"},
		{"offer: state", offerOf, offerWith(func(o *offer) { o.State = 2 }), "state 2"},
		{"taken: empty", takenOf, nil, "want 00 or 01"},
		{"taken: long", takenOf, []byte{0, 0}, "want 00 or 01"},
		{"taken: neither", takenOf, []byte{2}, "want 00 or 01"},
		{"offer: too many slices", offerOf, offerWith(func(o *offer) { o.Slices = make([]Slice, maxSlices+1) }), "max number of elements"},
		{"offer: empty slice", offerOf, offerWith(func(o *offer) { o.Slices[0].EndExpert = 16 }), "empty or out of bounds"},
		{"offer: negative slice", offerOf, offerWith(func(o *offer) { o.Slices[0].FirstLayer = -1 }), "out of bounds"},
		{"offer: huge slice", offerOf, offerWith(func(o *offer) { o.Slices[0].EndExpert = maxCount + 1 }), "out of bounds"},
		{"offer: no rows", offerOf, offerWith(func(o *offer) { o.MaxRows = 0 }), "rows per call"},
		{"offer: huge pairs", offerOf, offerWith(func(o *offer) { o.MaxPairs = maxCount + 1 }), "pairs per call"},
		{"offer: negative queue", offerOf, offerWith(func(o *offer) { o.Queue = -1 }), "outstanding calls"},
		{"offer: no f32", offerOf, offerWith(func(o *offer) { o.Precisions = []Precision{2} }), "f32"},
		{"offer: unknown key", offerOf, encodeControl(map[int]int{1: 1, 99: 1}), "unknown field"},
		{"want: key twice", wantOf, []byte{0xa4, 1, 2, 1, 2, 2, 0x61, 'm', 3, 1}, "duplicate"},
		{"want: keys unordered", wantOf, []byte{0xa3, 2, 0x61, 'm', 1, 1, 3, 1}, "deterministic"},
		{"want: long integer", wantOf, []byte{0xa3, 1, 0x18, 1, 2, 0x61, 'm', 3, 1}, "deterministic"},
		{"want: indefinite length", wantOf, []byte{0xbf, 1, 1, 2, 0x61, 'm', 3, 1, 0xff}, "indefinite"},
		{"want: version", wantOf, encodeControl(want{7, "m", F32}), "wire version 7"},
		{"want: precision", wantOf, encodeControl(want{4, "m", 5}), "precision 5"},
		{"want: no model", wantOf, encodeControl(want{4, "", F32}), "model id"},
		{"program: empty", programOf, putProgram(nil, 0, 0, nil), "want 9"},
		{"program: too long", programOf, putProgram(nil, 0, 0, make([]byte, MaxProgram+1)), "want 9"},
		{"program: number", programOf, putProgram(nil, MaxPrograms, 0, []byte{1}), "program number"},
		{"program: layer", programOf, putProgram(nil, 0, maxCount, []byte{1}), "for layer"},
		{"result: short", resultOf, make([]byte, 7), "want 8"},
		{"result: no width", resultOf, putResult(nil, 0, 8), "widths"},
		{"result: huge width", resultOf, putResult(nil, 8, MaxWidth+1), "widths"},
		{"error: short", errorOf, make([]byte, 3), "want 4"},
		{"error: long", errorOf, make([]byte, 5+maxText), "want 4"},
		{"error: code 0", errorOf, make([]byte, 4), "malformed"},
		{"error: unknown code", errorOf, []byte{99, 0, 0, 0}, "malformed"},
		{"error: padding", errorOf, []byte{1, 0, 1, 0}, "malformed"},
		{"error: not utf-8", errorOf, []byte{1, 0, 0, 0, 0xff}, "malformed"},
		{"call: short", callOf, testPayload()[:callHead-1], "at least"},
		{"call: program", callOf, callWith(0, max32...), "call of program"},
		{"call: precision that was not agreed", callOf, testPayloadAs(BF16), "precision word 0x3, want 0x1 or 0x2"},
		{"call: precision 0", callOf, callWith(4, 0), "precision word 0x0"},
		{"call: f16 of the size of f32", callOf, callWith(4, 2), "its counts say"},
		{"call: not finite", callOf, append(testPayloadAs(F16)[:callHead+16], 0, 0x3c, 0, 0x7c), "f16 rows that are not finite"},
		{"call: padding", callOf, callWith(6, 1), "precision"},
		{"call: no deadline", callOf, callWith(8, 0, 0, 0, 0), "deadline"},
		{"call: no rows", callOf, callWith(12, 0), "0 rows"},
		{"call: rows beyond the limit", callOf, callWith(12, 2), "2 rows"},
		{"call: 4 G rows", callOf, callWith(12, max32...), "rows"},
		{"call: no pairs", callOf, callWith(16, 0), "0 pairs"},
		{"call: pairs beyond the limit", callOf, callWith(16, 3), "3 pairs"},
		{"call: no width", callOf, callWith(20, 0), "rows of 0"},
		{"call: huge width", callOf, callWith(20, max32...), "rows of"},
		{"call: truncated", callOf, testPayload()[:callSize(F32, 1, 2, 2, false)-4], "its counts say"},
		{"call: trailing bytes", callOf, append(testPayload(), 0, 0, 0, 0), "its counts say"},
		{"call: row out of bounds", callOf, callWith(24, 1), "names row 1"},
		{"call: negative row", callOf, callWith(24, max32...), "names row"},
		{"call: neither sums nor rows", callOf, callWith(5, 2), "precision word 0x201"},
		{"call: sums without weights", callOf, callWith(5, 1), "its counts say"},
		{"sums: no pair of the first row", sumsOf, sumsWith(24, 1, 0, 0, 0, 1), "pair 0 names row 1, after row -1"},
		{"sums: no pair of the last row", sumsOf, sumsWith(32, 0), "2 rows, of which the last that a pair names is 0"},
		{"sums: rows out of order", sumsOf, sumsWith(28, 1, 0, 0, 0, 0), "names row 0, after row 1"},
		{"sums: infinite weight", sumsOf, sumsWith(48, 0, 0, 0x80, 0xff), "weights that are not finite"},
		{"sums: weight that is no number", sumsOf, sumsWith(56, 1, 0, 0x80, 0x7f), "weights that are not finite"},
		{"call: expert out of bounds", callOf, callWith(32, max32...), "names expert"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := test.decode(test.payload)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

// TestCountsDoNotOverflow has counts whose sizes wrap around in 32 bits.
func TestCountsDoNotOverflow(t *testing.T) {
	b := make([]byte, callHead)
	for at, v := range map[int]uint32{4: 1, 8: 1, 12: 1 << 20, 16: 1 << 20, 20: MaxWidth} {
		b[at], b[at+1], b[at+2], b[at+3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
	}
	if _, err := decodeCall(b, F32, maxCount, maxCount); err == nil || !strings.Contains(err.Error(), "in f32, at most") {
		t.Errorf("got %v", err)
	}
}

func TestFinite(t *testing.T) {
	values := map[float32]bool{
		0: true, float32(math.Copysign(0, -1)): true, 1: true, -math.MaxFloat32: true, math.MaxFloat32: true,
		math.SmallestNonzeroFloat32: true, float32(math.Inf(1)): false, float32(math.Inf(-1)): false,
	}
	for v, want := range values {
		checkFinite(t, v, want)
	}
	checkFinite(t, float32(math.NaN()), false)
	checkFinite(t, math.Float32frombits(0xff800001), false)
}

// checkFinite puts a value in every place of buffers of several lengths.
func checkFinite(t *testing.T, v float32, want bool) {
	t.Helper()
	for n := 1; n <= 19; n++ {
		for at := range n {
			b := make([]byte, 4*n)
			f := float32s(b)
			for i := range f {
				f[i] = -math.MaxFloat32
			}
			f[at] = v
			if got := finite(b); got != want {
				t.Errorf("%v at %d of %d: finite is %v", v, at, n, got)
			}
		}
	}
}

func TestMissingErrorText(t *testing.T) {
	err := error(&MissingError{Layer: 3, Experts: []int{1, 2, 3, 7, 9, 10}, Reasons: []string{"peer a: gone"}})
	if want := "layer 3: no worker for experts 1-3, 7, 9-10: peer a: gone"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
	long := &MissingError{}
	for i := range 40 {
		long.Experts = append(long.Experts, 2*i)
	}
	if !strings.HasSuffix(long.Error(), "14 and 32 more: no peer offers them") {
		t.Errorf("got %q", long)
	}
	if !errors.Is(violation(errors.New("x")), ErrProtocol) {
		t.Error("a violation is not ErrProtocol")
	}
}

func FuzzOffer(f *testing.F) {
	f.Add(encodeControl(testOffer()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, err := decodeOffer(b); err == nil && string(encodeControl(o)) != string(b) {
			t.Errorf("%x decodes to %+v, which encodes differently", b, o)
		}
	})
}

func FuzzWant(f *testing.F) {
	f.Add(encodeControl(want{4, "m", F32}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if w, err := decodeWant(b); err == nil && string(encodeControl(w)) != string(b) {
			t.Errorf("%x decodes to %+v, which encodes differently", b, w)
		}
	})
}

func FuzzCall(f *testing.F) {
	for _, p := range precisions {
		f.Add(testPayloadAs(p), uint8(p), uint16(4), uint16(4))
	}
	f.Add(testSums(), uint8(F32), uint16(4), uint16(4))
	f.Fuzz(func(t *testing.T, b []byte, agreed uint8, mostRows, mostPairs uint16) {
		p, maxRows, maxPairs := Precision(agreed), int(mostRows), int(mostPairs)
		if !slices.Contains(precisions, p) {
			return
		}
		c, err := decodeCall(slices.Clone(b), p, maxRows, maxPairs)
		if err != nil {
			return
		}
		if c.rows > maxRows || len(c.row) > maxPairs || len(c.row) != len(c.expert) || c.size() > MaxFrame {
			t.Fatalf("accepted %d rows, %d pairs, %d bytes", c.rows, len(c.row), c.size())
		}
		if got := c.appendRows(nil); len(got) != c.rows*c.width {
			t.Fatalf("%d elements of %d rows of %d", len(got), c.rows, c.width)
		}
		if out := make([]float32, len(c.row)); c.sums && len(c.sumRows(out, 1)) != c.rows {
			t.Fatalf("not %d sums", c.rows)
		}
		again := make([]byte, callSize(c.precision, c.rows, len(c.row), c.width, c.sums))
		d := layCall(again, c, len(c.row))
		copy(d.data, c.data)
		copy(d.row, c.row)
		copy(d.expert, c.expert)
		copy(d.weight, c.weight)
		if string(again) != string(b) {
			t.Error("encodes differently")
		}
	})
}

func FuzzSmallFrames(f *testing.F) {
	f.Add(putProgram(nil, 3, 4, []byte("p")))
	f.Add(putResult(nil, 3, 4))
	f.Add(putError(nil, CodeBusy, "x"))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, layer, program, err := decodeProgram(b); err == nil && string(putProgram(nil, n, layer, program)) != string(b) {
			t.Error("program encodes differently")
		}
		if r, o, err := decodeResult(b); err == nil && string(putResult(nil, r, o)) != string(b) {
			t.Error("result encodes differently")
		}
		if e, err := decodeError(b); err == nil && string(putError(nil, e.Code, e.Text)) != string(b) {
			t.Error("error encodes differently")
		}
		if needed, err := decodeTaken(b); err == nil && (len(b) != 1 || needed != (b[0] == 1)) {
			t.Error("taken decodes wrongly")
		}
	})
}
